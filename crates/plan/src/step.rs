//! Time of one step on a machine: passes, gradient sums, all-reduce, optimizer; and the loader's speed.
//!
//! Baton runs the parts one after the other (`crates/trainer/src/step_loop.rs`), so their times add up. The loader
//! works in parallel, so the slower of step and loader decides.
//!
//! Serialized names of fields and variants are part of `baton plan --json`: they are added, never renamed.

use baton_recipe::{
    JobSpec,
    spec::{CollectiveKind, Compute, OptimizerSpec, Resize},
};
use serde::Serialize;

use crate::{
    machine::Machine,
    memory::value_bytes,
    network::Network,
    roofline::{OperationTotals, Roofline, TimeByLimit, total},
};

/// Size of an f32 value: a summed gradient, a weight, a moment.
const F32_BYTES: f64 = 4.0;
/// Speed of the all-reduce over TCP, bytes per second per rank: 102 MB per rank in 0.10 to 0.13 s, between two ranks on
/// one machine (docs/measurements/step.md).
const TCP_BYTES_PER_SECOND: f64 = 0.9e9;
/// Images per second of one decoding thread on one core: JPEGs of 500 px, random crop to 160 px
/// (docs/measurements/loader.md). Raw images are eight times as fast.
const FAST_IMAGES_PER_CORE: f64 = 1_482.0;
/// Images per second of one decoding thread with `data.resize = "area"`.
const AREA_IMAGES_PER_CORE: f64 = 1_252.0;

/// What limits the training speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bottleneck {
    /// Convolutions limited by arithmetic.
    Arithmetic,
    /// BatchNorm, ReLU, additions and small convolutions limited by the memory bandwidth.
    MemoryBandwidth,
    /// The host launches operations more slowly than the GPU runs them.
    Launches,
    /// The all-reduce of gradients between GPUs.
    AllReduce,
    /// Sums of gradients and the update itself.
    Optimizer,
    /// Decoding on the CPUs.
    Loader,
}

impl Bottleneck {
    /// The name shown to users.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Arithmetic => "arithmetic",
            Self::MemoryBandwidth => "memory bandwidth",
            Self::Launches => "kernel launches",
            Self::AllReduce => "all-reduce",
            Self::Optimizer => "optimizer",
            Self::Loader => "data loader",
        }
    }
}

/// Speed of decoding on the CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LoaderEstimate {
    /// Number of decoding threads that have a vCPU.
    pub threads: u32,
    /// Speed of each thread.
    pub images_per_second_and_thread: f64,
    /// Speed of all threads.
    pub images_per_second: f64,
}

impl LoaderEstimate {
    /// Speed of images for `ranks` ranks on `machine`; that of other data is unknown.
    #[must_use]
    pub fn new(spec: &JobSpec, machine: &Machine, ranks: u32) -> Self {
        let threads = machine.vcpus.min(spec.data.decode_threads.saturating_mul(ranks));
        let per_thread = match spec.data.resize {
            Resize::Fast => FAST_IMAGES_PER_CORE,
            Resize::Area => AREA_IMAGES_PER_CORE,
        };
        let images_per_second = f64::from(threads) * per_thread;
        Self { threads, images_per_second_and_thread: per_thread, images_per_second }
    }
}

/// Time of the all-reduce of gradients between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AllReduceEstimate {
    /// Name of the interconnect or protocol.
    pub way: &'static str,
    /// Bytes that each rank sends.
    pub bytes: f64,
    /// Speed of each rank.
    pub bytes_per_second: f64,
    /// Its time.
    pub seconds: f64,
}

impl AllReduceEstimate {
    /// Estimate for `ranks` ranks on `machine`; `None` for a single rank.
    #[must_use]
    pub fn new(spec: &JobSpec, network: &Network, machine: &Machine, ranks: u32) -> Option<Self> {
        let interconnect = machine.interconnect.filter(|_| ranks > 1)?;
        let (way, bytes_per_second) = match spec.cluster.collective {
            CollectiveKind::Auto | CollectiveKind::Nccl => {
                (interconnect.name, interconnect.effective_bandwidth())
            }
            CollectiveKind::Tcp => ("TCP", TCP_BYTES_PER_SECOND),
        };
        let values = (network.parameters() + network.statistics()) as f64;
        let ranks = f64::from(ranks);
        // Patarasuk & Yuan 2009: each rank sends at least this much, for any topology.
        let bytes = 2.0 * (ranks - 1.0) / ranks * values * F32_BYTES;
        Some(Self { way, bytes, bytes_per_second, seconds: bytes / bytes_per_second })
    }
}

/// Time of one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepEstimate {
    /// Number of micro-batches of the rank that has the most.
    pub micro_batches: u64,
    /// Samples per micro-batch.
    pub micro_batch: u64,
    /// Forward and backward pass of one micro-batch, by kind of operation.
    pub pass: Vec<OperationTotals>,
    /// Passes of all micro-batches.
    pub passes: TimeByLimit,
    /// Time to flatten and sum the gradients of the micro-batches.
    pub sum_seconds: f64,
    /// The all-reduce between GPUs; `None` for a single rank.
    pub all_reduce: Option<AllReduceEstimate>,
    /// Memory traffic of the optimizer, bytes.
    pub optimizer_bytes: f64,
    /// Time of the optimizer: gradient norm, clipping, update rule, averaged weights, working copy.
    pub optimizer_seconds: f64,
    /// Time of the whole step.
    pub seconds: f64,
}

