//! Errors of collective operations.

use std::fmt;
use std::io;
use std::time::Duration;

use baton_job::{Generation, Rank, first_names};

use crate::operation;

/// Identity of a process when it joins a group.
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
        write!(f, "rank {rank} of {world_size} in generation {generation} (protocol {protocol})")
    }
}

/// Error of a collective operation. After any of these the group cannot be used any more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A peer closed its connection or left the group: its process has died, or it left because it lost another one.
    #[error("{operation}: lost rank {rank}: {source}")]
    LostPeer {
        /// The lost rank.
        rank: Rank,
        /// The operation.
        operation: &'static str,
        /// Error of the connection.
        source: io::Error,
    },
    /// The deadline for the whole operation passed.
    #[error("{operation}: timed out after {after:?}{}", waiting(.waiting_for))]
    TimedOut {
        /// The operation.
        operation: &'static str,
        /// Ranks that had not done their share, the first [`MAX_UNREACHED`](baton_job::message::MAX_UNREACHED); empty with NCCL.
        waiting_for: Vec<Rank>,
        /// The timeout.
        after: Duration,
    },
    /// [`AbortHandle::abort`](crate::AbortHandle::abort) was called.
    #[error("{operation}: aborted")]
    Aborted {
        /// The operation.
        operation: &'static str,
    },
    /// An earlier operation on this group failed.
    #[error("{operation}: the group failed before; join a new generation")]
    Broken {
        /// The operation.
        operation: &'static str,
    },
    /// The process at a peer's address is not the expected one: one of the two has outdated information.
    #[error(
        "connect: expected {expected}, found {got}; wait for the coordinator's next generation"
    )]
    Refused {
        /// The peer according to the coordinator.
        expected: Membership,
        /// The process that answered.
        got: Membership,
    },
    /// The process at a peer's address claims to be the expected rank and does not know the generation's secret.
    #[error(
        "connect: what answers at the address of rank {rank} does not know the generation's secret, so it is not that \
         rank; find out which program has taken its port"
    )]
    Impostor {
        /// The rank that it claims to be.
        rank: Rank,
    },
    /// Ranks do different things: their operations, lengths or roots differ.
    #[error("{operation}: {detail}")]
    Protocol {
        /// The operation.
        operation: &'static str,
        /// The difference.
        detail: String,
    },
    /// This implementation does not support the request.
    #[error("{operation}: {what}; {remedy}")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// What is not supported.
        what: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// NCCL reported an error.
    #[error("{function}: {name} (code {code}): {detail}")]
    Nccl {
        /// The NCCL function.
        function: &'static str,
        /// `ncclResult_t`.
        code: i32,
        /// Its name.
        name: &'static str,
        /// Its meaning, and NCCL's own last error text if there is one.
        detail: String,
        /// Whether the text reports that GPU memory was exhausted.
        out_of_memory: bool,
    },
    /// `ncclCommAbort` does not return: GPU kernels still wait for lost peers.
    #[error("ncclCommAbort: still busy after {after:?}; kill this process to free its GPU")]
    Stuck {
        /// The timeout.
        after: Duration,
    },
    /// A GPU or its driver failed.
    #[error(transparent)]
    Gpu(#[from] baton_gpu::Error),
    /// A shared library was not found.
    #[error("{library} not found: {remedy}")]
    LibraryMissing {
        /// Its file name.
        library: &'static str,
        /// How to install it.
        remedy: &'static str,
    },
    /// An error of the operating system that concerns no peer.
    #[error("{operation}: {source}")]
    Io {
        /// The operation.
        operation: &'static str,
        /// The error.
        source: io::Error,
    },
}

fn waiting(ranks: &[Rank]) -> String {
    match ranks {
        [] => String::new(),
        [rank] => format!(", waiting for rank {rank}"),
        _ => format!(", waiting for ranks {}", first_names(ranks.iter().map(Rank::to_string), 3)),
    }
}

impl Error {
    /// Whether this process can no longer take part in any group: its GPU's context is lost, or kernels that cannot be
    /// stopped still write to its memory. Only the end of the process frees both.
    #[must_use]
    pub fn ends_process(&self) -> bool {
        const UNHANDLED_CUDA_ERROR: i32 = 1;
        match self {
            Self::Gpu(_) | Self::Stuck { .. } => true,
            Self::Nccl { code, .. } => *code == UNHANDLED_CUDA_ERROR,
            _ => false,
        }
    }

    /// Whether a GPU's memory was exhausted.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Gpu(error) => error.is_out_of_memory(),
            Self::Nccl { out_of_memory, .. } => *out_of_memory,
            _ => false,
        }
    }

    /// Whether every new group would fail too, until a user corrects the machine or the recipe.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        matches!(self, Self::LibraryMissing { .. } | Self::Unsupported { .. })
    }

    /// The ranks that this rank could not connect to, or waited for until the time was over.
    #[must_use]
    pub fn unreached(&self) -> &[Rank] {
        match self {
            Self::TimedOut { waiting_for, .. } => waiting_for,
            Self::LostPeer { operation: operation::CONNECT, rank, .. } => {
                std::slice::from_ref(rank)
            }
            _ => &[],
        }
    }

    /// Whether an address to listen on is not one of this machine.
    #[must_use]
    pub fn is_foreign_address(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::AddrNotAvailable)
    }

    /// For `map_err`: converts an error of the operating system.
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
            name: "test",
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
    fn an_error_of_every_new_group_is_permanent() {
        assert!(Error::LibraryMissing { library: "libnccl.so", remedy: "none" }.is_permanent());
        let what = "nothing";
        let unsupported = Error::Unsupported { operation: "connect", what, remedy: "none" };
        assert!(unsupported.is_permanent() && !unsupported.ends_process());
        assert!(!Error::Broken { operation: "broadcast" }.is_permanent());
    }

    #[test]
    fn an_attempt_to_connect_and_a_wait_in_vain_say_who_was_not_reached() {
        let late = |operation| Error::TimedOut {
            operation,
            waiting_for: vec![Rank(2), Rank(4)],
            after: Duration::from_secs(30),
        };
        let lost = |operation| {
            let source = io::ErrorKind::HostUnreachable.into();
            Error::LostPeer { rank: Rank(1), operation, source }
        };
        for operation in ["connect", "all_reduce"] {
            assert_eq!(late(operation).unreached(), [Rank(2), Rank(4)]);
        }
        assert_eq!(lost("connect").unreached(), [Rank(1)]);
        let others = [lost("broadcast"), Error::Aborted { operation: "connect" }];
        assert!(others.iter().all(|error| error.unreached().is_empty()));
    }

    #[test]
    fn messages_name_rank_operation_and_next_step() {
        let late = |waiting_for| Error::TimedOut {
            operation: "all_reduce",
            waiting_for,
            after: Duration::from_secs(30),
        };
        let ranks = |numbers: &[u32]| numbers.iter().copied().map(Rank).collect::<Vec<_>>();
        for (waiting_for, ending) in [
            (&[][..], ""),
            (&[3], ", waiting for rank 3"),
            (&[3, 5], ", waiting for ranks 3, 5"),
            (&[3, 5, 6, 7], ", waiting for ranks 3, 5, 6 and 1 more"),
        ] {
            let text = late(ranks(waiting_for)).to_string();
            assert_eq!(text, format!("all_reduce: timed out after 30s{ending}"));
        }
        assert_eq!(
            Error::Broken { operation: "broadcast" }.to_string(),
            "broadcast: the group failed before; join a new generation"
        );
    }
}
