//! `baton up`: runs a job on this machine from start to end.
//!
//! [`programs`] builds the commands of the child processes, [`feed`] sends all inputs to one queue, [`decide`] decides
//! what to do when a child ends, [`checkpoints`] reads stores, [`run_lock`] prevents two runs in one run folder.

mod checkpoints;
pub(crate) mod decide;
pub(crate) mod feed;
pub(crate) mod programs;
pub(crate) mod run_lock;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use baton_access::{AccessRole, ClientCredentials, ServerFiles, TOKEN_VARIABLE, TlsFiles, tokens};
use baton_checkpoint::SaveId;
use baton_console::{clock::unix_millis, parent::Parent};
use baton_job::{
    Time,
    exit::{self, Failure, Outcome},
    plan::MAX_LOCAL_RANKS,
    session::DUPLICATE_SIGNAL_WINDOW,
};
use baton_proto::v1::{self, GetStatusResponse, WatchEventsResponse};
use baton_recipe::JobSpec;
use rustix::process::Signal;
use tokio::{
    process::Command,
    sync::mpsc::{self, UnboundedReceiver},
    task::AbortHandle,
};

use self::{
    decide::{DRAIN_ANSWER_TIMEOUT, NextAction},
    feed::{ChildKind, Input, Queue},
    programs::{CoordinatorStart, Programs},
    run_lock::RunLock,
};
use crate::{
    commands::recipe,
    connect::{
        Address, Coordinator, DEFAULT_LISTEN, EndpointFile, RUNS,
        follow::{EventFeed, Feed as _},
    },
    display::{self, Display},
    failure::{bad_input, failed},
    render,
    supervise::{Child, Exit, RestartLimiter},
};

/// Train on this machine; run it again to resume where it stopped
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton up recipes/digits_cpu.toml --ranks 2
  baton up recipes/digits_cpu.toml --set train.epochs=3 --run-dir runs/short
  baton up recipes/digits_cpu.toml --no-auto-resume         train again from fresh weights
  baton up recipes/digits_cpu.toml --listen 127.0.0.1:0     run while another job uses the default port

Ctrl-C saves after the current step and stops; a second one stops immediately.
Exit codes: 0 completed, 75 saved and stopped, 4 saved because a budget is used up, 3 stopped by `baton stop`, 2 bad input or diverging training, 1 failed, 130 stopped immediately.")]
pub(crate) struct Args {
    /// Recipe file, or the name of a recipe in recipes/
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Number of ranks [default: one per GPU, or one without a GPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_LOCAL_RANKS)))]
    ranks: Option<u32>,
    /// Change one value of the recipe, e.g. --set train.epochs=3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Folder for journal, logs and checkpoints [default: runs/NAME, with the recipe's name]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Address on which the coordinator serves; port 0 chooses a free port
    #[arg(long, value_name = "ADDR:PORT", default_value = DEFAULT_LISTEN)]
    listen: SocketAddr,
    /// Allow an address that other machines can reach without TLS or without tokens
    #[arg(long)]
    insecure: bool,
    /// Address of this machine for ranks on other machines [default: the address of --listen]
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// Start a new run from this checkpoint: a name in checkpoint.dir, a path or a URL
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "no_auto_resume")]
    resume: Option<String>,
    /// Start a new run from fresh weights; nothing is deleted
    #[arg(long)]
    no_auto_resume: bool,
    /// Resume from the state of another recipe, if its shapes match; the differences are shown
    #[arg(long, conflicts_with = "no_auto_resume")]
    allow_recipe_change: bool,
    /// Send OpenTelemetry traces of the job to a collector (OTLP over gRPC), e.g. http://127.0.0.1:4317
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Print events and progress as JSON lines
    #[arg(long)]
    json: bool,
    /// Save and stop when the process that started this one ends, or at once if it is not this one
    #[arg(long, hide = true, value_name = "PID")]
    exit_with_parent: Option<u32>,
    #[command(flatten)]
    server: ServerFiles,
    #[command(flatten)]
    tls: TlsFiles,
}

impl Args {
    /// An operator's credentials, with a token if the coordinator requires one.
    fn credentials(&self) -> Result<ClientCredentials, Failure> {
        let file = self.server.tokens.as_deref();
        let token = file.map(|file| tokens::of_role(file, AccessRole::Operator)).transpose();
        self.tls.credentials(token.map_err(bad_input)?.as_ref()).map_err(bad_input)
    }
}

