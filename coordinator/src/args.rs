//! The flags of `baton-coordinator serve`.
//!
//! Flags and environment variables are a promise to unit files and scripts: adding is allowed, renaming is not. Help
//! texts may change at any time.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use baton_access::ServerFiles;
use baton_job::parse_seconds;
use clap::ValueEnum;
use tonic::transport::Uri;

/// Serve a job until it ends.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The job: a recipe file. Without it, serve the job that `baton submit` sent to this run folder before, or wait
    /// for one.
    #[arg(long, value_name = "FILE")]
    pub(crate) recipe: Option<PathBuf>,
    /// Change one value of the recipe, e.g. --set train.epochs=3. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "recipe")]
    pub(crate) overrides: Vec<String>,
    /// Folder of this run: journal, logs and, unless the recipe sets another location, checkpoints.
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: PathBuf,
    /// Address to serve on; port 0 takes a free port. The address is printed, and written to
    /// coordinator.json in the run folder.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:29600")]
    pub(crate) listen: SocketAddr,
    /// Serve on an address that other machines reach, without TLS or without tokens.
    #[arg(long)]
    pub(crate) insecure: bool,
    #[command(flatten)]
    pub(crate) access: ServerFiles,
    /// Name or address of this machine by which agents and tools reach it; with the port it is written into the checkpoint
    /// store, where they find it.
    #[arg(long, value_name = "HOST")]
    pub(crate) host: Option<String>,
    /// Continue the job of this checkpoint store, a folder or s3://BUCKET/PREFIX, whose coordinator is lost with its machine.
    /// Ranks that run keep their state. Agents start this by themselves: `cluster.standby`.
    #[arg(long, value_name = "STORE", requires = "host",
          conflicts_with_all = ["recipe", "resume", "no_auto_resume", "allow_recipe_change"])]
    pub(crate) take_over: Option<String>,
    /// Take over only from the coordinator whose lease has this number.
    #[arg(long, value_name = "LEASE", requires = "take_over")]
    pub(crate) after: Option<u64>,
    /// Start a new run from this checkpoint: the name of a folder in the store, or a path.
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "no_auto_resume")]
    pub(crate) resume: Option<String>,
    /// Start a new run from fresh weights, even if the run folder has an older run. Nothing is deleted.
    #[arg(long)]
    pub(crate) no_auto_resume: bool,
    /// Continue with the state of another recipe, if its tensors have the same shapes; the differences are logged.
    #[arg(long, conflicts_with = "no_auto_resume")]
    pub(crate) allow_recipe_change: bool,
    /// Send OpenTelemetry traces of the job to a collector that accepts OTLP over gRPC, e.g.
    /// http://127.0.0.1:4317. The usual variables of the exporter apply, such as OTEL_EXPORTER_OTLP_HEADERS.
    #[arg(long, value_name = "URL", value_parser = collector)]
    pub(crate) otlp_endpoint: Option<String>,
    /// Format of the log on standard error; the environment variable RUST_LOG sets its filter.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
    /// Time to answer queries after the job has ended, seconds.
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    pub(crate) linger_seconds: Duration,
    /// Restart after a crash of a coordinator that began after this generation: if the job has ended in a later one, it does
    /// not begin again. `baton up` gives it.
    #[arg(long, hide = true, value_name = "GENERATION")]
    pub(crate) restarted_after: Option<u64>,
    /// Exit when the parent process exits, or at once if it is not this one.
    #[arg(long, value_name = "PID", num_args = 0..=1, require_equals = true)]
    pub(crate) exit_with_parent: Option<Option<u32>>,
}

/// Validates the address of a trace collector.
fn collector(text: &str) -> Result<String, String> {
    let scheme = text.parse::<Uri>().ok().and_then(|uri| uri.scheme_str().map(str::to_owned));
    match scheme.as_deref() {
        Some("http" | "https") => Ok(text.to_owned()),
        _ => Err("give a URL such as http://127.0.0.1:4317, or https://HOST:4317".to_owned()),
    }
}

/// Format of the log.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}
