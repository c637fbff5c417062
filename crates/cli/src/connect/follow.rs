//! Streams that continue across restarts of a coordinator: an interrupted stream is reopened after the last item
//! received.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use baton_job::exit::Failure;
use baton_proto::v1::{
    StreamLogsRequest, StreamLogsResponse, StreamMetricsRequest, StreamMetricsResponse,
    WatchEventsRequest, WatchEventsResponse,
};
use tokio::time::Instant;
use tonic::{Code, Status, Streaming};

use super::{Address, Client, Coordinator};
use crate::{human, output};

/// A kind of stream, with the position of the last item received.
pub(crate) trait Feed: Send {
    /// Type of the items.
    type Item: Send;

    /// Opens the stream after the last item received.
    fn open(
        &mut self,
        client: &mut Client,
    ) -> impl Future<Output = Result<Streaming<Self::Item>, Status>> + Send;

    /// Whether this item was not received before; records it as received.
    fn is_new(&mut self, item: &Self::Item) -> bool;
}

/// Reads a feed across interruptions; no item comes twice.
pub(crate) struct Follow<F: Feed> {
    coordinator: Coordinator,
    feed: F,
    stream: Option<Streaming<F::Item>>,
    /// Time when the stream was opened.
    opened: Instant,
    outage: Option<Outage>,
    /// Whether to print a note when the coordinator becomes unreachable, and when it is reachable again.
    announces: bool,
}

/// A time without the coordinator.
#[derive(Clone, Copy)]
struct Outage {
    since: Instant,
    is_announced: bool,
}

/// Pause before another attempt to reach a coordinator.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// Outages that are shorter are not announced: a coordinator restarts within this time.
const ANNOUNCED_OUTAGE: Duration = Duration::from_secs(1);
/// A stream that ends earlier than this after it was opened does not end an outage.
const STABLE_STREAM: Duration = Duration::from_secs(1);

impl<F: Feed> Follow<F> {
    pub(super) fn new(coordinator: Coordinator, feed: F) -> Self {
        let opened = Instant::now();
        Self { coordinator, feed, stream: None, opened, outage: None, announces: false }
    }

    /// Prints a note when the coordinator becomes unreachable, and when it is reachable again.
    pub(crate) fn announced(self) -> Self {
        Self { announces: true, ..self }
    }

