//! Rank processes: each in a process group of its own, with a log file and a socket to talk through.

use std::{
    collections::HashMap,
    fs::{self, OpenOptions},
    os::{fd::OwnedFd, unix::net::UnixStream, unix::process::ExitStatusExt},
    path::PathBuf,
    process::Stdio,
    time::Duration,
};

use baton_access::TOKEN_VARIABLE;
use baton_job::{
    exit::Failure,
    ids::{Incarnation, LocalRank},
    message::RankCommand,
    session::{Event, failure_of},
};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::AsyncWriteExt,
    net::unix::{OwnedReadHalf, OwnedWriteHalf},
    process::{Child, Command},
    sync::{mpsc, oneshot},
};
use tracing::{info, warn};

use super::{Input, Queue, bad_input, crash};
use crate::link::{self, FromRank, Place, Setup, ToRank};

/// The processes of this node, by local rank.
pub(super) struct Processes {
    logs: PathBuf,
    queue: Queue,
    running: HashMap<LocalRank, Running>,
    spare: Option<Spare>,
}

struct Running {
    pid: Option<Pid>,
    commands: mpsc::UnboundedSender<ToRank>,
}

/// A process without a place; who takes it says for which.
struct Spare {
    running: Running,
    seat: oneshot::Sender<(LocalRank, Incarnation)>,
}

/// How long a rank that has closed its socket may take to end.
const EXIT_PATIENCE: Duration = Duration::from_secs(5);

impl Processes {
    pub(super) fn new(logs: PathBuf, queue: Queue) -> Result<Self, Failure> {
        fs::create_dir_all(&logs).map_err(|error| {
            bad_input(format!("log folder {}: {error}; give a writable --run-dir", logs.display()))
        })?;
        Ok(Self { logs, queue, running: HashMap::new(), spare: None })
    }

    /// Starts a rank, or gives its place to the spare; if that fails it counts as ended.
    pub(super) fn spawn(&mut self, local_rank: LocalRank, incarnation: Incarnation, setup: Setup) {
        let seat = (local_rank, incarnation);
        let spare = self.spare.take().and_then(|spare| {
            let Spare { running, seat: waiting } = spare;
            // It fails if the spare has ended.
            waiting.send(seat).ok().map(|()| (running, Some(self.log(&local_rank.to_string()))))
        });
        let is_warm = spare.is_some();
        let rank = match spare {
            Some(rank) => Ok(rank),
            None => self.start(&local_rank.to_string(), setup).map(|spare| {
                let _ = spare.seat.send(seat);
                (spare.running, None)
            }),
        };
        match rank {
            Ok((running, log)) => {
                info!(%local_rank, pid = ?running.pid, is_warm, "rank started");
                let place = Place { local_rank: local_rank.0, log };
                let _ = running.commands.send(ToRank::Place(place));
                self.running.insert(local_rank, running);
            }
            Err(error) => {
                let failure = crash(format!("its process cannot be started: {error}"));
                let exited = Event::RankExited { local_rank, incarnation, failure };
                let _ = self.queue.send(Input::Event(exited));
            }
        }
    }

    /// Starts a process that waits for a place, if there is none.
    pub(super) fn keep_spare(&mut self, setup: Setup) {
        if self.spare.as_ref().is_some_and(|spare| !spare.seat.is_closed()) {
            return;
        }
        match self.start("spare", setup) {
            Ok(spare) => {
                info!(pid = ?spare.running.pid, "spare started");
                self.spare = Some(spare);
            }
            // The next rank starts cold.
            Err(error) => warn!(%error, "the spare cannot be started"),
        }
    }

    fn log(&self, name: &str) -> PathBuf {
        self.logs.join(format!("rank-{name}.log"))
    }

    /// Starts a process that knows all but its place.
    fn start(&self, name: &str, setup: Setup) -> std::io::Result<Spare> {
        let log = OpenOptions::new().create(true).append(true).open(self.log(name))?;
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let child = Command::new(std::env::current_exe()?)
            .args(["rank", "--parent", &std::process::id().to_string()])
            // It calls nobody.
            .env_remove(TOKEN_VARIABLE)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let pid = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let (reader, writer) = tokio::net::UnixStream::from_std(ours)?.into_split();
        let (commands, outgoing) = mpsc::unbounded_channel();
        // The receiver lives as long as the process, so this first frame cannot be lost.
        let _ = commands.send(ToRank::Setup(setup));
        tokio::spawn(write_frames(writer, outgoing));
        let (seat, seated) = oneshot::channel();
        tokio::spawn(attend(seated, child, reader, self.queue.clone()));
        Ok(Spare { running: Running { pid, commands }, seat })
    }

