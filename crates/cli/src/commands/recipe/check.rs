//! `baton recipe check`

use std::path::{Path, PathBuf};

use baton_job::exit::Failure;
use baton_recipe::{
    JobSpec,
    dry_run::{DryRun, MAX_SAMPLES},
    spec::Error,
};

use super::{Samples, find, text};
use crate::{
    failure::bad_input,
    human::{count, grouped},
    json::{self, CheckedRecipe},
};

/// Check recipes, and simulate their runs without training
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton recipe check recipes/*.toml
  baton recipe check digits_cpu --set train.global_batch=4096
  baton recipe check mine.toml --samples 1281167 --json

Prints one line for each valid recipe, and all faults of an invalid one. `warning` marks values that
are valid but probably wrong. Exit code 2 if any recipe is invalid.")]
pub(crate) struct Args {
    /// Recipe files, or names of recipes in recipes/
    #[arg(value_name = "FILE|NAME", required = true)]
    recipes: Vec<PathBuf>,
    /// Change one value of every recipe, e.g. --set train.epochs=3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Samples of the training set [default: counted in its files]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_SAMPLES))]
    samples: Option<u64>,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let mut bad = 0;
    for recipe in &args.recipes {
        let path = find(recipe);
        let found = check(&path, args);
        bad += u64::from(!found.ok);
        json::print(args.json, &found, |found| {
            let lines = lines(found).into_iter().map(|line| format!("{}: {line}", found.recipe));
            lines.collect::<Vec<_>>().join("\n")
        });
    }
    match bad {
        0 => Ok(()),
        _ => {
            let all = count(args.recipes.len() as u64, "recipe");
            Err(bad_input(format!("{bad} of {all} cannot run")))
        }
    }
}

fn check(path: &Path, args: &Args) -> CheckedRecipe {
    let found = CheckedRecipe { recipe: path.display().to_string(), ..CheckedRecipe::default() };
    let spec = match JobSpec::read(path, &args.overrides, text) {
        Ok(spec) => spec,
        Err(Error::Invalid(faults)) => return CheckedRecipe { faults, ..found },
        Err(error) => return CheckedRecipe { problem: Some(error.to_string()), ..found },
    };
    let deprecated_keys = spec.deprecated_keys();
    if let Err(problem) = Samples::at(&spec.data.val, None) {
        return CheckedRecipe { problem: Some(problem), ..found };
    }
    match Samples::of(&spec, args.samples) {
        Err(problem) => CheckedRecipe { problem: Some(problem), ..found },
        Ok(Samples::Unknown(why)) => {
            CheckedRecipe { ok: true, deprecated_keys, not_walked_because: Some(why), ..found }
        }
        Ok(Samples::Known(samples)) => match DryRun::new(&spec, samples) {
            Err(faults) => CheckedRecipe { faults, ..found },
            Ok(run) => {
                let warnings = run.warnings(&spec);
                CheckedRecipe { ok: true, deprecated_keys, warnings, run: Some(run), ..found }
            }
        },
    }
}

/// The result as text.
fn lines(found: &CheckedRecipe) -> Vec<String> {
    let mut lines: Vec<String> = found.problem.iter().cloned().collect();
    lines.extend(found.faults.iter().map(ToString::to_string));
    let why = found.not_walked_because.iter();
    lines.extend(why.map(|why| {
        format!("ok, but the run was not simulated: {why}; give its size with --samples N")
    }));
    lines.extend(found.run.iter().map(|run| {
        format!(
            "ok: {}, {} steps over {} samples",
            count(run.epoch_lrs.len() as u64, "epoch"),
            grouped(run.steps),
            grouped(run.samples)
        )
    }));
    lines.extend(found.deprecated_keys.iter().map(|key| format!("note: {key}")));
    lines.extend(found.warnings.iter().map(|warning| format!("warning: {warning}")));
    lines
}
