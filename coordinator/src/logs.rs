//! The newest log lines of ranks, agents and this coordinator, for readers.
//!
//! Only the newest lines are kept, in memory: each machine has its own log files. A reader that falls behind gets the
//! number of lines it missed.

use std::{
    collections::{HashMap, VecDeque},
    hash::Hash,
    io::{self, Write},
    sync::Arc,
};

use baton_proto::v1::{LogLine, ShipLogsRequest, StreamLogsResponse};
use parking_lot::Mutex;
use tokio::sync::broadcast;

use crate::clock::unix_millis;

/// Most lines kept of a source if there are few sources; many sources share [`MAX_LOG_LINES`].
const MAX_LINES_PER_SOURCE: usize = 1_000;
/// Lines that each source can keep however many sources there are.
const MIN_LINES_PER_SOURCE: usize = 20;
/// Most lines of all sources together.
const MAX_LOG_LINES: usize = 20_000;
/// Most bytes of all sources together.
const MAX_LOG_BYTES: usize = 16 << 20;
/// Most sources of which lines are kept: more than the largest job has.
const MAX_SOURCES: usize = 20_000;
/// Lines that a reader may fall behind before it misses some.
const FOLLOW_BUFFER: usize = 4_096;

/// The newest lines of all sources. Cheap to clone: all clones share one store.
#[derive(Clone)]
pub(crate) struct LogBuffer(Arc<SharedLogs>);

struct SharedLogs {
    buffer: Mutex<RecentLines>,
    live: broadcast::Sender<Arc<StreamLogsResponse>>,
}

#[derive(Default)]
struct RecentLines {
    sources: HashMap<SourceKey, SourceLines>,
    /// Lines received so far.
    count: u64,
    /// By node id.
    last_shipped: HashMap<String, LastShipped>,
}

/// What a node has shipped.
#[derive(Default)]
struct LastShipped {
    /// Its last agent, and the number of that agent's last line.
    agent: String,
    number: u64,
    /// Lines of all sources received before it.
    at: u64,
}

/// The newest lines of a source, oldest first, each with its number among all lines.
#[derive(Default)]
struct SourceLines {
    lines: VecDeque<(u64, Arc<StreamLogsResponse>)>,
    bytes: usize,
}

/// The node (empty for this coordinator) and the local rank on it (`None` for its agent).
type SourceKey = (String, Option<u32>);

/// Selects lines by their source.
#[derive(Clone, Debug, Default)]
pub(crate) struct LogFilter {
    /// Lines of these ranks; of all ranks if empty.
    pub(crate) ranks: Vec<u32>,
    /// Also lines of agents and of the coordinator.
    pub(crate) all_sources: bool,
}

impl LogFilter {
    pub(crate) fn includes(&self, line: &StreamLogsResponse) -> bool {
        match line.rank {
            Some(rank) => self.ranks.is_empty() || self.ranks.contains(&rank),
            None => self.all_sources,
        }
    }
}

/// Past lines, oldest first, and the feed of the following ones, without a gap between them.
pub(crate) struct LogSubscription {
    pub(crate) past: Vec<Arc<StreamLogsResponse>>,
    pub(crate) live: broadcast::Receiver<Arc<StreamLogsResponse>>,
}

impl LogBuffer {
    pub(crate) fn new() -> Self {
        let (live, _) = broadcast::channel(FOLLOW_BUFFER);
        Self(Arc::new(SharedLogs { buffer: Mutex::default(), live }))
    }