/// Exit code after a second Ctrl-C, as in a shell: 128 + SIGINT.
pub(crate) const INTERRUPTED: u8 = 130;
/// Maximum wait for a coordinator to serve: its store may be on a slow network.
const SERVE_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum wait for the processes to end after the job's end. The coordinator itself waits 15 s for agents, and then
/// runs a little longer.
pub(crate) const EXIT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a coordinator that crashes again and again is restarted.
const RESTART_TIMEOUT: Duration = Duration::from_secs(3_600);
/// Pause before a restart of a coordinator that has crashed too often.
const LATER_RESTART_PAUSE: Duration = Duration::from_secs(10);

/// After this time without an answer, the store is asked whether another coordinator has taken over.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time between two tries with credentials that are read again.
const RENEWAL_PAUSE: Duration = Duration::from_secs(1);

/// Time between two looks at that silence.
const SILENCE_CHECK: Duration = Duration::from_secs(10);

/// Time for the coordinator to notice that an agent's process has ended.
const DETACH_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the job and returns the exit code of its outcome.
pub(crate) async fn run(args: Args) -> Result<u8, Failure> {
    let (queue, mut inputs) = mpsc::unbounded_channel();
    // From here on: it may have to wait for an earlier run, or for a store.
    feed::signals(&queue, Input::Signal)?;
    if let Some(parent) = args.exit_with_parent {
        Parent::follow(Signal::TERM, Some(parent))?;
    }
    let mut display = display::new(args.json);
    let prepared = tokio::select! {
        prepared = prepare(args, &mut *display) => prepared?,
        _ = inputs.recv() => return Ok(end_before_the_start(&mut *display)),
    };
    let PreparedRun { args, spec, programs, run_dir, lock: _lock } = prepared;
    Up::new(args, spec, programs, run_dir, display, (queue, inputs)).run().await
}

/// A run that no other command can start at the same time.
struct PreparedRun {
    args: Args,
    spec: JobSpec,
    programs: Programs,
    run_dir: PathBuf,
    lock: RunLock,
}

async fn prepare(mut args: Args, display: &mut dyn Display) -> Result<PreparedRun, Failure> {
    args.recipe = recipe::find(&args.recipe);
    let spec = recipe::read(&args.recipe, &args.overrides)?;
    if args.host.is_none() && args.listen.ip().is_unspecified() {
        return Err(bad_input(format!(
            "--listen {} means all addresses of this machine: give with --host the address that other machines use",
            args.listen
        )));
    }
    let run_dir = args.run_dir.clone().unwrap_or_else(|| Path::new(RUNS).join(&spec.name));
    // Before anything is written there.
    if let Some(name) = run_dir.to_str().and_then(SaveId::around) {
        return Err(bad_input(format!(
            "run folder {} is inside checkpoint {name}, and would be removed with it: choose a folder beside the checkpoints",
            run_dir.display()
        )));
    }
    if let Some(checkpoint) = &args.resume {
        checkpoints::check(checkpoint, &spec, &run_dir).await?;
    }
    let programs = Programs::find()?;
    for key in spec.deprecated_keys() {
        display.note(&key.to_string());
    }
    let drain = Duration::from_secs_f64(spec.cluster.drain_seconds);
    let lock = RunLock::take(&run_dir, "--run-dir", drain + EXIT_TIMEOUT, || {
        display.note("waiting for processes of an earlier run to save and stop");
    })
    .await?;
    run_lock::check_not_served(&run_dir).await?;
    Ok(PreparedRun { args, spec, programs, run_dir, lock })
}

/// A signal came before the coordinator served the job. Returns the exit code: supervisors start the command again.
fn end_before_the_start(display: &mut dyn Display) -> u8 {
    display.end(
        exit::DRAINED,
        None,
        "stopped before the job was started; its checkpoints are as they were",
    );
    exit::DRAINED
}

/// The run in progress.
struct Up {
    args: Args,
    spec: JobSpec,
    programs: Programs,
    run_dir: PathBuf,
    display: Box<dyn Display>,
    coordinator: Child,
    agent: Child,
    queue: Queue,
    inputs: UnboundedReceiver<Input>,
    start: Instant,
    status: Option<GetStatusResponse>,
    /// The newest generation before this start.
    began_after: u64,
    /// How the job ended, once this is known.
    outcome: Option<Outcome>,
    stop_request: StopRequest,
    /// When the coordinator last answered.
    last_answer: Time,
    /// When the credentials were last read again.
    renewed_at: Time,
    /// Whether another coordinator has taken over from that of this command, which then is an agent among others.
    is_elsewhere: bool,
    /// The newest events, which are not shown again when another coordinator reports them.
    known_events: EventFeed,
    /// Whether an event was shown.
    shows_events: bool,
    /// Time of this start, milliseconds since 1970: earlier events are of earlier runs.
    events_since: u64,
    /// The last note about a restart or silence, until the coordinator answers: the same is not said again.
    last_restart_note: String,
}

