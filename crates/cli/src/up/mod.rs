//! `baton up`: a job on this machine from its start to its end.
//!
//! [`programs`] says what is started, [`feed`] brings everything that happens into one queue,
//! [`decide`] what the end of a child means, [`run_lock`] that nobody else works in the run folder.

pub(crate) mod decide;
mod feed;
pub(crate) mod programs;
mod run_lock;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use baton_access::{Role, ServerFiles, TOKEN_VARIABLE, TlsFiles, Token, tokens};
use baton_job::{
    Time,
    exit::{self, Failure, Outcome},
};
use baton_proto::v1::{self, GetStatusResponse};
use baton_recipe::JobSpec;
use rustix::process::Signal;
use tokio::sync::mpsc::{self, UnboundedReceiver};

use self::{
    decide::Next,
    feed::{Input, Queue, Who},
    programs::{Programs, Start},
    run_lock::RunLock,
};
use crate::{
    commands::recipe,
    connect::{Address, Coordinator, DEFAULT_LISTEN, EndpointFile, RUNS},
    display::{self, Display},
    failure::{bad_input, failed},
    render,
    supervise::{Child, Exit, RestartLimiter},
};

/// Train on this machine; run it again to go on where it stopped
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton up recipes/digits_cpu.toml --ranks 2
  baton up recipes/digits_cpu.toml --set train.epochs=3 --run-dir runs/short
  baton up recipes/digits_cpu.toml --no-auto-resume         train anew
  baton up recipes/digits_cpu.toml --listen 127.0.0.1:0     beside another job

Ctrl-C saves after the current step and stops; a second one stops at once.
Exit codes: 0 completed, 75 saved and stopped, 4 saved as a budget is used up, 3 stopped by `baton stop`, 2 bad input or diverging training, 1 failed, 130 stopped at once.")]
pub(crate) struct Args {
    /// The job: a recipe, or the name of one in recipes/
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Processes that train [default: one per GPU, one without a GPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: Option<u32>,
    /// Change one value of the recipe, e.g. --set train.epochs=3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Folder for journal, logs and checkpoints [default: runs/NAME, with the recipe's name]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Where the coordinator serves; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = DEFAULT_LISTEN)]
    listen: SocketAddr,
    /// Serve on an address that other machines reach, without TLS or without tokens
    #[arg(long)]
    insecure: bool,
    /// Address by which the ranks of other machines reach those of this one [default: that of --listen]
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// Start a new run from this checkpoint: a name in checkpoint.dir, a path or a URL
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "no_auto_resume")]
    resume: Option<String>,
    /// Start a new run from fresh weights; nothing is deleted
    #[arg(long)]
    no_auto_resume: bool,
    /// Go on with the state of another recipe, if it has this one's shape; the differences are told
    #[arg(long, conflicts_with = "no_auto_resume")]
    allow_recipe_change: bool,
    /// Send the job's life as OpenTelemetry traces to a collector (OTLP over gRPC), e.g. http://127.0.0.1:4317
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Print events and progress as JSON lines
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    serves: ServerFiles,
    #[command(flatten)]
    tls: TlsFiles,
}

impl Args {
    /// A token of this role, if the coordinator wants one.
    fn token(&self, role: Role) -> Result<Option<Token>, Failure> {
        let file = self.serves.tokens.as_deref();
        file.map(|file| tokens::of_role(file, role)).transpose().map_err(bad_input)
    }
}

/// Exit code after a second Ctrl-C, as a shell has it: 128 + SIGINT.
const INTERRUPTED: u8 = 130;
/// Longest wait for a coordinator to serve: its store may be on a slow network.
const SERVE_PATIENCE: Duration = Duration::from_secs(120);
/// Longest wait for the processes to leave once the job is over. The coordinator itself waits 15 s
/// for agents and lingers a little.
const LEAVE_PATIENCE: Duration = Duration::from_secs(30);

/// Two signals so close are one that reached us twice, by the terminal and by a parent.
const SAME_SIGNAL: Duration = Duration::from_millis(500);

/// Runs the job; the exit code is that of its outcome.
pub(crate) async fn run(mut args: Args) -> Result<u8, Failure> {
    args.recipe = recipe::find(&args.recipe);
    let spec = recipe::read(&args.recipe, &args.overrides)?;
    if args.host.is_none() && args.listen.ip().is_unspecified() {
        return Err(bad_input(format!(
            "--listen {} is every address of this machine: say with --host by which one other machines reach it",
            args.listen
        )));
    }
    let programs = Programs::find()?;
    let run_dir = args.run_dir.clone().unwrap_or_else(|| Path::new(RUNS).join(&spec.name));
    let mut display = display::new(args.json);
    for key in spec.old_keys() {
        display.note(&key.to_string());
    }
    let drain = Duration::from_secs_f64(spec.cluster.drain_seconds);
    let _lock = RunLock::take(&run_dir, drain + LEAVE_PATIENCE, || {
        display.note("waiting for processes of an earlier run to save and stop");
    })
    .await?;
    run_lock::check_not_served(&run_dir).await?;
    Up::new(args, spec, programs, run_dir, display)?.run().await
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
    /// How the job ended, once that is known.
    outcome: Option<Outcome>,
    wish: Wish,
}