impl StepEstimate {
    /// Estimate for `ranks` ranks on `machine`.
    #[must_use]
    pub fn new(
        spec: &JobSpec,
        network: &Network,
        (machine, ranks): (&Machine, u32),
        roofline: &Roofline,
        micro_batch: u64,
    ) -> Self {
        let virtual_ranks = u64::from(spec.train.virtual_ranks.div_ceil(ranks.max(1)));
        let micro_batches = virtual_ranks * u64::from(spec.train.grad_accumulation);
        let pass = roofline.training(spec, network, micro_batch);
        let passes = total(&pass).times(micro_batches as f64);
        let parameters = network.parameters() as f64;
        // Gradients are read in the working format and written in f32; each sum reads two and writes one.
        let flattened = parameters * (value_bytes(spec.precision.compute) as f64 + F32_BYTES);
        let summed = parameters * 3.0 * F32_BYTES * micro_batches.saturating_sub(1) as f64;
        let sum_seconds =
            roofline.move_seconds(flattened * micro_batches as f64 + summed, 2 * micro_batches);
        let all_reduce = AllReduceEstimate::new(spec, network, machine, ranks);
        let optimizer_bytes = optimizer_bytes(spec, network);
        let (_, muon_macs) = network.muon(spec);
        let optimizer_seconds = roofline
            .move_seconds(optimizer_bytes, optimizer_launches(spec, network))
            + roofline.arithmetic_seconds(2.0 * muon_macs as f64);
        let reducing = all_reduce.map_or(0.0, |all_reduce| all_reduce.seconds);
        Self {
            micro_batches,
            micro_batch,
            pass,
            passes,
            sum_seconds,
            all_reduce,
            optimizer_bytes,
            optimizer_seconds,
            seconds: passes.total() + sum_seconds + reducing + optimizer_seconds,
        }
    }

    /// The part that takes the longest.
    #[must_use]
    pub fn limit(&self) -> Bottleneck {
        let reducing = self.all_reduce.map_or(0.0, |all_reduce| all_reduce.seconds);
        let parts = [
            (Bottleneck::Arithmetic, self.passes.arithmetic),
            (Bottleneck::MemoryBandwidth, self.passes.bandwidth),
            (Bottleneck::Launches, self.passes.launches),
            (Bottleneck::AllReduce, reducing),
            (Bottleneck::Optimizer, self.sum_seconds + self.optimizer_seconds),
        ];
        let longest = parts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        longest.map_or(Bottleneck::Arithmetic, |(limit, _)| limit)
    }
}

/// Approximate number of kernels of the optimizer, counted from `crates/trainer/src/torch/optimizer/device.rs`: there are two
/// segments, or one for each tensor.
fn optimizer_launches(spec: &JobSpec, network: &Network) -> u64 {
    match spec.optimizer {
        OptimizerSpec::Sgd { .. } | OptimizerSpec::AdamW { .. } => 2 * 12,
        OptimizerSpec::Lars { .. } => network.tensors() * 20,
        OptimizerSpec::Lamb { .. } => network.tensors() * 30,
        OptimizerSpec::Muon { .. } => 2 * 18 + network.muon(spec).0 * 52,
    }
}

/// Memory traffic of the optimizer, bytes, counted from the kernels of
/// `crates/trainer/src/torch/optimizer/device.rs`.
fn optimizer_bytes(spec: &JobSpec, network: &Network) -> f64 {
    let is_fp16 = spec.precision.compute == Compute::Fp16;
    // Numbers of f32 values read and written per parameter.
    let norm = 1.0;
    let clip = if is_fp16 || spec.train.clip_grad_norm.is_some() { 2.0 } else { 0.0 };
    let mask = if is_fp16 { 2.0 } else { 0.0 };
    let rule = match spec.optimizer {
        OptimizerSpec::Sgd { momentum: 0.0, .. } => 5.0,
        OptimizerSpec::Sgd { nesterov: false, .. } => 11.0,
        OptimizerSpec::Sgd { nesterov: true, .. } => 16.0,
        OptimizerSpec::AdamW { .. } => 24.0,
        OptimizerSpec::Lars { .. } => 14.0,
        OptimizerSpec::Lamb { .. } => 29.0,
        // Without the matrices of the iteration, which are mostly smaller than caches.
        OptimizerSpec::Muon { .. } => 20.0,
    };
    let average = spec.ema.as_ref().map_or(0.0, |ema| 3.0 / f64::from(ema.every_steps));
    let copied = match spec.precision.compute {
        Compute::Fp32 => 0.0,
        _ => network.kernels() as f64 * (F32_BYTES + value_bytes(spec.precision.compute) as f64),
    };
    let accesses = norm + clip + mask + rule + average;
    network.parameters() as f64 * F32_BYTES * accesses + copied
}
