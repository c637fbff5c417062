//! Sends what ranks and this agent log to the coordinator, so that it can be read when this machine is gone.
//!
//! A thread reads the ends of the ranks' log files; a task sends what it reads over a stream of its own. Both are
//! bounded: whoever writes more than [`Sieve`] lets through finds the rest in the file, and a coordinator that is away
//! or slow costs old lines, never memory or time of training.

mod sieve;

use std::{
    collections::{HashMap, VecDeque},
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use baton_job::{
    exit::{Failure, crash},
    ids::LocalRank,
};
use baton_proto::v1::{LogLine, ShipLogsRequest};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use self::sieve::Sieve;
use super::uplink::Caller;

/// How often the files are looked at.
const LOOK: Duration = Duration::from_millis(200);
/// The most that is read of a file at a look; what was written before that is left out.
const MOST_READ: u64 = 256 << 10;
/// What is read of a file that was there before this agent.
const FIRST_READ: u64 = 16 << 10;
/// Looks at a file, or lines of this agent, whose lines nobody has taken up yet.
const ON_THE_WAY: usize = 1_024;
/// Lines that are kept, to be told to a coordinator that comes back.
const KEPT: usize = 1_000;
/// Lines of a message.
const BATCH: usize = 256;
/// Between two tries to reach the coordinator.
const RETRY: Duration = Duration::from_secs(1);

/// The rank that each place of this node has, for those who name places.
pub(super) type Ranks = Arc<Mutex<HashMap<LocalRank, u32>>>;

/// Whose lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// This agent itself.
    Agent,
    /// The rank in this place.
    Rank(LocalRank),
}

/// Lines that were read.
#[derive(Debug)]
pub(crate) struct Lines {
    source: Source,
    lines: Vec<sieve::Line>,
}

/// Where this agent's own log goes, besides standard error.
#[derive(Clone, Debug)]
pub(crate) struct OwnLog(mpsc::Sender<Lines>);

impl OwnLog {
    /// A way for it, and its end.
    pub(crate) fn channel() -> (Self, mpsc::Receiver<Lines>) {
        let (sender, receiver) = mpsc::channel(ON_THE_WAY);
        (Self(sender), receiver)
    }
}

impl Write for OwnLog {
    /// Takes what was logged, unless there is too much on the way.
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let mut sieve = Sieve::new(Instant::now());
        let lines = sieve.take(Instant::now(), text);
        let _ = self.0.try_send(Lines { source: Source::Agent, lines });
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Begins to send. `folder` has the ranks' files, `own` comes from [`OwnLog`].
pub(super) fn ship(
    folder: PathBuf,
    slots: u32,
    node: String,
    ranks: Ranks,
    caller: Caller,
    own: mpsc::Receiver<Lines>,
) -> Result<(), Failure> {
    let (sender, lines) = mpsc::channel(ON_THE_WAY);
    let places = (0..slots).map(LocalRank);
    let mut files: Vec<Tail> = places.map(|local| Tail::new(local, &folder)).collect();
    let read = move || {
        while !sender.is_closed() {
            for file in &mut files {
                let lines = file.look(Instant::now());
                if lines.is_empty() {
                    continue;
                }
                let source = Source::Rank(file.local_rank);
                if let Err(mpsc::error::TrySendError::Full(lines)) =
                    sender.try_send(Lines { source, lines })
                {
                    file.sieve.leave_out(lines.lines);
                }
            }
            thread::sleep(LOOK);
        }
    };
    thread::Builder::new()
        .name("logs".to_owned())
        .spawn(read)
        .map_err(|error| crash(format!("cannot read the ranks' logs: {error}")))?;
    tokio::spawn(send(lines, own, node, ranks, caller));
    Ok(())
}

/// The end of a file that others append to.
struct Tail {
    local_rank: LocalRank,
    path: PathBuf,
    /// Up to where it was read.
    read_to: u64,
    sieve: Sieve,
}

impl Tail {
    fn new(local_rank: LocalRank, folder: &Path) -> Self {
        let path = folder.join(format!("rank-{local_rank}.log"));
        let mut sieve = Sieve::new(Instant::now());
        // Of a file that was there before, the last page; one that is not there is read from its beginning.
        let len = std::fs::metadata(&path).map_or(0, |file| file.len());
        let read_to = len.saturating_sub(FIRST_READ);
        if read_to > 0 {
            sieve.skip_a_part();
        }
        Self { local_rank, path, read_to, sieve }
    }

