//! A rank: one training process, controlled by its agent, which may replace it at any time.
//!
//! The main thread trains; [`inbox`] runs a thread that reads the agent's commands. A new generation aborts the
//! collectives that the main thread waits for; the model stays in memory from one generation to the next.

mod inbox;

use std::{
    fs::{self, File, OpenOptions},
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use baton_checkpoint::Store;
use baton_collectives::{
    Collective, Machines,
    nccl::{self, NcclCollective},
    tcp::{self, TcpCollective},
};
use baton_console::parent::Parent;
use baton_data::{CpuShare, InputType};
use baton_job::{
    Generation, MeshSecret, Rank,
    exit::{self, Failure, bad_input, crash},
    gpu::visible::VISIBLE_DEVICES,
    ids::LocalRank,
    message::{RankMessage, RankReport},
    session::RANK_HEARTBEAT_INTERVAL,
};
use baton_plan::{
    network::{InputShape, Network},
    remedy,
};
use baton_program::Program;
use baton_recipe::{
    JobSpec,
    spec::{CollectiveKind, Determinism, DeviceChoice},
};
use baton_trainer::{
    BuildLearner, Error, GenerationContext, JobInputs, Learner, LocalFolder, Trainer, TrainingJob,
    learner::MemoryKind,
    linear::LinearLearner,
    torch::{self, Device, LoadedModel, TorchLearner},
};
use tracing::{info, warn};

use self::inbox::{Begin, GenerationAssignment, Inbox, Meeting, Next};
use crate::{
    link::{self, FromRank, Setup, SlotAssignment, ToRank},
    logging,
    signals::SHUTDOWN_SIGNALS,
};

/// Longest wait for `ncclCommAbort`, which may hang; after that the process must exit.
const NCCL_ABORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Pauses between attempts to open the store, in seconds: one minute in total.
const STORE_PAUSES: [u64; 6] = [1, 2, 4, 8, 16, 29];

/// A rank process; started by the agent.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Process id of the agent.
    #[arg(long)]
    parent: u32,
    /// Wait for the slot of a rank that will die.
    #[arg(long)]
    spare: bool,
}

/// Runs until the job is done or drained, or this rank fails.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    logging::start(std::io::sink());
    Parent::follow(rustix::process::Signal::KILL, Some(args.parent))?;
    ignore_shutdown_signals()?;
    raise_open_files_limit();
    let link = socket().map_err(|error| {
        crash(format!(
            "standard input is not a socket ({error}): only `baton-worker agent` can start a rank"
        ))
    })?;
    let sender = MessageSender::new(&link)?;
    let result = train(link, &sender, args.spare);
    if let Err(failure) = &result {
        sender.send_failure(failure);
    }
    result
}

/// Ignores the shutdown signals: the agent handles them, and the rank must keep running to finish the step and save.
fn ignore_shutdown_signals() -> Result<(), Failure> {
    for (signal, name) in SHUTDOWN_SIGNALS {
        // The flag is never read; having a handler keeps the signal from ending this process.
        signal_hook::flag::register(signal, Arc::default())
            .map_err(|error| crash(format!("{name} cannot be handled: {error}")))?;
    }
    Ok(())
}

/// Raises the limit of open files: each connection to another rank needs one, and the default is about 1,000. If the
/// limit is still too low, the rendezvous reports it.
fn raise_open_files_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        warn!("the limit of open files cannot be raised: {error}");
    }
}

fn socket() -> std::io::Result<UnixStream> {
    let link = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    link.local_addr().map(|_| link)
}

