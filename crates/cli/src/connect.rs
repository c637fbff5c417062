//! Finds the coordinator and calls it. Every call has a timeout.

pub(crate) mod follow;

use std::{
    env,
    error::Error as _,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use baton_access::{
    ClientCredentials, ClientFiles, ForRun, RunFolder, client::tls_problem, run::OTHER_RUN,
};
use baton_checkpoint::{CoordinatorLease, Store};
use baton_job::exit::Failure;
use baton_proto::v1::{
    CheckpointEntry, DrainRequest, GetRecipeRequest, GetRecipeResponse, GetStatusRequest,
    GetStatusResponse, ListCheckpointsRequest, PauseRequest, RecordProfileRequest,
    RecordProfileResponse, ResumeRequest, StopRequest, StreamLogsRequest, SubmitJobRequest,
    SubmitJobResponse, TriggerCheckpointRequest, job_service_client::JobServiceClient,
};
use serde::Deserialize;
use tonic::{
    Code,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

use self::follow::{EventFeed, LogFeed, MetricsFeed};
pub(crate) use self::follow::{Feed, Follow};
use crate::{
    failure::{bad_input, failed},
    up::run_lock::RunLock,
};

/// Default address of a coordinator.
pub(crate) const DEFAULT_LISTEN: &str = "127.0.0.1:29600";
/// Environment variable with the coordinator's address.
const COORDINATOR_VARIABLE: &str = "BATON_COORDINATOR";
/// Flag with the coordinator's address.
const COORDINATOR_FLAG: &str = "--coordinator";
/// Folder in which `baton up` creates run folders.
pub(crate) const RUNS: &str = "runs";
/// HTTP/2 flow control window, bytes.
const WINDOW_BYTES: u32 = 4 << 20;
/// Maximum wait for an answer, or for the start of a stream.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Flags of every command that calls a coordinator.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct CoordinatorFlags {
    /// URL of the coordinator [env: BATON_COORDINATOR] [default: the newest run below runs/]
    #[arg(long, value_name = "URL")]
    pub(crate) coordinator: Option<String>,
    /// Run folder of the job, which contains its coordinator's address; overrides BATON_COORDINATOR
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: Option<PathBuf>,
    /// Checkpoint store of the job (a folder or s3://BUCKET/PREFIX), which says on which machine its coordinator is
    /// now; overrides BATON_COORDINATOR
    #[arg(long, value_name = "STORE", conflicts_with_all = ["coordinator", "run_dir"])]
    pub(crate) store: Option<String>,
    #[command(flatten)]
    pub(crate) access: ClientFiles,
}

/// A coordinator's address and where the address is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    url: String,
    source: String,
    /// Id of the run, if the address is from a run folder.
    run_id: Option<String>,
    /// Whether the job had ended when the address was written.
    is_over: bool,
}

impl Address {
    fn new(address: &str, source: impl Into<String>) -> Self {
        let url = match address.contains("://") {
            true => address.to_owned(),
            false => format!("http://{address}"),
        };
        Self { url, source: source.into(), run_id: None, is_over: false }
    }

    /// The address from a file that a coordinator wrote.
    pub(crate) fn of_endpoint(endpoint: &EndpointFile, path: &Path) -> Self {
        let scheme = if endpoint.tls { "https" } else { "http" };
        let address = format!("{scheme}://{}", endpoint.address);
        let run_id = endpoint.run_id.clone();
        Self { run_id, ..Self::new(&address, path.display().to_string()) }
    }

    /// As `http://host:port` or `https://host:port`.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

/// The file that a coordinator keeps in its run folder while it serves.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct EndpointFile {
    /// Address of the coordinator on this machine.
    pub(crate) address: SocketAddr,
    /// Process id of the coordinator.
    pub(crate) pid: u32,
    /// Whether it serves over TLS.
    #[serde(default)]
    pub(crate) tls: bool,
    /// Id of its run; older versions have none.
    run_id: Option<String>,
    /// Inode number of its run folder; older versions have none.
    folder: Option<u64>,
}

impl EndpointFile {
    /// Path of the file.
    pub(crate) fn path(run_dir: &Path) -> PathBuf {
        run_dir.join("coordinator.json")
    }

    /// Reads the file; `None` if it does not exist or cannot be read.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        let mut endpoint: Self = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        // "All interfaces" is an address to listen on, not one to call.
        if endpoint.address.ip().is_unspecified() {
            endpoint.address.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
        Some(endpoint)
    }

