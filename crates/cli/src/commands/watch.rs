//! `baton watch`

use std::time::Duration;

use baton_job::exit::Failure;
use baton_proto::v1::{WatchEventsResponse, watch_events_response::Kind};

use crate::{
    connect::{Coordinator, CoordinatorFlags},
    failure::failed,
    json, output,
    render::{self, Day, Paint},
};

/// Print the job's events as they happen, until it ends
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton watch
  baton watch --after 120              only events after number 120
  baton watch --json | jq -r 'select(.kind == \"rank_failed\").message'")]
pub(crate) struct Args {
    #[command(flatten)]
    target: CoordinatorFlags,
    /// Only events with a greater id
    #[arg(long, value_name = "ID", default_value_t = 0)]
    after: u64,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// Maximum time without a coordinator, for instance while it restarts.
pub(super) const RECONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Wait for more events after an end of the job. A job that was drained and resumed has several ends in its history.
pub(super) const END_GRACE: Duration = Duration::from_millis(300);

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let mut coordinator = Coordinator::find(&args.target)?;
    // Fails at once if the coordinator does not answer now; later interruptions are retried.
    coordinator.status().await?;
    let mut events = coordinator.events(args.after);
    let paint = Paint::detect();
    let mut ended = false;
    loop {
        let wait = if ended { END_GRACE } else { Duration::MAX };
        let event = match tokio::time::timeout(wait, events.next(RECONNECT_TIMEOUT)).await {
            Err(_) if has_ended(&mut coordinator).await => return Ok(()),
            Err(_) => {
                ended = false;
                continue;
            }
            Ok(Ok(event)) => event,
            Ok(Err(failure)) => {
                let last = events.last_id();
                return Err(failed(format!("{failure}; continue later with --after {last}")));
            }
        };
        ended = event.kind() == Kind::Ended;
        show(&event, args.json, paint);
    }
}

/// Prints an event.
pub(super) fn show(event: &WatchEventsResponse, json: bool, paint: Paint) {
    match json {
        true => output::line(json::line(event)),
        false => output::painted(render::event(event, Day::Shown, paint)),
    }
}

/// Whether the job has ended; a coordinator that no longer answers counts as the end too.
async fn has_ended(coordinator: &mut Coordinator) -> bool {
    coordinator.status().await.map_or(true, |status| status.outcome.is_some())
}
