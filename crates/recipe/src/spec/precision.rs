//! Number formats.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// Number formats.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    /// `fp32`, `bf16`, `fp16`: format of activations and of the working copy of the weights. Master weights, optimizer
    /// and BatchNorm always use fp32.
    pub compute: Compute,
    /// `strict`: gradients are summed in a fixed tree, so the result is the same for every number of ranks; `fast`: the
    /// all-reduce of the library, with an order that depends on the number of ranks; on GPUs also the algorithms that
    /// cuDNN measures as fastest at the start, and attention kernels whose gradients add in any order, so two runs can
    /// differ in the last bits. `strict` computes attention on a GPU in f32, by matrix products and a softmax, which
    /// needs memory for the scores of all pairs of tokens (`baton plan` counts it). An exported program may have other
    /// operations that libtorch adds in any order on a GPU.
    pub determinism: Determinism,
    /// Baton's own kernels for BatchNorm with the operations after it, and for SGD: fewer passes through a GPU's
    /// memory. Enable it only if `baton-worker bench --set precision.fused=true` is faster on your GPU; results differ
    /// in the last bits from those without it. Needs `model.channels_last` and images. A process compiles the kernels
    /// when it starts, in 2.4 s: set `cluster.warm_spare = true`. On a CPU the same kernels run very slowly, with one
    /// thread, for tests.
    pub fused: bool,
    /// Dynamic loss scaling for fp16.
    pub loss_scale: LossScale,
}

/// Dynamic loss scaling as in `torch.amp.GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossScale {
    /// Initial factor of the loss; fp16 only, as in `torch.amp.GradScaler`.
    pub initial: f64,
    /// Factor by which it grows after `growth_interval` steps without overflow, at least 1.
    pub growth: f64,
    /// Factor by which it shrinks after an overflow, for which the update is skipped; between 0 and 1.
    pub backoff: f64,
    /// Steps without overflow before it grows, at least 1.
    pub growth_interval: u32,
}

impl Default for LossScale {
    fn default() -> Self {
        Self { initial: 65_536.0, growth: 2.0, backoff: 0.5, growth_interval: 2_000 }
    }
}

/// Number format of activations and of the working copy of the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// IEEE single precision.
    #[default]
    Fp32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision, with dynamic loss scaling.
    Fp16,
}

/// Which results are bit-identical.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Determinism {
    /// Sums in a fixed tree over virtual ranks: the same result for every number of ranks.
    #[default]
    Strict,
    /// The all-reduce of the library, and on GPUs the algorithms that cuDNN measures as fastest.
    Fast,
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    rules.check(
        !spec.precision.fused || spec.model.channels_last,
        "precision.fused",
        true,
        "needs model.channels_last = true, because its kernels need this memory order",
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
    rules.at_least_1("precision.loss_scale.growth_interval", scale.growth_interval);
}
