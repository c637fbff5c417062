//! `baton recipe show`

use std::path::{Path, PathBuf};

use baton_job::exit::Failure;
use baton_recipe::{
    JobSpec,
    dry_run::DryRun,
    spec::{Origin, Resolved},
};

use super::{Samples, about, broken, find, resolved, summary};
use crate::{failure::failed, output};

/// Print a recipe with every value and where it comes from, and what it comes to
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
    let resolved = resolved(&path, &args.overrides)?;
    let spec = &resolved.spec;
    let text = match args.json {
        true => serde_json::to_string_pretty(spec).map_err(failed)?,
        false if args.toml => spec.to_toml(),
        false => with_origins(&resolved, &path),
    };
    output::line(text.trim_end());
    if args.json || args.toml {
        return Ok(());
    }
    let samples = Samples::of(spec, args.samples).map_err(|problem| about(&path, problem))?;
    let walked = match samples {
        Samples::Known(samples) => samples,
        Samples::Unknown(_) => stand_in(spec),
    };
    let run = DryRun::new(spec, walked).map_err(|faults| broken(&path, faults))?;
    output::line(format_args!("\n{}", summary::text(spec, &run, &samples, &args.other_batches)));
    Ok(())
}

/// The whole recipe as TOML; what its own file does not say has a comment that names who does.
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
            Some(Origin::File(file)) if file == path => None,
            Some(Origin::File(file)) => Some(file.display().to_string()),
            Some(Origin::Change(_)) => Some("--set".to_owned()),
        };
        text.push_str(&origin.map_or(line.to_owned(), |origin| format!("{line:<40} # {origin}")));
        text.push('\n');
    }
    text
}

/// A training set of 1,000 updates per epoch, in place of one of unknown size: resolutions, batches and,
/// but for a rounding, learning rates are those of any other.
fn stand_in(spec: &JobSpec) -> u64 {
    let batches = spec.train.phases.iter().map(|phase| phase.global_batch);
    1_000 * u64::from(batches.fold(spec.train.global_batch, u32::max))
}
