//! The report of a job, at its end or at any time before. `baton-dashboard` makes a page of it.

use baton_proto::v1::{GetStatusResponse, StreamMetricsResponse, WatchEventsResponse};
use serde::Serialize;

/// What a report is made of.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// The status.
    pub status: GetStatusResponse,
    /// The numbers of the job's whole life, oldest first.
    pub points: Vec<StreamMetricsResponse>,
    /// Its events, oldest first.
    pub events: Vec<WatchEventsResponse>,
    /// The recipe, with every value.
    pub recipe_toml: String,
}

/// The report as JSON, a promise to scripts as on the command line.
#[derive(Debug, Serialize)]
struct Content<'a> {
    status: &'a GetStatusResponse,
    points: &'a [StreamMetricsResponse],
    events: &'a [WatchEventsResponse],
    recipe_toml: &'a str,
}

/// The report as JSON: `status`, `points` and `events` as on the command line, and `recipe_toml`.
///
/// # Errors
///
/// None that is known of.
pub fn json(report: &Report) -> Result<String, serde_json::Error> {
    let mut text = serde_json::to_string_pretty(&Content {
        status: &report.status,
        points: &report.points,
        events: &report.events,
        recipe_toml: &report.recipe_toml,
    })?;
    text.push('\n');
    Ok(text)
}
