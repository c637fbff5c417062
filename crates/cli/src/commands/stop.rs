//! `baton stop`

use baton_job::exit::Failure;

use crate::{
    connect::{Coordinator, Where},
    output,
};

/// Stop at once, without saving; work since the last checkpoint is lost
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton stop
  baton drain      saves first")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Where,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    Coordinator::find(&args.place)?.stop().await?;
    output::line("stopping; `baton up` with the same recipe goes on from the last checkpoint");
    Ok(())
}