    /// Sends a command; to a dead process it is lost, and its end is on its way to the queue.
    pub(super) fn tell(&self, local_rank: LocalRank, command: RankCommand) {
        if let Some(running) = self.running.get(&local_rank) {
            let _ = running.commands.send(ToRank::Command(command));
        }
    }

    pub(super) fn terminate(&self, local_rank: LocalRank) {
        self.signal(local_rank, Signal::TERM);
    }

    pub(super) fn kill(&self, local_rank: LocalRank) {
        self.signal(local_rank, Signal::KILL);
    }

    pub(super) fn kill_all(&mut self) {
        self.spare = None;
        for local_rank in self.running.keys() {
            self.kill(*local_rank);
        }
    }

    fn signal(&self, local_rank: LocalRank, signal: Signal) {
        if let Some(pid) = self.running.get(&local_rank).and_then(|running| running.pid) {
            // An error means that it is gone already.
            let _ = kill_process_group(pid, signal);
        }
    }
}

async fn write_frames(mut writer: OwnedWriteHalf, mut outgoing: mpsc::UnboundedReceiver<ToRank>) {
    while let Some(message) = outgoing.recv().await {
        let written = match link::frame(&message) {
            Ok(bytes) => writer.write_all(&bytes).await,
            Err(error) => Err(error),
        };
        if written.is_err() {
            // The rank is gone; its reader notices.
            return;
        }
    }
}

/// Waits with a process for its place, then watches it.
async fn attend(
    seated: oneshot::Receiver<(LocalRank, Incarnation)>,
    mut child: Child,
    reader: OwnedReadHalf,
    queue: Queue,
) {
    let seat = tokio::select! {
        // Who has a place may have ended since; how is told there.
        biased;
        seat = seated => seat,
        ended = child.wait() => {
            warn!(?ended, "the spare has ended; its log is rank-spare.log");
            return;
        }
    };
    // An error: nobody will want it any more, and dropping it kills it.
    if let Ok((local_rank, incarnation)) = seat {
        watch(local_rank, incarnation, child, reader, queue).await;
    }
}

/// Passes on what a rank says until its socket closes, then how it ended: in this order, so that its
/// last words are heard before its death.
async fn watch(
    local_rank: LocalRank,
    incarnation: Incarnation,
    mut child: Child,
    mut reader: OwnedReadHalf,
    queue: Queue,
) {
    let killed_for_memory = killed_for_memory();
    let mut last_words = None;
    loop {
        match link::read_async(&mut reader).await {
            Ok(Some(FromRank::Warm)) => {
                let warm = Event::RankWarm { local_rank, incarnation };
                let _ = queue.send(Input::Event(warm));
            }
            Ok(Some(FromRank::Says(says))) => {
                let said = Event::RankSaid { local_rank, incarnation, says };
                let _ = queue.send(Input::Event(said));
            }
            Ok(Some(FromRank::LastWords(failure))) => last_words = Some(failure),
            Ok(None) => break,
            Err(error) => {
                warn!(%local_rank, %error, "unreadable frame");
                break;
            }
        }
    }
    let failure = exit_failure(&mut child, last_words, killed_for_memory).await;
    let exited = Event::RankExited { local_rank, incarnation, failure };
    let _ = queue.send(Input::Event(exited));
}

/// Processes that the kernel has killed on this machine because memory ran out.
fn killed_for_memory() -> Option<u64> {
    let counters = fs::read_to_string("/proc/vmstat").ok()?;
    counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())
}

async fn exit_failure(
    child: &mut Child,
    last_words: Option<Failure>,
    killed_before: Option<u64>,
) -> Failure {
    let status = match tokio::time::timeout(EXIT_PATIENCE, child.wait()).await {
        Ok(status) => status,
        Err(_) => {
            let _ = child.start_kill();
            child.wait().await
        }
    };
    match (last_words, status) {
        (Some(failure), _) => failure,
        (None, Ok(status)) => {
            let memory_ran_out = killed_for_memory() > killed_before;
            failure_of(status.code(), status.signal(), memory_ran_out)
        }
        (None, Err(error)) => crash(format!("its end cannot be read: {error}")),
    }
}
