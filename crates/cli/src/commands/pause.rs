//! `baton pause`

use baton_job::exit::Failure;

use crate::{
    connect::{Coordinator, Where},
    json, output,
};

/// Let training stand still after the current step; `baton resume` goes on
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton pause
  baton pause --reason \"the GPUs are needed for an hour\"

The state stays in the memory of the ranks: they go on at once and with the same bits. Machines stay too, and are \
paid for; `baton drain` lets them go.")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Where,
    /// Why, in words; shown in status and events
    #[arg(long, value_name = "TEXT", default_value = "`baton pause`")]
    reason: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let mut coordinator = Coordinator::find(&args.place)?;
    let job = coordinator.name().await?;
    coordinator.pause(args.reason).await?;
    match args.json {
        true => output::line(json::line(&json::Asked { asked: "pause", job })),
        false => output::line(format_args!(
            "{job}: standing still after the current step; `baton resume` goes on"
        )),
    }
    Ok(())
}
