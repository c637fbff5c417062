//! The agent: shell around `baton_job::session`.
//!
//! One loop owns the machine and performs its actions; [`uplink`] is the connection to the
//! coordinator, [`processes`] are the rank processes, [`notices`] says that the node must go, [`vitals`] how its
//! machine does, [`gpus`] whether its GPUs are well. All of them only put events into the loop's queue. [`logs`] sends lines beside all that.

mod fabric;
mod gpus;
mod logs;
mod notices;
mod processes;
mod uplink;
mod vitals;

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_access::ClientFiles;
use baton_job::{
    NodeId, Time,
    exit::{Failure, Outcome, bad_input, crash},
    message::{RankCommand, Welcome},
    session::{Action, Event, Policy, Session},
};
use baton_recipe::{JobSpec, spec::Device};
use tokio::sync::mpsc;
use tracing::{debug, error, info, warn};

use self::{gpus::Gpus, logs::OwnLog, processes::Processes, uplink::Uplink};
use crate::{link::Setup, logging};

/// Run this node's part of a job.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where the coordinator serves.
    #[arg(
        long,
        value_name = "URL",
        env = "BATON_COORDINATOR",
        default_value = "http://127.0.0.1:29600"
    )]
    coordinator: String,
    #[command(flatten)]
    access: ClientFiles,
    /// Ranks to offer; by default one per GPU (or part of one, MIG), and one on a machine without.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: Option<u32>,
    /// This node's name, unique in the job; by default the host name.
    #[arg(long, value_name = "NAME")]
    node_id: Option<String>,
    /// Address on which the ranks of other nodes reach this one.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    host: String,
    /// Folder of this run; each rank's log goes to logs/ in it.
    #[arg(long, value_name = "DIR", default_value = ".")]
    run_dir: PathBuf,
    /// How long to look for a coordinator that has never answered.
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    connect_seconds: f64,
    /// Drain once this file is there; it is removed then.
    #[arg(long, value_name = "FILE")]
    drain_file: Option<PathBuf>,
    /// Drain and end when the process that started this one ends.
    #[arg(long)]
    exit_with_parent: bool,
}

/// What reaches the loop.
enum Input {
    /// For the machine.
    Event(Event),
    /// The coordinator's answer to a new connection.
    Welcome(Welcome),
    /// The coordinator will never want this agent.
    Refused(String),
}

type Queue = mpsc::UnboundedSender<Input>;

/// Runs until the machine says to leave.
pub(crate) fn run(args: Args) -> Result<Outcome, Failure> {
    let (own_log, own_lines) = OwnLog::channel();
    logging::start(own_log);
    if args.exit_with_parent {
        let signal = Some(rustix::process::Signal::TERM);
        rustix::process::set_parent_process_death_signal(signal)
            .map_err(|error| crash(format!("cannot follow the parent process: {error}")))?;
    }
    // On this one thread, because the kernel sends a rank its death signal when the *thread* that
    // started it ends.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| crash(format!("cannot start: {error}")))?;
    runtime.block_on(async { Agent::new(args).await?.run(own_lines).await })
}

struct Agent {
    session: Session,
    uplink: Uplink,
    processes: Processes,
    gpus: Arc<Gpus>,
    inputs: mpsc::UnboundedReceiver<Input>,
    queue: Queue,
    args: Args,
    /// Ranks that this node can run.
    slots: u32,
    /// The job it belongs to, once it is known.
    welcome: Option<Welcome>,
    start: Instant,
    last_reason: String,
    node: NodeId,
    /// Who has which place here, for the logs.
    ranks: logs::Ranks,
}

impl Agent {
    async fn new(args: Args) -> Result<Self, Failure> {
        let node = NodeId(match &args.node_id {
            Some(name) => name.clone(),
            None => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        });
        let (queue, inputs) = mpsc::unbounded_channel();
        let gpus = Arc::new(Gpus::find(args.ranks).await);
        let slots = args.ranks.unwrap_or_else(|| gpus.count().max(1));
        let credentials =
            args.access.credentials(|name| std::env::var(name).ok()).map_err(bad_input)?;
        let uplink = Uplink::new(&args.coordinator, &credentials, queue.clone())?;
        let fabric = fabric::look(&args.host);
        if let Some(warning) = fabric.warning() {
            warn!("{warning}");
        }
        let processes =
            Processes::new(args.run_dir.join("logs"), gpus.clone(), fabric, queue.clone())?;
        info!(%node, slots, coordinator = args.coordinator, "agent started");
        let session = Session::new(node.clone(), slots, Policy::default());
        Ok(Self {
            session,
            uplink,
            processes,
            gpus,
            inputs,
            queue,
            args,
            slots,
            welcome: None,
            start: Instant::now(),
            last_reason: String::new(),
            node,
            ranks: logs::Ranks::default(),
        })
    }

