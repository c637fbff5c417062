//! One client's stream, put together from what the job tells.

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
    cursor::{Cursor, Had},
    lines::{Lines, MOST_LINES},
};

/// How often to look whether the status has changed, and to give log lines.
const LOOK: Duration = Duration::from_secs(1);
/// Hours, costs and estimates move all the time: so often a status is sent for nothing but that.
const REFRESH: Duration = Duration::from_secs(30);

/// One client's stream.
pub(super) struct Feed<S> {
    jobs: Arc<S>,
    cursor: Cursor,
    had: Had,
    events: BoxStream<'static, Result<v1::WatchEventsResponse, Status>>,
    points: Fuse<BoxStream<'static, Result<v1::StreamMetricsResponse, Status>>>,
    lines: Fuse<BoxStream<'static, Result<v1::StreamLogsResponse, Status>>>,
    look: Interval,
    /// The last status sent, without what moves with time, and when.
    told: Option<(v1::GetStatusResponse, Instant)>,
    /// Lines for the next look.
    waiting: Lines,
    /// What can be sent at once.
    ready: VecDeque<Event>,
}

impl<S: JobService> Feed<S> {
    pub(super) async fn open(
        jobs: Arc<S>,
        cursor: Cursor,
        with_logs: bool,
    ) -> Result<Self, Status> {
        let events = v1::WatchEventsRequest { after_id: cursor.event, past_only: false };
        let events = jobs.watch_events(Request::new(events)).await?.into_inner().boxed();
        let points =
            v1::StreamMetricsRequest { after_unix_millis: cursor.ask_points_after(), follow: true };
        let points = jobs.stream_metrics(Request::new(points)).await?.into_inner().boxed().fuse();
        let lines = match with_logs {
            true => {
                let tail = u32::try_from(MOST_LINES).unwrap_or(u32::MAX);
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
        let mut look = interval_at(Instant::now() + LOOK, LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut feed = Self {
            jobs,
            cursor,
            had: cursor.had(),
            events,
            points,
            lines: lines.fuse(),
            look,
            told: None,
            waiting: Lines::default(),
            ready: VecDeque::new(),
        };
        // Before all else: it says of which job the rest is.
        feed.look().await?;
        Ok(feed)
    }

    /// What comes next; none once the job's events have ended or something failed.
    pub(super) async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            tokio::select! {
                // The status is in time, also in a flood of lines.
                biased;
                _ = self.look.tick() => self.look().await.ok()?,
                event = self.events.next() => self.pass_event(&event?.ok()?)?,
                Some(point) = self.points.next() => self.pass_point(&point.ok()?)?,
                Some(line) = self.lines.next() => self.waiting.push(line.ok()?),
            }
        }
    }

    async fn look(&mut self) -> Result<(), Status> {
        let status = self.jobs.get_status(Request::new(v1::GetStatusRequest {})).await?;
        let status = status.into_inner();
        let timeless = without_time(status.clone());
        let is_news = self
            .told
            .as_ref()
            .is_none_or(|(told, at)| *told != timeless || at.elapsed() >= REFRESH);
        if is_news {
            self.told = Some((timeless, Instant::now()));
            let status = named("status").json_data(&status);
            self.ready.push_back(status.map_err(unwritten)?);
        }
        for line in self.waiting.take() {
            self.ready.push_back(named("log").json_data(line).map_err(unwritten)?);
        }
        Ok(())
    }

    fn pass_event(&mut self, event: &v1::WatchEventsResponse) -> Option<()> {
        self.cursor.event = event.id;
        let id = self.cursor.to_string();
        self.ready.push_back(named("event").id(id).json_data(event).ok()?);
        Some(())
    }

    fn pass_point(&mut self, point: &v1::StreamMetricsResponse) -> Option<()> {
        if self.had.has(point.unix_millis) {
            return Some(());
        }
        self.cursor.pass_point(point.unix_millis);
        let id = self.cursor.to_string();
        self.ready.push_back(named("point").id(id).json_data(point).ok()?);
        Some(())
    }
}

fn unwritten(error: axum::Error) -> Status {
    Status::internal(error.to_string())
}

fn named(name: &str) -> Event {
    Event::default().event(name)
}

/// What is left of a status when nothing happens but that time passes: a page can count seconds by itself.
fn without_time(mut status: v1::GetStatusResponse) -> v1::GetStatusResponse {
    status.phase_seconds = 0.0;
    status.checkpoint_age_seconds = None;
    status.eta_seconds = None;
    status.spending = None;
    status.ranks.iter_mut().for_each(|rank| {
        rank.heartbeat_age_seconds = None;
        rank.pulse.iter_mut().for_each(|pulse| pulse.seconds = 0.0);
    });
    status.nodes.iter_mut().for_each(|node| node.heartbeat_age_seconds = None);
    status.recoveries.iter_mut().for_each(|recovery| recovery.age_seconds = 0.0);
    status.drain.iter_mut().for_each(|drain| drain.seconds_left = 0.0);
    status.pause.iter_mut().for_each(|pause| pause.seconds = 0.0);
    status
}
