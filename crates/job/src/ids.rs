//! Identifiers and numbers as distinct types, so that the compiler rejects a rank where a step is expected.

use std::fmt;

use baton_recipe::count;
use serde::{Deserialize, Serialize};

count! {
    /// Number of a training process in its generation, `0..world_size`.
    Rank(u32)
}
count! {
    /// Number of a training process on its node; on a GPU node also its CUDA device.
    LocalRank(u32)
}
count! {
    /// Number of one membership of ranks. Every message carries it; messages of an older generation are rejected and
    /// counted.
    Generation(u64)
}
count! {
    /// Number of one connection of an agent to the coordinator; a reconnect gets a new number.
    Attachment(u64)
}
count! {
    /// Process number: counts the processes started in one slot. It increases with every spawn, so that a late
    /// message of a dead process is never attributed to the process that replaced it.
    Incarnation(u64)
}

/// Name of a node: unique in the job, unchanged when its agent restarts (by default the host name).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub String);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Identity of a job, unchanged when processes or machines restart. The default value identifies no job.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct JobId(pub uuid::Uuid);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
