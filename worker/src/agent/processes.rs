//! Rank processes: each in a separate process group, with a log file and a socket for messages.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io,
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

use super::{AgentInput, InputQueue, gpus::Gpus};
use crate::link::{self, FromRank, Setup, SlotAssignment, ToRank};

/// The processes of this node, by local rank.
pub(super) struct Processes {
    /// Folder of the ranks' log files.
    logs: PathBuf,
    gpus: Arc<Gpus>,
    fabric: Fabric,
    /// Whether the job uses GPUs.
    on_gpus: bool,
    queue: InputQueue,
    running: HashMap<LocalRank, RunningRank>,
    spare: Option<Spare>,
}

/// A running rank process.
struct RunningRank {
    pid: Option<Pid>,
    commands: mpsc::UnboundedSender<ToRank>,
}

/// A process without a slot; `slot` gives it one.
struct Spare {
    running: RunningRank,
    slot: oneshot::Sender<(LocalRank, Incarnation)>,
}

/// Time in which a rank must exit after it has closed its socket; then it is killed.
const RANK_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Name of the process of a slot, or of the spare.
fn rank_name(local_rank: Option<LocalRank>) -> String {
    local_rank.map_or("spare".to_owned(), |local_rank| local_rank.to_string())
}

impl Processes {
    pub(super) fn new(
        logs: PathBuf,
        gpus: Arc<Gpus>,
        fabric: Fabric,
        queue: InputQueue,
    ) -> Result<Self, Failure> {
        let running = HashMap::new();
        let new = Self { logs, gpus, fabric, on_gpus: true, queue, running, spare: None };
        // Without its log no rank can start, and a job should not try with this node.
        new.open_log(&rank_name(Some(LocalRank(0)))).map_err(|error| {
            bad_input(format!(
                "log folder {}: {error}; give a writable folder with --run-dir",
                new.logs.display()
            ))
        })?;
        Ok(new)
    }

    fn open_log(&self, name: &str) -> io::Result<File> {
        // The run folder may have been moved or removed since.
        fs::create_dir_all(&self.logs)?;
        OpenOptions::new().create(true).append(true).open(self.log(name))
    }

    /// Sets whether the job uses GPUs; if not, its ranks do not have to wait for a free GPU.
    pub(super) fn use_gpus(&mut self, on_gpus: bool) {
        self.on_gpus = on_gpus;
    }

    /// Starts a rank process, or gives the slot to the spare. If that fails, the process is reported as ended.
    pub(super) fn spawn(&mut self, local_rank: LocalRank, incarnation: Incarnation, setup: Setup) {
        let slot = (local_rank, incarnation);
        let spare = self.spare.take().and_then(|spare| {
            let Spare { running, slot: waiting } = spare;
            // This fails if the spare has ended.
            waiting.send(slot).ok().map(|()| (running, Some(self.log(&local_rank.to_string()))))
        });
        let is_warm = spare.is_some();
        let rank = match spare {
            Some(rank) => Ok(rank),
            None => self.start(Some(local_rank), setup).map(|spare| {
                let _ = spare.slot.send(slot);
                (spare.running, None)
            }),
        };
        match rank {
            Ok((running, log)) => {
                info!(%local_rank, pid = ?running.pid, is_warm, "rank started");
                let gpu = self.gpus.ordinal(local_rank).filter(|_| self.on_gpus);
                let slot = SlotAssignment { local_rank: local_rank.0, gpu, log };
                let _ = running.commands.send(ToRank::Slot(slot));
                self.running.insert(local_rank, running);
            }
            Err(error) => {
                let failure = crash(format!("its process cannot be started: {error}"));
                let exited = Event::RankExited { local_rank, incarnation, failure };
                let _ = self.queue.send(AgentInput::Event(exited));
            }
        }
    }

    /// Starts a spare process that waits for a slot, if there is none.
    pub(super) fn keep_spare(&mut self, setup: Setup) {
        if self.spare.as_ref().is_some_and(|spare| !spare.slot.is_closed()) {
            return;
        }
        if self.on_gpus && self.gpus.sees_one_device() {
            // The spare loads CUDA before its slot is known, and CUDA does not see other devices afterwards.
            debug!("no spare is started: ranks use parts of GPUs (MIG)");
            return;
        }
        match self.start(None, setup) {
            Ok(spare) => {
                info!(pid = ?spare.running.pid, "spare started");
                self.spare = Some(spare);
            }
            // The next rank starts without a spare.
            Err(error) => warn!(%error, "the spare cannot be started"),
        }
    }

