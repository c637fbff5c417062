//! From flags to a served job, until that ends.

use std::{error::Error as _, fs, net::SocketAddr, sync::Arc, time::Duration};

use baton_access::GuardLayer;
use baton_job::exit::{Failure, Outcome, bad_input, crash};
use baton_proto::{
    DESCRIPTORS,
    v1::{job_service_server::JobServiceServer, node_service_server::NodeServiceServer},
};
use tokio::{
    net::TcpListener,
    signal::unix,
    sync::{mpsc, watch},
    task,
};
use tonic::{
    Status,
    body::Body,
    service::Routes,
    transport::{Server, ServerTlsConfig},
};
use tower_layer::{Identity, Stack};
use tracing_subscriber::EnvFilter;

use crate::{
    args::{Args, LogFormat},
    begin::{self, Running},
    clock::unix_millis,
    endpoint::EndpointFile,
    incoming,
    job::{End, Input, Snapshot},
    job_service::Jobs,
    logs::{Logs, Tee},
    node_service::Nodes,
    report,
    served::{JobGiver, JobSlot, Served, Submission},
};

/// Serves until the job ends (`Some`) or the process is told to quit (`None`).
pub(crate) fn run(args: &Args) -> Result<Option<Outcome>, Failure> {
    let logs = Logs::new();
    start_logging(args.log_format, logs.clone());
    if args.exit_with_parent {
        let signal = Some(rustix::process::Signal::TERM);
        rustix::process::set_parent_process_death_signal(signal)
            .map_err(|error| crash(format!("cannot follow the parent process: {error}")))?;
    }
    // Before a port is bound: it costs nothing, and fails for the same reasons each time.
    let spec = begin::recipe(args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| crash(format!("cannot start: {error}")))?;
    runtime.block_on(async {
        let unusable = |error: baton_access::Error| bad_input(error.to_string());
        let tls = args.access.tls().map_err(unusable)?;
        let has_tls = tls.is_some();
        let tokens = args.access.tokens().map_err(unusable)?;
        let has_tokens = tokens.is_some();
        let refuse = |status| baton_dashboard::refusal(status).map(Body::new);
        let server = server(tls)?.layer(GuardLayer::new(tokens, refuse));
        // The port before anything is touched: it is what fails most often.
        let listener = bind(args)?;
        let address = listener.local_addr().map_err(crash)?;
        fs::create_dir_all(&args.run_dir).map_err(|error| {
            let dir = args.run_dir.display();
            bad_input(format!("run folder {dir}: {error}; give a writable one with --run-dir"))
        })?;
        let running = spec.map(|spec| task::block_in_place(|| begin::begin(args, spec)));
        let running = running.transpose()?;
        let mut signals = Signals::listen()
            .map_err(|error| crash(format!("cannot listen to signals: {error}")))?;
        let _endpoint = EndpointFile::write(&args.run_dir, address, has_tls)
            .map_err(|error| crash(format!("{error:#}")))?;
        tracing::info!(%address, "listening");
        say_where(address);

        let (slot, giver) = JobSlot::empty();
        // Before anybody can ask: a job that is there must never look as if there were none.
        giver.served.send_replace(running.as_ref().map(|running| running.served.clone()));
        let started_unix_seconds = unix_millis() / 1_000;
        let jobs = Jobs::new(slot.clone(), logs.clone(), started_unix_seconds);
        let nodes = Nodes::new(slot, logs);
        tokio::select! {
            served = serve_all(server, listener, jobs, nodes, has_tokens) => {
                Err(crash(format!("the server ended: {served:?}")))
            }
            ended = serve(args, running, giver, &mut signals, started_unix_seconds) => ended,
        }
    })
}

/// Waits for a job, if there is none, and then for its end.
async fn serve(
    args: &Args,
    running: Option<Running>,
    giver: JobGiver,
    signals: &mut Signals,
    started_unix_seconds: u64,
) -> Result<Option<Outcome>, Failure> {
    let JobGiver { served: slot, mut submissions } = giver;
    let running = match running {
        Some(running) => running,
        None => tokio::select! {
            running = submitted(args, &mut submissions, &slot) => running?,
            () = signals.told_to_quit() => return Ok(None),
        },
    };
    // From here on there is a job, and nobody can give another.
    drop(submissions);
    let Running { served, thread } = running;
    let linger = Duration::from_secs_f64(args.linger_seconds.clamp(0.0, 3600.0));
    let outcome = tokio::select! {
        outcome = ended(served.job.snapshots()) => outcome,
        () = signals.told_to_quit() => {
            tracing::info!("told to quit; training goes on, and so does the job when this starts again");
            None
        }
    };
    if outcome.is_some() {
        report::write(&args.run_dir, &served, started_unix_seconds).await;
        tokio::time::sleep(linger).await;
    }
    served.job.send(Input::Quit);
    let end = task::block_in_place(|| thread.join());
    served.metrics.finish();
    match end {
        Ok(End::Quit) => Ok(outcome),
        Ok(End::Broken(error)) => Err(crash(format!("{error:#}"))),
        Err(_) => Err(crash("the job loop panicked; this is a bug")),
    }
}

