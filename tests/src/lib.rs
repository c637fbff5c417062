//! Runs a job with real processes on this machine, for tests that need several programs.
//!
//! [`Cluster`] starts the binaries as `baton up` does, on free ports and in a temporary folder, with a small model that
//! trains in milliseconds. Tests wait for events of the job, never for a fixed time.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test harness: an error here makes the test fail"
)]

mod processes;

use std::{
    collections::BTreeMap,
    fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use baton_checkpoint::{BucketAccess, CoordinatorLease, EntryState, Manifest, Store};
use baton_job::exit;
use baton_proto::v1::{
    DrainRequest, GetStatusRequest, GetStatusResponse, WatchEventsRequest, WatchEventsResponse,
    job_service_client::JobServiceClient, watch_events_response::Kind,
};
use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};
use tokio_stream::StreamExt;
use tonic::{
    Streaming,
    transport::{Channel, Endpoint},
};

pub use processes::{
    ProcessExit, announce_end, binary, children, descendants, hang_up, interrupt, kill, stop,
    terminate, wake,
};

/// Longest wait for a single event. Generous, because test machines are shared; it matters only if something is broken.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Time between two looks at what no event announces.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The recipe of the tests: softmax regression on 8×8 digits.
pub const RECIPE: &str = r#"
name = "story"
seed = 7
model = { arch = "linear", num_classes = 10 }
train = { epochs = 60, global_batch = 64, resolution = 8, virtual_ranks = 4 }
optimizer = { kind = "sgd", momentum = 0.9 }
schedule = { kind = "warmup_cosine", peak_lr = 0.5, warmup_epochs = 0.5 }
checkpoint = { every_epochs = 1, every_steps = 7 }
evaluation = { every_epochs = 3, crop_ratio = 1.0 }
cluster = { device = "cpu", node_grace_seconds = 2.0 }
augment = { flip = 0.0, crop_scale = [0.8, 1.0] }

[data]
train = "DIGITS/digits-train.beton"
val = "DIGITS/digits-val.beton"
"#;

/// Begins a change of the recipe that puts checkpoints elsewhere than into the run folder.
const STORE: &str = "checkpoint.dir=";

struct Agent {
    node: String,
    ranks: u32,
    child: Child,
}

/// A run folder and the processes that use it. Running processes are killed when this is dropped.
pub struct Cluster {
    folder: TempDir,
    overrides: Vec<String>,
    environment: Vec<(String, String)>,
    /// Arguments of the shell's `ulimit`, which limits the coordinator's process.
    limit: Option<String>,
    coordinator: Option<Child>,
    agents: Vec<Agent>,
    url: String,
}

impl Default for Cluster {
    fn default() -> Self {
        Self::new()
    }
}

impl Cluster {
    /// An empty run folder with [`RECIPE`].
    #[must_use]
    pub fn new() -> Self {
        let digits = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/digits");
        let digits = digits.canonicalize().expect("assets/digits");
        Self::of_recipe(&RECIPE.replace("DIGITS", &digits.display().to_string()))
    }

    /// An empty run folder with another recipe.
    #[must_use]
    pub fn of_recipe(recipe: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(folder.path().join("recipe.toml"), recipe).expect("the recipe is written");
        Self {
            folder,
            overrides: Vec::new(),
            // Tests must not use the metadata service of this machine, if it has one.
            environment: vec![("AWS_EC2_METADATA_DISABLED".to_owned(), "true".to_owned())],
            limit: None,
            coordinator: None,
            agents: Vec::new(),
            url: String::new(),
        }
    }

    /// A run without an end, whose schedule does not depend on the number of epochs: nothing depends on how fast the
    /// machine is. [`end`](Self::end) it, then [`assert_undisturbed_bits`](Self::assert_undisturbed_bits).
    #[must_use]
    pub fn endless() -> Self {
        Self::of_epochs(1_000_000)
    }

    /// A run with the same weights as [`endless`](Self::endless) after this number of epochs.
    #[must_use]
    pub fn of_epochs(epochs: u64) -> Self {
        Self::new()
            .set(&format!("train.epochs={epochs}"))
            .set("schedule={ kind='constant', lr=0.1 }")
            .set("checkpoint={ every_epochs=1, every_steps=0, keep_last=10, keep_best=false }")
            .set("evaluation.every_epochs=1000000")
    }