    fn log(&self, name: &str) -> PathBuf {
        self.logs.join(format!("rank-{name}.log"))
    }

    /// Starts a process that waits for its slot; `local_rank` is that of the slot, or `None` for the spare.
    fn start(&self, local_rank: Option<LocalRank>, setup: Setup) -> std::io::Result<Spare> {
        let name = rank_name(local_rank);
        let log = self.open_log(&name).map_err(|error| {
            let path = self.log(&name);
            io::Error::new(error.kind(), format!("its log {}: {error}", path.display()))
        })?;
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let child = Command::new(std::env::current_exe()?)
            .args(["rank", "--parent", &std::process::id().to_string()])
            .args(local_rank.is_none().then_some("--spare"))
            // Ranks do not call the coordinator.
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
        let (slot, slot_given) = oneshot::channel();
        let gpus = self.on_gpus.then(|| self.gpus.clone());
        tokio::spawn(supervise(slot_given, child, reader, free, gpus, self.queue.clone()));
        Ok(Spare { running: RunningRank { pid, commands }, slot })
    }

    /// Sends a command. It is lost if the process has ended; the queue then receives the end of the process.
    pub(super) fn send(&self, local_rank: LocalRank, command: RankCommand) {
        if let Some(running) = self.running.get(&local_rank) {
            let _ = running.commands.send(ToRank::Command(command));
        }
    }

    pub(super) fn terminate(&self, local_rank: LocalRank) {
        // Ranks ignore the shutdown signals, but not this one.
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
            // An error means that the process has ended already.
            let _ = kill_process_group(pid, signal);
        }
    }
}

/// Sends the setup at once, and all other messages after the slot's device is free. Meanwhile the process loads its
/// libraries, which takes longer than the driver needs to free the memory of the previous process.
async fn write_frames(
    mut writer: OwnedWriteHalf,
    setup: Setup,
    freed: oneshot::Receiver<()>,
    mut outgoing: mpsc::UnboundedReceiver<ToRank>,
) {
    // After an error the process has ended; the reading task reports it.
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

/// Waits until a process has a slot and the slot's device is free, then watches the process.
async fn supervise(
    slot_given: oneshot::Receiver<(LocalRank, Incarnation)>,
    mut child: Child,
    reader: OwnedReadHalf,
    free: oneshot::Sender<()>,
    gpus: Option<Arc<Gpus>>,
    queue: InputQueue,
) {
    let slot = tokio::select! {
        // If the process was given a slot and has ended since, `watch` reports that.
        biased;
        slot = slot_given => slot,
        ended = child.wait() => {
            warn!(?ended, "the spare ended unexpectedly; see its log rank-spare.log");
            return;
        }
    };
    // After an error the spare is no longer needed; dropping `child` kills it.
    let Ok((local_rank, incarnation)) = slot else { return };
    let device_ready = async {
        match gpus {
            Some(gpus) => gpus.wait_until_ready(local_rank, queue.clone()).await,
            None => Ok(()),
        }
    };
    let ready = tokio::select! {
        ready = device_ready => ready,
        // `watch` reports how it ended.
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
            let _ = queue.send(AgentInput::Event(exited));
        }
    }
}

/// Forwards the messages of a rank until its socket closes, then reports how the process ended. This order ensures
/// that its failure message is received before its end.
async fn watch(
    local_rank: LocalRank,
    incarnation: Incarnation,
    mut child: Child,
    mut reader: OwnedReadHalf,
    queue: InputQueue,
) {
    let killed_for_memory = killed_for_memory();
    let mut reported_failure = None;
    loop {
        match link::read_async(&mut reader).await {
            Ok(Some(FromRank::Warm)) => {
                let warm = Event::RankWarm { local_rank, incarnation };
                let _ = queue.send(AgentInput::Event(warm));
            }
            Ok(Some(FromRank::Message(message))) => {
                let event = Event::RankReported { local_rank, incarnation, message };
                let _ = queue.send(AgentInput::Event(event));
            }
            Ok(Some(FromRank::Failed(failure))) => reported_failure = Some(failure),
            Ok(None) => break,
            // It was killed with something unread.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => break,
            Err(error) => {
                // Nothing more can be learned from it.
                let message = format!("its agent cannot read what it sends ({error}); report this");
                reported_failure.get_or_insert_with(|| crash(message));
                let _ = child.start_kill();
                break;
            }
        }
    }
    let failure = exit_failure(&mut child, reported_failure, killed_for_memory).await;
    let exited = Event::RankExited { local_rank, incarnation, failure };
    let _ = queue.send(AgentInput::Event(exited));
}