/// What the user wants of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// To be trained to its end.
    GoOn,
    /// To be saved and stopped, since then.
    Drain { since: Time },
    /// To be stopped at once.
    StopNow,
}

/// Why the loop is left.
enum Left {
    /// The job is over and its processes are gone.
    Over(Outcome),
    /// The user wants it to stop at once.
    Interrupted,
}

impl Up {
    fn new(
        args: Args,
        spec: JobSpec,
        programs: Programs,
        run_dir: PathBuf,
        display: Box<dyn Display>,
    ) -> Result<Self, Failure> {
        let (queue, inputs) = mpsc::unbounded_channel();
        feed::signals(&queue)?;
        let logs = run_dir.join("logs");
        Ok(Self {
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
            outcome: None,
            wish: Wish::GoOn,
        })
    }

    async fn run(mut self) -> Result<u8, Failure> {
        let since = SystemTime::now();
        let Some(endpoint) = self.start_coordinator().await? else { return Ok(INTERRUPTED) };
        let address = Address::of_endpoint(&endpoint, &EndpointFile::path(&self.run_dir));
        let operator = self.args.token(Role::Operator)?;
        let credentials = self.args.tls.credentials(operator.as_ref()).map_err(bad_input)?;
        let coordinator = Coordinator::at(address.clone(), &credentials)?;

        let status = coordinator.clone().status().await?;
        let over = status.outcome.as_ref().and_then(v1::Outcome::known);
        self.status = Some(status);
        if let Some(outcome) = over.filter(|outcome| !outcome.is_resumable()) {
            return Ok(self.was_over_before(&outcome).await);
        }

        let (run_dir, url) = (self.run_dir.display(), address.url());
        let note = format!("{run_dir} serves at {url}: open that in a browser, or run `baton top`");
        self.display.note(&note);
        tokio::spawn(feed::statuses(coordinator.clone(), self.queue.clone()));
        tokio::spawn(feed::events(coordinator.clone(), since, self.queue.clone()));
        self.start_agent(&address)?;
        // Agents know this port; a coordinator that is started again must have it again.
        let listen = SocketAddr::new(self.args.listen.ip(), endpoint.address.port());
        match self.supervise(&coordinator, &address, listen).await? {
            Left::Over(outcome) => {
                let words = self.ending(&outcome);
                self.display.end(outcome.exit_code(), self.status.as_ref(), &words);
                Ok(outcome.exit_code())
            }
            Left::Interrupted => {
                let words = "stopped at once; the same command goes on from the last checkpoint";
                self.display.end(INTERRUPTED, self.status.as_ref(), words);
                Ok(INTERRUPTED)
            }
        }
    }

    async fn supervise(
        &mut self,
        coordinator: &Coordinator,
        address: &Address,
        listen: SocketAddr,
    ) -> Result<Left, Failure> {
        loop {
            let gone = !self.coordinator.is_running() && !self.agent.is_running();
            match &self.outcome {
                Some(outcome) if gone => return Ok(Left::Over(outcome.clone())),
                None if gone && self.wish == Wish::StopNow => return Ok(Left::Interrupted),
                _ => {}
            }
            match self.next().await {
                Input::Status(status) => self.take_status(*status),
                Input::Event(event) => self.display.event(&event),
                Input::Signal(name) => self.take_signal(name, coordinator),
                Input::Ended(Who::Coordinator, exit) => self.coordinator_ended(exit).await?,
                Input::Ended(Who::Agent, exit) => self.agent_ended(exit, coordinator).await?,
                Input::Restart(_) if self.is_ending() => {}
                Input::Restart(Who::Coordinator) => self.spawn_coordinator(listen, Start::Again)?,
                Input::Restart(Who::Agent) => self.start_agent(address)?,
                Input::Overdue => self.kill(),
            }
        }
    }

    /// The queue never closes: this holds a sender.
    async fn next(&mut self) -> Input {
        match self.inputs.recv().await {
            Some(input) => input,
            None => std::future::pending().await,
        }
    }

    // ---- the coordinator ----

