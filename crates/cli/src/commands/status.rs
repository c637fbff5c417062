//! `baton status`

use std::time::Duration;

use baton_job::exit::Failure;
use baton_proto::v1::{GetStatusResponse, get_status_response::Phase};

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
    /// Refresh every second until the job ends
    #[arg(long)]
    watch: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let mut coordinator = Coordinator::find(&args.target)?;
    loop {
        let status = coordinator.status().await?;
        show(&args, &status);
        if !args.watch || status.phase() == Phase::Ended {
            return Ok(());
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