/// The coordinator that serves the job, and what it tells the queue.
struct Served {
    coordinator: Coordinator,
    credentials: ClientCredentials,
    feeds: [AbortHandle; 2],
}

/// Whether the user has asked to stop the job.
#[derive(Clone, Debug, PartialEq, Eq)]
enum StopRequest {
    /// No request: the job trains to its end.
    NotRequested,
    /// Save and stop, requested at this time; `without_coordinator` once it did not answer.
    Drain { since: Time, reason: String, without_coordinator: bool },
    /// Stop immediately.
    StopNow,
}

/// Why supervision ended.
enum SupervisionEnd {
    /// The job and its processes have ended.
    JobEnded(Outcome),
    /// The user stopped it immediately.
    Interrupted,
}

impl Up {
    fn new(
        args: Args,
        spec: JobSpec,
        programs: Programs,
        run_dir: PathBuf,
        display: Box<dyn Display>,
        (queue, inputs): (Queue, UnboundedReceiver<Input>),
    ) -> Self {
        let logs = run_dir.join("logs");
        Self {
            args,
            spec,
            programs,
            display,
            coordinator: Child::new("coordinator", logs.join("coordinator.log")),
            agent: Child::new("agent", logs.join("agent.log")),
            run_dir,
            queue,
            inputs,
            start: Instant::now(),
            status: None,
            began_after: 0,
            outcome: None,
            stop_request: StopRequest::NotRequested,
            last_answer: Time(0),
            renewed_at: Time(0),
            is_elsewhere: false,
            known_events: EventFeed::new(0, false),
            shows_events: false,
            events_since: unix_millis(),
            last_restart_note: String::new(),
        }
    }

    async fn run(mut self) -> Result<u8, Failure> {
        let Some(endpoint) = self.start_coordinator().await? else {
            return Ok(end_before_the_start(&mut *self.display));
        };
        let address = Address::of_endpoint(&endpoint, &EndpointFile::path(&self.run_dir));
        let credentials = self.args.credentials()?;
        let coordinator = Coordinator::at(address, &credentials)?;

        let status = coordinator.clone().status().await?;
        self.began_after = status.generation;
        let earlier_outcome = status.outcome.as_ref().and_then(v1::Outcome::known);
        self.status = Some(status);
        if let Some(outcome) = earlier_outcome.filter(|outcome| !outcome.is_resumable()) {
            return Ok(self.report_earlier_end(&outcome).await);
        }

        let (run_dir, url) = (self.run_dir.display(), coordinator.address().url());
        let note = format!(
            "the coordinator of {run_dir} serves at {url}: open this URL in a browser, or run `baton top`"
        );
        self.display.note(&note);
        let served = self.serve_by(coordinator, credentials);
        self.start_agent(&served)?;
        feed::send_later(SILENCE_CHECK, Input::SilenceCheck, &self.queue);
        // A restarted coordinator must use the same port, because agents reconnect to it.
        let listen = SocketAddr::new(self.args.listen.ip(), endpoint.address.port());
        match self.supervise(served, listen).await? {
            SupervisionEnd::JobEnded(outcome) => {
                let text = self.end_text(&outcome);
                self.display.end(outcome.exit_code(), self.status.as_ref(), &text);
                Ok(outcome.exit_code())
            }
            SupervisionEnd::Interrupted => {
                let text = "stopped immediately; the same command resumes from the last checkpoint";
                self.display.end(INTERRUPTED, self.status.as_ref(), text);
                Ok(INTERRUPTED)
            }
        }
    }

    async fn supervise(
        &mut self,
        mut served: Served,
        listen: SocketAddr,
    ) -> Result<SupervisionEnd, Failure> {
        loop {
            let all_ended = !self.coordinator.is_running() && !self.agent.is_running();
            match &self.outcome {
                Some(outcome) if all_ended => return Ok(SupervisionEnd::JobEnded(outcome.clone())),
                None if all_ended && self.stop_request == StopRequest::StopNow => {
                    return Ok(SupervisionEnd::Interrupted);
                }
                _ => {}
            }
            match self.next().await {
                Input::Status(status) => self.handle_status(*status),
                Input::Moved(coordinator) => served.coordinator = *coordinator,
                Input::SilenceCheck => self.check_silence(&mut served).await?,
                Input::Refused(failure) => self.handle_refusal(&failure, &mut served),
                Input::Event(event) => self.show_event(&event),
                Input::Signal(name) => self.handle_signal(name, &served),
                Input::Ended(kind, exit) => self.handle_exit(kind, exit, &mut served).await?,
                Input::Restart(_) if self.is_ending() => {}
                Input::Restart(ChildKind::Coordinator) if self.is_elsewhere => {}
                Input::Restart(ChildKind::Coordinator) => {
                    let began_after = self.began_after;
                    self.spawn_coordinator(listen, CoordinatorStart::Restart { began_after })?;
                    self.request_drain(&served);
                }
                Input::Restart(ChildKind::Agent) => self.start_agent(&served)?,
                Input::AnswerTimeout => self.drain_without_answer(&mut served).await,
                Input::ExitTimeout => self.kill(),
            }
        }
    }

