//! The thread that prefetches shards.

use std::{
    collections::HashSet,
    io,
    sync::Arc,
    thread::{Builder, JoinHandle},
    time::Duration,
};

use super::{
    Error,
    bucket::{CachedBucket, ObtainResult},
    evict::Demand,
};

/// Poll interval for changes that other processes make in the cache: they do not notify this process.
const CACHE_POLL_INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn spawn(bucket: Arc<CachedBucket>) -> io::Result<JoinHandle<()>> {
    Builder::new().name("shards-ahead".to_owned()).spawn(move || run(&bucket))
}

/// Progress of the thread with the current plan.
#[derive(Default)]
struct PrefetchState {
    version: u64,
    /// Shards that were found in the cache or fetched.
    complete: HashSet<usize>,
    /// Shards that could not be fetched.
    failed: HashSet<usize>,
}

/// Fetches one shard after the other, and reads the plan again after each.
fn run(bucket: &CachedBucket) {
    let mut state = PrefetchState::default();
    while !bucket.signal.is_shut_down() {
        let seen = bucket.signal.changes();
        if !fetch_next(bucket, &mut state) {
            bucket.signal.wait_for_change(seen, CACHE_POLL_INTERVAL);
        }
    }
}

/// Fetches the first missing shard of the window. Returns whether there was one.
///
/// Shards that other ranks are fetching are skipped: the ranks of a node have similar plans, so the node fetches as
/// many shards at a time as it has ranks. A single thread would be too slow, because computing digests takes a core.
fn fetch_next(bucket: &CachedBucket, state: &mut PrefetchState) -> bool {
    let (version, window) = bucket.window();
    if version != state.version {
        *state = PrefetchState { version, ..PrefetchState::default() };
    }
    for (position, shard) in window {
        let is_known = state.complete.contains(&shard) && bucket.is_there(shard);
        if is_known || state.failed.contains(&shard) {
            continue;
        }
        match bucket.obtain(shard, Demand::At(position)) {
            // Released immediately: it is not needed yet.
            Ok(ObtainResult::Held(_)) => {
                state.complete.insert(shard);
                return true;
            }
            Ok(ObtainResult::Busy) => {}
            // Wait until a shard is released.
            Ok(ObtainResult::NoRoom { .. }) | Err(Error::Cancelled { .. }) => return false,
            // The caller that needs it will retry and get the error.
            Err(_) => {
                state.failed.insert(shard);
                return true;
            }
        }
    }
    false
}