    /// Starts the first coordinator and waits until it serves; none if a signal came first.
    async fn start_coordinator(&mut self) -> Result<Option<EndpointFile>, Failure> {
        let path = EndpointFile::path(&self.run_dir);
        let _ = std::fs::remove_file(&path);
        self.spawn_coordinator(self.args.listen, Start::First)?;
        let began = Instant::now();
        loop {
            let endpoint = EndpointFile::read(&path);
            if let Some(endpoint) = endpoint.filter(|found| self.coordinator.has_pid(found.pid)) {
                return Ok(Some(endpoint));
            }
            if began.elapsed() >= SERVE_PATIENCE {
                let log = self.coordinator.log().display();
                let seconds = SERVE_PATIENCE.as_secs();
                return Err(failed(format!(
                    "the coordinator did not serve within {seconds} s; see {log}"
                )));
            }
            match tokio::time::timeout(Duration::from_millis(20), self.inputs.recv()).await {
                Ok(Some(Input::Ended(_, exit))) => {
                    self.coordinator.ended();
                    return Err(give_up(&self.coordinator, exit));
                }
                Ok(Some(Input::Signal(_))) => return Ok(None),
                Ok(_) | Err(_) => {}
            }
        }
    }

    fn spawn_coordinator(&mut self, listen: SocketAddr, start: Start) -> Result<(), Failure> {
        let arguments = programs::coordinator_arguments(&self.args, &self.run_dir, listen, start);
        let command = self.programs.coordinator(&arguments);
        let queue = self.queue.clone();
        self.coordinator.start(command, move |exit| {
            let _ = queue.send(Input::Ended(Who::Coordinator, exit));
        })
    }

    async fn coordinator_ended(&mut self, exit: Exit) -> Result<(), Failure> {
        self.coordinator.ended();
        if self.is_ending() {
            // An agent that it has not dismissed came too late to know that the job is over.
            self.agent.signal(Signal::TERM);
            return Ok(());
        }
        match decide::after_coordinator(exit, true) {
            Next::Restart => {}
            Next::Drained => {
                self.take_outcome(Outcome::Drained { reason: "as asked".to_owned() });
                return Ok(());
            }
            Next::LimitReached => {
                self.take_outcome(limit_reached());
                return Ok(());
            }
            Next::GiveUp => {
                let failure = give_up(&self.coordinator, exit);
                self.leave(Who::Agent).await;
                return Err(failure);
            }
        }
        if let Err(failure) = self.restart(Who::Coordinator, exit) {
            self.leave(Who::Agent).await;
            return Err(failure);
        }
        Ok(())
    }

    // ---- the agent ----

    fn start_agent(&mut self, address: &Address) -> Result<(), Failure> {
        let arguments = programs::agent_arguments(&self.args, &self.run_dir, address.url());
        let mut command = self.programs.agent(&arguments);
        command.envs(self.args.tls.to_variables());
        if let Some(token) = self.args.token(Role::Agent)? {
            // A file that this command was given is a person's.
            command.env(TOKEN_VARIABLE, token.reveal()).env_remove("BATON_TOKEN_FILE");
        }
        let queue = self.queue.clone();
        self.agent.start(command, move |exit| {
            let _ = queue.send(Input::Ended(Who::Agent, exit));
        })
    }

    async fn agent_ended(&mut self, exit: Exit, coordinator: &Coordinator) -> Result<(), Failure> {
        self.agent.ended();
        if self.is_ending() {
            return Ok(());
        }
        // It leaves when it is told of the end of the job; that may not be known here yet.
        if let Ok(status) = coordinator.clone().status().await {
            self.take_status(status);
        }
        if self.outcome.is_some() {
            return Ok(());
        }
        match decide::after_agent(exit) {
            Next::Restart => {}
            Next::Drained => {
                self.drain(coordinator, "the agent was told to go");
                return Ok(());
            }
            Next::LimitReached => {
                self.take_outcome(limit_reached());
                return Ok(());
            }
            Next::GiveUp => {
                let failure = give_up(&self.agent, exit);
                self.leave(Who::Coordinator).await;
                return Err(failure);
            }
        }
        if let Err(failure) = self.restart(Who::Agent, exit) {
            self.leave(Who::Coordinator).await;
            return Err(failure);
        }
        Ok(())
    }

    // ---- both ----

    fn child(&mut self, who: Who) -> &mut Child {
        match who {
            Who::Coordinator => &mut self.coordinator,
            Who::Agent => &mut self.agent,
        }
    }

    fn restart(&mut self, who: Who, exit: Exit) -> Result<(), Failure> {
        let now = self.now();
        let child = self.child(who);
        let Some(pause) = child.pause_before_restart(now) else {
            let Failure { class, message } = give_up(child, exit);
            let (limit, window) = (RestartLimiter::LIMIT, RestartLimiter::WINDOW.as_secs());
            let name = child.name();
            let message =
                format!("the {name} was started again {limit} times in {window} s: {message}");
            return Err(Failure { class, message });
        };
        let note = format!("the {} {exit}; starting it again", child.name());
        self.display.note(&note);
        feed::later(pause, Input::Restart(who), &self.queue);
        Ok(())
    }

