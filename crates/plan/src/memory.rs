//! The memory of one GPU, part by part.

use baton_job::{
    Rank,
    plan::{TAIL, virtual_block},
};
use baton_recipe::{
    JobSpec,
    dry_run::DryRun,
    spec::{Compute, Determinism, Optimizer},
};
use serde::Serialize;

use crate::network::Network;

/// Bytes of a master weight, a gradient that is added up, a moment, a statistic.
const F32_BYTES: u64 = 4;
/// For CUDA's context, the kernels of libtorch, cuDNN and NCCL, and NCCL's buffers. An allowance.
const CONTEXT_BYTES: u64 = 1 << 30;
/// For what cuDNN's convolutions use beside their inputs and outputs. An allowance.
const WORKSPACE_BYTES: u64 = 1 << 30;
/// For gaps between activations in libtorch's memory, as a share of them. An allowance.
const FRAGMENTATION: f64 = 0.05;
/// Gradients of activations that exist at one time: of an operation's output, of its input, and of the
/// shortcut past it.
const GRADIENTS_AT_A_TIME: u64 = 3;

/// Bytes of a value in the working format.
#[must_use]
pub fn value_bytes(compute: Compute) -> u64 {
    match compute {
        Compute::Fp32 => F32_BYTES,
        Compute::Bf16 | Compute::Fp16 => 2,
    }
}

/// What one rank's GPU holds at the moment when it holds most.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// All parts together.
    pub total_bytes: u64,
    /// In the order in which they are told.
    pub parts: Vec<Part>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Of what.
    pub name: &'static str,
    /// How much.
    pub bytes: u64,
    /// How that comes about.
    pub how: String,
}

impl Memory {
    /// Of one of `ranks` that trains `network` with `micro_batch` samples at a time.
    #[must_use]
    pub fn new(spec: &JobSpec, network: &Network, ranks: u32, micro_batch: u64) -> Self {
        let mut parts = state(spec, network);
        let (parameters, statistics) = (network.parameters(), network.statistics());
        // The sum of the step before is read when the next one's gradients are under way.
        let leaves = leaves(spec.train.virtual_ranks, ranks, spec.train.grad_accumulation) + 1;
        parts.push(Part {
            name: "gradient sums",
            bytes: leaves * (parameters + statistics + TAIL) * F32_BYTES,
            how: format!(
                "leaves of the fixed tree at a time, and the step before's: \
                 {leaves} x ({parameters} + {statistics} + {TAIL}) values x {F32_BYTES} B"
            ),
        });
        if ranks > 1 && spec.precision.determinism == Determinism::Strict {
            // Slices of other ranks' sums, as `baton_collectives::nccl` receives them.
            let subtrees = subtrees(spec.train.virtual_ranks, ranks);
            let slice = (parameters + statistics + TAIL).div_ceil(u64::from(ranks));
            parts.push(Part {
                name: "sums of others",
                bytes: subtrees * slice * F32_BYTES,
                how: format!(
                    "slices of the fixed tree: {subtrees} x {slice} values x {F32_BYTES} B"
                ),
            });
        }
        let copied = copied_values(spec, network).div_ceil(u64::from(ranks.max(1)));
        parts.push(Part {
            name: "copy for a checkpoint",
            bytes: copied * F32_BYTES,
            how: format!("this rank's slice of the state: {copied} values x {F32_BYTES} B"),
        });
        let bytes = value_bytes(spec.precision.compute);
        let others = parameters - network.kernels();
        parts.push(Part {
            name: "gradients of a pass",
            bytes: network.kernels() * bytes + others * F32_BYTES,
            how: format!("{} x {bytes} B + {others} x {F32_BYTES} B", network.kernels()),
        });
        let activations = activations(spec, network) * micro_batch;
        parts.push(Part {
            name: "activations",
            bytes: activations,
            how: format!(
                "{} B per sample x {micro_batch}{}",
                activations / micro_batch.max(1),
                recomputed(&spec.train.recompute)
            ),
        });
        parts.push(Part {
            name: "allowances",
            bytes: CONTEXT_BYTES + WORKSPACE_BYTES + (FRAGMENTATION * activations as f64) as u64,
            how: format!(
                "1 GiB for CUDA, cuDNN and NCCL + 1 GiB for cuDNN's workspaces + {} % of the \
                 activations for gaps between them; not measured",
                FRAGMENTATION * 100.0
            ),
        });
        Self { total_bytes: parts.iter().map(|part| part.bytes).sum(), parts }
    }

