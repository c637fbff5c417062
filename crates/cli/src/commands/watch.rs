//! `baton watch`

use std::time::Duration;

use baton_job::exit::Failure;
use baton_proto::v1::{WatchEventsResponse, watch_events_response::Kind};

use crate::{
    connect::{Coordinator, CoordinatorFlags},
    json, output,
    render::{self, Day, Paint},
};

/// Print the job's events as they happen, until it ends
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton watch
  baton watch --after 120              only events after number 120
  baton watch --retry-seconds 3600     also follow a coordinator that comes back within an hour
  baton watch --json | jq -r 'select(.kind == \"rank_failed\").message'

A coordinator that does not answer is not the end of the job: its events are followed when it comes back. Exit \
codes:
  0    the job has ended, in whatever way; `baton status` and the last event show how
  1    no coordinator answers at the start, or none for --retry-seconds
  2    the coordinator refuses the call, for instance without a token")]
pub(crate) struct Args {
    #[command(flatten)]
    target: CoordinatorFlags,
    /// Only events with a greater id
    #[arg(long, value_name = "ID", default_value_t = 0)]
    after: u64,
    /// Longest time without an answer of the coordinator
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    retry_seconds: u32,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// Maximum time without a coordinator, for instance while it restarts.
pub(super) const RECONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Wait for more events after an end of the job. A job that was drained and resumed has several ends in its history.
pub(super) const END_GRACE: Duration = Duration::from_millis(300);
/// Poll interval of the status, for an end whose event was missed. Longer than the timeout of a call, so that an
/// unreachable coordinator is noticed in between.
const STATUS_POLL_INTERVAL: Duration = Duration::from_secs(15);

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let mut coordinator = Coordinator::find(&args.target)?;
    // Fails at once if the coordinator does not answer now; later interruptions are retried.
    let has_ended = coordinator.status().await?.outcome.is_some();
    let paint = Paint::detect();
    let mut past = coordinator.past_events(args.after);
    let past_is_complete = loop {
        match past.next_or_end().await {
            Ok(Some(event)) => show(&event, args.json, paint),
            Ok(None) => break true,
            Err(_) => break false,
        }
    };
    if has_ended && past_is_complete {
        return Ok(());
    }
    let retry = Duration::from_secs(args.retry_seconds.into());
    let mut events = past.followed().announced();
    // Whether the newest event is an end of the job, or a node that left after it.
    let mut end_seen = false;
    loop {
        let wait = if end_seen { END_GRACE } else { STATUS_POLL_INTERVAL };
        match tokio::time::timeout(wait, events.next(retry)).await {
            Ok(Ok(event)) => {
                end_seen = match event.kind() {
                    Kind::Ended => true,
                    Kind::NodeLost => end_seen,
                    _ => false,
                };
                show(&event, args.json, paint);
            }
            Ok(Err(Failure { class, message })) => {
                let last = events.last_id();
                let message = format!("{message}; continue later with --after {last}");
                return Err(Failure { class, message });
            }
            Err(_) => match coordinator.status().await {
                Ok(status) if status.outcome.is_some() => return Ok(()),
                // A coordinator that has just ended its job leaves soon. An end among past events may be followed by
                // more events that did not arrive.
                Err(_) if end_seen && past_is_complete => return Ok(()),
                Ok(_) | Err(_) => end_seen = false,
            },
        }
    }
}

/// Prints an event.
pub(super) fn show(event: &WatchEventsResponse, json: bool, paint: Paint) {
    match json {
        true => output::line(json::line(event)),
        false => output::painted(render::event(event, Day::Shown, paint)),
    }
}
