//! Counts of what a set of shards did, for status and logs.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// What happened since a [`ShardSet`](super::ShardSet) was opened, in this process alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Shards asked for that lay in the cache, known to be whole.
    pub hits: u64,
    /// Shards asked for that had to be fetched, checked or waited for.
    pub misses: u64,
    /// Shards fetched from the store by this process, asked for or ahead of need.
    pub fetched_shards: u64,
    /// Bytes received of shards, those of headers and of repeated downloads included.
    pub fetched_bytes: u64,
    /// Requests that failed and were made again.
    pub retries: u64,
    /// Shards given up by this process to make room.
    pub evictions: u64,
    /// Copies found damaged in the cache, or on arrival.
    pub damaged: u64,
    /// Shards that could not be fetched ahead; whoever asks for one gets the reason.
    pub failed_ahead: u64,
    /// Time that callers spent waiting for shards.
    pub waited: Duration,
}

/// The counters behind [`Statistics`].
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) hits: Counter,
    pub(super) misses: Counter,
    pub(super) fetched_shards: Counter,
    pub(super) fetched_bytes: Counter,
    pub(super) retries: Counter,
    pub(super) evictions: Counter,
    pub(super) damaged: Counter,
    pub(super) failed_ahead: Counter,
    pub(super) waited_micros: Counter,
}

impl Counters {
    pub(super) fn read(&self) -> Statistics {
        Statistics {
            hits: self.hits.get(),
            misses: self.misses.get(),
            fetched_shards: self.fetched_shards.get(),
            fetched_bytes: self.fetched_bytes.get(),
            retries: self.retries.get(),
            evictions: self.evictions.get(),
            damaged: self.damaged.get(),
            failed_ahead: self.failed_ahead.get(),
            waited: Duration::from_micros(self.waited_micros.get()),
        }
    }
}

/// A number that only grows. No other memory depends on it, so the weakest ordering will do.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}
