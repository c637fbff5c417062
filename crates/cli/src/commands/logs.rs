//! `baton logs`

use std::{pin::pin, time::Duration};

use baton_job::exit::Failure;
use baton_proto::v1::{StreamLogsRequest, StreamLogsResponse};

use super::watch::{END_GRACE, RECONNECT_TIMEOUT};
use crate::{
    connect::{Coordinator, CoordinatorFlags, Feed, Follow},
    json, output,
    render::{self, Paint},
};

/// Print the logs of the ranks, and with --all also of the agents and the coordinator
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton logs                           the last 100 lines of all ranks
  baton logs 0 3 --follow              lines of ranks 0 and 3, also new ones, until the job ends
  baton logs --all -n 1000 | less -R
  baton logs --json | jq -r 'select(.rank == 3).line'

Older lines are in the log files in each node's run folder.")]
pub(crate) struct Args {
    #[command(flatten)]
    target: CoordinatorFlags,
    /// Only these ranks
    #[arg(value_name = "RANK")]
    ranks: Vec<u32>,
    /// Number of past lines; 0 for all that are kept
    #[arg(short = 'n', long, value_name = "N", default_value_t = 100)]
    tail: u32,
    /// Keep printing new lines until the job ends
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
    let mut coordinator = Coordinator::find(&args.target)?;
    let lines = coordinator.logs(StreamLogsRequest {
        ranks: args.ranks,
        all_sources: args.all,
        tail: args.tail,
        follow: args.follow,
    });
    let paint = Paint::detect();
    let show = |line: &StreamLogsResponse| match args.json {
        true => output::line(json::line(line)),
        false => output::painted(render::log_line(line, paint)),
    };
    if args.follow {
        // Fails at once if the coordinator does not answer now; later interruptions are retried.
        coordinator.status().await?;
    }
    show_all(lines, args.follow, coordinator, show).await
}

/// Shows all items of a feed. A followed feed ends with the job.
pub(super) async fn show_all<F: Feed>(
    mut feed: Follow<F>,
    follow: bool,
    coordinator: Coordinator,
    show: impl Fn(&F::Item),
) -> Result<(), Failure> {
    if !follow {
        while let Some(item) = feed.next_or_end().await? {
            show(&item);
        }
        return Ok(());
    }
    let mut job_end = pin!(wait_for_end(coordinator));
    loop {
        tokio::select! {
            item = feed.next(RECONNECT_TIMEOUT) => show(&item?),
            () = &mut job_end => break,
        }
    }
    // Items sent just before the end.
    while let Ok(Ok(item)) = tokio::time::timeout(END_GRACE, feed.next(Duration::ZERO)).await {
        show(&item);
    }
    Ok(())
}

/// Waits until the job has ended.
async fn wait_for_end(mut coordinator: Coordinator) {
    const STATUS_POLL_INTERVAL: Duration = Duration::from_millis(500);
    while !coordinator.status().await.is_ok_and(|status| status.outcome.is_some()) {
        tokio::time::sleep(STATUS_POLL_INTERVAL).await;
    }
}
