//! `baton resume`

use baton_job::exit::Failure;

use crate::{
    connect::{Coordinator, Where},
    json, output,
};

/// Let training go on after `baton pause`
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton resume
  baton resume --coordinator http://10.0.0.7:29600

A job that was saved and stopped goes on by `baton up`.")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Where,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let mut coordinator = Coordinator::find(&args.place)?;
    let job = coordinator.name().await?;
    coordinator.resume().await?;
    match args.json {
        true => output::line(json::line(&json::Asked { asked: "resume", job })),
        false => output::line(format_args!("{job}: training goes on")),
    }
    Ok(())
}
