//! What became of the job, as files in the run folder: one to look at, one for programs.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use baton_proto::v1::{StreamMetricsResponse, WatchEventsResponse};
use baton_telemetry::report::{self, Report};

use crate::{job::Input, job_service, served::Served};

/// Writes `report.html` and `report.json`. For people alone: what cannot be written is told and costs nothing.
pub(crate) async fn write(run_dir: &Path, served: &Served) {
    let events = match served.ask(|answer| Input::Watch { after: 0, answer }).await {
        Ok(Ok(watch)) => watch.past.into_iter().map(job_service::wire).collect(),
        _ => Vec::new(),
    };
    let points = served.metrics.all();
    if let Err(error) = tokio::task::block_in_place(|| files(run_dir, served, events, points)) {
        tracing::warn!("{error:#}");
    }
}

fn files(
    run_dir: &Path,
    served: &Served,
    events: Vec<WatchEventsResponse>,
    points: Vec<StreamMetricsResponse>,
) -> Result<()> {
    let recipe_toml = served.spec.to_toml();
    let report = Report { status: job_service::status(served), points, events, recipe_toml };
    for (name, text) in
        [("report.html", report::html(&report)), ("report.json", report::json(&report)?)]
    {
        let path = run_dir.join(name);
        fs::write(&path, text).with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    Ok(())
}
