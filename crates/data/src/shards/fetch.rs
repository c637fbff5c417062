//! Downloads one shard from the store into a file: in parts, a few at a time, with a digest.

use std::{fs::File, os::unix::fs::FileExt, path::Path, sync::Arc};

use baton_s3::Blocking;
use futures::{StreamExt, stream};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::{JoinError, JoinHandle, spawn_blocking},
};

use super::{
    Error,
    etag::{self, PartDigest, TagMatch},
    remote::{BucketClient, Object},
    signal::ChangeSignal,
};

/// Downloads shards.
pub(super) struct Fetcher {
    pub(super) io: Blocking,
    pub(super) remote: Arc<BucketClient>,
    pub(super) signal: Arc<ChangeSignal>,
    /// Size of a part, bytes.
    pub(super) part_bytes: u64,
    /// Limits the number of parts in memory, for all downloads together.
    pub(super) parts: Arc<Semaphore>,
    /// Maximum number of parts in memory of one shard.
    pub(super) max_concurrent_parts: usize,
}

/// A downloaded part.
struct DownloadedPart {
    bytes: Vec<u8>,
    /// MD5 of the part, if the object's tag is computed from those of the parts.
    digest: Option<PartDigest>,
    /// Permission to be in memory.
    _permit: OwnedSemaphorePermit,
}

impl Fetcher {
    /// Fills `file` with the shard and returns the digest of its bytes.
    ///
    /// # Errors
    /// The store fails after all retries, the file cannot be written, or the data set was dropped.
    pub(super) fn fetch(
        &self,
        object: &Object,
        file: &File,
        path: &Path,
    ) -> Result<blake3::Hash, Error> {
        let (first, tag_match) = self.download(object, file, path)?;
        if tag_match != TagMatch::Mismatch {
            return Ok(first);
        }
        // Either the bytes are wrong or the tag is not a digest of them: a second download decides.
        let (second, tag_match) = self.download(object, file, path)?;
        if second == first {
            self.remote.tags_are_no_digests();
            return Ok(second);
        }
        match tag_match {
            TagMatch::Mismatch => Err(Error::Damaged { url: object.url.clone() }),
            TagMatch::Match | TagMatch::Unknown => Ok(second),
        }
    }

    /// Parts are downloaded in any order, but digested and written in sequence, by the calling thread, so that the
    /// network threads never wait for a disk.
    fn download(
        &self,
        object: &Object,
        file: &File,
        path: &Path,
    ) -> Result<(blake3::Hash, TagMatch), Error> {
        let mut digest = blake3::Hasher::new();
        let mut check = self.remote.check(object, object.meta.size.div_ceil(self.part_bytes));
        let mut offset = 0;
        let mut parts = std::pin::pin!(self.parts(object, check.is_by_part()));
        while let Some(part) = self.next(object, parts.next())? {
            digest.update(&part.bytes);
            check.update(&part.bytes, part.digest);
            file.write_all_at(&part.bytes, offset).map_err(Error::io("write", path))?;
            offset += part.bytes.len() as u64;
        }
        Ok((digest.finalize(), check.tag_match()))
    }

    fn next(
        &self,
        object: &Object,
        part: impl Future<Output = Option<Result<DownloadedPart, Error>>>,
    ) -> Result<Option<DownloadedPart>, Error> {
        let cancelled = || Error::Cancelled { name: object.url.clone() };
        self.io.run(async {
            tokio::select! {
                part = part => part.transpose(),
                () = self.signal.shutdown() => Err(cancelled()),
            }
        })
    }

    fn parts(
        &self,
        object: &Object,
        with_digest: bool,
    ) -> impl futures::Stream<Item = Result<DownloadedPart, Error>> {
        let size = object.meta.size;
        let starts = (0..size.div_ceil(self.part_bytes)).map(|part| part * self.part_bytes);
        let ranges = starts.map(move |start| start..size.min(start + self.part_bytes));
        let object = object.clone();
        stream::iter(ranges)
            .then(async |range| {
                // Permits must be taken in the order of the parts: if a later part took the last permit, the earlier
                // one, which must be written first, would wait forever.
                (range, Arc::clone(&self.parts).acquire_owned().await)
            })
            .map(move |(range, permit)| {
                let (remote, object) = (Arc::clone(&self.remote), object.clone());
                let part = async move {
                    let cancelled = |_| Error::Cancelled { name: object.url.clone() };
                    let _permit = permit.map_err(cancelled)?;
                    let bytes = remote.fetch_range(&object, range).await?;
                    if !with_digest {
                        return Ok(DownloadedPart { bytes, digest: None, _permit });
                    }
                    // MD5 is slower than most networks, so compute it for several parts in parallel.
                    let digested = spawn_blocking(move || (etag::part_digest(&bytes), bytes));
                    let (digest, bytes) = digested.await.map_err(task_failed)?;
                    Ok(DownloadedPart { bytes, digest: Some(digest), _permit })
                };
                // A separate task, so that it continues while the caller writes.
                AbortOnDrop(self.io.handle().spawn(part))
            })
            .map(async |mut task| {
                (&mut task.0).await.unwrap_or_else(|error| Err(task_failed(error)))
            })
            .buffered(self.max_concurrent_parts)
    }
}

/// Aborts its task when it is dropped, for example after an error in another part.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn task_failed(error: JoinError) -> Error {
    Error::FetchThread(std::io::Error::other(error))
}
