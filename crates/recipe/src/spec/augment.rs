//! Random changes to training images.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// Random changes to training images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Augment {
    /// Smallest and largest area of the random crop, as fractions of the image (Szegedy et al. 2015, as in
    /// torchvision's RandomResizedCrop).
    pub crop_scale: [f64; 2],
    /// Smallest and largest ratio of width to height of the random crop.
    pub crop_ratio: [f64; 2],
    /// Probability of a horizontal flip.
    pub flip: f64,
    /// MixUp (Zhang et al. 2018): the weight λ of the sample itself is drawn from Beta(α, α); 0 disables it. Batches
    /// that get CutMix get no MixUp.
    pub mixup_alpha: f64,
    /// Fraction of micro-batches that get CutMix (Yun et al. 2019).
    pub cutmix_probability: f64,
    /// CutMix: the fraction of the area that a sample keeps is drawn from Beta(α, α); above 0.
    pub cutmix_alpha: f64,
}

impl Default for Augment {
    fn default() -> Self {
        Self {
            crop_scale: [0.08, 1.0],
            crop_ratio: [3.0 / 4.0, 4.0 / 3.0],
            flip: 0.5,
            mixup_alpha: 0.0,
            cutmix_probability: 0.0,
            cutmix_alpha: 1.0,
        }
    }
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let augment = &spec.augment;
    let [min, max] = augment.crop_scale;
    rules.check(
        0.0 < min && min <= max && max <= 1.0,
        "augment.crop_scale",
        format!("{:?}", augment.crop_scale),
        "must be two fractions of the image, 0 < min <= max <= 1",
    );
    let [min, max] = augment.crop_ratio;
    rules.check(
        0.0 < min && min <= max && max.is_finite(),
        "augment.crop_ratio",
        format!("{:?}", augment.crop_ratio),
        "must be two positive ratios, min <= max",
    );
    rules.fraction("augment.flip", augment.flip);
    rules.check(
        augment.mixup_alpha >= 0.0 && augment.mixup_alpha.is_finite(),
        "augment.mixup_alpha",
        augment.mixup_alpha,
        "must be at least 0",
    );
    rules.fraction("augment.cutmix_probability", augment.cutmix_probability);
    rules.positive("augment.cutmix_alpha", augment.cutmix_alpha);
}
