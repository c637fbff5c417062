//! The rules a recipe must keep. Each is checked on its own, so that all faults show at once.

use std::fmt::Display;

use super::{Arch, CollectiveKind, Compute, Determinism, JobSpec, Optimizer, Schedule, Violation};

/// Every rule that `spec` breaks.
pub(super) fn violations(spec: &JobSpec) -> Vec<Violation> {
    let mut rules = Rules(Vec::new());
    shape(spec, &mut rules);
    optimizer(&spec.optimizer, &mut rules);
    schedule(spec, &mut rules);
    ranges(spec, &mut rules);
    cluster(spec, &mut rules);
    not_yet(spec, &mut rules);
    rules.0
}

struct Rules(Vec<Violation>);

impl Rules {
    fn check(&mut self, holds: bool, field: &'static str, value: impl Display, rule: &str) {
        if !holds {
            self.0.push(Violation { field, value: value.to_string(), rule: rule.to_owned() });
        }
    }

    /// A feature that the format knows and this build does not: refused, never ignored.
    fn unimplemented(
        &mut self,
        used: bool,
        field: &'static str,
        value: impl Display,
        instead: &str,
    ) {
        let rule = format!("not implemented yet; {instead}");
        self.check(!used, field, value, &rule);
    }
}

fn shape(spec: &JobSpec, rules: &mut Rules) {
    let train = &spec.train;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    rules.check(
        !spec.name.is_empty() && spec.name.chars().all(plain) && !spec.name.starts_with('.'),
        "name",
        format!("{:?}", spec.name),
        "must be letters, digits, '-', '_' and '.', as it names the run folder",
    );
    rules.check(
        spec.model.num_classes >= 2,
        "model.num_classes",
        spec.model.num_classes,
        "must be at least 2",
    );
    rules.check(train.epochs >= 1, "train.epochs", train.epochs, "must be at least 1");
    rules.check(
        train.virtual_ranks.is_power_of_two() && train.virtual_ranks <= 4096,
        "train.virtual_ranks",
        train.virtual_ranks,
        "must be a power of two, at most 4096",
    );
    rules.check(
        train.global_batch >= 1
            && train.virtual_ranks >= 1
            && train.global_batch.is_multiple_of(train.virtual_ranks),
        "train.global_batch",
        train.global_batch,
        &format!("must be a multiple of train.virtual_ranks = {}", train.virtual_ranks),
    );
    let smallest = if spec.model.arch == Arch::Linear { 1 } else { 32 };
    rules.check(
        (smallest..=4096).contains(&train.resolution),
        "train.resolution",
        train.resolution,
        &format!("must be {smallest}..4096 pixels"),
    );
    rules.check(
        spec.evaluation.resolution == 0 || (smallest..=4096).contains(&spec.evaluation.resolution),
        "evaluation.resolution",
        spec.evaluation.resolution,
        &format!("must be 0 (as in training) or {smallest}..4096 pixels"),
    );
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
    match *optimizer {
        Optimizer::Sgd { momentum, nesterov, weight_decay, .. } => {
            rules.check(
                (0.0..1.0).contains(&momentum),
                "optimizer.momentum",
                momentum,
                "must be in [0, 1)",
            );
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
            rules.check(eps > 0.0 && eps.is_finite(), "optimizer.eps", eps, "must be above 0");
            decay(rules, weight_decay);
        }
    }
}

fn schedule(spec: &JobSpec, rules: &mut Rules) {
    let epochs = f64::from(spec.train.epochs);
    let rate = |rules: &mut Rules, field, value: f64| {
        rules.check(value >= 0.0 && value.is_finite(), field, value, "must be at least 0");
    };
    match &spec.schedule {
        Schedule::Constant { lr } => rate(rules, "schedule.lr", *lr),
        Schedule::WarmupCosine { peak_lr, warmup_epochs, final_lr } => {
            rate(rules, "schedule.peak_lr", *peak_lr);
            rate(rules, "schedule.final_lr", *final_lr);
            rules.check(
                (0.0..epochs).contains(warmup_epochs),
                "schedule.warmup_epochs",
                warmup_epochs,
                &format!("must be at least 0 and below train.epochs = {epochs}"),
            );
        }
        Schedule::OneCycle { peak_lr, pct_start, div_factor, final_div_factor } => {
            rate(rules, "schedule.peak_lr", *peak_lr);
            rules.check(
                *pct_start > 0.0 && *pct_start < 1.0,
                "schedule.pct_start",
                pct_start,
                "must be between 0 and 1",
            );
            rules.check(
                *div_factor >= 1.0,
                "schedule.div_factor",
                div_factor,
                "must be at least 1",
            );
            rules.check(
                *final_div_factor >= 1.0,
                "schedule.final_div_factor",
                final_div_factor,
                "must be at least 1",
            );
        }
        Schedule::PiecewiseLinear { points } => {
            rules.check(
                points.first().is_some_and(|first| first[0] == 0.0),
                "schedule.points",
                format!("{points:?}"),
                "must begin with a point at epoch 0",
            );
            rules.check(
                points.windows(2).all(|pair| pair[0][0] < pair[1][0]),
                "schedule.points",
                format!("{points:?}"),
                "must be in rising order of epoch",
            );
            for point in points {
                rate(rules, "schedule.points", point[1]);
            }
        }
    }
}

