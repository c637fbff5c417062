//! Runs the server: from the flags until the job ends.

use std::{
    error::Error as _,
    fs,
    io::{self, Write as _},
    net::SocketAddr,
    path,
    sync::Arc,
    time::Duration,
};

use axum::{
    extract::Request,
    http::{StatusCode, header::CONTENT_TYPE},
    middleware::{from_fn, from_fn_with_state},
    response::{IntoResponse as _, Response},
};
use baton_access::{AccessGuard, RunFolder, run::same_run};
use baton_job::exit::{Class, Failure, Outcome, bad_input, crash};
use baton_proto::{
    DESCRIPTORS,
    v1::{job_service_server::JobServiceServer, node_service_server::NodeServiceServer},
};
use futures::Stream;
use tokio::{
    net::TcpListener,
    signal::unix,
    sync::{mpsc, watch},
    task,
};
use tonic::{
    Status,
    service::Routes,
    transport::{Server, ServerTlsConfig},
};
use tracing_subscriber::EnvFilter;

use crate::{
    args::{Args, LogFormat},
    begin::{self, RunningJob},
    body_deadline,
    clock::unix_millis,
    disk,
    endpoint::{CoordinatorFile, ServeLock},
    incoming::{self, Connection},
    job::{JobInput, StatusSnapshot},
    job_service::JobApi,
    logs::{LogBuffer, Tee},
    node_service::NodeApi,
    report,
    served::{CurrentJob, CurrentJobWriter, ServedJob, Submission},
};

/// Serves until the job ends (`Some`) or a signal asks the process to quit (`None`).
pub(crate) fn run(args: &Args) -> Result<Option<Outcome>, Failure> {
    let logs = LogBuffer::new();
    start_logging(args.log_format, logs.clone());
    if let Some(parent) = args.exit_with_parent {
        let signal = Some(rustix::process::Signal::TERM);
        rustix::process::set_parent_process_death_signal(signal)
            .map_err(|error| crash(format!("cannot follow the parent process: {error}")))?;
        // It may have ended before the call above.
        let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
        let now = now.and_then(|pid| u32::try_from(pid).ok());
        if let Some(parent) = parent.filter(|parent| now != Some(*parent)) {
            return Err(crash(format!("process {parent}, which started this one, has ended")));
        }
    }
    // The recipe is read before a port is bound: this is cheap, and an error in it is permanent.
    let spec = begin::recipe(args)?;
    args.resume.as_deref().map(begin::checkpoint).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| crash(format!("cannot start: {error}")))?;
    runtime.block_on(async {
        let unusable = |error: baton_access::Error| bad_input(error.to_string());
        let tls = args.access.tls().map_err(unusable)?;
        let has_tls = tls.is_some();
        let tokens = args.access.tokens().map_err(unusable)?.map(Arc::new);
        let guard = AccessGuard { tokens, web_refusal: baton_dashboard::refusal };
        let server = server(tls)?;
        if path::absolute(&args.run_dir).map_err(crash)?.to_str().is_none() {
            let dir = args.run_dir.display();
            let problem = "its path is not UTF-8, as the journal and manifests are";
            return Err(bad_input(format!(
                "run folder {dir}: {problem}; give another one with --run-dir"
            )));
        }
        let max_connections = incoming::max_connections().map_err(bad_input)?;
        // The port is bound before any file is changed, because binding fails most often.
        let listener = bind(args)?;
        let address = listener.local_addr().map_err(crash)?;
        fs::create_dir_all(&args.run_dir).map_err(|error| {
            let dir = args.run_dir.display();
            let problem = format!("run folder {dir}: {error}");
            disk::full(&args.run_dir, &problem).unwrap_or_else(|| {
                bad_input(format!("{problem}; give a writable one with --run-dir"))
            })
        })?;
        let _lock = ServeLock::take(&args.run_dir)?;
        let run = RunFolder::of(&args.run_dir).map_err(crash)?;
        let run_id = Arc::from(run.run_id.as_str());
        let running =
            spec.map(|spec| task::block_in_place(|| begin::begin(args, spec, address)));
        let running = running.transpose()?;
        let mut signals = QuitSignals::listen()
            .map_err(|error| crash(format!("cannot listen to signals: {error}")))?;
        let _endpoint = CoordinatorFile::write(&args.run_dir, run, address, has_tls)
            .map_err(|error| crash(format!("{error:#}")))?;
        tracing::info!(%address, "listening");
        print_address(address);

        let (current, writer) = CurrentJob::empty();
        // Set before the server accepts calls: a job that exists must never be reported as missing.
        writer.served.send_replace(running.as_ref().map(|running| running.served.clone()));
        let started_unix_seconds = unix_millis() / 1_000;
        let jobs = JobApi::new(current.clone(), logs.clone(), started_unix_seconds);
        let nodes = NodeApi::new(current, logs);
        let clients = incoming::incoming(listener, max_connections);
        tokio::select! {
            served = serve_all(server, clients, jobs, nodes, guard, run_id) => {
                Err(crash(format!("the server ended: {served:?}")))
            }
            ended = serve(args, running, (writer, address), &mut signals, started_unix_seconds) => ended,
        }
    })
}

