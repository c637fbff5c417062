//! Time of a pass on a GPU. An operation takes as long as its arithmetic, its memory traffic or its launch, whichever
//! is longest (Williams et al. 2009, "Roofline").
//!
//! Three efficiencies and the launch time are not from any data sheet. They are chosen so that ResNet-50 at 224 px and
//! batch 256 is within a tenth of what NVIDIA published for one GPU in `NVIDIA/DeepLearningExamples` (PyTorch,
//! ResNet-50 v1.5, container 21.03, commit 291f0d02): V100 16 GB 1,200 images/s in fp16 and 367 in fp32, A100 80 GB
//! 2,470 in mixed precision. Baton has not been measured on these GPUs; `--calibration` replaces the estimates with a
//! measurement.
//!
//! Serialized names of fields and variants are part of `baton plan --json`: they are added, never renamed.

use baton_recipe::{JobSpec, spec::Compute};
use serde::Serialize;

use crate::{
    gpu::Gpu,
    layer::{OperationKind, PassCost},
    memory::value_bytes,
    network::Network,
};

/// Share of the peak that convolutions reach on tensor cores.
pub const TENSOR_CORE_EFFICIENCY: f64 = 0.5;
/// Share of the peak that convolutions reach in plain fp32, where cuDNN saves multiplications (Winograd).
pub const FP32_EFFICIENCY: f64 = 0.85;
/// Share of the peak memory bandwidth that is reached.
pub const BANDWIDTH_EFFICIENCY: f64 = 0.8;
/// Time that the host needs to launch one operation, seconds.
pub const LAUNCH_SECONDS: f64 = 10e-6;

/// Time of operations, seconds, by what limits their speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TimeByLimit {
    /// Operations limited by arithmetic.
    pub arithmetic: f64,
    /// Operations limited by the memory bandwidth.
    pub bandwidth: f64,
    /// Operations that end before the host has launched the next one.
    pub launches: f64,
}

impl TimeByLimit {
    /// Time of all operations.
    #[must_use]
    pub fn total(self) -> f64 {
        self.arithmetic + self.bandwidth + self.launches
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            arithmetic: self.arithmetic + other.arithmetic,
            bandwidth: self.bandwidth + other.bandwidth,
            launches: self.launches + other.launches,
        }
    }

    pub(crate) fn times(self, factor: f64) -> Self {
        Self {
            arithmetic: self.arithmetic * factor,
            bandwidth: self.bandwidth * factor,
            launches: self.launches * factor,
        }
    }
}

/// Totals of all operations of one kind in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OperationTotals {
    /// Kind of the operations.
    pub kind: OperationKind,
    /// Floating-point operations.
    pub flop: f64,
    /// Memory traffic, bytes.
    pub bytes: f64,
    /// Their time.
    pub seconds: TimeByLimit,
}

/// Speed of a GPU in a recipe's number format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Achieved floating-point operations per second.
    pub flop_per_second: f64,
    /// Achieved memory bandwidth, bytes per second.
    pub bytes_per_second: f64,
    /// Size of a value, bytes.
    value_bytes: u64,
    /// Time that the host needs to launch an operation, seconds.
    launch_seconds: f64,
    /// Measured time divided by this model's time; 1 without a calibration.
    pub calibration: f64,
}

impl Roofline {
    /// The speed of `gpu`, without a calibration.
    #[must_use]
    pub fn new(gpu: &Gpu, compute: Compute) -> Self {
        let arithmetic = gpu.arithmetic(compute);
        let efficiency =
            if arithmetic.tensor_cores { TENSOR_CORE_EFFICIENCY } else { FP32_EFFICIENCY };
        Self {
            flop_per_second: arithmetic.peak * efficiency,
            bytes_per_second: gpu.bandwidth * BANDWIDTH_EFFICIENCY,
            value_bytes: value_bytes(compute),
            launch_seconds: LAUNCH_SECONDS,
            calibration: 1.0,
        }
    }