    /// The next input. The queue never closes, because `self` has a sender.
    async fn next(&mut self) -> Input {
        match self.inputs.recv().await {
            Some(input) => input,
            None => std::future::pending().await,
        }
    }

    // ---- the coordinator ----

    /// Starts the first coordinator and waits until it serves; `None` if a signal came first.
    async fn start_coordinator(&mut self) -> Result<Option<EndpointFile>, Failure> {
        let path = EndpointFile::path(&self.run_dir);
        let _ = std::fs::remove_file(&path);
        self.spawn_coordinator(self.args.listen, CoordinatorStart::First)?;
        let start = Instant::now();
        loop {
            let endpoint = EndpointFile::read(&path);
            if let Some(endpoint) = endpoint.filter(|found| self.coordinator.has_pid(found.pid)) {
                return Ok(Some(endpoint));
            }
            if start.elapsed() >= SERVE_TIMEOUT {
                let log = self.coordinator.log().display();
                let seconds = SERVE_TIMEOUT.as_secs();
                return Err(failed(format!(
                    "the coordinator did not serve within {seconds} s; see {log}"
                )));
            }
            match tokio::time::timeout(Duration::from_millis(20), self.inputs.recv()).await {
                Ok(Some(Input::Ended(_, exit))) => {
                    self.coordinator.ended();
                    return Err(child_failure(&self.coordinator, exit));
                }
                Ok(Some(Input::Signal(_))) => return Ok(None),
                Ok(_) | Err(_) => {}
            }
        }
    }

    fn spawn_coordinator(
        &mut self,
        listen: SocketAddr,
        start: CoordinatorStart,
    ) -> Result<(), Failure> {
        let command = self.programs.coordinator(&self.args, &self.run_dir, listen, start);
        self.start(ChildKind::Coordinator, command)
    }

    /// A coordinator that was restarted and does not accept this command may have other tokens or certificates: those in the
    /// files now, with which this command tries again.
    fn handle_refusal(&mut self, failure: &Failure, served: &mut Served) {
        self.note_restart(format!(
            "{failure}; until then this command and its ranks are cut off from the coordinator: the ranks go on, and Ctrl-C \
             saves their state"
        ));
        if self.now().since(self.renewed_at) < RENEWAL_PAUSE {
            return;
        }
        self.renewed_at = self.now();
        let Ok(credentials) = self.args.credentials() else { return };
        if let Ok(coordinator) = served.coordinator.with_credentials(&credentials) {
            served.feeds.iter().for_each(AbortHandle::abort);
            *served = self.serve_by(coordinator, credentials);
        }
    }

    // ---- another coordinator ----

    /// The job as this coordinator serves it, and its reports in the queue.
    fn serve_by(&self, coordinator: Coordinator, credentials: ClientCredentials) -> Served {
        let queue = || self.queue.clone();
        let statuses = feed::statuses(coordinator.clone(), queue());
        let events = feed::events(coordinator.clone(), self.known_events.clone(), queue());
        let feeds = [tokio::spawn(statuses), tokio::spawn(events)].map(|feed| feed.abort_handle());
        Served { coordinator, credentials, feeds }
    }

    /// The coordinator that has taken over while this one did not answer. One that reports the job's end is none: once it
    /// has ended too, this one goes on.
    async fn replacement(&self, served: &Served) -> Result<Option<Coordinator>, Failure> {
        let Some((other, is_replaced)) = self.other_coordinator(served).await? else {
            return Ok(None);
        };
        let has_ended = other.clone().status().await.ok().map(|status| status.outcome.is_some());
        Ok(decide::goes_on_elsewhere(has_ended, is_replaced).then_some(other))
    }

