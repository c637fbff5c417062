//! The read-only routes: status, metrics, events and so on, as JSON.
//!
//! Routes, parameters and keys are a promise to scripts: adding is allowed, renaming is not.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Query, State, rejection::QueryRejection},
    http::{
        HeaderName,
        header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE},
    },
    response::{Html, IntoResponse},
};
use baton_proto::v1::{self, job_service_server::JobService};
use baton_telemetry::{prometheus, report::RunReport};
use futures::TryStreamExt;
use serde::{Deserialize, Serialize};
use tonic::{Request, Status};

use crate::{
    refusal::Refusal,
    report::{REPORT_POLICY, html},
    stream::Cursor,
};

type JsonResult<T> = Result<Json<T>, Refusal>;
type QueryResult<T> = Result<Query<T>, QueryRejection>;

/// Header of a report: the `Last-Event-ID` with which a stream goes on where the report ends.
const CURSOR_HEADER: HeaderName = HeaderName::from_static("baton-cursor");
/// Log lines in an answer, if the request gives no number.
const DEFAULT_TAIL_LINES: u32 = 200;
/// Most log lines in an answer.
const MAX_TAIL_LINES: u32 = 10_000;

pub(crate) async fn status<S: JobService>(
    State(jobs): State<Arc<S>>,
) -> JsonResult<v1::GetStatusResponse> {
    Ok(Json(jobs.get_status(Request::new(v1::GetStatusRequest {})).await?.into_inner()))
}

/// The metrics in Prometheus's text format.
pub(crate) async fn prometheus<S: JobService>(
    State(jobs): State<Arc<S>>,
) -> Result<impl IntoResponse, Refusal> {
    let status = jobs.get_status(Request::new(v1::GetStatusRequest {})).await?.into_inner();
    Ok(([(CONTENT_TYPE, prometheus::CONTENT_TYPE)], prometheus::text(&status)))
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct AfterQuery {
    after: u64,
}

pub(crate) async fn metrics<S: JobService>(
    State(jobs): State<Arc<S>>,
    query: QueryResult<AfterQuery>,
) -> JsonResult<Vec<v1::StreamMetricsResponse>> {
    let Query(AfterQuery { after: after_unix_millis }) = query?;
    let request = v1::StreamMetricsRequest { after_unix_millis, follow: false };
    let points = jobs.stream_metrics(Request::new(request)).await?.into_inner();
    Ok(Json(points.try_collect().await?))
}

pub(crate) async fn events<S: JobService>(
    State(jobs): State<Arc<S>>,
    query: QueryResult<AfterQuery>,
) -> JsonResult<Vec<v1::WatchEventsResponse>> {
    let Query(AfterQuery { after: after_id }) = query?;
    let request = Request::new(v1::WatchEventsRequest { after_id, past_only: true });
    let events = jobs.watch_events(request).await?.into_inner();
    Ok(Json(events.try_collect().await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogsQuery {
    tail: Option<u32>,
    rank: Option<u32>,
}

pub(crate) async fn logs<S: JobService>(
    State(jobs): State<Arc<S>>,
    query: QueryResult<LogsQuery>,
) -> JsonResult<Vec<v1::StreamLogsResponse>> {
    let Query(LogsQuery { tail, rank }) = query?;
    let request = v1::StreamLogsRequest {
        ranks: rank.into_iter().collect(),
        all_sources: rank.is_none(),
        // In the gRPC call, zero means all lines.
        tail: tail.unwrap_or(DEFAULT_TAIL_LINES).clamp(1, MAX_TAIL_LINES),
        follow: false,
    };
    let lines = jobs.stream_logs(Request::new(request)).await?.into_inner();
    Ok(Json(lines.try_collect().await?))
}

pub(crate) async fn checkpoints<S: JobService>(
    State(jobs): State<Arc<S>>,
) -> JsonResult<Vec<v1::CheckpointEntry>> {
    let request = Request::new(v1::ListCheckpointsRequest {});
    Ok(Json(jobs.list_checkpoints(request).await?.into_inner().checkpoints))
}

/// The recipe in effect.
#[derive(Serialize)]
pub(crate) struct RecipeJson {
    name: String,
    /// Equal for recipes that lead to the same weights.
    hash: String,
    toml: String,
    recipe: serde_json::Value,
}

pub(crate) async fn recipe<S: JobService>(State(jobs): State<Arc<S>>) -> JsonResult<RecipeJson> {
    let response = jobs.get_recipe(Request::new(v1::GetRecipeRequest {})).await?.into_inner();
    let v1::GetRecipeResponse { name, toml, json, hash } = response;
    let recipe = serde_json::from_str(&json)
        .map_err(|error| Status::internal(format!("the recipe's JSON is invalid: {error}")))?;
    Ok(Json(RecipeJson { name, hash, toml, recipe }))
}

/// The report of the job so far, as a page.
pub(crate) async fn report<S: JobService>(
    State(jobs): State<Arc<S>>,
) -> Result<impl IntoResponse, Refusal> {
    let recipe = jobs.get_recipe(Request::new(v1::GetRecipeRequest {})).await?.into_inner();
    let points = v1::StreamMetricsRequest { after_unix_millis: 0, follow: false };
    let points = jobs.stream_metrics(Request::new(points)).await?.into_inner();
    let points: Vec<_> = points.try_collect().await?;
    let mut cursor = Cursor::default();
    points.iter().for_each(|point| cursor.advance_past_point(point.unix_millis));
    let events = v1::WatchEventsRequest { after_id: 0, past_only: true };
    let events = jobs.watch_events(Request::new(events)).await?.into_inner();
    let events: Vec<_> = events.try_collect().await?;
    cursor.event = events.last().map_or(0, |event| event.id);
    let report = RunReport {
        points,
        events,
        recipe_toml: recipe.toml,
        // The last, so that it is not older than a point.
        status: jobs.get_status(Request::new(v1::GetStatusRequest {})).await?.into_inner(),
    };
    let page = html(&report)
        .map_err(|error| Status::internal(format!("the report cannot be written: {error}")))?;
    let headers = [
        (CONTENT_SECURITY_POLICY, format!("{REPORT_POLICY}; frame-ancestors 'none'")),
        (CURSOR_HEADER, cursor.to_string()),
    ];
    Ok((headers, Html(page)))
}
