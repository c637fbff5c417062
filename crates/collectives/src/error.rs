//! Why an operation failed, and what to do about it.

use std::fmt;
use std::io;
use std::time::Duration;

use baton_job::{Generation, Rank};

/// Who a process says it is when it joins a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Version of the wire protocol.
    pub protocol: u32,
    /// Its generation.
    pub generation: Generation,
    /// Its rank.
    pub rank: Rank,
    /// Number of ranks in its group.
    pub world_size: u32,
}

impl fmt::Display for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { protocol, generation, rank, world_size } = self;
        write!(
            f,
            "rank {rank} of {world_size} in generation {generation}, speaking protocol {protocol}"
        )
    }
}

/// Why a collective operation failed. After any of these the group is of no use any more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A peer closed its connection or dropped its member: most likely its process died.
    #[error("{operation}: lost rank {rank}: {source}")]
    LostPeer {
        /// Who is gone.
        rank: Rank,
        /// During what.
        operation: &'static str,
        /// What the connection said.
        source: io::Error,
    },
    /// The deadline for the whole operation passed.
    #[error("{operation}: gave up after {after:?}{}", waiting(.waiting_for))]
    TimedOut {
        /// During what.
        operation: &'static str,
        /// A rank that had not done its share; unknown with NCCL.
        waiting_for: Option<Rank>,
        /// The time allowed.
        after: Duration,
    },
    /// [`AbortHandle::abort`](crate::AbortHandle::abort) was called.
    #[error("{operation}: aborted")]
    Aborted {
        /// During what.
        operation: &'static str,
    },
    /// An earlier operation on this group failed.
    #[error("{operation}: the group failed before; join a new generation")]
    Broken {
        /// What was tried.
        operation: &'static str,
    },
    /// The process at a peer's address is not who it should be: one side has stale news.
    #[error("connect: expected {expected}, met {got}; wait for the coordinator's next generation")]
    Refused {
        /// The peer as the plan has it.
        expected: Membership,
        /// Who answered.
        got: Membership,
    },
    /// Ranks do not do the same things: their operations, lengths or roots differ.
    #[error("{operation}: {detail}")]
    Protocol {
        /// During what.
        operation: &'static str,
        /// What differs from what.
        detail: String,
    },
    /// This implementation cannot do that.
    #[error("{operation}: {what}; {remedy}")]
    Unsupported {
        /// What was tried.
        operation: &'static str,
        /// What it cannot do.
        what: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// NCCL refused.
    #[error("{function}: {name} (code {code}): {detail}")]
    Nccl {
        /// NCCL's function.
        function: &'static str,
        /// `ncclResult_t`.
        code: i32,
        /// Its name.
        name: &'static str,
        /// Its meaning, and NCCL's own last words if it has any.
        detail: String,
        /// Whether these say that the GPU's memory was too small.
        out_of_memory: bool,
    },
    /// `ncclCommAbort` does not return: GPU kernels still wait for lost peers.
    #[error("ncclCommAbort: still busy after {after:?}; kill this process to free its GPU")]
    Stuck {
        /// The time allowed.
        after: Duration,
    },
    /// A GPU or its driver refused.
    #[error(transparent)]
    Gpu(#[from] baton_gpu::Error),
    /// A shared library cannot be found.
    #[error("{library} not found: {remedy}")]
    LibraryMissing {
        /// File name looked for.
        library: &'static str,
        /// How to get it.
        remedy: &'static str,
    },
    /// The operating system refused something that concerns no peer.
    #[error("{operation}: {source}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The reason.
        source: io::Error,
    },
}

fn waiting(rank: &Option<Rank>) -> String {
    rank.map(|rank| format!(", waiting for rank {rank}")).unwrap_or_default()
}

impl Error {
    /// Whether this process can take part in nothing any more: its GPU's context is lost, or kernels that nobody
    /// could stop still write to its memory. Only its end frees both.
    #[must_use]
    pub fn ends_process(&self) -> bool {
        const UNHANDLED_CUDA_ERROR: i32 = 1;
        match self {
            Self::Gpu(_) | Self::Stuck { .. } => true,
            Self::Nccl { code, .. } => *code == UNHANDLED_CUDA_ERROR,
            _ => false,
        }
    }

    /// Whether a GPU's memory was too small.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Gpu(error) => error.is_out_of_memory(),
            Self::Nccl { out_of_memory, .. } => *out_of_memory,
            _ => false,
        }
    }

    /// Whether it will be so with every other group too, until somebody mends the machine or the recipe.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        matches!(self, Self::LibraryMissing { .. } | Self::Unsupported { .. })
    }

    /// For `map_err`: the operating system refused.
    pub(crate) fn io(operation: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { operation, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_gpu_ends_the_process_and_a_lost_peer_does_not() {
        let nccl = |code| Error::Nccl {
            function: "ncclAllReduce",
            code,
            name: "of a test",
            detail: String::new(),
            out_of_memory: false,
        };
        assert!(nccl(1).ends_process() && !nccl(6).ends_process());
        assert!(Error::Stuck { after: Duration::from_secs(5) }.ends_process());
        assert!(!Error::Aborted { operation: "all_reduce" }.ends_process());
        let gpu = baton_gpu::Error::LibraryMissing { library: "libcuda.so", remedy: "none" };
        assert!(Error::from(gpu).ends_process());
    }

    #[test]
    fn what_no_other_group_can_cure_is_lasting() {
        assert!(Error::LibraryMissing { library: "libnccl.so", remedy: "none" }.is_lasting());
        let what = "nothing";
        let unsupported = Error::Unsupported { operation: "connect", what, remedy: "none" };
        assert!(unsupported.is_lasting() && !unsupported.ends_process());
        assert!(!Error::Broken { operation: "broadcast" }.is_lasting());
    }

    #[test]
    fn messages_tell_who_what_and_the_next_move() {
        let late = |waiting_for| Error::TimedOut {
            operation: "all_reduce",
            waiting_for,
            after: Duration::from_secs(30),
        };
        assert_eq!(
            late(Some(Rank(3))).to_string(),
            "all_reduce: gave up after 30s, waiting for rank 3"
        );
        assert_eq!(late(None).to_string(), "all_reduce: gave up after 30s");
        assert_eq!(
            Error::Broken { operation: "broadcast" }.to_string(),
            "broadcast: the group failed before; join a new generation"
        );
    }
}