    /// What was appended since the last look.
    fn look(&mut self, now: Instant) -> Vec<sieve::Line> {
        // An unreadable file is looked at again.
        self.read().map_or_else(|_| Vec::new(), |text| self.sieve.take(now, &text))
    }

    fn read(&mut self) -> std::io::Result<Vec<u8>> {
        let mut file = File::open(&self.path)?;
        let len = file.metadata()?.len();
        // A file that has become shorter was begun anew.
        let from = if self.read_to <= len { self.read_to } else { 0 };
        let begin = from.max(len.saturating_sub(MOST_READ));
        if begin > from {
            self.sieve.skip_a_part();
        }
        file.seek(SeekFrom::Start(begin))?;
        let mut text = Vec::new();
        file.take(MOST_READ).read_to_end(&mut text)?;
        self.read_to = begin + text.len() as u64;
        Ok(text)
    }
}

/// Sends over one connection after the other.
async fn send(
    mut ranks_lines: mpsc::Receiver<Lines>,
    mut own: mpsc::Receiver<Lines>,
    node: String,
    ranks: Ranks,
    mut caller: Caller,
) {
    let mut kept: VecDeque<LogLine> = VecDeque::new();
    let mut number = 0;
    let agent = format!("{}-{}", std::process::id(), unix_millis());
    loop {
        let (stream, outgoing) = mpsc::channel(1);
        let call = caller.ship_logs(ReceiverStream::new(outgoing));
        tokio::pin!(call);
        // What a coordinator that comes back has not heard; the others know it by its number.
        let mut unsent: VecDeque<LogLine> = kept.clone();
        let ended = loop {
            let ready = !unsent.is_empty();
            let lines = tokio::select! {
                _ended = &mut call => break true,
                slot = stream.reserve(), if ready => {
                    let Ok(slot) = slot else { break true };
                    let lines = unsent.drain(..unsent.len().min(BATCH)).collect();
                    slot.send(ShipLogsRequest { node_id: node.clone(), agent: agent.clone(), lines });
                    continue;
                }
                Some(lines) = ranks_lines.recv() => lines,
                Some(lines) = own.recv() => lines,
                else => break false,
            };
            for line in numbered(lines, &ranks, &mut number) {
                kept.push_back(line.clone());
                unsent.push_back(line);
            }
            // The oldest go first; how many is seen from the numbers.
            kept.drain(..kept.len().saturating_sub(KEPT));
            unsent.drain(..unsent.len().saturating_sub(KEPT));
        };
        if !ended {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn numbered(lines: Lines, ranks: &Ranks, number: &mut u64) -> Vec<LogLine> {
    let Lines { source, lines } = lines;
    let local_rank = match source {
        Source::Agent => None,
        Source::Rank(local) => Some(local),
    };
    let rank = local_rank.and_then(|local| ranks.lock().ok()?.get(&local).copied());
    let now = unix_millis();
    let line = |sieve::Line { text, left_out }| {
        *number += 1;
        LogLine {
            local_rank: local_rank.map(|local| local.0),
            rank,
            unix_millis: now,
            line: text,
            left_out,
            number: *number,
        }
    };
    lines.into_iter().map(line).collect()
}

fn unix_millis() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::{fs::OpenOptions, io::Write};

    use super::*;

    fn append(path: &Path, text: &str) {
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    fn texts(lines: Vec<sieve::Line>) -> Vec<String> {
        lines.into_iter().map(|line| line.text).collect()
    }

    #[test]
    fn a_file_is_read_as_it_grows_and_anew_when_it_was_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank-3.log");
        let mut tail = Tail::new(LocalRank(3), folder.path());
        let now = Instant::now();
        assert!(tail.look(now).is_empty(), "it is not there yet");
        append(&path, "one\ntw");
        assert_eq!(texts(tail.look(now)), ["one"]);
        append(&path, "o\nthree\n");
        assert_eq!(texts(tail.look(now)), ["two", "three"]);
        std::fs::write(&path, "new\n").unwrap();
        assert_eq!(texts(tail.look(now)), ["new"]);
        assert!(tail.look(now).is_empty());
    }

    #[test]
    fn of_a_file_that_was_there_before_only_the_end_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank-0.log");
        append(&path, &"an old line\n".repeat(10_000));
        let mut tail = Tail::new(LocalRank(0), folder.path());
        let lines = tail.look(Instant::now());
        assert!(lines.len() > 100 && lines.len() < 1_500, "{}", lines.len());
    }
}
