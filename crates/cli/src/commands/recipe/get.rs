//! `baton recipe get`

use baton_job::exit::Failure;

use crate::{
    clean,
    connect::{Coordinator, CoordinatorFlags},
    output,
};

/// Print the complete recipe of a coordinator's job
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton recipe get
  baton recipe get >theirs.toml && baton recipe diff mine.toml theirs.toml
  baton recipe get --json | jq .train.global_batch
  baton recipe get --coordinator http://10.0.0.7:29600")]
pub(crate) struct Args {
    #[command(flatten)]
    target: CoordinatorFlags,
    /// Print the recipe as JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: &Args) -> Result<(), Failure> {
    let recipe = Coordinator::find(&args.target)?.recipe().await?;
    output::line(if args.json { clean::json(recipe.json) } else { recipe.toml }.trim_end());
    Ok(())
}
