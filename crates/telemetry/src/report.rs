//! The report of a job, at its end or at any time before. `baton-dashboard` renders it as a page.

use baton_proto::v1::{GetStatusResponse, StreamMetricsResponse, WatchEventsResponse};
use serde::Serialize;

/// Content of a report. Scripts depend on its JSON, as on that of the command line.
#[derive(Debug, Clone, Default, Serialize)]
pub struct RunReport {
    /// The status.
    pub status: GetStatusResponse,
    /// The metric points of the whole job, oldest first.
    pub points: Vec<StreamMetricsResponse>,
    /// The job events, oldest first.
    pub events: Vec<WatchEventsResponse>,
    /// The recipe, with every value.
    pub recipe_toml: String,
}

/// The report as JSON: `status`, `points` and `events` as on the command line, and `recipe_toml`.
///
/// # Errors
///
/// The report cannot be serialized; no such case is known.
pub fn json(report: &RunReport) -> Result<String, serde_json::Error> {
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    Ok(text)
}