    /// The most samples at a time with which `new` stays within `most_bytes`; 0 if not even one does.
    #[must_use]
    pub fn largest_micro_batch(
        spec: &JobSpec,
        network: &Network,
        ranks: u32,
        most_bytes: u64,
    ) -> u64 {
        let fits = |batch: u64| Self::new(spec, network, ranks, batch).total_bytes <= most_bytes;
        // Memory grows with the batch, so that the largest one is found by halving.
        let (mut least, mut most) = (0_u64, 1 << 24);
        while least < most {
            let middle = (least + most).div_ceil(2);
            if fits(middle) {
                least = middle;
            } else {
                most = middle - 1;
            }
        }
        least
    }
}

/// The least number of micro-batches per virtual rank, above the recipe's, with which every part of `run` stays within
/// `most_bytes`; `network` makes that of a resolution.
pub fn accumulation_that_fits(
    spec: &JobSpec,
    run: &DryRun,
    ranks: u32,
    most_bytes: u64,
    network: impl Fn(u32) -> Option<Network>,
) -> Option<u32> {
    let virtual_ranks = u64::from(spec.train.virtual_ranks);
    let mut spec = spec.clone();
    (spec.train.grad_accumulation + 1..=4_096).find(|parts| {
        spec.train.grad_accumulation = *parts;
        let parts = virtual_ranks * u64::from(*parts);
        run.stretches.iter().all(|stretch| {
            // BatchNorm has no variance of one sample.
            let micro_batch = stretch.global_batch / parts;
            let whole = stretch.global_batch.is_multiple_of(parts) && micro_batch >= 2;
            let fits = |network| {
                Memory::new(&spec, &network, ranks, micro_batch).total_bytes <= most_bytes
            };
            whole && network(stretch.resolution).is_some_and(fits)
        })
    })
}

