//! Errors of training, and the exit class of each.

use baton_job::{
    Rank,
    exit::{Class, Failure},
};
use baton_recipe::guard::Diagnosis;

use crate::learner::{self, MemoryKind};

/// Error that ends training before the job is done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A collective operation failed. If only the other ranks were lost, this rank keeps its state, and a new
    /// generation can continue from it: see [`is_peer_loss`](Self::is_peer_loss).
    #[error(transparent)]
    Collective(#[from] baton_collectives::Error),
    /// A sample cannot be read.
    #[error(transparent)]
    Data(#[from] baton_data::Error),
    /// A checkpoint cannot be read, or the last one cannot be written.
    #[error(transparent)]
    Checkpoint(#[from] baton_checkpoint::Error),
    /// The model failed.
    #[error(transparent)]
    Learner(#[from] learner::Error),
    /// The recipe does not fit its data or the checkpoint.
    #[error("{0}")]
    Mismatch(String),
    /// An internal rule of Baton was violated.
    #[error("{0}; this is a bug in Baton, please report it")]
    Bug(&'static str),
    /// Another rank cannot do its share of the work.
    #[error("rank {rank} cannot continue: {problem}")]
    Peer {
        /// The rank.
        rank: usize,
        /// The problem that it reported.
        problem: String,
    },
    /// Another rank has other inputs than the ranks that hold the state: it fails, and this rank keeps its state.
    #[error("rank {rank} cannot take part: {problem}")]
    Misfit {
        /// The rank.
        rank: usize,
        /// How its inputs differ.
        problem: String,
    },
    /// Training diverged: all ranks detected it at this update. If the update was applied already, the state is lost.
    #[error("{0}")]
    Diverged(Box<Diagnosis>),
    /// This rank cannot listen for the others.
    #[error("ranks cannot listen on {host}, which --host names: {problem}")]
    Address {
        /// The name or address of this machine.
        host: String,
        /// Why not.
        problem: String,
    },
    /// Another rank sent a message that cannot be decoded.
    #[error("ranks disagree on their messages ({0}); are all of the same version?")]
    Protocol(#[from] serde_json::Error),
}

impl Error {
    /// The failure to report when this error ends the rank's process.
    #[must_use]
    pub fn failure(&self) -> Failure {
        let class = match self {
            Self::Data(error) if error.is_transient() => Class::Crash,
            Self::Data(_)
            | Self::Mismatch(_)
            | Self::Diverged(_)
            | Self::Checkpoint(
                baton_checkpoint::Error::NewerVersion { .. }
                | baton_checkpoint::Error::NoUsableCheckpoint { .. }
                | baton_checkpoint::Error::CheckpointsGone { .. }
                | baton_checkpoint::Error::Access { .. },
            ) => Class::BadInput,
            Self::Learner(learner::Error::Label { .. } | learner::Error::Recipe(_)) => {
                Class::BadInput
            }
            _ if self.out_of_memory().is_some() => Class::OutOfMemory,
            Self::Learner(_) => Class::Device,
            Self::Collective(error) if error.ends_process() => Class::Device,
            Self::Collective(error) if error.is_permanent() => Class::BadInput,
            Self::Collective(_)
            | Self::Checkpoint(_)
            | Self::Bug(_)
            | Self::Peer { .. }
            | Self::Misfit { .. }
            | Self::Address { .. }
            | Self::Protocol(_) => Class::Crash,
        };
        Failure { class, message: self.to_string() }
    }

    /// The ranks that this rank could not connect to, or waited for until the time was over.
    #[must_use]
    pub fn unreached(&self) -> &[Rank] {
        match self {
            Self::Collective(error) => error.unreached(),
            _ => &[],
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        error.failure()
    }
}

impl From<learner::Error> for Failure {
    fn from(error: learner::Error) -> Self {
        Error::from(error).failure()
    }
}

impl Error {
    /// The kind of memory that was exhausted, if that is the cause.
    #[must_use]
    pub fn out_of_memory(&self) -> Option<MemoryKind> {
        match self {
            Self::Learner(error) => error.out_of_memory(),
            Self::Collective(error) => error.is_out_of_memory().then_some(MemoryKind::Gpu),
            _ => None,
        }
    }

    /// Whether only other ranks were lost or have to leave, so that this rank keeps its state for the next generation.
    #[must_use]
    pub fn is_peer_loss(&self) -> bool {
        match self {
            Self::Collective(error) => !error.ends_process() && !error.is_permanent(),
            Self::Misfit { .. } => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_collectives::Error as CollectiveError;

    use super::*;

    #[test]
    fn a_rank_survives_lost_and_misfit_peers_and_no_other_error() {
        let gpu = |code| {
            Error::from(CollectiveError::from(baton_gpu::Error::Cuda {
                function: "cuEventQuery",
                code,
                name: "test".to_owned(),
            }))
        };
        let missing =
            Error::from(CollectiveError::LibraryMissing { library: "libnccl.so", remedy: "none" });
        let aborted = Error::from(CollectiveError::Aborted { operation: "all_reduce" });
        let newer = Error::from(baton_checkpoint::Error::NewerVersion {
            name: "step-0000000004-gen-000001".to_owned(),
            version: baton_checkpoint::NewerVersion { found: 99, supported: 1 },
        });
        for (error, class, survives) in [
            (newer, Class::BadInput, false),
            (gpu(719), Class::Device, false),
            (gpu(2), Class::OutOfMemory, false),
            (missing, Class::BadInput, false),
            (aborted, Class::Crash, true),
            (Error::Misfit { rank: 1, problem: "test".to_owned() }, Class::Crash, true),
            (Error::Bug("test"), Class::Crash, false),
        ] {
            assert_eq!((error.failure().class, error.is_peer_loss()), (class, survives), "{error}");
        }
    }
}