fn train(link: UnixStream, sender: &MessageSender, is_spare: bool) -> Result<(), Failure> {
    let setup = match link::read::<ToRank>(&link) {
        Ok(Some(ToRank::Setup(setup))) => setup,
        Ok(Some(_)) => return Err(crash("the agent's first message is not the setup")),
        Ok(None) => return Err(crash("the agent ended before it sent the setup")),
        Err(error) => return Err(crash(format!("the setup from the agent: {error}"))),
    };
    let spec = JobSpec::from_json(&setup.job.recipe_json).map_err(bad_input)?;
    let spec = Arc::new(spec);
    // Everything that does not depend on the slot is done first, so that a spare has done it in advance.
    torch::device::prepare(&spec);
    let job = open_job(&setup, &spec);
    // Another rank reads them directly onto its device. What fails here is tried again, and reported, there.
    let loaded = is_spare.then(|| LoadedModel::read(&spec).ok().flatten()).flatten();
    if loaded.is_some() {
        info!("the frozen weights are loaded");
    }
    let loaded = Mutex::new(loaded);
    let SlotAssignment { local_rank, gpu, log } = match link::read::<ToRank>(&link) {
        Ok(Some(ToRank::Slot(slot))) => slot,
        other => return Err(crash(format!("expected a slot from the agent, got {other:?}"))),
    };
    if let Some(log) = log {
        redirect_output(&log).map_err(|error| crash(format!("log {}: {error}", log.display())))?;
    }
    // A spare may have tried long ago.
    let job = opened(job, &STORE_PAUSES.map(Duration::from_secs), || open_job(&setup, &spec))?;
    let inputs = job.inputs.on_cpus(CpuShare::of_rank(local_rank, setup.local_ranks));
    let job = TrainingJob { inputs, ..job };
    let inbox =
        Inbox::start(link).map_err(|error| crash(format!("cannot read commands: {error}")))?;
    start_heartbeats(inbox.clone(), sender.clone())
        .map_err(|error| crash(format!("cannot start the thread for heartbeats: {error}")))?;
    let device = torch::device::open(&spec, LocalRank(gpu.unwrap_or(local_rank)))?;
    info!(?device, libtorch = torch::device::torch_version(), "device opened");
    if gpu.is_some() && device == Device::Cpu && spec.cluster.device != DeviceChoice::Cpu {
        // `auto` uses the CPU if CUDA finds no GPU; the other ranks would wait for this slow one in every step.
        return Err(exit::device(
            "the driver lists a GPU for this rank, but CUDA finds none: see `nvidia-smi` and \
             `dmesg`, or set cluster.device = \"cpu\"",
        ));
    }
    let rank = RankProcess { spec: spec.clone(), device, setup, inbox, sender: sender.clone() };
    let input_type = job.inputs.input_type().clone();
    if spec.model.arch.is_linear() {
        rank.serve(job, Box::new(move || LinearLearner::new(&spec, &input_type)))
    } else {
        let build = move || {
            let loaded = loaded.lock().ok().and_then(|mut loaded| loaded.take());
            TorchLearner::blank_with(&spec, &input_type, device, loaded)
        };
        rank.serve(job, Box::new(build))
    }
}

/// Starts the thread that sends heartbeats with the step loop's activity. Missing heartbeats mean that the process
/// hangs.
fn start_heartbeats(inbox: Inbox, sender: MessageSender) -> std::io::Result<()> {
    let heartbeat = move || {
        loop {
            thread::sleep(RANK_HEARTBEAT_INTERVAL);
            if let Some((generation, heartbeat)) = inbox.heartbeat() {
                sender.report(generation, RankReport::Heartbeat(heartbeat));
            }
        }
    };
    thread::Builder::new().name("heartbeat".to_owned()).spawn(heartbeat).map(drop)
}

fn open_job(setup: &Setup, spec: &Arc<JobSpec>) -> Result<TrainingJob, Error> {
    let store = Arc::new(Store::open(&setup.job.checkpoint_location)?);
    let inputs = JobInputs::open_shared(spec, &setup.cache_dir, setup.local_ranks)?;
    let (id, local_dir) = (setup.job.job_id, &spec.checkpoint.local_dir);
    let local = spec.checkpoint.has_local().then(|| LocalFolder {
        path: Path::new(local_dir).join(id.to_string()),
        node: setup.node.to_string(),
    });
    Ok(TrainingJob { id, spec: spec.clone(), store, local, inputs })
}

