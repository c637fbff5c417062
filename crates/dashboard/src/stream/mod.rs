//! `/api/stream`: follows the job with server-sent events.
//!
//! | event | when | id |
//! |---|---|---|
//! | `status` | first, then at most once a second when it changes (except by time alone), and at least every 30 s | |
//! | `event` | events after the cursor, then new ones | the cursor after it |
//! | `point` | metric points after the cursor, then new ones | the cursor after it |
//! | `log` | with `logs=1`: the last 100 lines, then at most 100 a second; the rest is counted | |
//!
//! After a lost connection, a client sends the last id as `Last-Event-ID` (a browser's `EventSource` does so by itself)
//! and gets what follows it: no event or point twice, none missing. Without that header, `after_event` and
//! `after_metric` give the start. The cursor does not cover log lines: a new connection starts with the newest ones
//! again.
//!
//! The stream ends when the coordinator ends, or when one of the job's streams fails; the client then reconnects.

mod cursor;
mod feed;
mod lines;

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    extract::{Query, State, rejection::QueryRejection},
    http::HeaderMap,
    response::{IntoResponse, Response, Sse, sse::KeepAlive},
};
use baton_proto::v1::job_service_server::JobService;
use serde::Deserialize;
use tokio::sync::Semaphore;
use tonic::Status;

pub(crate) use self::cursor::Cursor;
use self::feed::ClientStream;
use crate::refusal::Refusal;

/// Most concurrent streams: each of them polls the status once a second.
const MAX_STREAMS: usize = 64;
/// Interval of keep-alive comments in an idle stream, by which both sides detect a broken connection.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// State shared by all streams.
pub(crate) struct StreamState<S> {
    jobs: Arc<S>,
    permits: Arc<Semaphore>,
}

impl<S> StreamState<S> {
    pub(crate) fn new(jobs: Arc<S>) -> Self {
        Self { jobs, permits: Arc::new(Semaphore::new(MAX_STREAMS)) }
    }
}

// A derived `Clone` would need `S: Clone`.
impl<S> Clone for StreamState<S> {
    fn clone(&self) -> Self {
        Self { jobs: Arc::clone(&self.jobs), permits: Arc::clone(&self.permits) }
    }
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct StreamQuery {
    after_event: u64,
    after_metric: u64,
    logs: u8,
}

pub(crate) async fn stream<S: JobService>(
    State(StreamState { jobs, permits }): State<StreamState<S>>,
    query: Result<Query<StreamQuery>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let Query(StreamQuery { after_event, after_metric, logs }) = query?;
    let cursor = match headers.get("last-event-id") {
        Some(id) => Cursor::parse(id.to_str().unwrap_or_default())
            .ok_or_else(|| Status::invalid_argument("Last-Event-ID is not an id of this stream"))?,
        None => Cursor::after(after_event, after_metric),
    };
    let permit = permits.try_acquire_owned().map_err(|_| {
        Status::resource_exhausted(format!(
            "{MAX_STREAMS} dashboards are connected, which is the limit: close one"
        ))
    })?;
    let feed = ClientStream::open(jobs, cursor, logs != 0).await?;
    let events = futures::stream::unfold((feed, permit), |(mut feed, permit)| async move {
        let event = feed.next().await?;
        Some((Ok::<_, Infallible>(event), (feed, permit)))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE_INTERVAL)).into_response())
}
