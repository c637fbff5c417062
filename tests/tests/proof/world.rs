//! Three hosts with real processes: agents, ranks, a coordinator; and a bucket.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

use baton_checkpoint::{BucketAccess, CoordinatorLease, EntryState, Manifest, Store};
use baton_fake_s3::Server;
use baton_job::exit;
use baton_proto::v1::{
    DrainRequest, GetStatusRequest, GetStatusResponse, WatchEventsRequest,
    get_status_response::Phase, job_service_client::JobServiceClient,
    watch_events_response::Kind as EventKind,
};
use baton_tests::{Cluster, ProcessExit, binary, children, descendants, in_time, state_of};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    task::JoinHandle,
};
use tokio_stream::StreamExt;
use tonic::transport::{Channel, Endpoint};

use crate::{
    fault::HOSTS,
    namespaces::{BRIDGE, add_host, address, ip, launcher},
};

/// Longest wait for all ranks to train after a fault.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for an answer of a coordinator, which may be out of reach.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Log filter with which ranks write the samples of each micro-batch.
const SAMPLES: &str = "info,baton::samples=trace";
/// Size of a host's disk.
const DISK: &str = "64m";

/// A machine.
#[derive(Default)]
pub(crate) struct Host {
    agent: Option<Child>,
    /// Ranks that it offers.
    pub(crate) ranks: u32,
}

pub(crate) struct World {
    folder: tempfile::TempDir,
    pub(crate) server: Server,
    store: Arc<Store>,
    settings: Vec<String>,
    hosts: BTreeMap<usize, Host>,
    /// The coordinator that this test has started, not an agent.
    first: Option<Child>,
    /// The host and the run folder of the last one that this test has started, where it may start again.
    place: Option<(usize, PathBuf)>,
    /// The last coordinator that the test has started.
    url: String,
    /// Number of coordinators that the test has started.
    starts: u32,
}

/// What remains of a run.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    /// The state after the last epoch: weights, moving average, momentum.
    pub(crate) state: Vec<(String, Vec<f32>)>,
    /// What each evaluation found, by its step.
    pub(crate) evaluations: BTreeMap<u64, String>,
    /// The samples of every micro-batch that a rank computed: epoch, position, virtual rank.
    pub(crate) samples: BTreeMap<(u64, u64, u64), String>,
    pub(crate) epochs: u64,
}

impl World {
    /// Starts a coordinator on the first host and an agent on each.
    pub(crate) async fn start(recipe: &str, ranks: [u32; HOSTS]) -> Self {
        // A folder of the namespace, which is gone with it, and with it what is mounted below.
        let folder = tempfile::tempdir_in("/run").unwrap();
        let server = Server::start_on(BRIDGE);
        let access = BucketAccess { environment: server.environment(), ..BucketAccess::default() };
        let location = server.location();
        let opened = location.clone();
        let open = move || Store::open_with(&opened, &access).unwrap();
        let store = Arc::new(tokio::task::spawn_blocking(open).await.unwrap());
        compile_clock(folder.path());
        fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
        let local = folder.path().join("local");
        let settings = vec![
            format!("checkpoint.dir={location}"),
            format!("checkpoint.local_dir={}", local.display()),
            "checkpoint.local_every_steps=7".to_owned(),
        ];
        let mut world = Self {
            folder,
            server,
            store,
            settings,
            hosts: BTreeMap::new(),
            first: None,
            place: None,
            url: String::new(),
            starts: 0,
        };
        for (host, ranks) in (1..=HOSTS).zip(ranks) {
            add_host(host);
            for disk in [world.agent_dir(host), world.coordinator_disk(host)] {
                fs::create_dir_all(&disk).unwrap();
                mount(&["-t", "tmpfs", "-o", &format!("size={DISK}"), "tmpfs"], &disk);
            }
            fs::write(world.clock(host), [0; 16]).unwrap();
            world.hosts.insert(host, Host { agent: None, ranks });
        }
        world.start_all(1).await;
        world
    }

    /// Removes all local checkpoints.
    pub(crate) fn lose_local_disks(&self) {
        fs::remove_dir_all(self.folder.path().join("local")).unwrap();
    }

    fn host_dir(&self, host: usize) -> PathBuf {
        self.folder.path().join(format!("host{host}"))
    }

    /// Run folder of an agent, on a disk of its own.
    pub(crate) fn agent_dir(&self, host: usize) -> PathBuf {
        self.host_dir(host).join("agent")
    }

