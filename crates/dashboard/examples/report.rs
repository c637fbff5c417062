//! Writes the report of a sample job: `cargo run -p baton-dashboard --example report -- FILE`.

use std::{env, error::Error, fs};

use baton_telemetry::report::RunReport;

#[allow(clippy::unwrap_used, dead_code, missing_docs, unreachable_pub)]
#[path = "../../telemetry/tests/outputs/sample.rs"]
mod sample;

fn main() -> Result<(), Box<dyn Error>> {
    let file = env::args_os().nth(1).ok_or("usage: report FILE")?;
    let report = RunReport {
        status: sample::status(),
        points: sample::points(),
        events: sample::events(),
        recipe_toml: "name = \"digits_cpu\"\n\n[train]\nepochs = 20\n".to_owned(),
    };
    Ok(fs::write(file, baton_dashboard::report::html(&report)?)?)
}
