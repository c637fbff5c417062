//! What can go wrong with checkpoints.

use baton_job::Generation;

/// Why a checkpoint operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder cannot be used at all.
    #[error(
        "checkpoint folder {location}: {problem}; give one that exists and is writable in checkpoint.dir"
    )]
    Location {
        /// The folder.
        location: String,
        /// What the system said.
        problem: String,
    },
    /// A file cannot be written, read or listed.
    #[error("cannot {operation} {subject} in checkpoint folder {location}: {source}")]
    Storage {
        /// What was being done.
        operation: &'static str,
        /// To which file.
        subject: String,
        /// The folder.
        location: String,
        /// What the store said.
        source: object_store::Error,
    },
    /// A newer generation has taken over.
    #[error(
        "generation {mine} may not change checkpoints any more: generation {fence} has taken over"
    )]
    Fenced {
        /// The writer's generation.
        mine: Generation,
        /// The newest one.
        fence: Generation,
    },
    /// There is one of that name already.
    #[error("checkpoint {0} is there already")]
    Exists(String),
    /// There is none of that name.
    #[error(
        "there is no checkpoint {name} in {location}; `baton checkpoint ls` lists what is there"
    )]
    Missing {
        /// The name asked for.
        name: String,
        /// The folder.
        location: String,
    },
    /// A checkpoint's content does not hold together.
    #[error("checkpoint {name} is damaged: {problem}")]
    Damaged {
        /// Which one.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// The export cannot be written.
    #[error("{path}: {problem}")]
    Export {
        /// The file asked for.
        path: String,
        /// What is wrong.
        problem: String,
    },
}