/// The `first` result of opening a job, or that of a later attempt if the store is a folder that cannot be used at the
/// moment: each rank that ends counts against `cluster.restart_limit`.
fn opened<T>(
    first: Result<T, Error>,
    pauses: &[Duration],
    mut again: impl FnMut() -> Result<T, Error>,
) -> Result<T, Error> {
    let mut result = first;
    for &pause in pauses {
        match &result {
            Err(Error::Checkpoint(error)) if error.is_of_folder() => {
                warn!("{error}; trying again in {} s", pause.as_secs());
            }
            _ => break,
        }
        thread::sleep(pause);
        result = again();
    }
    result
}

/// Redirects standard output and standard error to a log file.
fn redirect_output(log: &Path) -> std::io::Result<()> {
    let file = OpenOptions::new().create(true).append(true).open(log)?;
    rustix::stdio::dup2_stdout(&file)?;
    rustix::stdio::dup2_stderr(&file)?;
    Ok(())
}

/// What a rank needs in every generation.
struct RankProcess {
    spec: Arc<JobSpec>,
    device: Device,
    setup: Setup,
    inbox: Inbox,
    sender: MessageSender,
}

impl RankProcess {
    /// Takes part in one generation after another, until the job is done.
    fn serve<L: Learner>(self, job: TrainingJob, build: BuildLearner<L>) -> Result<(), Failure> {
        let (samples, input_type) = (job.inputs.plan().samples, job.inputs.input_type().clone());
        let mut trainer = Trainer::new(job, build)?;
        self.sender.send(&FromRank::Warm);
        // Whether the state must not be saved: a rollback would begin before it.
        let mut has_diverged = false;
        loop {
            let (assignment, alone) = match self.inbox.next() {
                Next::Join(assignment) => (assignment, false),
                Next::Leave(assignment) => (assignment, true),
            };
            if alone && has_diverged {
                info!("leaving without a save");
                return Ok(());
            }
            has_diverged = false;
            let generation = assignment.generation;
            match self.run_generation(&mut trainer, &assignment, alone) {
                Ok(()) => return Ok(()),
                Err(Error::Diverged(diagnosis)) => {
                    warn!(%generation, %diagnosis, "training diverged");
                    has_diverged = true;
                    self.sender.report(generation, RankReport::Diverged(*diagnosis));
                }
                Err(error) if error.is_peer_loss() => {
                    warn!(%generation, %error, "lost connection to other ranks");
                    let unreached = error.unreached().to_vec();
                    let lost = RankReport::Lost { detail: error.to_string(), unreached };
                    self.sender.report(generation, lost);
                }
                Err(error) => {
                    return Err(self.with_remedy(
                        &error,
                        assignment.world_size,
                        samples,
                        &input_type,
                    ));
                }
            }
        }
    }

    /// The failure to report. If the GPU's memory was too small, it includes what would fit.
    fn with_remedy(&self, error: &Error, ranks: u32, samples: u64, input: &InputType) -> Failure {
        let failure = error.failure();
        if error.out_of_memory() != Some(MemoryKind::Gpu) {
            return failure;
        }
        let program = self.spec.model.arch.is_program().then(|| Program::of_recipe(&self.spec));
        let program = program.and_then(Result::ok);
        let network = |resolution: u32| {
            if let Some((program, _)) = &program {
                return Network::of_program(program, self.spec.precision.compute, resolution).ok();
            }
            let input = match input {
                // No plan says what of a language model would fit.
                InputType::Tokens => return None,
                InputType::Image => InputShape::Image { resolution: u64::from(resolution) },
                InputType::Array(shape) => {
                    let (length, channels) = shape.split_last()?;
                    InputShape::Signal { channels: channels.iter().product(), length: *length }
                }
            };
            Network::new(&self.spec.model, input)
        };
        let remedy = torch::device::memory_bytes(self.device)
            .and_then(|bytes| remedy::for_memory(&self.spec, ranks, samples, bytes, network));
        let Some(remedy) = remedy else { return failure };
        Failure { message: format!("{}; {remedy}", failure.message), ..failure }
    }