    /// The speed of a device that always reaches these measured peaks, with no launch time: a lower bound for times.
    #[must_use]
    pub fn of_peaks(flop_per_second: f64, bytes_per_second: f64, compute: Compute) -> Self {
        let (value_bytes, launch_seconds) = (value_bytes(compute), 0.0);
        Self { flop_per_second, bytes_per_second, value_bytes, launch_seconds, calibration: 1.0 }
    }

    /// Forward and backward pass over `samples` samples, by kind of operation.
    #[must_use]
    pub fn training(
        &self,
        spec: &JobSpec,
        network: &Network,
        samples: u64,
    ) -> Vec<OperationTotals> {
        let costs = network.layers.iter().flat_map(|layer| {
            let passes = if layer.is_in(&spec.model.freeze) {
                vec![layer.evaluation]
            } else {
                let mut passes = vec![layer.forward; network.forward_passes(spec, layer)];
                passes.push(layer.backward);
                passes
            };
            passes.into_iter().map(|cost| (layer.kind, cost))
        });
        self.totals(costs, samples)
    }

    /// Forward pass of an evaluation over `samples` samples, by kind of operation.
    #[must_use]
    pub fn evaluation(&self, network: &Network, samples: u64) -> Vec<OperationTotals> {
        self.totals(network.layers.iter().map(|layer| (layer.kind, layer.evaluation)), samples)
    }

    /// Time, in seconds, of `launches` operations that only move `bytes` bytes to and from memory.
    #[must_use]
    pub fn move_seconds(&self, bytes: f64, launches: u64) -> f64 {
        let launching = launches as f64 * self.launch_seconds;
        self.calibration * (bytes / self.bytes_per_second).max(launching)
    }

    /// Time of products of large matrices, in seconds.
    #[must_use]
    pub fn arithmetic_seconds(&self, flop: f64) -> f64 {
        self.calibration * flop / self.flop_per_second
    }

    fn totals(
        &self,
        costs: impl Iterator<Item = (OperationKind, PassCost)>,
        samples: u64,
    ) -> Vec<OperationTotals> {
        let mut rows: Vec<OperationTotals> = Vec::new();
        for (kind, cost) in costs {
            let index = rows.binary_search_by_key(&kind, |row| row.kind).unwrap_or_else(|index| {
                rows.insert(
                    index,
                    OperationTotals {
                        kind,
                        flop: 0.0,
                        bytes: 0.0,
                        seconds: TimeByLimit::default(),
                    },
                );
                index
            });
            let flop = 2.0 * cost.macs as f64 * samples as f64;
            let bytes = cost.traffic.total_bytes(self.value_bytes).saturating_mul(samples);
            let bytes = bytes.saturating_add(cost.bytes_per_pass) as f64;
            rows[index].flop += flop;
            rows[index].bytes += bytes;
            rows[index].seconds =
                rows[index].seconds.plus(self.seconds(flop, bytes, cost.launches));
        }
        rows
    }

    fn seconds(&self, flop: f64, bytes: f64, launches: u64) -> TimeByLimit {
        let arithmetic = flop / self.flop_per_second;
        let bandwidth = bytes / self.bytes_per_second;
        let launching = launches as f64 * self.launch_seconds;
        let zero = TimeByLimit::default();
        let seconds = if launching >= arithmetic.max(bandwidth) {
            TimeByLimit { launches: launching, ..zero }
        } else if arithmetic >= bandwidth {
            TimeByLimit { arithmetic, ..zero }
        } else {
            TimeByLimit { bandwidth, ..zero }
        };
        seconds.times(self.calibration)
    }
}

/// Time of all kinds of operations together.
#[must_use]
pub fn total(rows: &[OperationTotals]) -> TimeByLimit {
    rows.iter().fold(TimeByLimit::default(), |sum, row| sum.plus(row.seconds))
}

#[cfg(test)]
mod tests;