/// Number of processes that the kernel has killed on this machine because memory ran out, since it booted.
fn killed_for_memory() -> Option<u64> {
    let counters = fs::read_to_string("/proc/vmstat").ok()?;
    counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())
}

/// Waits for the end of a process. Its own report, if there is one, explains the end better than its exit status.
async fn exit_failure(
    child: &mut Child,
    reported: Option<Failure>,
    killed_before: Option<u64>,
) -> Failure {
    let status = match tokio::time::timeout(RANK_EXIT_TIMEOUT, child.wait()).await {
        Ok(status) => status,
        Err(_) => {
            let _ = child.start_kill();
            child.wait().await
        }
    };
    match (reported, status) {
        (Some(failure), _) => failure,
        (None, Ok(status)) => {
            let memory_ran_out = killed_for_memory() > killed_before;
            failure_of(status.code(), status.signal(), memory_ran_out)
        }
        (None, Err(error)) => {
            crash(format!("the exit status of its process cannot be read: {error}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_job::{JobId, NodeId, message::Welcome};

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
            node: NodeId(String::new()),
            host: String::new(),
        }
    }

    /// Both ends of a rank's socket.
    fn pair() -> (OwnedReadHalf, OwnedWriteHalf) {
        let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
        (theirs.into_split().0, ours.into_split().1)
    }

    #[tokio::test]
    async fn rank_receives_its_setup_at_once_and_its_slot_when_its_device_is_free() {
        let (mut reader, writer) = pair();
        let (commands, outgoing) = mpsc::unbounded_channel();
        let (free, freed) = oneshot::channel();
        let slot = ToRank::Slot(SlotAssignment { local_rank: 3, gpu: Some(3), log: None });
        commands.send(slot.clone()).unwrap();
        let writes = write_frames(writer, setup(), freed, outgoing);
        tokio::pin!(writes);

        let first = link::read_async::<ToRank>(&mut reader);
        let first =
            tokio::select! { biased; () = &mut writes => None, first = first => first.unwrap() };
        assert_eq!(first, Some(ToRank::Setup(setup())));
        let second = link::read_async::<ToRank>(&mut reader);
        tokio::pin!(second);
        let early = tokio::select! { biased; () = &mut writes => true, _ = &mut second => true, () = async {} => false };
        assert!(!early, "the slot was sent before its device was free");

        free.send(()).unwrap();
        let second =
            tokio::select! { biased; () = &mut writes => None, second = second => second.unwrap() };
        assert_eq!(second, Some(slot));
    }

    #[tokio::test]
    async fn rank_that_sends_an_unreadable_message_ends_with_a_failure_that_says_so() {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let (reader, mut writer) = pair();
        let text = br#"{"Message":{"loss":null}}"#;
        let length = u32::try_from(text.len()).unwrap().to_le_bytes();
        writer.write_all(&[length.as_slice(), text].concat()).await.unwrap();
        let (queue, mut inputs) = mpsc::unbounded_channel();

        watch(LocalRank(3), Incarnation(1), child, reader, queue).await;

        let Some(AgentInput::Event(Event::RankExited { failure, .. })) = inputs.recv().await else {
            panic!("its end is not reported");
        };
        assert!(failure.message.starts_with("its agent cannot read what it sends ("), "{failure}");
    }

    #[tokio::test]
    async fn rank_whose_device_cannot_be_used_receives_only_its_setup() {
        let (mut reader, writer) = pair();
        let (commands, outgoing) = mpsc::unbounded_channel();
        let (free, freed) = oneshot::channel::<()>();
        commands
            .send(ToRank::Slot(SlotAssignment { local_rank: 0, gpu: None, log: None }))
            .unwrap();
        drop(free);

        write_frames(writer, setup(), freed, outgoing).await;

        let setup = link::read_async::<ToRank>(&mut reader).await.unwrap();
        assert!(matches!(setup, Some(ToRank::Setup(_))), "{setup:?}");
        assert_eq!(link::read_async::<ToRank>(&mut reader).await.unwrap(), None);
    }
}
