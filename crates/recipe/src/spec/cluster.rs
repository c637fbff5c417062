//! Processes and devices.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// Processes and devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cluster {
    /// Minimum number of ranks with which training starts.
    pub min_ranks: u32,
    /// Maximum number of ranks that take part, at most `train.virtual_ranks`; 0 means `train.virtual_ranks`.
    pub max_ranks: u32,
    /// Device of the ranks: `auto` (CUDA if there is a GPU, else CPU), `cpu`, `cuda`.
    pub device: DeviceChoice,
    /// How ranks exchange gradients. `auto`: NCCL on GPUs, else TCP; `tcp`: through host memory; `nccl`: on GPUs
    /// only. All of them keep the strict order.
    pub collective: CollectiveKind,
    /// Add up gradients over the ranks while the backward pass is still computing others: built-in networks on CPUs. It
    /// changes no bit.
    pub overlap: bool,
    /// Threads of libtorch per rank on CPU, 1..1024; results are bit-identical only for the same value.
    pub threads_per_rank: u32,
    /// Time in which a lost node can reconnect before its ranks are treated as lost.
    pub node_grace_seconds: f64,
    /// Longest wait for ranks to start and to connect to each other.
    pub rendezvous_seconds: f64,
    /// Longest wait inside one collective operation.
    pub collective_seconds: f64,
    /// A training rank is killed and replaced if it sends no heartbeat for this time, computes or evaluates one batch
    /// for this time, or waits four times as long for its loader or for a save; 0 is never.
    pub hang_seconds: f64,
    /// Every node keeps a spare process ready, which replaces a rank that dies: it has loaded the libraries and opened
    /// the data, and uses no GPU memory. With `[adapter]` it also holds the frozen weights, in the memory of the host.
    pub warm_spare: bool,
    /// If the coordinator does not answer any more, a node starts another one, which continues the job. Needs several nodes,
    /// and a `checkpoint.dir` outside of the run folder.
    pub standby: bool,
    /// Longest wait for ranks to save and stop after the request.
    pub drain_seconds: f64,
    /// Consecutive generations that may fail without a new step before the job fails.
    pub restart_limit: u32,
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            min_ranks: 1,
            max_ranks: 0,
            device: DeviceChoice::Auto,
            collective: CollectiveKind::Auto,
            overlap: true,
            threads_per_rank: 1,
            node_grace_seconds: 5.0,
            rendezvous_seconds: 120.0,
            collective_seconds: 300.0,
            hang_seconds: 60.0,
            warm_spare: false,
            standby: true,
            drain_seconds: 100.0,
            restart_limit: 3,
        }
    }
}

/// Device of the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// CUDA if there is a GPU, else CPU.
    #[default]
    Auto,
    /// CPU.
    Cpu,
    /// CUDA; an error without a GPU.
    Cuda,
}

/// How ranks exchange gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CollectiveKind {
    /// NCCL on GPUs, else TCP.
    #[default]
    Auto,
    /// Baton's own implementation, over TCP, in host memory.
    Tcp,
    /// NVIDIA's library NCCL, in device memory.
    Nccl,
}

impl JobSpec {
    /// Maximum number of ranks that can take part: each of them needs at least one virtual rank.
    #[must_use]
    pub fn max_ranks(&self) -> u32 {
        match self.cluster.max_ranks {
            0 => self.train.virtual_ranks,
            max => max.min(self.train.virtual_ranks),
        }
    }
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let cluster = &spec.cluster;
    let max = spec.max_ranks();
    rules.check(
        (1..=max).contains(&cluster.min_ranks),
        "cluster.min_ranks",
        cluster.min_ranks,
        &format!("must be 1..{max} (the smaller of cluster.max_ranks and train.virtual_ranks)"),
    );
    rules.check(
        cluster.max_ranks <= spec.train.virtual_ranks,
        "cluster.max_ranks",
        cluster.max_ranks,
        &format!("must not exceed train.virtual_ranks = {}", spec.train.virtual_ranks),
    );
    rules.within("cluster.threads_per_rank", cluster.threads_per_rank, 1..=1024);
    rules.check(
        cluster.hang_seconds == 0.0 || (3.0..=86_400.0).contains(&cluster.hang_seconds),
        "cluster.hang_seconds",
        cluster.hang_seconds,
        "must be 3..86400 seconds, because a rank sends a heartbeat once a second, or 0 for never",
    );
    // Within less than a second, no rank connects, exchanges a gradient or saves.
    for (field, seconds, min) in [
        ("cluster.node_grace_seconds", cluster.node_grace_seconds, 0.0),
        ("cluster.rendezvous_seconds", cluster.rendezvous_seconds, 1.0),
        ("cluster.collective_seconds", cluster.collective_seconds, 1.0),
        ("cluster.drain_seconds", cluster.drain_seconds, 1.0),
    ] {
        rules.check(
            (min..=86_400.0).contains(&seconds),
            field,
            seconds,
            &format!("must be {min}..86400 seconds"),
        );
    }
}