    /// Connects to the other ranks of a generation and trains with them; or, if the node must leave `alone`, saves the state
    /// as the only rank of that generation.
    fn run_generation<L: Learner>(
        &self,
        trainer: &mut Trainer<L>,
        assignment: &GenerationAssignment,
        alone: bool,
    ) -> Result<(), Error> {
        let generation = assignment.generation;
        let listener = self.listen(trainer.step().is_some())?;
        let begin = if alone {
            Begin::Never
        } else {
            let (rank, world_size) = (assignment.rank, assignment.world_size);
            info!(%generation, %rank, world_size, "joining");
            let address = listener.address().to_owned();
            self.sender.report(generation, RankReport::Ready { address, step: trainer.step() });
            self.inbox.wait_for_begin(generation)
        };
        let mut turn = None;
        let (rank, meeting) = match begin {
            Begin::Meet(meeting) => (assignment.rank, meeting),
            Begin::Newer => {
                return Err(baton_collectives::Error::Aborted { operation: "rendezvous" }.into());
            }
            Begin::Never if trainer.step().is_none() => {
                info!(%generation, "leaving without a save");
                return Ok(());
            }
            Begin::Never => {
                info!(%generation, "saving alone: this node must leave, and has no coordinator");
                turn = self.turn_to_save_alone();
                assignment.controls.set_saves_alone();
                let peers = vec![listener.address().to_owned()];
                (Rank(0), Meeting { peers, secret: MeshSecret::new([0; MeshSecret::BYTES]) })
            }
        };
        let assignment = &GenerationAssignment { rank, ..assignment.clone() };
        let mut collective = self.meet(listener, assignment, &meeting)?;
        self.sender.report(generation, RankReport::Met);
        let outcome = trainer.run(&mut GenerationContext {
            generation,
            collective: collective.as_mut(),
            restore: &assignment.restore,
            controls: &assignment.controls,
            report: &mut |report| self.sender.report(generation, report),
        })?;
        drop(turn);
        info!(%generation, %outcome, "done");
        Ok(())
    }

    /// Waits until no other rank of this machine saves alone: each has the whole state, and one checkpoint is enough. Without a
    /// lock they save side by side, which needs more memory.
    fn turn_to_save_alone(&self) -> Option<File> {
        let folder = &self.setup.cache_dir;
        fs::create_dir_all(folder).ok()?;
        let folder = File::open(folder).ok()?;
        folder.lock().ok()?;
        Some(folder)
    }

    /// Listens for the other ranks. A rank with state keeps it and tries again in the next generation; another one ends,
    /// and the coordinator learns that it is the address that is wrong.
    fn listen(&self, holds_state: bool) -> Result<tcp::Listener, Error> {
        let host = &self.setup.host;
        tcp::Listener::bind(host).map_err(|error| match error {
            error if holds_state => error.into(),
            error if error.is_foreign_address() => Error::Mismatch(format!(
                "this machine has no address {host}: give with --host one that it has and that the other nodes reach"
            )),
            error => Error::Address { host: host.clone(), problem: error.to_string() },
        })
    }

