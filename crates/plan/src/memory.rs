//! Estimate of the memory that one rank needs on its GPU, by use.
//!
//! Serialized names of fields and variants are part of `baton plan --json`: they are added, never renamed.

use baton_job::{
    Rank,
    plan::{GRADIENT_TAIL_LEN, maximal_subtrees, virtual_block},
};
use baton_recipe::{
    JobSpec,
    dry_run::DryRun,
    spec::{Compute, Determinism, OptimizerSpec},
};
use serde::Serialize;

use crate::network::Network;

/// Bytes of an f32 value: a master weight, a summed gradient, a moment, a statistic.
const F32_BYTES: u64 = 4;
/// Allowance for CUDA's context, the kernels of libtorch, cuDNN and NCCL, and NCCL's buffers.
const CONTEXT_BYTES: u64 = 1 << 30;
/// Allowance for cuDNN's workspaces, in addition to inputs and outputs.
const WORKSPACE_BYTES: u64 = 1 << 30;
/// Allowance for gaps between activations in libtorch's memory, as a share of the activations.
const FRAGMENTATION: f64 = 0.05;
/// Number of activation gradients that exist at the same time: of an operation's output, of its input, and of the
/// residual shortcut.
const SIMULTANEOUS_GRADIENTS: u64 = 3;

/// Size of a value in the working format, bytes.
#[must_use]
pub fn value_bytes(compute: Compute) -> u64 {
    match compute {
        Compute::Fp32 => F32_BYTES,
        Compute::Bf16 | Compute::Fp16 => 2,
    }
}

/// Peak memory use of one rank on its GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// Sum of all parts.
    pub total_bytes: u64,
    /// The parts, in the order in which they are shown.
    pub parts: Vec<MemoryPart>,
}

/// Memory for one use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPart {
    /// What the memory is used for.
    pub name: &'static str,
    /// Its size.
    pub bytes: u64,
    /// How the size is computed.
    pub how: String,
}

impl Memory {
    /// Memory of one of `ranks` ranks that trains `network` with `micro_batch` samples at a time.
    #[must_use]
    pub fn new(spec: &JobSpec, network: &Network, ranks: u32, micro_batch: u64) -> Self {
        let mut parts = network.parts.clone();
        parts.extend(state(spec, network));
        let (parameters, statistics) = (network.parameters(), network.statistics());
        // The sum of the previous step is still read while the next step's gradients are computed.
        let leaves = leaves(spec.train.virtual_ranks, ranks, spec.train.grad_accumulation) + 1;
        parts.push(MemoryPart {
            name: "gradient sums",
            bytes: leaves * (parameters + statistics + GRADIENT_TAIL_LEN) * F32_BYTES,
            how: format!(
                "leaves of the fixed tree at a time, and the previous step's sum: \
                 {leaves} x ({parameters} + {statistics} + {GRADIENT_TAIL_LEN}) values x {F32_BYTES} B"
            ),
        });
        if ranks > 1 && spec.precision.determinism == Determinism::Strict {
            // Slices of other ranks' sums, as `baton_collectives::nccl` receives them.
            let subtrees = subtrees(spec.train.virtual_ranks, ranks);
            let slice = (parameters + statistics + GRADIENT_TAIL_LEN).div_ceil(u64::from(ranks));
            parts.push(MemoryPart {
                name: "received sums",
                bytes: subtrees * slice * F32_BYTES,
                how: format!(
                    "slices of the fixed tree: {subtrees} x {slice} values x {F32_BYTES} B"
                ),
            });
        }
        let copied = copied_values(spec, network).div_ceil(u64::from(ranks.max(1)));
        parts.push(MemoryPart {
            name: "copy for a checkpoint",
            bytes: copied * F32_BYTES,
            how: format!("this rank's slice of the state: {copied} values x {F32_BYTES} B"),
        });
        if spec.checkpoint.has_local() {
            parts.push(MemoryPart {
                name: "copy for a local checkpoint",
                bytes: copied * F32_BYTES,
                how: format!(
                    "this rank's part, if all ranks are on one machine: {copied} values x {F32_BYTES} B"
                ),
            });
        }
        let bytes = value_bytes(spec.precision.compute);
        let others = parameters - network.kernels();
        parts.push(MemoryPart {
            name: "gradients of a pass",
            bytes: network.kernels() * bytes + others * F32_BYTES,
            how: format!("{} x {bytes} B + {others} x {F32_BYTES} B", network.kernels()),
        });
        let per_sample = activations(spec, network);
        let activations =
            per_sample.saturating_mul(micro_batch).saturating_add(network.kept_per_pass);
        let kept_per_pass = match network.kept_per_pass {
            0 => String::new(),
            bytes => format!(" + {bytes} B per pass"),
        };
        parts.push(MemoryPart {
            name: "activations",
            bytes: activations,
            how: format!(
                "{per_sample} B per sample x {micro_batch}{kept_per_pass}{}",
                recomputed(spec, network)
            ),
        });
        let (workspace, of_workspace) = match network.uses_cudnn() {
            true => (WORKSPACE_BYTES, " + 1 GiB for cuDNN's workspaces"),
            false => (0, ""),
        };
        parts.push(MemoryPart {
            name: "allowances",
            bytes: CONTEXT_BYTES + workspace + (FRAGMENTATION * activations as f64) as u64,
            how: format!(
                "1 GiB for CUDA, cuDNN and NCCL{of_workspace} + {} % of the activations for gaps between them; not \
                 measured",
                FRAGMENTATION * 100.0
            ),
        });
        let total_bytes = parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
        Self { total_bytes, parts }
    }

