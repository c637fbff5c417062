//! The web dashboard: a page, and the JSON and the stream of events that it lives on.
//!
//! [`router`] is merged into the coordinator's gRPC server, so one port serves both. Handlers call the methods that gRPC
//! calls: what may be done when is decided there, and nowhere else.
//!
//! | method | path | needs | answer |
//! |---|---|---|---|
//! | GET | `/` | nothing | the page |
//! | GET | `/assets/*`, `/favicon.svg` | nothing | its scripts, its style, its icon; they hold no secrets |
//! | GET | `/api/status` | viewer | [`GetStatusResponse`](baton_proto::v1::GetStatusResponse) |
//! | GET | `/api/metrics?after=UNIX_MILLIS` | viewer | list of [`StreamMetricsResponse`](baton_proto::v1::StreamMetricsResponse) |
//! | GET | `/api/checkpoints` | viewer | what the store holds, newest first |
//! | GET | `/api/recipe` | viewer | the recipe in effect, as TOML and as JSON |
//! | GET | `/api/events?after=ID` | viewer | list of [`WatchEventsResponse`](baton_proto::v1::WatchEventsResponse) |
//! | GET | `/api/logs?tail=N&rank=R` | viewer | list of [`StreamLogsResponse`](baton_proto::v1::StreamLogsResponse) |
//! | GET | `/api/stream?after_event=ID&after_metric=UNIX_MILLIS&logs=1` | viewer | server-sent events, see [`stream`] |
//! | POST | `/api/control/{checkpoint,drain,pause,resume,stop}` | operator | 202 and `{}` |
//! | GET | `/metrics` | viewer | for Prometheus, in its text format |
//!
//! Who calls is checked before, by path: `baton_access::role::need_of` is that column. What goes wrong is answered with
//! `{"error": "one line"}`.

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

/// All routes. It has no fallback, so that it can be merged into tonic's.
pub fn router<S: JobService>(jobs: Arc<S>) -> Router {
    let look = Router::new()
        .route("/api/status", get(api::status::<S>))
        .route("/api/metrics", get(api::metrics::<S>))
        .route("/api/checkpoints", get(api::checkpoints::<S>))
        .route("/api/recipe", get(api::recipe::<S>))
        .route("/api/events", get(api::events::<S>))
        .route("/api/logs", get(api::logs::<S>))
        .route("/metrics", get(api::prometheus::<S>));
    let steer = Router::new()
        .route("/api/control/checkpoint", post(control::checkpoint::<S>))
        .route("/api/control/drain", post(control::drain::<S>))
        .route("/api/control/pause", post(control::pause::<S>))
        .route("/api/control/resume", post(control::resume::<S>))
        .route("/api/control/stop", post(control::stop::<S>))
        .layer(DefaultBodyLimit::max(control::MOST_BYTES));
    let streams = Router::new()
        .route("/api/stream", get(stream::stream::<S>))
        .with_state(stream::Streams::new(Arc::clone(&jobs)));
    assets::router()
        .merge(look.merge(steer).with_state(jobs))
        .merge(streams)
        .layer(map_response(safe))
}

/// The same for a coordinator without tokens, which anybody may ask: answers questions about the job only to who calls
/// it by an IP address or as localhost. Else any web page could give its own name the coordinator's address, and the
/// browser would take the two for one site (DNS rebinding).
pub fn router_without_tokens<S: JobService>(jobs: Arc<S>) -> Router {
    router(jobs).layer(from_fn(same_site::only_by_address))
}

/// What every answer carries, unless it says otherwise itself.
async fn safe(mut response: Response) -> Response {
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