    /// The next item of a feed without an end. Retries for up to `reconnect_timeout` while the coordinator is
    /// unreachable; this time goes on if the call is dropped and made again.
    ///
    /// # Errors
    /// The coordinator stayed unreachable, or it rejects the call.
    pub(crate) async fn next(&mut self, reconnect_timeout: Duration) -> Result<F::Item, Failure> {
        loop {
            let status = match self.try_next().await {
                Ok(Some(item)) => {
                    self.outage = None;
                    return Ok(item);
                }
                Ok(None) => Status::unavailable("the stream ended"),
                Err(status) => status,
            };
            let was_open = self.stream.take().is_some();
            let elapsed = self.outage_continues(was_open, reconnect_timeout);
            let failure = self.coordinator.explain(&status);
            // Also if this fails: the caller may try again.
            self.coordinator.find_again().await;
            if is_permanent(&status) || elapsed >= reconnect_timeout {
                return Err(failure);
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    /// Records that the coordinator is unreachable; returns for how long it has been.
    fn outage_continues(&mut self, was_open: bool, reconnect_timeout: Duration) -> Duration {
        if was_open && self.opened.elapsed() >= STABLE_STREAM {
            self.outage = None;
        }
        let new = || Outage { since: Instant::now(), is_announced: false };
        let outage = self.outage.get_or_insert_with(new);
        let elapsed = outage.since.elapsed();
        if self.announces && !outage.is_announced && elapsed >= ANNOUNCED_OUTAGE {
            outage.is_announced = true;
            let Address { url, source, .. } = &self.coordinator.address;
            output::note(format_args!(
                "{url} ({source}) is not reachable, retrying for {}; the job may still run",
                human::duration(reconnect_timeout.as_secs_f64())
            ));
        }
        elapsed
    }

    /// The next item of a feed that ends; `None` at its end.
    ///
    /// # Errors
    /// The stream was interrupted, or the coordinator rejects the call.
    pub(crate) async fn next_or_end(&mut self) -> Result<Option<F::Item>, Failure> {
        let next = self.try_next().await;
        next.map_err(|status| self.coordinator.explain(&status))
    }

    /// Opens the stream if it is not open.
    ///
    /// # Errors
    /// There is no answer, or the coordinator rejects the call.
    pub(crate) async fn open(&mut self) -> Result<(), Failure> {
        let opened = self.stream().await.map(drop);
        opened.map_err(|status| self.coordinator.explain(&status))
    }

    async fn stream(&mut self) -> Result<&mut Streaming<F::Item>, Status> {
        let stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = self.feed.open(&mut self.coordinator.client).await?;
                self.opened = Instant::now();
                if let Some(outage) = self.outage.as_mut().filter(|outage| outage.is_announced) {
                    outage.is_announced = false;
                    output::note(format_args!("{} is reachable again", self.coordinator.url()));
                }
                stream
            }
        };
        Ok(self.stream.insert(stream))
    }

    async fn try_next(&mut self) -> Result<Option<F::Item>, Status> {
        loop {
            match self.stream().await?.message().await? {
                Some(item) if !self.feed.is_new(&item) => {}
                item => return Ok(item),
            }
        }
    }
}

/// Whether a retry of the call would fail in the same way.
fn is_permanent(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::InvalidArgument
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::Unauthenticated
            | Code::PermissionDenied
    )
}

/// Past events of the job and, unless `past_only`, new ones.
#[derive(Clone)]
pub(crate) struct EventFeed {
    /// Id of the event before the first one.
    after: u64,
    past_only: bool,
    /// Id and time of the newest events received. They are read again after an interruption: a coordinator that has taken
    /// over may not know the last ones of the lost one, and gives their ids to other events.
    recent: VecDeque<(u64, u64)>,
}

/// Events that are read again after an interruption.
const RECENT_EVENTS: usize = 128;

impl EventFeed {
    pub(crate) fn new(after: u64, past_only: bool) -> Self {
        Self { after, past_only, recent: VecDeque::new() }
    }
}

impl Feed for EventFeed {
    type Item = WatchEventsResponse;

    async fn open(&mut self, client: &mut Client) -> Result<Streaming<Self::Item>, Status> {
        let after_id = self.recent.front().map_or(self.after, |(id, _)| id.saturating_sub(1));
        let request = WatchEventsRequest { after_id, past_only: self.past_only };
        Ok(client.watch_events(request).await?.into_inner())
    }

    fn is_new(&mut self, event: &Self::Item) -> bool {
        let identity = (event.id, event.unix_millis);
        if self.recent.contains(&identity) {
            return false;
        }
        self.recent.retain(|(id, _)| *id < event.id);
        self.recent.push_back(identity);
        if self.recent.len() > RECENT_EVENTS {
            self.recent.pop_front();
        }
        true
    }
}

impl Follow<EventFeed> {
    /// The events after these past ones.
    pub(crate) fn followed(self) -> Self {
        Self::new(self.coordinator, EventFeed { past_only: false, ..self.feed })
    }

    /// The id of the last event.
    pub(crate) fn last_id(&self) -> u64 {
        self.feed.recent.back().map_or(self.feed.after, |(id, _)| *id)
    }
}

/// Metrics of steps and evaluations.
pub(crate) struct MetricsFeed {
    follow: bool,
    /// The newest points received. They are all from the same millisecond, and more points from this millisecond may
    /// come after an interruption.
    newest: Vec<StreamMetricsResponse>,
}

impl MetricsFeed {
    pub(super) fn new(follow: bool) -> Self {
        Self { follow, newest: Vec::new() }
    }

