//! The field's words as types, so that a rank is never mistaken for a step.

use std::fmt;

use baton_recipe::count;
use serde::{Deserialize, Serialize};

count! {
    /// A training process's number in its generation, `0..world_size`.
    Rank(u32)
}
count! {
    /// A training process's number on its node; on a GPU node also its CUDA device.
    LocalRank(u32)
}
count! {
    /// One membership of ranks. Every message carries it; stale ones are refused and counted.
    Generation(u64)
}
count! {
    /// One connection of an agent to the coordinator; a reconnect gets a new one.
    Attachment(u64)
}
count! {
    /// One process in a local rank's place: it grows with every spawn, so that the last words of a
    /// dead process are never taken for its successor's.
    Incarnation(u64)
}

/// A node's name: unique in the job, stable over restarts of its agent (by default the host name).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub String);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A job's identity for its whole life, over restarts of every process and machine. The default one is no
/// job's.
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
