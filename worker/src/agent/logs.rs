//! Sends the logs of the ranks and of this agent to the coordinator, so that they can be read after this machine is
//! gone.
//!
//! A thread reads new lines of the ranks' log files; a task sends them over a separate stream. Both are bounded: lines
//! above the rate limit of [`LineLimiter`] are only in the file, and if the coordinator is unreachable or slow, the
//! oldest lines are dropped. Training never waits for this.

mod limiter;

use std::{
    collections::{HashMap, VecDeque},
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use baton_console::clock::unix_millis;
use baton_job::{
    exit::{Failure, crash},
    ids::LocalRank,
};
use baton_proto::v1::{LogLine, ShipLogsRequest};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use self::limiter::LineLimiter;
use super::uplink::Caller;

/// Time between two reads of the log files.
const RANK_LOG_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum number of bytes that are read of a file at once; if more is new, the oldest part is skipped.
const MAX_READ_BYTES: u64 = 256 << 10;
/// If a log file existed before this agent, only this many bytes at its end are read.
const FIRST_READ_BYTES: u64 = 16 << 10;
/// Capacity of the channels to the sending task, in batches of lines.
const CHANNEL_CAPACITY: usize = 1_024;
/// Lines that are kept, to be sent again after a reconnect.
const MAX_KEPT_LINES: usize = 1_000;
/// Maximum number of lines in one message.
const MAX_LINES_PER_MESSAGE: usize = 256;
/// Time between two attempts to connect to the coordinator.
const LOG_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Rank of each local rank of this node, for labelling log lines.
pub(super) type Ranks = Arc<Mutex<HashMap<LocalRank, u32>>>;

/// Writer of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LineSource {
    /// This agent.
    Agent,
    /// The process of this local rank.
    Rank(LocalRank),
}

/// New lines of one source.
#[derive(Debug)]
pub(crate) struct LogLines {
    source: LineSource,
    lines: Vec<limiter::Line>,
}

/// Writer for this agent's own log, in addition to standard error.
#[derive(Clone, Debug)]
pub(crate) struct OwnLog(mpsc::Sender<LogLines>);

impl OwnLog {
    /// A writer, and the receiver of what is written.
    pub(crate) fn channel() -> (Self, mpsc::Receiver<LogLines>) {
        let (sender, receiver) = mpsc::channel(CHANNEL_CAPACITY);
        (Self(sender), receiver)
    }
}

impl Write for OwnLog {
    /// Forwards what was logged; it is dropped if the channel is full.
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let mut limiter = LineLimiter::new(Instant::now());
        let lines = limiter.add_text(Instant::now(), text);
        let _ = self.0.try_send(LogLines { source: LineSource::Agent, lines });
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts the thread and the task that send logs. `folder` contains the ranks' log files; `own` is the receiver
/// of [`OwnLog`].
pub(super) fn ship(
    folder: PathBuf,
    slots: u32,
    node: String,
    ranks: Ranks,
    caller: Caller,
    own: mpsc::Receiver<LogLines>,
) -> Result<(), Failure> {
    let (sender, lines) = mpsc::channel(CHANNEL_CAPACITY);
    let locals = (0..slots).map(LocalRank);
    let mut files: Vec<LogTail> = locals.map(|local| LogTail::new(local, &folder)).collect();
    let read = move || {
        while !sender.is_closed() {
            for file in &mut files {
                let lines = file.new_lines(Instant::now());
                if lines.is_empty() {
                    continue;
                }
                let source = LineSource::Rank(file.local_rank);
                if let Err(mpsc::error::TrySendError::Full(lines)) =
                    sender.try_send(LogLines { source, lines })
                {
                    file.limiter.count_dropped(lines.lines);
                }
            }
            thread::sleep(RANK_LOG_POLL_INTERVAL);
        }
    };
    thread::Builder::new()
        .name("logs".to_owned())
        .spawn(read)
        .map_err(|error| crash(format!("cannot read the ranks' logs: {error}")))?;
    tokio::spawn(send(lines, own, node, ranks, caller));
    Ok(())
}

/// Reads what a rank appends to its log file.
struct LogTail {
    local_rank: LocalRank,
    path: PathBuf,
    /// Position up to which the file was read, in bytes.
    read_to: u64,
    limiter: LineLimiter,
}

impl LogTail {
    fn new(local_rank: LocalRank, folder: &Path) -> Self {
        let path = folder.join(format!("rank-{local_rank}.log"));
        let mut limiter = LineLimiter::new(Instant::now());
        // An existing file is read from near its end; a new file is read from the beginning.
        let len = std::fs::metadata(&path).map_or(0, |file| file.len());
        let read_to = len.saturating_sub(FIRST_READ_BYTES);
        if read_to > 0 {
            limiter.mark_skipped();
        }
        Self { local_rank, path, read_to, limiter }
    }

