//! The agent: the program around the state machine `baton_job::session`.
//!
//! One loop owns the session and performs its actions. [`uplink`] is the connection to the coordinator, [`processes`]
//! are the rank processes, [`notices`] reports shutdown signals and interruption notices, [`stats`] measures the
//! machine, and [`gpus`] monitors its GPUs. All of them only put events into the loop's queue. [`logs`] sends log lines
//! independently, and [`standby`] finds or starts another coordinator if that of the job is lost.

mod fabric;
mod gpus;
mod logs;
mod notices;
mod processes;
mod standby;
mod stats;
mod uplink;

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_access::{AccessRole, ClientCredentials, ClientFiles, tokens};
use baton_console::parent::Parent;
use baton_job::{
    NodeId, Time,
    exit::{Failure, Outcome, bad_input, crash},
    message::{RankCommand, Welcome},
    parse_seconds,
    plan::MAX_LOCAL_RANKS,
    session::{Action, Event, Policy, Session},
    standby::SeenLease,
};
use baton_recipe::{JobSpec, spec::DeviceChoice};
use tokio::sync::mpsc;
use tracing::{debug, error, info, warn};

pub(crate) use self::gpus::shown_by_driver;
use self::{
    gpus::Gpus,
    logs::OwnLog,
    processes::Processes,
    standby::{StandbyFlags, StandbyNode, StandbySetup},
    uplink::Uplink,
};
use crate::{link::Setup, logging};

/// Run this node's part of a job.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Address of the coordinator.
    #[arg(
        long,
        value_name = "URL",
        env = "BATON_COORDINATOR",
        default_value = "http://127.0.0.1:29600"
    )]
    coordinator: String,
    /// Checkpoint store of the job, a folder or s3://BUCKET/PREFIX, which says where the coordinator is if another machine
    /// has taken over. Needed only by an agent that starts after that.
    #[arg(long, value_name = "STORE")]
    store: Option<String>,
    /// Take over from a coordinator that is lost also if none has answered yet, as after all machines lost power.
    #[arg(long, requires = "store")]
    standby_at_once: bool,
    #[command(flatten)]
    access: ClientFiles,
    /// Take the agent's token from the coordinator's own file of tokens; `baton up` gives it.
    #[arg(long, hide = true, value_name = "FILE")]
    coordinator_tokens: Option<PathBuf>,
    /// Ranks to offer; by default one per GPU (or MIG part of a GPU), and one on a machine without GPUs.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_LOCAL_RANKS)))]
    ranks: Option<u32>,
    /// Name of this node, unique in the job; by default the host name.
    #[arg(long, value_name = "NAME")]
    node_id: Option<String>,
    /// Address on which ranks on other nodes reach this node.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    host: String,
    /// Run folder; each rank's log is written to logs/ in it.
    #[arg(long, value_name = "DIR", default_value = ".")]
    run_dir: PathBuf,
    /// Give up after this many seconds if no coordinator has ever answered.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    connect_seconds: Duration,
    /// Drain this node when this file appears; the file is then removed.
    #[arg(long, value_name = "FILE")]
    drain_file: Option<PathBuf>,
    /// Drain and exit when the process that started this one ends, or at once if it is not this one.
    #[arg(long, value_name = "PID", num_args = 0..=1, require_equals = true)]
    exit_with_parent: Option<Option<u32>>,
    #[command(flatten)]
    standby: StandbyFlags,
}

impl Args {
    fn credentials(&self) -> Result<ClientCredentials, baton_access::Error> {
        match &self.coordinator_tokens {
            None => self.access.credentials(|name| std::env::var(name).ok()),
            Some(file) => {
                let token = tokens::of_role(file, AccessRole::Agent)?;
                self.access.tls.credentials(Some(&token))
            }
        }
    }
}

