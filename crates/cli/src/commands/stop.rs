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
    let mut coordinator = Coordinator::find(&args.place)?;
    let name = coordinator.name().await?;
    coordinator.stop().await?;
    output::line(format_args!(
        "{name}: stopping; `baton up` with the same recipe goes on from the last checkpoint"
    ));
    Ok(())
}