    /// Whether the coordinator wrote the file into this folder: not into another one, of which this is a copy.
    pub(crate) fn is_of(&self, run_dir: &Path) -> bool {
        match (self.folder, RunFolder::of(run_dir)) {
            (Some(written), Ok(found)) => written == found.inode,
            _ => true,
        }
    }
}

/// Finds the coordinator. In this order: the flag `--coordinator`, the run folder given by `--run-dir`, the store given by
/// `--store`, the environment `variable`, the newest run below `runs`, the default address.
fn find(flags: &CoordinatorFlags, variable: Option<&str>, runs: &Path) -> Result<Address, Failure> {
    if let Some(address) = &flags.coordinator {
        return Ok(Address::new(address, COORDINATOR_FLAG));
    }
    if let Some(run_dir) = &flags.run_dir {
        let path = EndpointFile::path(run_dir);
        let endpoint = EndpointFile::read(&path).ok_or_else(|| nothing_runs(run_dir, &path))?;
        return of_run(run_dir, &endpoint, &path);
    }
    if let Some(location) = &flags.store {
        return of_store(location);
    }
    if let Some(address) = variable {
        return Ok(Address::new(address, COORDINATOR_VARIABLE));
    }
    let newest = newest_below(runs, "coordinator.json");
    let found = newest.and_then(|path| Some((EndpointFile::read(&path)?, path)));
    match found {
        Some((endpoint, path)) => of_run(path.parent().unwrap_or(runs), &endpoint, &path),
        None => Ok(Address::new(DEFAULT_LISTEN, "the default")),
    }
}

/// No coordinator has written its address, the file `endpoint`, into the run folder.
fn nothing_runs(run_dir: &Path, endpoint: &Path) -> Failure {
    let (dir, report) = (run_dir.display(), run_dir.join("report.html"));
    failed(match report.is_file() {
        true => format!(
            "no coordinator is running in {dir}: {} shows how its job last ended; `baton up` with the same recipe \
             continues one that was stopped",
            report.display()
        ),
        // The folder of a sweep has a lock too, and no logs.
        false if run_dir.join("logs").is_dir() && RunLock::is_held(run_dir) => format!(
            "no coordinator is running in {dir} yet: `baton up` starts one; if it takes long, {dir}/logs/coordinator.log shows why"
        ),
        false => format!(
            "no coordinator is running in {dir}: there is no {}; start the job with `baton up`",
            endpoint.display()
        ),
    })
}

/// The address in the file of a run folder, unless this is a copy of the folder that the coordinator serves.
fn of_run(run_dir: &Path, endpoint: &EndpointFile, path: &Path) -> Result<Address, Failure> {
    if endpoint.is_of(run_dir) {
        return Ok(Address::of_endpoint(endpoint, path));
    }
    let (dir, address) = (run_dir.display(), endpoint.address);
    Err(failed(format!(
        "no coordinator is running in {dir}: it is a copy of the run folder of the coordinator at {address}; give \
         that folder with --run-dir, or start a job here with `baton up RECIPE --run-dir {dir}`"
    )))
}

/// The newest lease of a checkpoint store.
fn read_lease(location: &str) -> Result<Option<CoordinatorLease>, Failure> {
    let read = || Store::open_existing(location)?.lease();
    // A store blocks, which is not allowed on an async thread.
    let read = thread::scope(|scope| scope.spawn(read).join());
    let lease = read.map_err(|_| failed("reading the lease panicked; this is a bug"))?;
    lease.map_err(|error| match error.is_bad_input() {
        true => bad_input(format!("--store: {error}")),
        false => failed(format!("--store: {error}")),
    })
}

/// The address in the newest lease of a checkpoint store.
fn of_store(location: &str) -> Result<Address, Failure> {
    of_lease(location, read_lease(location)?)
}

/// The newest lease of a checkpoint store that answers within [`FIND_TIMEOUT`].
async fn lease_in_time(location: &str) -> Result<Option<CoordinatorLease>, Failure> {
    let read = {
        let location = location.to_owned();
        tokio::task::spawn_blocking(move || read_lease(&location))
    };
    match tokio::time::timeout(FIND_TIMEOUT, read).await {
        Ok(Ok(lease)) => lease,
        _ => Err(failed(format!(
            "{location} does not answer, which says where the coordinator is: check the store"
        ))),
    }
}