/// Input of the agent's loop.
enum AgentInput {
    /// An event for the session.
    Event(Event),
    /// The coordinator's answer to a new connection.
    Welcome(Welcome),
    /// The coordinator refused this agent.
    Refused(Failure),
    /// The coordinator's lease, if there is one and it can be read.
    LeaseSeen(Option<SeenLease>),
    /// The coordinator that this agent has started has ended.
    CoordinatorEnded,
    /// The coordinator refused its certificate or token, or the agent the coordinator's.
    Unauthorized(Failure),
}

type InputQueue = mpsc::UnboundedSender<AgentInput>;

/// Runs until the session ends.
pub(crate) fn run(args: Args) -> Result<Outcome, Failure> {
    let (own_log, own_lines) = OwnLog::channel();
    logging::start(own_log);
    let follow = |parent| Parent::follow(rustix::process::Signal::TERM, parent);
    let parent = args.exit_with_parent.map(follow).transpose()?;
    // The runtime uses only this thread: the kernel sends a rank its death signal when the *thread* that started it
    // ends.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| crash(format!("cannot start the async runtime: {error}")))?;
    runtime.block_on(async { Agent::new(args).await?.run(own_lines, parent).await })
}

struct Agent {
    session: Session,
    uplink: Uplink,
    processes: Processes,
    gpus: Arc<Gpus>,
    inputs: mpsc::UnboundedReceiver<AgentInput>,
    queue: InputQueue,
    args: Args,
    /// Number of ranks that this node can run.
    slots: u32,
    /// The job, once the coordinator has sent it.
    welcome: Option<Welcome>,
    start: Instant,
    last_reason: String,
    /// Why the coordinator last did not admit this agent; the same is not logged again.
    last_refusal: String,
    node: NodeId,
    /// Once the coordinator has sent the job.
    standby: Option<StandbyNode>,
    /// Whether the coordinator was reached with TLS or a token.
    is_protected: bool,
    /// Rank of each local rank, for labelling log lines.
    ranks: logs::Ranks,
}