    async fn other_coordinator(
        &self,
        served: &Served,
    ) -> Result<Option<(Coordinator, bool)>, Failure> {
        let identity = self.run_dir.join("identity");
        let Ok(identity) = std::fs::read_to_string(identity) else { return Ok(None) };
        let store = checkpoints::own_store(&self.spec, &self.run_dir);
        Coordinator::that_took_over(store, identity.trim(), &served.credentials).await
    }

    /// From now on this command is one of the job's agents.
    fn follow(&mut self, other: Coordinator, served: &mut Served) {
        let url = other.address().url();
        self.display.note(&format!(
            "the coordinator was away, and another one has taken over: the job goes on at {url}, with this machine"
        ));
        served.feeds.iter().for_each(AbortHandle::abort);
        *served = self.serve_by(other, served.credentials.clone());
        self.is_elsewhere = true;
        self.last_answer = self.now();
        if self.stop_request != StopRequest::NotRequested {
            self.leave(served);
        }
    }

    /// If this command's coordinator hangs and another one has taken over, continues with that one. If that one hangs too,
    /// says where to look.
    ///
    /// # Errors
    /// The job has ended there, and its end was not seen.
    async fn check_silence(&mut self, served: &mut Served) -> Result<(), Failure> {
        if self.is_ending() {
            return Ok(());
        }
        feed::send_later(SILENCE_CHECK, Input::SilenceCheck, &self.queue);
        let silence = self.now().since(self.last_answer);
        if !self.is_elsewhere {
            if silence >= SILENCE_TIMEOUT
                && let Ok(Some(other)) = self.replacement(served).await
            {
                self.kill_coordinator();
                self.follow(other, served);
            }
            return Ok(());
        }
        let url = served.coordinator.address().url();
        if silence >= SILENCE_TIMEOUT && matches!(self.other_coordinator(served).await, Ok(None)) {
            self.stop_child(ChildKind::Agent).await;
            return Err(failed(format!(
                "the job has ended at {url}: the same command goes on, or says how it ended"
            )));
        }
        if silence >= SILENCE_TIMEOUT && self.last_restart_note.is_empty() {
            let logs = self.run_dir.join("logs");
            let note = format!(
                "the coordinator at {url} has not answered for {} s; why none takes over is in {}",
                silence.as_secs(),
                logs.display()
            );
            self.display.note(&note);
            self.last_restart_note = note;
        }
        Ok(())
    }

    /// Lets this machine leave a job that goes on elsewhere.
    fn leave(&mut self, served: &Served) {
        let url = served.coordinator.address().url();
        self.display.note(&format!(
            "this machine leaves the job of {url}; `baton drain --coordinator {url}` saves and stops the others"
        ));
        if !self.agent.is_running() {
            self.set_left(served);
        } else if !self.agent_was_asked() {
            self.agent.signal(Signal::TERM);
        }
    }

    /// Whether the agent saves and stops by itself; a second signal would kill its ranks.
    fn agent_was_asked(&self) -> bool {
        matches!(self.stop_request, StopRequest::Drain { without_coordinator: true, .. })
    }

    /// The outcome for this machine, once its agent has left.
    fn set_left(&mut self, served: &Served) {
        let url = served.coordinator.address().url();
        let reason = format!("this machine has left the job of {url}");
        self.set_outcome(Outcome::Drained { reason });
    }

    // ---- the agent ----

    fn start_agent(&mut self, served: &Served) -> Result<(), Failure> {
        let url = served.coordinator.address().url();
        let store = Some(self.spec.checkpoint.dir.as_str()).filter(|store| !store.is_empty());
        let mut command = self.programs.agent(&self.args, &self.run_dir, url, store);
        command.envs(self.args.tls.to_variables());
        if let Some(tokens) = &self.args.server.tokens {
            // A token in this command's environment belongs to a user, not to the agent.
            command.arg("--coordinator-tokens").arg(tokens);
            command.env_remove(TOKEN_VARIABLE).env_remove("BATON_TOKEN_FILE");
        }
        self.start(ChildKind::Agent, command)
    }

    // ---- both ----

    fn child(&mut self, kind: ChildKind) -> &mut Child {
        match kind {
            ChildKind::Coordinator => &mut self.coordinator,
            ChildKind::Agent => &mut self.agent,
        }
    }

    fn start(&mut self, kind: ChildKind, command: Command) -> Result<(), Failure> {
        let queue = self.queue.clone();
        self.child(kind).start(command, move |exit| {
            let _ = queue.send(Input::Ended(kind, exit));
        })
    }

