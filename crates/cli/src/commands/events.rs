//! `baton events`

use std::collections::VecDeque;

use baton_job::exit::Failure;

use super::watch;
use crate::{
    connect::{Coordinator, CoordinatorFlags},
    render::Paint,
};

/// Print the job's past events; `baton watch` also follows new ones
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton events
  baton events -n 20                   the last 20
  baton events --after 120             only events after number 120
  baton events --json | jq -r 'select(.kind == \"recovered\").message'")]
pub(crate) struct Args {
    #[command(flatten)]
    target: CoordinatorFlags,
    /// Only events with a greater id
    #[arg(long, value_name = "ID", default_value_t = 0)]
    after: u64,
    /// Only the last N events
    #[arg(short = 'n', long = "tail", value_name = "N")]
    tail: Option<usize>,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let mut events = Coordinator::find(&args.target)?.past_events(args.after);
    let mut past = VecDeque::new();
    while let Some(event) = events.next_or_end().await? {
        past.push_back(event);
        if args.tail.is_some_and(|tail| past.len() > tail) {
            past.pop_front();
        }
    }
    let paint = Paint::detect();
    past.iter().for_each(|event| watch::show(event, args.json, paint));
    Ok(())
}
