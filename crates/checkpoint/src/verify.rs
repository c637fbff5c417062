//! Verification: checks that the files of checkpoints match their digests.

use std::{
    num::NonZeroUsize,
    ops::Range,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use crate::{
    Error, Manifest, Store,
    manifest::{FileInfo, MAX_BYTES},
    name::MANIFEST,
};

impl Store {
    /// Reads all files of the checkpoints and compares digests, up to `jobs` files at a time. Calls `progress`
    /// with the bytes read since its last call. Needs memory for one block per job. The results are in the order
    /// of `manifests`.
    ///
    /// # Errors
    /// [`Error::Damaged`] with the first file of a checkpoint that does not match; [`Error::Missing`] if the checkpoint was
    /// removed meanwhile;
    /// [`Error::Storage`] with a file that cannot be read.
    pub fn verify(
        &self,
        manifests: &[&Manifest],
        jobs: NonZeroUsize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Vec<Result<(), Error>> {
        let tasks: Vec<FileInfo> = manifests.iter().flat_map(|manifest| manifest.files()).collect();
        let outcomes = in_parallel(&tasks, jobs, |file| {
            self.read_verified(file, &mut |_, block| progress(block.len() as u64))
        });
        let mut outcomes = outcomes.into_iter();
        let per_manifest = manifests.iter().map(|manifest| {
            let all: Vec<_> = outcomes.by_ref().take(manifest.files().count()).collect();
            let verified: Result<(), Error> = all.into_iter().collect();
            verified.map_err(|error| self.unless_removed(manifest, error))
        });
        per_manifest.collect()
    }

    /// The error of reading a checkpoint, or that there is none: a job removes old ones, the manifest first.
    pub(crate) fn unless_removed(&self, manifest: &Manifest, error: Error) -> Error {
        let name = manifest.name();
        let is_removed = || matches!(self.read(&format!("{name}/{MANIFEST}"), MAX_BYTES), Ok(None));
        match error {
            Error::Damaged { .. } if is_removed() => {
                Error::Missing { name, location: self.location().to_owned() }
            }
            error => error,
        }
    }

    /// Passes a file to `each(start, bytes)` block by block, and compares the digest at the end.
    pub(crate) fn read_verified(
        &self,
        file: &FileInfo,
        each: &mut dyn FnMut(u64, &[u8]),
    ) -> Result<(), Error> {
        let mut hasher = blake3::Hasher::new();
        let mut start = 0;
        self.read_present(file, 0..file.bytes, &mut |block| {
            hasher.update(block);
            each(start, block);
            start += block.len() as u64;
        })?;
        if hasher.finalize().to_hex().as_str() == file.blake3 {
            Ok(())
        } else {
            Err(file.damaged(" does not match its digest"))
        }
    }

    /// Reads a range of a file; a missing file is reported as damage.
    pub(crate) fn read_present(
        &self,
        file: &FileInfo,
        range: Range<u64>,
        each: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        match self.read_blocks(&file.path, range, each) {
            Err(Error::Storage { source, .. })
                if matches!(*source, object_store::Error::NotFound { .. }) =>
            {
                Err(file.damaged(" is missing"))
            }
            read => read,
        }
    }
}

/// Runs all tasks, up to `jobs` at a time. The results are in the order of the tasks.
pub(crate) fn in_parallel<T: Sync, O: Send + Sync>(
    tasks: &[T],
    jobs: NonZeroUsize,
    work: impl Fn(&T) -> O + Sync,
) -> Vec<O> {
    let outcomes: Vec<OnceLock<O>> = tasks.iter().map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let index = next.fetch_add(1, Relaxed)
            && let Some((task, outcome)) = tasks.get(index).zip(outcomes.get(index))
        {
            let _ = outcome.set(work(task));
        }
    };
    thread::scope(|scope| {
        for _ in 1..jobs.get().min(tasks.len()) {
            scope.spawn(work);
        }
        work();
    });
    outcomes.into_iter().filter_map(OnceLock::into_inner).collect()
}