/// The address in a lease of a checkpoint store.
fn of_lease(location: &str, lease: Option<CoordinatorLease>) -> Result<Address, Failure> {
    let lease = lease.ok_or_else(|| {
        failed(format!(
            "{location} does not say where its coordinator is: no job with its run folder elsewhere has trained there; \
             give --coordinator or --run-dir"
        ))
    })?;
    if lease.host.is_empty() {
        return Err(failed(format!(
            "{location} does not say where its coordinator is: the lease {} is empty or damaged; give --coordinator or \
             --run-dir",
            lease.number
        )));
    }
    let CoordinatorLease { address, host, run_dir, over, .. } = lease;
    let address = address.ok_or_else(|| {
        failed(format!(
            "the coordinator is on host {host}, with the run folder {run_dir}: give its address with --coordinator \
             (if it is started with --host, {location} says it)"
        ))
    })?;
    // It may have been started again since.
    let note = if over {
        format!(", whose job has ended; its history is in {run_dir} on host {host}")
    } else {
        String::new()
    };
    Ok(Address { is_over: over, ..Address::new(&address, format!("{location}{note}")) })
}

/// Whether a token would be sent over a network without encryption to an address that is not from this user.
fn would_reveal_token(address: &str) -> bool {
    let Some(rest) = address.strip_prefix("http://") else { return false };
    let host = rest.rsplit_once(':').map_or(rest, |(host, _)| host);
    let is_local = host == "localhost"
        || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    !is_local
}

/// The most recently modified `runs/*/name`.
pub(crate) fn newest_below(runs: &Path, name: &str) -> Option<PathBuf> {
    let folders = fs::read_dir(runs).ok()?.filter_map(Result::ok);
    folders
        .map(|folder| folder.path().join(name))
        .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
        .max()
        .map(|(_, path)| path)
}

type Client = JobServiceClient<InterceptedService<Channel, ForRun>>;

/// Stream of events with increasing ids, across restarts of the coordinator.
pub(crate) type Events = Follow<EventFeed>;
/// Stream of metrics of steps and evaluations, across restarts of the coordinator.
pub(crate) type Metrics = Follow<MetricsFeed>;
/// Stream of log lines, across restarts of the coordinator.
pub(crate) type Logs = Follow<LogFeed>;

/// A client of a coordinator. It connects at the first call, and again when the connection is lost.
#[derive(Clone, Debug)]
pub(crate) struct Coordinator {
    address: Address,
    client: Client,
    /// Where to read again where the coordinator is, if a checkpoint store named it.
    store: Option<(String, ClientCredentials)>,
}

/// Longest wait for a store that says where the coordinator is now.
const FIND_TIMEOUT: Duration = Duration::from_secs(5);

impl Coordinator {
    /// The coordinator found by [`find`] in the current environment.
    pub(crate) fn find(flags: &CoordinatorFlags) -> Result<Self, Failure> {
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let credentials = flags.access.credentials(variable).map_err(bad_input)?;
        let address = find(flags, variable(COORDINATOR_VARIABLE).as_deref(), Path::new(RUNS))?;
        match &flags.store {
            Some(location) => Self::named_by(address, location, credentials),
            None => Self::at(address, &credentials),
        }
    }

    /// The coordinator that this store names.
    fn named_by(
        address: Address,
        location: &str,
        credentials: ClientCredentials,
    ) -> Result<Self, Failure> {
        if credentials.has_token() && would_reveal_token(&address.url) {
            let Address { url, source, .. } = &address;
            return Err(bad_input(format!(
                "{source} names the coordinator {url}, which has no TLS: your token is not sent there; give the address \
                 with --coordinator if you trust it"
            )));
        }
        let found = Self::at(address, &credentials)?;
        Ok(Self { store: Some((location.to_owned(), credentials)), ..found })
    }

    /// The coordinator that has taken over from the one of the run folder with this identity, and whether another one takes
    /// over from it in turn; `None` if none has, or the job has ended there.
    pub(crate) async fn that_took_over(
        location: String,
        identity: &str,
        credentials: &ClientCredentials,
    ) -> Result<Option<(Self, bool)>, Failure> {
        match lease_in_time(&location).await? {
            Some(lease) if lease.folder != identity && !lease.over => {
                let renews = lease.renews;
                let address = of_lease(&location, Some(lease))?;
                let found = Self::named_by(address, &location, credentials.clone())?;
                Ok(Some((found, renews)))
            }
            _ => Ok(None),
        }
    }

