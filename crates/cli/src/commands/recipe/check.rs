//! `baton recipe check`

use std::path::{Path, PathBuf};

use baton_job::exit::Failure;
use baton_plan::{
    MACHINES, Notice, PlanRequest, RecipePlan,
    notice::{EvaluationTime, missed_deadlines},
};
use baton_program::Program;
use baton_recipe::{
    JobSpec,
    dry_run::{DryRun, MAX_SAMPLES},
    spec::{DeviceChoice, Error, Violation},
};

use super::{Samples, find, language_model, program, text};
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
  baton recipe check mine.toml --notice kubernetes        for spot nodes of a Kubernetes cluster

Prints one line for each valid recipe, and all faults of an invalid one. `warning` marks values that
are valid but probably wrong, and what takes longer than the machine's notice leaves: a save by
cluster.drain_seconds, an evaluation by the estimates of `baton plan`. Exit code 2 if any recipe is invalid.")]
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
    /// Samples of the validation set [default: counted in its files]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_SAMPLES))]
    val_samples: Option<u64>,
    /// Kinds of notice before a machine's end: ec2 (120 s), gce (30 s), kubernetes (12 s)
    #[arg(long, value_name = "KIND,…", value_delimiter = ',', default_value = "ec2", value_parser = notice)]
    notice: Vec<Notice>,
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
    // As data, programs may be on other machines.
    let program_not_read_because = missing_program(&spec);
    let program = match &program_not_read_because {
        Some(_) => None,
        None => match program(&spec) {
            Ok(program) => program,
            Err(problem) => return CheckedRecipe { problem: Some(problem), ..found },
        },
    };
    if let Err(problem) = language_model(&spec) {
        return CheckedRecipe { problem: Some(problem), ..found };
    }
    let val_samples = match Samples::at(&spec.data.val, args.val_samples) {
        Ok(samples) => samples,
        Err(problem) => return CheckedRecipe { problem: Some(problem), ..found },
    };
    let deadlines = |evaluations: &[EvaluationTime]| {
        let missed = |notice: &Notice| missed_deadlines(&spec, evaluations, *notice);
        args.notice.iter().flat_map(missed).collect::<Vec<_>>()
    };
    match Samples::of(&spec, args.samples) {
        Err(problem) => CheckedRecipe { problem: Some(problem), ..found },
        Ok(Samples::Unknown(why)) => {
            let missed_deadlines = deadlines(&[]);
            let not_walked_because = Some(why);
            CheckedRecipe {
                ok: true,
                deprecated_keys,
                warnings: missing_weights(&spec).into_iter().collect(),
                not_walked_because,
                program_not_read_because,
                missed_deadlines,
                ..found
            }
        }
        Ok(Samples::Known(samples)) => match DryRun::new(&spec, samples) {
            Err(faults) => CheckedRecipe { faults, ..found },
            Ok(run) => {
                let mut warnings = run.warnings(&spec);
                warnings.extend(missing_weights(&spec));
                let times = evaluation_times(&spec, program.as_ref(), samples, &val_samples);
                let missed_deadlines = deadlines(&times);
                let run = Some(run);
                CheckedRecipe {
                    ok: true,
                    program_not_read_because,
                    deprecated_keys,
                    warnings,
                    missed_deadlines,
                    run,
                    ..found
                }
            }
        },
    }
}

/// Why the program or the language model of a recipe cannot be read here: it does not exist.
fn missing_program(spec: &JobSpec) -> Option<String> {
    let file = spec.model.definition();
    let is_missing = !file.is_empty() && !Path::new(file).exists();
    is_missing.then(|| format!("{file} does not exist on this machine"))
}

/// A warning if the pretrained weights do not exist here. As programs, they may be on other machines.
fn missing_weights(spec: &JobSpec) -> Option<Violation> {
    let file = &spec.model.pretrained;
    let is_missing = !file.is_empty() && !Path::new(file).exists();
    is_missing.then(|| Violation {
        field: "model.pretrained".into(),
        value: file.clone(),
        rule: "does not exist on this machine; the first start of the run reads it".to_owned(),
    })
}

/// Estimated duration of an evaluation on every known machine. Empty if there is no estimate: on a CPU, for signals,
/// whose shape is in the data, or if the size of the validation set is not known.
fn evaluation_times(
    spec: &JobSpec,
    program: Option<&Program>,
    samples: u64,
    val_samples: &Samples,
) -> Vec<EvaluationTime> {
    let Samples::Known(val_samples) = *val_samples else { return Vec::new() };
    let request = PlanRequest {
        spec,
        samples,
        val_samples,
        // Only for signals.
        signal: [1, 1],
        program,
        language: None,
        dollars_per_hour: None,
        calibration: None,
    };
    if spec.cluster.device == DeviceChoice::Cpu || !request.takes_images() {
        return Vec::new();
    }
    let plans = MACHINES.iter().filter_map(|machine| request.plan(machine).ok());
    let time = |plan: RecipePlan| EvaluationTime {
        machine: plan.machine,
        seconds: plan.evaluation.longest_seconds,
    };
    plans.map(time).collect()
}

/// Parses a kind of notice.
fn notice(text: &str) -> Result<Notice, String> {
    Notice::named(text)
        .ok_or_else(|| format!("must be one of {}", Notice::ALL.map(Notice::name).join(", ")))
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
    let why = found.program_not_read_because.iter();
    lines.extend(why.map(|why| format!("note: the network was not read: {why}")));
    lines.extend(found.deprecated_keys.iter().map(|key| format!("note: {key}")));
    lines.extend(found.warnings.iter().map(|warning| format!("warning: {warning}")));
    let missed = found.missed_deadlines.iter();
    lines.extend(missed.map(|missed| format!("warning: {}", missed.message)));
    lines
}
