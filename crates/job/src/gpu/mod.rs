//! A node's GPUs: which of them its ranks have, whether they are well, and whether they are free.
//!
//! The agent asks NVIDIA's driver through NVML and passes on what it is told; what follows is decided here, so that
//! it is tested with made-up devices.
//!
//! | module | what it decides |
//! |---|---|
//! | [`visible`] | which device a local rank has, and in which words its process is told |
//! | [`health`] | whether a GPU may take part |
//! | [`reclaim`] | whether the memory of a rank that ended is free again |
//! | [`fabric`] | what NCCL is told of the network between nodes |
//! | [`xid`] | what the driver's error numbers mean |

pub mod fabric;
pub mod health;
pub mod reclaim;
pub mod visible;
pub mod xid;

use std::fmt;

/// A GPU, or a part of one (MIG), that one local rank has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Device {
    /// The GPU's number as `nvidia-smi` has it.
    pub gpu: u32,
    /// Its UUID, or that of the part; unknown of a GPU that has fallen off the bus.
    pub uuid: Option<String>,
    /// Whether it is a part of its GPU.
    pub is_part: bool,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.uuid, self.is_part) {
            (Some(uuid), true) => write!(f, "GPU {} (part {uuid})", self.gpu),
            (Some(uuid), false) => write!(f, "GPU {} ({uuid})", self.gpu),
            (None, _) => write!(f, "GPU {}", self.gpu),
        }
    }
}