    /// Where it is.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Finds the coordinator that has taken over since, if a store said where the last one was.
    pub(crate) async fn find_again(&mut self) {
        let Some((location, credentials)) = self.store.clone() else { return };
        let lease = lease_in_time(&location).await;
        let address = lease.and_then(|lease| of_lease(&location, lease));
        if let Ok(address) = address
            && address != self.address
            && let Ok(found) = Self::named_by(address, &location, credentials)
        {
            *self = found;
        }
    }

    /// The coordinator at an address.
    pub(crate) fn at(address: Address, credentials: &ClientCredentials) -> Result<Self, Failure> {
        let Address { url, source, .. } = &address;
        if url.contains('@') {
            // It is not repeated, as it may be secret.
            return Err(bad_input(format!(
                "the address of {source} contains a user or a password: give http://host:29600, and a token with \
                 BATON_TOKEN_FILE"
            )));
        }
        let refused = |problem: String| {
            bad_input(format!(
                "{url:?} ({source}) is not an address such as http://host:29600: {problem}"
            ))
        };
        let endpoint =
            Endpoint::from_shared(url.clone()).map_err(|error| refused(error.to_string()))?;
        if !matches!(endpoint.uri().scheme_str(), Some("http" | "https")) {
            return Err(refused("it begins with neither http:// nor https://".to_owned()));
        }
        let endpoint = credentials.secure(endpoint).map_err(bad_input)?;
        let channel = endpoint
            .connect_timeout(CALL_TIMEOUT)
            .timeout(CALL_TIMEOUT)
            // With the default window of 64 KiB, the status of a thousand ranks would need many round trips.
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            // Detects a machine that disappeared without closing the connection.
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(CALL_TIMEOUT)
            .connect_lazy();
        let for_run = ForRun::new(credentials.bearer(), address.run_id.as_deref());
        let for_run = for_run.map_err(|error| bad_input(format!("{}: {error}", address.source)))?;
        let client = JobServiceClient::with_interceptor(channel, for_run);
        Ok(Self { address, client, store: None })
    }

    /// The same coordinator with other credentials.
    pub(crate) fn with_credentials(
        &self,
        credentials: &ClientCredentials,
    ) -> Result<Self, Failure> {
        let store = self.store.as_ref();
        let store = store.map(|(location, _)| (location.clone(), credentials.clone()));
        Ok(Self { store, ..Self::at(self.address.clone(), credentials)? })
    }

    /// Whether the user has named this coordinator, so that no other place may be used instead.
    pub(crate) fn is_named(&self) -> bool {
        [COORDINATOR_FLAG, COORDINATOR_VARIABLE].contains(&self.address.source.as_str())
    }

