//! `baton plan`

mod explain;
mod table;

use std::path::PathBuf;

use baton_access::bounded::{MAX_RECIPE_BYTES, read_text};
use baton_console::mean_tokens;
use baton_job::exit::Failure;
use baton_plan::{Calibration, Error, LanguagePlan, MACHINES, Machine, PlanRequest, RecipePlan};
use baton_recipe::dry_run::MAX_SAMPLES;

use super::recipe::{self, Samples};
use crate::{failure::bad_input, json, output};

/// Estimate what a recipe needs and costs: memory, batch that fits, images per second, time, money
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton plan resnet50_p4d_60ep                                   on all known machines
  baton plan resnet50_t4 --on t4,l4 --explain                    with the arithmetic
  baton plan resnet50_p4d_60ep --on g5.12xlarge --set train.grad_accumulation=2
  baton plan resnet50_p4d_60ep --on p4d.24xlarge --price 8.50    dollars per hour of the machine
  baton plan gemma2_2b_qlora_t4 --samples 20000 --val-samples 1000 --explain    needs its config.json only
  baton-worker bench --resolution 224 --batch 256 --set precision.compute=bf16 --json >h200.json
  baton plan resnet50_a100_bf16_adamw --on h200 --calibration h200.json

Machines: p4d.24xlarge, p3.8xlarge, g5.12xlarge, g6.12xlarge (whole instances);
t4, l4, a100-40, h100, h200 (one GPU).

Nothing is measured: times are computed with a roofline model from data sheets, which a calibration
corrects. Prices are from a dated list. Formulas, sources and accuracy: docs/plan.md.")]
pub(crate) struct Args {
    /// Recipe file, or the name of a recipe in recipes/
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Machines [default: all known machines]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    on: Vec<String>,
    /// Change one value, e.g. --set precision.compute=fp16; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Price of the whole machine, instead of the price list's
    #[arg(long, value_name = "USD_PER_HOUR", value_parser = price)]
    price: Option<f64>,
    /// Output of `baton-worker bench --json` on the GPU of --on, to correct the estimates
    #[arg(long, value_name = "FILE", requires = "on")]
    calibration: Option<PathBuf>,
    /// Samples of the training set [default: counted in its files, or ImageNet's for 1,000 classes]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_SAMPLES))]
    samples: Option<u64>,
    /// Samples of the validation set [default: counted in its files, or ImageNet's for 1,000 classes]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_SAMPLES))]
    val_samples: Option<u64>,
    /// Channels and length of a signal, for model.arch = resnet34_1d
    #[arg(long, value_name = "CHANNELSxLENGTH", default_value = "1x100", value_parser = signal)]
    signal: Signal,
    /// Print the arithmetic too
    #[arg(long, conflicts_with = "json")]
    explain: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Numbers of training samples, validation samples and classes of ImageNet-1k (ILSVRC 2012).
const IMAGENET: ([u64; 2], u32) = ([1_281_167, 50_000], 1_000);

/// Channels and length of a signal.
#[derive(Clone, Copy, Debug)]
struct Signal([u64; 2]);

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let path = recipe::find(&args.recipe);
    let spec = recipe::read(&path, &args.overrides)?;
    let machines = machines(&args.on)?;
    let calibration = args.calibration.as_deref().map(|file| {
        let about = |problem: String| bad_input(format!("{}: {problem}", file.display()));
        if machines.iter().any(|machine| machine.gpu != machines[0].gpu) {
            return Err(about(
                "was measured on one GPU type: name only machines with that type in --on"
                    .to_owned(),
            ));
        }
        let text = read_text(file, MAX_RECIPE_BYTES).map_err(|error| about(error.to_string()))?;
        Calibration::from_json(&text).map_err(|error| about(error.to_string()))
    });
    let calibration = calibration.transpose()?;
    let program = recipe::program(&spec).map_err(|problem| recipe::about(&path, problem))?;
    let about = |problem: String| recipe::about(&path, problem);
    let model = recipe::decoder(&spec).map_err(about)?;
    let language = match &model {
        None => None,
        Some((decoder, adapter)) => {
            let mean_tokens = mean_tokens(&spec).map_err(about)?;
            let mean_tokens = mean_tokens.unwrap_or_else(|| u64::from(spec.data.sequence));
            Some(LanguagePlan { decoder, adapter: adapter.as_ref(), mean_tokens })
        }
    };
    let request = PlanRequest {
        spec: &spec,
        samples: 0,
        val_samples: 0,
        signal: args.signal.0,
        program: program.as_ref(),
        language,
        dollars_per_hour: args.price,
        calibration: calibration.as_ref(),
    };
    let ([samples, val_samples], assumed) =
        sizes(&request, args).map_err(|problem| recipe::about(&path, problem))?;
    let request = PlanRequest { samples, val_samples, ..request };
    let plans = machines.iter().map(|machine| request.plan(machine));
    let plans: Vec<RecipePlan> = plans.collect::<Result<_, _>>().map_err(|error| match error {
        Error::Calibration(_) => bad_input(error.to_string()),
        _ => recipe::about(&path, error),
    })?;
    if args.json {
        output::line(json::line(&plan_json(&request, &plans)));
        return Ok(());
    }
    output::line(table::text(&request, &plans, assumed));
    if args.explain {
        for (plan, machine) in plans.iter().zip(&machines) {
            output::line(format_args!("\n{}", explain::text(&request, plan, machine)));
        }
    }
    Ok(())
}

