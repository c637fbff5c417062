//! Summary of the run that a recipe describes, as text. Pure functions.

use std::fmt::Write;

use baton_recipe::{
    Epoch, InputKind, JobSpec,
    dry_run::DryRun,
    schedule::linearly_scaled,
    spec::{Determinism, GuardRemedy, LossKind, OptimizerSpec, Target},
    task::{self, MetricDirection},
};
use comfy_table::{Table, presets};

use super::{Samples, word};
use crate::human::{count, grouped, percent, rate};

/// Approximate number of epochs whose learning rate is drawn.
const DRAWN_EPOCHS: usize = 20;
/// Length of the longest bar, in characters.
const BAR_LENGTH: f64 = 40.0;

/// The summary. `run` simulates training on `samples`, or on an assumed number of samples if the number is unknown;
/// numbers of steps are then left out.
pub(super) fn text(
    spec: &JobSpec,
    run: &DryRun,
    samples: &Samples,
    other_batches: &[u64],
) -> String {
    let sections = [
        heading(spec, samples),
        segments(spec, run, samples),
        learning_rate(spec, run),
        linear_scaling(run, other_batches),
        settings(spec, run, samples),
        warnings(spec, run, samples),
        spec.deprecated_keys().iter().map(|key| format!("note: {key}\n")).collect(),
    ];
    let sections = sections.iter().map(|section| section.trim_end());
    sections.filter(|section| !section.is_empty()).collect::<Vec<_>>().join("\n\n")
}

fn heading(spec: &JobSpec, samples: &Samples) -> String {
    let outputs = match (spec.loss.kind, spec.model.num_classes) {
        (LossKind::Program, _) => "its own loss".to_owned(),
        (LossKind::NextToken, _) => "the next token".to_owned(),
        (kind, number) if kind.takes_classes() => format!("{number} classes"),
        (_, 1) => "1 value".to_owned(),
        (_, number) => format!("{number} values"),
    };
    let size = match samples {
        Samples::Known(samples) => {
            format!("{}: {} samples", spec.data.train, grouped(*samples))
        }
        Samples::Unknown(why) => {
            format!("{why}; give the number with --samples N to see steps and checkpoints")
        }
    };
    format!("{}: {} for {outputs}\n{size}", spec.name, spec.model.arch.name())
}

fn has_images(spec: &JobSpec) -> bool {
    !matches!(spec.model.arch.input_kind(), InputKind::Signals | InputKind::Tokens)
}

fn segments(spec: &JobSpec, run: &DryRun, samples: &Samples) -> String {
    let known = matches!(samples, Samples::Known(_));
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let mut header = vec!["EPOCHS", "PIXELS", "GLOBAL BATCH", "MICRO-BATCH"];
    if known {
        header.extend(["STEPS/EPOCH", "STEPS"]);
    }
    table.set_header(header);
    for segment in &run.segments {
        let (first, last) = (segment.first_epoch, segment.last_epoch());
        let mut row = vec![
            if first == last { first.to_string() } else { format!("{first}-{last}") },
            if has_images(spec) { segment.resolution.to_string() } else { "-".to_owned() },
            segment.global_batch.to_string(),
            segment.micro_batch.to_string(),
        ];
        if known {
            let steps = segment.steps_per_epoch;
            row.extend([grouped(steps), grouped(steps * u64::from(segment.epochs))]);
        }
        table.add_row(row);
    }
    table.trim_fmt()
}

/// Chart of the learning rate at the start of some epochs, and at the end.
fn learning_rate(spec: &JobSpec, run: &DryRun) -> String {
    let first = run.epoch_lrs.first().copied().unwrap_or_default();
    let mut text = format!(
        "learning rate ({}): starts at {}, peaks at {} (in epoch {}), ends at {}\n",
        word(&spec.schedule),
        rate(first),
        rate(run.peak_lr),
        run.peak_epoch,
        rate(run.last_lr)
    );
    let every = run.epoch_lrs.len().div_ceil(DRAWN_EPOCHS).max(1);
    let drawn =
        run.epoch_lrs.iter().enumerate().filter(|(epoch, _)| {
            epoch.is_multiple_of(every) || *epoch == run.peak_epoch.0 as usize
        });
    let mut line = |label: &str, lr: f64| {
        // The share first: the product of a huge rate would be infinite.
        let bar = "#".repeat((BAR_LENGTH * (lr / run.peak_lr)).round() as usize);
        // Writing to a string never fails.
        let _ = writeln!(text, "{}", format!("  {label:<10} {:>8} {bar}", rate(lr)).trim_end());
    };
    for (epoch, lr) in drawn {
        line(&format!("epoch {epoch}"), *lr);
    }
    line("last", run.last_lr);
    text
}