    async fn handle_exit(
        &mut self,
        kind: ChildKind,
        exit: Exit,
        served: &mut Served,
    ) -> Result<(), Failure> {
        self.child(kind).ended();
        if kind == ChildKind::Agent && !self.is_ending() {
            // An agent ends when the coordinator reports the job's end, which may not be known here yet.
            if let Ok(status) = served.coordinator.clone().status().await {
                self.handle_status(status);
            }
        }
        if self.is_ending() {
            if kind == ChildKind::Coordinator {
                // An agent that is still running connected too late to receive the job's end.
                self.agent.signal(Signal::TERM);
            }
            return Ok(());
        }
        if kind == ChildKind::Coordinator && self.is_elsewhere {
            return Ok(());
        }
        let silence = self.now().since(self.last_answer);
        if decide::may_be_replaced(kind, exit, silence) {
            match self.replacement(served).await {
                Ok(Some(other)) => {
                    self.follow(other, served);
                    return Ok(());
                }
                Err(failure) if self.last_restart_note.is_empty() => {
                    self.display.note(&failure.message);
                }
                Ok(None) | Err(_) => {}
            }
        }
        let result = match (decide::after(kind, exit), kind) {
            (NextAction::Drained, ChildKind::Agent) if self.is_elsewhere => {
                self.set_left(served);
                Ok(())
            }
            (NextAction::Restart, _) => self.restart(kind, exit),
            (NextAction::Fail, ChildKind::Agent) => self.agent_failed(exit, served).await,
            (NextAction::Fail, ChildKind::Coordinator) => {
                Err(child_failure(&self.coordinator, exit))
            }
            (NextAction::LimitReached, _) => {
                self.set_outcome(limit_reached());
                // If the coordinator could not reach it, it saves by itself.
                self.agent.signal(Signal::TERM);
                Ok(())
            }
            // Nobody has seen that the job ended, so perhaps it has not reached the agent either.
            (NextAction::Drained, ChildKind::Coordinator) if self.agent.is_running() => {
                self.drain_agent("as requested");
                Ok(())
            }
            (NextAction::Drained, ChildKind::Coordinator) => {
                let outcome = self.drained_without_coordinator().await;
                self.set_outcome(outcome);
                Ok(())
            }
            (NextAction::Drained, ChildKind::Agent) if self.agent_was_asked() => {
                let outcome = self.drained_without_coordinator().await;
                self.set_outcome(outcome);
                self.kill();
                Ok(())
            }
            (NextAction::Drained, ChildKind::Agent) => {
                self.drain(served, "the agent was asked to leave");
                Ok(())
            }
        };
        if result.is_err() {
            self.stop_child(kind.other()).await;
        }
        result
    }

    /// The agent cannot take part. That ends the job, unless the coordinator has other agents.
    async fn agent_failed(&mut self, exit: Exit, served: &Served) -> Result<(), Failure> {
        let failure = child_failure(&self.agent, exit);
        if self.is_elsewhere {
            return Err(failure);
        }
        tokio::time::sleep(DETACH_TIMEOUT).await;
        let status = served.coordinator.clone().status().await;
        if !status.is_ok_and(|status| status.nodes.iter().any(|node| node.attached)) {
            return Err(failure);
        }
        self.display.note(&format!("training continues with the other agents; {failure}"));
        Ok(())
    }

    fn restart(&mut self, kind: ChildKind, exit: Exit) -> Result<(), Failure> {
        let now = self.now();
        let last_answer = self.last_answer;
        let child = self.child(kind);
        let (name, error) = (child.name(), child.last_error());
        let because = error.map(|error| format!(" ({error})")).unwrap_or_default();
        let (pause, what) = match child.pause_before_restart(now) {
            Some(pause) => (pause, "restarting it".to_owned()),
            // The ranks train on without a coordinator, and may hold state that is nowhere else.
            None if kind == ChildKind::Coordinator && now.since(last_answer) < RESTART_TIMEOUT => {
                let seconds = LATER_RESTART_PAUSE.as_secs();
                (
                    LATER_RESTART_PAUSE,
                    format!("the ranks go on, and it is restarted in {seconds} s"),
                )
            }
            None => {
                let Failure { class, message } = child_failure(child, exit);
                let (limit, window) =
                    (RestartLimiter::MAX_RESTARTS, RestartLimiter::WINDOW.as_secs());
                let message =
                    format!("the {name} was restarted {limit} times in {window} s: {message}");
                return Err(Failure { class, message });
            }
        };
        self.note_restart(format!("the {name} {exit}{because}; {what}"));
        feed::send_later(pause, Input::Restart(kind), &self.queue);
        Ok(())
    }

    /// Says once why there is no answer.
    fn note_restart(&mut self, note: String) {
        if self.last_restart_note != note {
            self.display.note(&note);
            self.last_restart_note = note;
        }
    }

