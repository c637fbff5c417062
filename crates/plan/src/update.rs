//! One optimizer update on a machine: passes, sums, all-reduce, optimizer, and the loader beside them.
//!
//! Baton does these one after the other (`crates/trainer/src/step_loop.rs`), so their times add up; the
//! loader works meanwhile, so the slower of the two decides.

use baton_recipe::{
    JobSpec, Sees,
    spec::{CollectiveKind, Compute, Optimizer, Resize},
};
use serde::Serialize;

use crate::{
    machine::Machine,
    memory::value_bytes,
    network::Network,
    roofline::{Roofline, Row, Seconds, total},
};

/// Bytes of a gradient that is added up, a weight, a moment.
const F32_BYTES: f64 = 4.0;
/// Bytes per second and rank of the all-reduce over TCP: 102 MB per rank in 0.10 to 0.13 s,
/// between two ranks on one machine (docs/measurements/step.md).
const TCP_BYTES_PER_SECOND: f64 = 0.9e9;
/// Images per second of one decoding thread on a core of its own: JPEGs of 500 px, random crop to
/// 160 px (docs/measurements/loader.md). Raw images are eight times as fast.
const FAST_IMAGES_PER_CORE: f64 = 1_482.0;
/// The same with `data.resize = "area"`.
const AREA_IMAGES_PER_CORE: f64 = 1_252.0;

/// What keeps training from being faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Convolutions that wait for arithmetic.
    Arithmetic,
    /// BatchNorm, ReLU, sums and small convolutions that wait for the GPU's memory.
    MemoryBandwidth,
    /// The host, which starts operations more slowly than the GPU does them.
    Launches,
    /// Gradients between GPUs.
    AllReduce,
    /// Sums of gradients and the update itself.
    Optimizer,
    /// Decoding on the CPUs.
    Loader,
}

impl Limit {
    /// For people.
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

/// What the CPUs can decode.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Loader {
    /// Threads that have a vCPU.
    pub threads: u32,
    /// Of each.
    pub images_per_second_and_thread: f64,
    /// Of all.
    pub images_per_second: f64,
}

impl Loader {
    /// Of `ranks` on `machine`; nothing is known of signals.
    #[must_use]
    pub fn new(spec: &JobSpec, machine: &Machine, ranks: u32) -> Option<Self> {
        if spec.model.arch.sees() == Sees::Signals {
            return None;
        }
        let threads = machine.vcpus.min(spec.data.decode_threads.saturating_mul(ranks));
        let of_one = match spec.data.resize {
            Resize::Fast => FAST_IMAGES_PER_CORE,
            Resize::Area => AREA_IMAGES_PER_CORE,
        };
        let images_per_second = f64::from(threads) * of_one;
        Some(Self { threads, images_per_second_and_thread: of_one, images_per_second })
    }
}

/// Gradients on their way between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AllReduce {
    /// By what.
    pub way: &'static str,
    /// Sent by each rank.
    pub bytes: f64,
    /// Reached.
    pub bytes_per_second: f64,
    /// How long it takes.
    pub seconds: f64,
}

impl AllReduce {
    /// Between `ranks` on `machine`; a rank alone has none.
    #[must_use]
    pub fn new(spec: &JobSpec, network: &Network, machine: &Machine, ranks: u32) -> Option<Self> {
        let interconnect = machine.interconnect.filter(|_| ranks > 1)?;
        let (way, bytes_per_second) = match spec.cluster.collective {
            CollectiveKind::Auto | CollectiveKind::Nccl => {
                (interconnect.name, interconnect.reached())
            }
            CollectiveKind::Tcp => ("TCP", TCP_BYTES_PER_SECOND),
        };
        let values = (network.parameters() + network.statistics()) as f64;
        let ranks = f64::from(ranks);
        // Patarasuk & Yuan 2009: each rank sends this much whatever the topology, at least.
        let bytes = 2.0 * (ranks - 1.0) / ranks * values * F32_BYTES;
        Some(Self { way, bytes, bytes_per_second, seconds: bytes / bytes_per_second })
    }
}

/// One update.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Update {
    /// Micro-batches of the rank that has most.
    pub micro_batches: u64,
    /// Samples in each.
    pub micro_batch: u64,
    /// One micro-batch, forward and backward, by kind of operation.
    pub pass: Vec<Row>,
    /// All micro-batches.
    pub passes: Seconds,
    /// Gradients laid in a row and added up.
    pub sum_seconds: f64,
    /// Gradients between GPUs.
    pub all_reduce: Option<AllReduce>,
    /// Bytes that the update itself moves.
    pub optimizer_bytes: f64,
    /// Norm, clipping, rule, average, working copy.
    pub optimizer_seconds: f64,
    /// All of that.
    pub seconds: f64,
}

impl Update {
    /// By `ranks` on `machine`.
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
        // Read in the working format, written in f32; each sum reads two and writes one.
        let gathered = parameters * (value_bytes(spec.precision.compute) as f64 + F32_BYTES);
        let added = parameters * 3.0 * F32_BYTES * micro_batches.saturating_sub(1) as f64;
        let sum_seconds =
            roofline.moving(gathered * micro_batches as f64 + added, 2 * micro_batches);
        let all_reduce = AllReduce::new(spec, network, machine, ranks);
        let optimizer_bytes = optimizer_bytes(spec, network);
        let optimizer_seconds = roofline.moving(optimizer_bytes, OPTIMIZER_LAUNCHES);
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

    /// The longest part.
    #[must_use]
    pub fn limit(&self) -> Limit {
        let reducing = self.all_reduce.map_or(0.0, |all_reduce| all_reduce.seconds);
        let parts = [
            (Limit::Arithmetic, self.passes.arithmetic),
            (Limit::MemoryBandwidth, self.passes.bandwidth),
            (Limit::Launches, self.passes.launches),
            (Limit::AllReduce, reducing),
            (Limit::Optimizer, self.sum_seconds + self.optimizer_seconds),
        ];
        let longest = parts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        longest.map_or(Limit::Arithmetic, |(limit, _)| limit)
    }
}

/// Kernels of an update, about: `crates/trainer/src/torch/optimizer/device.rs` has a dozen per segment,
/// and there are two segments.
const OPTIMIZER_LAUNCHES: u64 = 24;

/// Bytes that an update moves, by the kernels of `crates/trainer/src/torch/optimizer/device.rs`.
fn optimizer_bytes(spec: &JobSpec, network: &Network) -> f64 {
    let is_fp16 = spec.precision.compute == Compute::Fp16;
    let norm = 1.0;
    let clip = if is_fp16 || spec.train.clip_grad_norm.is_some() { 2.0 } else { 0.0 };
    let mask = if is_fp16 { 2.0 } else { 0.0 };
    let rule = match spec.optimizer {
        Optimizer::Sgd { momentum: 0.0, .. } => 5.0,
        Optimizer::Sgd { nesterov: false, .. } => 11.0,
        Optimizer::Sgd { nesterov: true, .. } => 16.0,
        Optimizer::AdamW { .. } => 24.0,
        Optimizer::Lars { .. } => 14.0,
    };
    let average = spec.ema.as_ref().map_or(0.0, |ema| 3.0 / f64::from(ema.every_steps));
    let copied = match spec.precision.compute {
        Compute::Fp32 => 0.0,
        _ => network.kernels() as f64 * (F32_BYTES + value_bytes(spec.precision.compute) as f64),
    };
    let touched = norm + clip + mask + rule + average;
    network.parameters() as f64 * F32_BYTES * touched + copied
}