/// Waits for a job if there is none, and then for its end.
async fn serve(
    args: &Args,
    running: Option<RunningJob>,
    (writer, address): (CurrentJobWriter, SocketAddr),
    signals: &mut QuitSignals,
    started_unix_seconds: u64,
) -> Result<Option<Outcome>, Failure> {
    let CurrentJobWriter { served: current, mut submissions } = writer;
    let running = match running {
        Some(running) => running,
        None => tokio::select! {
            running = submitted(args, address, &mut submissions, &current) => running?,
            () = signals.quit_requested() => return Ok(None),
        },
    };
    // There is a job from here on; further submissions are refused.
    drop(submissions);
    let RunningJob { served, thread } = running;
    let is_of_agent = args.take_over.is_some() && args.exit_with_parent.is_some();
    let mut is_alone = false;
    let outcome = tokio::select! {
        outcome = ended(served.job.snapshots()) => outcome,
        () = nobody_joins(served.job.snapshots(), |snapshot| snapshot.attached > 0), if is_of_agent => {
            is_alone = true;
            None
        }
        () = signals.quit_requested() => {
            tracing::info!("a signal asked to quit; training continues, and a restarted coordinator continues the job");
            None
        }
    };
    if outcome.is_some() {
        report::write(&args.run_dir, &served, started_unix_seconds).await;
        tokio::time::sleep(args.linger_seconds).await;
    }
    served.job.send(JobInput::Quit);
    let end = task::block_in_place(|| thread.join());
    served.metrics.finish();
    match end {
        Ok(Ok(None)) if is_alone => Err(crash(format!(
            "no agent has joined this coordinator within {} s, not even the one that started it; check that the agents \
             accept this node's certificate and address",
            JOIN_TIMEOUT.as_secs()
        ))),
        Ok(Ok(None)) => Ok(outcome),
        Ok(Ok(Some(replaced))) => Err(replaced),
        Ok(Err(error)) => Err(crash(format!("{error:#}"))),
        Err(_) => Err(crash("the job loop panicked; this is a bug")),
    }
}

/// Takes submitted jobs until one of them starts.
async fn submitted(
    args: &Args,
    address: SocketAddr,
    submissions: &mut mpsc::Receiver<Submission>,
    current: &watch::Sender<Option<Arc<ServedJob>>>,
) -> Result<RunningJob, Failure> {
    tracing::info!("waiting for a job");
    while let Some(Submission { recipe, spec, answer }) = submissions.recv().await {
        let begun = task::block_in_place(|| {
            begin::store_recipe(&args.run_dir, &recipe)?;
            begin::begin(args, spec, address).inspect_err(|_| begin::remove_recipe(&args.run_dir))
        });
        match begun {
            Ok(running) => {
                current.send_replace(Some(running.served.clone()));
                // The submitting client may have disconnected; the job continues.
                let _ = answer.send(Ok(running.served.clone()));
                return Ok(running);
            }
            Err(failure) => {
                tracing::warn!(%failure, "a submitted job cannot start");
                let refusal = match failure.class {
                    Class::BadInput => Status::invalid_argument(failure.message),
                    _ => Status::failed_precondition(failure.message),
                };
                let _ = answer.send(Err(refusal));
            }
        }
    }
    Err(crash("the channel of submitted jobs is closed; this is a bug"))
}

fn bind(args: &Args) -> Result<TcpListener, Failure> {
    let listen = args.listen;
    if !listen.ip().is_loopback() && !args.insecure && !args.access.are_secure() {
        return Err(bad_input(format!(
            "--listen {listen} is reachable from other machines, and anyone there could stop the job: \
             give --tls-cert, --tls-key and --tokens (`baton cert` makes them), use 127.0.0.1, or add \
             --insecure on a network you trust"
        )));
    }
    incoming::listen(listen).map_err(|error| {
        bad_input(format!(
            "cannot listen on {listen}: {error}; is another coordinator running? Choose another port \
             with --listen, or --listen 127.0.0.1:0 for a free one"
        ))
    })
}

/// Longest wait for a client's TLS handshake.
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Most concurrent calls over one connection; a dashboard needs a handful.
const MAX_CALLS_PER_CONNECTION: u32 = 256;
/// Largest message of a user's tool, bytes: a recipe.
const MAX_REQUEST_BYTES: usize = 64 << 10;
/// Largest message of an agent, bytes: a hello of 1,024 ranks that all report errors.
const MAX_REPORT_BYTES: usize = 4 << 20;

fn server(tls: Option<ServerTlsConfig>) -> Result<Server, Failure> {
    let server = Server::builder()
        // Without TLS, browsers support nothing newer than HTTP/1.
        .accept_http1(true)
        .http2_keepalive_interval(Some(Duration::from_secs(5)))
        .http2_keepalive_timeout(Some(Duration::from_secs(5)))
        .max_concurrent_streams(MAX_CALLS_PER_CONNECTION);
    let Some(tls) = tls else { return Ok(server) };
    server.tls_config(tls.timeout(TLS_HANDSHAKE_TIMEOUT)).map_err(|error| {
        let problem = error.source().map_or(error.to_string(), ToString::to_string);
        // Certificate and key were checked before.
        bad_input(format!(
            "--tls-client-ca cannot be used: {problem}; give the certificate of an authority"
        ))
    })
}