    /// Asks a child to end, and waits for its end. An agent saves first.
    async fn stop_child(&mut self, kind: ChildKind) {
        let timeout = match kind {
            ChildKind::Coordinator => Duration::from_secs(5),
            ChildKind::Agent => {
                Duration::from_secs_f64(self.spec.cluster.drain_seconds) + EXIT_TIMEOUT
            }
        };
        if !self.child(kind).is_running() {
            return;
        }
        let note = format!("ending the {}", self.child(kind).name());
        self.display.note(&note);
        self.child(kind).signal(Signal::TERM);
        feed::send_later(timeout, Input::ExitTimeout, &self.queue);
        self.wait_for_exit(kind).await;
    }

    async fn wait_for_exit(&mut self, kind: ChildKind) {
        while self.child(kind).is_running() {
            match self.next().await {
                Input::Ended(ended, _) => self.child(ended).ended(),
                Input::Event(event) => self.show_event(&event),
                Input::Signal(_) | Input::ExitTimeout => self.kill(),
                Input::Status(_)
                | Input::Moved(_)
                | Input::Refused(_)
                | Input::Restart(_)
                | Input::AnswerTimeout
                | Input::SilenceCheck => {}
            }
        }
    }

    fn kill(&self) {
        self.agent.signal(Signal::KILL);
        self.kill_coordinator();
    }

    fn kill_coordinator(&self) {
        let path = EndpointFile::path(&self.run_dir);
        if EndpointFile::read(&path).is_some_and(|found| self.coordinator.has_pid(found.pid)) {
            // A killed coordinator cannot remove its file.
            let _ = std::fs::remove_file(path);
        }
        self.coordinator.signal(Signal::KILL);
    }

    // ---- the job ----

    /// Shows an event, unless it is known or of an earlier run. After the first one that is shown, time does not matter:
    /// the clock may be set back, and that of another coordinator may be behind.
    fn show_event(&mut self, event: &WatchEventsResponse) {
        if !self.known_events.is_new(event) {
            return;
        }
        self.shows_events |= event.unix_millis >= self.events_since;
        if self.shows_events {
            self.display.event(event);
        }
    }

    fn handle_status(&mut self, status: GetStatusResponse) {
        // Once asked to save and stop, a coordinator that does not is as good as silent.
        let was_asked = matches!(self.stop_request, StopRequest::Drain { .. });
        if !was_asked || status.drain.is_some() || status.outcome.is_some() {
            self.last_answer = self.now();
        }
        self.last_restart_note.clear();
        self.display.status(self.now(), &status);
        let outcome = status.outcome.as_ref().and_then(v1::Outcome::known);
        self.status = Some(status);
        if let Some(outcome) = outcome {
            self.set_outcome(outcome);
        }
    }

    fn set_outcome(&mut self, outcome: Outcome) {
        if self.outcome.is_none() {
            self.outcome = Some(outcome);
            feed::send_later(EXIT_TIMEOUT, Input::ExitTimeout, &self.queue);
        }
    }

    fn handle_signal(&mut self, name: &str, served: &Served) {
        match self.stop_request {
            StopRequest::NotRequested => self.drain(served, &format!("{name} at `baton up`")),
            StopRequest::Drain { since, .. }
                if self.now().since(since) < DUPLICATE_SIGNAL_WINDOW => {}
            StopRequest::Drain { .. } | StopRequest::StopNow => {
                self.stop_request = StopRequest::StopNow;
                self.kill();
            }
        }
    }

    fn drain(&mut self, served: &Served, reason: &str) {
        let reason = reason.to_owned();
        self.stop_request =
            StopRequest::Drain { since: self.now(), reason, without_coordinator: false };
        if self.is_elsewhere {
            self.leave(served);
        } else if self.outcome.is_none() {
            self.display.note("saving and stopping; press Ctrl-C again to stop immediately");
            self.request_drain(served);
            feed::send_later(DRAIN_ANSWER_TIMEOUT, Input::AnswerTimeout, &self.queue);
        }
    }

    /// Asks the coordinator to save and stop, if that is wanted. It may end before it has stored the request, and then the
    /// next one has to be asked.
    fn request_drain(&self, served: &Served) {
        if let StopRequest::Drain { reason, without_coordinator: false, .. } = &self.stop_request {
            let coordinator = served.coordinator.clone();
            tokio::spawn(feed::drain(coordinator, reason.clone(), self.queue.clone()));
        }
    }

