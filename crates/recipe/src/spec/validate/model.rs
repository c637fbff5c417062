//! The network, its objective and its number formats.

use std::fmt::Display;

use super::Rules;
use crate::spec::{Arch, Compute, JobSpec, Optimizer, Stage};

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    outputs(spec, rules);
    stages(spec, rules);
    number_formats(spec, rules);
    match spec.model.arch {
        Arch::Linear => linear(spec, rules),
        Arch::Resnet34In1d => signals(spec, rules),
        _ => {}
    }
}

fn outputs(spec: &JobSpec, rules: &mut Rules) {
    let regression = spec.loss.kind.is_regression();
    let least = if regression { 1 } else { 2 };
    rules.check(
        spec.model.num_classes >= least,
        "model.num_classes",
        spec.model.num_classes,
        &format!("must be at least {least}"),
    );
    rules.check(
        (0.0..1.0).contains(&spec.loss.label_smoothing),
        "loss.label_smoothing",
        spec.loss.label_smoothing,
        "must be in [0, 1)",
    );
    rules.positive("loss.huber_delta", spec.loss.huber_delta);
    if regression {
        let only_classes = "is of classes: set it to 0, or loss.kind = \"cross_entropy\"";
        for (field, value) in [
            ("loss.label_smoothing", spec.loss.label_smoothing),
            ("augment.mixup_alpha", spec.augment.mixup_alpha),
            ("augment.cutmix_probability", spec.augment.cutmix_probability),
        ] {
            rules.check(value == 0.0, field, value, only_classes);
        }
        let target = spec.limits.target_top1;
        rules.check(
            target.is_none(),
            "limits.target_top1",
            target.unwrap_or_default(),
            "is of classes: leave it out, or set loss.kind = \"cross_entropy\"",
        );
    }
}

fn stages(spec: &JobSpec, rules: &mut Rules) {
    let model = &spec.model;
    let frozen = &model.freeze;
    rules.check(
        frozen.iter().eq(Stage::ALL.iter().take(frozen.len())),
        "model.freeze",
        format!("{frozen:?}").to_lowercase(),
        "must be stem, layer1, layer2, layer3, layer4 in this order, from the first on",
    );
    let pretrained = !model.pretrained.is_empty();
    rules.check(
        frozen.is_empty() || pretrained,
        "model.freeze",
        format!("{frozen:?}").to_lowercase(),
        "keeps random weights: name a file in model.pretrained",
    );
    rules.check(
        !model.new_head || pretrained,
        "model.new_head",
        true,
        "needs model.pretrained, as every head is new without it",
    );
    for stage in &spec.train.recompute {
        rules.check(
            !frozen.contains(stage),
            "train.recompute",
            format!("{stage:?}").to_lowercase(),
            "is frozen and keeps no activations: leave it out",
        );
    }
}

fn number_formats(spec: &JobSpec, rules: &mut Rules) {
    let model = &spec.model;
    rules.check(
        !spec.precision.fused || model.channels_last,
        "precision.fused",
        true,
        "needs model.channels_last = true, whose order its kernels read in",
    );
    let scale = &spec.precision.loss_scale;
    rules.positive("precision.loss_scale.initial", scale.initial);
    rules.check(
        scale.growth >= 1.0 && scale.growth.is_finite(),
        "precision.loss_scale.growth",
        scale.growth,
        "must be at least 1",
    );
    rules.check(
        0.0 < scale.backoff && scale.backoff < 1.0,
        "precision.loss_scale.backoff",
        scale.backoff,
        "must be between 0 and 1",
    );
    rules.check(
        scale.growth_interval >= 1,
        "precision.loss_scale.growth_interval",
        scale.growth_interval,
        "must be at least 1",
    );
    if let Some(ema) = &spec.ema {
        rules.check(
            0.0 < ema.decay && ema.decay < 1.0,
            "ema.decay",
            ema.decay,
            "must be between 0 and 1",
        );
        rules.check(ema.every_steps >= 1, "ema.every_steps", ema.every_steps, "must be at least 1");
    }
}

/// What the plain-Rust model does not have is refused, never ignored.
fn linear(spec: &JobSpec, rules: &mut Rules) {
    let (model, train) = (&spec.model, &spec.train);
    let mut absent = |used: bool, field: &'static str, value: &dyn Display| {
        rules.check(!used, field, value, "is not known to model.arch = \"linear\": leave it out");
    };
    let sgd = matches!(spec.optimizer, Optimizer::Sgd { .. });
    absent(!sgd, "optimizer.kind", &"other than sgd");
    absent(model.blur_pool, "model.blur_pool", &true);
    absent(!model.pretrained.is_empty(), "model.pretrained", &model.pretrained);
    absent(spec.loss.kind.is_regression(), "loss.kind", &"regression");
    absent(spec.precision.compute != Compute::Fp32, "precision.compute", &"other than fp32");
    absent(spec.precision.fused, "precision.fused", &true);
    absent(spec.ema.is_some(), "ema", &"a section");
    absent(!train.recompute.is_empty(), "train.recompute", &"stages");
    let clip = train.clip_grad_norm;
    absent(clip.is_some(), "train.clip_grad_norm", &clip.unwrap_or_default());
    absent(spec.augment.mixup_alpha != 0.0, "augment.mixup_alpha", &spec.augment.mixup_alpha);
    let cutmix = spec.augment.cutmix_probability;
    absent(cutmix != 0.0, "augment.cutmix_probability", &cutmix);
    absent(spec.evaluation.flip, "evaluation.flip", &true);
    let changes = train.phases.iter().any(|phase| phase.resolution != train.resolution);
    absent(changes, "train.phases", &"another resolution");
}

/// What has no meaning in one dimension.
fn signals(spec: &JobSpec, rules: &mut Rules) {
    let one_dimension = "is of images: leave it out with model.arch = \"resnet34_1d\"";
    rules.check(!spec.model.blur_pool, "model.blur_pool", true, one_dimension);
    rules.check(!spec.evaluation.flip, "evaluation.flip", true, one_dimension);
    rules.check(!spec.precision.fused, "precision.fused", true, one_dimension);
}
