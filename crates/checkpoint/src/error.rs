//! Errors of checkpoint operations.

use std::{error, fmt, io, iter};

use baton_job::Generation;
use baton_s3::{BucketRefusal, CLOCK_REMEDY, brief, hide_password, refusal};
use rustix::io::Errno;

use crate::{CoordinatorLease, access::Location};

/// Why a checkpoint operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder or bucket cannot be used at all.
    #[error(
        "checkpoint store {}: {}; {remedy}",
        hide_password(location),
        shortened(&hide_password(problem))
    )]
    Location {
        /// The folder or bucket.
        location: String,
        /// Error message of the system.
        problem: String,
        /// What the user can do.
        remedy: &'static str,
    },
    /// An environment variable for access to the bucket is invalid.
    #[error("checkpoint store {location}: {problem}")]
    Access {
        /// The bucket.
        location: String,
        /// The variable, and what is wrong.
        problem: String,
    },
    /// A file cannot be written, read or listed.
    #[error(
        "cannot {operation} {subject} in checkpoint store {location}: {}; {}",
        shortened(&brief(source)),
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
        "generation {mine} can no longer change checkpoints: generation {fence}{by} has taken over"
    )]
    Fenced {
        /// Generation of the writer.
        mine: Generation,
        /// The newest generation.
        fence: Generation,
        /// The job of that generation, as a part of the message; empty if unknown.
        by: String,
    },
    /// Another coordinator uses the store.
    #[error(
        "another coordinator has taken over checkpoint store {location} with generation {generation}{by}; stop one of the two jobs, or set checkpoint.dir to a separate store for this job"
    )]
    TakenOver {
        /// The folder or bucket.
        location: String,
        /// Generation of the other coordinator.
        generation: Generation,
        /// The job of that generation, as a part of the message; empty if unknown.
        by: String,
    },
    /// Another coordinator has taken the lease of the job.
    #[error("another coordinator has taken over the job in {location}{}{}", described(by), end(by))]
    Replaced {
        /// The folder or bucket.
        location: String,
        /// The newer lease.
        by: Box<CoordinatorLease>,
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
    /// The text does not name a checkpoint.
    #[error(
        "{0:?} is not a checkpoint: give a name such as step-0000000440-gen-000003, or FOLDER/NAME, or \
         s3://BUCKET/PREFIX/NAME; `baton checkpoint ls` lists them"
    )]
    NoReference(String),
    /// Files are missing or changed, or the manifest is inconsistent.
    #[error("checkpoint {name} is damaged: {problem}")]
    Damaged {
        /// Name of the checkpoint.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// Parts of a job's journal in the store are missing or changed.
    #[error("the journal in {location} is damaged: {problem}")]
    DamagedJournal {
        /// The folder of its parts.
        location: String,
        /// What is wrong.
        problem: String,
    },
    /// Another coordinator has continued the job's journal in the store.
    #[error("another coordinator has continued the journal in {location}")]
    JournalContinued {
        /// The folder of its parts.
        location: String,
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
    /// The job has saved checkpoints, and the store has none: most likely its disk is not mounted, or the recipe names
    /// another store.
    #[error(
        "checkpoint store {location} has no checkpoint, but this job has saved {name}: mount its disk, set checkpoint.dir to the store, or start from scratch with --no-auto-resume"
    )]
    CheckpointsGone {
        /// The store: a folder or bucket.
        location: String,
        /// The newest checkpoint that the job has saved.
        name: String,
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

impl Error {
    /// Whether the store may be usable soon: a file system was full, not mounted or not writable. For a bucket this is
    /// false, because its client has tried for minutes before it gave up.
    #[must_use]
    pub fn is_of_folder(&self) -> bool {
        match self {
            Self::Location { location, .. } | Self::Storage { location, .. } => {
                matches!(Location::of(location), Ok(Location::Folder(_)))
            }
            _ => false,
        }
    }

    /// Whether the error may be a network failure: a storage error of a bucket.
    pub(crate) fn is_unreachable(&self) -> bool {
        matches!(self, Self::Storage { location, .. } if is_bucket(location))
    }

    /// Whether this user may not read a file of a folder: that says nothing about the file.
    pub(crate) fn is_denied(&self) -> bool {
        matches!(self, Self::Storage { source, .. }
            if io_error(source).is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied))
    }

    /// Whether a later try may succeed: a bucket does not respond, and access to it is not refused.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        self.is_unreachable() && !self.is_refused()
    }

    /// Whether a bucket refuses access or does not exist, so that another try cannot help.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Storage { location, source, .. } if is_bucket(location)
            && refusal(source).is_some_and(|refusal| refusal != BucketRefusal::Expired))
    }

    /// Whether another try would fail in the same way, because the input or the machine's setup is wrong.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::Location { problem, .. } | Self::Export { problem, .. } => !is_full_disk(problem),
            Self::Storage { source, .. } => {
                self.is_refused() || io_error(source).is_some_and(|error| cannot_pass(error.kind()))
            }
            Self::Fenced { .. } | Self::NotCommittable { .. } => false,
            Self::Access { .. }
            | Self::TakenOver { .. }
            | Self::Replaced { .. }
            | Self::Exists(_)
            | Self::Missing { .. }
            | Self::NoReference(_)
            | Self::Damaged { .. }
            | Self::DamagedJournal { .. }
            | Self::JournalContinued { .. }
            | Self::NewerVersion { .. }
            | Self::NoUsableCheckpoint { .. }
            | Self::CheckpointsGone { .. } => true,
        }
    }

    /// The error for a location that cannot be used.
    pub(crate) fn unusable(
        location: &str,
        problem: impl fmt::Display,
        remedy: &'static str,
    ) -> Self {
        Self::Location { location: location.to_owned(), problem: problem.to_string(), remedy }
    }

    /// The error for a folder that cannot be created, written or read.
    pub(crate) fn unusable_folder(location: &str, error: &io::Error) -> Self {
        Self::unusable(location, error, folder_remedy(error.kind()).unwrap_or(OTHER_FOLDER))
    }
}