impl Agent {
    async fn new(args: Args) -> Result<Self, Failure> {
        if args.run_dir.to_str().is_none() {
            let dir = args.run_dir.display();
            return Err(bad_input(format!("--run-dir {dir}: its path must be UTF-8")));
        }
        let node = NodeId(match &args.node_id {
            Some(name) => name.clone(),
            None => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        });
        let (queue, inputs) = mpsc::unbounded_channel();
        let gpus = Arc::new(Gpus::detect(args.ranks).await);
        let slots = args.ranks.unwrap_or_else(|| gpus.count().max(1));
        let credentials = args.credentials().map_err(bad_input)?;
        let uplink = Uplink::new(&args.coordinator, &credentials, queue.clone())?;
        let is_protected = uplink.has_tls() || credentials.has_token();
        let fabric = fabric::detect(&args.host);
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
            last_refusal: String::new(),
            node,
            standby: None,
            is_protected,
            ranks: logs::Ranks::default(),
        })
    }

    async fn run(
        mut self,
        own_lines: mpsc::Receiver<logs::LogLines>,
        parent: Option<Parent>,
    ) -> Result<Outcome, Failure> {
        let (folder, node) = (self.args.run_dir.join("logs"), self.node.0.clone());
        let (ranks, caller) = (self.ranks.clone(), self.uplink.caller());
        logs::ship(folder, self.slots, node, ranks, caller, own_lines)?;
        stats::watch(&self.args.run_dir, self.gpus.clone(), self.queue.clone())?;
        gpus::watch_errors(self.gpus.clone(), self.queue.clone())?;
        notices::forward_signals(self.queue.clone(), parent)?;
        notices::watch_file(self.args.drain_file.clone(), self.queue.clone());
        notices::watch_metadata(self.start, self.queue.clone())?;
        if let Some(location) = self.args.store.clone() {
            let (setup, now) = (self.standby_setup(), self.now());
            self.standby = Some(match self.args.standby_at_once {
                true => StandbyNode::start(setup, location, now, &self.queue)?,
                false => StandbyNode::follow(setup, location, now, &self.queue)?,
            });
        }
        let mut event = Event::Tick;
        loop {
            if let Some(outcome) = self.handle(event)? {
                // The coordinator, which may be this node's, waits until every agent has left.
                drop(self.uplink);
                if let Some(standby) = self.standby {
                    standby.finish().await;
                }
                return Ok(outcome);
            }
            event = self.next_event().await?;
        }
    }

    /// Waits for the session's next event, at most until its deadline.
    async fn next_event(&mut self) -> Result<Event, Failure> {
        loop {
            self.watch_coordinator();
            let standby = self.standby.as_ref().and_then(StandbyNode::deadline);
            let deadline = self.session.deadline().into_iter().chain(standby).min();
            let wait = deadline.map_or(Duration::MAX, |at| at.since(self.now()));
            match tokio::time::timeout(wait, self.inputs.recv()).await {
                Err(_) | Ok(None) => return Ok(Event::Tick),
                Ok(Some(AgentInput::Event(event))) => {
                    if let (Event::Directive(directive), Some(standby)) =
                        (&event, &mut self.standby)
                    {
                        standby.answered(Time(0).after(self.start.elapsed()), directive);
                    }
                    return Ok(event);
                }
                Ok(Some(AgentInput::Welcome(welcome))) => {
                    if self.is_of_other_job(&welcome) && self.uplink.leave_flag() {
                        return Ok(Event::Disconnected);
                    }
                    self.welcome(welcome)?;
                }
                Ok(Some(AgentInput::LeaseSeen(lease))) => {
                    if let Some(event) = self.lease_seen(lease) {
                        return Ok(event);
                    }
                }
                Ok(Some(AgentInput::CoordinatorEnded)) => {
                    let now = self.now();
                    if let Some(standby) = &mut self.standby {
                        standby.ended(now);
                    }
                }
                // Ranks may hold state, and the coordinator may soon have its right files again.
                Ok(Some(AgentInput::Unauthorized(failure))) if self.welcome.is_some() => {
                    if self.last_refusal != failure.message {
                        warn!(%failure, "not admitted; tries again");
                        self.last_refusal = failure.message;
                    }
                    self.renew_credentials();
                    return Ok(Event::Disconnected);
                }
                // By somebody else's coordinator, of another version.
                Ok(Some(AgentInput::Refused(_))) if self.uplink.leave_flag() => {
                    return Ok(Event::Disconnected);
                }
                Ok(Some(AgentInput::Refused(failure) | AgentInput::Unauthorized(failure))) => {
                    self.processes.kill_all();
                    return Err(failure);
                }
            }
        }
    }

    fn now(&self) -> Time {
        Time(0).after(self.start.elapsed())
    }

    /// Passes an event to the session and performs its actions; returns the outcome if the agent must exit.
    fn handle(&mut self, event: Event) -> Result<Option<Outcome>, Failure> {
        debug!(?event, "event");
        if event == Event::Disconnected {
            self.check_connect_timeout()?;
        }
        for action in self.session.handle(self.now(), event) {
            debug!(?action, "action");
            match action {
                Action::Connect => self.uplink.connect(self.now()),
                Action::Send(report) => self.uplink.send(report),
                Action::Spawn { local_rank, incarnation } => match self.setup() {
                    Some(setup) => self.processes.spawn(local_rank, incarnation, setup),
                    None => error!(%local_rank, "received a launch before the welcome"),
                },
                Action::KeepSpare => {
                    if let Some(setup) = self.setup() {
                        self.processes.keep_spare(setup);
                    }
                }
                Action::SendToRank { local_rank, command } => {
                    if let RankCommand::Join { rank, .. } = &command {
                        self.ranks.lock().insert(local_rank, rank.0);
                    }
                    self.processes.send(local_rank, command);
                }
                Action::Terminate(local_rank) => self.processes.terminate(local_rank),
                Action::Kill(local_rank) => self.processes.kill(local_rank),
                Action::Exit(outcome) => {
                    info!(%outcome, "agent exits");
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

    /// Setup for every rank process of this node; `None` before the welcome.
    fn setup(&self) -> Option<Setup> {
        Some(Setup {
            job: self.welcome.clone()?,
            local_ranks: self.slots,
            cache_dir: self.args.run_dir.join("cache"),
            node: self.node.clone(),
            host: self.args.host.clone(),
        })
    }

    fn is_of_other_job(&self, welcome: &Welcome) -> bool {
        self.welcome.as_ref().is_some_and(|known| known.job_id != welcome.job_id)
    }

    fn welcome(&mut self, welcome: Welcome) -> Result<(), Failure> {
        self.uplink.welcomed();
        if self.is_of_other_job(&welcome) {
            self.processes.kill_all();
            return Err(crash(format!(
                "the coordinator at {1} now serves another job ({0}); start a new agent for it",
                welcome.job_id, self.args.coordinator
            )));
        }
        let spec = JobSpec::from_json(&welcome.recipe_json).map_err(bad_input)?;
        self.session.set_policy(Policy::new(&spec));
        self.session.set_job(welcome.job_id);
        let on_gpus = spec.cluster.device != DeviceChoice::Cpu;
        if on_gpus && self.welcome.is_none() {
            self.gpus.check(&self.queue)?;
        }
        self.processes.use_gpus(on_gpus);
        // One that could take over before may serve the job now.
        if self.welcome.is_none() && spec.cluster.standby && !self.args.standby_at_once {
            let location = welcome.checkpoint_location.clone();
            let setup = self.standby_setup();
            let standby = StandbyNode::start(setup, location, self.now(), &self.queue)?;
            self.standby = Some(standby);
        }
        if let Some(standby) = &mut self.standby {
            standby.set_job(welcome.job_id);
        }
        self.welcome = Some(welcome);
        Ok(())
    }

    fn standby_setup(&self) -> StandbySetup {
        StandbySetup {
            run_dir: self.args.run_dir.clone(),
            host: self.args.host.clone(),
            flags: self.args.standby.clone(),
            is_protected: self.is_protected,
        }
    }

    /// Reads the coordinator's lease if it does not answer.
    fn watch_coordinator(&mut self) {
        let now = self.now();
        if let Some(standby) = &mut self.standby {
            standby.tick(now);
        }
    }

    /// Returns what the lease says, if the coordinator is somewhere else now, or the job has ended.
    fn lease_seen(&mut self, lease: Option<SeenLease>) -> Option<Event> {
        let now = self.now();
        let first_rank = self.ranks.lock().values().min().copied();
        let standby = self.standby.as_mut()?;
        if standby.seen(now, (first_rank, self.slots), lease) {
            let reason = "the job has ended while its coordinator could not be reached".to_owned();
            return Some(Event::JobOver { reason });
        }
        let has_moved = standby.address().is_some_and(|address| self.uplink.learn(now, address));
        has_moved.then_some(Event::Redirected)
    }

    /// Reads the agent's token and certificates again: somebody may have replaced them, as those of the coordinator.
    fn renew_credentials(&mut self) {
        if let Ok(credentials) = self.args.credentials() {
            self.uplink.set_credentials(credentials);
        }
    }

    /// Fails if no coordinator has ever answered within the limit.
    fn check_connect_timeout(&self) -> Result<(), Failure> {
        if self.welcome.is_some() || self.start.elapsed() < self.args.connect_seconds {
            return Ok(());
        }
        // To a client without TLS, a coordinator with TLS looks like one that speaks nonsense.
        let is_plain = self.args.coordinator.starts_with("http://");
        let scheme = if is_plain { ", or https:// if it has TLS" } else { "" };
        Err(crash(format!(
            "no coordinator answers at {} ({}): start one with `baton-coordinator serve`, or give the \
             correct address with --coordinator{scheme}",
            self.args.coordinator,
            self.uplink.last_error()
        )))
    }
}
