//! A rank: one training process, disposable, told what to do by its agent.
//!
//! The main thread trains; [`inbox`] has a thread that reads the agent's commands. A new generation
//! breaks whatever the main thread waits for; the model stays in memory from one to the next.

mod inbox;

use std::{
    fs::OpenOptions,
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use baton_checkpoint::Store;
use baton_collectives::{
    Collective,
    nccl::{self, NcclCollective},
    tcp::{self, TcpCollective},
};
use baton_data::{CpuShare, InputType};
use baton_job::{
    Generation,
    exit::{self, Failure, bad_input, crash},
    gpu::visible::VISIBLE_DEVICES,
    ids::LocalRank,
    message::{RankNews, RankSays},
    session::PULSE,
};
use baton_plan::{
    network::{Input, Network},
    remedy,
};
use baton_recipe::{
    JobSpec,
    spec::{CollectiveKind, Determinism, Device as Wanted},
};
use baton_trainer::{
    Build, Error, GenerationContext, Inputs, Job, Learner, Trainer,
    learner::Memory,
    linear::LinearLearner,
    torch::{self, Device, TorchLearner},
};
use tracing::{info, warn};

use self::inbox::{Inbox, Orders};
use crate::{
    link::{self, FromRank, Place, Setup, ToRank},
    logging,
    signals::MUST_GO,
};

/// Longest wait for `ncclCommAbort`, which may hang; then the process has to go.
const NCCL_ABORT: Duration = Duration::from_secs(5);

/// A rank process; started by the agent.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Process id of the agent.
    #[arg(long)]
    parent: u32,
}

/// Runs until the job is done or drained, or this rank cannot go on.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    logging::start(std::io::sink());
    follow_parent(args.parent)?;
    leave_signals_to_the_agent()?;
    open_as_many_files_as_allowed();
    let link = socket().map_err(|error| {
        crash(format!(
            "standard input is no socket ({error}): ranks are started by `baton-worker agent`"
        ))
    })?;
    let voice = Voice::new(&link)?;
    let trained = train(link, &voice);
    if let Err(failure) = &trained {
        voice.last_words(failure);
    }
    trained
}

/// No rank outlives its agent, whatever ends it.
fn follow_parent(parent: u32) -> Result<(), Failure> {
    let kill = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(kill)
        .map_err(|error| crash(format!("cannot follow the agent: {error}")))?;
    // It may have died before the line above.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    if now.and_then(|pid| u32::try_from(pid).ok()) == Some(parent) {
        Ok(())
    } else {
        Err(crash("the agent ended before this rank began"))
    }
}

/// The agent lets its ranks finish the step and save, which a rank that a signal had ended could not.
fn leave_signals_to_the_agent() -> Result<(), Failure> {
    for (signal, name) in MUST_GO {
        // Nobody looks at the flag: that there is a handler is enough.
        signal_hook::flag::register(signal, Arc::default())
            .map_err(|error| crash(format!("{name} cannot be handled: {error}")))?;
    }
    Ok(())
}

/// Each other rank takes one; systems begin with some 1,000. Where that is not granted, meeting says so.
fn open_as_many_files_as_allowed() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        warn!("the limit of open files stays as it is: {error}");
    }
}

fn socket() -> std::io::Result<UnixStream> {
    let link = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    link.local_addr().map(|_| link)
}

