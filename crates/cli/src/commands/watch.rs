//! `baton watch`

use std::time::Duration;

use baton_job::exit::Failure;
use baton_proto::v1::{WatchEventsResponse, watch_events_response::Kind};

use crate::{
    connect::{Coordinator, Where},
    failure::failed,
    json, output,
    render::{self, Day, Paint},
};

/// Print the job's events as they happen, until it ends
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton watch
  baton watch --after 120              only what happened since event 120
  baton watch --json | jq -r 'select(.kind == \"rank_failed\").message'")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Where,
    /// Only events with a greater id
    #[arg(long, value_name = "ID", default_value_t = 0)]
    after: u64,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// How long a restarting coordinator may take to come back.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// After word of an end: how soon what followed it would be here. A job that was drained and taken up
/// again has several ends in its history.
pub(super) const QUIET: Duration = Duration::from_millis(300);

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let mut coordinator = Coordinator::find(&args.place)?;
    // One that has never answered is not waited for.
    coordinator.status().await?;
    let mut events = coordinator.events(args.after);
    let paint = Paint::detect();
    let mut ended = false;
    loop {
        let wait = if ended { QUIET } else { Duration::MAX };
        let event = match tokio::time::timeout(wait, events.next(PATIENCE)).await {
            Err(_) if is_over(&mut coordinator).await => return Ok(()),
            Err(_) => {
                ended = false;
                continue;
            }
            Ok(Ok(event)) => event,
            Ok(Err(failure)) => {
                let last = events.last_id();
                return Err(failed(format!("{failure}; go on later with --after {last}")));
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
        false => output::line(render::event(event, Day::Shown, paint)),
    }
}

/// Whether the job as it is now is over; a coordinator that has left tells that too.
async fn is_over(coordinator: &mut Coordinator) -> bool {
    coordinator.status().await.map_or(true, |status| status.outcome.is_some())
}
