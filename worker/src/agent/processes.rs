//! Rank processes: each in a process group of its own, with a log file and a socket to talk through.

use std::{
    collections::HashMap,
    fs::{self, OpenOptions},
    os::{fd::OwnedFd, unix::net::UnixStream, unix::process::ExitStatusExt},
    path::PathBuf,
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use baton_access::TOKEN_VARIABLE;
use baton_job::{
    exit::{Failure, bad_input, crash},
    gpu::fabric::Fabric,
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
use tracing::{debug, info, warn};

use super::{Input, Queue, gpus::Gpus};
use crate::link::{self, FromRank, Place, Setup, ToRank};

/// The processes of this node, by local rank.
pub(super) struct Processes {
    logs: PathBuf,
    gpus: Arc<Gpus>,
    fabric: Fabric,
    /// Whether the job uses them.
    on_gpus: bool,
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
    pub(super) fn new(
        logs: PathBuf,
        gpus: Arc<Gpus>,
        fabric: Fabric,
        queue: Queue,
    ) -> Result<Self, Failure> {
        fs::create_dir_all(&logs).map_err(|error| {
            bad_input(format!("log folder {}: {error}; give a writable --run-dir", logs.display()))
        })?;
        let running = HashMap::new();
        Ok(Self { logs, gpus, fabric, on_gpus: true, queue, running, spare: None })
    }

    /// Learns whether the job uses GPUs: its ranks need not wait for one that it does not.
    pub(super) fn use_gpus(&mut self, on_gpus: bool) {
        self.on_gpus = on_gpus;
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
            None => self.start(Some(local_rank), setup).map(|spare| {
                let _ = spare.seat.send(seat);
                (spare.running, None)
            }),
        };
        match rank {
            Ok((running, log)) => {
                info!(%local_rank, pid = ?running.pid, is_warm, "rank started");
                let gpu = self.gpus.ordinal(local_rank).filter(|_| self.on_gpus);
                let place = Place { local_rank: local_rank.0, gpu, log };
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
        if self.on_gpus && self.gpus.is_one_each() {
            // CUDA is loaded before the place is known, and shows from then on what it showed first.
            debug!("no spare is kept for parts of GPUs");
            return;
        }
        match self.start(None, setup) {
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

    /// Starts a process that knows all but its place, for this one or for whichever needs it.
    fn start(&self, local_rank: Option<LocalRank>, setup: Setup) -> std::io::Result<Spare> {
        let name = local_rank.map_or("spare".to_owned(), |local_rank| local_rank.to_string());
        let log = OpenOptions::new().create(true).append(true).open(self.log(&name))?;
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let child = Command::new(std::env::current_exe()?)
            .args(["rank", "--parent", &std::process::id().to_string()])
            // It calls nobody.
            .env_remove(TOKEN_VARIABLE)
            .envs(self.gpus.environment(local_rank))
            .envs(self.fabric.environment(|name| std::env::var_os(name).is_some()))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let pid = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let (reader, writer) = tokio::net::UnixStream::from_std(ours)?.into_split();
        let (commands, outgoing) = mpsc::unbounded_channel();
        let (free, freed) = oneshot::channel();
        tokio::spawn(write_frames(writer, setup, freed, outgoing));
        let (seat, seated) = oneshot::channel();
        let gpus = self.on_gpus.then(|| self.gpus.clone());
        tokio::spawn(attend(seated, child, reader, free, gpus, self.queue.clone()));
        Ok(Spare { running: Running { pid, commands }, seat })
    }

    /// Sends a command; to a dead process it is lost, and its end is on its way to the queue.
    pub(super) fn tell(&self, local_rank: LocalRank, command: RankCommand) {
        if let Some(running) = self.running.get(&local_rank) {
            let _ = running.commands.send(ToRank::Command(command));
        }
    }

    pub(super) fn terminate(&self, local_rank: LocalRank) {
        // What others send to end a job, a rank leaves to its agent; this one ends it.
        self.signal(local_rank, Signal::USR2);
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

/// Sends the setup, then, once its device is free, what a process with a place is told. It loads its libraries
/// meanwhile, which takes longer than the driver needs for the memory of the one before it.
async fn write_frames(
    mut writer: OwnedWriteHalf,
    setup: Setup,
    freed: oneshot::Receiver<()>,
    mut outgoing: mpsc::UnboundedReceiver<ToRank>,
) {
    // An error: the rank is gone, and its reader notices.
    if write_frame(&mut writer, &ToRank::Setup(setup)).await.is_err() || freed.await.is_err() {
        return;
    }
    while let Some(message) = outgoing.recv().await {
        if write_frame(&mut writer, &message).await.is_err() {
            return;
        }
    }
}

async fn write_frame(writer: &mut OwnedWriteHalf, message: &ToRank) -> std::io::Result<()> {
    writer.write_all(&link::frame(message)?).await
}

/// Waits with a process for its place and for the device of that, then watches it.
async fn attend(
    seated: oneshot::Receiver<(LocalRank, Incarnation)>,
    mut child: Child,
    reader: OwnedReadHalf,
    free: oneshot::Sender<()>,
    gpus: Option<Arc<Gpus>>,
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
    let Ok((local_rank, incarnation)) = seat else { return };
    let device_ready = async {
        match gpus {
            Some(gpus) => gpus.ready(local_rank, queue.clone()).await,
            None => Ok(()),
        }
    };
    let ready = tokio::select! {
        ready = device_ready => ready,
        // How is told where it is watched.
        _ = child.wait() => Ok(()),
    };
    match ready {
        Ok(()) => {
            let _ = free.send(());
            watch(local_rank, incarnation, child, reader, queue).await;
        }
        Err(failure) => {
            let _ = child.kill().await;
            let exited = Event::RankExited { local_rank, incarnation, failure };
            let _ = queue.send(Input::Event(exited));
        }
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

#[cfg(test)]
mod tests {
    use baton_job::{JobId, message::Welcome};

    use super::*;

    fn setup() -> Setup {
        Setup {
            job: Welcome {
                job_id: JobId::default(),
                recipe_json: String::new(),
                checkpoint_location: String::new(),
            },
            local_ranks: 1,
            cache_dir: PathBuf::new(),
            host: String::new(),
        }
    }

    /// Both ends of a rank's socket.
    fn pair() -> (OwnedReadHalf, OwnedWriteHalf) {
        let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
        (theirs.into_split().0, ours.into_split().1)
    }

    #[tokio::test]
    async fn a_rank_has_its_setup_at_once_and_its_place_when_its_device_is_free() {
        let (mut reader, writer) = pair();
        let (commands, outgoing) = mpsc::unbounded_channel();
        let (free, freed) = oneshot::channel();
        let place = ToRank::Place(Place { local_rank: 3, gpu: Some(3), log: None });
        commands.send(place.clone()).unwrap();
        let writes = write_frames(writer, setup(), freed, outgoing);
        tokio::pin!(writes);

        let first = link::read_async::<ToRank>(&mut reader);
        let first =
            tokio::select! { biased; () = &mut writes => None, first = first => first.unwrap() };
        assert_eq!(first, Some(ToRank::Setup(setup())));
        let second = link::read_async::<ToRank>(&mut reader);
        tokio::pin!(second);
        let early = tokio::select! { biased; () = &mut writes => true, _ = &mut second => true, () = async {} => false };
        assert!(!early, "its device is not free");

        free.send(()).unwrap();
        let second =
            tokio::select! { biased; () = &mut writes => None, second = second => second.unwrap() };
        assert_eq!(second, Some(place));
    }

    #[tokio::test]
    async fn a_rank_whose_device_cannot_be_used_is_told_nothing_more() {
        let (mut reader, writer) = pair();
        let (commands, outgoing) = mpsc::unbounded_channel();
        let (free, freed) = oneshot::channel::<()>();
        commands.send(ToRank::Place(Place { local_rank: 0, gpu: None, log: None })).unwrap();
        drop(free);

        write_frames(writer, setup(), freed, outgoing).await;

        let setup = link::read_async::<ToRank>(&mut reader).await.unwrap();
        assert!(matches!(setup, Some(ToRank::Setup(_))), "{setup:?}");
        assert_eq!(link::read_async::<ToRank>(&mut reader).await.unwrap(), None);
    }
}