    /// The largest micro-batch that needs at most `max_bytes`; 0 if even one sample needs more.
    #[must_use]
    pub fn largest_micro_batch(
        spec: &JobSpec,
        network: &Network,
        ranks: u32,
        max_bytes: u64,
    ) -> u64 {
        let fits = |batch: u64| Self::new(spec, network, ranks, batch).total_bytes <= max_bytes;
        // Memory grows with the batch, so a binary search finds the largest one.
        let (mut low, mut high) = (0_u64, 1 << 24);
        while low < high {
            let middle = (low + high).div_ceil(2);
            if fits(middle) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        low
    }
}

/// The smallest number of micro-batches per virtual rank, above the recipe's, with which every segment of `run` needs
/// at most `max_bytes`; `network` builds the network for a resolution.
pub fn accumulation_that_fits(
    spec: &JobSpec,
    run: &DryRun,
    ranks: u32,
    max_bytes: u64,
    network: impl Fn(u32) -> Option<Network>,
) -> Option<u32> {
    let virtual_ranks = u64::from(spec.train.virtual_ranks);
    let mut spec = spec.clone();
    (spec.train.grad_accumulation + 1..=4_096).find(|parts| {
        spec.train.grad_accumulation = *parts;
        let parts = virtual_ranks * u64::from(*parts);
        run.segments.iter().all(|segment| {
            let micro_batch = segment.global_batch / parts;
            let fits = |network: Network| {
                // BatchNorm needs at least two samples for a variance.
                let smallest = if network.statistics() > 0 { 2 } else { 1 };
                micro_batch >= smallest
                    && Memory::new(&spec, &network, ranks, micro_batch).total_bytes <= max_bytes
            };
            segment.global_batch.is_multiple_of(parts)
                && network(segment.resolution).is_some_and(fits)
        })
    })
}

/// Memory of the training state, which exists during the whole run.
fn state(spec: &JobSpec, network: &Network) -> Vec<MemoryPart> {
    let (parameters, kernels) = (network.parameters(), network.kernels());
    let statistics = network.statistics();
    let bytes = value_bytes(spec.precision.compute);
    let has_copy = spec.precision.compute != Compute::Fp32;
    let copy = if has_copy { kernels * bytes } else { 0 };
    let copied = if has_copy { format!(" + {kernels} x {bytes} B") } else { String::new() };
    let mut parts = vec![MemoryPart {
        name: "weights",
        bytes: parameters * F32_BYTES,
        how: format!("{parameters} values x {F32_BYTES} B"),
    }];
    // Autocast copies the weights of a program in every pass.
    if kernels > 0 && has_copy {
        let how = format!("{kernels} weights of convolutions and linear layers x {bytes} B");
        parts.push(MemoryPart { name: "working copy", bytes: copy, how });
    }
    let (moments, rule) = moments(&spec.optimizer);
    parts.push(MemoryPart {
        name: "optimizer",
        bytes: moments * parameters * F32_BYTES,
        how: format!("{rule}: {moments} x {parameters} values x {F32_BYTES} B"),
    });
    if spec.ema.is_some() {
        parts.push(MemoryPart {
            name: "averaged weights",
            bytes: (parameters + statistics) * F32_BYTES + copy,
            how: format!("({parameters} + {statistics}) values x {F32_BYTES} B{copied}"),
        });
    }
    let [frozen, frozen_kernels] = network.frozen();
    if frozen > 0 {
        let copy = if has_copy { frozen_kernels * bytes } else { 0 };
        let copied =
            if has_copy { format!(" + {frozen_kernels} x {bytes} B") } else { String::new() };
        parts.push(MemoryPart {
            name: "frozen weights",
            bytes: frozen * F32_BYTES + copy,
            how: format!("{frozen} values x {F32_BYTES} B{copied}"),
        });
    }
    if statistics > 0 {
        parts.push(MemoryPart {
            name: "BatchNorm statistics",
            bytes: 2 * statistics * F32_BYTES,
            how: format!("running and spare: 2 x {statistics} values x {F32_BYTES} B"),
        });
    }
    parts
}

/// Number of values of the state that a checkpoint contains.
fn copied_values(spec: &JobSpec, network: &Network) -> u64 {
    let (moments, _) = moments(&spec.optimizer);
    let per_model = network.parameters() + network.statistics();
    let models = if spec.ema.is_some() { 2 } else { 1 };
    models * per_model + moments * network.parameters()
}

/// Number of values that the optimizer keeps per weight, and its name.
fn moments(optimizer: &OptimizerSpec) -> (u64, &'static str) {
    match optimizer {
        OptimizerSpec::Sgd { momentum, .. } if *momentum == 0.0 => (0, "SGD without momentum"),
        OptimizerSpec::Sgd { .. } => (1, "SGD's momentum"),
        OptimizerSpec::AdamW { .. } => (2, "AdamW's two moments"),
        OptimizerSpec::Lars { .. } => (1, "LARS's momentum"),
        OptimizerSpec::Lamb { .. } => (2, "LAMB's two moments"),
        OptimizerSpec::Muon { .. } => (2, "Muon's momentum or AdamW's mean, and AdamW's square"),
    }
}

fn recomputed(spec: &JobSpec, network: &Network) -> String {
    if !network.recomputed_twice.is_empty() {
        return ", every sublayer recomputed".to_owned();
    }
    match spec.train.recompute.as_slice() {
        _ if !network.recomputed.is_empty() => ", every layer recomputed".to_owned(),
        [] => String::new(),
        _ if spec.model.arch.is_program() => {
            "; what train.recompute saves in a program is not counted".to_owned()
        }
        names => format!(", recomputed: {}", names.join(", ")),
    }
}

/// The largest number of gradients that one of `ranks` ranks holds at a time while it sums those of its virtual ranks,
/// as `baton_collectives::tree::Fold` does: finished subtrees, and the next leaf.
#[must_use]
pub fn leaves(virtual_ranks: u32, ranks: u32, grad_accumulation: u32) -> u64 {
    let max_of_rank = |rank| {
        let block = virtual_block(virtual_ranks, Rank(rank), ranks);
        let held = |leaf| maximal_subtrees(block.start..leaf).len() + 1;
        block.clone().map(held).max().unwrap_or_default()
    };
    let largest = (0..ranks).map(max_of_rank).max().unwrap_or_default() as u64;
    // The sum of a virtual rank's micro-batches, in addition to the next micro-batch's gradient.
    largest + u64::from(grad_accumulation > 1)
}

/// The largest number of subtree sums of the fixed tree that one rank receives from all other ranks.
fn subtrees(virtual_ranks: u32, ranks: u32) -> u64 {
    let of_rank =
        |rank| maximal_subtrees(virtual_block(virtual_ranks, Rank(rank), ranks)).len() as u64;
    let each: Vec<u64> = (0..ranks).map(of_rank).collect();
    each.iter().sum::<u64>() - each.iter().min().copied().unwrap_or_default()
}

/// Peak size of activations and their gradients, bytes per sample.
///
/// The backward pass runs from the last operation to the first and frees activations after their last use. A
/// recomputed block keeps at most its output until the backward pass reaches it.
fn activations(spec: &JobSpec, network: &Network) -> u64 {
    let bytes = value_bytes(spec.precision.compute);
    // What is kept of the blocks before, and the recomputed input of this one.
    let (mut before, mut input, mut peak): (u64, u64, u64) = (0, 0, 0);
    for layers in network.layers.chunk_by(|a, b| a.block == b.block) {
        let is_in = |names: &[String]| layers[0].is_in(names);
        let output = layers.last().map_or(0, |layer| layer.outputs * bytes);
        if is_in(&spec.model.freeze) {
            // Only the input of the next block is kept.
            (before, input) = (output, 0);
            continue;
        }
        let mut kept = before.saturating_add(input);
        for layer in layers {
            // A file could describe a network of any size.
            kept = kept.saturating_add(layer.kept.total_bytes(bytes));
            let gradients = layer.outputs.saturating_mul(SIMULTANEOUS_GRADIENTS * bytes);
            peak = peak.max(kept.saturating_add(gradients));
        }
        let is_kept = !layers[0].is_in(&network.recomputed_twice);
        input = if is_kept { 0 } else { output };
        before = match network.recomputes(spec, &layers[0]) {
            true if is_kept => before.saturating_add(output),
            true => before,
            false => kept,
        };
    }
    peak
}

#[cfg(test)]
mod tests;