fn train(link: UnixStream, voice: &Voice) -> Result<(), Failure> {
    let setup = match link::read::<ToRank>(&link) {
        Ok(Some(ToRank::Setup(setup))) => setup,
        other => return Err(crash(format!("expected the setup from the agent, got {other:?}"))),
    };
    let spec = JobSpec::from_json(&setup.job.recipe_json).map_err(bad_input)?;
    let spec = Arc::new(spec);
    // All that every rank of this node has in common, so that a spare has it behind it.
    torch::device::prepare(&spec);
    let job = open_job(&setup, &spec);
    let Place { local_rank, gpu, log } = match link::read::<ToRank>(&link) {
        Ok(Some(ToRank::Place(place))) => place,
        other => return Err(crash(format!("expected a place from the agent, got {other:?}"))),
    };
    if let Some(log) = log {
        write_to(&log).map_err(|error| crash(format!("log {}: {error}", log.display())))?;
    }
    let job = job?;
    let inputs = job.inputs.on(CpuShare::of_rank(local_rank, setup.local_ranks));
    let job = Job { inputs, ..job };
    let inbox =
        Inbox::start(link).map_err(|error| crash(format!("cannot read commands: {error}")))?;
    start_pulse(inbox.clone(), voice.clone())
        .map_err(|error| crash(format!("cannot tell what it does: {error}")))?;
    let device = torch::device::open(&spec, LocalRank(gpu.unwrap_or(local_rank)))?;
    info!(?device, libtorch = torch::device::torch_version(), "computing");
    if gpu.is_some() && device == Device::Cpu && spec.cluster.device != Wanted::Cpu {
        // `auto` takes the CPU where CUDA shows no GPU; others would wait for it in every step.
        return Err(exit::device(
            "the driver tells of a GPU for this rank, but CUDA finds none: see `nvidia-smi` and \
             `dmesg`, or set cluster.device = \"cpu\"",
        ));
    }
    let rank = RankProcess { spec: spec.clone(), device, setup, inbox, voice: voice.clone() };
    let input_type = job.inputs.input_type().clone();
    if spec.model.arch.is_linear() {
        rank.serve(job, Box::new(move || LinearLearner::new(&spec, &input_type)))
    } else {
        rank.serve(job, Box::new(move || TorchLearner::blank(&spec, &input_type, device)))
    }
}

/// Tells what the step loop does, from a thread of its own: silence means that the whole process hangs.
fn start_pulse(inbox: Inbox, voice: Voice) -> std::io::Result<()> {
    let beat = move || {
        loop {
            thread::sleep(PULSE);
            if let Some((generation, pulse)) = inbox.pulse() {
                voice.say(generation, RankNews::Pulse(pulse));
            }
        }
    };
    thread::Builder::new().name("pulse".to_owned()).spawn(beat).map(drop)
}

fn open_job(setup: &Setup, spec: &Arc<JobSpec>) -> Result<Job, Error> {
    let store = Arc::new(Store::open(&setup.job.checkpoint_location)?);
    let inputs = Inputs::open(spec, &setup.cache_dir)?;
    Ok(Job { id: setup.job.job_id, spec: spec.clone(), store, inputs })
}

/// Leads standard output and error to another file.
fn write_to(log: &Path) -> std::io::Result<()> {
    let file = OpenOptions::new().create(true).append(true).open(log)?;
    rustix::stdio::dup2_stdout(&file)?;
    rustix::stdio::dup2_stderr(&file)?;
    Ok(())
}

struct RankProcess {
    spec: Arc<JobSpec>,
    device: Device,
    setup: Setup,
    inbox: Inbox,
    voice: Voice,
}

impl RankProcess {
    /// One generation after the other.
    fn serve<L: Learner>(self, job: Job, build: Build<L>) -> Result<(), Failure> {
        let (samples, input_type) = (job.inputs.agenda().samples, job.inputs.input_type().clone());
        let mut trainer = Trainer::new(job, build)?;
        self.voice.write(&FromRank::Warm);
        loop {
            let orders = self.inbox.next_orders();
            let generation = orders.generation;
            match self.take_part(&mut trainer, &orders) {
                Ok(()) => return Ok(()),
                Err(Error::Diverged(diagnosis)) => {
                    warn!(%generation, %diagnosis, "training went wrong");
                    self.voice.say(generation, RankNews::Diverged(*diagnosis));
                }
                Err(error) if error.is_loss_of_others() => {
                    warn!(%generation, %error, "lost the other ranks");
                    self.voice.say(generation, RankNews::Lost { detail: error.to_string() });
                }
                Err(error) => {
                    return Err(self.advise(&error, orders.world_size, samples, &input_type));
                }
            }
        }
    }

    /// The failure to report; of a GPU whose memory was too small it says what would fit.
    fn advise(&self, error: &Error, ranks: u32, samples: u64, input: &InputType) -> Failure {
        let failure = error.failure();
        if error.out_of_memory() != Some(Memory::Gpu) {
            return failure;
        }
        let network = |resolution: u32| {
            let input = match input {
                InputType::Image => Input::Image { resolution: u64::from(resolution) },
                InputType::Array(shape) => {
                    let (length, channels) = shape.split_last()?;
                    Input::Signal { channels: channels.iter().product(), length: *length }
                }
            };
            Network::new(&self.spec.model, input)
        };
        let remedy = torch::device::memory_bytes(self.device)
            .and_then(|bytes| remedy::for_memory(&self.spec, ranks, samples, bytes, network));
        let Some(remedy) = remedy else { return failure };
        Failure { message: format!("{}; {remedy}", failure.message), ..failure }
    }

