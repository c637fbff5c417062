//! `baton recipe show`

use std::path::PathBuf;

use baton_job::exit::Failure;
use baton_recipe::{JobSpec, dry_run::DryRun};

use super::{Samples, about, broken, find, read, summary};
use crate::{failure::failed, output};

/// Print a recipe with every default filled in, and what it comes to
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton recipe show digits_cpu                                     recipes/digits_cpu.toml
  baton recipe show my.toml --set train.epochs=3 --samples 50000
  baton recipe show resnet50_p4d_60ep --global-batch 1024          the linearly scaled learning rate
  baton recipe show digits_cpu --toml >mine.toml                   to begin with

The number of training samples is read from local files; --samples gives it where they are not here.")]
pub(crate) struct Args {
    /// A recipe, or the name of one in recipes/
    #[arg(value_name = "FILE|NAME")]
    recipe: PathBuf,
    /// Change one value, e.g. --set train.epochs=3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Samples of the training set [default: what its files have]
    #[arg(long, value_name = "N")]
    samples: Option<u64>,
    /// Show what linear scaling makes of the learning rate for this batch; may be repeated
    #[arg(long = "global-batch", value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    other_batches: Vec<u64>,
    /// Print the recipe only, as TOML
    #[arg(long, conflicts_with = "json")]
    toml: bool,
    /// Print the recipe only, as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let path = find(&args.recipe);
    let spec = read(&path, &args.overrides)?;
    let text = match args.json {
        true => serde_json::to_string_pretty(&spec).map_err(|error| failed(error.to_string()))?,
        false => toml::to_string(&spec).map_err(|error| failed(error.to_string()))?,
    };
    output::line(text.trim_end());
    if args.json || args.toml {
        return Ok(());
    }
    let samples = Samples::of(&spec, args.samples).map_err(|problem| about(&path, problem))?;
    let walked = match samples {
        Samples::Known(samples) => samples,
        Samples::Unknown(_) => stand_in(&spec),
    };
    let run = DryRun::new(&spec, walked).map_err(|faults| broken(&path, faults))?;
    output::line(format_args!("\n{}", summary::text(&spec, &run, &samples, &args.other_batches)));
    Ok(())
}

/// A training set of 1,000 updates per epoch, in place of one of unknown size: resolutions, batches and,
/// but for a rounding, learning rates are those of any other.
fn stand_in(spec: &JobSpec) -> u64 {
    let batches = spec.train.phases.iter().map(|phase| phase.global_batch);
    1_000 * u64::from(batches.fold(spec.train.global_batch, u32::max))
}