    fn newest_millis(&self) -> u64 {
        self.newest.first().map_or(0, |point| point.unix_millis)
    }
}

impl Feed for MetricsFeed {
    type Item = StreamMetricsResponse;

    async fn open(&mut self, client: &mut Client) -> Result<Streaming<Self::Item>, Status> {
        let after_unix_millis = self.newest_millis().saturating_sub(1);
        let request = StreamMetricsRequest { after_unix_millis, follow: self.follow };
        Ok(client.stream_metrics(request).await?.into_inner())
    }

    fn is_new(&mut self, point: &Self::Item) -> bool {
        if self.newest.contains(point) {
            return false;
        }
        if point.unix_millis != self.newest_millis() {
            self.newest.clear();
        }
        self.newest.push(point.clone());
        true
    }
}

/// Lines that ranks, agents and the coordinator wrote.
pub(crate) struct LogFeed {
    request: StreamLogsRequest,
    /// Time of the oldest line received, Unix milliseconds.
    oldest: Option<u64>,
    /// The newest line received of each source.
    received: HashMap<LogSource, ReceivedLines>,
    /// Lines that a reopened stream will still repeat, by source.
    repeats: HashMap<LogSource, ReceivedLines>,
    /// Lines of a source without received lines are new only from this time on, Unix milliseconds.
    floor: u64,
}

/// A node, and the slot of a rank on it.
type LogSource = (String, Option<u32>);

/// The newest lines received from a source.
#[derive(Clone, Copy, Debug, Default)]
struct ReceivedLines {
    /// Time of the newest line.
    unix_millis: u64,
    /// Number of lines received from this millisecond.
    lines: u64,
}

impl LogFeed {
    pub(super) fn new(request: StreamLogsRequest) -> Self {
        Self { request, oldest: None, received: HashMap::new(), repeats: HashMap::new(), floor: 0 }
    }

    /// Prepares for a reopened stream, which repeats lines that were already received.
    fn reopen(&mut self) -> StreamLogsRequest {
        self.repeats.clone_from(&self.received);
        self.floor = self.oldest.unwrap_or(0);
        // The number of lines written meanwhile is unknown, so all kept lines are requested.
        let tail = if self.oldest.is_some() { 0 } else { self.request.tail };
        StreamLogsRequest { tail, ..self.request.clone() }
    }

    fn is_repeated(&mut self, source: &LogSource, unix_millis: u64) -> bool {
        let Some(received) = self.repeats.get_mut(source) else {
            return unix_millis < self.floor;
        };
        if unix_millis == received.unix_millis && received.lines > 0 {
            received.lines -= 1;
            return true;
        }
        unix_millis < received.unix_millis
    }
}

impl Feed for LogFeed {
    type Item = StreamLogsResponse;

    async fn open(&mut self, client: &mut Client) -> Result<Streaming<Self::Item>, Status> {
        let request = self.reopen();
        Ok(client.stream_logs(request).await?.into_inner())
    }

