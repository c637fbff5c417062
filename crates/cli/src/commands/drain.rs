//! `baton drain`

use baton_job::exit::Failure;

use crate::{
    connect::{Coordinator, Where},
    output,
};

/// Save after the current step and stop; the same `baton up` goes on
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton drain
  baton drain --reason \"the machine is needed until noon\"")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Where,
    /// Why, in words; shown in status and events
    #[arg(long, value_name = "TEXT", default_value = "`baton drain`")]
    reason: String,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let mut coordinator = Coordinator::find(&args.place)?;
    let name = coordinator.name().await?;
    coordinator.drain(args.reason).await?;
    output::line(format_args!(
        "{name}: saving after the current step, then stopping; `baton status --watch` shows how"
    ));
    Ok(())
}
