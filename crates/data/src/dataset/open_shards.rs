//! The open remote shards: only those used most recently, so that the cache can evict the others.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::Shard;
use crate::Error;

/// The open shards of one data set may use 1/4 of the cache on all ranks of a node together, so the training and the
/// validation set use half of it. The rest is for prefetched shards, and for ranks that are behind.
const CACHE_DIVISOR: u64 = 4;

/// Open shards, the most recently used one at the back.
pub(super) struct OpenShards {
    max_open: usize,
    shards: Mutex<VecDeque<(usize, Arc<Shard>)>>,
}

impl OpenShards {
    /// As many open shards as fit into this rank's share of the cache, given the size of the largest shard; at least
    /// one.
    pub(super) fn new(cache_bytes: u64, local_ranks: u32, largest_bytes: u64) -> Self {
        let share = cache_bytes / CACHE_DIVISOR / u64::from(local_ranks.max(1));
        let max_open = share / largest_bytes.max(1);
        Self {
            max_open: usize::try_from(max_open).unwrap_or(usize::MAX).max(1),
            shards: Mutex::default(),
        }
    }

    /// The shard with this number. If it is not open, `open` opens it without holding the lock; it is given a function
    /// that closes the least recently used shard, and returns `false` if none is open.
    pub(super) fn get(
        &self,
        number: usize,
        open: impl FnOnce(&dyn Fn() -> bool) -> Result<Shard, Error>,
    ) -> Result<Arc<Shard>, Error> {
        if let Some(shard) = self.find(number) {
            return Ok(shard);
        }
        let shard = Arc::new(open(&|| self.lock().pop_front().is_some())?);
        // Another thread may have opened the same file in the meantime; then it is open twice for a while.
        let mut list = self.lock();
        list.push_back((number, shard.clone()));
        if list.len() > self.max_open {
            list.pop_front();
        }
        Ok(shard)
    }

    /// An open shard, which becomes the most recently used one.
    pub(super) fn find(&self, number: usize) -> Option<Arc<Shard>> {
        let mut list = self.lock();
        let index = list.iter().rposition(|(other, _)| *other == number)?;
        // Most samples are in the most recently used shard.
        if index + 1 < list.len()
            && let Some(entry) = list.remove(index)
        {
            list.push_back(entry);
        }
        list.back().map(|(_, shard)| shard.clone())
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(usize, Arc<Shard>)>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_of_a_node_share_a_quarter_of_the_cache() {
        let max_open = |local_ranks| OpenShards::new(800, local_ranks, 10).max_open;
        assert_eq!([0, 1, 4, 8, 100].map(max_open), [20, 20, 5, 2, 1]);
    }
}
