//! Finds the coordinator that has taken over from a lost one, or starts it. The rules are in `baton_job::standby`.

use std::{
    fs::{self, File, OpenOptions},
    io,
    net::{SocketAddr, ToSocketAddrs},
    path::PathBuf,
    process::Stdio,
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::Duration,
};

use baton_access::{ServerFiles, TOKEN_VARIABLE};
use baton_checkpoint::{BucketAccess, CoordinatorLease, Error, Store};
use baton_console::programs::find;
use baton_job::{
    JobId, Time,
    exit::{Failure, crash},
    message::Directive,
    standby::{SeenLease, Standby, StandbyAction},
};
use tokio::{
    process::{Child, Command},
    task::JoinHandle,
};
use tracing::{info, warn};

use super::{AgentInput, InputQueue};

/// Flags of an agent whose node may run the coordinator.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct StandbyFlags {
    /// Address to serve on, if this node takes over the job of a lost coordinator [default: a free port of --host]
    #[arg(long, help_heading = "Standby", value_name = "ADDR:PORT")]
    standby_listen: Option<SocketAddr>,
    /// The same files as those of the coordinator, without which this node cannot take over from one with TLS or tokens.
    #[command(flatten)]
    access: ServerFiles,
}

/// What a coordinator on this node needs.
pub(super) struct StandbySetup {
    /// The agent's run folder.
    pub(super) run_dir: PathBuf,
    /// Address on which other nodes reach this one.
    pub(super) host: String,
    pub(super) flags: StandbyFlags,
    /// Whether the lost coordinator was reached by TLS or with a token.
    pub(super) is_protected: bool,
}

impl StandbySetup {
    /// Why this node cannot run the coordinator.
    fn obstacle(&self) -> Option<String> {
        if self.is_protected && !self.flags.access.are_secure() {
            let files = "--tls-cert, --tls-key and --tokens";
            return Some(format!(
                "the job's coordinator has TLS or tokens: give its {files} here too"
            ));
        }
        let files = &self.flags.access;
        let unusable = files.tls().map(drop).and_then(|()| files.tokens().map(drop)).err();
        unusable
            .map(|error| error.to_string())
            .or_else(|| find("baton-coordinator").err().map(|failure| failure.message))
    }

    /// Address to serve on: not on all interfaces, of which some may be public.
    fn listen(&self) -> io::Result<SocketAddr> {
        if let Some(listen) = self.flags.standby_listen {
            return Ok(listen);
        }
        let mut found = (self.host.as_str(), 0).to_socket_addrs()?;
        found.next().ok_or_else(|| io::Error::other(format!("{} has no address", self.host)))
    }

    /// Starts a coordinator that continues the job of the store with the lease after this one.
    fn start(&self, location: &str, after: u64) -> Result<Child, Failure> {
        let mut command = Command::new(find("baton-coordinator")?);
        // Each has a folder of its own, as it begins with the journal in the store.
        let run_dir = self.run_dir.join(format!("coordinator-{}", after + 1));
        command.args([
            "serve",
            "--take-over",
            location,
            "--after",
            &after.to_string(),
            "--run-dir",
        ]);
        let explain = |error: io::Error| crash(format!("a coordinator cannot be started: {error}"));
        let listen = self.listen().map_err(explain)?;
        command.arg(run_dir).args(["--listen", &listen.to_string(), "--host", &self.host]);
        if !self.is_protected && !self.flags.access.are_secure() {
            command.arg("--insecure");
        }
        for (flag, file) in self.flags.access.to_arguments() {
            command.arg(flag).arg(file);
        }
        let log = self.open_log().map_err(explain)?;
        let errors = log.try_clone().map_err(explain)?;
        command
            .arg(format!("--exit-with-parent={}", std::process::id()))
            .env_remove(TOKEN_VARIABLE)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .process_group(0);
        command.spawn().map_err(explain)
    }

    /// Where the coordinator of this node logs to.
    fn log(&self) -> PathBuf {
        self.run_dir.join("logs/coordinator.log")
    }

