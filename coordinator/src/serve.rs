//! From flags to a served job.

use std::{
    error::Error as _,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use baton_access::{GuardLayer, ServerFiles};
use baton_checkpoint::Store;
use baton_job::{
    Generation, JobId, JobSpec,
    engine::{Engine, Origin},
    exit::{Class, Failure, Outcome},
    message::Restore,
};
use baton_proto::{
    DESCRIPTORS,
    v1::{self, job_service_server::JobServiceServer, node_service_server::NodeServiceServer},
};
use clap::ValueEnum;
use tokio::{net::TcpListener, signal::unix, sync::watch};
use tonic::transport::{Server, ServerTlsConfig, server::TcpIncoming};
use tower_layer::{Identity, Stack};
use tracing_subscriber::EnvFilter;

use crate::{
    clock::Clock,
    endpoint::EndpointFile,
    job::{End, Input, Loop, Snapshot},
    job_service::Jobs,
    journal::Journal,
    node_service::Nodes,
};

/// Serve a job until it ends.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The job: a recipe file.
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// Change one value of the recipe, e.g. --set train.epochs=3. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Folder of this run: journal, logs and, unless the recipe says otherwise, checkpoints.
    #[arg(long, value_name = "DIR")]
    run_dir: PathBuf,
    /// Address to serve on; port 0 takes a free one. It is printed, and written to coordinator.json in
    /// the run folder.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:29600")]
    listen: SocketAddr,
    /// Serve on an address that other machines reach, without TLS or without tokens.
    #[arg(long)]
    insecure: bool,
    #[command(flatten)]
    access: ServerFiles,
    /// Start a new run from this checkpoint: a folder in the store, or a path.
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "no_auto_resume")]
    resume: Option<String>,
    /// Start a new run from fresh weights, whatever the run folder holds. Nothing is deleted.
    #[arg(long)]
    no_auto_resume: bool,
    /// Go on with the state of another recipe, if it has this one's shape; the differences are told.
    #[arg(long, conflicts_with = "no_auto_resume")]
    allow_recipe_change: bool,
    /// Form of the log on standard error; its filter is the environment's RUST_LOG.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
    /// How long to answer queries after the job has ended.
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    linger_seconds: f64,
    /// End when the process that started this one ends.
    #[arg(long)]
    exit_with_parent: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

/// Serves until the job ends (`Some`) or the process is told to quit (`None`).
pub(crate) fn run(args: &Args) -> Result<Option<Outcome>, Failure> {
    start_logging(args.log_format);
    if args.exit_with_parent {
        let signal = Some(rustix::process::Signal::TERM);
        rustix::process::set_parent_process_death_signal(signal)
            .map_err(|error| crash(format!("cannot follow the parent process: {error}")))?;
    }
    let spec = read_recipe(&args.recipe, &args.overrides)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| crash(format!("cannot start: {error}")))?;
    runtime.block_on(serve(args, spec))
}

async fn serve(args: &Args, spec: JobSpec) -> Result<Option<Outcome>, Failure> {
    let unusable = |error: baton_access::Error| bad_input(error.to_string());
    let tls = args.access.tls().map_err(unusable)?;
    let has_tls = tls.is_some();
    let server = server(tls)?.layer(GuardLayer::new(args.access.tokens().map_err(unusable)?));
    // The port before anything is touched: it is what fails most often.
    let listener = bind(args).await?;
    let address = listener.local_addr().map_err(|error| crash(error.to_string()))?;
    let clock = Clock::start();
    let prepared = tokio::task::block_in_place(|| prepare(args, &spec, clock))?;
    let job_id = prepared.engine.origin().job;
    let store_location = prepared.store.location().to_owned();
    tracing::info!(job = %job_id, %address, recipe = %spec.to_json(), "serving");

    let Prepared { engine, journal, store } = prepared;
    let (job_loop, job) = Loop::new(engine, journal, store, args.run_dir.clone(), clock);
    let job_thread = thread::Builder::new()
        .name("job".to_owned())
        .spawn(move || job_loop.run())
        .map_err(|error| crash(format!("cannot start a thread: {error}")))?;
    let _endpoint = EndpointFile::write(&args.run_dir, address, has_tls)
        .map_err(|error| crash(format!("{error:#}")))?;
    say_where(address);
    let spec = Arc::new(spec);
    let welcome = v1::Welcome {
        job_id: job_id.to_string(),
        recipe_json: spec.to_json(),
        checkpoint_location: store_location.clone(),
    };
    let jobs = Jobs { job: job.clone(), job_id: job_id.to_string(), spec, store_location };
    let nodes = Nodes::new(job.clone(), welcome);

    let linger = Duration::from_secs_f64(args.linger_seconds.clamp(0.0, 3600.0));
    let outcome = tokio::select! {
        served = serve_grpc(server, listener, jobs, nodes) => {
            return Err(crash(format!("the gRPC server ended: {served:?}")));
        }
        outcome = ended(job.snapshots(), linger) => outcome,
        signal = told_to_quit() => {
            signal.map_err(|error| crash(format!("cannot listen to signals: {error}")))?;
            tracing::info!("told to quit; training goes on, and so does the job when this starts again");
            None
        }
    };
    job.send(Input::Quit);
    match job_thread.join() {
        Ok(End::Quit) => Ok(outcome),
        Ok(End::Broken(error)) => Err(crash(format!("{error:#}"))),
        Err(_) => Err(crash("the job loop panicked; this is a bug".to_owned())),
    }
}

