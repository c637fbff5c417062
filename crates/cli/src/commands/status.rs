//! `baton status`

use std::time::{Duration, Instant};

use baton_job::exit::Failure;
use baton_proto::v1::{GetStatusResponse, get_status_response::Phase};

use super::watch::RECONNECT_TIMEOUT;
use crate::{
    connect::{Coordinator, CoordinatorFlags},
    json, output,
    render::{self, Paint},
};

/// Show the job's status
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton status
  baton status --watch
  baton status --json | jq .latest.loss
  baton status --coordinator http://10.0.0.7:29600")]
pub(crate) struct Args {
    #[command(flatten)]
    target: CoordinatorFlags,
    /// Print one JSON object; with --watch one per line
    #[arg(long)]
    json: bool,
    /// Refresh every second until the job ends; a coordinator that is away for up to 30 s is waited for
    #[arg(long)]
    watch: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let mut coordinator = Coordinator::find(&args.target)?;
    let (mut has_answered, mut outage) = (false, None);
    loop {
        match coordinator.status().await {
            Ok(status) => {
                (has_answered, outage) = (true, None);
                show(&args, &status);
                if !args.watch || status.phase() == Phase::Ended {
                    return Ok(());
                }
            }
            Err(failure) if has_answered && failure.class.is_retriable() => {
                let since = *outage.get_or_insert_with(|| {
                    let url = coordinator.url();
                    output::note(format_args!(
                        "{url} is not reachable, retrying for {} s; the job may still run",
                        RECONNECT_TIMEOUT.as_secs()
                    ));
                    Instant::now()
                });
                if since.elapsed() >= RECONNECT_TIMEOUT {
                    return Err(failure);
                }
            }
            Err(failure) => return Err(failure),
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

fn show(args: &Args, status: &GetStatusResponse) {
    if args.json {
        output::line(json::line(status));
        return;
    }
    let text = render::status(status, Paint::detect());
    match args.watch && output::is_terminal() {
        true => output::page(text),
        false => output::painted(text),
    }
}