    fn open_log(&self) -> io::Result<File> {
        fs::create_dir_all(self.run_dir.join("logs"))?;
        OpenOptions::new().create(true).append(true).open(self.log())
    }
}

/// This node's part in finding and replacing a lost coordinator.
pub(super) struct StandbyNode {
    state: Standby,
    setup: StandbySetup,
    location: String,
    reader: LeaseReader,
    queue: InputQueue,
    /// Waits for the end of the coordinator of this node, if one was started.
    coordinator: Option<JoinHandle<()>>,
    /// Whether the coordinator has reported the job's end.
    is_dismissed: bool,
}

/// Longest wait for the coordinator of this node to report the job's end to the other nodes.
const END_TIMEOUT: Duration = Duration::from_secs(20);

impl StandbyNode {
    /// For the job whose checkpoints are at this location.
    pub(super) fn start(
        setup: StandbySetup,
        location: String,
        now: Time,
        queue: &InputQueue,
    ) -> Result<Self, Failure> {
        let obstacle = setup.obstacle();
        if let Some(obstacle) = &obstacle {
            info!("this node cannot replace a lost coordinator: {obstacle}");
        }
        let state = Standby::new(obstacle.is_none(), now);
        Self::new(setup, location, state, queue)
    }

    /// For an agent that has not been answered, and only follows the lease.
    pub(super) fn follow(
        setup: StandbySetup,
        location: String,
        now: Time,
        queue: &InputQueue,
    ) -> Result<Self, Failure> {
        Self::new(setup, location, Standby::new(false, now), queue)
    }

    fn new(
        setup: StandbySetup,
        location: String,
        state: Standby,
        queue: &InputQueue,
    ) -> Result<Self, Failure> {
        let reader = LeaseReader::start(location.clone(), queue.clone())
            .map_err(|error| crash(format!("cannot start a thread: {error}")))?;
        Ok(Self {
            state,
            setup,
            location,
            reader,
            queue: queue.clone(),
            coordinator: None,
            is_dismissed: false,
        })
    }

    pub(super) fn set_job(&mut self, job: JobId) {
        self.state.set_job(job);
    }

    pub(super) fn deadline(&self) -> Option<Time> {
        self.state.deadline()
    }

    /// Where the coordinator is according to the newest lease.
    pub(super) fn address(&self) -> Option<Option<&str>> {
        self.state.address()
    }

    pub(super) fn answered(&mut self, now: Time, directive: &Directive) {
        self.state.answered(now);
        self.is_dismissed |= matches!(directive, Directive::Dismiss { .. });
    }

    pub(super) fn tick(&mut self, now: Time) {
        if self.state.tick(now) == Some(StandbyAction::Look) {
            self.reader.look();
        }
    }

    /// The lease was read; the first rank of this node is one of so many. Returns whether the agent must leave, because the
    /// job has ended.
    pub(super) fn seen(
        &mut self,
        now: Time,
        (first_rank, slots): (Option<u32>, u32),
        lease: Option<SeenLease>,
    ) -> bool {
        self.state.set_place(first_rank, slots);
        match self.state.seen(now, lease) {
            Some(StandbyAction::TakeOver { after }) => self.take_over(now, after),
            Some(StandbyAction::Leave) => return true,
            Some(StandbyAction::Look) | None => {}
        }
        false
    }

    /// Starts a coordinator.
    fn take_over(&mut self, now: Time, after: u64) {
        let log = self.setup.log();
        warn!(log = %log.display(), "the coordinator is lost: this node starts one");
        match self.setup.start(&self.location, after) {
            Ok(mut child) => {
                let queue = self.queue.clone();
                self.coordinator = Some(tokio::spawn(async move {
                    match child.wait().await {
                        Ok(status) if status.success() => {
                            info!("the coordinator of this node has ended");
                        }
                        Ok(status) => warn!(
                            log = %log.display(), "the coordinator of this node has ended: {status}"
                        ),
                        Err(error) => warn!("the coordinator of this node is lost: {error}"),
                    }
                    let _ = queue.send(AgentInput::CoordinatorEnded);
                }));
            }
            Err(failure) => {
                warn!("{failure}");
                self.state.ended(now);
            }
        }
    }

