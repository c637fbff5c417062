//! Random changes to training samples.

use serde::{Deserialize, Serialize};

use super::{JobSpec, is_default, rules::Rules};
use crate::InputKind;

/// Random changes to training samples: to images, and with `signal` to arrays.
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
    /// Flip every image in every other epoch; only the first epoch is random, with `flip` (Jordan 2024, arXiv
    /// 2404.00498).
    #[serde(skip_serializing_if = "is_default")]
    pub alternate_flips: bool,
    /// Shift by up to this many pixels in both directions, below the resolution; what becomes free is black. With
    /// `crop_scale = [1.0, 1.0]` and square images it is torchvision's RandomCrop with this padding.
    #[serde(skip_serializing_if = "is_default")]
    pub shift: u32,
    /// One random operation of random strength on each image: TrivialAugment (Müller & Hutter 2021, arXiv 2103.10158),
    /// as torchvision's TrivialAugmentWide. Among them are rotations of up to 135°.
    #[serde(skip_serializing_if = "is_default")]
    pub trivial_augment: bool,
    /// Several random operations of one strength on each image; absent means none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rand_augment: Option<RandAugment>,
    /// Largest change of the brightness, 0..1: a factor between `1 - brightness` and `1 + brightness`, as in
    /// torchvision's ColorJitter.
    #[serde(skip_serializing_if = "is_default")]
    pub brightness: f64,
    /// Largest change of the contrast, 0..1, in the same way.
    #[serde(skip_serializing_if = "is_default")]
    pub contrast: f64,
    /// Largest change of the saturation, 0..1, in the same way.
    #[serde(skip_serializing_if = "is_default")]
    pub saturation: f64,
    /// Probability that a rectangle of 2 to 33 % of the image becomes `data.mean` (Zhong et al. 2020, as in
    /// torchvision's RandomErasing).
    #[serde(skip_serializing_if = "is_default")]
    pub erase: f64,
    /// Changes to arrays, the last axis of which is time; absent means none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<AugmentSignal>,
    /// MixUp (Zhang et al. 2018): the weight λ of the sample itself is drawn from Beta(α, α); 0 disables it. Batches
    /// that get CutMix get no MixUp.
    pub mixup_alpha: f64,
    /// Fraction of micro-batches that get CutMix (Yun et al. 2019).
    pub cutmix_probability: f64,
    /// CutMix: the fraction of the area that a sample keeps is drawn from Beta(α, α); above 0.
    pub cutmix_alpha: f64,
}

/// RandAugment (Cubuk et al. 2020, arXiv 1909.13719), with the operations of torchvision's RandAugment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RandAugment {
    /// Operations on each image, one after the other, 1..16; torchvision's `num_ops`.
    pub operations: u32,
    /// Their strength, 0..30; torchvision's `magnitude`.
    pub magnitude: u32,
}

impl Default for RandAugment {
    fn default() -> Self {
        Self { operations: 2, magnitude: 9 }
    }
}

/// Random changes to signals. Their last axis is time, the one before it channels or frequencies.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AugmentSignal {
    /// Normal noise: its standard deviation as a fraction of that of the channel in the sample, 0..10 ("jittering", Um et
    /// al. 2017).
    pub noise: f64,
    /// Largest change of the amplitude, 0..1: a factor between `1 - scale` and `1 + scale` for the whole sample.
    pub scale: f64,
    /// Largest shift in time, earlier or later, as a fraction of the length, 0..1; what becomes free repeats the first or
    /// last value.
    pub shift: f64,
    /// Largest fraction of the time that becomes the channel's mean, in one piece, 0..1 (SpecAugment, Park et al. 2019).
    pub time_mask: f64,
    /// Largest fraction of the channels or frequencies that become their mean, side by side, 0..1 (the same).
    pub channel_mask: f64,
}

