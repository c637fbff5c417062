//! Processes and devices.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// Processes and devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cluster {
    /// Training starts with no fewer ranks.
    pub min_ranks: u32,
    /// Most ranks that take part, at most `train.virtual_ranks`; 0 is as many as those.
    pub max_ranks: u32,
    /// Where ranks compute: `auto` (CUDA where there is a GPU, else CPU), `cpu`, `cuda`.
    pub device: Device,
    /// How ranks exchange gradients. `auto`: NCCL on GPUs, else TCP; `tcp`, through host memory; `nccl`,
    /// on GPUs only. Each keeps the strict order.
    pub collective: CollectiveKind,
    /// libtorch's threads per rank on CPU, 1..1024; results repeat bit by bit only for one value of it.
    pub threads_per_rank: u32,
    /// How long a vanished node may take to come back before its ranks are given up.
    pub node_grace_seconds: f64,
    /// Longest wait for ranks to start and meet.
    pub rendezvous_seconds: f64,
    /// Longest wait inside one collective operation.
    pub collective_seconds: f64,
    /// A rank that trains and has not answered for so long, or computes or evaluates one batch for so
    /// long, or waits four times as long for its loader or for a save, is killed and replaced; 0: never.
    pub hang_seconds: f64,
    /// Every node keeps one more process ready, which takes the place of a rank that dies: it has loaded
    /// the libraries and opened the data, and holds no memory of a GPU.
    pub warm_spare: bool,
    /// Longest wait for ranks to save and stop once asked.
    pub drain_seconds: f64,
    /// Generations in a row that may die without a new step before the job fails.
    pub restart_limit: u32,
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            min_ranks: 1,
            max_ranks: 0,
            device: Device::Auto,
            collective: CollectiveKind::Auto,
            threads_per_rank: 1,
            node_grace_seconds: 5.0,
            rendezvous_seconds: 120.0,
            collective_seconds: 300.0,
            hang_seconds: 60.0,
            warm_spare: false,
            drain_seconds: 100.0,
            restart_limit: 3,
        }
    }
}

/// Where ranks compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// CUDA where there is a GPU, else CPU.
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
    /// Baton's own, over TCP, in host memory.
    Tcp,
    /// NVIDIA's library, in device memory.
    Nccl,
}

impl JobSpec {
    /// The most ranks that can take part: each runs at least one virtual rank.
    #[must_use]
    pub fn max_ranks(&self) -> u32 {
        match self.cluster.max_ranks {
            0 => self.train.virtual_ranks,
            most => most.min(self.train.virtual_ranks),
        }
    }
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let cluster = &spec.cluster;
    let most = spec.max_ranks();
    rules.check(
        (1..=most).contains(&cluster.min_ranks),
        "cluster.min_ranks",
        cluster.min_ranks,
        &format!("must be 1..{most} (the lesser of cluster.max_ranks and train.virtual_ranks)"),
    );
    rules.check(
        cluster.max_ranks <= spec.train.virtual_ranks,
        "cluster.max_ranks",
        cluster.max_ranks,
        &format!("must not exceed train.virtual_ranks = {}", spec.train.virtual_ranks),
    );
    rules.check(
        (1..=1024).contains(&cluster.threads_per_rank),
        "cluster.threads_per_rank",
        cluster.threads_per_rank,
        "must be 1..1024",
    );
    rules.check(
        cluster.hang_seconds == 0.0 || (3.0..=86_400.0).contains(&cluster.hang_seconds),
        "cluster.hang_seconds",
        cluster.hang_seconds,
        "must be 3..86400 seconds, as a rank tells once a second that it lives, or 0 for never",
    );
    for (field, seconds) in [
        ("cluster.node_grace_seconds", cluster.node_grace_seconds),
        ("cluster.rendezvous_seconds", cluster.rendezvous_seconds),
        ("cluster.collective_seconds", cluster.collective_seconds),
        ("cluster.drain_seconds", cluster.drain_seconds),
    ] {
        rules.check(
            (0.0..=86_400.0).contains(&seconds),
            field,
            seconds,
            "must be 0..86400 seconds",
        );
    }
}
