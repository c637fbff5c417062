//! Data, evaluation, limits, the guard, and the machines.

use super::Rules;
use crate::spec::JobSpec;

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    rules.check(
        !spec.name.is_empty() && spec.name.chars().all(plain) && !spec.name.starts_with('.'),
        "name",
        format!("{:?}", spec.name),
        "must be letters, digits, '-', '_' and '.', as it names the run folder",
    );
    ranges(spec, rules);
    limits(spec, rules);
    guard(spec, rules);
    cluster(spec, rules);
}

fn ranges(spec: &JobSpec, rules: &mut Rules) {
    let augment = &spec.augment;
    let [least, most] = augment.crop_scale;
    rules.check(
        0.0 < least && least <= most && most <= 1.0,
        "augment.crop_scale",
        format!("{:?}", augment.crop_scale),
        "must be two shares of the image, 0 < least <= most <= 1",
    );
    let [narrow, wide] = augment.crop_ratio;
    rules.check(
        0.0 < narrow && narrow <= wide && wide.is_finite(),
        "augment.crop_ratio",
        format!("{:?}", augment.crop_ratio),
        "must be two positive ratios, narrow <= wide",
    );
    rules.share("augment.flip", augment.flip);
    rules.check(
        augment.mixup_alpha >= 0.0 && augment.mixup_alpha.is_finite(),
        "augment.mixup_alpha",
        augment.mixup_alpha,
        "must be at least 0",
    );
    rules.share("augment.cutmix_probability", augment.cutmix_probability);
    rules.positive("augment.cutmix_alpha", augment.cutmix_alpha);
    rules.positive("data.cache_gib", spec.data.cache_gib);
    rules.check(
        spec.evaluation.every_epochs >= 1,
        "evaluation.every_epochs",
        spec.evaluation.every_epochs,
        "must be at least 1",
    );
    rules.check(
        spec.evaluation.batch >= 1,
        "evaluation.batch",
        spec.evaluation.batch,
        "must be at least 1",
    );
    let crop = spec.evaluation.crop_ratio;
    rules.check(
        0.0 < crop && crop <= 1.0,
        "evaluation.crop_ratio",
        crop,
        "must be above 0 and at most 1",
    );
    let subset = spec.evaluation.subset;
    rules.check(
        0.0 < subset && subset <= 1.0,
        "evaluation.subset",
        subset,
        "must be above 0 and at most 1",
    );
    rules.check(
        spec.data.std.iter().all(|std| *std > 0.0),
        "data.std",
        format!("{:?}", spec.data.std),
        "must be above 0",
    );
    let threads = spec.data.decode_threads;
    rules.check((1..=256).contains(&threads), "data.decode_threads", threads, "must be 1..256");
    let ahead = spec.data.prefetch_batches;
    rules.check((1..=64).contains(&ahead), "data.prefetch_batches", ahead, "must be 1..64");
    rules.check(
        spec.checkpoint.keep_last >= 1,
        "checkpoint.keep_last",
        spec.checkpoint.keep_last,
        "must be at least 1",
    );
}

fn limits(spec: &JobSpec, rules: &mut Rules) {
    let limits = &spec.limits;
    if let Some(target) = limits.target_top1 {
        rules.check(
            0.0 < target && target <= 1.0,
            "limits.target_top1",
            target,
            "must be above 0 and at most 1, e.g. 0.78 for 78 %",
        );
    }
    rules.check(limits.patience != Some(0), "limits.patience", 0, "must be at least 1");
    for (field, value) in [
        ("limits.max_hours", limits.max_hours),
        ("limits.max_dollars", limits.max_dollars),
        ("limits.dollars_per_hour", limits.dollars_per_hour),
    ] {
        if let Some(value) = value {
            rules.positive(field, value);
        }
    }
    rules.check(
        limits.max_dollars.is_none() || limits.dollars_per_hour.is_some(),
        "limits.max_dollars",
        limits.max_dollars.unwrap_or_default(),
        "needs the price: set limits.dollars_per_hour",
    );
}

fn guard(spec: &JobSpec, rules: &mut Rules) {
    let guard = &spec.guard;
    rules.check(
        (1..=100_000).contains(&guard.window),
        "guard.window",
        guard.window,
        "must be 1..100000 updates",
    );
    rules.positive("guard.loss_rise", guard.loss_rise);
    rules.check(
        (0.0..1.0).contains(&guard.accuracy_collapse),
        "guard.accuracy_collapse",
        guard.accuracy_collapse,
        "must be in [0, 1)",
    );
    rules.check(
        0.0 < guard.lr_factor && guard.lr_factor < 1.0,
        "guard.lr_factor",
        guard.lr_factor,
        "must be between 0 and 1",
    );
    rules.check(
        guard.max_rollbacks <= 100,
        "guard.max_rollbacks",
        guard.max_rollbacks,
        "must be at most 100",
    );
}

fn cluster(spec: &JobSpec, rules: &mut Rules) {
    let cluster = &spec.cluster;
    let most = spec.max_ranks();
    rules.check(
        (1..=most).contains(&cluster.min_ranks),
        "cluster.min_ranks",
        cluster.min_ranks,
        &format!("must be 1..{most} (the lesser of cluster.max_ranks and train.virtual_ranks)"),
    );
    rules.check(
        cluster.max_ranks <= spec.train.virtual_ranks,
        "cluster.max_ranks",
        cluster.max_ranks,
        &format!("must not exceed train.virtual_ranks = {}", spec.train.virtual_ranks),
    );
    rules.check(
        (1..=1024).contains(&cluster.threads_per_rank),
        "cluster.threads_per_rank",
        cluster.threads_per_rank,
        "must be 1..1024",
    );
    rules.check(
        cluster.hang_seconds == 0.0 || (3.0..=86_400.0).contains(&cluster.hang_seconds),
        "cluster.hang_seconds",
        cluster.hang_seconds,
        "must be 3..86400 seconds, as a rank tells once a second that it lives, or 0 for never",
    );
    for (field, seconds) in [
        ("cluster.node_grace_seconds", cluster.node_grace_seconds),
        ("cluster.rendezvous_seconds", cluster.rendezvous_seconds),
        ("cluster.collective_seconds", cluster.collective_seconds),
        ("cluster.drain_seconds", cluster.drain_seconds),
    ] {
        rules.check(
            (0.0..=86_400.0).contains(&seconds),
            field,
            seconds,
            "must be 0..86400 seconds",
        );
    }
}
