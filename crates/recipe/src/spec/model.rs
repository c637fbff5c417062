//! The network.

use std::fmt::Display;

pub use baton_model::Arch;
use baton_model::{Description, Options, Sees};
use serde::{Deserialize, Serialize};

use super::{Compute, JobSpec, Optimizer, Violation, rules::Rules};

/// The network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// `resnet18`, `resnet34`, `resnet50`, `resnet101`, `resnet152` (torchvision's, v1.5); `resnet34_1d`
    /// for signals: kernels of nine samples; `linear`: softmax regression in plain Rust, for trying out
    /// everything around training.
    pub arch: Arch,
    /// Number of outputs: classes (2 or more), or values of a regression (1 or more).
    pub num_classes: u32,
    /// Start the last BatchNorm scale of every residual block at 0 (Goyal et al. 2017, §5.1).
    #[serde(default)]
    pub zero_init_gamma: bool,
    /// NHWC memory order of activations and convolution weights: faster convolutions, the same result
    /// up to rounding.
    #[serde(default = "channels_last")]
    pub channels_last: bool,
    /// A fixed 3 × 3 blur before every strided convolution of 16 channels or more (Zhang 2019), as in
    /// ffcv-imagenet; images only.
    #[serde(default)]
    pub blur_pool: bool,
    /// Weights to begin with: a safetensors file with torchvision's names; empty begins at random.
    #[serde(default)]
    pub pretrained: String,
    /// Leave the classifier of `pretrained` out, for another set of classes.
    #[serde(default)]
    pub new_head: bool,
    /// Blocks that keep their weights and BatchNorm statistics, from the first on: `stem`, `layer1` …
    /// `layer4` of a ResNet; needs `pretrained`.
    #[serde(default)]
    pub freeze: Vec<String>,
}

fn channels_last() -> bool {
    true
}

impl Model {
    /// The network for inputs of so many channels, with the blocks of [`freeze`](Self::freeze) frozen;
    /// absent for `linear`, which is not made of layers.
    #[must_use]
    pub fn describe(&self, channels: u64) -> Option<Description> {
        let options = Options {
            channels,
            outputs: self.num_classes.into(),
            zero_init_gamma: self.zero_init_gamma,
            blur_pool: self.blur_pool,
        };
        Some(self.arch.describe(&options)?.frozen(&self.freeze))
    }
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let least = if spec.loss.kind.is_regression() { 1 } else { 2 };
    rules.check(
        spec.model.num_classes >= least,
        "model.num_classes",
        spec.model.num_classes,
        &format!("must be at least {least}"),
    );
    blocks(spec, rules);
    if spec.model.arch.is_linear() {
        linear(spec, rules);
    }
    if spec.model.arch.sees() == Sees::Signals {
        signals(spec, rules);
    }
}

/// Parts of the network that the recipe names.
fn blocks(spec: &JobSpec, rules: &mut Rules) {
    let model = &spec.model;
    let frozen = &model.freeze;
    let listed = |names: &[String]| format!("[{}]", names.join(", "));
    // How many channels the inputs have changes no name.
    if let Some(network) = model.describe(1) {
        let known: Vec<String> = network.block_names().map(str::to_owned).collect();
        rules.check(
            frozen.iter().eq(known.iter().take(frozen.len())),
            "model.freeze",
            listed(frozen),
            &format!("must be {} in this order, from the first on", known.join(", ")),
        );
        for name in &spec.train.recompute {
            rules.check(
                known.contains(name),
                "train.recompute",
                name,
                &format!("is no block of this network: choose among {}", known.join(", ")),
            );
        }
    }
    let pretrained = !model.pretrained.is_empty();
    rules.check(
        frozen.is_empty() || pretrained,
        "model.freeze",
        listed(frozen),
        "keeps random weights: name a file in model.pretrained",
    );
    rules.check(
        !model.new_head || pretrained,
        "model.new_head",
        true,
        "needs model.pretrained, as every head is new without it",
    );
    for name in &spec.train.recompute {
        rules.check(
            !frozen.contains(name),
            "train.recompute",
            name,
            "is frozen and keeps no activations: leave it out",
        );
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

/// Values that the network ignores. In a file they may be meant for another `arch` and stay; as a change
/// by hand they are a mistake.
pub(crate) fn ignored(spec: &JobSpec) -> Vec<Violation> {
    if !spec.model.arch.is_linear() {
        return Vec::new();
    }
    let mut rules = Rules::default();
    let ignored = "is ignored by model.arch = \"linear\": leave it out";
    rules.check(!spec.model.zero_init_gamma, "model.zero_init_gamma", true, ignored);
    rules.check(spec.model.channels_last, "model.channels_last", false, ignored);
    if let Optimizer::Sgd { weight_decay, decay_norm_and_bias, .. } = spec.optimizer {
        rules.check(
            weight_decay == 0.0 || decay_norm_and_bias,
            "optimizer.decay_norm_and_bias",
            false,
            "is ignored by model.arch = \"linear\", which decays its biases too: set it to true",
        );
    }
    rules.violations()
}

/// What has no meaning in one dimension.
fn signals(spec: &JobSpec, rules: &mut Rules) {
    let arch = spec.model.arch.name();
    let one_dimension = format!("is of images: leave it out with model.arch = \"{arch}\"");
    rules.check(!spec.model.blur_pool, "model.blur_pool", true, &one_dimension);
    rules.check(!spec.evaluation.flip, "evaluation.flip", true, &one_dimension);
    rules.check(!spec.precision.fused, "precision.fused", true, &one_dimension);
}
