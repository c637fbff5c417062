//! `baton submit`

use std::path::PathBuf;

use baton_job::exit::Failure;

use super::recipe;
use crate::{
    connect::{Coordinator, CoordinatorFlags},
    json,
};

/// Submit a job to a coordinator that was started without one; prints the job's id
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton submit digits_cpu
  baton submit recipes/digits_cpu.toml --set train.epochs=3
  baton submit mine.toml --coordinator http://10.0.0.7:29600 --json | jq -r .job_id

The recipe is checked here first. Its paths refer to files on the machines that train.")]
pub(crate) struct Args {
    #[command(flatten)]
    target: CoordinatorFlags,
    /// Recipe file, or the name of a recipe in recipes/
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
    // Base recipes are files on this machine, so they are merged into the recipe before it is sent.
    let recipe = recipe::resolved(&path, &args.overrides)?.set.to_string();
    let mut coordinator = Coordinator::find(&args.target)?;
    let submitted = coordinator.submit(recipe).await?;
    // The job of this recipe may have ended in this run folder before.
    let outcome = coordinator.status().await.ok().and_then(|status| status.outcome?.known());
    json::print(args.json, &submitted, |submitted| {
        let (name, job) = (&submitted.name, &submitted.job_id);
        match outcome {
            Some(outcome) => format!("{name}: job {job} had ended before: {outcome}"),
            None => format!("{name}: job {job} has started; `baton watch` shows its progress"),
        }
    });
    Ok(())
}
