//! `baton checkpoint now`

use baton_job::exit::Failure;

use crate::{
    connect::{Coordinator, Where},
    output,
};

/// Save after the current step and go on
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint now
  baton watch          tells when it is durable")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Where,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let mut coordinator = Coordinator::find(&args.place)?;
    let name = coordinator.name().await?;
    coordinator.trigger_checkpoint().await?;
    output::line(format_args!(
        "{name}: saving after the current step; `baton watch` tells when it is durable"
    ));
    Ok(())
}
