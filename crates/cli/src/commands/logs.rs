//! `baton logs`

use std::{pin::pin, time::Duration};

use baton_job::exit::Failure;
use baton_proto::v1::{StreamLogsRequest, StreamLogsResponse};

use super::watch::{PATIENCE, QUIET};
use crate::{
    connect::{Coordinator, Where},
    json, output,
    render::{self, Paint},
};

/// Print what the ranks write, and with --all agents and coordinator too
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton logs                           the last 100 lines of all ranks
  baton logs 0 3 --follow              of ranks 0 and 3, and those to come until the job ends
  baton logs --all -n 1000 | less -R
  baton logs --json | jq -r 'select(.rank == 3).line'

Older lines are in the log files of the run folder of each node.")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Where,
    /// Only these ranks
    #[arg(value_name = "RANK")]
    ranks: Vec<u32>,
    /// So many lines of the past; 0 for all that are kept
    #[arg(short = 'n', long, value_name = "N", default_value_t = 100)]
    tail: u32,
    /// Go on with lines to come, until the job ends
    #[arg(short, long)]
    follow: bool,
    /// Also lines of agents and of the coordinator
    #[arg(long)]
    all: bool,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let mut coordinator = Coordinator::find(&args.place)?;
    let mut lines = coordinator.logs(StreamLogsRequest {
        ranks: args.ranks,
        all_sources: args.all,
        tail: args.tail,
        follow: args.follow,
    });
    let paint = Paint::detect();
    let show = |line: &StreamLogsResponse| match args.json {
        true => output::line(json::line(line)),
        false => output::line(render::log_line(line, paint)),
    };
    if !args.follow {
        while let Some(line) = lines.next_or_end().await? {
            show(&line);
        }
        return Ok(());
    }
    // One that has never answered is not waited for.
    coordinator.status().await?;
    let mut over = pin!(is_over(coordinator));
    loop {
        tokio::select! {
            line = lines.next(PATIENCE) => show(&line?),
            () = &mut over => break,
        }
    }
    // The last words of the ranks.
    while let Ok(Ok(line)) = tokio::time::timeout(QUIET, lines.next(Duration::ZERO)).await {
        show(&line);
    }
    Ok(())
}

/// Waits for the job to be over.
pub(super) async fn is_over(mut coordinator: Coordinator) {
    const LOOK: Duration = Duration::from_millis(500);
    while !coordinator.status().await.is_ok_and(|status| status.outcome.is_some()) {
        tokio::time::sleep(LOOK).await;
    }
}