    /// Adds lines that an agent ships; skips those that it ships again after a reconnect.
    pub(crate) fn take(&self, shipped: ShipLogsRequest) {
        let ShipLogsRequest { node_id, lines, agent } = shipped;
        let mut buffer = self.0.buffer.lock();
        let at = buffer.count;
        make_room(&mut buffer.last_shipped, &node_id, |shipped| shipped.at);
        let last_shipped = buffer.last_shipped.entry(node_id.clone()).or_default();
        if last_shipped.agent != agent {
            *last_shipped = LastShipped { agent, number: 0, at };
        }
        last_shipped.at = at;
        let last = last_shipped.number;
        let mut next = last;
        let mut new_lines = Vec::new();
        for line in lines.into_iter().filter(|line| line.number > last) {
            let LogLine { local_rank, unix_millis, line, left_out, rank, number } = line;
            // Lines that this agent dropped instead of shipping them.
            let lost = number.saturating_sub(next.saturating_add(1));
            next = number;
            let left_out = left_out.saturating_add(if last == 0 { 0 } else { lost });
            let node_id = node_id.clone();
            new_lines.push(StreamLogsResponse {
                unix_millis,
                node_id,
                local_rank,
                rank,
                line,
                left_out,
            });
        }
        if let Some(last_shipped) = buffer.last_shipped.get_mut(&node_id) {
            last_shipped.number = next;
        }
        for line in new_lines {
            self.add(&mut buffer, line);
        }
    }

    /// The newest `tail` lines that `filter` selects (0: all kept ones), and the feed of all following lines.
    pub(crate) fn follow(&self, filter: &LogFilter, tail: usize) -> LogSubscription {
        let buffer = self.0.buffer.lock();
        let max_lines = if tail == 0 { usize::MAX } else { tail };
        let lines = buffer.sources.values().flat_map(|source| &source.lines);
        let mut past: Vec<_> = lines.filter(|(_, line)| filter.includes(line)).collect();
        past.sort_unstable_by_key(|(number, _)| *number);
        let past = past.split_off(past.len().saturating_sub(max_lines));
        let past = past.into_iter().map(|(_, line)| line.clone()).collect();
        LogSubscription { past, live: self.0.live.subscribe() }
    }

    fn add(&self, buffer: &mut RecentLines, line: StreamLogsResponse) {
        let line = Arc::new(line);
        buffer.add(line.clone());
        // It is not an error if there is no reader.
        let _ = self.0.live.send(line);
    }
}

/// Removes the entry with the lowest `age` from a full map that does not have `key`.
fn make_room<K: Clone + Eq + Hash, V>(map: &mut HashMap<K, V>, key: &K, age: impl Fn(&V) -> u64) {
    if map.len() < MAX_SOURCES || map.contains_key(key) {
        return;
    }
    let oldest = map.iter().min_by_key(|(_, value)| age(value)).map(|(key, _)| key.clone());
    if let Some(oldest) = oldest {
        map.remove(&oldest);
    }
}

impl RecentLines {
    fn add(&mut self, line: Arc<StreamLogsResponse>) {
        self.count += 1;
        let source = (line.node_id.clone(), line.local_rank);
        let newest = |source: &SourceLines| source.lines.back().map_or(0, |(number, _)| *number);
        make_room(&mut self.sources, &source, newest);
        let sources = self.sources.len().max(1);
        let source = self.sources.entry(source).or_default();
        source.bytes += line.line.len();
        source.lines.push_back((self.count, line));
        let max_lines = (MAX_LOG_LINES / sources).clamp(MIN_LINES_PER_SOURCE, MAX_LINES_PER_SOURCE);
        while source.lines.len() > max_lines || source.bytes > MAX_LOG_BYTES / sources.max(16) {
            let Some((_, oldest)) = source.lines.pop_front() else { return };
            source.bytes -= oldest.line.len();
        }
    }
}

/// Writes this coordinator's own log to standard error and to [`LogBuffer`].
pub(crate) struct Tee(pub(crate) LogBuffer);

impl Write for Tee {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let mut buffer = self.0.0.buffer.lock();
        for line in String::from_utf8_lossy(text).lines() {
            let line = StreamLogsResponse {
                unix_millis: unix_millis(),
                line: line.to_owned(),
                ..StreamLogsResponse::default()
            };
            self.0.add(&mut buffer, line);
        }
        drop(buffer);
        io::stderr().write_all(text)?;
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shipped(node: &str, agent: &str, numbers: impl IntoIterator<Item = u64>) -> ShipLogsRequest {
        let line = |number: u64| LogLine {
            local_rank: Some(0),
            rank: Some(if node == "a" { 0 } else { 1 }),
            line: format!("{node} {number}"),
            number,
            ..LogLine::default()
        };
        ShipLogsRequest {
            node_id: node.to_owned(),
            agent: agent.to_owned(),
            lines: numbers.into_iter().map(line).collect(),
        }
    }

