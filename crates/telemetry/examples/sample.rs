//! Writes the metrics of a sample job in every format to a folder, for inspection:
//! `cargo run -p baton-telemetry --example sample -- DIR`, then `scripts/check-tensorboard.py DIR/tensorboard`.

#[allow(dead_code, missing_docs, unreachable_pub)]
#[path = "../tests/outputs/sample.rs"]
mod sample;

use std::{env, error::Error, fs, path::PathBuf};

use baton_proto::v1::{Step, stream_metrics_response::Metrics};
use baton_telemetry::{history::History, prometheus, tensorboard::EventFile};

fn main() -> Result<(), Box<dyn Error>> {
    let dir = PathBuf::from(env::args_os().nth(1).ok_or("usage: sample DIR")?);
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("metrics.prom"), prometheus::text(&sample::status()))?;
    let mut history = History::open(dir.join("metrics.jsonl"))?;
    let events = dir.join("tensorboard");
    let mut file = EventFile::create(&events, 1_763_000_000, "first")?;
    for point in sample::points() {
        // The second coordinator starts with the third generation, after steps that are rolled back.
        if let (3, Some(Metrics::BeganAt(step))) = (point.generation, &point.metrics) {
            for undone in (step + 10..=step + 100).step_by(10) {
                let metrics = Step { loss: 99.0, ..sample::step_metrics(undone) };
                file.add(&sample::point(undone, 2, Metrics::Step(metrics)))?;
            }
            file.flush()?;
            file = EventFile::create(&events, 1_763_000_400, "second")?;
        }
        file.add(&point)?;
        history.add(point)?;
    }
    history.flush()?;
    file.flush()?;
    Ok(())
}
