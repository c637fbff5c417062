//! `baton recipe show`

use std::path::{Path, PathBuf};

use baton_job::exit::Failure;
use baton_recipe::{
    JobSpec,
    dry_run::{DryRun, MAX_SAMPLES},
    spec::{Resolved, ValueOrigin},
};

use super::{Samples, about, find, invalid, resolved, summary};
use crate::{clean, failure::failed, output};

/// Print a recipe with the origin of every value, and a summary of the resulting run
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton recipe show digits_cpu                                     recipes/digits_cpu.toml
  baton recipe show my.toml --set train.epochs=3 --samples 50000
  baton recipe show resnet50_p4d_60ep --global-batch 1024          the linearly scaled learning rate
  baton recipe show digits_cpu --toml >mine.toml                   as a start for your own recipe

The number of training samples is read from local files; without them, give it with --samples.")]
pub(crate) struct Args {
    /// Recipe file, or the name of a recipe in recipes/
    #[arg(value_name = "FILE|NAME")]
    recipe: PathBuf,
    /// Change one value, e.g. --set train.epochs=3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Samples of the training set [default: counted in its files]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_SAMPLES))]
    samples: Option<u64>,
    /// Show the linearly scaled learning rate for this global batch; may be repeated
    #[arg(long = "global-batch", value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    other_batches: Vec<u64>,
    /// Print only the recipe, as TOML
    #[arg(long, conflicts_with = "json")]
    toml: bool,
    /// Print only the recipe, as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let path = find(&args.recipe);
    let resolved = resolved(&path, &args.overrides)?;
    let spec = &resolved.spec;
    let text = match args.json {
        true => clean::json(serde_json::to_string_pretty(spec).map_err(failed)?),
        false if args.toml => spec.to_toml(),
        false => with_origins(&resolved, &path),
    };
    output::line(text.trim_end());
    if args.json || args.toml {
        return Ok(());
    }
    let samples = Samples::of(spec, args.samples).map_err(|problem| about(&path, problem))?;
    let simulated = match samples {
        Samples::Known(samples) => samples,
        Samples::Unknown(_) => assumed_samples(spec),
    };
    let run = DryRun::new(spec, simulated).map_err(|faults| invalid(&path, faults))?;
    output::line(format_args!("\n{}", summary::text(spec, &run, &samples, &args.other_batches)));
    Ok(())
}

/// The whole recipe as TOML. A value that is not from the recipe's own file has a comment with its origin.
fn with_origins(resolved: &Resolved, path: &Path) -> String {
    let (mut text, mut section, mut is_listed) = (String::new(), String::new(), false);
    for line in resolved.spec.to_toml().lines() {
        let (mut field, mut is_value) = (section.clone(), false);
        if let Some(name) = line.strip_prefix('[') {
            // A list of tables is one value.
            is_listed = name.starts_with('[');
            field = name.trim_matches(['[', ']']).to_owned();
            section = format!("{field}.");
            is_value = is_listed;
        } else if let Some((key, _)) = line.split_once(" = ") {
            field.push_str(key);
            is_value = !is_listed;
        }
        let origin = match resolved.origins.get(&field) {
            _ if !is_value => None,
            None => Some("default".to_owned()),
            Some(ValueOrigin::File(file)) if file == path => None,
            Some(ValueOrigin::File(file)) => Some(file.display().to_string()),
            Some(ValueOrigin::Change(_)) => Some("--set".to_owned()),
        };
        text.push_str(&origin.map_or(line.to_owned(), |origin| format!("{line:<40} # {origin}")));
        text.push('\n');
    }
    text
}

/// Number of samples to assume for a training set of unknown size: 1,000 steps per epoch. Resolutions, batches and,
/// except for rounding, learning rates do not depend on the number.
fn assumed_samples(spec: &JobSpec) -> u64 {
    let batches = spec.train.phases.iter().map(|phase| phase.global_batch);
    1_000 * u64::from(batches.fold(spec.train.global_batch, u32::max))
}