/// Where the holder of a lease is, as a part of a message.
fn described(lease: &CoordinatorLease) -> String {
    let place = format!(": run folder {} on host {}", lease.run_dir, lease.host);
    match &lease.address {
        Some(address) => format!("{place}, at {address}"),
        None if lease.host.is_empty() => String::new(),
        None => place,
    }
}

/// What to do where the job is over at the other coordinator.
fn end(lease: &CoordinatorLease) -> &'static str {
    if lease.over { "; the job has ended there: start it again to continue" } else { "" }
}

fn is_bucket(location: &str) -> bool {
    matches!(Location::of(location), Ok(Location::Bucket { .. }))
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

/// Joins the lines of a message and limits its length: servers respond with pages of HTML.
fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MAX_MESSAGE_CHARS) {
        Some((end, _)) => format!("{} ...", &line[..end]),
        None => line,
    }
}

const MAX_MESSAGE_CHARS: usize = 400;

/// The advice for a folder if nothing is known about the problem.
pub(crate) const OTHER_FOLDER: &str =
    "check that this user may create and write this folder, or set checkpoint.dir to another one";

/// Whether a problem's text is that of a full disk or quota. Errors of libraries keep only the system's text.
#[must_use]
pub fn is_full_disk(problem: &str) -> bool {
    [Errno::NOSPC, Errno::DQUOT]
        .iter()
        .any(|full| problem.contains(&io::Error::from(*full).to_string()))
}

/// Whether a folder has this problem until somebody changes it.
fn cannot_pass(problem: io::ErrorKind) -> bool {
    matches!(
        problem,
        io::ErrorKind::PermissionDenied
            | io::ErrorKind::ReadOnlyFilesystem
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::AlreadyExists
    )
}

