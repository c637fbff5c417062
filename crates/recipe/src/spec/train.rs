//! Length of training and batch size.

use std::ops::RangeInclusive;

use baton_model::InputKind;
use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};
use crate::Step;

/// Length of training and batch size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Train {
    /// Number of epochs, which are passes over the training data; 1..1000000.
    pub epochs: u32,
    /// Samples per step over all ranks, until the first phase; a multiple of `virtual_ranks` × `grad_accumulation`.
    pub global_batch: u32,
    /// Side of the training images in pixels, until the first phase; 32..4096 (`linear` and `program`: from 1). Ignored
    /// for signals and texts.
    #[serde(default = "resolution")]
    pub resolution: u32,
    /// Number of parts of every global batch, independent of the number of ranks: a power of two up to 4096. It is also
    /// the largest number of ranks. 1 for a single GPU; 8 for a node with eight GPUs.
    #[serde(default = "virtual_ranks")]
    pub virtual_ranks: u32,
    /// Micro-batches per virtual rank and step, computed one after the other: less memory, the same global batch,
    /// fewer samples for BatchNorm.
    #[serde(default = "grad_accumulation")]
    pub grad_accumulation: u32,
    /// Largest L2 norm of the whole gradient; a larger gradient is scaled down to it; above 0; as in
    /// `torch.nn.utils.clip_grad_norm_`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_grad_norm: Option<f64>,
    /// Factor of the learning rate from each layer to the one below it, above 0 and at most 1: 0.75 trains a fine-tuned
    /// network's lower layers more slowly. See below for what a layer is.
    #[serde(default = "layer_decay", skip_serializing_if = "is_one")]
    pub layer_decay: f64,
    /// Progressive resize: changes of resolution and batch at certain epochs; a list, see below.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<TrainPhase>,
    /// Blocks whose activations are recomputed for the gradient instead of kept (Chen et al. 2016): less memory, one
    /// more forward pass of these blocks; frozen blocks are not allowed. With `arch = "program"`: paths of modules, such as
    /// `features.3`; last bits of gradients may differ where an input or weight of such a module is also used outside of it.
    /// With `arch = "causal_lm"`: `layers` for all layers, some such as `layers.3`, or `sublayers` for all layers, of which
    /// attention and the feed-forward part are recomputed apart: less memory still, one more forward pass of attention.
    #[serde(default)]
    pub recompute: Vec<String>,
    /// Steps between two points of the curves (metrics.jsonl, TensorBoard, trackers), whose steps are then multiples of it;
    /// 0 records up to ten points a second.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub log_every: u32,
}

/// Whether the curves have the metrics of this step, if it is reported, with this [`log_every`](Train::log_every).
#[must_use]
pub fn is_recorded(log_every: u32, step: Step) -> bool {
    log_every == 0 || step.0.is_multiple_of(u64::from(log_every))
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_one(number: &f64) -> bool {
    *number == 1.0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Resolution and batch size from an epoch on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainPhase {
    /// First epoch of the phase, counted from 0: at least 1, after the previous phase and its ramp, below
    /// `train.epochs`.
    pub from_epoch: u32,
    /// Side of the images in pixels; with phases, all resolutions must be multiples of 32.
    pub resolution: u32,
    /// Samples per step, by the same rule as `train.global_batch`.
    pub global_batch: u32,
    /// Number of epochs in which the resolution rises from that of the previous phase; 0 means at once.
    #[serde(default)]
    pub ramp_epochs: u32,
}

fn resolution() -> u32 {
    32
}
fn virtual_ranks() -> u32 {
    8
}
fn grad_accumulation() -> u32 {
    1
}
fn layer_decay() -> f64 {
    1.0
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    length_and_batch(spec, rules);
    let (side, sides) = (spec.train.resolution, sides(spec));
    let rule = format!("must be {}..4096 pixels", sides.start());
    rules.check(sides.contains(&side), "train.resolution", side, &rule);
    phases(spec, rules);
    rules.above_0_to_1("train.layer_decay", spec.train.layer_decay);
    if let Some(norm) = spec.train.clip_grad_norm {
        rules.positive("train.clip_grad_norm", norm);
    }
}

fn length_and_batch(spec: &JobSpec, rules: &mut Rules) {
    let train = &spec.train;
    rules.within("train.epochs", train.epochs, 1..=1_000_000);
    rules.check(
        train.virtual_ranks.is_power_of_two() && train.virtual_ranks <= 4096,
        "train.virtual_ranks",
        train.virtual_ranks,
        "must be a power of two, at most 4096",
    );
    rules.within("train.grad_accumulation", train.grad_accumulation, 1..=4096);
    batch(spec, "train.global_batch", train.global_batch, rules);
}

/// Checks that every micro-batch of every virtual rank gets the same number of samples.
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

/// Allowed sides of images, in pixels.
pub(super) fn sides(spec: &JobSpec) -> RangeInclusive<u32> {
    let arch = spec.model.arch;
    let is_any = arch.is_linear() || arch.is_program() || arch.is_causal_lm();
    let smallest = if is_any { 1 } else { 32 };
    smallest..=4096
}

fn phases(spec: &JobSpec, rules: &mut Rules) {
    let train = &spec.train;
    let Some(first) = train.phases.first() else { return };
    rules.check(
        first.from_epoch >= 1,
        "train.phases.from_epoch",
        first.from_epoch,
        "must be at least 1: train.resolution and train.global_batch apply from epoch 0",
    );
    let mut next_free = 0;
    for phase in &train.phases {
        rules.check(
            phase.from_epoch >= next_free && phase.from_epoch < train.epochs,
            "train.phases.from_epoch",
            phase.from_epoch,
            &format!(
                "must be {next_free} (after the previous phase and its ramp) or later, and below \
                 train.epochs = {}",
                train.epochs
            ),
        );
        next_free = phase.from_epoch.saturating_add(phase.ramp_epochs.max(1));
        batch(spec, "train.phases.global_batch", phase.global_batch, rules);
    }
    rules.check(
        next_free <= train.epochs,
        "train.phases.ramp_epochs",
        train.phases.last().map_or(0, |last| last.ramp_epochs),
        &format!("must end by train.epochs = {}", train.epochs),
    );
    if spec.model.arch.input_kind() != InputKind::Images {
        return;
    }
    // Feature maps with odd sides waste tiles of a GPU, and every change of the side costs a search for algorithms.
    let sides = train.phases.iter().map(|phase| ("train.phases.resolution", phase.resolution));
    for (field, side) in std::iter::once(("train.resolution", train.resolution)).chain(sides) {
        rules.check(
            side.is_multiple_of(32) && (32..=4096).contains(&side),
            field,
            side,
            &format!(
                "must be a multiple of 32 if train.phases changes it, e.g. {}",
                side.next_multiple_of(32).clamp(32, 4096)
            ),
        );
    }
}
