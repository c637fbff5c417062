//! Streams that outlive a coordinator: one that breaks off is begun again after what was had of it.

use std::{collections::HashMap, time::Duration};

use baton_job::exit::Failure;
use baton_proto::v1::{
    StreamLogsRequest, StreamLogsResponse, StreamMetricsRequest, StreamMetricsResponse,
    WatchEventsRequest, WatchEventsResponse,
};
use tonic::{Code, Status, Streaming};

use super::{Client, Coordinator};

/// Something that a coordinator tells item by item, and what was had of it.
pub(crate) trait Feed {
    /// What comes.
    type Item;

    /// Begins after what was had.
    async fn open(&mut self, client: &mut Client) -> Result<Streaming<Self::Item>, Status>;

    /// Whether this was not had before; from now on it was.
    fn is_new(&mut self, item: &Self::Item) -> bool;
}

/// A feed, one item after the other, none twice.
pub(crate) struct Follow<F: Feed> {
    coordinator: Coordinator,
    feed: F,
    stream: Option<Streaming<F::Item>>,
}

/// Between two tries to reach a coordinator.
const RETRY: Duration = Duration::from_millis(250);

impl<F: Feed> Follow<F> {
    pub(super) fn new(coordinator: Coordinator, feed: F) -> Self {
        Self { coordinator, feed, stream: None }
    }

