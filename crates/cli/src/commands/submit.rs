//! `baton submit`

use std::path::PathBuf;

use baton_job::exit::Failure;

use super::recipe;
use crate::{
    connect::{Coordinator, Where},
    json, output,
};

/// Give a job to a coordinator that was started without one; prints the job's id
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton submit digits_cpu
  baton submit recipes/digits_cpu.toml --set train.epochs=3
  baton submit mine.toml --coordinator http://10.0.0.7:29600 --json | jq -r .job_id

The recipe is checked here first. Its paths are those of the machines that train.")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Where,
    /// A recipe, or the name of one in recipes/
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Change one value of the recipe, e.g. --set train.epochs=3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let path = recipe::find(&args.recipe);
    // Its bases are files of this machine, so it is sent without them.
    let recipe = recipe::resolved(&path, &args.overrides)?.set.to_string();
    let mut coordinator = Coordinator::find(&args.place)?;
    let begun = coordinator.submit(recipe).await?;
    match args.json {
        true => output::line(json::line(&begun)),
        false => output::line(format_args!(
            "{}: job {} has begun; `baton watch` tells how it goes",
            begun.name, begun.job_id
        )),
    }
    Ok(())
}