    fn coordinator_disk(&self, host: usize) -> PathBuf {
        self.host_dir(host).join("coordinator")
    }

    fn clock(&self, host: usize) -> PathBuf {
        self.folder.path().join(format!("clock{host}"))
    }

    /// Logs that outlive their host.
    fn logs(&self) -> PathBuf {
        self.folder.path().join("logs")
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.hosts.values().map(|host| host.ranks).sum()
    }

    pub(crate) fn set_ranks(&mut self, ranks: [u32; HOSTS]) {
        for (host, ranks) in self.hosts.values_mut().zip(ranks) {
            host.ranks = ranks;
        }
    }

    // ---- processes ----

    fn command(&self, host: usize, program: &str) -> Command {
        let [ip, arguments @ ..] = launcher(host);
        let mut command = Command::new(ip);
        command.args(arguments).arg(binary(program));
        fs::create_dir_all(self.logs()).unwrap();
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.logs().join(format!("{program}-{host}.log")))
            .unwrap();
        command
            .envs(self.server.environment())
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .env("LD_PRELOAD", self.folder.path().join("clock.so"))
            .env("BATON_TEST_CLOCK", self.clock(host))
            .env("RUST_LOG", SAMPLES)
            .stdin(Stdio::null())
            .stderr(log)
            .kill_on_drop(true);
        command
    }

    /// Starts a coordinator on a host, and all agents.
    pub(crate) async fn start_all(&mut self, host: usize) {
        self.start_coordinator(host, &[]).await;
        for host in 1..=HOSTS {
            self.start_agent(host);
        }
    }

    /// Starts a coordinator: in the folder of the last one if it can go on there, else on this host.
    pub(crate) async fn start_coordinator(&mut self, host: usize, flags: &[&str]) {
        let lease = self.lease().await;
        let is_own = |(_, folder): &(usize, PathBuf)| {
            lease.as_ref().is_some_and(|lease| Path::new(&lease.run_dir) == folder)
                && folder.exists()
        };
        let is_lost = lease.as_ref().is_some_and(|lease| lease.renews && !lease.released);
        let again = self.place.clone().filter(is_own);
        self.starts += 1;
        let new = || (host, self.coordinator_disk(host).join(self.starts.to_string()));
        let is_elsewhere = is_lost && again.is_none();
        let (host, run_dir) = again.unwrap_or_else(new);
        let mut command = self.command(host, "baton-coordinator");
        command.arg("serve");
        if is_elsewhere {
            command.args(["--take-over", &self.server.location()]);
        } else {
            command.arg("--recipe").arg(self.folder.path().join("recipe.toml"));
            for setting in &self.settings {
                command.args(["--set", setting]);
            }
        }
        command.args(["--listen", &format!("{}:0", address(host)), "--host", &address(host)]);
        command.args(["--insecure", "--linger-seconds", "0.2", "--run-dir"]).arg(&run_dir);
        let mut child = command.args(flags).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let served = in_time("the coordinator serves", lines.next_line()).await.unwrap();
        assert!(served.is_some(), "a coordinator did not start:\n{}", self.tail());
        self.url = format!("http://{}", served.unwrap());
        self.place = Some((host, run_dir));
        self.first = Some(child);
    }

    pub(crate) fn start_agent(&mut self, host: usize) {
        let mut command = self.command(host, "baton-worker");
        let name = format!("host{host}");
        // That coordinator may be gone: the store says where it is now.
        command.args(["agent", "--coordinator", &self.url]);
        command.args(["--store", &self.server.location(), "--node-id", &name]);
        command.args(["--host", &address(host)]);
        let ranks = self.hosts[&host].ranks.to_string();
        command.args(["--ranks", &ranks, "--run-dir"]).arg(self.agent_dir(host));
        let agent = command.stdout(Stdio::null()).spawn().unwrap();
        self.host(host).agent = Some(agent);
    }

    fn host(&mut self, host: usize) -> &mut Host {
        self.hosts.get_mut(&host).unwrap()
    }

    pub(crate) fn agent_pid(&self, host: usize) -> u32 {
        self.hosts[&host].agent.as_ref().and_then(Child::id).expect("an agent")
    }

    fn children_of(&self, host: usize, name: &str) -> Vec<u32> {
        let is_named = |pid: &u32| {
            let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            // The kernel shortens names.
            !command.trim().is_empty() && name.starts_with(command.trim())
        };
        let agent = self.hosts[&host].agent.as_ref().and_then(Child::id);
        agent.map(children).unwrap_or_default().into_iter().filter(is_named).collect()
    }

    /// A rank of the host, once there is one.
    pub(crate) async fn rank_pid(&self, host: usize) -> u32 {
        let look = async || self.children_of(host, "baton-worker").first().copied();
        self.until("the agent runs ranks", look).await
    }

    /// The process of the coordinator that serves, and whether it is one that the test has started.
    pub(crate) async fn coordinator(&self) -> (u32, bool) {
        let look = async || {
            let lease = self.lease().await?;
            if let Some(first) = self.first.as_ref().filter(|_| self.is_first(&lease)) {
                return first.id().map(|pid| (pid, true));
            }
            let host = (1..=HOSTS).find(|host| {
                lease.run_dir.starts_with(&self.agent_dir(*host).display().to_string())
            })?;
            let pid = self.children_of(host, "baton-coordinator").last().copied()?;
            Some((pid, false))
        };
        self.until("a coordinator serves", look).await
    }

    /// Whether the coordinator that serves is on this host.
    pub(crate) async fn serves(&self, host: usize) -> bool {
        let lease = self.until("a lease", async || self.lease().await).await;
        let is_of_agent = lease.run_dir.starts_with(&self.agent_dir(host).display().to_string());
        let is_of_test =
            self.is_first(&lease) && self.place.as_ref().is_some_and(|at| at.0 == host);
        is_of_agent || is_of_test
    }

    /// All processes of a host.
    pub(crate) fn processes(&self, host: usize) -> Vec<u32> {
        let first = self
            .first
            .as_ref()
            .filter(|_| self.place.as_ref().is_some_and(|(place, _)| *place == host));
        let mut all = descendants(self.agent_pid(host));
        all.extend(first.and_then(Child::id));
        all
    }

    /// Kills the first coordinator, if it still runs on this host.
    pub(crate) async fn kill_first_coordinator(&mut self, host: Option<usize>) {
        let is_here = host.is_none_or(|host| self.place.as_ref().is_some_and(|at| at.0 == host));
        if let Some(mut first) = self.first.take_if(|_| is_here) {
            in_time("the coordinator ends", first.kill()).await.unwrap();
        }
    }

    fn is_first(&self, lease: &CoordinatorLease) -> bool {
        self.place.as_ref().is_some_and(|(_, run_dir)| Path::new(&lease.run_dir) == run_dir)
    }

    /// Once another coordinator has the lease, the first one must end.
    pub(crate) async fn replaced_coordinator_ends(&mut self) {
        let Some(lease) = self.lease().await else { return };
        if self.first.is_some() && !self.is_first(&lease) {
            let ended = self.first_coordinator_ends().await.unwrap();
            assert_eq!(ended.code(), Some(i32::from(exit::BAD_INPUT)), "{}", self.tail());
        }
    }

    /// The end of the first coordinator, if it still runs.
    async fn first_coordinator_ends(&mut self) -> Option<ExitStatus> {
        let mut first = self.first.take()?;
        Some(self.end_of("the coordinator", &mut first).await)
    }

    /// Kills an agent, and waits until its children have ended with it.
    pub(crate) async fn kill_agent(&mut self, host: usize) {
        let agent = self.host(host).agent.take();
        if let Some(mut agent) = agent {
            let below = agent.id().map(children).unwrap_or_default();
            let below: Vec<_> = below.into_iter().filter_map(ProcessExit::if_running).collect();
            in_time("the agent ends", agent.kill()).await.unwrap();
            for child in below {
                in_time("it ends with its agent", child.wait()).await;
            }
        }
    }

    pub(crate) async fn kill_all(&mut self) {
        self.kill_first_coordinator(None).await;
        for host in 1..=HOSTS {
            self.kill_agent(host).await;
        }
    }

    pub(crate) async fn agent_ends(&mut self, host: usize) -> ExitStatus {
        let mut agent = self.host(host).agent.take().expect("an agent");
        self.end_of(&format!("the agent of host {host}"), &mut agent).await
    }

    async fn end_of(&self, name: &str, child: &mut Child) -> ExitStatus {
        match tokio::time::timeout(RECOVERY_TIMEOUT, child.wait()).await {
            Ok(status) => status.unwrap(),
            Err(_) => panic!("timed out: {name} ends\n{}", self.tail()),
        }
    }

    /// Waits until all processes have ended; returns their exit codes.
    async fn all_end(&mut self) -> Vec<Option<i32>> {
        let mut codes: Vec<_> = self.first_coordinator_ends().await.into_iter().collect();
        for host in 1..=HOSTS {
            if self.hosts[&host].agent.is_some() {
                codes.push(self.agent_ends(host).await);
            }
        }
        codes.into_iter().map(|status| status.code()).collect()
    }

    // ---- disks, clocks ----

    /// Removes what is on the host's disks, but keeps what its ranks have logged.
    pub(crate) fn wipe(&self, host: usize) {
        self.collect_logs(host);
        for disk in [self.agent_dir(host), self.coordinator_disk(host)] {
            for entry in fs::read_dir(disk).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    fs::remove_dir_all(path).unwrap();
                } else {
                    fs::remove_file(path).unwrap();
                }
            }
        }
    }

    fn collect_logs(&self, host: usize) {
        let Ok(entries) = fs::read_dir(self.agent_dir(host).join("logs")) else { return };
        for entry in entries {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let mut all = fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(self.logs().join(format!("host{host}-{name}")))
                .unwrap();
            let mut log = fs::File::open(entry.path()).unwrap();
            std::io::copy(&mut log, &mut all).unwrap();
        }
    }

    fn ballast(&self, host: usize) -> [PathBuf; 2] {
        [self.agent_dir(host), self.coordinator_disk(host)].map(|disk| disk.join("ballast"))
    }

    /// Fills the disks of a host.
    pub(crate) fn fill(&self, host: usize) {
        for ballast in self.ballast(host) {
            let file = fs::File::create(ballast).unwrap();
            let mut at = 0;
            let block = vec![0_u8; 1 << 16];
            let full = loop {
                match file.write_at(&block, at) {
                    Ok(written) => at += written as u64,
                    Err(error) => break error,
                }
            };
            assert_eq!(full.kind(), std::io::ErrorKind::StorageFull, "{full}");
        }
    }

    pub(crate) fn make_room(&self, host: usize) {
        for ballast in self.ballast(host) {
            fs::remove_file(ballast).unwrap();
        }
    }

    /// Lets the disk of an agent that does not run be read only, or not.
    pub(crate) fn set_read_only(&self, host: usize, read_only: bool) {
        let options = if read_only { "remount,ro" } else { "remount,rw" };
        mount(&["-o", options], &self.agent_dir(host));
    }

    /// Moves the clock of a host, and forgets how often it was read.
    pub(crate) fn move_clock(&self, host: usize, seconds: i64) {
        let file = fs::OpenOptions::new().write(true).open(self.clock(host)).unwrap();
        file.write_all_at(&[seconds.to_ne_bytes(), [0; 8]].concat(), 0).unwrap();
    }

    /// How often the moved clock was read.
    pub(crate) fn clock_reads(&self, host: usize) -> u64 {
        let bytes = fs::read(self.clock(host)).unwrap();
        u64::from_ne_bytes(bytes[8..16].try_into().unwrap())
    }

    // ---- looks ----

    /// The newest lease; `None` while the store does not answer.
    pub(crate) async fn lease(&self) -> Option<CoordinatorLease> {
        self.with_store(|store| store.lease()).await?.ok()?
    }

    async fn with_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> T + Send + 'static,
    ) -> Option<T> {
        let store = Arc::clone(&self.store);
        let work = tokio::task::spawn_blocking(move || work(&store));
        tokio::time::timeout(RECOVERY_TIMEOUT, work).await.ok()?.ok()
    }

    async fn client(&self) -> Option<JobServiceClient<Channel>> {
        let url = self.lease().await?.address?;
        let endpoint = Endpoint::from_shared(url).ok()?.connect_timeout(ANSWER_TIMEOUT);
        Some(JobServiceClient::new(endpoint.connect().await.ok()?))
    }

    /// A client of the coordinator that serves.
    pub(crate) async fn connect(&self) -> JobServiceClient<Channel> {
        self.until("a coordinator answers", async || self.client().await).await
    }

    /// The status, if the coordinator of the newest lease answers.
    pub(crate) async fn status(&self) -> Option<GetStatusResponse> {
        let mut request = tonic::Request::new(GetStatusRequest {});
        request.set_timeout(ANSWER_TIMEOUT);
        let mut client = self.client().await?;
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, client.get_status(request)).await;
        Some(answer.ok()?.ok()?.into_inner())
    }

    /// Waits until all ranks have made a step in a generation after this one, and the loss of the coordinator would be
    /// noticed. Without steps between its faults, a host would be taken for a bad one. Returns the generation and the step.
    pub(crate) async fn all_train(&self, after: u64) -> (u64, u64) {
        let all = self.ranks() as usize;
        let mut first = (0, 0);
        let look = async || {
            let status = self.status().await?;
            assert!(
                status.phase() != Phase::Ended,
                "the job ended: {}\n{}",
                status.reason,
                self.tail()
            );
            let trains = status.phase() == Phase::Training && status.ranks.len() == all;
            let step = status.latest.as_ref()?.step;
            if trains && first.0 != status.generation {
                first = (status.generation, step);
            }
            let has_progress = step > first.1;
            let lease = self.lease().await?;
            let is_renewed = lease.renews && !lease.released && lease.renewals > 1;
            (trains && has_progress && is_renewed && status.generation > after)
                .then_some((status.generation, step))
        };
        self.until(&format!("{all} ranks train in a generation after {after}"), look).await
    }

    pub(crate) async fn until<T>(
        &self,
        description: &str,
        mut look: impl AsyncFnMut() -> Option<T>,
    ) -> T {
        let poll = async {
            loop {
                if let Some(found) = look().await {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let found = tokio::time::timeout(RECOVERY_TIMEOUT, poll).await;
        match found {
            Ok(found) => found,
            Err(_) => {
                panic!("timed out: {description}\n{:?}\n{}", self.status().await, self.tail())
            }
        }
    }

    /// The ends of all logs, without samples.
    pub(crate) fn tail(&self) -> String {
        let mut text = String::new();
        let logs = fs::read_dir(self.logs()).into_iter().flatten();
        let mut paths: Vec<_> = logs.map(|log| log.unwrap().path()).collect();
        for host in 1..=HOSTS {
            let logs = fs::read_dir(self.agent_dir(host).join("logs")).into_iter().flatten();
            paths.extend(logs.map(|log| log.unwrap().path()));
        }
        paths.sort();
        for path in paths {
            let log = fs::read(&path).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let lines: Vec<_> =
                log.lines().filter(|line| !line.contains("baton::samples")).collect();
            let shown = lines[lines.len().saturating_sub(40)..].join("\n");
            text += &format!(
                "--- {}\n{shown}\n",
                path.strip_prefix(self.folder.path()).unwrap().display()
            );
        }
        text
    }

    // ---- the end ----

    /// The committed checkpoints, the newest first.
    pub(crate) async fn checkpoints(&self) -> Vec<Manifest> {
        let list = |store: &Store| -> Vec<Manifest> {
            let complete = |state| match state {
                EntryState::Complete(manifest) => Some(*manifest),
                _ => None,
            };
            store.list().unwrap().into_iter().filter_map(|entry| complete(entry.state)).collect()
        };
        self.with_store(list).await.unwrap()
    }

    /// Lets the job save and stop; returns what its evaluations have found.
    pub(crate) async fn drain(&mut self) -> BTreeMap<u64, String> {
        let evaluations = follow(self.connect().await);
        let reason = "chaos".to_owned();
        self.connect().await.drain(DrainRequest { reason }).await.unwrap();
        self.all_drained().await;
        evaluations.await.unwrap()
    }

    /// Waits until all processes have ended after a drain.
    pub(crate) async fn all_drained(&mut self) {
        let codes = self.all_end().await;
        let drained = Some(i32::from(exit::DRAINED));
        assert!(codes.iter().all(|code| *code == drained), "{codes:?}\n{}", self.tail());
    }

    /// Lets the job complete the epoch that it is in.
    pub(crate) async fn complete(mut self) -> Outcome {
        let mut evaluations = self.drain().await;
        let newest = &self.checkpoints().await[0];
        let epochs = (u64::from(newest.progress.epoch.0) + 1).max(crate::LEAST_EPOCHS);
        // With another recipe it is another job.
        self.settings.push(format!("train.epochs={epochs}"));
        self.start_coordinator(1, &["--allow-recipe-change"]).await;
        let client = JobServiceClient::connect(self.url.clone()).await.unwrap();
        let events = follow(client);
        (1..=HOSTS).for_each(|host| self.start_agent(host));
        let codes = self.all_end().await;
        assert!(codes.iter().all(|code| *code == codes[0]), "{codes:?}\n{}", self.tail());
        evaluations.extend(events.await.unwrap());
        for host in 1..=HOSTS {
            self.collect_logs(host);
        }
        let samples = samples_of(&self.logs());
        let read = |store: &Store| {
            let EntryState::Complete(last) =
                store.list().unwrap().into_iter().next().unwrap().state
            else {
                panic!("the last checkpoint is not complete")
            };
            assert_eq!(last.progress.cursor, 0, "the epoch is complete");
            (u64::from(last.progress.epoch.0), state_of(store, &last))
        };
        let (saved, state) = self.with_store(read).await.unwrap();
        assert_eq!(saved, epochs);
        Outcome { code: codes[0], state, evaluations, samples, epochs }
    }
}

/// The same job on one quiet machine.
pub(crate) async fn quiet(recipe: &str, settings: &[&str], epochs: u64) -> Outcome {
    let samples = ("RUST_LOG".to_owned(), SAMPLES.to_owned());
    let cluster = settings.iter().fold(Cluster::of_recipe(recipe), |all, one| all.set(one));
    let mut cluster =
        cluster.set(&format!("train.epochs={epochs}")).with_environment(vec![samples]);
    cluster.start_coordinator(&[]).await;
    let events = follow(cluster.client().await);
    cluster.start_agent("node", 2);
    let (coordinator, _) = cluster.finish().await;
    Outcome {
        code: coordinator.code(),
        state: cluster.newest_state(),
        evaluations: events.await.unwrap(),
        samples: samples_of(&cluster.run_dir().join("logs")),
        epochs,
    }
}

/// What each evaluation of the job finds, until it ends.
fn follow(mut client: JobServiceClient<Channel>) -> JoinHandle<BTreeMap<u64, String>> {
    tokio::spawn(async move {
        let events = client.watch_events(WatchEventsRequest::default()).await;
        let mut events = events.unwrap().into_inner();
        let mut evaluations = BTreeMap::new();
        while let Some(Ok(event)) = events.next().await {
            if event.kind() == EventKind::Evaluated {
                let step = event.step();
                let before = evaluations.insert(step, event.message.clone());
                let is_same = before.as_ref().is_none_or(|before| *before == event.message);
                assert!(is_same, "two results of step {step}: {before:?} and {event:?}");
            }
        }
        evaluations
    })
}

/// The samples of each micro-batch, as ranks have logged them.
fn samples_of(logs: &Path) -> BTreeMap<(u64, u64, u64), String> {
    let mut all = BTreeMap::new();
    for log in fs::read_dir(logs).unwrap() {
        let text = fs::read(log.unwrap().path()).unwrap();
        for line in String::from_utf8_lossy(&text).lines() {
            let Some((_, fields)) = line.split_once("baton::samples: ") else { continue };
            // A line may be cut where the disk was full.
            let Some((marks, samples)) =
                fields.split_once(" samples=").filter(|(_, samples)| samples.ends_with(']'))
            else {
                continue;
            };
            let mark = |name: &str| {
                let value =
                    marks.split(' ').find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
                value
                    .and_then(|value| value.parse::<u64>().ok())
                    .unwrap_or_else(|| panic!("{line}"))
            };
            let key = (mark("epoch"), mark("cursor"), mark("virtual_rank"));
            let before = all.insert(key, samples.to_owned());
            let is_same = before.as_ref().is_none_or(|before| before == samples);
            assert!(is_same, "{key:?} once with {before:?} and once with {samples}");
        }
    }
    all
}

fn mount(arguments: &[&str], folder: &Path) {
    let ended = std::process::Command::new("mount").args(arguments).arg(folder).output().unwrap();
    assert!(ended.status.success(), "mount {arguments:?}: {ended:?}");
}

/// Compiles what moves the clock of a process.
fn compile_clock(folder: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/proof/clock.c");
    let mut compiler = std::process::Command::new("cc");
    compiler.args(["-O1", "-shared", "-fPIC", "-o"]).arg(folder.join("clock.so")).arg(source);
    let ended = compiler.output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
}

/// Runs `tc` on the link of a host; returns what it printed.
pub(crate) fn traffic_control(host: usize, arguments: &str) -> String {
    ip(&format!("netns exec n{host} tc {arguments}"))
}