/// Takes jobs until one can be served.
async fn submitted(
    args: &Args,
    submissions: &mut mpsc::Receiver<Submission>,
    slot: &watch::Sender<Option<Arc<Served>>>,
) -> Result<Running, Failure> {
    tracing::info!("waiting for a job");
    while let Some(Submission { recipe, spec, answer }) = submissions.recv().await {
        let begun = task::block_in_place(|| {
            begin::keep_recipe(&args.run_dir, &recipe)?;
            begin::begin(args, spec).inspect_err(|_| begin::forget_recipe(&args.run_dir))
        });
        match begun {
            Ok(running) => {
                slot.send_replace(Some(running.served.clone()));
                // Who submitted it may have hung up; the job goes on.
                let _ = answer.send(Ok(running.served.clone()));
                return Ok(running);
            }
            Err(failure) => {
                tracing::warn!(%failure, "a job was submitted that cannot begin");
                let _ = answer.send(Err(Status::failed_precondition(failure.message)));
            }
        }
    }
    Err(crash("nobody can submit a job any more; this is a bug"))
}

fn bind(args: &Args) -> Result<TcpListener, Failure> {
    let listen = args.listen;
    if !listen.ip().is_loopback() && !args.insecure && !args.access.are_secure() {
        return Err(bad_input(format!(
            "--listen {listen} is reachable from other machines, and anybody there could stop the job: \
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

/// Longest wait for a client to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Calls at a time over one connection; a dashboard has a handful.
const MOST_CALLS: u32 = 256;
/// The longest message that people's tools send, in bytes: a recipe.
const LONGEST_REQUEST: usize = 64 << 10;
/// The longest that an agent sends, in bytes: a hello of 1,024 ranks that all tell of trouble.
const LONGEST_REPORT: usize = 4 << 20;

fn server(tls: Option<ServerTlsConfig>) -> Result<Server, Failure> {
    let server = Server::builder()
        // Browsers that are not asked for TLS speak nothing newer.
        .accept_http1(true)
        .http2_keepalive_interval(Some(Duration::from_secs(5)))
        .http2_keepalive_timeout(Some(Duration::from_secs(5)))
        .max_concurrent_streams(MOST_CALLS);
    let Some(tls) = tls else { return Ok(server) };
    server.tls_config(tls.timeout(HANDSHAKE)).map_err(|error| {
        let problem = error.source().map_or(error.to_string(), ToString::to_string);
        bad_input(format!("--tls-cert, --tls-key or --tls-client-ca cannot be used: {problem}"))
    })
}

/// gRPC and the web dashboard on one port.
async fn serve_all(
    mut server: Server<Stack<GuardLayer, Identity>>,
    listener: TcpListener,
    jobs: Jobs,
    nodes: Nodes,
    has_tokens: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    let jobs = Arc::new(jobs);
    let dashboard = match has_tokens {
        true => baton_dashboard::router(jobs.clone()),
        false => baton_dashboard::router_without_tokens(jobs.clone()),
    };
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<JobServiceServer<Jobs>>().await;
    health.set_serving::<NodeServiceServer<Nodes>>().await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let jobs = JobServiceServer::from_arc(jobs).max_decoding_message_size(LONGEST_REQUEST);
    let nodes = NodeServiceServer::new(nodes).max_decoding_message_size(LONGEST_REPORT);
    let mut routes = Routes::new(health_service)
        .add_service(reflection().build_v1()?)
        // What Python's client and older tools speak.
        .add_service(reflection().build_v1alpha()?)
        .add_service(jobs)
        .add_service(nodes);
    let merged = std::mem::take(routes.axum_router_mut()).merge(dashboard);
    *routes.axum_router_mut() = merged;
    server.add_routes(routes).serve_with_incoming(incoming::incoming(listener)).await?;
    Ok(())
}

/// Resolves once the job is over and its agents have left.
async fn ended(mut snapshots: watch::Receiver<Arc<Snapshot>>) -> Option<Outcome> {
    let over = |snapshot: &Arc<Snapshot>| snapshot.status.outcome.is_some();
    let outcome = snapshots.wait_for(over).await.ok()?.status.outcome.clone();
    // An agent that hangs must not keep the coordinator.
    let alone = snapshots.wait_for(|snapshot| snapshot.attached == 0);
    let _ = tokio::time::timeout(Duration::from_secs(15), alone).await;
    outcome
}

/// What asks this process to quit.
struct Signals {
    terminate: unix::Signal,
    interrupt: unix::Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: unix::signal(unix::SignalKind::terminate())?,
            interrupt: unix::signal(unix::SignalKind::interrupt())?,
        })
    }

    async fn told_to_quit(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// For whoever started this with port 0: the one line on standard output.
#[allow(clippy::print_stdout, reason = "the address is this command's output")]
fn say_where(address: SocketAddr) {
    println!("{address}");
}

fn start_logging(format: LogFormat, logs: Logs) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let writer = move || Tee(logs.clone());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    match format {
        LogFormat::Text => log.with_ansi(false).init(),
        LogFormat::Json => log.json().init(),
    }
}