    /// Lines that were completed since the last call.
    fn new_lines(&mut self, now: Instant) -> Vec<limiter::Line> {
        // An unreadable file is tried again at the next call.
        self.read().map_or_else(|_| Vec::new(), |text| self.limiter.add_text(now, &text))
    }

    fn read(&mut self) -> std::io::Result<Vec<u8>> {
        let mut file = File::open(&self.path)?;
        let len = file.metadata()?.len();
        // A file that became shorter was replaced.
        let from = if self.read_to <= len { self.read_to } else { 0 };
        let begin = from.max(len.saturating_sub(MAX_READ_BYTES));
        if begin > from {
            self.limiter.mark_skipped();
        }
        file.seek(SeekFrom::Start(begin))?;
        let mut text = Vec::new();
        file.take(MAX_READ_BYTES).read_to_end(&mut text)?;
        self.read_to = begin + text.len() as u64;
        Ok(text)
    }
}

/// Sends lines to the coordinator; reconnects after errors.
async fn send(
    mut ranks_lines: mpsc::Receiver<LogLines>,
    mut own: mpsc::Receiver<LogLines>,
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
        // All kept lines are sent again; a coordinator that has them already recognizes them by their numbers.
        let mut unsent: VecDeque<LogLine> = kept.clone();
        let ended = loop {
            let ready = !unsent.is_empty();
            let lines = tokio::select! {
                _ended = &mut call => break true,
                slot = stream.reserve(), if ready => {
                    let Ok(slot) = slot else { break true };
                    let lines = unsent.drain(..unsent.len().min(MAX_LINES_PER_MESSAGE)).collect();
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
            // The oldest lines are dropped first; the gap in the numbers shows how many.
            kept.drain(..kept.len().saturating_sub(MAX_KEPT_LINES));
            unsent.drain(..unsent.len().saturating_sub(MAX_KEPT_LINES));
        };
        if !ended {
            return;
        }
        tokio::time::sleep(LOG_RETRY_INTERVAL).await;
    }
}

/// Adds source, time and sequence number to lines.
fn numbered(lines: LogLines, ranks: &Ranks, number: &mut u64) -> Vec<LogLine> {
    let LogLines { source, lines } = lines;
    let local_rank = match source {
        LineSource::Agent => None,
        LineSource::Rank(local) => Some(local),
    };
    let rank = local_rank.and_then(|local| ranks.lock().get(&local).copied());
    let now = unix_millis();
    let line = |limiter::Line { text, left_out }| {
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

#[cfg(test)]
mod tests {
    use std::{fs::OpenOptions, io::Write};

    use super::*;

    fn append(path: &Path, text: &str) {
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    fn texts(lines: Vec<limiter::Line>) -> Vec<String> {
        lines.into_iter().map(|line| line.text).collect()
    }

    #[test]
    fn file_is_followed_and_read_from_the_start_when_it_was_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank-3.log");
        let mut tail = LogTail::new(LocalRank(3), folder.path());
        let now = Instant::now();
        assert!(tail.new_lines(now).is_empty(), "the file does not exist yet");
        append(&path, "one\ntw");
        assert_eq!(texts(tail.new_lines(now)), ["one"]);
        append(&path, "o\nthree\n");
        assert_eq!(texts(tail.new_lines(now)), ["two", "three"]);
        std::fs::write(&path, "new\n").unwrap();
        assert_eq!(texts(tail.new_lines(now)), ["new"]);
        assert!(tail.new_lines(now).is_empty());
    }

    #[test]
    fn only_the_end_of_an_existing_file_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank-0.log");
        append(&path, &"an old line\n".repeat(10_000));
        let mut tail = LogTail::new(LocalRank(0), folder.path());
        let lines = tail.new_lines(Instant::now());
        assert!(lines.len() > 100 && lines.len() < 1_500, "{}", lines.len());
    }
}
