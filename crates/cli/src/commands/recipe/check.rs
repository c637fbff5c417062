//! `baton recipe check`

use std::{
    fs,
    path::{Path, PathBuf},
};

use baton_job::exit::Failure;
use baton_recipe::{
    JobSpec,
    dry_run::DryRun,
    spec::{Error, Violation},
};

use super::{Samples, find};
use crate::{
    failure::bad_input,
    human::{count, grouped},
    json, output,
};

/// Check recipes, and walk over the run they describe without training
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton recipe check recipes/*.toml
  baton recipe check digits_cpu --set train.global_batch=4096
  baton recipe check mine.toml --samples 1281167 --json

Prints a line for each recipe that is good, and every fault of one that is not. `doubtful` is what
would run, but is hardly meant. Exit code 2 if any recipe is bad.")]
pub(crate) struct Args {
    /// Recipes, or names of those in recipes/
    #[arg(value_name = "FILE|NAME", required = true)]
    recipes: Vec<PathBuf>,
    /// Change one value of each, e.g. --set train.epochs=3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Samples of the training set [default: what its files have]
    #[arg(long, value_name = "N")]
    samples: Option<u64>,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let mut bad = 0;
    for recipe in &args.recipes {
        let path = find(recipe);
        let verdict = judge(&path, args);
        bad += u64::from(!verdict.is_good());
        if args.json {
            output::line(json::line(&verdict.told(&path)));
        } else {
            lines(&verdict).iter().for_each(|line| {
                output::line(format_args!("{}: {line}", path.display()));
            });
        }
    }
    match bad {
        0 => Ok(()),
        _ => {
            let all = count(args.recipes.len() as u64, "recipe");
            Err(bad_input(format!("{bad} of {all} cannot be run")))
        }
    }
}

/// What a check of a recipe finds.
#[derive(Debug)]
enum Verdict {
    /// No recipe at all: a file that cannot be read, a key that there is not.
    Unreadable(String),
    /// Values against the rules, or a run that cannot be made.
    Bad(Vec<Violation>),
    /// The rules are kept; why the run was not walked over.
    Unwalked { why: String, old_keys: Vec<Violation> },
    /// All is well, but perhaps not meant so.
    Walked { run: Box<DryRun>, old_keys: Vec<Violation>, doubts: Vec<Violation> },
}

impl Verdict {
    fn is_good(&self) -> bool {
        matches!(self, Self::Unwalked { .. } | Self::Walked { .. })
    }

    /// For scripts.
    fn told(self, path: &Path) -> json::CheckedRecipe {
        let told = json::CheckedRecipe {
            recipe: path.display().to_string(),
            ok: self.is_good(),
            problem: None,
            faults: Vec::new(),
            not_walked_because: None,
            old_keys: Vec::new(),
            doubts: Vec::new(),
            run: None,
        };
        match self {
            Self::Unreadable(problem) => json::CheckedRecipe { problem: Some(problem), ..told },
            Self::Bad(faults) => json::CheckedRecipe { faults, ..told },
            Self::Unwalked { why, old_keys } => {
                json::CheckedRecipe { not_walked_because: Some(why), old_keys, ..told }
            }
            Self::Walked { run, old_keys, doubts } => {
                json::CheckedRecipe { old_keys, doubts, run: Some(*run), ..told }
            }
        }
    }
}

fn judge(path: &Path, args: &Args) -> Verdict {
    let spec = match JobSpec::read(path, &args.overrides, |path| fs::read_to_string(path)) {
        Ok(spec) => spec,
        Err(Error::Invalid(faults)) => return Verdict::Bad(faults),
        Err(error) => return Verdict::Unreadable(error.to_string()),
    };
    let old_keys = spec.old_keys();
    match Samples::of(&spec, args.samples) {
        Err(problem) => Verdict::Unreadable(problem),
        Ok(Samples::Unknown(why)) => Verdict::Unwalked { why, old_keys },
        Ok(Samples::Known(samples)) => match DryRun::new(&spec, samples) {
            Err(faults) => Verdict::Bad(faults),
            Ok(run) => {
                let doubts = run.doubts(&spec);
                Verdict::Walked { run: Box::new(run), old_keys, doubts }
            }
        },
    }
}

/// For people.
fn lines(verdict: &Verdict) -> Vec<String> {
    match verdict {
        Verdict::Unreadable(problem) => vec![problem.clone()],
        Verdict::Bad(faults) => faults.iter().map(ToString::to_string).collect(),
        Verdict::Unwalked { why, old_keys } => {
            let mut lines =
                vec![format!("ok, but not walked over: {why}; --samples N tells its size")];
            lines.extend(old_keys.iter().map(|key| format!("note: {key}")));
            lines
        }
        Verdict::Walked { run, old_keys, doubts } => {
            let mut lines = vec![format!(
                "ok: {}, {} updates over {} samples",
                count(run.epoch_lrs.len() as u64, "epoch"),
                grouped(run.steps),
                grouped(run.samples)
            )];
            lines.extend(old_keys.iter().map(|key| format!("note: {key}")));
            lines.extend(doubts.iter().map(|doubt| format!("doubtful: {doubt}")));
            lines
        }
    }
}
