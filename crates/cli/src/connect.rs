//! Finds the coordinator and calls it. Every call has a deadline.

mod follow;

use std::{
    error::Error as _,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use baton_access::{Bearer, ClientFiles, Credentials, client::tls_problem};
use baton_job::exit::Failure;
use baton_proto::v1::{
    CheckpointEntry, DrainRequest, GetRecipeRequest, GetRecipeResponse, GetStatusRequest,
    GetStatusResponse, ListCheckpointsRequest, PauseRequest, ResumeRequest, StopRequest,
    StreamLogsRequest, SubmitJobRequest, SubmitJobResponse, TriggerCheckpointRequest,
    job_service_client::JobServiceClient,
};
use serde::Deserialize;
use tonic::{
    Code,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

use self::follow::{EventFeed, Follow, LogFeed, MetricsFeed};
use crate::failure::{bad_input, failed};

/// Where a coordinator serves unless told otherwise.
pub(crate) const DEFAULT_LISTEN: &str = "127.0.0.1:29600";
/// Names the coordinator in the environment.
const VARIABLE: &str = "BATON_COORDINATOR";
/// Folder of run folders, as `baton up` makes them.
pub(crate) const RUNS: &str = "runs";
/// Bytes that may be on their way to us.
const WINDOW: u32 = 4 << 20;
/// Longest wait for an answer; a stream's is for its beginning.
const DEADLINE: Duration = Duration::from_secs(5);

/// Flags of every command that asks a coordinator.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Where {
    /// Where the coordinator serves [env: BATON_COORDINATOR] [default: the newest run below runs/]
    #[arg(long, value_name = "URL")]
    pub(crate) coordinator: Option<String>,
    /// Folder of the job's run, in which its coordinator left its address
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) access: ClientFiles,
}

/// The process's environment, or a test's.
pub(crate) trait Environment {
    /// A variable, if it is set and not empty.
    fn get(&self, name: &str) -> Option<String>;
}

/// The environment of this process.
pub(crate) struct OfProcess;

impl Environment for OfProcess {
    fn get(&self, name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }
}

/// A coordinator's address and who named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    url: String,
    named_by: String,
}

impl Address {
    fn new(address: &str, named_by: impl Into<String>) -> Self {
        let url = match address.contains("://") {
            true => address.to_owned(),
            false => format!("http://{address}"),
        };
        Self { url, named_by: named_by.into() }
    }

    /// The address in a file that a coordinator wrote.
    pub(crate) fn of_endpoint(endpoint: &EndpointFile, path: &Path) -> Self {
        let scheme = if endpoint.tls { "https" } else { "http" };
        Self::new(&format!("{scheme}://{}", endpoint.address), path.display().to_string())
    }

    /// As `http://host:port` or `https://host:port`.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

/// What a coordinator leaves in its run folder while it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EndpointFile {
    /// Where it is reached from this machine.
    pub(crate) address: SocketAddr,
    /// Its process.
    pub(crate) pid: u32,
    /// Whether it serves over TLS.
    pub(crate) tls: bool,
}

impl EndpointFile {
    /// Where it lies.
    pub(crate) fn path(run_dir: &Path) -> PathBuf {
        run_dir.join("coordinator.json")
    }

    /// Reads it; none if there is none, or it is unreadable.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        #[derive(Deserialize)]
        struct Content {
            address: SocketAddr,
            pid: u32,
            #[serde(default)]
            tls: bool,
        }
        let Content { mut address, pid, tls } =
            serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        // "All interfaces" is a place to listen on, not one to call.
        if address.ip().is_unspecified() {
            address.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
        Some(Self { address, pid, tls })
    }
}

