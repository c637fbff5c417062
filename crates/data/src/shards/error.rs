//! Why shards cannot be had: which one, what was tried for how long, and what to do about it.

use std::{io, path::PathBuf, time::Duration};

use super::retry::{Fault, Remedy};
use crate::FileFault;

/// Anything that keeps a shard from being read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was tried, e.g. `open`.
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The source is no path, pattern or URL that is understood.
    #[error("data set \"{source_text}\": {problem}")]
    Source {
        /// As written in the recipe.
        source_text: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The source is understood, but there is no such file or object.
    #[error("nothing matches \"{source_text}\": {there}")]
    NothingMatches {
        /// As written in the recipe.
        source_text: String,
        /// What there is instead.
        there: String,
    },
    /// The object store did not do what was asked.
    #[error("cannot {operation} {url}: {fault} ({attempts} in {elapsed:.1?}); {remedy}", attempts = attempts_in_words(*attempts))]
    Store {
        /// What was tried, e.g. `fetch`.
        operation: &'static str,
        /// The object, or the folder.
        url: String,
        /// What went wrong the last time.
        fault: Box<Fault>,
        /// How often it was tried without any progress.
        attempts: u32,
        /// How long it was tried without any progress.
        elapsed: Duration,
        /// What to do about it.
        remedy: Remedy,
    },
    /// Two downloads of the same object differ, and neither is what the store says it has.
    #[error(
        "{url} arrives damaged, and differently each time: something between here and the store \
         alters data; use https, or another network path"
    )]
    Damaged {
        /// The object.
        url: String,
    },
    /// A shard is no beton file.
    #[error("{name}: {fault}")]
    Header {
        /// Path or URL.
        name: String,
        /// What is wrong with it.
        fault: FileFault,
    },
    /// The cache could never hold this shard.
    #[error(
        "{name} has {bytes} bytes, but the shard cache may hold only {cache_bytes}: \
         raise data.cache_gib to twice the largest shard or more, or write smaller shards"
    )]
    CacheTooSmall {
        /// The largest shard.
        name: String,
        /// Its length.
        bytes: u64,
        /// The bound.
        cache_bytes: u64,
    },
    /// All that the cache holds is in use, and stayed so.
    #[error(
        "no room for {name} ({bytes} bytes) in {} for {waited:.0?}: {in_use_bytes} of its \
         {cache_bytes} bytes are in use by this or other processes; raise data.cache_gib", cache_dir.display()
    )]
    NoRoom {
        /// The shard.
        name: String,
        /// Its length.
        bytes: u64,
        /// The cache.
        cache_dir: PathBuf,
        /// Its bound.
        cache_bytes: u64,
        /// Bytes that cannot be evicted.
        in_use_bytes: u64,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A bug of the caller.
    #[error("shard {shard} was asked for, but there are {shards}: this is a bug, please report it")]
    OutOfRange {
        /// As asked for.
        shard: usize,
        /// How many there are.
        shards: usize,
    },
    /// The background threads did not start.
    #[error("cannot start a thread that fetches shards: {0}")]
    Thread(#[source] io::Error),
    /// The set was dropped while this was going on.
    #[error("fetching {name} was given up: its data set is no longer used")]
    Cancelled {
        /// The shard.
        name: String,
    },
}

impl Error {
    /// Whether the same try may succeed later.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Store { .. } | Self::NoRoom { .. } | Self::Thread(_) | Self::Cancelled { .. } => {
                true
            }
            Self::Io { .. }
            | Self::Source { .. }
            | Self::NothingMatches { .. }
            | Self::Damaged { .. }
            | Self::Header { .. }
            | Self::CacheTooSmall { .. }
            | Self::OutOfRange { .. } => false,
        }
    }

    pub(super) fn io(
        operation: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { operation, path, source }
    }
}

fn attempts_in_words(attempts: u32) -> String {
    if attempts == 1 { "1 attempt".to_owned() } else { format!("{attempts} attempts") }
}