/// gRPC and the web dashboard on one port.
async fn serve_all(
    mut server: Server,
    clients: impl Stream<Item = io::Result<Connection>>,
    jobs: JobApi,
    nodes: NodeApi,
    guard: AccessGuard,
    run_id: Arc<str>,
) -> Result<(), Box<dyn std::error::Error>> {
    let jobs = Arc::new(jobs);
    let dashboard = match guard.tokens.is_some() {
        true => baton_dashboard::router(jobs.clone()),
        false => baton_dashboard::router_without_tokens(jobs.clone()),
    };
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<JobServiceServer<JobApi>>().await;
    health.set_serving::<NodeServiceServer<NodeApi>>().await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let jobs = JobServiceServer::from_arc(jobs).max_decoding_message_size(MAX_REQUEST_BYTES);
    let nodes = NodeServiceServer::new(nodes).max_decoding_message_size(MAX_REPORT_BYTES);
    let mut routes = Routes::new(health_service)
        .add_service(reflection().build_v1()?)
        // For Python's client and older tools.
        .add_service(reflection().build_v1alpha()?)
        .add_service(jobs)
        .add_service(nodes);
    let merged = std::mem::take(routes.axum_router_mut()).merge(dashboard).fallback(unknown_path);
    // The layer added last comes first: a client without access is refused before its body is read.
    *routes.axum_router_mut() = merged
        .layer(from_fn(body_deadline::limit))
        .layer(from_fn_with_state(guard, baton_access::guard))
        // Before the tokens, which may be those of the other run.
        .layer(from_fn_with_state(run_id, same_run));
    server.add_routes(routes).serve_with_incoming(clients).await?;
    Ok(())
}

/// Answers a call of a service that does not exist, or a request for a page that does not exist.
async fn unknown_path(request: Request) -> Response {
    let content_type = request.headers().get(CONTENT_TYPE);
    let is_call = content_type.is_some_and(|text| text.as_bytes().starts_with(b"application/grpc"));
    match is_call {
        true => Status::unimplemented("this coordinator has no such service").into_http(),
        false => (StatusCode::NOT_FOUND, "there is no such page; the dashboard is at /\n")
            .into_response(),
    }
}

/// Resolves once the job has ended and its agents have closed their streams.
async fn ended(mut snapshots: watch::Receiver<Arc<StatusSnapshot>>) -> Option<Outcome> {
    let has_ended = |snapshot: &Arc<StatusSnapshot>| snapshot.status.outcome.is_some();
    let outcome = snapshots.wait_for(has_ended).await.ok()?.status.outcome.clone();
    // A hung agent must not keep the coordinator running.
    let all_left = snapshots.wait_for(|snapshot| snapshot.attached == 0);
    let _ = tokio::time::timeout(Duration::from_secs(15), all_left).await;
    outcome
}

/// How long a coordinator that an agent has started waits for agents, which look for it every few seconds.
const JOIN_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns if no agent has joined in time. The others cannot replace a coordinator that renews its lease.
async fn nobody_joins<T>(mut snapshots: watch::Receiver<T>, has_joined: impl FnMut(&T) -> bool) {
    let joined = snapshots.wait_for(has_joined);
    if tokio::time::timeout(JOIN_TIMEOUT, joined).await.is_ok() {
        std::future::pending().await
    }
}

/// The signals that ask this process to quit.
struct QuitSignals {
    terminate: unix::Signal,
    interrupt: unix::Signal,
}

impl QuitSignals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: unix::signal(unix::SignalKind::terminate())?,
            interrupt: unix::signal(unix::SignalKind::interrupt())?,
        })
    }

    async fn quit_requested(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Prints the address, the only line on standard output, for a caller that started this with port 0.
fn print_address(address: SocketAddr) {
    // `println!` panics if the disk of the log is full.
    let _ = writeln!(io::stdout(), "{address}");
}

fn start_logging(format: LogFormat, logs: LogBuffer) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let writer = move || Tee(logs.clone());
    let log = tracing_subscriber::fmt()
        // If the disk of the log is full, a message about that would panic.
        .log_internal_errors(false)
        .with_env_filter(filter)
        .with_writer(writer);
    match format {
        LogFormat::Text => log.with_ansi(false).init(),
        LogFormat::Json => log.json().init(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_coordinator_that_an_agent_started_is_given_up_only_if_no_agent_ever_joins() {
        let (attached, seen) = watch::channel(0);
        let alone = nobody_joins(seen.clone(), |attached| *attached > 0);
        let started = tokio::time::Instant::now();
        alone.await;
        assert_eq!(started.elapsed(), JOIN_TIMEOUT);

        let alone = nobody_joins(seen, |attached| *attached > 0);
        attached.send_replace(1);
        let waited = tokio::time::timeout(JOIN_TIMEOUT * 9, alone);
        assert!(waited.await.is_err(), "an agent has joined");
    }
}
