//! The web dashboard: a page, and the JSON and the event stream for it.
//!
//! [`router`] is merged into the coordinator's gRPC server, so one port serves both. The handlers call the same methods
//! as gRPC, so all decisions are made there.
//!
//! | method | path | required role | answer |
//! |---|---|---|---|
//! | GET | `/` | nothing | the page |
//! | GET | `/assets/*`, `/favicon.svg` | nothing | its scripts, style and icon; they contain no secrets |
//! | GET | `/api/status` | viewer | [`GetStatusResponse`](baton_proto::v1::GetStatusResponse) |
//! | GET | `/api/metrics?after=UNIX_MILLIS` | viewer | list of [`StreamMetricsResponse`](baton_proto::v1::StreamMetricsResponse) |
//! | GET | `/api/checkpoints` | viewer | the checkpoints in the store, newest first |
//! | GET | `/api/recipe` | viewer | the recipe in effect, as TOML and as JSON |
//! | GET | `/api/events?after=ID` | viewer | list of [`WatchEventsResponse`](baton_proto::v1::WatchEventsResponse) |
//! | GET | `/api/report` | viewer | the [report] so far, a page in one file; its header `baton-cursor` is the id from which `/api/stream` goes on |
//! | GET | `/api/logs?tail=N&rank=R` | viewer | list of [`StreamLogsResponse`](baton_proto::v1::StreamLogsResponse) |
//! | GET | `/api/stream?after_event=ID&after_metric=UNIX_MILLIS&logs=1` | viewer | server-sent events, see [`stream`] |
//! | POST | `/api/control/{checkpoint,drain,pause,resume,stop}` | operator | 202 and `{}` |
//! | GET | `/metrics` | viewer | metrics in Prometheus's text format |
//!
//! Tokens are checked before routing, by path: `baton_access::role::required_access` implements the column "required
//! role". The answer to a failed request is `{"error": "one line"}`.

#![forbid(unsafe_code)]

use std::sync::Arc;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    http::{
        HeaderValue,
        header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS},
    },
    middleware::{from_fn, map_response},
    response::Response,
    routing::{get, post},
};
use baton_proto::v1::job_service_server::JobService;

mod api;
mod assets;
mod control;
mod refusal;
pub mod report;
mod same_site;
pub mod stream;

pub use refusal::refusal;

/// All routes. The router has no fallback, so that it can be merged into that of tonic.
pub fn router<S: JobService>(jobs: Arc<S>) -> Router {
    let read_only = Router::new()
        .route("/api/status", get(api::status::<S>))
        .route("/api/metrics", get(api::metrics::<S>))
        .route("/api/checkpoints", get(api::checkpoints::<S>))
        .route("/api/recipe", get(api::recipe::<S>))
        .route("/api/report", get(api::report::<S>))
        .route("/api/events", get(api::events::<S>))
        .route("/api/logs", get(api::logs::<S>))
        .route("/metrics", get(api::prometheus::<S>));
    let control = Router::new()
        .route("/api/control/checkpoint", post(control::checkpoint::<S>))
        .route("/api/control/drain", post(control::drain::<S>))
        .route("/api/control/pause", post(control::pause::<S>))
        .route("/api/control/resume", post(control::resume::<S>))
        .route("/api/control/stop", post(control::stop::<S>))
        .layer(DefaultBodyLimit::max(control::MAX_CONTROL_BODY_BYTES));
    let streams = Router::new()
        .route("/api/stream", get(stream::stream::<S>))
        .with_state(stream::StreamState::new(Arc::clone(&jobs)));
    assets::router()
        .merge(read_only.merge(control).with_state(jobs))
        .merge(streams)
        .layer(map_response(add_security_headers))
}

/// All routes, for a coordinator without tokens. Requests about the job are answered only if their host is an IP
/// address or localhost. Otherwise, any web page could let its own name resolve to the coordinator's address, and the
/// browser would treat both as one site (DNS rebinding).
pub fn router_without_tokens<S: JobService>(jobs: Arc<S>) -> Router {
    router(jobs).layer(from_fn(same_site::only_by_address))
}

/// Adds security headers that the response does not have yet.
async fn add_security_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
    ] {
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    response
}