    pub(super) fn ended(&mut self, now: Time) {
        self.state.ended(now);
    }

    /// Waits for the coordinator of this node, if the job has ended: it still has to report that to other nodes. If only
    /// this node leaves, its coordinator leaves with it.
    pub(super) async fn finish(self) {
        if let Some(coordinator) = self.coordinator.filter(|_| self.is_dismissed) {
            let _ = tokio::time::timeout(END_TIMEOUT, coordinator).await;
        }
    }
}

/// Reads the coordinator's lease on a thread of its own.
struct LeaseReader(Sender<()>);

impl LeaseReader {
    /// Reads it in the store at this location; each answer comes into the queue.
    fn start(location: String, queue: InputQueue) -> io::Result<Self> {
        let (requests, requested) = mpsc::channel();
        thread::Builder::new()
            .name("lease".to_owned())
            .spawn(move || read_leases(&location, &requested, &queue))?;
        Ok(Self(requests))
    }

    /// Asks for the lease.
    fn look(&self) {
        let _ = self.0.send(());
    }
}

fn read_leases(location: &str, requested: &Receiver<()>, queue: &InputQueue) {
    let access = BucketAccess {
        request_timeout: Duration::from_secs(5),
        retry_timeout: Duration::from_secs(3),
        ..BucketAccess::default()
    };
    let mut store: Option<Store> = None;
    let mut read = || -> Result<Option<CoordinatorLease>, Error> {
        let opened = match store.take() {
            Some(opened) => opened,
            None => Store::open_existing_with(location, &access)?,
        };
        let lease = opened.lease();
        store = Some(opened);
        lease
    };
    let mut last_problem = String::new();
    while requested.recv().is_ok() {
        let lease = read();
        let problem = lease.as_ref().err().map(ToString::to_string).unwrap_or_default();
        if !problem.is_empty() && problem != last_problem {
            warn!("the lease of the coordinator, which does not answer, cannot be read: {problem}");
        }
        last_problem = problem;
        let seen = lease.ok().flatten().map(SeenLease::from);
        if queue.send(AgentInput::LeaseSeen(seen)).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    fn setup(host: &str, is_protected: bool, flags: &[&str]) -> StandbySetup {
        let command = StandbyFlags::augment_args(clap::Command::new("agent"));
        let matches = command.get_matches_from([&["agent"], flags].concat());
        let flags = StandbyFlags::from_arg_matches(&matches).unwrap();
        StandbySetup { run_dir: PathBuf::from("run"), host: host.to_owned(), flags, is_protected }
    }

    #[test]
    fn a_protected_job_is_taken_over_only_with_the_coordinators_files() {
        let needs_files = |setup: StandbySetup| {
            setup.obstacle().is_some_and(|text| text.contains("--tls-cert, --tls-key and --tokens"))
        };
        let files = ["--tls-cert", "c", "--tls-key", "k", "--tokens", "t"];
        assert!(needs_files(setup("10.0.0.7", true, &[])));
        assert!(needs_files(setup("10.0.0.7", true, &files[..4])));
        assert!(!needs_files(setup("10.0.0.7", false, &[])));
        let unusable = setup("10.0.0.7", true, &files).obstacle().unwrap();
        assert!(unusable.starts_with("c: No such file"), "{unusable}");
    }

    #[test]
    fn a_coordinator_serves_on_the_address_of_its_host_only() {
        let listen = |setup: StandbySetup| setup.listen().unwrap().to_string();
        assert_eq!(listen(setup("10.0.0.7", false, &[])), "10.0.0.7:0");
        assert!(setup("localhost", false, &[]).listen().unwrap().ip().is_loopback());
        let given = setup("10.0.0.7", false, &["--standby-listen", "10.0.0.8:29600"]);
        assert_eq!(listen(given), "10.0.0.8:29600");
    }
}