    /// Whether a coordinator is reachable, even if it rejects this client's credentials.
    pub(crate) async fn is_reachable(&mut self) -> bool {
        match self.client.get_status(GetStatusRequest {}).await {
            Ok(_) => true,
            Err(status) => matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied),
        }
    }

    /// The job's name with the coordinator's address. Commands that change a job print it, so that the user sees which
    /// job was changed.
    pub(crate) async fn name(&mut self) -> Result<String, Failure> {
        let name = self.status().await?.name;
        let Address { url, source, .. } = &self.address;
        Ok(format!("{name} at {url} ({source})"))
    }

    /// After an error the next call goes to the coordinator that has taken over, if there is one.
    pub(crate) async fn status(&mut self) -> Result<GetStatusResponse, Failure> {
        match self.client.get_status(GetStatusRequest {}).await {
            Ok(answer) => Ok(answer.into_inner()),
            Err(status) => {
                let failure = self.explain(&status);
                self.find_again().await;
                Err(failure)
            }
        }
    }

    pub(crate) async fn drain(&mut self, reason: String) -> Result<(), Failure> {
        let answer = self.client.drain(DrainRequest { reason }).await;
        answer.map(drop).map_err(|status| self.explain(&status))
    }

    pub(crate) async fn stop(&mut self) -> Result<(), Failure> {
        let answer = self.client.stop(StopRequest {}).await;
        answer.map(drop).map_err(|status| self.explain(&status))
    }

    pub(crate) async fn trigger_checkpoint(&mut self) -> Result<(), Failure> {
        let answer = self.client.trigger_checkpoint(TriggerCheckpointRequest {}).await;
        answer.map(drop).map_err(|status| self.explain(&status))
    }

    pub(crate) async fn checkpoints(&mut self) -> Result<Vec<CheckpointEntry>, Failure> {
        let answer = self.client.list_checkpoints(ListCheckpointsRequest {}).await;
        Ok(answer.map_err(|status| self.explain(&status))?.into_inner().checkpoints)
    }

    pub(crate) async fn pause(&mut self, reason: String) -> Result<(), Failure> {
        let answer = self.client.pause(PauseRequest { reason }).await;
        answer.map(drop).map_err(|status| self.explain(&status))
    }

    pub(crate) async fn resume(&mut self) -> Result<(), Failure> {
        let answer = self.client.resume(ResumeRequest {}).await;
        answer.map(drop).map_err(|status| self.explain(&status))
    }

    pub(crate) async fn recipe(&mut self) -> Result<GetRecipeResponse, Failure> {
        let answer = self.client.get_recipe(GetRecipeRequest {}).await;
        Ok(answer.map_err(|status| self.explain(&status))?.into_inner())
    }

    /// Records the next steps of all ranks; returns the part of each rank.
    pub(crate) async fn record_profile(&mut self, steps: u32) -> Result<Vec<Vec<u8>>, Failure> {
        let answer = self.client.record_profile(RecordProfileRequest { steps }).await;
        let mut stream = answer.map_err(|status| self.explain(&status))?.into_inner();
        let mut parts: Vec<Vec<u8>> = Vec::new();
        let mut newest = None;
        while let Some(RecordProfileResponse { part, data }) =
            stream.message().await.map_err(|status| self.explain(&status))?
        {
            if newest.replace(part) != Some(part) {
                parts.push(Vec::new());
            }
            if let Some(last) = parts.last_mut() {
                last.extend(data);
            }
        }
        Ok(parts)
    }

    /// Submits a job: a recipe as TOML, without a base recipe.
    pub(crate) async fn submit(&mut self, recipe: String) -> Result<SubmitJobResponse, Failure> {
        let request = SubmitJobRequest { recipe, overrides: Vec::new() };
        let answer = self.client.submit_job(request).await;
        Ok(answer.map_err(|status| self.explain(&status))?.into_inner())
    }

    /// All events, including new ones as they happen.
    pub(crate) fn events(&self) -> Events {
        self.events_after(EventFeed::new(0, false))
    }

    /// The events that are new to this feed.
    pub(crate) fn events_after(&self, known: EventFeed) -> Events {
        Follow::new(self.clone(), known)
    }

    /// Past events with an id greater than `after`.
    pub(crate) fn past_events(&self, after: u64) -> Events {
        Follow::new(self.clone(), EventFeed::new(after, true))
    }

    /// Metrics of steps and evaluations so far, and with `follow` also new ones.
    pub(crate) fn metrics(&self, follow: bool) -> Metrics {
        Follow::new(self.clone(), MetricsFeed::new(follow))
    }

    /// Log lines.
    pub(crate) fn logs(&self, request: StreamLogsRequest) -> Logs {
        Follow::new(self.clone(), LogFeed::new(request))
    }

    /// As `http://host:port` or `https://host:port`.
    pub(crate) fn url(&self) -> &str {
        self.address.url()
    }

    fn explain(&self, status: &tonic::Status) -> Failure {
        let Address { url, source, is_over, .. } = &self.address;
        if let Some(problem) = status.source().and_then(tls_problem) {
            return bad_input(format!("{url} ({source}): {problem}"));
        }
        match status.code() {
            Code::FailedPrecondition if status.message() == OTHER_RUN => bad_input(format!(
                "the coordinator at {url} serves another run, and the one that wrote {source} is not running: start \
                 it again with `baton up`, give a folder of checkpoints with --dir, or use the other one with \
                 --coordinator {url}"
            )),
            // With TLS 1.3 a refused client is disconnected after its handshake, and the reason may be lost.
            Code::Unknown if url.starts_with("https://") && status.source().is_some() => {
                bad_input(format!(
                    "{url} ({source}) closed the TLS connection: it probably refuses the certificate of \
                     --client-cert, or requires one; give your own certificate with --client-cert, one that the \
                     authority of the coordinator's --tls-client-ca has issued and that is still valid"
                ))
            }
            Code::FailedPrecondition | Code::OutOfRange | Code::Aborted | Code::DataLoss => {
                failed(status.message())
            }
            Code::InvalidArgument => bad_input(status.message()),
            Code::Unauthenticated | Code::PermissionDenied => {
                bad_input(format!("{url} ({source}): {}", status.message()))
            }
            // Nobody takes over.
            Code::Unavailable if *is_over => failed(format!(
                "no coordinator answers at {url} ({source}): `baton checkpoint ls --dir`, with this store, lists what was \
                 saved"
            )),
            Code::Unavailable if self.store.is_some() => failed(format!(
                "no coordinator answers at {url} ({source}): a node of the job may be taking over, so try again in some \
                 seconds; if none answers then, start the job with `baton up RECIPE`"
            )),
            Code::Unavailable => failed(format!(
                "no coordinator answers at {url} ({source}): start a job with `baton up RECIPE`, or give \
                 the coordinator with --coordinator URL or --run-dir DIR"
            )),
            Code::DeadlineExceeded | Code::Cancelled => failed(format!(
                "{url} ({source}) gave no answer within {} s: check that it is a coordinator, and that \
                 its machine works",
                CALL_TIMEOUT.as_secs()
            )),
            Code::Unimplemented => failed(format!(
                "{url} ({source}) does not support this call: check that it is a coordinator of the same version"
            )),
            // An answer of the coordinator itself has no source.
            Code::Unknown | Code::Internal
                if status.source().is_some() && url.starts_with("http://") =>
            {
                let secure = url.replacen("http", "https", 1);
                failed(format!(
                    "{url} ({source}) closed the connection without an answer: if its coordinator has just ended, try again \
                     in some seconds; if this port speaks TLS, use {secure}"
                ))
            }
            code => failed(format!(
                "{url} ({source}) returned an error: {} ({code:?})",
                status.message()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        time::{Duration, SystemTime},
    };

    use super::*;

    /// A folder of runs, given by name, port in coordinator.json, and age in seconds.
    fn runs(runs: &[(&str, u16, u64)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, port, age) in runs {
            let run_dir = folder.path().join(name);
            fs::create_dir(&run_dir).unwrap();
            let path = EndpointFile::path(&run_dir);
            fs::write(&path, format!(r#"{{"address":"127.0.0.1:{port}","pid":7}}"#)).unwrap();
            let modified = SystemTime::now() - Duration::from_secs(*age);
            File::options().write(true).open(path).unwrap().set_modified(modified).unwrap();
        }
        folder
    }

    #[test]
    fn a_store_without_a_coordinator_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let location = folder.path().to_str().unwrap();
        let store = Store::open(location).unwrap();
        let refused = || of_store(location).unwrap_err().to_string();
        assert!(refused().contains("no job with its run folder elsewhere"), "{}", refused());
        let lease = CoordinatorLease {
            number: 1,
            host: "alpha".to_owned(),
            run_dir: "/runs/a".to_owned(),
            address: Some("http://10.0.0.1:29600".to_owned()),
            ..CoordinatorLease::default()
        };
        store.take_lease(&lease).unwrap();
        assert_eq!(of_store(location).unwrap().url, "http://10.0.0.1:29600");
        store.renew_lease(&CoordinatorLease { over: true, ..lease }).unwrap();
        let found = of_store(location).unwrap();
        assert_eq!(found.url, "http://10.0.0.1:29600");
        assert!(
            found.source.ends_with("its history is in /runs/a on host alpha"),
            "{}",
            found.source
        );
        assert!(found.is_over, "nobody takes over");
        std::fs::write(folder.path().join("leases/000002.json"), "").unwrap();
        assert!(refused().contains("the lease 2 is empty"), "{}", refused());
    }

    #[test]
    fn a_token_is_not_sent_without_encryption_to_an_address_from_a_store() {
        for (address, reveals) in [
            ("http://10.0.0.5:29600", true),
            ("http://node-b:29600", true),
            ("https://10.0.0.5:29600", false),
            ("http://127.0.0.1:29600", false),
            ("http://[::1]:29600", false),
        ] {
            assert_eq!(would_reveal_token(address), reveals, "{address}");
        }
    }

    #[test]
    fn a_coordinator_is_found_by_flag_run_folder_environment_newest_run_default() {
        let runs = runs(&[("old", 1, 100), ("new", 2, 10), ("older", 3, 200)]);
        let mut flags = CoordinatorFlags {
            coordinator: Some("http://flag:9".to_owned()),
            run_dir: Some(runs.path().join("old")),
            ..CoordinatorFlags::default()
        };
        let url = |flags: &CoordinatorFlags, variable: Option<&str>, runs: &Path| {
            find(flags, variable, runs).unwrap().url
        };
        assert_eq!(url(&flags, Some("env:8"), runs.path()), "http://flag:9");
        flags.coordinator = None;
        assert_eq!(url(&flags, Some("env:8"), runs.path()), "http://127.0.0.1:1");
        flags.run_dir = None;
        assert_eq!(url(&flags, Some("env:8"), runs.path()), "http://env:8");
        assert_eq!(url(&flags, None, runs.path()), "http://127.0.0.1:2");
        let nowhere = Path::new("/nowhere");
        assert_eq!(url(&flags, None, nowhere), "http://127.0.0.1:29600");
    }

    #[test]
    fn a_given_run_folder_without_a_coordinator_is_an_error_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let flags = CoordinatorFlags {
            run_dir: Some(folder.path().to_owned()),
            ..CoordinatorFlags::default()
        };
        let message = find(&flags, None, folder.path()).unwrap_err().message;
        assert!(message.contains("coordinator.json") && message.contains("baton up"), "{message}");
        let report = folder.path().join("report.html");
        fs::write(&report, "").unwrap();
        let message = find(&flags, None, folder.path()).unwrap_err().message;
        assert!(message.contains("last ended") && message.contains("report.html"), "{message}");
    }

    #[test]
    fn the_file_of_another_run_folder_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let run_dir = folder.path().join("run");
        fs::create_dir(&run_dir).unwrap();
        let find = |inode: u64, run_dir: Option<&Path>| {
            let text =
                format!(r#"{{"address":"127.0.0.1:1","pid":7,"run_id":"a","folder":{inode}}}"#);
            fs::write(EndpointFile::path(&folder.path().join("run")), text).unwrap();
            let run_dir = run_dir.map(Path::to_owned);
            let flags = CoordinatorFlags { run_dir, ..CoordinatorFlags::default() };
            find(&flags, None, folder.path())
        };
        let inode = RunFolder::of(&run_dir).unwrap().inode;
        for given in [Some(run_dir.as_path()), None] {
            assert_eq!(find(inode, given).unwrap().run_id.as_deref(), Some("a"));
            let message = find(inode + 1, given).unwrap_err().message;
            assert!(message.contains("is a copy of the run folder"), "{message}");
        }
    }

    #[test]
    fn a_coordinator_on_all_interfaces_is_called_on_this_machine() {
        let folder = tempfile::tempdir().unwrap();
        let path = EndpointFile::path(folder.path());
        fs::write(&path, r#"{"address":"0.0.0.0:29600","pid":7}"#).unwrap();
        assert_eq!(EndpointFile::read(&path).unwrap().address.to_string(), "127.0.0.1:29600");
    }

    #[tokio::test]
    async fn an_unreachable_coordinator_is_explained_in_one_line_with_address_and_remedy() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut coordinator = Coordinator::at(
            Address::new(&free.to_string(), "the default"),
            &ClientCredentials::default(),
        )
        .unwrap();
        let message = coordinator.status().await.unwrap_err().message;
        assert!(message.contains(&free.to_string()) && message.contains("baton up"), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }

    #[test]
    fn an_invalid_url_is_bad_input() {
        let error = Coordinator::at(
            Address::new("not a url", "--coordinator"),
            &ClientCredentials::default(),
        )
        .unwrap_err();
        assert!(!error.class.is_retriable());
        assert!(error.message.contains("not a url"), "{error}");
        let refused = |url: &str| {
            let address = Address::new(url, COORDINATOR_VARIABLE);
            Coordinator::at(address, &ClientCredentials::default()).unwrap_err().message
        };
        assert!(refused("ftp://host:1").contains("neither http:// nor https://"));
        let error = refused("http://me:secret@host:1");
        assert!(error.contains(COORDINATOR_VARIABLE) && !error.contains("secret"), "{error}");
    }
}