    fn take_part<L: Learner>(
        &self,
        trainer: &mut Trainer<L>,
        orders: &Orders,
    ) -> Result<(), Error> {
        let (generation, rank) = (orders.generation, orders.rank);
        info!(%generation, %rank, world_size = orders.world_size, "joining");
        let listener = tcp::Listener::bind(&self.setup.host)?;
        let ready =
            RankNews::Ready { address: listener.address().to_owned(), step: trainer.step() };
        self.voice.say(generation, ready);
        // None: a newer generation came first.
        let Some(peers) = self.inbox.wait_for_begin(generation) else {
            return Err(baton_collectives::Error::Aborted { operation: "rendezvous" }.into());
        };
        let mut collective = self.meet(listener, orders, &peers)?;
        self.voice.say(generation, RankNews::Met);
        let outcome = trainer.run(&mut GenerationContext {
            generation,
            collective: collective.as_mut(),
            restore: &orders.restore,
            controls: &orders.controls,
            report: &mut |news| self.voice.say(generation, news),
        })?;
        info!(%generation, %outcome, "done");
        Ok(())
    }

    fn meet(
        &self,
        listener: tcp::Listener,
        orders: &Orders,
        peers: &[String],
    ) -> Result<Box<dyn Collective>, Error> {
        let cluster = &self.spec.cluster;
        // Less than the coordinator's own patience, so that a rank that waits in vain says so first.
        let meeting = Duration::from_secs_f64(cluster.rendezvous_seconds * 0.8);
        let operation = Duration::from_secs_f64(cluster.collective_seconds);
        let options = tcp::Options { connect_timeout: meeting, operation_timeout: operation };
        let (generation, rank) = (orders.generation, orders.rank);
        let abort = orders.abort.clone();
        let mut tcp = TcpCollective::connect(listener, generation, rank, peers, options, abort)?;
        let gpu = match self.device {
            Device::Cuda(ordinal) => i32::try_from(ordinal).ok(),
            _ => None,
        };
        let nccl = match cluster.collective {
            // A GPU alone has nobody to add up with, and needs no NCCL; which refuses parts of one (MIG).
            CollectiveKind::Auto if peers.len() == 1 => false,
            CollectiveKind::Auto => {
                let can = gpu.is_some() && !has_part_of_gpu();
                tcp.all_gather_bytes(&[u8::from(can)])?.iter().all(|can| can == &[1])
            }
            CollectiveKind::Tcp => false,
            CollectiveKind::Nccl => true,
        };
        match (nccl, gpu) {
            (false, _) => Ok(Box::new(tcp)),
            (true, Some(ordinal)) => {
                let options = nccl::Options {
                    order: match self.spec.precision.determinism {
                        Determinism::Strict => nccl::Order::FixedTree,
                        Determinism::Fast => nccl::Order::Library,
                    },
                    connect_timeout: meeting,
                    operation_timeout: operation,
                    abort_timeout: NCCL_ABORT,
                };
                let group = NcclCollective::connect(Box::new(tcp), ordinal, options)?;
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

/// Whether this process was given a part of a GPU, which agents name by its UUID.
fn has_part_of_gpu() -> bool {
    std::env::var(VISIBLE_DEVICES).is_ok_and(|list| list.trim_start().starts_with("MIG-"))
}

/// The way to the agent; several threads may speak.
#[derive(Clone)]
struct Voice(Arc<Mutex<UnixStream>>);

impl Voice {
    fn new(link: &UnixStream) -> Result<Self, Failure> {
        let link = link.try_clone().map_err(|error| crash(format!("cannot speak: {error}")))?;
        Ok(Self(Arc::new(Mutex::new(link))))
    }

    fn say(&self, generation: Generation, news: RankNews) {
        self.write(&FromRank::Says(RankSays { generation, news }));
    }

    fn last_words(&self, failure: &Failure) {
        self.write(&FromRank::LastWords(failure.clone()));
    }

    /// If the agent is gone this process ends by itself; see `inbox`.
    fn write(&self, message: &FromRank) {
        if let Ok(link) = self.0.lock() {
            let _ = link::write(&*link, message);
        }
    }
}
