//! Errors of checkpoint operations.

use std::{error, fmt, io, iter};

use baton_job::Generation;

/// Why a checkpoint operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder or bucket cannot be used at all.
    #[error(
        "checkpoint store {location}: {}; set checkpoint.dir to a writable folder or s3://bucket/prefix",
        one_line(problem)
    )]
    Location {
        /// The folder or bucket.
        location: String,
        /// Error message of the system.
        problem: String,
    },
    /// A file cannot be written, read or listed.
    #[error(
        "cannot {operation} {subject} in checkpoint store {location}: {}; {}",
        one_line(source),
        remedy(location, source)
    )]
    Storage {
        /// The operation that failed, a verb.
        operation: &'static str,
        /// The file or folder.
        subject: String,
        /// The store: a folder or bucket.
        location: String,
        /// The cause.
        source: Box<object_store::Error>,
    },
    /// A newer generation has taken over.
    #[error(
        "generation {mine} can no longer change checkpoints: generation {fence} has taken over"
    )]
    Fenced {
        /// Generation of the writer.
        mine: Generation,
        /// The newest generation.
        fence: Generation,
    },
    /// Another coordinator uses the store.
    #[error(
        "another coordinator has taken over checkpoint store {location} with generation {generation}; stop one of the two jobs, or set checkpoint.dir to a separate store for this job"
    )]
    TakenOver {
        /// The folder or bucket.
        location: String,
        /// Generation of the other coordinator.
        generation: Generation,
    },
    /// A different checkpoint of that name exists.
    #[error("checkpoint {0} already exists")]
    Exists(String),
    /// There is no checkpoint of that name.
    #[error(
        "there is no checkpoint {name} in {location}; `baton checkpoint ls` lists all checkpoints"
    )]
    Missing {
        /// The requested name.
        name: String,
        /// The store: a folder or bucket.
        location: String,
    },
    /// Files are missing or changed, or the manifest is inconsistent.
    #[error("checkpoint {name} is damaged: {problem}")]
    Damaged {
        /// Name of the checkpoint.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// The shards and manifest do not make a valid checkpoint.
    #[error("checkpoint {name} cannot be committed: {problem}")]
    NotCommittable {
        /// Name of the checkpoint.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A newer Baton wrote the checkpoint. This is not damage.
    #[error("checkpoint {name} was {version}, or name another checkpoint")]
    NewerVersion {
        /// Name of the checkpoint.
        name: String,
        /// Format of the checkpoint.
        version: NewerVersion,
    },
    /// There are checkpoints to resume from, and all are damaged. Starting from scratch would discard the run
    /// without the user's consent.
    #[error(
        "all checkpoints in {location} are damaged: {}; repair the folder, or name another checkpoint with --resume PATH, or start from scratch with --no-auto-resume",
        skipped.join("; ")
    )]
    NoUsableCheckpoint {
        /// The store: a folder or bucket.
        location: String,
        /// Each skipped checkpoint with the reason.
        skipped: Vec<String>,
    },
    /// The export cannot be written.
    #[error("{path}: {problem}")]
    Export {
        /// The file to be written.
        path: String,
        /// What is wrong.
        problem: String,
    },
}

/// The format version of a checkpoint that a newer Baton wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{WRITTEN_BY_NEWER} (format {found}; this one reads up to {supported}): use that version")]
pub struct NewerVersion {
    /// Format version of the checkpoint.
    pub found: u32,
    /// The newest format version that this Baton can read.
    pub supported: u32,
}

/// The beginning of the message of [`NewerVersion`].
pub const WRITTEN_BY_NEWER: &str = "written by a newer Baton";

/// Joins the lines of a message and limits its length: servers respond with pages of XML.
fn one_line(text: &impl fmt::Display) -> String {
    let line = text.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MAX_MESSAGE_CHARS) {
        Some((end, _)) => format!("{} ...", &line[..end]),
        None => line,
    }
}

const MAX_MESSAGE_CHARS: usize = 400;

/// The advice at the end of a storage error.
fn remedy(location: &str, source: &object_store::Error) -> &'static str {
    use object_store::Error::{NotFound, PermissionDenied, Unauthenticated};
    let causes = iter::successors(Some(source as &(dyn error::Error + 'static)), |e| e.source());
    let system = causes.filter_map(|cause| cause.downcast_ref::<io::Error>()).last();
    match (system.map(io::Error::kind), source) {
        (Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded), _) => {
            "free some disk space, or lower checkpoint.keep_last"
        }
        (Some(io::ErrorKind::ReadOnlyFilesystem), _) => {
            "mount the file system writable, or set checkpoint.dir to another folder"
        }
        (_, PermissionDenied { .. } | Unauthenticated { .. }) if location.starts_with("s3://") => {
            "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the role of this machine: it must be allowed to list, read, write and delete objects"
        }
        (_, NotFound { .. }) if location.starts_with("s3://") => {
            "check the name of the bucket, AWS_REGION and AWS_ENDPOINT_URL"
        }
        _ if location.starts_with("s3://") => {
            "check the network, AWS_REGION and AWS_ENDPOINT_URL, and that there are credentials"
        }
        _ => "check the disk, and that this user may read and write the folder",
    }
}