    /// A coordinator that is silent, because it is stopped, its certificate has expired or its disk is full, is killed, and
    /// the agent saves and stops by itself. So a notice is obeyed in time.
    async fn drain_without_answer(&mut self, served: &mut Served) {
        let is_ending = self.is_ending();
        let silence = self.now().since(self.last_answer);
        let ends = decide::ends_silent_coordinator(silence, self.coordinator.is_running());
        let is_waiting = matches!(self.stop_request, StopRequest::Drain { .. });
        if !is_waiting || self.agent_was_asked() || self.is_elsewhere || is_ending {
            return;
        }
        if !ends {
            return feed::send_later(DRAIN_ANSWER_TIMEOUT, Input::AnswerTimeout, &self.queue);
        }
        if let StopRequest::Drain { without_coordinator, .. } = &mut self.stop_request {
            *without_coordinator = true;
        }
        let seconds = silence.as_secs();
        self.display.note(&format!(
            "the coordinator has not answered for {seconds} s: it is ended, and the agent saves and stops without it"
        ));
        self.kill_coordinator();
        self.agent.signal(Signal::TERM);
        // If it was replaced, this machine leaves a job that goes on.
        if let Ok(Some(other)) = self.replacement(served).await {
            self.follow(other, served);
        }
    }

    /// Lets the agent save and stop without the coordinator, which has ended for this reason.
    fn drain_agent(&mut self, reason: &str) {
        let reason = reason.to_owned();
        self.stop_request =
            StopRequest::Drain { since: self.now(), reason, without_coordinator: true };
        self.agent.signal(Signal::TERM);
    }

    /// The outcome once the agent has left without a coordinator. Only the store tells whether anything is saved.
    async fn drained_without_coordinator(&self) -> Outcome {
        let why = "the coordinator gave no answer";
        match checkpoints::newest(&self.spec, &self.run_dir).await {
            Ok(Some(name)) => {
                let reason = format!("as requested; {why}; the newest checkpoint is {name}");
                Outcome::Drained { reason }
            }
            Ok(None) => Outcome::Failed {
                failure: failed(format!(
                    "the state was not saved, and there is no checkpoint: {why}; see {}",
                    self.agent.log().display()
                )),
            },
            Err(failure) => {
                let reason = format!("as requested; {why}; what is saved is not known: {failure}");
                Outcome::Drained { reason }
            }
        }
    }

    /// Whether children are expected to end.
    fn is_ending(&self) -> bool {
        self.outcome.is_some() || self.stop_request == StopRequest::StopNow
    }

    /// Reports the end of a job that had already ended before this run, and ends the coordinator.
    async fn report_earlier_end(&mut self, outcome: &Outcome) -> u8 {
        let command = render::fresh_start_command(&self.run_info());
        let text = format!(
            "{}\nthe job had already ended; to train again from fresh weights: {command}",
            self.end_text(outcome)
        );
        self.outcome = Some(outcome.clone());
        self.coordinator.signal(Signal::TERM);
        feed::send_later(EXIT_TIMEOUT, Input::ExitTimeout, &self.queue);
        self.wait_for_exit(ChildKind::Coordinator).await;
        self.display.end(outcome.exit_code(), self.status.as_ref(), &text);
        outcome.exit_code()
    }

    fn run_info(&self) -> render::RunInfo<'_> {
        render::RunInfo {
            recipe: &self.args.recipe,
            overrides: &self.args.overrides,
            run_dir: &self.run_dir,
            is_reported: !self.is_elsewhere,
            validation_set: &self.spec.data.val,
            evaluates: self.spec.model.arch.is_program() || self.spec.model.describe(3).is_some(),
        }
    }

    fn end_text(&self, outcome: &Outcome) -> String {
        let unknown =
            GetStatusResponse { name: self.spec.name.clone(), ..GetStatusResponse::default() };
        render::ending(self.status.as_ref().unwrap_or(&unknown), outcome, &self.run_info())
    }

    fn now(&self) -> Time {
        Time(0).after(self.start.elapsed())
    }
}

/// The outcome if only the exit code of a child is known.
fn limit_reached() -> Outcome {
    let reason = "a budget of the recipe's limits is used up; raise it to resume".to_owned();
    Outcome::LimitReached { reason }
}

/// The failure of a child that is not restarted: the error that it logged, or else its exit code.
fn child_failure(child: &Child, exit: Exit) -> Failure {
    let message = child.last_error().unwrap_or_else(|| {
        format!("the {} {exit}; see its log {}", child.name(), child.log().display())
    });
    match exit {
        Exit::Code(code) if code == i32::from(exit::BAD_INPUT) => bad_input(message),
        Exit::Code(_) | Exit::Signal(_) => failed(message),
    }
}