/// What stays from update to update.
fn state(spec: &JobSpec, network: &Network) -> Vec<Part> {
    let (parameters, kernels) = (network.parameters(), network.kernels());
    let statistics = network.statistics();
    let bytes = value_bytes(spec.precision.compute);
    let has_copy = spec.precision.compute != Compute::Fp32;
    let copy = if has_copy { kernels * bytes } else { 0 };
    let copied = if has_copy { format!(" + {kernels} x {bytes} B") } else { String::new() };
    let mut parts = vec![Part {
        name: "weights",
        bytes: parameters * F32_BYTES,
        how: format!("{parameters} values x {F32_BYTES} B"),
    }];
    if has_copy {
        let how = format!("{kernels} values of convolutions and the linear layer x {bytes} B");
        parts.push(Part { name: "working copy", bytes: copy, how });
    }
    let (moments, rule) = moments(&spec.optimizer);
    parts.push(Part {
        name: "optimizer",
        bytes: moments * parameters * F32_BYTES,
        how: format!("{rule}: {moments} x {parameters} values x {F32_BYTES} B"),
    });
    if spec.ema.is_some() {
        parts.push(Part {
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
        parts.push(Part {
            name: "frozen weights",
            bytes: frozen * F32_BYTES + copy,
            how: format!("{frozen} values x {F32_BYTES} B{copied}"),
        });
    }
    parts.push(Part {
        name: "BatchNorm statistics",
        bytes: 2 * statistics * F32_BYTES,
        how: format!("running and spare: 2 x {statistics} values x {F32_BYTES} B"),
    });
    parts
}

/// Values of the state that a checkpoint holds.
fn copied_values(spec: &JobSpec, network: &Network) -> u64 {
    let (moments, _) = moments(&spec.optimizer);
    let of_a_model = network.parameters() + network.statistics();
    let models = if spec.ema.is_some() { 2 } else { 1 };
    models * of_a_model + moments * network.parameters()
}

/// Values that the update rule keeps per weight, and its name.
fn moments(optimizer: &Optimizer) -> (u64, &'static str) {
    match optimizer {
        Optimizer::Sgd { momentum, .. } if *momentum == 0.0 => (0, "SGD without momentum"),
        Optimizer::Sgd { .. } => (1, "SGD's momentum"),
        Optimizer::AdamW { .. } => (2, "AdamW's two moments"),
        Optimizer::Lars { .. } => (1, "LARS's momentum"),
    }
}

fn recomputed(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!(", computed again: {}", names.join(", ")) }
}

/// Gradients that one of `ranks` holds at a time while it adds up those of its virtual ranks, as
/// `baton_collectives::tree::Fold` does: finished subtrees, and the leaf that comes next.
#[must_use]
pub fn leaves(virtual_ranks: u32, ranks: u32, grad_accumulation: u32) -> u64 {
    let of_rank = |rank| {
        let (mut subtrees, mut most): (Vec<(u32, u32)>, usize) = (Vec::new(), 0);
        for leaf in virtual_block(virtual_ranks, Rank(rank), ranks) {
            most = most.max(subtrees.len() + 1);
            let mut node = (leaf, 1);
            while let Some(&(start, leaves)) = subtrees.last() {
                if leaves != node.1 || !start.is_multiple_of(2 * leaves) {
                    break;
                }
                subtrees.pop();
                node = (start, 2 * leaves);
            }
            subtrees.push(node);
        }
        most
    };
    let most = (0..ranks).map(of_rank).max().unwrap_or_default() as u64;
    // The sum of a virtual rank's micro-batches, beside the next one's.
    most + u64::from(grad_accumulation > 1)
}

/// The most subtrees of the fixed tree (`baton_collectives::tree::maximal_subtrees`) that all ranks but one hold
/// together: what that one receives.
fn subtrees(virtual_ranks: u32, ranks: u32) -> u64 {
    let of_rank = |rank| -> u64 {
        let (mut start, end) = {
            let block = virtual_block(virtual_ranks, Rank(rank), ranks);
            (block.start, block.end)
        };
        let mut count = 0;
        while start < end {
            let fits = 1 << (end - start).ilog2();
            let aligned = if start == 0 { fits } else { 1 << start.trailing_zeros() };
            start += fits.min(aligned);
            count += 1;
        }
        count
    };
    let each: Vec<u64> = (0..ranks).map(of_rank).collect();
    each.iter().sum::<u64>() - each.iter().min().copied().unwrap_or_default()
}

/// Bytes per sample at the moment when activations and their gradients take most.
///
/// The backward pass goes from the last operation to the first and gives free what it is done with. A
/// block that is computed again keeps only its output, until its turn comes.
fn activations(spec: &JobSpec, network: &Network) -> u64 {
    let bytes = value_bytes(spec.precision.compute);
    let (mut before, mut most) = (0, 0);
    for layers in network.layers.chunk_by(|a, b| a.block == b.block) {
        let is_in = |names: &[String]| layers[0].is_in(names);
        let output = layers.last().map_or(0, |layer| layer.outputs * bytes);
        if is_in(&spec.model.freeze) {
            // Nothing is kept but what the next block begins with.
            before = output;
            continue;
        }
        let mut kept = before;
        for layer in layers {
            kept += layer.kept.total_bytes(bytes);
            most = most.max(kept + GRADIENTS_AT_A_TIME * layer.outputs * bytes);
        }
        before = if is_in(&spec.train.recompute) { before + output } else { kept };
    }
    most
}

#[cfg(test)]
mod tests;