/// Finds the coordinator: the flag `--coordinator`, else the environment, else the run folder that
/// was named, else the newest run below `runs`, else the default port.
pub(crate) fn find(
    wanted: &Where,
    environment: &dyn Environment,
    runs: &Path,
) -> Result<Address, Failure> {
    if let Some(address) = &wanted.coordinator {
        return Ok(Address::new(address, "--coordinator"));
    }
    if let Some(address) = environment.get(VARIABLE) {
        return Ok(Address::new(&address, VARIABLE));
    }
    if let Some(run_dir) = &wanted.run_dir {
        let path = EndpointFile::path(run_dir);
        let endpoint = EndpointFile::read(&path).ok_or_else(|| {
            failed(format!(
                "no coordinator serves {}: there is no {}; start the job with `baton up`",
                run_dir.display(),
                path.display()
            ))
        })?;
        return Ok(Address::of_endpoint(&endpoint, &path));
    }
    let newest = newest_below(runs, "coordinator.json");
    let found = newest.and_then(|path| Some((EndpointFile::read(&path)?, path)));
    Ok(match found {
        Some((endpoint, path)) => Address::of_endpoint(&endpoint, &path),
        None => Address::new(DEFAULT_LISTEN, "the default"),
    })
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

type Client = JobServiceClient<InterceptedService<Channel, Bearer>>;

/// Events with growing ids, over restarts of the coordinator.
pub(crate) type Events = Follow<EventFeed>;
/// Numbers of updates and evaluations, over restarts of the coordinator.
pub(crate) type Metrics = Follow<MetricsFeed>;
/// Lines that were logged, over restarts of the coordinator.
pub(crate) type Logs = Follow<LogFeed>;

/// A coordinator to call. It connects when it is first called, and again whenever it has to.
#[derive(Clone, Debug)]
pub(crate) struct Coordinator {
    address: Address,
    client: Client,
}

impl Coordinator {
    /// The coordinator that [`find`] finds from here.
    pub(crate) fn find(wanted: &Where) -> Result<Self, Failure> {
        let credentials =
            wanted.access.credentials(|name| OfProcess.get(name)).map_err(bad_input)?;
        Self::at(find(wanted, &OfProcess, Path::new(RUNS))?, &credentials)
    }

    /// The coordinator at an address.
    pub(crate) fn at(address: Address, credentials: &Credentials) -> Result<Self, Failure> {
        let endpoint = Endpoint::from_shared(address.url.clone()).map_err(|error| {
            let Address { url, named_by } = &address;
            bad_input(format!(
                "{url:?} ({named_by}) is no address such as http://host:29600: {error}"
            ))
        })?;
        let endpoint = credentials.secure(endpoint).map_err(bad_input)?;
        let channel = endpoint
            .connect_timeout(DEADLINE)
            .timeout(DEADLINE)
            // The status of a thousand ranks comes in one piece, and not in a dance of 64 KiB steps.
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            // So that a watcher notices a machine that vanished without a word.
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(DEADLINE)
            .connect_lazy();
        let client = JobServiceClient::with_interceptor(channel, credentials.bearer());
        Ok(Self { address, client })
    }

    /// Whether somebody answers there, be it that he does not know us.
    pub(crate) async fn answers(&mut self) -> bool {
        match self.client.get_status(GetStatusRequest {}).await {
            Ok(_) => true,
            Err(status) => matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied),
        }
    }

    /// The job served here and its address: said before a job is changed, because it may not be the
    /// one that was meant.
    pub(crate) async fn name(&mut self) -> Result<String, Failure> {
        let name = self.status().await?.name;
        let Address { url, named_by } = &self.address;
        Ok(format!("{name} at {url} ({named_by})"))
    }

    pub(crate) async fn status(&mut self) -> Result<GetStatusResponse, Failure> {
        let answer = self.client.get_status(GetStatusRequest {}).await;
        Ok(answer.map_err(|status| self.explain(&status))?.into_inner())
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

    /// Gives it a job: a recipe as TOML, without a base.
    pub(crate) async fn submit(&mut self, recipe: String) -> Result<SubmitJobResponse, Failure> {
        let request = SubmitJobRequest { recipe, overrides: Vec::new() };
        let answer = self.client.submit_job(request).await;
        Ok(answer.map_err(|status| self.explain(&status))?.into_inner())
    }

    /// Events with an id greater than `after`, and those to come.
    pub(crate) fn events(&self, after: u64) -> Events {
        Follow::new(self.clone(), EventFeed { after, past_only: false })
    }

    /// Events with an id greater than `after` that have happened.
    pub(crate) fn past_events(&self, after: u64) -> Events {
        Follow::new(self.clone(), EventFeed { after, past_only: true })
    }

    /// Numbers of updates and evaluations so far, and with `follow` those to come.
    pub(crate) fn metrics(&self, follow: bool) -> Metrics {
        Follow::new(self.clone(), MetricsFeed::new(follow))
    }

    /// Lines that were logged.
    pub(crate) fn logs(&self, request: StreamLogsRequest) -> Logs {
        Follow::new(self.clone(), LogFeed::new(request))
    }

    /// As `http://host:port` or `https://host:port`.
    pub(crate) fn url(&self) -> &str {
        self.address.url()
    }

    fn explain(&self, status: &tonic::Status) -> Failure {
        let Address { url, named_by } = &self.address;
        if let Some(problem) = status.source().and_then(tls_problem) {
            return bad_input(format!(
                "{url} ({named_by}): there is no secure connection ({problem}): give the authority of its \
                 certificate with --tls-ca, and a certificate of yours with --client-cert if it wants one"
            ));
        }
        match status.code() {
            Code::FailedPrecondition | Code::OutOfRange => failed(status.message()),
            Code::InvalidArgument => bad_input(status.message()),
            Code::Unauthenticated | Code::PermissionDenied => {
                bad_input(format!("{url} ({named_by}): {}", status.message()))
            }
            Code::Unavailable => failed(format!(
                "nothing answers at {url} ({named_by}): start a job with `baton up RECIPE`, or say \
                 where it runs with --coordinator URL or --run-dir DIR"
            )),
            Code::DeadlineExceeded | Code::Cancelled => failed(format!(
                "{url} ({named_by}) gave no answer within {} s: is it a coordinator, and is its \
                 machine well?",
                DEADLINE.as_secs()
            )),
            Code::Unimplemented => failed(format!(
                "{url} ({named_by}) does not know this call: is it a coordinator of the same version?"
            )),
            code => failed(format!("{url} ({named_by}) answered: {} ({code:?})", status.message())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashMap,
        fs::File,
        time::{Duration, SystemTime},
    };

    use super::*;

    impl Environment for HashMap<&str, &str> {
        fn get(&self, name: &str) -> Option<String> {
            HashMap::get(self, name).map(|&value| value.to_owned())
        }
    }

    /// A folder of runs; each has its port in coordinator.json and an age in seconds.
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

    fn nothing() -> HashMap<&'static str, &'static str> {
        HashMap::new()
    }

    #[test]
    fn flag_then_environment_then_run_folder_then_newest_run_then_default() {
        let runs = runs(&[("old", 1, 100), ("new", 2, 10), ("older", 3, 200)]);
        let mut wanted = Where {
            coordinator: Some("http://flag:9".to_owned()),
            run_dir: Some(runs.path().join("old")),
            ..Where::default()
        };
        let environment = HashMap::from([("BATON_COORDINATOR", "env:8")]);
        let url = |wanted: &Where, environment: &HashMap<&str, &str>, runs: &Path| {
            find(wanted, environment, runs).unwrap().url
        };
        assert_eq!(url(&wanted, &environment, runs.path()), "http://flag:9");
        wanted.coordinator = None;
        assert_eq!(url(&wanted, &environment, runs.path()), "http://env:8");
        assert_eq!(url(&wanted, &nothing(), runs.path()), "http://127.0.0.1:1");
        wanted.run_dir = None;
        assert_eq!(url(&wanted, &nothing(), runs.path()), "http://127.0.0.1:2");
        let nowhere = Path::new("/nowhere");
        assert_eq!(url(&wanted, &nothing(), nowhere), "http://127.0.0.1:29600");
    }

    #[test]
    fn a_named_run_folder_without_a_coordinator_is_an_error_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let wanted = Where { run_dir: Some(folder.path().to_owned()), ..Where::default() };
        let message = find(&wanted, &nothing(), folder.path()).unwrap_err().message;
        assert!(message.contains("coordinator.json") && message.contains("baton up"), "{message}");
    }

    #[test]
    fn a_coordinator_on_all_interfaces_is_called_on_this_machine() {
        let folder = tempfile::tempdir().unwrap();
        let path = EndpointFile::path(folder.path());
        fs::write(&path, r#"{"address":"0.0.0.0:29600","pid":7}"#).unwrap();
        assert_eq!(EndpointFile::read(&path).unwrap().address.to_string(), "127.0.0.1:29600");
    }

    #[tokio::test]
    async fn silence_is_explained_in_one_line_with_address_and_remedy() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut coordinator = Coordinator::at(
            Address::new(&free.to_string(), "the default"),
            &Credentials::default(),
        )
        .unwrap();
        let message = coordinator.status().await.unwrap_err().message;
        assert!(message.contains(&free.to_string()) && message.contains("baton up"), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }

    #[test]
    fn a_url_that_is_none_is_bad_input() {
        let error =
            Coordinator::at(Address::new("not a url", "--coordinator"), &Credentials::default())
                .unwrap_err();
        assert!(!error.class.is_retriable());
        assert!(error.message.contains("not a url"), "{error}");
    }
}
