//! The open remote shards: only those used most recently, so that the cache can evict the others.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use super::Shard;
use crate::Error;

/// The open shards of one data set may use 1/4 of the cache, so the training and the validation set together use half
/// of it. The rest is for prefetched shards, and for ranks that are behind.
const CACHE_DIVISOR: u64 = 4;

/// Open shards, the most recently used one at the back.
pub(super) struct OpenShards {
    max_open: usize,
    shards: Mutex<VecDeque<(usize, Arc<Shard>)>>,
}

impl OpenShards {
    /// As many open shards as fit into the share of the cache, given the size of the largest shard; at least one.
    pub(super) fn new(cache_bytes: u64, largest_bytes: u64) -> Self {
        let max_open = cache_bytes / CACHE_DIVISOR / largest_bytes.max(1);
        Self {
            max_open: usize::try_from(max_open).unwrap_or(usize::MAX).max(1),
            shards: Mutex::default(),
        }
    }

    /// The shard with this number. If it is not open, `open` opens it without holding the lock.
    pub(super) fn get(
        &self,
        number: usize,
        open: impl FnOnce() -> Result<Shard, Error>,
    ) -> Result<Arc<Shard>, Error> {
        if let Some(shard) = self.find(number) {
            return Ok(shard);
        }
        let shard = Arc::new(open()?);
        // Another thread may have opened the same file in the meantime; then it is open twice for a while.
        let mut list = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        list.push_back((number, shard.clone()));
        if list.len() > self.max_open {
            list.pop_front();
        }
        Ok(shard)
    }

    /// An open shard, which becomes the most recently used one.
    fn find(&self, number: usize) -> Option<Arc<Shard>> {
        let mut list = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        let index = list.iter().rposition(|(other, _)| *other == number)?;
        // Most samples are in the most recently used shard.
        if index + 1 < list.len()
            && let Some(entry) = list.remove(index)
        {
            list.push_back(entry);
        }
        list.back().map(|(_, shard)| shard.clone())
    }
}
