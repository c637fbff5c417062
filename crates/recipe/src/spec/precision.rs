//! Number formats.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// Number formats.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    /// `fp32`, `bf16`, `fp16`: format of activations and of the weights' working copy. Master weights,
    /// optimizer and BatchNorm are fp32 always.
    pub compute: Compute,
    /// `strict`: gradients are added in a fixed tree, one result for every number of ranks; `fast`: the
    /// library's own all-reduce, whose order depends on the number of ranks; on GPUs also the algorithms
    /// that cuDNN finds fastest at the start, so that two runs can differ in the last bits.
    pub determinism: Determinism,
    /// Kernels of our own for BatchNorm with what follows it, and for SGD: fewer trips through a GPU's
    /// memory. Off until `baton-worker bench --set precision.fused=true` has shown on your GPU that it
    /// pays; results differ from those without it in the last bits. Needs `model.channels_last`, images.
    /// A process compiles them when it starts, 2.4 s: keep `cluster.warm_spare` on. On a CPU the same
    /// kernels run, one thread, very slowly: for tests.
    pub fused: bool,
    /// Dynamic loss scaling of fp16.
    pub loss_scale: LossScale,
}

/// Dynamic loss scaling as in `torch.amp.GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossScale {
    /// First factor on the loss; of fp16 only, as `torch.amp.GradScaler`.
    pub initial: f64,
    /// Its change after `growth_interval` updates without overflow, at least 1.
    pub growth: f64,
    /// Its change after an overflow, whose update is left out; between 0 and 1.
    pub backoff: f64,
    /// Updates between two growths, at least 1.
    pub growth_interval: u32,
}

impl Default for LossScale {
    fn default() -> Self {
        Self { initial: 65_536.0, growth: 2.0, backoff: 0.5, growth_interval: 2_000 }
    }
}

/// Working number format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// IEEE single.
    #[default]
    Fp32,
    /// bfloat16.
    Bf16,
    /// IEEE half with dynamic loss scaling.
    Fp16,
}

/// What is promised about bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Determinism {
    /// The fixed tree over virtual ranks: one result for every number of ranks.
    #[default]
    Strict,
    /// The library's own all-reduce, and on GPUs the algorithms that cuDNN finds fastest.
    Fast,
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    rules.check(
        !spec.precision.fused || spec.model.channels_last,
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
    rules.between_0_and_1("precision.loss_scale.backoff", scale.backoff);
    rules.check(
        scale.growth_interval >= 1,
        "precision.loss_scale.growth_interval",
        scale.growth_interval,
        "must be at least 1",
    );
}