/// The system's error behind an error of the store.
pub(crate) fn io_error(source: &object_store::Error) -> Option<&io::Error> {
    let causes = iter::successors(Some(source as &(dyn error::Error + 'static)), |e| e.source());
    causes.filter_map(|cause| cause.downcast_ref::<io::Error>()).last()
}

/// The advice for a problem with a folder.
fn folder_remedy(problem: io::ErrorKind) -> Option<&'static str> {
    Some(match problem {
        io::ErrorKind::PermissionDenied => {
            "let this user read and write there, or set checkpoint.dir to another folder"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some disk space, or lower checkpoint.keep_last"
        }
        io::ErrorKind::FileTooLarge => {
            "allow larger files with `ulimit -f unlimited`, or set checkpoint.dir to another file system"
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            "mount the file system writable, or set checkpoint.dir to another folder"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "a part of this path is a file: set checkpoint.dir to a folder"
        }
        _ => return None,
    })
}

/// The advice at the end of a storage error.
fn remedy(location: &str, source: &object_store::Error) -> &'static str {
    let known = io_error(source).and_then(|error| folder_remedy(error.kind()));
    if let Some(remedy) = known.filter(|_| !is_bucket(location)) {
        return remedy;
    }
    match refusal(source) {
        Some(BucketRefusal::Access | BucketRefusal::Expired) if is_bucket(location) => {
            "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the role of this machine: it must be allowed to list, read, write and delete objects"
        }
        Some(BucketRefusal::Clock) if is_bucket(location) => CLOCK_REMEDY,
        Some(BucketRefusal::Missing) if is_bucket(location) => {
            "check the name of the bucket, AWS_REGION and AWS_ENDPOINT_URL"
        }
        _ if is_bucket(location) => {
            "check the network, AWS_REGION and AWS_ENDPOINT_URL, and that there are credentials"
        }
        _ => "check the disk, and that this user may read and write the folder",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Store;

    #[test]
    fn only_a_bucket_that_does_not_respond_may_be_tried_later() {
        let failed = |location: &str, source| Error::Storage {
            operation: "read",
            subject: "fences".to_owned(),
            location: location.to_owned(),
            source: Box::new(source),
        };
        let timed_out = || object_store::Error::Generic { store: "S3", source: "timed out".into() };
        let refused = || object_store::Error::PermissionDenied {
            path: "fences".to_owned(),
            source: "403".into(),
        };
        assert!(failed("s3://bucket/job", timed_out()).is_transient());
        assert!(!failed("s3://bucket/job", refused()).is_transient());
        // A list is refused without a status of its own; a role's credentials are renewed.
        for (code, is_transient, advice) in [
            ("AccessDenied", false, "check AWS_ACCESS_KEY_ID"),
            ("ExpiredToken", true, "check AWS_ACCESS_KEY_ID"),
            ("RequestTimeTooSkewed", false, "set the clock of this machine"),
        ] {
            let text = format!("<Error><Code>{code}</Code></Error>");
            let listed = object_store::Error::Generic { store: "S3", source: text.into() };
            let listed = failed("s3://bucket/job", listed);
            assert_eq!((listed.is_transient(), listed.is_refused()), (is_transient, !is_transient));
            assert!(listed.to_string().contains(advice), "{listed}");
        }
        assert!(!failed("/runs/job", timed_out()).is_transient());
    }

    #[test]
    fn a_file_that_this_user_may_not_read_is_not_damage() {
        let store = Store::memory().unwrap();
        let failed = |kind: io::ErrorKind| Error::Storage {
            operation: "read",
            subject: "shard-00000-of-00001.safetensors".to_owned(),
            location: "/runs/job".to_owned(),
            source: Box::new(object_store::Error::Generic {
                store: "LocalFileSystem",
                source: Box::new(io::Error::from(kind)),
            }),
        };
        let denied = store.damage(failed(io::ErrorKind::PermissionDenied)).unwrap_err();
        assert!(denied.is_bad_input(), "{denied}");
        assert!(store.damage(failed(io::ErrorKind::UnexpectedEof)).is_ok());
    }

    #[test]
    fn a_folder_that_cannot_be_used_is_one_line_with_a_remedy_for_its_problem() {
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let denied = Error::unusable_folder("/mnt/shared", &denied).to_string();
        assert_eq!(
            denied,
            "checkpoint store /mnt/shared: permission denied; let this user read and write there, or set \
             checkpoint.dir to another folder"
        );
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "text").unwrap();
        // Not even root can create a folder below a file.
        let below = file.join("below").display().to_string();
        let missing = folder.path().join("missing").display().to_string();
        for (opened, remedy) in [
            (
                Store::open(&below),
                "; a part of this path is a file: set checkpoint.dir to a folder",
            ),
            (Store::open("gs://bucket"), "; set checkpoint.dir to a folder or s3://BUCKET/PREFIX"),
            (
                Store::open_existing(&missing),
                "missing: it does not exist; give the folder of the checkpoints",
            ),
        ] {
            let error = opened.unwrap_err().to_string();
            assert!(error.ends_with(remedy) && !error.contains('\n'), "{error}");
        }
    }
}