struct Prepared {
    engine: Engine,
    journal: Journal,
    store: Store,
}

/// Opens store and journal and takes up the job they hold, or begins one.
fn prepare(args: &Args, spec: &JobSpec, clock: Clock) -> Result<Prepared, Failure> {
    fs::create_dir_all(&args.run_dir).map_err(|error| {
        let dir = args.run_dir.display();
        bad_input(format!("run folder {dir}: {error}; give a writable one with --run-dir"))
    })?;
    let store = Store::open(&store_location(spec, &args.run_dir))
        .map_err(|error| bad_input(error.to_string()))?;
    let path = args.run_dir.join("journal.redb");
    let new_run = args.no_auto_resume || args.resume.is_some();
    let open = |path: &Path| Journal::open(path).map_err(|error| bad_input(format!("{error:#}")));
    let (mut journal, mut records) = open(&path)?;
    if new_run && !records.is_empty() {
        drop(journal);
        set_aside(&path)?;
        (journal, records) = open(&path)?;
    }
    let engine = match Engine::replay(spec, &records, clock.now()) {
        Some(engine) if engine.origin().recipe_hash == spec.recipe_hash() => engine,
        Some(before) if args.allow_recipe_change => {
            // What it must not resume from, this one must not either.
            let restore = Restore { allow_recipe_change: true, ..before.restore() };
            drop(journal);
            set_aside(&path)?;
            (journal, _) = open(&path)?;
            Engine::new(spec, new_origin(spec, &store, |_| restore)?, clock.now())
        }
        Some(_) => return Err(other_recipe(&args.run_dir)),
        None => {
            Engine::new(spec, new_origin(spec, &store, |first| wished(args, first))?, clock.now())
        }
    };
    Ok(Prepared { engine, journal, store })
}

fn new_origin(
    spec: &JobSpec,
    store: &Store,
    restore: impl FnOnce(Generation) -> Restore,
) -> Result<Origin, Failure> {
    // Every generation that ever wrote to this store is at or below its fence.
    let first_generation = store.fence().map_err(|error| bad_input(error.to_string()))?.next();
    let job = JobId(uuid::Uuid::new_v4());
    let restore = restore(first_generation);
    Ok(Origin { job, recipe_hash: spec.recipe_hash(), first_generation, restore })
}

/// Where the user wants a new run to begin.
fn wished(args: &Args, first_generation: Generation) -> Restore {
    let allow_recipe_change = args.allow_recipe_change;
    let begins_anew = args.no_auto_resume || args.resume.is_some();
    let not_before = if begins_anew { first_generation } else { Generation(0) };
    Restore { not_before, path: args.resume.clone(), allow_recipe_change, ..Restore::default() }
}

fn other_recipe(run_dir: &Path) -> Failure {
    bad_input(format!(
        "run folder {} holds a run of another recipe, and this one would end with other weights: undo \
         the change, or give another --run-dir, or go on with its state by --allow-recipe-change, or start \
         anew here with --no-auto-resume",
        run_dir.display()
    ))
}