    /// The next item of a feed without an end. A coordinator that is away may take `patience` to come back.
    ///
    /// # Errors
    /// It did not, or it refuses.
    pub(crate) async fn next(&mut self, patience: Duration) -> Result<F::Item, Failure> {
        let mut away_since = None;
        loop {
            let status = match self.try_next().await {
                Ok(Some(item)) => return Ok(item),
                Ok(None) => Status::unavailable("the stream ended"),
                Err(status) => status,
            };
            self.stream = None;
            let away_since = *away_since.get_or_insert_with(tokio::time::Instant::now);
            if is_refusal(&status) || away_since.elapsed() >= patience {
                return Err(self.coordinator.explain(&status));
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// The next item of a feed that ends; none at its end.
    ///
    /// # Errors
    /// It broke off, or the coordinator refuses.
    pub(crate) async fn next_or_end(&mut self) -> Result<Option<F::Item>, Failure> {
        let next = self.try_next().await;
        next.map_err(|status| self.coordinator.explain(&status))
    }

    /// Begins the stream, if it has not begun.
    ///
    /// # Errors
    /// There is no answer, or the coordinator refuses.
    pub(crate) async fn begin(&mut self) -> Result<(), Failure> {
        let begun = self.stream().await.map(drop);
        begun.map_err(|status| self.coordinator.explain(&status))
    }

    async fn stream(&mut self) -> Result<&mut Streaming<F::Item>, Status> {
        let stream = match self.stream.take() {
            Some(stream) => stream,
            None => self.feed.open(&mut self.coordinator.client).await?,
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

/// Whether the same call would be answered the same again.
fn is_refusal(status: &Status) -> bool {
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

/// What happened and, unless only the past is wanted, happens in the job.
pub(crate) struct EventFeed {
    pub(super) after: u64,
    pub(super) past_only: bool,
}

impl Feed for EventFeed {
    type Item = WatchEventsResponse;

    async fn open(&mut self, client: &mut Client) -> Result<Streaming<Self::Item>, Status> {
        let request = WatchEventsRequest { after_id: self.after, past_only: self.past_only };
        Ok(client.watch_events(request).await?.into_inner())
    }

    fn is_new(&mut self, event: &Self::Item) -> bool {
        self.after = event.id;
        true
    }
}

impl Follow<EventFeed> {
    /// The id of the last event.
    pub(crate) fn last_id(&self) -> u64 {
        self.feed.after
    }
}

/// Numbers of updates and evaluations.
pub(crate) struct MetricsFeed {
    follow: bool,
    /// The newest that were had: all of the same millisecond, of which more may come after a break.
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
    /// When the oldest line that was had was read.
    oldest: Option<u64>,
    had: HashMap<Source, Had>,
    /// What of each source a stream begun again is yet to repeat.
    repeats: HashMap<Source, Had>,
    /// Of a source of which nothing was had, what is older was not asked for.
    floor: u64,
}

/// A node and the place of a rank on it.
type Source = (String, Option<u32>);

/// The newest line of a source that was had.
#[derive(Clone, Copy, Debug, Default)]
struct Had {
    unix_millis: u64,
    /// Lines of that very millisecond.
    lines: u64,
}

impl LogFeed {
    pub(super) fn new(request: StreamLogsRequest) -> Self {
        Self { request, oldest: None, had: HashMap::new(), repeats: HashMap::new(), floor: 0 }
    }

    /// From now on, lines that were had come once more.
    fn begin_again(&mut self) -> StreamLogsRequest {
        self.repeats.clone_from(&self.had);
        self.floor = self.oldest.unwrap_or(0);
        // How many lines came meanwhile is not known, so all that are kept are looked through.
        let tail = if self.oldest.is_some() { 0 } else { self.request.tail };
        StreamLogsRequest { tail, ..self.request.clone() }
    }

    fn is_repeated(&mut self, source: &Source, unix_millis: u64) -> bool {
        let Some(had) = self.repeats.get_mut(source) else {
            return unix_millis < self.floor;
        };
        if unix_millis == had.unix_millis && had.lines > 0 {
            had.lines -= 1;
            return true;
        }
        unix_millis < had.unix_millis
    }
}

impl Feed for LogFeed {
    type Item = StreamLogsResponse;

    async fn open(&mut self, client: &mut Client) -> Result<Streaming<Self::Item>, Status> {
        let request = self.begin_again();
        Ok(client.stream_logs(request).await?.into_inner())
    }

    fn is_new(&mut self, line: &Self::Item) -> bool {
        let unix_millis = line.unix_millis;
        let source = (line.node_id.clone(), line.local_rank);
        if self.is_repeated(&source, unix_millis) {
            return false;
        }
        // Only the past repeats itself; a clock that is set back does not make new lines old ones.
        self.repeats.insert(source.clone(), Had::default());
        self.oldest = Some(self.oldest.map_or(unix_millis, |oldest| oldest.min(unix_millis)));
        let had = self.had.entry(source).or_default();
        if had.unix_millis != unix_millis {
            *had = Had { unix_millis, lines: 0 };
        }
        had.lines += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(node: &str, local_rank: u32, unix_millis: u64) -> StreamLogsResponse {
        StreamLogsResponse {
            unix_millis,
            node_id: node.to_owned(),
            local_rank: Some(local_rank),
            ..StreamLogsResponse::default()
        }
    }

    fn new_ones(feed: &mut LogFeed, lines: &[StreamLogsResponse]) -> Vec<(u32, u64)> {
        let new = lines.iter().filter(|line| feed.is_new(line));
        new.map(|line| (line.local_rank.unwrap(), line.unix_millis)).collect()
    }

    #[test]
    fn after_a_break_only_new_lines_come_also_of_the_same_millisecond() {
        let mut feed = LogFeed::new(StreamLogsRequest { tail: 2, ..StreamLogsRequest::default() });
        assert_eq!(feed.begin_again().tail, 2);
        assert_eq!(new_ones(&mut feed, &[line("a", 0, 7), line("a", 0, 7)]).len(), 2);

        assert_eq!(feed.begin_again().tail, 0, "all that are kept");
        let kept = [
            line("a", 1, 3),
            line("a", 0, 5),
            line("a", 0, 7),
            line("a", 0, 7),
            line("a", 0, 7),
            line("a", 1, 8),
            line("a", 0, 9),
        ];
        assert_eq!(new_ones(&mut feed, &kept), [(0, 7), (1, 8), (0, 9)]);
    }

    #[test]
    fn a_clock_set_back_hides_no_line_of_a_stream_that_goes_on() {
        let mut feed = LogFeed::new(StreamLogsRequest::default());
        feed.begin_again();
        assert_eq!(new_ones(&mut feed, &[line("a", 0, 9)]).len(), 1);
        feed.begin_again();
        assert_eq!(new_ones(&mut feed, &[line("a", 0, 9), line("a", 0, 10)]), [(0, 10)]);
        assert_eq!(new_ones(&mut feed, &[line("a", 0, 9)]), [(0, 9)]);
    }

    #[test]
    fn points_of_one_millisecond_come_once_each() {
        let mut feed = MetricsFeed::new(true);
        let point = |unix_millis, generation| StreamMetricsResponse {
            unix_millis,
            generation,
            metrics: None,
        };
        let told = [point(5, 1), point(5, 2), point(5, 1), point(6, 1), point(6, 1)];
        let new: Vec<_> = told.iter().filter(|point| feed.is_new(point)).collect();
        assert_eq!(new, [&told[0], &told[1], &told[3]]);
    }
}
