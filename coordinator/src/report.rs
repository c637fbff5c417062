//! What became of the job, as files in the run folder: one to look at, one for programs.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use baton_dashboard::report::html;
use baton_telemetry::report::{Report, json};

use crate::{job::Input, job_service, served::Served};

/// Writes `report.html` and `report.json`. For people alone: what cannot be written is told and costs nothing.
pub(crate) async fn write(run_dir: &Path, served: &Served, started_unix_seconds: u64) {
    let events = match served.ask(|answer| Input::Watch { after: 0, answer }).await {
        Ok(Ok(watch)) => watch.past.into_iter().map(job_service::wire).collect(),
        _ => Vec::new(),
    };
    let report = Report {
        status: job_service::status(served, started_unix_seconds),
        points: served.metrics.all(),
        events,
        recipe_toml: served.spec.to_toml(),
    };
    if let Err(error) = tokio::task::block_in_place(|| files(run_dir, &report)) {
        tracing::warn!("{error:#}");
    }
}

fn files(run_dir: &Path, report: &Report) -> Result<()> {
    for (name, text) in [("report.html", html(report)?), ("report.json", json(report)?)] {
        let path = run_dir.join(name);
        fs::write(&path, text).with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    Ok(())
}