/// The old run's journal is kept, under a name of its own.
fn set_aside(path: &Path) -> Result<(), Failure> {
    let kept = (1u32..)
        .map(|n| path.with_file_name(format!("journal-{n}.redb")))
        .find(|kept| !kept.exists())
        .unwrap_or_else(|| path.with_extension("old"));
    fs::rename(path, &kept).map_err(|error| bad_input(format!("{}: {error}", path.display())))
}

fn store_location(spec: &JobSpec, run_dir: &Path) -> String {
    match spec.checkpoint.dir.as_str() {
        "" => run_dir.join("checkpoints").display().to_string(),
        dir => dir.to_owned(),
    }
}

fn read_recipe(path: &Path, overrides: &[String]) -> Result<JobSpec, Failure> {
    let named = |problem: String| bad_input(format!("{}: {problem}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
    JobSpec::from_toml(&text, overrides).map_err(|error| named(error.to_string()))
}

async fn bind(args: &Args) -> Result<TcpListener, Failure> {
    let listen = args.listen;
    if !listen.ip().is_loopback() && !args.insecure && !args.access.are_secure() {
        return Err(bad_input(format!(
            "--listen {listen} is reachable from other machines, and anybody there could stop the job: \
             give --tls-cert, --tls-key and --tokens (`baton cert` makes them), use 127.0.0.1, or add \
             --insecure on a network you trust"
        )));
    }
    TcpListener::bind(listen).await.map_err(|error| {
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
/// The longest message that people's tools send, in bytes: a reason in words.
const LONGEST_REQUEST: usize = 64 << 10;
/// The longest that an agent sends, in bytes: a hello of 1,024 ranks that all tell of trouble.
const LONGEST_REPORT: usize = 4 << 20;

fn server(tls: Option<ServerTlsConfig>) -> Result<Server, Failure> {
    let server = Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(5)))
        .http2_keepalive_timeout(Some(Duration::from_secs(5)))
        .max_concurrent_streams(MOST_CALLS);
    let Some(tls) = tls else { return Ok(server) };
    server.tls_config(tls.timeout(HANDSHAKE)).map_err(|error| {
        let problem = error.source().map_or(error.to_string(), ToString::to_string);
        bad_input(format!("--tls-cert, --tls-key or --tls-client-ca cannot be used: {problem}"))
    })
}

async fn serve_grpc(
    mut server: Server<Stack<GuardLayer, Identity>>,
    listener: TcpListener,
    jobs: Jobs,
    nodes: Nodes,
) -> Result<(), Box<dyn std::error::Error>> {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<JobServiceServer<Jobs>>().await;
    health.set_serving::<NodeServiceServer<Nodes>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    server
        .add_service(health_service)
        .add_service(reflection)
        .add_service(JobServiceServer::new(jobs).max_decoding_message_size(LONGEST_REQUEST))
        .add_service(NodeServiceServer::new(nodes).max_decoding_message_size(LONGEST_REPORT))
        .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)))
        .await?;
    Ok(())
}

/// Resolves once the job is over, its agents have left and watchers had time to read about it.
async fn ended(mut snapshots: watch::Receiver<Arc<Snapshot>>, linger: Duration) -> Option<Outcome> {
    let over = |snapshot: &Arc<Snapshot>| snapshot.status.outcome.is_some();
    let outcome = snapshots.wait_for(over).await.ok()?.status.outcome.clone();
    // An agent that hangs must not keep the coordinator.
    let alone = snapshots.wait_for(|snapshot| snapshot.attached == 0);
    let _ = tokio::time::timeout(Duration::from_secs(15), alone).await;
    tokio::time::sleep(linger).await;
    outcome
}

async fn told_to_quit() -> std::io::Result<()> {
    let mut terminate = unix::signal(unix::SignalKind::terminate())?;
    let mut interrupt = unix::signal(unix::SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// For whoever started this with port 0: the one line on standard output.
#[allow(clippy::print_stdout, reason = "the address is this command's output")]
fn say_where(address: SocketAddr) {
    println!("{address}");
}

fn start_logging(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.with_ansi(false).init(),
        LogFormat::Json => log.json().init(),
    }
}

fn bad_input(message: String) -> Failure {
    Failure { class: Class::BadInput, message }
}

fn crash(message: String) -> Failure {
    Failure { class: Class::Crash, message }
}