    /// Changes one value of the recipe, for processes started later.
    #[must_use]
    pub fn set(mut self, entry: &str) -> Self {
        self.overrides.push(entry.to_owned());
        self
    }

    /// Adds environment variables for processes started later.
    #[must_use]
    pub fn with_environment(mut self, variables: Vec<(String, String)>) -> Self {
        self.environment.extend(variables);
        self
    }

    /// The recipe file.
    #[must_use]
    pub fn recipe(&self) -> PathBuf {
        self.folder.path().join("recipe.toml")
    }

    /// The run folder.
    #[must_use]
    pub fn run_dir(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    /// The changes by [`set`](Self::set).
    #[must_use]
    pub fn overrides(&self) -> Vec<String> {
        self.overrides.clone()
    }

    /// Starts a coordinator and waits until it serves.
    pub async fn start_coordinator(&mut self, flags: &[&str]) {
        let command = self.program();
        self.serve_recipe(command, flags).await;
    }

    /// Like [`start_coordinator`](Self::start_coordinator), with a launcher such as `ip netns exec n1`.
    pub async fn start_coordinator_by(&mut self, launcher: [&str; 4], flags: &[&str]) {
        let [program, arguments @ ..] = launcher;
        let mut command = Command::new(program);
        command.args(arguments).arg(binary("baton-coordinator"));
        self.serve_recipe(command, flags).await;
    }

    async fn serve_recipe(&mut self, mut command: Command, flags: &[&str]) {
        command.arg("serve").arg("--recipe").arg(self.recipe());
        for entry in &self.overrides {
            command.args(["--set", entry]);
        }
        self.spawn_coordinator(command, flags).await;
    }

    /// Limits the files that the coordinator can open: `-n N`, or `-Sn N` for a limit that the coordinator may raise.
    #[must_use]
    pub fn with_open_files(mut self, limit: &str) -> Self {
        self.limit = Some(limit.to_owned());
        self
    }

    /// Flags for a coordinator at the address of the previous one, to which agents reconnect.
    #[must_use]
    pub fn same_address(&self) -> [String; 2] {
        let (_, address) = self.url.split_once("://").expect("a URL");
        ["--listen".to_owned(), address.to_owned()]
    }

    /// Starts a coordinator without a recipe; it continues the job of its run folder, if there is one.
    pub async fn start_idle_coordinator(&mut self, flags: &[&str]) {
        let mut command = self.program();
        command.arg("serve");
        self.spawn_coordinator(command, flags).await;
    }

    fn program(&self) -> Command {
        let program = binary("baton-coordinator");
        let Some(limit) = &self.limit else { return Command::new(program) };
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(format!("ulimit {limit} && exec \"$0\" \"$@\"")).arg(program);
        shell
    }

    async fn spawn_coordinator(&mut self, mut command: Command, flags: &[&str]) {
        command.arg("--run-dir").arg(self.run_dir());
        command.args(["--linger-seconds", "0.2"]).args(flags);
        if !flags.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        let command = self.logged(&mut command, "coordinator").stdout(Stdio::piped());
        let mut child = command.spawn().expect("a coordinator");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let line = in_time("the coordinator serves", lines.next_line()).await.expect("its output");
        let address =
            line.unwrap_or_else(|| panic!("the coordinator ended:\n{}", self.log("coordinator")));
        let scheme = if flags.contains(&"--tls-cert") { "https" } else { "http" };
        self.url = format!("{scheme}://{address}");
        self.coordinator = Some(child);
    }

    /// Starts `baton up` with two ranks; [`log`](Self::log) finds its log by the name `up`.
    pub fn up(&self, flags: &[String], environment: &[(&str, &Path)]) -> Child {
        self.start_up(Command::new(binary("baton")), flags, environment)
    }

    /// As [`up`](Self::up), but like `nohup` it ignores that its terminal is closed.
    pub fn up_by_nohup(&self) -> Child {
        let mut command = Command::new("nohup");
        command.arg(binary("baton"));
        self.start_up(command, &[], &[])
    }

    fn start_up(
        &self,
        mut command: Command,
        flags: &[String],
        environment: &[(&str, &Path)],
    ) -> Child {
        command.arg("up").arg(self.recipe()).arg("--run-dir").arg(self.run_dir());
        command.args(["--ranks", "2", "--listen", "127.0.0.1:0"]).args(flags);
        for entry in &self.overrides {
            command.args(["--set", entry]);
        }
        let command = self.logged(&mut command, "up").envs(environment.iter().copied());
        command.spawn().expect("baton up")
    }

    /// Waits until a coordinator that `baton up` has started serves, and uses it from now on.
    pub async fn served_by(&mut self, up: &Child) {
        let file = self.run_dir().join("coordinator.json");
        let look = async || {
            let endpoint: Value = serde_json::from_slice(&fs::read(&file).ok()?).ok()?;
            let is_child = children(up.id()?).iter().any(|pid| endpoint["pid"] == *pid);
            is_child.then(|| format!("http://{}", endpoint["address"].as_str().expect("a text")))
        };
        self.url = self.until("`baton up` serves", look).await;
    }

    /// Starts an agent that offers `ranks`.
    pub fn start_agent(&mut self, node: &str, ranks: u32) {
        self.start_agent_by(&[], node, ranks, &[], &[]);
    }

    /// Starts an agent with additional flags and environment variables.
    pub fn start_agent_with(
        &mut self,
        node: &str,
        ranks: u32,
        flags: &[&str],
        environment: &[(String, String)],
    ) {
        self.start_agent_by(&[], node, ranks, flags, environment);
    }

    /// Starts an agent with a launcher, such as `ip netns exec n1`.
    pub fn start_agent_by(
        &mut self,
        launcher: &[&str],
        node: &str,
        ranks: u32,
        flags: &[&str],
        environment: &[(String, String)],
    ) {
        let worker = binary("baton-worker");
        let mut command = match launcher {
            [] => Command::new(worker),
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments).arg(worker);
                command
            }
        };
        command.args(["agent", "--coordinator", &self.url(), "--node-id", node]);
        command.args(["--ranks", &ranks.to_string()]).arg("--run-dir").arg(self.run_dir());
        let command = self.logged(&mut command, "agent");
        let child = command.args(flags).envs(environment.iter().cloned()).spawn();
        let child = child.expect("an agent");
        self.agents.push(Agent { node: node.to_owned(), ranks, child });
    }

    fn logged<'a>(&self, command: &'a mut Command, name: &str) -> &'a mut Command {
        let logs = self.run_dir().join("logs");
        fs::create_dir_all(&logs).expect("a log folder");
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(logs.join(format!("{name}.log")))
            .expect("a log file");
        let same = log.try_clone().expect("its clone");
        command.envs(self.environment.iter().cloned());
        command.stdin(Stdio::null()).stdout(same).stderr(log).kill_on_drop(true)
    }

    /// Polls until `look` finds something: for what no event announces, such as a line in a log.
    ///
    /// # Panics
    /// After [`WAIT_TIMEOUT`], with the coordinator's log.
    pub async fn until<T>(&self, description: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
        let poll = async {
            loop {
                if let Some(found) = look().await {
                    return found;
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        let result = tokio::time::timeout(WAIT_TIMEOUT, poll).await;
        let log = || self.log("coordinator");
        result.unwrap_or_else(|_| panic!("timed out: {description}:\n{}", log()))
    }

    /// The log of a process.
    #[must_use]
    pub fn log(&self, name: &str) -> String {
        let path = self.run_dir().join("logs").join(format!("{name}.log"));
        fs::read_to_string(path).unwrap_or_default()
    }

    /// URL of the coordinator.
    #[must_use]
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// A connection to the coordinator.
    pub async fn channel(&self) -> Channel {
        let endpoint = Endpoint::from_shared(self.url()).expect("an address");
        let log = || self.log("coordinator");
        endpoint.connect().await.unwrap_or_else(|error| panic!("{error}:\n{}", log()))
    }

    /// A client of the coordinator.
    pub async fn client(&self) -> JobServiceClient<Channel> {
        JobServiceClient::new(self.channel().await)
    }

    /// The status now.
    pub async fn status(&self) -> GetStatusResponse {
        let response = self.client().await.get_status(GetStatusRequest {}).await;
        let log = || self.log("coordinator");
        response.unwrap_or_else(|error| panic!("{error}:\n{}", log())).into_inner()
    }

    /// All past and new events.
    pub async fn events(&self) -> Events {
        self.events_of(WatchEventsRequest::default()).await
    }

    /// New events only, without those of earlier coordinators.
    pub async fn new_events(&self) -> Events {
        let past = WatchEventsRequest { after_id: 0, past_only: true };
        let Events(mut past) = self.events_of(past).await;
        let mut after_id = 0;
        while let Some(event) = past.next().await {
            after_id = event.expect("an event").id;
        }
        self.events_of(WatchEventsRequest { after_id, past_only: false }).await
    }

    async fn events_of(&self, request: WatchEventsRequest) -> Events {
        Events(self.client().await.watch_events(request).await.expect("events").into_inner())
    }

    /// Process id of an agent.
    #[must_use]
    pub fn agent_pid(&self, index: usize) -> u32 {
        self.agents[index].child.id().expect("an agent")
    }

    /// An agent's node and the ranks it offers.
    #[must_use]
    pub fn agent(&self, index: usize) -> (String, u32) {
        let Agent { node, ranks, .. } = &self.agents[index];
        (node.clone(), *ranks)
    }

    /// Waits until an agent exits by itself.
    pub async fn agent_ends(&mut self, index: usize) -> ExitStatus {
        let mut agent = self.agents.remove(index);
        in_time("the agent ends", agent.child.wait()).await.expect("its status")
    }

    /// Process ids of an agent's ranks.
    #[must_use]
    pub fn rank_pids(&self, agent: usize) -> Vec<u32> {
        children(self.agent_pid(agent))
    }

    /// The newest lease in the checkpoint store.
    #[must_use]
    pub fn lease(&self) -> Option<CoordinatorLease> {
        self.read_store(|store| store.lease().expect("a lease"))
    }

    /// Waits until a node has started a coordinator that takes the lease of this number, and uses it from now on.
    pub async fn taken_over(&mut self, number: u64) {
        let look = async || self.lease().filter(|lease| lease.number == number && !lease.released);
        let lease = self.until("another coordinator takes over", look).await;
        self.url = lease.address.expect("its address");
        let endpoint = Endpoint::from_shared(self.url()).expect("an address");
        let connects = async || endpoint.connect().await.ok().map(drop);
        self.until("the coordinator serves", connects).await;
    }

    /// Process id of the coordinator.
    #[must_use]
    pub fn coordinator_pid(&self) -> u32 {
        self.coordinator.as_ref().and_then(Child::id).expect("a coordinator")
    }

    /// Waits until the coordinator exits by itself; returns its exit code and the log.
    pub async fn coordinator_ends(&mut self) -> (Option<i32>, String) {
        let mut child = self.coordinator.take().expect("a coordinator");
        let status = in_time("the coordinator ends", child.wait()).await.expect("its status");
        (status.code(), self.log("coordinator"))
    }

    /// Kills the coordinator with SIGKILL.
    pub async fn kill_coordinator(&mut self) {
        let mut child = self.coordinator.take().expect("a coordinator");
        in_time("the coordinator ends", child.kill()).await.expect("it can be killed");
    }

    /// Kills an agent with SIGKILL and waits until its ranks have ended too.
    pub async fn kill_agent(&mut self, index: usize) {
        let ranks: Vec<_> = self.rank_pids(index).into_iter().map(ProcessExit::of).collect();
        let mut child = self.agents.remove(index).child;
        in_time("the agent ends", child.kill()).await.expect("it can be killed");
        for rank in ranks {
            in_time("the ranks end with their agent", rank.wait()).await;
        }
    }

    /// Waits until all processes have ended; returns the exit statuses of coordinator and agents.
    pub async fn finish(&mut self) -> (ExitStatus, Vec<ExitStatus>) {
        let mut agents = Vec::new();
        for mut agent in std::mem::take(&mut self.agents) {
            agents.push(in_time("an agent ends", agent.child.wait()).await.expect("its status"));
        }
        let mut child = self.coordinator.take().expect("a coordinator");
        let status = in_time("the coordinator ends", child.wait()).await;
        (status.expect("its status"), agents)
    }

    /// Lets an [`endless`](Self::endless) run save at the end of one more epoch, and ends it by a drain.
    pub async fn end(&mut self) {
        let mut events = self.new_events().await;
        let look = async || self.status().await.latest.map(|latest| latest.steps_per_epoch);
        let per_epoch = self.until("a step", look).await;
        // A save that is due while another one is being written is left out.
        while !events.next_of(Kind::Saved).await.step().is_multiple_of(per_epoch) {}
        let reason = "end of the test".to_owned();
        self.client().await.drain(DrainRequest { reason }).await.expect("a drain");
        if self.coordinator.is_none() {
            // A node serves the job.
            for mut agent in std::mem::take(&mut self.agents) {
                in_time("an agent ends", agent.child.wait()).await.expect("its status");
            }
            return;
        }
        let (coordinator, _) = self.finish().await;
        let code = Some(i32::from(exit::DRAINED));
        assert_eq!(coordinator.code(), code, "{}", self.log("coordinator"));
    }

    /// Asserts that the last complete epoch of an [`endless`](Self::endless) run has the bits of an undisturbed run with
    /// the same settings on one rank.
    pub async fn assert_undisturbed_bits(&self) {
        let (epochs, state) = self.newest_epoch();
        let mut undisturbed = Self::new();
        undisturbed.overrides.clone_from(&self.overrides);
        undisturbed.overrides.retain(|entry| !entry.starts_with(STORE));
        undisturbed = undisturbed.set(&format!("train.epochs={epochs}"));
        assert!(undisturbed.run_to_the_end(1).await == state, "different after {epochs} epochs");
    }

    /// Starts this [`endless`](Self::endless) run, which saves every few steps, on two ranks. Kills one of them after the
    /// save at step `saves[0]`, stops after that at `saves[1]`, and continues with one rank on another node until
    /// `saves[2]`. Checks that the state has the bits of an undisturbed run.
    pub async fn assert_same_bits_through_a_kill_and_with_other_ranks(mut self, saves: [u64; 3]) {
        self.start_coordinator(&[]).await;
        self.start_agent("node", 2);
        let mut events = self.events().await;
        events.saved_at(saves[0]).await;
        kill(self.rank_pids(0)[1]);
        events.next_of(Kind::RankFailed).await;
        events.next_of(Kind::TrainingStarted).await;
        events.saved_at(saves[1]).await;
        self.end().await;
        self.start_coordinator(&[]).await;
        self.start_agent("another", 1);
        self.new_events().await.saved_at(saves[2]).await;
        self.end().await;
        self.assert_undisturbed_bits().await;
    }

    /// Starts a coordinator and one agent with `ranks` ranks, waits for the end of the job, and returns its final
    /// state.
    pub async fn run_to_the_end(&mut self, ranks: u32) -> Vec<(String, Vec<f32>)> {
        self.start_coordinator(&[]).await;
        self.start_agent("node", ranks);
        let (coordinator, _) = self.finish().await;
        assert!(coordinator.success(), "{coordinator}:\n{}", self.log("coordinator"));
        self.newest_state()
    }

    /// Names of all checkpoint folders.
    #[must_use]
    pub fn checkpoint_names(&self) -> Vec<String> {
        let folder = self.run_dir().join("checkpoints");
        let entries = std::fs::read_dir(folder).expect("the folder exists");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        let names = names.filter_map(|name| name.into_string().ok());
        names.filter(|name| name.starts_with("step-")).collect()
    }

    /// All values of the newest checkpoint.
    #[must_use]
    pub fn newest_state(&self) -> Vec<(String, Vec<f32>)> {
        self.read_store(|store| {
            let newest = store.list().expect("a listing").into_iter().next().expect("a checkpoint");
            let EntryState::Complete(manifest) = newest.state else {
                panic!("{} is damaged", newest.name)
            };
            state_of(store, &manifest)
        })
    }

    /// The number of epochs and all values of the newest checkpoint that was saved at the end of an epoch.
    #[must_use]
    pub fn newest_epoch(&self) -> (u64, Vec<(String, Vec<f32>)>) {
        self.read_store(newest_epoch)
    }

    /// The names and shapes of the tensors that `baton checkpoint export` writes of the newest checkpoint.
    #[must_use]
    pub fn exported(&self) -> BTreeMap<String, Vec<usize>> {
        let path = self.run_dir().join("exported.safetensors");
        let mut export = std::process::Command::new(binary("baton"));
        export.args(["checkpoint", "export", "--out"]).arg(&path);
        let output = export.arg("--run-dir").arg(self.run_dir()).output().expect("baton");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let bytes = fs::read(path).expect("the export");
        let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
        let tensors = tensors.tensors().into_iter();
        tensors.map(|(name, tensor)| (name, tensor.shape().to_vec())).collect()
    }

    fn read_store<T: Send>(&self, read: impl FnOnce(&Store) -> T + Send) -> T {
        let elsewhere = self.overrides.iter().find_map(|entry| entry.strip_prefix(STORE));
        let location = elsewhere.map(str::to_owned);
        let location =
            location.unwrap_or_else(|| self.run_dir().join("checkpoints").display().to_string());
        // A store blocks, which is not allowed on the thread of an async test.
        let access =
            BucketAccess { environment: self.environment.clone(), ..BucketAccess::default() };
        let open = || Store::open_existing_with(&location, &access).expect("a store");
        let read = || read(&open());
        std::thread::scope(|scope| scope.spawn(read).join()).expect("it can be read")
    }
}

/// The number of epochs and all values of the newest checkpoint in a store that was saved at the end of an epoch.
#[must_use]
fn newest_epoch(store: &Store) -> (u64, Vec<(String, Vec<f32>)>) {
    let at_the_end_of_an_epoch = |state: EntryState| match state {
        EntryState::Complete(manifest) if manifest.progress.cursor == 0 => Some(manifest),
        _ => None,
    };
    let entries = store.list().expect("a listing").into_iter();
    let manifest =
        entries.map(|entry| entry.state).find_map(at_the_end_of_an_epoch).expect("an epoch");
    (manifest.progress.epoch.0.into(), state_of(store, &manifest))
}

/// All values of a checkpoint.
#[must_use]
pub fn state_of(store: &Store, manifest: &Manifest) -> Vec<(String, Vec<f32>)> {
    let empty =
        |region: &baton_checkpoint::RegionInfo| (region.name.clone(), vec![0.0; region.len]);
    let mut state: Vec<(String, Vec<f32>)> = manifest.regions.iter().map(empty).collect();
    let shards: Vec<_> = manifest.shards.iter().collect();
    store
        .load(manifest, &shards, NonZeroUsize::MIN, &mut |name, offset, values| {
            let (_, region) = state.iter_mut().find(|(known, _)| known == name).expect("a region");
            region[offset..offset + values.len()].copy_from_slice(values);
        })
        .expect("its values");
    state
}

/// The events of a job.
pub struct Events(Streaming<WatchEventsResponse>);

impl Events {
    /// Waits for the next event of a kind.
    pub async fn next_of(&mut self, kind: Kind) -> WatchEventsResponse {
        let wait = async {
            loop {
                let event = self.0.next().await.expect("the job continues").expect("an event");
                if event.kind() == kind {
                    return event;
                }
                assert!(
                    event.kind() != Kind::Ended,
                    "no {kind:?} before the end: {}",
                    event.message
                );
            }
        };
        in_time(&format!("{kind:?}"), wait).await
    }

    /// Waits for a checkpoint at or after a step.
    pub async fn saved_at(&mut self, step: u64) -> WatchEventsResponse {
        loop {
            let event = self.next_of(Kind::Saved).await;
            if event.step() >= step {
                return event;
            }
        }
    }
}

/// The result of `future`.
///
/// # Panics
/// After [`WAIT_TIMEOUT`].
pub async fn in_time<T>(description: &str, future: impl Future<Output = T>) -> T {
    let result = tokio::time::timeout(WAIT_TIMEOUT, future).await;
    result.unwrap_or_else(|_| panic!("timed out: {description}"))
}

/// Says that a test cannot look on this machine. Return from the test then. Only what `tests/skips.txt` lists may be
/// skipped: `scripts/check-skips.py` counts these lines.
pub fn skipped(reason: &str) {
    eprintln!("test skipped: {reason}");
}
