//! The newest lines that ranks, agents and this coordinator logged, for whoever wants to read them.
//!
//! Only the newest are kept, in memory: each machine has its own in files. Whoever cannot keep up is told how many
//! lines it missed.

use std::{
    collections::{HashMap, VecDeque},
    io::{self, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use baton_proto::v1::{LogLine, ShipLogsRequest, StreamLogsResponse};
use tokio::sync::broadcast;

use crate::clock::unix_millis;

/// Lines that are kept of a source, if there are few sources; with many they share [`KEPT`].
const KEPT_OF_ONE: usize = 1_000;
/// The fewest of any.
const LEAST_OF_ONE: usize = 20;
/// Lines and bytes that all sources share.
const KEPT: usize = 20_000;
const KEPT_BYTES: usize = 16 << 20;
/// Lines that a reader may fall behind.
const FOLLOW_BUFFER: usize = 4_096;

/// All that is kept. Cheap to clone: all clones are one.
#[derive(Clone)]
pub(crate) struct Logs(Arc<Shared>);

struct Shared {
    kept: Mutex<Kept>,
    coming: broadcast::Sender<Arc<StreamLogsResponse>>,
}

#[derive(Default)]
struct Kept {
    sources: HashMap<Source, Lines>,
    /// Lines so far.
    count: u64,
    /// By node: which of its agents spoke last, and the number of its last line.
    heard: HashMap<String, (String, u64)>,
}

/// The newest lines of a source, each with its number among all, oldest first.
#[derive(Default)]
struct Lines {
    lines: VecDeque<(u64, Arc<StreamLogsResponse>)>,
    bytes: usize,
}

/// The node, or nothing for this coordinator, and the place on it, or nothing for its agent.
type Source = (String, Option<u32>);

/// Whose lines somebody wants.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    /// Of these ranks; of all if there are none.
    pub(crate) ranks: Vec<u32>,
    /// Also those that no rank wrote.
    pub(crate) all_sources: bool,
}

impl Wanted {
    pub(crate) fn includes(&self, line: &StreamLogsResponse) -> bool {
        match line.rank {
            Some(rank) => self.ranks.is_empty() || self.ranks.contains(&rank),
            None => self.all_sources,
        }
    }
}

/// Lines of the past, oldest first, and the feed of coming ones, without a gap between.
pub(crate) struct Follow {
    pub(crate) past: Vec<Arc<StreamLogsResponse>>,
    pub(crate) coming: broadcast::Receiver<Arc<StreamLogsResponse>>,
}

impl Logs {
    pub(crate) fn new() -> Self {
        let (coming, _) = broadcast::channel(FOLLOW_BUFFER);
        Self(Arc::new(Shared { kept: Mutex::default(), coming }))
    }

    /// Takes what an agent ships; what it ships again because it had to reconnect is known.
    pub(crate) fn take(&self, shipped: ShipLogsRequest) {
        let ShipLogsRequest { node_id, lines, agent } = shipped;
        let mut kept = self.lock();
        let heard = kept.heard.entry(node_id.clone()).or_default();
        if heard.0 != agent {
            *heard = (agent, 0);
        }
        let last = heard.1;
        let mut next = last;
        let mut news = Vec::new();
        for line in lines.into_iter().filter(|line| line.number > last) {
            let LogLine { local_rank, unix_millis, line, left_out, rank, number } = line;
            // Lines that this agent had to drop on the way.
            let lost = number.saturating_sub(next + 1);
            next = number;
            let left_out = left_out.saturating_add(if last == 0 { 0 } else { lost });
            let node_id = node_id.clone();
            news.push(StreamLogsResponse {
                unix_millis,
                node_id,
                local_rank,
                rank,
                line,
                left_out,
            });
        }
        if let Some(heard) = kept.heard.get_mut(&node_id) {
            heard.1 = next;
        }
        for line in news {
            self.add(&mut kept, line);
        }
    }

    /// The newest `tail` of those wanted, 0 for all that are kept, and what comes.
    pub(crate) fn follow(&self, wanted: &Wanted, tail: usize) -> Follow {
        let kept = self.lock();
        let most = if tail == 0 { usize::MAX } else { tail };
        let lines = kept.sources.values().flat_map(|source| &source.lines);
        let mut past: Vec<_> = lines.filter(|(_, line)| wanted.includes(line)).collect();
        past.sort_unstable_by_key(|(number, _)| *number);
        let past = past.split_off(past.len().saturating_sub(most));
        let past = past.into_iter().map(|(_, line)| line.clone()).collect();
        Follow { past, coming: self.0.coming.subscribe() }
    }

    fn add(&self, kept: &mut Kept, line: StreamLogsResponse) {
        let line = Arc::new(line);
        kept.add(line.clone());
        // Nobody who follows is no error.
        let _ = self.0.coming.send(line);
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        // A panic cannot leave these lists in a way that matters.
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn add(&mut self, line: Arc<StreamLogsResponse>) {
        self.count += 1;
        let source = (line.node_id.clone(), line.local_rank);
        let sources = self.sources.len().max(1);
        let kept = self.sources.entry(source).or_default();
        kept.bytes += line.line.len();
        kept.lines.push_back((self.count, line));
        let most = (KEPT / sources).clamp(LEAST_OF_ONE, KEPT_OF_ONE);
        while kept.lines.len() > most || kept.bytes > KEPT_BYTES / sources.max(16) {
            let Some((_, oldest)) = kept.lines.pop_front() else { return };
            kept.bytes -= oldest.line.len();
        }
    }
}

/// This coordinator's own log: to standard error, and to the others.
pub(crate) struct Tee(pub(crate) Logs);

impl Write for Tee {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let mut kept = self.0.lock();
        for line in String::from_utf8_lossy(text).lines() {
            let line = StreamLogsResponse {
                unix_millis: unix_millis(),
                line: line.to_owned(),
                ..StreamLogsResponse::default()
            };
            self.0.add(&mut kept, line);
        }
        drop(kept);
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
    fn what_is_shipped_again_after_a_reconnect_is_told_once() {
        let logs = Logs::new();
        logs.take(shipped("a", "one", 1..=3));
        logs.take(shipped("a", "one", 2..=4));
        logs.take(shipped("a", "two", 1..=1));
        let past = logs.follow(&Wanted::default(), 0).past;
        assert_eq!(texts(&past), ["a 1", "a 2", "a 3", "a 4", "a 1"]);
    }

    #[test]
    fn lines_that_an_agent_had_to_drop_are_counted() {
        let logs = Logs::new();
        logs.take(shipped("a", "one", [1, 2]));
        logs.take(shipped("a", "one", [8, 9]));
        let past = logs.follow(&Wanted::default(), 0).past;
        let left_out: Vec<u64> = past.iter().map(|line| line.left_out).collect();
        assert_eq!(left_out, [0, 0, 5, 0]);
    }

    #[test]
    fn a_reader_gets_the_newest_of_the_ranks_it_wants_and_then_what_comes() {
        let logs = Logs::new();
        for number in 1..=3 {
            logs.take(shipped("a", "x", [number]));
            logs.take(shipped("b", "x", [number]));
        }
        let wanted = Wanted { ranks: vec![1], all_sources: false };
        let mut follow = logs.follow(&wanted, 2);
        assert_eq!(texts(&follow.past), ["b 2", "b 3"]);
        logs.take(shipped("b", "x", [4]));
        assert_eq!(follow.coming.try_recv().unwrap().line, "b 4");
    }

    #[test]
    fn one_loud_source_takes_no_room_from_the_others() {
        let logs = Logs::new();
        logs.take(shipped("b", "x", [1]));
        logs.take(shipped("a", "x", 1..=5_000));
        let past = logs.follow(&Wanted::default(), 0).past;
        assert_eq!(past.len(), 1 + KEPT_OF_ONE);
        assert_eq!(texts(&past[..2]), ["b 1", "a 4001"]);
    }

    #[test]
    fn this_coordinators_own_lines_come_only_if_asked_for() {
        let logs = Logs::new();
        Tee(logs.clone()).write_all(b"serving\n").unwrap();
        assert_eq!(logs.follow(&Wanted::default(), 0).past.len(), 0);
        let wanted = Wanted { all_sources: true, ..Wanted::default() };
        assert_eq!(texts(&logs.follow(&wanted, 0).past), ["serving"]);
    }
}
