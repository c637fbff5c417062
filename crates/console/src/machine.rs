//! What libtorch and NVIDIA's driver offer on a machine: `baton-worker machine` prints it, `baton doctor` reads it.

use serde::{Deserialize, Serialize};

/// A machine, as a rank would find it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Version of libtorch, e.g. `2.11.0`.
    pub libtorch: String,
    /// Number of processor cores that a process may use.
    pub cores: u64,
    /// Bytes of memory, and those that are available; in a container, within its limit.
    pub memory_bytes: u64,
    /// See `memory_bytes`.
    pub memory_available_bytes: u64,
    /// Version of NVIDIA's driver; `None` without one.
    pub driver: Option<String>,
    /// The GPUs that the driver shows.
    pub gpus: Vec<ShownGpu>,
    /// Why ranks cannot use the GPUs, with a remedy.
    pub gpu_problem: Option<String>,
    /// Version of NCCL; `None` if it is not installed.
    pub nccl: Option<String>,
}

/// A GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownGpu {
    /// The driver's name of the model.
    pub name: String,
    /// Bytes of memory, and those that no process uses.
    pub memory_bytes: u64,
    /// See `memory_bytes`.
    pub memory_free_bytes: u64,
    /// Compute capability: major and minor number.
    pub compute: Option<(i32, i32)>,
}