    async fn run(mut self, own_lines: mpsc::Receiver<logs::Lines>) -> Result<Outcome, Failure> {
        let (folder, node) = (self.args.run_dir.join("logs"), self.node.0.clone());
        let (ranks, caller) = (self.ranks.clone(), self.uplink.caller());
        logs::ship(folder, self.slots, node, ranks, caller, own_lines)?;
        vitals::watch(&self.args.run_dir, self.gpus.clone(), self.queue.clone())?;
        gpus::watch_errors(self.gpus.clone(), self.queue.clone())?;
        notices::forward_signals(self.queue.clone())?;
        notices::watch_file(self.args.drain_file.clone(), self.queue.clone());
        notices::watch_metadata(self.start, self.queue.clone())?;
        let mut event = Event::Tick;
        loop {
            if let Some(outcome) = self.step(event)? {
                return Ok(outcome);
            }
            event = self.next().await?;
        }
    }

    async fn next(&mut self) -> Result<Event, Failure> {
        loop {
            let deadline = self.session.deadline().map(|at| at.since(self.now()));
            let wait = deadline.unwrap_or(Duration::MAX);
            match tokio::time::timeout(wait, self.inputs.recv()).await {
                Err(_) | Ok(None) => return Ok(Event::Tick),
                Ok(Some(Input::Event(event))) => return Ok(event),
                Ok(Some(Input::Welcome(welcome))) => self.welcome(welcome)?,
                Ok(Some(Input::Refused(reason))) => {
                    self.processes.kill_all();
                    return Err(bad_input(format!("the coordinator refused this agent: {reason}")));
                }
            }
        }
    }

    fn now(&self) -> Time {
        Time(0).after(self.start.elapsed())
    }

    fn step(&mut self, event: Event) -> Result<Option<Outcome>, Failure> {
        debug!(?event, "event");
        if event == Event::Disconnected {
            self.give_up_if_never_answered()?;
        }
        for action in self.session.handle(self.now(), event) {
            debug!(?action, "action");
            match action {
                Action::Connect => self.uplink.connect(),
                Action::Send(report) => self.uplink.send(report),
                Action::Spawn { local_rank, incarnation } => match self.setup() {
                    Some(setup) => self.processes.spawn(local_rank, incarnation, setup),
                    None => error!(%local_rank, "a launch came before the welcome"),
                },
                Action::KeepSpare => {
                    if let Some(setup) = self.setup() {
                        self.processes.keep_spare(setup);
                    }
                }
                Action::Tell { local_rank, command } => {
                    if let RankCommand::Join { rank, .. } = &command
                        && let Ok(mut ranks) = self.ranks.lock()
                    {
                        ranks.insert(local_rank, rank.0);
                    }
                    self.processes.tell(local_rank, command);
                }
                Action::Terminate(local_rank) => self.processes.terminate(local_rank),
                Action::Kill(local_rank) => self.processes.kill(local_rank),
                Action::Exit(outcome) => {
                    info!(%outcome, "agent leaves");
                    return Ok(Some(outcome));
                }
            }
        }
        let reason = self.session.reason();
        if reason != self.last_reason {
            info!("{reason}");
            self.last_reason = reason;
        }
        Ok(None)
    }

    /// What every rank of this node has to know.
    fn setup(&self) -> Option<Setup> {
        Some(Setup {
            job: self.welcome.clone()?,
            local_ranks: self.slots,
            cache_dir: self.args.run_dir.join("cache"),
            host: self.args.host.clone(),
        })
    }

    fn welcome(&mut self, welcome: Welcome) -> Result<(), Failure> {
        if let Some(known) = &self.welcome
            && known.job_id != welcome.job_id
        {
            self.processes.kill_all();
            return Err(crash(format!(
                "another job ({}) is served at {} now; start a new agent for it",
                welcome.job_id, self.args.coordinator
            )));
        }
        let spec = JobSpec::from_json(&welcome.recipe_json).map_err(bad_input)?;
        self.session.adopt(Policy::new(&spec));
        let on_gpus = spec.cluster.device != Device::Cpu;
        if on_gpus && self.welcome.is_none() {
            self.gpus.admit(&self.queue)?;
        }
        self.processes.use_gpus(on_gpus);
        self.welcome = Some(welcome);
        Ok(())
    }

    fn give_up_if_never_answered(&self) -> Result<(), Failure> {
        let patience = Duration::from_secs_f64(self.args.connect_seconds.max(0.0));
        if self.welcome.is_some() || self.start.elapsed() < patience {
            return Ok(());
        }
        Err(crash(format!(
            "no coordinator answers at {} ({}): start one with `baton-coordinator serve`, or give the \
             right address with --coordinator",
            self.args.coordinator,
            self.uplink.last_error()
        )))
    }
}