fn ranges(spec: &JobSpec, rules: &mut Rules) {
    let share = |rules: &mut Rules, field, value: f64| {
        rules.check((0.0..=1.0).contains(&value), field, value, "must be in [0, 1]");
    };
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
    share(rules, "augment.flip", augment.flip);
    rules.check(
        spec.data.cache_gib.is_finite() && spec.data.cache_gib > 0.0,
        "data.cache_gib",
        spec.data.cache_gib,
        "must be above 0",
    );
    rules.check(
        (0.0..1.0).contains(&spec.loss.label_smoothing),
        "loss.label_smoothing",
        spec.loss.label_smoothing,
        "must be in [0, 1)",
    );
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
    let strict = spec.precision.determinism == Determinism::Strict;
    rules.check(
        !(strict && cluster.collective == CollectiveKind::Nccl),
        "cluster.collective",
        "nccl",
        "adds in an order of its own: set precision.determinism = \"fast\", or leave it to auto, which \
         keeps the strict order over TCP",
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

fn not_yet(spec: &JobSpec, rules: &mut Rules) {
    let train = &spec.train;
    rules.unimplemented(spec.model.blur_pool, "model.blur_pool", true, "set it to false");
    rules.unimplemented(
        spec.augment.mixup_alpha != 0.0,
        "augment.mixup_alpha",
        spec.augment.mixup_alpha,
        "set it to 0",
    );
    rules.unimplemented(
        spec.augment.cutmix_probability != 0.0,
        "augment.cutmix_probability",
        spec.augment.cutmix_probability,
        "set it to 0",
    );
    rules.unimplemented(
        train.grad_accumulation != 1,
        "train.grad_accumulation",
        train.grad_accumulation,
        "set it to 1 and raise train.virtual_ranks, which splits the batch just so",
    );
    rules.unimplemented(
        train.clip_grad_norm.is_some(),
        "train.clip_grad_norm",
        train.clip_grad_norm.unwrap_or_default(),
        "leave it out",
    );
    rules.unimplemented(
        !train.phases.is_empty(),
        "train.phases",
        format!("{} phases", train.phases.len()),
        "leave them out and give train.resolution and train.global_batch",
    );
    rules.unimplemented(train.recompute, "train.recompute", true, "set it to false");
    rules.unimplemented(
        spec.precision.compute != Compute::Fp32,
        "precision.compute",
        format!("{:?}", spec.precision.compute).to_lowercase(),
        "use fp32",
    );
    rules.unimplemented(spec.ema.is_some(), "ema", "a section", "leave it out");
    rules.unimplemented(spec.evaluation.flip, "evaluation.flip", true, "set it to false");
    rules.unimplemented(
        spec.evaluation.subset != 1.0,
        "evaluation.subset",
        spec.evaluation.subset,
        "set it to 1",
    );
    let limits = &spec.limits;
    for (field, limit) in [
        ("limits.target_top1", limits.target_top1),
        ("limits.max_hours", limits.max_hours),
        ("limits.max_dollars", limits.max_dollars),
    ] {
        rules.unimplemented(limit.is_some(), field, limit.unwrap_or_default(), "leave it out");
    }
}

impl JobSpec {
    /// The most ranks that can take part: each runs at least one virtual rank.
    #[must_use]
    pub fn max_ranks(&self) -> u32 {
        match self.cluster.max_ranks {
            0 => self.train.virtual_ranks,
            most => most.min(self.train.virtual_ranks),
        }
    }

    /// Side of the evaluation images in pixels.
    #[must_use]
    pub fn evaluation_resolution(&self) -> u32 {
        match self.evaluation.resolution {
            0 => self.train.resolution,
            side => side,
        }
    }
}
