//! A coordinator that plays a job, to look at `baton top` and the other commands without one:
//!
//! ```text
//! cargo run -p baton-cli --example fake_coordinator -- 127.0.0.1:29700 [RANKS]
//! baton top --coordinator http://127.0.0.1:29700
//! ```

#![allow(clippy::unwrap_used, reason = "it serves nobody but developers")]

#[allow(dead_code, reason = "tests need more of it")]
#[path = "../tests/fake/mod.rs"]
mod fake;
#[allow(dead_code, reason = "its statuses are many, and each file needs some")]
#[path = "../src/testing.rs"]
mod testing;

use std::{
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use baton_proto::v1::{
    PauseStatus, Step, StreamLogsResponse, StreamMetricsResponse, get_status_response::Phase,
    stream_metrics_response::Metrics,
};
use fake::{Fake, Told};

const TOTAL: u64 = 352;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:29700".to_owned());
    let ranks = arguments.next().map_or(3, |ranks| ranks.parse().unwrap());
    let mut status = testing::on_gpus();
    if ranks != 3 {
        status = testing::many(ranks);
    }
    let events = testing::events();
    let told = Told { status, events, lines: testing::lines(), ..Told::default() };
    let fake = Fake::start_at(address.parse().unwrap(), told);
    let mut step = 0;
    loop {
        thread::sleep(Duration::from_millis(200));
        step = (step + 1) % TOTAL;
        fake.tell(|told| play(told, step));
    }
}

/// One more update, unless somebody wants it to stand still.
fn play(told: &mut Told, step: u64) {
    let unix_millis = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
    let wish = told.asked.iter().rev().find(|asked| !asked.starts_with("checkpoint"));
    if wish.is_some_and(|wish| wish.starts_with("pause")) {
        told.status.phase = Phase::Paused.into();
        let seconds = told.status.pause.as_ref().map_or(0.0, |pause| pause.seconds + 0.2);
        told.status.pause = Some(PauseStatus { reason: "`baton top`".to_owned(), seconds });
        return;
    }
    told.status.phase = Phase::Training.into();
    told.status.pause = None;
    let share = step as f64 / TOTAL as f64;
    let noise = (step as f64 * 1.7).sin() * 0.05;
    let latest = Step {
        step,
        epoch: (step / 22) as u32,
        step_of_epoch: step % 22,
        loss: 2.3 * (-3.0 * share).exp() + noise.abs(),
        top1: (1.0 - (-3.0 * share).exp() + noise).clamp(0.0, 1.0),
        lr: 0.001 * (1.0 - share),
        samples_per_second: 400.0 + 200.0 * noise,
        metrics: Vec::new(),
        ..told.status.latest.clone().unwrap()
    };
    told.status.latest = Some(latest.clone());
    let mut tell = |metrics| {
        let point = StreamMetricsResponse { unix_millis, generation: 2, metrics: Some(metrics) };
        told.points.push(point);
    };
    match step {
        0 => tell(Metrics::BeganAt(0)),
        120 => tell(Metrics::BeganAt(119)),
        _ => {}
    }
    tell(Metrics::Step(latest.clone()));
    if step.is_multiple_of(22) {
        let mut found = told.status.evaluation.clone().unwrap();
        found.step = step;
        let accuracy = found.accuracy.as_mut().unwrap();
        (accuracy.top1, accuracy.metrics) = (latest.top1 * 0.95, Vec::new());
        told.points.push(StreamMetricsResponse {
            unix_millis,
            generation: 2,
            metrics: Some(Metrics::Evaluation(found)),
        });
    }
    let rank = (step % told.status.ranks.len() as u64) as u32;
    told.lines.push(StreamLogsResponse {
        unix_millis,
        node_id: "a".to_owned(),
        local_rank: Some(rank),
        rank: Some(rank),
        line: format!(
            "\x1b[2m2026-11-22T04:00:00Z\x1b[0m  INFO step{{step={step}}}: loss {:.4}",
            latest.loss
        ),
        left_out: 0,
    });
}