/// Linearly scaled peak learning rates, for the requested batches and for the batches of the recipe's other phases.
fn linear_scaling(run: &DryRun, other_batches: &[u64]) -> String {
    let batch = global_batch(run, run.peak_epoch);
    let of_segments = run.segments.iter().map(|segment| segment.global_batch);
    let mut batches: Vec<u64> = of_segments.chain(other_batches.iter().copied()).collect();
    batches.sort_unstable();
    batches.dedup();
    batches.retain(|other| *other != batch);
    let used = format!(
        "the peak of {} is used at a global batch of {batch}; Baton never scales it automatically",
        rate(run.peak_lr)
    );
    if batches.is_empty() {
        return format!(
            "{used}\n(--global-batch N shows the linearly scaled rate for another batch)"
        );
    }
    let mut text =
        format!("{used}.\nLinear scaling (Goyal et al. 2017, section 2.1) would give:\n");
    for other in batches {
        let scaled = linearly_scaled(run.peak_lr, batch, other);
        let _ = writeln!(text, "  {} at a global batch of {other}", rate(scaled));
    }
    text
}

fn global_batch(run: &DryRun, epoch: Epoch) -> u64 {
    let of_epoch = run.segments.iter().find(|segment| segment.last_epoch() >= epoch);
    of_epoch.map_or(0, |segment| segment.global_batch)
}

/// Values that follow from the recipe but are not written in it, and settings that are easily overlooked.
fn settings(spec: &JobSpec, run: &DryRun, samples: &Samples) -> String {
    let mut lines = Vec::new();
    let mut line = |name, value: String| lines.push(format!("{name:<14}{value}"));
    line("training", length(spec, run, samples));
    line("ranks", ranks(spec));
    line("loss", loss(spec));
    line("optimizer", optimizer(spec));
    line("precision", precision(spec));
    line("evaluations", evaluations(spec, run));
    if matches!(samples, Samples::Known(_)) {
        line("checkpoints", format!("{}, at most {} kept", grouped(run.saves), kept(spec)));
    }
    line("ends early", ends_early(spec));
    line("guard", guard(spec));
    line("recipe hash", format!("{} (of all values that affect the weights)", spec.recipe_hash()));
    lines.join("\n")
}

fn length(spec: &JobSpec, run: &DryRun, samples: &Samples) -> String {
    let epochs = count(spec.train.epochs.into(), "epoch");
    match samples {
        Samples::Known(_) => {
            format!("{epochs}, {} steps, {} samples", grouped(run.steps), grouped(run.samples_seen))
        }
        Samples::Unknown(_) => epochs,
    }
}

fn ranks(spec: &JobSpec) -> String {
    let (min, max) = (spec.cluster.min_ranks, spec.max_ranks());
    let ranks = if min == max { max.to_string() } else { format!("{min} to {max}") };
    let virtual_ranks = count(spec.train.virtual_ranks.into(), "virtual rank");
    match spec.train.grad_accumulation {
        1 => format!("{ranks}, running {virtual_ranks}"),
        parts => format!("{ranks}, running {virtual_ranks} of {parts} micro-batches each"),
    }
}

fn loss(spec: &JobSpec) -> String {
    let augment = &spec.augment;
    let mut parts = vec![word(&spec.loss.kind)];
    parts.extend(spec.loss.quantile.map(|quantile| format!("of {quantile}")));
    if !spec.loss.class_weights.is_empty() {
        parts.push("weighted by class".to_owned());
    }
    if spec.loss.label_smoothing > 0.0 {
        parts.push(format!("label smoothing {}", spec.loss.label_smoothing));
    }
    if augment.cutmix_probability > 0.0 {
        parts.push(format!("CutMix in {} of micro-batches", percent(augment.cutmix_probability)));
    }
    if augment.mixup_alpha > 0.0 {
        let rest = if augment.cutmix_probability > 0.0 { " in the others" } else { "" };
        parts.push(format!("MixUp of alpha {}{rest}", augment.mixup_alpha));
    }
    parts.join(", ")
}

fn optimizer(spec: &JobSpec) -> String {
    let (OptimizerSpec::Sgd { weight_decay, .. }
    | OptimizerSpec::AdamW { weight_decay, .. }
    | OptimizerSpec::Lars { weight_decay, .. }
    | OptimizerSpec::Lamb { weight_decay, .. }
    | OptimizerSpec::Muon { weight_decay, .. }) = &spec.optimizer;
    let mut parts = vec![word(&spec.optimizer), format!("weight decay {weight_decay}")];
    if spec.train.layer_decay < 1.0 {
        parts.push(format!(
            "rate times {} from each layer to the one below",
            spec.train.layer_decay
        ));
    }
    if let Some(norm) = spec.train.clip_grad_norm {
        parts.push(format!("gradient clipped to a norm of {norm}"));
    }
    if let Some(ema) = &spec.ema {
        let steps = f64::from(ema.every_steps) / (1.0 - ema.decay);
        parts.push(format!("EMA over about {} steps", grouped(steps.round() as u64)));
    }
    parts.join(", ")
}