    fn is_new(&mut self, line: &Self::Item) -> bool {
        let unix_millis = line.unix_millis;
        let source = (line.node_id.clone(), line.local_rank);
        if self.is_repeated(&source, unix_millis) {
            return false;
        }
        // After the first new line of a source, nothing is repeated any more. So lines stay new even if the clock is
        // set back.
        self.repeats.insert(source.clone(), ReceivedLines::default());
        self.oldest = Some(self.oldest.map_or(unix_millis, |oldest| oldest.min(unix_millis)));
        let received = self.received.entry(source).or_default();
        if received.unix_millis != unix_millis {
            *received = ReceivedLines { unix_millis, lines: 0 };
        }
        received.lines += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use baton_access::ClientCredentials;

    use super::*;

    #[test]
    fn events_with_reused_ids_of_a_coordinator_that_took_over_are_new() {
        let event = |id, unix_millis| WatchEventsResponse { id, unix_millis, ..Default::default() };
        let mut feed = EventFeed::new(0, false);
        for id in 1..=30 {
            assert!(feed.is_new(&event(id, id)));
        }
        // It does not know event 30.
        assert!(!feed.is_new(&event(29, 29)));
        assert!(feed.is_new(&event(30, 77)));
        assert!(!feed.is_new(&event(30, 77)));
        assert!(feed.is_new(&event(31, 78)));
        assert_eq!((feed.recent.back(), feed.recent.len()), (Some(&(31, 78)), 31));
        for id in 32..400 {
            assert!(feed.is_new(&event(id, id + 50)));
        }
        assert_eq!(feed.recent.len(), RECENT_EVENTS);
    }

    fn line(node: &str, local_rank: u32, unix_millis: u64) -> StreamLogsResponse {
        StreamLogsResponse {
            unix_millis,
            node_id: node.to_owned(),
            local_rank: Some(local_rank),
            ..StreamLogsResponse::default()
        }
    }

    fn new_lines(feed: &mut LogFeed, lines: &[StreamLogsResponse]) -> Vec<(u32, u64)> {
        let new = lines.iter().filter(|line| feed.is_new(line));
        new.map(|line| (line.local_rank.unwrap(), line.unix_millis)).collect()
    }

    #[test]
    fn after_an_interruption_only_new_lines_come_even_of_the_same_millisecond() {
        let mut feed = LogFeed::new(StreamLogsRequest { tail: 2, ..StreamLogsRequest::default() });
        assert_eq!(feed.reopen().tail, 2);
        assert_eq!(new_lines(&mut feed, &[line("a", 0, 7), line("a", 0, 7)]).len(), 2);

        assert_eq!(feed.reopen().tail, 0, "all that are kept");
        let kept = [
            line("a", 1, 3),
            line("a", 0, 5),
            line("a", 0, 7),
            line("a", 0, 7),
            line("a", 0, 7),
            line("a", 1, 8),
            line("a", 0, 9),
        ];
        assert_eq!(new_lines(&mut feed, &kept), [(0, 7), (1, 8), (0, 9)]);
    }

    #[test]
    fn a_clock_set_back_hides_no_new_line() {
        let mut feed = LogFeed::new(StreamLogsRequest::default());
        feed.reopen();
        assert_eq!(new_lines(&mut feed, &[line("a", 0, 9)]).len(), 1);
        feed.reopen();
        assert_eq!(new_lines(&mut feed, &[line("a", 0, 9), line("a", 0, 10)]), [(0, 10)]);
        assert_eq!(new_lines(&mut feed, &[line("a", 0, 9)]), [(0, 9)]);
    }

    #[tokio::test]
    async fn what_follows_past_events_is_compared_with_them() {
        let address = Address::new("127.0.0.1:1", "a test");
        let coordinator = Coordinator::at(address, &ClientCredentials::default()).unwrap();
        let mut past = Follow::new(coordinator, EventFeed::new(0, true));
        let event = |id, unix_millis| WatchEventsResponse { id, unix_millis, ..Default::default() };
        assert!(past.feed.is_new(&event(1, 10)) && past.feed.is_new(&event(2, 11)));
        let mut new = past.followed();
        assert!(!new.feed.past_only && new.last_id() == 2);
        assert!(!new.feed.is_new(&event(2, 11)));
        // Another coordinator has taken over, and has given the id again.
        assert!(new.feed.is_new(&event(2, 17)));
    }

    #[test]
    fn points_of_one_millisecond_come_once_each() {
        let mut feed = MetricsFeed::new(true);
        let point = |unix_millis, generation| StreamMetricsResponse {
            unix_millis,
            generation,
            ..Default::default()
        };
        let points = [point(5, 1), point(5, 2), point(5, 1), point(6, 1), point(6, 1)];
        let new: Vec<_> = points.iter().filter(|point| feed.is_new(point)).collect();
        assert_eq!(new, [&points[0], &points[1], &points[3]]);
    }
}
