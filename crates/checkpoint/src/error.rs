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
        source: Box<object_store::Error>,
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
    /// What was handed in makes no checkpoint.
    #[error("checkpoint {name} cannot be committed: {problem}")]
    Unfit {
        /// Which one.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A later Baton wrote it.
    #[error(
        "checkpoint {name} has format version {found}, and this Baton reads up to {supported}: update Baton"
    )]
    NewerVersion {
        /// Which one.
        name: String,
        /// Its version.
        found: u32,
        /// The newest known here.
        supported: u32,
    },
    /// There are checkpoints to resume from, and all are damaged. Starting anew would throw the run
    /// away unasked.
    #[error(
        "no checkpoint in {location} is whole: {}; mend the folder, or name another checkpoint with --resume PATH, or start anew with --no-auto-resume",
        skipped.join("; ")
    )]
    NoneWhole {
        /// The folder.
        location: String,
        /// Why each was passed over.
        skipped: Vec<String>,
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
