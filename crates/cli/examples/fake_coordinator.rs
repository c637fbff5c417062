//! A coordinator with a simulated job, to try `baton top` and the other commands:
//!
//! ```text
//! cargo run -p baton-cli --example fake_coordinator -- 127.0.0.1:29700 [RANKS]
//! baton top --coordinator http://127.0.0.1:29700
//! ```

#![allow(clippy::unwrap_used, reason = "a tool for developers only")]

#[allow(dead_code, reason = "only the tests use all of it")]
#[path = "../tests/fake/mod.rs"]
mod fake;
#[allow(dead_code, reason = "each file uses only some of the statuses")]
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
use fake::{FakeCoordinator, FakeState};

const TOTAL_STEPS: u64 = 352;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:29700".to_owned());
    let ranks = arguments.next().map_or(3, |ranks| ranks.parse().unwrap());
    let mut status = testing::on_gpus();
    if ranks != 3 {
        status = testing::many(ranks);
    }
    let events = testing::events();
    let state = FakeState { status, events, lines: testing::lines(), ..FakeState::default() };
    let fake = FakeCoordinator::start_at(address.parse().unwrap(), state);
    let mut step = 0;
    loop {
        thread::sleep(Duration::from_millis(200));
        step = (step + 1) % TOTAL_STEPS;
        fake.update(|state| simulate(state, step));
    }
}

/// Simulates one step, unless the job is paused.
fn simulate(state: &mut FakeState, step: u64) {
    let unix_millis = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
    let request = state.requests.iter().rev().find(|request| !request.starts_with("checkpoint"));
    if request.is_some_and(|request| request.starts_with("pause")) {
        state.status.phase = Phase::Paused.into();
        let seconds = state.status.pause.as_ref().map_or(0.0, |pause| pause.seconds + 0.2);
        state.status.pause = Some(PauseStatus { reason: "`baton top`".to_owned(), seconds });
        return;
    }
    state.status.phase = Phase::Training.into();
    state.status.pause = None;
    let share = step as f64 / TOTAL_STEPS as f64;
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
        ..state.status.latest.clone().unwrap()
    };
    state.status.latest = Some(latest.clone());
    let mut add = |metrics| {
        let point = StreamMetricsResponse {
            unix_millis,
            generation: 2,
            metrics: Some(metrics),
            ..Default::default()
        };
        state.points.push(point);
    };
    match step {
        0 => add(Metrics::BeganAt(0)),
        120 => add(Metrics::BeganAt(119)),
        _ => {}
    }
    add(Metrics::Step(latest.clone()));
    if step.is_multiple_of(22) {
        let mut evaluated = state.status.evaluation.clone().unwrap();
        evaluated.step = step;
        let accuracy = evaluated.accuracy.as_mut().unwrap();
        (accuracy.top1, accuracy.metrics) = (latest.top1 * 0.95, Vec::new());
        state.points.push(StreamMetricsResponse {
            unix_millis,
            generation: 2,
            metrics: Some(Metrics::Evaluation(evaluated)),
            ..Default::default()
        });
    }
    let rank = (step % state.status.ranks.len() as u64) as u32;
    state.lines.push(StreamLogsResponse {
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
