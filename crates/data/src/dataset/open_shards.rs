//! The remote shards that are open: the ones used last, so that the cache can let go of the others.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use super::Shard;
use crate::Error;

/// The part of the cache that the open shards of one data set may fill. Training and validation set
/// fill half of it; the rest is for what is fetched ahead, and for ranks that are a little behind.
const SHARE_OF_CACHE: u64 = 4;

/// Open shards, the one used last at the back.
pub(super) struct OpenShards {
    most: usize,
    open: Mutex<VecDeque<(usize, Arc<Shard>)>>,
}

impl OpenShards {
    /// No more than the cache can hold beside others, given the length of the largest shard; but one.
    pub(super) fn new(cache_bytes: u64, largest_bytes: u64) -> Self {
        let most = cache_bytes / SHARE_OF_CACHE / largest_bytes.max(1);
        Self { most: usize::try_from(most).unwrap_or(usize::MAX).max(1), open: Mutex::default() }
    }

    /// The shard with this number; opened by `open`, outside the lock, if it is not.
    pub(super) fn get(
        &self,
        number: usize,
        open: impl FnOnce() -> Result<Shard, Error>,
    ) -> Result<Arc<Shard>, Error> {
        if let Some(shard) = self.used(number) {
            return Ok(shard);
        }
        let shard = Arc::new(open()?);
        // Another thread may have opened it meanwhile: then there are two for a while, of one file.
        let mut list = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        list.push_back((number, shard.clone()));
        if list.len() > self.most {
            list.pop_front();
        }
        Ok(shard)
    }

    fn used(&self, number: usize) -> Option<Arc<Shard>> {
        let mut list = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let index = list.iter().rposition(|(known, _)| *known == number)?;
        // Most samples are of the shard used last.
        if index + 1 < list.len()
            && let Some(entry) = list.remove(index)
        {
            list.push_back(entry);
        }
        list.back().map(|(_, shard)| shard.clone())
    }
}