    /// Connects to the other ranks, over NCCL if the recipe and the devices allow it.
    fn meet(
        &self,
        listener: tcp::Listener,
        assignment: &GenerationAssignment,
        meeting: &Meeting,
    ) -> Result<Box<dyn Collective>, Error> {
        let cluster = &self.spec.cluster;
        // Shorter than the coordinator's timeout, so that a waiting rank reports its error first.
        let connect_timeout = Duration::from_secs_f64(cluster.rendezvous_seconds * 0.8);
        let operation = Duration::from_secs_f64(cluster.collective_seconds);
        let options = tcp::TcpOptions { connect_timeout, operation_timeout: operation };
        let group = tcp::RankGroup {
            generation: assignment.generation,
            rank: assignment.rank,
            peers: &meeting.peers,
            secret: &meeting.secret,
        };
        let abort = assignment.abort.clone();
        let mut tcp = TcpCollective::connect(listener, group, options, abort)?;
        let gpu = match self.device {
            Device::Cuda(ordinal) => i32::try_from(ordinal).ok(),
            _ => None,
        };
        let nccl = match cluster.collective {
            // A single GPU has no gradients to exchange, so it needs no NCCL. NCCL does not support parts of GPUs
            // (MIG).
            CollectiveKind::Auto if meeting.peers.len() == 1 => false,
            CollectiveKind::Auto => {
                let can = gpu.is_some() && !has_part_of_gpu();
                tcp.all_gather_bytes(&[u8::from(can)])?.iter().all(|can| can == &[1])
            }
            CollectiveKind::Tcp => false,
            CollectiveKind::Nccl => true,
        };
        match (nccl, gpu) {
            (false, _) => {
                tcp.share_memory()?;
                Ok(Box::new(tcp))
            }
            (true, Some(ordinal)) => {
                let options = nccl::NcclOptions {
                    order: match self.spec.precision.determinism {
                        Determinism::Strict => nccl::SummationOrder::FixedTree,
                        Determinism::Fast => nccl::SummationOrder::Library,
                    },
                    connect_timeout,
                    operation_timeout: operation,
                    abort_timeout: NCCL_ABORT_TIMEOUT,
                };
                let machines = Machines::of_addresses(&meeting.peers);
                let group = NcclCollective::connect(Box::new(tcp), machines, ordinal, options)?;
                info!(version = %nccl::version()?, order = ?options.order, "NCCL");
                Ok(Box::new(group))
            }
            (true, None) => Err(Error::Mismatch(
                "cluster.collective = nccl needs GPUs: set it to tcp, or cluster.device to cuda"
                    .to_owned(),
            )),
        }
    }
}

/// Whether this process has a part of a GPU (MIG), which agents select by its UUID.
fn has_part_of_gpu() -> bool {
    std::env::var(VISIBLE_DEVICES).is_ok_and(|list| list.trim_start().starts_with("MIG-"))
}

/// Sends messages to the agent; shared by several threads.
#[derive(Clone)]
struct MessageSender(Arc<Mutex<UnixStream>>);

impl MessageSender {
    fn new(link: &UnixStream) -> Result<Self, Failure> {
        let link = link
            .try_clone()
            .map_err(|error| crash(format!("cannot open the socket to the agent: {error}")))?;
        Ok(Self(Arc::new(Mutex::new(link))))
    }

    fn report(&self, generation: Generation, report: RankReport) {
        self.send(&FromRank::Message(RankMessage { generation, report }));
    }

    fn send_failure(&self, failure: &Failure) {
        self.send(&FromRank::Failed(failure.clone()));
    }

    /// Errors are ignored: if the agent has ended, this process exits by itself; see `inbox`.
    fn send(&self, message: &FromRank) {
        if let Ok(link) = self.0.lock() {
            let _ = link::write(&*link, message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSES: [Duration; 3] = [Duration::ZERO; 3];

    #[test]
    fn a_store_that_becomes_usable_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        std::fs::write(&path, "a file where the folder should be").unwrap();
        let open = || Ok(Store::open(&path.display().to_string())?);
        let mut attempts = 0;
        let store = opened(open(), &PAUSES, || {
            attempts += 1;
            if attempts == 2 {
                std::fs::remove_file(&path).unwrap();
            }
            open()
        });
        assert_eq!(store.unwrap().location(), path.display().to_string());
        assert_eq!(attempts, 2);
    }

    #[test]
    fn attempts_end_and_other_errors_are_not_repeated() {
        let attempts = |error: fn() -> Error| {
            let mut attempts = 0;
            let ended = opened(Err(error()), &PAUSES, || {
                attempts += 1;
                Err::<(), _>(error())
            });
            assert_eq!(ended.unwrap_err().to_string(), error().to_string());
            attempts
        };
        fn location(location: &str) -> Error {
            let problem = "Input/output error".to_owned();
            let location = location.to_owned();
            baton_checkpoint::Error::Location { location, problem, remedy: "mount it" }.into()
        }
        assert_eq!(attempts(|| location("/mnt/store")), PAUSES.len());
        assert_eq!(attempts(|| location("s3://bucket/store")), 0);
        assert_eq!(attempts(|| Error::Mismatch("recipe".to_owned())), 0);
    }
}
