//! How long a GPU takes: each operation as long as its arithmetic, its traffic with memory or its start,
//! whichever is longest (Williams et al. 2009, "Roofline").
//!
//! Three shares of the data sheet's figures and one time are not from any data sheet. They are chosen so
//! that ResNet-50 at 224 px and batch 256 comes within a tenth of what NVIDIA published for one GPU in
//! `NVIDIA/DeepLearningExamples` (PyTorch, ResNet-50 v1.5, container 21.03, commit 291f0d02): V100 16 GB
//! 1,200 images/s in fp16 and 367 in fp32, A100 80 GB 2,470 in mixed precision. Nobody has measured
//! Baton on these GPUs; `--calibration` takes their place where somebody has.

use baton_recipe::{JobSpec, spec::Compute};
use serde::Serialize;

use crate::{
    gpu::Gpu,
    layer::{Kind, Work},
    memory::value_bytes,
    network::Network,
};

/// Share of the peak that convolutions reach on tensor cores.
pub const TENSOR_CORE_EFFICIENCY: f64 = 0.5;
/// Share of the peak that they reach in plain fp32, where cuDNN saves multiplications (Winograd).
pub const FP32_EFFICIENCY: f64 = 0.85;
/// Share of the memory's bandwidth that is reached.
pub const BANDWIDTH_EFFICIENCY: f64 = 0.8;
/// Time in which the host starts one operation.
pub const LAUNCH_SECONDS: f64 = 10e-6;

/// Seconds by what bounds them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Seconds {
    /// Operations that wait for arithmetic.
    pub arithmetic: f64,
    /// Operations that wait for the GPU's memory.
    pub bandwidth: f64,
    /// Operations that are over before the host has started the next one.
    pub launches: f64,
}

impl Seconds {
    /// Of all operations.
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

/// All operations of one kind in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Which.
    pub kind: Kind,
    /// Floating-point operations.
    pub flop: f64,
    /// To and from memory.
    pub bytes: f64,
    /// How long they take.
    pub seconds: Seconds,
}

/// A GPU with a recipe's number format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Floating-point operations per second, reached.
    pub flop_per_second: f64,
    /// To and from memory, reached.
    pub bytes_per_second: f64,
    /// Of a value.
    value_bytes: u64,
    /// In which the host starts an operation.
    launch_seconds: f64,
    /// Measured seconds for each one of this model.
    pub calibration: f64,
}

impl Roofline {
    /// Without a calibration.
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

    /// That of a device which reached these rates, all of them at any time: nothing is faster.
    #[must_use]
    pub fn of_peaks(flop_per_second: f64, bytes_per_second: f64, compute: Compute) -> Self {
        let (value_bytes, launch_seconds) = (value_bytes(compute), 0.0);
        Self { flop_per_second, bytes_per_second, value_bytes, launch_seconds, calibration: 1.0 }
    }

    /// Forward and backward pass over `samples`, by kind.
    #[must_use]
    pub fn training(&self, spec: &JobSpec, network: &Network, samples: u64) -> Vec<Row> {
        let works = network.layers.iter().flat_map(|layer| {
            let passes = match () {
                () if layer.is_in(&spec.model.freeze) => vec![layer.evaluation],
                () if layer.is_in(&spec.train.recompute) => {
                    vec![layer.forward, layer.forward, layer.backward]
                }
                () => vec![layer.forward, layer.backward],
            };
            passes.into_iter().map(|work| (layer.kind, work))
        });
        self.rows(works, samples)
    }

    /// Forward pass of an evaluation over `samples`, by kind.
    #[must_use]
    pub fn evaluation(&self, network: &Network, samples: u64) -> Vec<Row> {
        self.rows(network.layers.iter().map(|layer| (layer.kind, layer.evaluation)), samples)
    }

    /// So many bytes to and from memory, by so many operations.
    #[must_use]
    pub fn moving(&self, bytes: f64, launches: u64) -> f64 {
        let launching = launches as f64 * self.launch_seconds;
        self.calibration * (bytes / self.bytes_per_second).max(launching)
    }

    fn rows(&self, works: impl Iterator<Item = (Kind, Work)>, samples: u64) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        for (kind, work) in works {
            let at = rows.binary_search_by_key(&kind, |row| row.kind).unwrap_or_else(|at| {
                rows.insert(at, Row { kind, flop: 0.0, bytes: 0.0, seconds: Seconds::default() });
                at
            });
            let flop = 2.0 * work.macs as f64 * samples as f64;
            let bytes = (work.traffic.total_bytes(self.value_bytes) * samples) as f64;
            rows[at].flop += flop;
            rows[at].bytes += bytes;
            rows[at].seconds = rows[at].seconds.plus(self.seconds(flop, bytes, work.launches));
        }
        rows
    }

    fn seconds(&self, flop: f64, bytes: f64, launches: u64) -> Seconds {
        let arithmetic = flop / self.flop_per_second;
        let bandwidth = bytes / self.bytes_per_second;
        let starting = launches as f64 * self.launch_seconds;
        let bound = Seconds::default();
        let bound = if starting >= arithmetic.max(bandwidth) {
            Seconds { launches: starting, ..bound }
        } else if arithmetic >= bandwidth {
            Seconds { arithmetic, ..bound }
        } else {
            Seconds { bandwidth, ..bound }
        };
        bound.times(self.calibration)
    }
}

/// All kinds together.
#[must_use]
pub fn total(rows: &[Row]) -> Seconds {
    rows.iter().fold(Seconds::default(), |sum, row| sum.plus(row.seconds))
}

#[cfg(test)]
mod tests;
