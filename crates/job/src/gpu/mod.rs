//! Rules about a node's GPUs: which GPU each rank uses, whether it is healthy, and whether its memory is free.
//!
//! The agent queries NVIDIA's driver through NVML. The decisions are made here, so that they can be tested with fake
//! devices.
//!
//! | module | what it decides |
//! |---|---|
//! | [`visible`] | which device a local rank uses, and the environment variables that select it |
//! | [`health`] | whether a GPU may be used |
//! | [`reclaim`] | whether the memory of a rank that ended is free again |
//! | [`fabric`] | NCCL's settings for the network between nodes |
//! | [`xid`] | what the driver's error numbers mean |

pub mod fabric;
pub mod health;
pub mod reclaim;
pub mod visible;
pub mod xid;

use std::fmt;

/// A GPU, or a part of one (MIG), that one local rank uses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GpuDevice {
    /// The GPU's number as `nvidia-smi` shows it.
    pub gpu: u32,
    /// UUID of the GPU or of the part; unknown if the GPU has fallen off the bus.
    pub uuid: Option<String>,
    /// Whether this is a part of a GPU (MIG).
    pub is_part: bool,
}

impl fmt::Display for GpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.uuid, self.is_part) {
            (Some(uuid), true) => write!(f, "GPU {} (part {uuid})", self.gpu),
            (Some(uuid), false) => write!(f, "GPU {} ({uuid})", self.gpu),
            (None, _) => write!(f, "GPU {}", self.gpu),
        }
    }
}