    fn texts(lines: &[Arc<StreamLogsResponse>]) -> Vec<&str> {
        lines.iter().map(|line| line.line.as_str()).collect()
    }

    #[test]
    fn lines_shipped_again_after_a_reconnect_appear_once() {
        let logs = LogBuffer::new();
        logs.take(shipped("a", "one", 1..=3));
        logs.take(shipped("a", "one", 2..=4));
        logs.take(shipped("a", "two", 1..=1));
        let past = logs.follow(&LogFilter::default(), 0).past;
        assert_eq!(texts(&past), ["a 1", "a 2", "a 3", "a 4", "a 1"]);
    }

    #[test]
    fn no_number_of_a_line_ends_the_stream() {
        let logs = LogBuffer::new();
        logs.take(shipped("node", "a", [u64::MAX - 1, u64::MAX, u64::MAX]));
        let everything = logs.follow(&LogFilter::default(), 10);
        assert!(!everything.past.is_empty());
    }

    #[test]
    fn sources_without_an_end_replace_the_oldest_ones() {
        let logs = LogBuffer::new();
        for node in 0..MAX_SOURCES + 50 {
            logs.take(shipped(&format!("node {node}"), "one", [1]));
        }
        logs.take(shipped("node 49", "one", [1]));
        let buffer = logs.0.buffer.lock();
        assert_eq!((buffer.sources.len(), buffer.last_shipped.len()), (MAX_SOURCES, MAX_SOURCES));
        let has = |node: &str| buffer.sources.contains_key(&(node.to_owned(), Some(0)));
        assert!(has("node 49") && has("node 60") && !has("node 50") && !has("node 3"));
    }

    #[test]
    fn lines_that_an_agent_had_to_drop_are_counted() {
        let logs = LogBuffer::new();
        logs.take(shipped("a", "one", [1, 2]));
        logs.take(shipped("a", "one", [8, 9]));
        let past = logs.follow(&LogFilter::default(), 0).past;
        let left_out: Vec<u64> = past.iter().map(|line| line.left_out).collect();
        assert_eq!(left_out, [0, 0, 5, 0]);
    }

    #[test]
    fn a_reader_gets_the_newest_lines_of_its_ranks_and_then_new_lines() {
        let logs = LogBuffer::new();
        for number in 1..=3 {
            logs.take(shipped("a", "x", [number]));
            logs.take(shipped("b", "x", [number]));
        }
        let filter = LogFilter { ranks: vec![1], all_sources: false };
        let mut follow = logs.follow(&filter, 2);
        assert_eq!(texts(&follow.past), ["b 2", "b 3"]);
        logs.take(shipped("b", "x", [4]));
        assert_eq!(follow.live.try_recv().unwrap().line, "b 4");
    }

    #[test]
    fn a_source_with_many_lines_does_not_displace_the_lines_of_others() {
        let logs = LogBuffer::new();
        logs.take(shipped("b", "x", [1]));
        logs.take(shipped("a", "x", 1..=5_000));
        let past = logs.follow(&LogFilter::default(), 0).past;
        assert_eq!(past.len(), 1 + MAX_LINES_PER_SOURCE);
        assert_eq!(texts(&past[..2]), ["b 1", "a 4001"]);
    }

    #[test]
    fn the_coordinators_own_lines_are_included_only_on_request() {
        let logs = LogBuffer::new();
        Tee(logs.clone()).write_all(b"serving\n").unwrap();
        assert_eq!(logs.follow(&LogFilter::default(), 0).past.len(), 0);
        let filter = LogFilter { all_sources: true, ..LogFilter::default() };
        assert_eq!(texts(&logs.follow(&filter, 0).past), ["serving"]);
    }
}