/// The output of `--json`.
fn plan_json<'a>(request: &PlanRequest<'_>, plans: &'a [RecipePlan]) -> json::PlannedRecipe<'a> {
    json::PlannedRecipe {
        recipe: request.spec.name.clone(),
        samples: request.samples,
        val_samples: request.val_samples,
        mean_tokens: request.language.map(|plan| plan.mean_tokens),
        prices_looked_up: request
            .dollars_per_hour
            .is_none()
            .then_some(baton_plan::price::LOOKED_UP),
        plans,
    }
}

fn machines(names: &[String]) -> Result<Vec<&'static Machine>, Failure> {
    if names.is_empty() {
        return Ok(MACHINES.iter().collect());
    }
    let named = names.iter().map(|name| Machine::named(name));
    named.collect::<Result<_, _>>().map_err(bad_input)
}

/// Sizes of the training and the validation set, and whether one of them is assumed.
fn sizes(request: &PlanRequest<'_>, args: &Args) -> Result<([u64; 2], bool), String> {
    let spec = request.spec;
    let given = [args.samples, args.val_samples];
    let (imagenet, classes) = IMAGENET;
    let may_be_imagenet = spec.model.num_classes == classes && request.takes_images();
    let (mut sizes, mut assumed) = ([0; 2], false);
    for (index, flag) in ["--samples", "--val-samples"].into_iter().enumerate() {
        let found = match index {
            0 => Samples::of(spec, given[0])?,
            _ => Samples::at(&spec.data.val, given[1])?,
        };
        sizes[index] = match found {
            Samples::Known(samples) => samples,
            Samples::Unknown(_) if may_be_imagenet => {
                assumed = true;
                imagenet[index]
            }
            Samples::Unknown(why) => return Err(format!("{why}; give its size with {flag} N")),
        };
    }
    Ok((sizes, assumed))
}

fn price(text: &str) -> Result<f64, String> {
    let price = text.parse::<f64>().ok().filter(|price| (0.0..=1e6).contains(price));
    price.ok_or_else(|| "must be dollars per hour, 0 to 1000000, e.g. 8.50".to_owned())
}

fn signal(text: &str) -> Result<Signal, String> {
    let parts = text.split_once('x');
    let side = |side: &str| side.parse::<u64>().ok().filter(|side| (1..=1 << 20).contains(side));
    let sides = parts.and_then(|(channels, length)| Some([side(channels)?, side(length)?]));
    sides.map(Signal).ok_or_else(|| "must be channels x length, e.g. 1x100".to_owned())
}

#[cfg(test)]
mod tests;
