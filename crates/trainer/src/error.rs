//! Why training stopped, and what kind of trouble it is.

use baton_job::exit::{Class, Failure};
use baton_recipe::guard::Diagnosis;

use crate::learner::{self, Memory};

/// Why training stopped before it was done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The other ranks were lost. State is kept; a new generation can go on.
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
    /// The recipe and its data, or a checkpoint, do not fit together.
    #[error("{0}")]
    Mismatch(String),
    /// Baton contradicts itself.
    #[error("{0}; this is a bug in Baton, please report it")]
    Bug(&'static str),
    /// State could not be saved before leaving.
    #[error("the last checkpoint could not be written: {0}")]
    LastSave(String),
    /// Another rank cannot do its part.
    #[error("rank {rank} cannot go on: {problem}")]
    Peer {
        /// Which one.
        rank: usize,
        /// Why.
        problem: String,
    },
    /// Training went wrong: all ranks found so at this update. If it was made already, they hold no state.
    #[error("{0}")]
    Diverged(Box<Diagnosis>),
    /// Another rank sent something that cannot be understood.
    #[error("ranks disagree on their messages ({0}); are all of the same version?")]
    Protocol(#[from] serde_json::Error),
}

impl Error {
    /// The failure to report when the rank's process ends because of this.
    #[must_use]
    pub fn failure(&self) -> Failure {
        let class = match self {
            Self::Data(error) if error.may_pass() => Class::Crash,
            Self::Data(_)
            | Self::Mismatch(_)
            | Self::Diverged(_)
            | Self::Checkpoint(baton_checkpoint::Error::NewerVersion { .. }) => Class::BadInput,
            Self::Learner(learner::Error::Label { .. } | learner::Error::Recipe(_)) => {
                Class::BadInput
            }
            _ if self.out_of_memory().is_some() => Class::OutOfMemory,
            Self::Learner(_) => Class::Device,
            Self::Collective(error) if error.ends_process() => Class::Device,
            Self::Collective(error) if error.is_lasting() => Class::BadInput,
            Self::Collective(_)
            | Self::Checkpoint(_)
            | Self::Bug(_)
            | Self::LastSave(_)
            | Self::Peer { .. }
            | Self::Protocol(_) => Class::Crash,
        };
        Failure { class, message: self.to_string() }
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
    /// The memory that was too small, if that is what ended this rank.
    #[must_use]
    pub fn out_of_memory(&self) -> Option<Memory> {
        match self {
            Self::Learner(error) => error.out_of_memory(),
            Self::Collective(error) => error.is_out_of_memory().then_some(Memory::Gpu),
            _ => None,
        }
    }

    /// Whether only the other ranks were lost, and this one keeps its state for the next generation.
    #[must_use]
    pub fn is_loss_of_others(&self) -> bool {
        matches!(self, Self::Collective(error) if !error.ends_process() && !error.is_lasting())
    }
}

#[cfg(test)]
mod tests {
    use baton_collectives::Error as Lost;

    use super::*;

    #[test]
    fn a_rank_outlives_lost_peers_and_nothing_else_of_a_collective() {
        let gpu = |code| {
            Error::from(Lost::from(baton_gpu::Error::Cuda {
                function: "cuEventQuery",
                code,
                name: "of a test".to_owned(),
            }))
        };
        let missing = Error::from(Lost::LibraryMissing { library: "libnccl.so", remedy: "none" });
        let aborted = Error::from(Lost::Aborted { operation: "all_reduce" });
        let newer = Error::from(baton_checkpoint::Error::NewerVersion {
            name: "step-0000000004-gen-000001".to_owned(),
            version: baton_checkpoint::NewerVersion { found: 99, supported: 1 },
        });
        for (error, class, lives) in [
            (newer, Class::BadInput, false),
            (gpu(719), Class::Device, false),
            (gpu(2), Class::OutOfMemory, false),
            (missing, Class::BadInput, false),
            (aborted, Class::Crash, true),
            (Error::Bug("of a test"), Class::Crash, false),
        ] {
            assert_eq!(
                (error.failure().class, error.is_loss_of_others()),
                (class, lives),
                "{error}"
            );
        }
    }
}
