//! Proof that checkpoints are as they were written.

use std::{
    num::NonZeroUsize,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use crate::{Error, Manifest, ShardEntry, Store};

impl Store {
    /// Reads every byte of `manifests` and compares digests, up to `jobs` files at a time, telling
    /// `progress` how many bytes were read since it was last called. The memory in use is that of a block
    /// for each job. The outcomes come in the order of `manifests`.
    ///
    /// # Errors
    /// [`Error::Damaged`] names the first file of a checkpoint that is not as it was written;
    /// [`Error::Storage`] says which cannot be read.
    pub fn prove(
        &self,
        manifests: &[&Manifest],
        jobs: NonZeroUsize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Vec<Result<(), Error>> {
        let shards = |manifest: &&Manifest| manifest.shards.len();
        let tasks: Vec<(&Manifest, &ShardEntry)> = manifests
            .iter()
            .flat_map(|manifest| manifest.shards.iter().map(|shard| (*manifest, shard)))
            .collect();
        let outcomes: Vec<OnceLock<Result<(), Error>>> =
            tasks.iter().map(|_| OnceLock::new()).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let index = next.fetch_add(1, Relaxed)
                && let Some(((manifest, shard), outcome)) =
                    tasks.get(index).zip(outcomes.get(index))
            {
                let _ = outcome.set(self.prove_shard(manifest, shard, progress));
            }
        };
        thread::scope(|scope| {
            for _ in 1..jobs.get().min(tasks.len()) {
                scope.spawn(work);
            }
            work();
        });
        let mut outcomes = outcomes.into_iter().filter_map(OnceLock::into_inner);
        let of_each = manifests.iter().map(|manifest| {
            let all: Vec<_> = outcomes.by_ref().take(shards(manifest)).collect();
            all.into_iter().collect()
        });
        of_each.collect()
    }

    /// Reads one file block by block and compares its digest.
    pub(crate) fn prove_shard(
        &self,
        manifest: &Manifest,
        shard: &ShardEntry,
        progress: &dyn Fn(u64),
    ) -> Result<(), Error> {
        let damaged = |what: &str| Error::Damaged {
            name: manifest.name(),
            problem: format!("{} {what}", shard.file),
        };
        let file = format!("{}/{}", manifest.name(), shard.file);
        let mut hasher = blake3::Hasher::new();
        let read = self.read_blocks(&file, 0..shard.bytes, &mut |block| {
            hasher.update(block);
            progress(block.len() as u64);
        });
        match read {
            Err(Error::Storage { source, .. })
                if matches!(*source, object_store::Error::NotFound { .. }) =>
            {
                return Err(damaged("is missing"));
            }
            read => read?,
        }
        if hasher.finalize().to_hex().as_str() == shard.blake3 {
            Ok(())
        } else {
            Err(damaged("does not match its digest"))
        }
    }
}
