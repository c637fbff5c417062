//! What can go wrong with checkpoints.

use std::{error, fmt, io, iter};

use baton_job::Generation;

/// Why a checkpoint operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder or bucket cannot be used at all.
    #[error(
        "checkpoint store {location}: {}; give a folder or s3://bucket/prefix that is writable in checkpoint.dir",
        one_line(problem)
    )]
    Location {
        /// The folder or bucket.
        location: String,
        /// What the system said.
        problem: String,
    },
    /// A file cannot be written, read or listed.
    #[error(
        "cannot {operation} {subject} in checkpoint store {location}: {}; {}",
        one_line(source),
        remedy(location, source)
    )]
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
    /// Another coordinator holds the store.
    #[error(
        "another coordinator has taken over checkpoint store {location} with generation {generation}; end one of the two, or give this job a store of its own in checkpoint.dir"
    )]
    TakenOver {
        /// The folder or bucket.
        location: String,
        /// The other one's generation.
        generation: Generation,
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
    /// A newer Baton wrote it, which is no damage.
    #[error("checkpoint {name} was {version}, or name another checkpoint")]
    NewerVersion {
        /// Which one.
        name: String,
        /// Its version.
        version: NewerVersion,
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

/// The format of what a newer Baton wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{WRITTEN_BY_NEWER} (format {found}; this one reads up to {supported}): use that version")]
pub struct NewerVersion {
    /// Its version.
    pub found: u32,
    /// The newest that this Baton reads.
    pub supported: u32,
}

/// How [`NewerVersion`] begins.
pub const WRITTEN_BY_NEWER: &str = "written by a newer Baton";

/// Servers answer with pages of XML.
fn one_line(text: &impl fmt::Display) -> String {
    let line = text.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MOST_CHARS) {
        Some((end, _)) => format!("{} ...", &line[..end]),
        None => line,
    }
}

const MOST_CHARS: usize = 400;

/// What a person should try.
fn remedy(location: &str, source: &object_store::Error) -> &'static str {
    use object_store::Error::{NotFound, PermissionDenied, Unauthenticated};
    let causes = iter::successors(Some(source as &(dyn error::Error + 'static)), |e| e.source());
    let system = causes.filter_map(|cause| cause.downcast_ref::<io::Error>()).last();
    match (system.map(io::Error::kind), source) {
        (Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded), _) => {
            "free some space there, or lower checkpoint.keep_last"
        }
        (Some(io::ErrorKind::ReadOnlyFilesystem), _) => {
            "mount it for writing, or give another in checkpoint.dir"
        }
        (_, PermissionDenied { .. } | Unauthenticated { .. }) if location.starts_with("s3://") => {
            "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the role of this machine: it must be allowed to list, read, write and delete there"
        }
        (_, NotFound { .. }) if location.starts_with("s3://") => {
            "check the name of the bucket, AWS_REGION and AWS_ENDPOINT_URL"
        }
        _ if location.starts_with("s3://") => {
            "check the network, AWS_REGION and AWS_ENDPOINT_URL, and that there are credentials"
        }
        _ => "check the disk, and that this user may read and write there",
    }
}