impl Default for Augment {
    fn default() -> Self {
        Self {
            crop_scale: [0.08, 1.0],
            crop_ratio: [3.0 / 4.0, 4.0 / 3.0],
            flip: 0.5,
            alternate_flips: false,
            shift: 0,
            trivial_augment: false,
            rand_augment: None,
            brightness: 0.0,
            contrast: 0.0,
            saturation: 0.0,
            erase: 0.0,
            signal: None,
            mixup_alpha: 0.0,
            cutmix_probability: 0.0,
            cutmix_alpha: 1.0,
        }
    }
}

impl Augment {
    /// The fields that change images, apart from crop and flip, as far as they are set, with their values.
    #[must_use]
    pub fn image_changes(&self) -> Vec<(&'static str, String)> {
        let set = |is_set: bool| is_set.then(|| "true".to_owned());
        let share = |share: f64| (share != 0.0).then(|| share.to_string());
        let changes = [
            ("augment.alternate_flips", set(self.alternate_flips)),
            ("augment.shift", (self.shift > 0).then(|| self.shift.to_string())),
            ("augment.trivial_augment", set(self.trivial_augment)),
            ("augment.rand_augment", self.rand_augment.as_ref().map(|_| "a section".to_owned())),
            ("augment.brightness", share(self.brightness)),
            ("augment.contrast", share(self.contrast)),
            ("augment.saturation", share(self.saturation)),
            ("augment.erase", share(self.erase)),
        ];
        changes.into_iter().filter_map(|(field, value)| Some((field, value?))).collect()
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
    let smallest = spec.train.phases.iter().map(|phase| phase.resolution);
    let smallest = smallest.fold(spec.train.resolution, u32::min);
    rules.check(
        augment.shift < smallest,
        "augment.shift",
        augment.shift,
        &format!("must be below the smallest resolution of the training, {smallest} pixels"),
    );
    rules.check(
        !augment.alternate_flips || (augment.flip > 0.0 && augment.flip < 1.0),
        "augment.alternate_flips",
        true,
        "would flip every image in every second epoch: set augment.flip between 0 and 1, such as 0.5",
    );
    if let Some(rand) = &augment.rand_augment {
        rules.within("augment.rand_augment.operations", rand.operations, 1..=16);
        rules.within("augment.rand_augment.magnitude", rand.magnitude, 0..=30);
        let rule = "is beside augment.rand_augment: choose one of the two";
        rules.check(!augment.trivial_augment, "augment.trivial_augment", true, rule);
    }
    rules.fraction("augment.brightness", augment.brightness);
    rules.fraction("augment.contrast", augment.contrast);
    rules.fraction("augment.saturation", augment.saturation);
    rules.fraction("augment.erase", augment.erase);
    rules.check(
        augment.mixup_alpha >= 0.0 && augment.mixup_alpha.is_finite(),
        "augment.mixup_alpha",
        augment.mixup_alpha,
        "must be at least 0",
    );
    rules.fraction("augment.cutmix_probability", augment.cutmix_probability);
    rules.positive("augment.cutmix_alpha", augment.cutmix_alpha);
    if let Some(signal) = &augment.signal {
        let in_range = (0.0..=10.0).contains(&signal.noise);
        rules.check(in_range, "augment.signal.noise", signal.noise, "must be in [0, 10]");
        rules.fraction("augment.signal.scale", signal.scale);
        rules.fraction("augment.signal.shift", signal.shift);
        rules.fraction("augment.signal.time_mask", signal.time_mask);
        rules.fraction("augment.signal.channel_mask", signal.channel_mask);
    }
    kind_of_input(spec, rules);
}

/// Refuses changes to another kind of input than the model's.
fn kind_of_input(spec: &JobSpec, rules: &mut Rules) {
    let (augment, input) = (&spec.augment, spec.model.arch.input_kind());
    let arch = spec.model.arch.name();
    if matches!(input, InputKind::Signals | InputKind::Tokens) {
        let rule = format!("is for images only: remove it with model.arch = \"{arch}\"");
        for (field, value) in augment.image_changes() {
            rules.check(false, field, value, &rule);
        }
    }
    if matches!(input, InputKind::Images | InputKind::Tokens) {
        let rule = format!("is for arrays only: remove it with model.arch = \"{arch}\"");
        rules.check(augment.signal.is_none(), "augment.signal", "a section", &rule);
    }
}
