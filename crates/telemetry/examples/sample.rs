//! Writes the metrics of a sample job in every format to a folder, for inspection:
//! `cargo run -p baton-telemetry --example sample -- DIR`.

#[allow(clippy::unwrap_used, dead_code, missing_docs, unreachable_pub)]
#[path = "../tests/outputs/sample.rs"]
mod sample;

use std::{env, error::Error, fs, path::PathBuf};

use baton_telemetry::{history::History, prometheus};

fn main() -> Result<(), Box<dyn Error>> {
    let dir = PathBuf::from(env::args_os().nth(1).ok_or("usage: sample DIR")?);
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("metrics.prom"), prometheus::text(&sample::status()))?;
    let mut history = History::open(dir.join("metrics.jsonl"))?;
    for point in sample::points() {
        history.add(point)?;
    }
    history.flush()?;
    sample::write_event_files(&dir.join("tensorboard"));
    Ok(())
}
