//! `/api/stream`: the job as it goes on, as server-sent events.
//!
//! | event | when | id |
//! |---|---|---|
//! | `status` | first, and at most once a second when more than the time has changed; every 30 s in any case | |
//! | `event` | those after the cursor, then as they happen | the cursor after it |
//! | `point` | those after the cursor, then as they are told | the cursor after it |
//! | `log` | with `logs=1`: the last 100 lines, then at most 100 a second; the rest is counted | |
//!
//! Who was cut off sends the last id as `Last-Event-ID`, as a browser's `EventSource` does by itself, and gets what comes
//! after it: no event or point twice, none left out. Without that header `after_event` and `after_metric` say where
//! to begin. Log lines have no place in the cursor: a new connection begins with the newest ones again.
//!
//! It ends when the coordinator does, and when the job's own streams fail; the client then comes again.

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

use self::{cursor::Cursor, feed::Feed};
use crate::refusal::Refusal;

/// So many may watch at a time: each costs a status a second.
const MOST_STREAMS: usize = 64;
/// How long the stream may be silent. A comment then tells both sides whether the other is there.
const SILENCE: Duration = Duration::from_secs(10);

/// What all streams share.
pub(crate) struct Streams<S> {
    jobs: Arc<S>,
    places: Arc<Semaphore>,
}

impl<S> Streams<S> {
    pub(crate) fn new(jobs: Arc<S>) -> Self {
        Self { jobs, places: Arc::new(Semaphore::new(MOST_STREAMS)) }
    }
}

// Derived, it would ask for a service that can be cloned.
impl<S> Clone for Streams<S> {
    fn clone(&self) -> Self {
        Self { jobs: Arc::clone(&self.jobs), places: Arc::clone(&self.places) }
    }
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Asked {
    after_event: u64,
    after_metric: u64,
    logs: u8,
}

pub(crate) async fn stream<S: JobService>(
    State(Streams { jobs, places }): State<Streams<S>>,
    asked: Result<Query<Asked>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let Query(Asked { after_event, after_metric, logs }) = asked?;
    let cursor = match headers.get("last-event-id") {
        Some(id) => Cursor::parse(id.to_str().unwrap_or_default())
            .ok_or_else(|| Status::invalid_argument("Last-Event-ID is none of this stream"))?,
        None => Cursor::after(after_event, after_metric),
    };
    let place = places.try_acquire_owned().map_err(|_| {
        Status::resource_exhausted(format!("{MOST_STREAMS} dashboards watch already: close one"))
    })?;
    let feed = Feed::open(jobs, cursor, logs != 0).await?;
    let events = futures::stream::unfold((feed, place), |(mut feed, place)| async move {
        let event = feed.next().await?;
        Some((Ok::<_, Infallible>(event), (feed, place)))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(SILENCE)).into_response())
}