    /// Asks a child to end, and waits. An agent saves first.
    async fn leave(&mut self, who: Who) {
        let patience = match who {
            Who::Coordinator => Duration::from_secs(5),
            Who::Agent => Duration::from_secs_f64(self.spec.cluster.drain_seconds) + LEAVE_PATIENCE,
        };
        if !self.child(who).is_running() {
            return;
        }
        let note = format!("ending the {}", self.child(who).name());
        self.display.note(&note);
        self.child(who).signal(Signal::TERM);
        feed::later(patience, Input::Overdue, &self.queue);
        while self.child(who).is_running() {
            match self.next().await {
                Input::Ended(ended, _) => self.child(ended).ended(),
                Input::Event(event) => self.display.event(&event),
                Input::Signal(_) | Input::Overdue => self.kill(),
                Input::Status(_) | Input::Restart(_) => {}
            }
        }
    }

    fn kill(&self) {
        self.agent.signal(Signal::KILL);
        let path = EndpointFile::path(&self.run_dir);
        if EndpointFile::read(&path).is_some_and(|found| self.coordinator.has_pid(found.pid)) {
            // It will not do so itself.
            let _ = std::fs::remove_file(path);
        }
        self.coordinator.signal(Signal::KILL);
    }

    // ---- the job ----

    fn take_status(&mut self, status: GetStatusResponse) {
        self.display.status(self.now(), &status);
        let outcome = status.outcome.as_ref().and_then(v1::Outcome::known);
        self.status = Some(status);
        if let Some(outcome) = outcome {
            self.take_outcome(outcome);
        }
    }

    fn take_outcome(&mut self, outcome: Outcome) {
        if self.outcome.is_none() {
            self.outcome = Some(outcome);
            feed::later(LEAVE_PATIENCE, Input::Overdue, &self.queue);
        }
    }

    fn take_signal(&mut self, name: &str, coordinator: &Coordinator) {
        match self.wish {
            Wish::GoOn => self.drain(coordinator, &format!("{name} at `baton up`")),
            Wish::Drain { since } if self.now().since(since) < SAME_SIGNAL => {}
            Wish::Drain { .. } | Wish::StopNow => {
                self.wish = Wish::StopNow;
                self.kill();
            }
        }
    }

    fn drain(&mut self, coordinator: &Coordinator, reason: &str) {
        self.wish = Wish::Drain { since: self.now() };
        if self.outcome.is_none() {
            self.display.note("saving and stopping; Ctrl-C again to stop at once");
            tokio::spawn(feed::drain(coordinator.clone(), reason.to_owned(), self.queue.clone()));
        }
    }

    /// Whether a child that ends is not missed.
    fn is_ending(&self) -> bool {
        self.outcome.is_some() || self.wish == Wish::StopNow
    }

    /// The run folder holds a job that has nothing left to do.
    async fn was_over_before(&mut self, outcome: &Outcome) -> u8 {
        let anew = render::anew(&self.names());
        let words =
            format!("{}\nthis had ended before; to train anew: {anew}", self.ending(outcome));
        self.outcome = Some(outcome.clone());
        self.coordinator.signal(Signal::TERM);
        feed::later(LEAVE_PATIENCE, Input::Overdue, &self.queue);
        while self.coordinator.is_running() {
            match self.next().await {
                Input::Ended(..) => self.coordinator.ended(),
                Input::Overdue | Input::Signal(_) => self.kill(),
                _ => {}
            }
        }
        self.display.end(outcome.exit_code(), self.status.as_ref(), &words);
        outcome.exit_code()
    }

    fn names(&self) -> render::Run<'_> {
        render::Run {
            recipe: &self.args.recipe,
            overrides: &self.args.overrides,
            run_dir: &self.run_dir,
            validation_set: &self.spec.data.val,
        }
    }

    fn ending(&self, outcome: &Outcome) -> String {
        let nothing_known =
            GetStatusResponse { name: self.spec.name.clone(), ..GetStatusResponse::default() };
        render::ending(self.status.as_ref().unwrap_or(&nothing_known), outcome, &self.names())
    }

    fn now(&self) -> Time {
        Time(0).after(self.start.elapsed())
    }
}

/// Known from an exit code alone.
fn limit_reached() -> Outcome {
    let reason = "a budget of the recipe's limits is used up; raise it to go on".to_owned();
    Outcome::LimitReached { reason }
}

/// Why a child that will not be started again ended, in its own words if it left any.
fn give_up(child: &Child, exit: Exit) -> Failure {
    let message = child.last_error().unwrap_or_else(|| {
        format!("the {} {exit}; its log is {}", child.name(), child.log().display())
    });
    match exit {
        Exit::Code(code) if code == i32::from(exit::BAD_INPUT) => bad_input(message),
        Exit::Code(_) | Exit::Signal(_) => failed(message),
    }
}
