//! The stream of one client, combined from the job's status, events, points and log lines.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use axum::response::sse::Event;
use baton_proto::v1::{self, job_service_server::JobService};
use futures::{
    StreamExt,
    stream::{self, BoxStream, Fuse},
};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};
use tonic::{Request, Status};

use super::{
    cursor::{Cursor, ReceivedPoints},
    lines::{LineBuffer, MAX_STREAM_LINES_PER_SECOND},
};

/// Interval at which the status is checked for changes, and log lines are sent.
const STREAM_STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time between two statuses. Hours, costs and estimates change all the time, which alone does not cause a new
/// status.
const STREAM_REFRESH_INTERVAL: Duration = Duration::from_secs(30);

/// The stream of one client.
pub(super) struct ClientStream<S> {
    jobs: Arc<S>,
    cursor: Cursor,
    received: ReceivedPoints,
    events: BoxStream<'static, Result<v1::WatchEventsResponse, Status>>,
    points: Fuse<BoxStream<'static, Result<v1::StreamMetricsResponse, Status>>>,
    lines: Fuse<BoxStream<'static, Result<v1::StreamLogsResponse, Status>>>,
    poll: Interval,
    /// The last status sent, without fields that change with time, and when it was sent.
    last_status: Option<(v1::GetStatusResponse, Instant)>,
    /// Log lines to send after the next poll.
    pending_lines: LineBuffer,
    /// Events to send now.
    ready: VecDeque<Event>,
}

impl<S: JobService> ClientStream<S> {
    pub(super) async fn open(
        jobs: Arc<S>,
        cursor: Cursor,
        with_logs: bool,
    ) -> Result<Self, Status> {
        let events = v1::WatchEventsRequest { after_id: cursor.event, past_only: false };
        let events = jobs.watch_events(Request::new(events)).await?.into_inner().boxed();
        let points = v1::StreamMetricsRequest {
            after_unix_millis: cursor.request_points_after(),
            follow: true,
        };
        let points = jobs.stream_metrics(Request::new(points)).await?.into_inner().boxed().fuse();
        let lines = match with_logs {
            true => {
                let tail = u32::try_from(MAX_STREAM_LINES_PER_SECOND).unwrap_or(u32::MAX);
                let lines = v1::StreamLogsRequest {
                    ranks: Vec::new(),
                    all_sources: true,
                    tail,
                    follow: true,
                };
                jobs.stream_logs(Request::new(lines)).await?.into_inner().boxed()
            }
            false => stream::empty().boxed(),
        };
        let mut poll = interval_at(Instant::now() + STREAM_STATUS_INTERVAL, STREAM_STATUS_INTERVAL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut feed = Self {
            jobs,
            cursor,
            received: cursor.received(),
            events,
            points,
            lines: lines.fuse(),
            poll,
            last_status: None,
            pending_lines: LineBuffer::default(),
            ready: VecDeque::new(),
        };
        // The status comes first: it identifies the job.
        feed.poll_status().await?;
        Ok(feed)
    }

    /// The next event; `None` once the job's events have ended or a stream failed.
    pub(super) async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            tokio::select! {
                // In this order, so that many log lines do not delay the status.
                biased;
                _ = self.poll.tick() => self.poll_status().await.ok()?,
                event = self.events.next() => self.send_event(&event?.ok()?)?,
                Some(point) = self.points.next() => self.send_point(&point.ok()?)?,
                Some(line) = self.lines.next() => self.pending_lines.push(line.ok()?),
            }
        }
    }

    async fn poll_status(&mut self) -> Result<(), Status> {
        let status = self.jobs.get_status(Request::new(v1::GetStatusRequest {})).await?;
        let status = status.into_inner();
        let timeless = without_time(status.clone());
        let is_due = self
            .last_status
            .as_ref()
            .is_none_or(|(last, at)| *last != timeless || at.elapsed() >= STREAM_REFRESH_INTERVAL);
        if is_due {
            self.last_status = Some((timeless, Instant::now()));
            let status = sse_event("status").json_data(&status);
            self.ready.push_back(status.map_err(encoding_error)?);
        }
        for line in self.pending_lines.take() {
            self.ready.push_back(sse_event("log").json_data(line).map_err(encoding_error)?);
        }
        Ok(())
    }

    fn send_event(&mut self, event: &v1::WatchEventsResponse) -> Option<()> {
        self.cursor.event = event.id;
        let id = self.cursor.to_string();
        self.ready.push_back(sse_event("event").id(id).json_data(event).ok()?);
        Some(())
    }

    fn send_point(&mut self, point: &v1::StreamMetricsResponse) -> Option<()> {
        if self.received.contains(point.unix_millis) {
            return Some(());
        }
        self.cursor.advance_past_point(point.unix_millis);
        let id = self.cursor.to_string();
        self.ready.push_back(sse_event("point").id(id).json_data(point).ok()?);
        Some(())
    }
}

fn encoding_error(error: axum::Error) -> Status {
    Status::internal(error.to_string())
}

fn sse_event(name: &str) -> Event {
    Event::default().event(name)
}

/// The status without fields that change only because time passes; the page counts these seconds itself.
fn without_time(mut status: v1::GetStatusResponse) -> v1::GetStatusResponse {
    status.phase_seconds = 0.0;
    status.checkpoint_age_seconds = None;
    status.eta_seconds = None;
    status.spending = None;
    status.ranks.iter_mut().for_each(|rank| {
        rank.heartbeat_age_seconds = None;
        rank.heartbeat.iter_mut().for_each(|heartbeat| heartbeat.seconds = 0.0);
    });
    status.nodes.iter_mut().for_each(|node| node.heartbeat_age_seconds = None);
    status.recoveries.iter_mut().for_each(|recovery| recovery.age_seconds = 0.0);
    status.drain.iter_mut().for_each(|drain| drain.seconds_left = 0.0);
    status.pause.iter_mut().for_each(|pause| pause.seconds = 0.0);
    status
}
