//! The flags of `baton-coordinator serve`.

use std::{net::SocketAddr, path::PathBuf};

use baton_access::ServerFiles;
use clap::ValueEnum;
use tonic::transport::Uri;

/// Serve a job until it ends.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The job: a recipe file. Without one the job of the run folder is served, or one is waited for that `baton
    /// submit` brings.
    #[arg(long, value_name = "FILE")]
    pub(crate) recipe: Option<PathBuf>,
    /// Change one value of the recipe, e.g. --set train.epochs=3. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "recipe")]
    pub(crate) overrides: Vec<String>,
    /// Folder of this run: journal, logs and, unless the recipe says otherwise, checkpoints.
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: PathBuf,
    /// Address to serve on; port 0 takes a free one. It is printed, and written to coordinator.json in
    /// the run folder.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:29600")]
    pub(crate) listen: SocketAddr,
    /// Serve on an address that other machines reach, without TLS or without tokens.
    #[arg(long)]
    pub(crate) insecure: bool,
    #[command(flatten)]
    pub(crate) access: ServerFiles,
    /// Start a new run from this checkpoint: a folder in the store, or a path.
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "no_auto_resume")]
    pub(crate) resume: Option<String>,
    /// Start a new run from fresh weights, whatever the run folder holds. Nothing is deleted.
    #[arg(long)]
    pub(crate) no_auto_resume: bool,
    /// Go on with the state of another recipe, if it has this one's shape; the differences are told.
    #[arg(long, conflicts_with = "no_auto_resume")]
    pub(crate) allow_recipe_change: bool,
    /// Send the job's life as OpenTelemetry traces to a collector that speaks OTLP over gRPC, e.g.
    /// http://127.0.0.1:4317. The exporter's usual variables, as OTEL_EXPORTER_OTLP_HEADERS, are obeyed.
    #[arg(long, value_name = "URL", value_parser = collector)]
    pub(crate) otlp_endpoint: Option<String>,
    /// Form of the log on standard error; its filter is the environment's RUST_LOG.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
    /// How long to answer queries after the job has ended.
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    pub(crate) linger_seconds: f64,
    /// End when the process that started this one ends.
    #[arg(long)]
    pub(crate) exit_with_parent: bool,
}

/// An address that traces can be sent to.
fn collector(text: &str) -> Result<String, String> {
    let scheme = text.parse::<Uri>().ok().and_then(|uri| uri.scheme_str().map(str::to_owned));
    match scheme.as_deref() {
        Some("http" | "https") => Ok(text.to_owned()),
        _ => Err("give a URL such as http://127.0.0.1:4317, or https://HOST:4317".to_owned()),
    }
}

/// Form of the log.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}
