//! Writes the report of an ended job to the run folder: HTML for people, JSON for programs.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use baton_dashboard::report::html;
use baton_telemetry::report::{RunReport, json};

use crate::{job::JobInput, job_service, served::ServedJob};

/// Writes `report.html` and `report.json`. Best effort: an error is only logged.
pub(crate) async fn write(run_dir: &Path, served: &ServedJob, started_unix_seconds: u64) {
    let events = match served.ask(|answer| JobInput::Watch { after: 0, answer }).await {
        Ok(Ok(watch)) => watch.past.into_iter().map(job_service::event_message).collect(),
        _ => Vec::new(),
    };
    let report = RunReport {
        status: job_service::status(served, started_unix_seconds),
        points: served.metrics.all(),
        events,
        recipe_toml: served.spec.to_toml(),
    };
    if let Err(error) = tokio::task::block_in_place(|| write_files(run_dir, &report)) {
        tracing::warn!("{error:#}");
    }
}

fn write_files(run_dir: &Path, report: &RunReport) -> Result<()> {
    for (name, text) in [("report.html", html(report)?), ("report.json", json(report)?)] {
        // A reader never sees a part of it.
        let (path, partial) = (run_dir.join(name), run_dir.join(format!(".{name}.partial")));
        fs::write(&partial, text)
            .and_then(|()| fs::rename(&partial, &path))
            .with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    Ok(())
}
