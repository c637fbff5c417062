//! Length, batch and update rule.

use super::Rules;
use crate::spec::{Arch, JobSpec, Optimizer};

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    length_and_batch(spec, rules);
    resolutions(spec, rules);
    phases(spec, rules);
    optimizer(&spec.optimizer, rules);
    if let Some(norm) = spec.train.clip_grad_norm {
        rules.positive("train.clip_grad_norm", norm);
    }
}

fn length_and_batch(spec: &JobSpec, rules: &mut Rules) {
    let train = &spec.train;
    let epochs = 1..=1_000_000;
    rules.check(epochs.contains(&train.epochs), "train.epochs", train.epochs, "must be 1..1000000");
    rules.check(
        train.virtual_ranks.is_power_of_two() && train.virtual_ranks <= 4096,
        "train.virtual_ranks",
        train.virtual_ranks,
        "must be a power of two, at most 4096",
    );
    rules.check(
        (1..=4096).contains(&train.grad_accumulation),
        "train.grad_accumulation",
        train.grad_accumulation,
        "must be 1..4096",
    );
    batch(spec, "train.global_batch", train.global_batch, rules);
}

/// Every micro-batch of every virtual rank gets the same number of samples.
fn batch(spec: &JobSpec, field: &'static str, value: u32, rules: &mut Rules) {
    let (ranks, parts) = (spec.train.virtual_ranks, spec.train.grad_accumulation);
    let divisor = u64::from(ranks) * u64::from(parts);
    let rule = match parts {
        1 => format!("must be a multiple of train.virtual_ranks = {ranks}"),
        _ => format!(
            "must be a multiple of train.virtual_ranks x train.grad_accumulation = {divisor}"
        ),
    };
    let divisible = divisor > 0 && u64::from(value).is_multiple_of(divisor);
    rules.check(value >= 1 && divisible, field, value, &rule);
}

fn resolutions(spec: &JobSpec, rules: &mut Rules) {
    let smallest = if spec.model.arch == Arch::Linear { 1 } else { 32 };
    let sides = smallest..=4096;
    rules.check(
        sides.contains(&spec.train.resolution),
        "train.resolution",
        spec.train.resolution,
        &format!("must be {smallest}..4096 pixels"),
    );
    rules.check(
        spec.evaluation.resolution == 0 || sides.contains(&spec.evaluation.resolution),
        "evaluation.resolution",
        spec.evaluation.resolution,
        &format!("must be 0 (as in training) or {smallest}..4096 pixels"),
    );
}

fn phases(spec: &JobSpec, rules: &mut Rules) {
    let train = &spec.train;
    let Some(first) = train.phases.first() else { return };
    rules.check(
        first.from_epoch >= 1,
        "train.phases.from_epoch",
        first.from_epoch,
        "must be at least 1: train.resolution and train.global_batch hold from epoch 0",
    );
    let mut free_from = 0;
    for phase in &train.phases {
        rules.check(
            phase.from_epoch >= free_from && phase.from_epoch < train.epochs,
            "train.phases.from_epoch",
            phase.from_epoch,
            &format!(
                "must be {free_from} (after the phase before and its ramp) or later, and below \
                 train.epochs = {}",
                train.epochs
            ),
        );
        free_from = phase.from_epoch.saturating_add(phase.ramp_epochs.max(1));
        batch(spec, "train.phases.global_batch", phase.global_batch, rules);
    }
    rules.check(
        free_from <= train.epochs,
        "train.phases.ramp_epochs",
        train.phases.last().map_or(0, |last| last.ramp_epochs),
        &format!("must end by train.epochs = {}", train.epochs),
    );
    if matches!(spec.model.arch, Arch::Linear | Arch::Resnet34In1d) {
        return;
    }
    // Maps of odd sides waste tiles of a GPU, and every change costs a search for algorithms.
    let sides = train.phases.iter().map(|phase| ("train.phases.resolution", phase.resolution));
    for (field, side) in std::iter::once(("train.resolution", train.resolution)).chain(sides) {
        rules.check(
            side.is_multiple_of(32) && (32..=4096).contains(&side),
            field,
            side,
            &format!(
                "must be a multiple of 32 where train.phases changes it, e.g. {}",
                side.next_multiple_of(32).clamp(32, 4096)
            ),
        );
    }
}

fn optimizer(optimizer: &Optimizer, rules: &mut Rules) {
    let decay = |rules: &mut Rules, value: f64| {
        rules.check(
            (0.0..1.0).contains(&value),
            "optimizer.weight_decay",
            value,
            "must be in [0, 1)",
        );
    };
    let factor = |rules: &mut Rules, value: f64| {
        rules.check((0.0..1.0).contains(&value), "optimizer.momentum", value, "must be in [0, 1)");
    };
    match *optimizer {
        Optimizer::Sgd { momentum, nesterov, weight_decay, .. } => {
            factor(rules, momentum);
            rules.check(
                !nesterov || momentum > 0.0,
                "optimizer.nesterov",
                nesterov,
                "needs optimizer.momentum above 0",
            );
            decay(rules, weight_decay);
        }
        Optimizer::AdamW { betas, eps, weight_decay, .. } => {
            let valid = betas.iter().all(|beta| (0.0..1.0).contains(beta));
            rules.check(valid, "optimizer.betas", format!("{betas:?}"), "must be in [0, 1)");
            rules.positive("optimizer.eps", eps);
            decay(rules, weight_decay);
        }
        Optimizer::Lars { momentum, weight_decay, trust_coefficient, eps } => {
            factor(rules, momentum);
            rules.positive("optimizer.trust_coefficient", trust_coefficient);
            rules.positive("optimizer.eps", eps);
            decay(rules, weight_decay);
        }
    }
}