fn precision(spec: &JobSpec) -> String {
    let promise = match spec.precision.determinism {
        Determinism::Strict => "same result for any number of ranks",
        Determinism::Fast => "the last bits can differ from run to run",
    };
    let determinism = word(&spec.precision.determinism);
    format!("{}, {determinism}: {promise}", word(&spec.precision.compute))
}

fn evaluations(spec: &JobSpec, run: &DryRun) -> String {
    let mut text = format!("{} of the whole validation set", run.full_evaluations);
    if run.subset_evaluations > 0 {
        let share = percent(spec.evaluation.subset);
        let _ = write!(text, " and {} of {share} of it", run.subset_evaluations);
    }
    if has_images(spec) {
        let _ = write!(text, ", at {} px", spec.evaluation_resolution());
    }
    if spec.evaluation.flip {
        text.push_str(", averaged with the mirrored image");
    }
    text
}

fn kept(spec: &JobSpec) -> String {
    let best = task::best_first(spec).into_iter().next().filter(|_| spec.checkpoint.keep_best);
    let best = best.map_or_else(String::new, |metric| match metric.direction {
        MetricDirection::Higher => format!(" and the best (highest {})", metric.title),
        MetricDirection::Lower => format!(" and the best (lowest {})", metric.title),
    });
    format!("{}{best}", spec.checkpoint.keep_last)
}

fn ends_early(spec: &JobSpec) -> String {
    let limits = &spec.limits;
    let ends = [
        limits.target().map(|Target { metric, value }| {
            let task::Metric { title, is_fraction, .. } = task::find(&metric);
            match is_fraction {
                true => format!("complete at {title} {}", percent(value)),
                false => format!("complete at {title} {value}"),
            }
        }),
        limits.patience.map(|patience| {
            format!("complete after {} without improvement", count(patience.into(), "evaluation"))
        }),
        limits.max_hours.map(|hours| format!("saved and stopped after {hours} h")),
        limits.max_dollars.map(|dollars| format!("saved and stopped after ${dollars}")),
    ];
    let ends: Vec<String> = ends.into_iter().flatten().collect();
    if ends.is_empty() { "no".to_owned() } else { ends.join("; ") }
}

fn guard(spec: &JobSpec) -> String {
    let guard = &spec.guard;
    let remedy = match guard.remedy {
        GuardRemedy::LowerLr => format!("then with the learning rate times {}", guard.lr_factor),
        GuardRemedy::SkipBatch => "then without the batch".to_owned(),
    };
    match guard.enabled {
        true => {
            format!("rolls back at most {}, {remedy}", count(guard.max_rollbacks.into(), "time"))
        }
        false => "off: only a loss or gradient that is not finite ends the job".to_owned(),
    }
}

fn warnings(spec: &JobSpec, run: &DryRun, samples: &Samples) -> String {
    match samples {
        Samples::Known(_) => {
            run.warnings(spec).iter().map(|warning| format!("warning: {warning}\n")).collect()
        }
        Samples::Unknown(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use insta::assert_snapshot;

    use super::*;

    fn shown(recipe: &str, overrides: &[&str], samples: Samples, other_batches: &[u64]) -> String {
        let file =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../recipes/{recipe}.toml"));
        let overrides: Vec<String> = overrides.iter().map(|&entry| entry.to_owned()).collect();
        let spec = super::super::read(&file, &overrides).unwrap();
        let simulated = match samples {
            Samples::Known(samples) => samples,
            Samples::Unknown(_) => 4_096_000,
        };
        let run = DryRun::new(&spec, simulated).unwrap();
        let text = super::text(&spec, &run, &samples, other_batches);
        // The hash changes with every new field of a recipe.
        text.replace(&spec.recipe_hash(), "HASH")
    }

    #[test]
    fn summary_of_a_recipe_with_local_data() {
        assert_snapshot!(shown("digits_cpu", &[], Samples::Known(1_437), &[128, 32]));
    }

    #[test]
    fn summary_of_a_recipe_with_every_part() {
        assert_snapshot!(shown("resnet50_p4d_60ep", &[], Samples::Known(1_281_167), &[]));
    }

    #[test]
    fn summary_without_data_shows_no_steps() {
        let samples = Samples::Unknown("/data/imagenet does not exist on this machine".to_owned());
        assert_snapshot!(shown("resnet50_t4", &[], samples, &[]));
    }

    #[test]
    fn summary_of_a_regression_with_a_warning_and_without_a_guard() {
        let changes = ["guard.enabled=false", "schedule.warmup_epochs=3.0", "limits.patience=1"];
        assert_snapshot!(shown("resnet34_1d_signals", &changes, Samples::Known(8_192), &[]));
    }
}
