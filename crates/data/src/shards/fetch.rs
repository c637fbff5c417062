//! One shard from the store into a file: in parts, a few at a time, digested on the way.

use std::{fs::File, os::unix::fs::FileExt, path::Path, sync::Arc};

use futures::{StreamExt, stream};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::{JoinError, JoinHandle, spawn_blocking},
};

use super::{
    Error,
    etag::{self, PartDigest, Verdict},
    io::Io,
    remote::{Object, Remote},
    signal::Signal,
    statistics::Counters,
};

/// Brings shards.
pub(super) struct Fetcher {
    pub(super) io: Io,
    pub(super) remote: Arc<Remote>,
    pub(super) counters: Arc<Counters>,
    pub(super) signal: Arc<Signal>,
    /// Length of a part in bytes.
    pub(super) part_bytes: u64,
    /// As many parts as may be in memory, whoever fetches them.
    pub(super) parts: Arc<Semaphore>,
    /// As many as one shard may have of those.
    pub(super) parts_at_once: usize,
}

/// A part that has come.
struct Part {
    bytes: Vec<u8>,
    /// If the object's tag is made of such.
    digest: Option<PartDigest>,
    /// Its place in memory's bound.
    _place: OwnedSemaphorePermit,
}

impl Fetcher {
    /// Fills `file` with the shard and returns the digest of its bytes.
    ///
    /// # Errors
    /// The store fails for good, the file cannot be written, or the data set was dropped.
    pub(super) fn fetch(
        &self,
        object: &Object,
        file: &File,
        path: &Path,
    ) -> Result<blake3::Hash, Error> {
        let (first, verdict) = self.download(object, file, path)?;
        if verdict != Verdict::Suspect {
            return Ok(first);
        }
        // Either the bytes are wrong or the tag is no digest of them: a second download tells.
        self.counters.retries.add(1);
        let (second, verdict) = self.download(object, file, path)?;
        if second == first {
            self.remote.tags_are_no_digests();
            return Ok(second);
        }
        self.counters.damaged.add(1);
        match verdict {
            Verdict::Suspect => Err(Error::Damaged { url: object.url.clone() }),
            Verdict::Same | Verdict::Unknown => Ok(second),
        }
    }

    /// Parts come in any order, but are digested and written in theirs, by the calling thread: the
    /// network's threads never wait for a disk.
    fn download(
        &self,
        object: &Object,
        file: &File,
        path: &Path,
    ) -> Result<(blake3::Hash, Verdict), Error> {
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
        Ok((digest.finalize(), check.verdict()))
    }

    fn next(
        &self,
        object: &Object,
        part: impl Future<Output = Option<Result<Part, Error>>>,
    ) -> Result<Option<Part>, Error> {
        let cancelled = || Error::Cancelled { name: object.url.clone() };
        self.io.run(async {
            tokio::select! {
                part = part => part.transpose(),
                () = self.signal.over() => Err(cancelled()),
            }
        })
    }

    fn parts(
        &self,
        object: &Object,
        with_digest: bool,
    ) -> impl futures::Stream<Item = Result<Part, Error>> {
        let size = object.meta.size;
        let starts = (0..size.div_ceil(self.part_bytes)).map(|part| part * self.part_bytes);
        let ranges = starts.map(move |start| start..size.min(start + self.part_bytes));
        let object = object.clone();
        stream::iter(ranges)
            .then(async |range| {
                // Places are taken in the order of the parts: were a later part to take the last
                // one, the earlier, which must be written first, would wait for ever.
                (range, Arc::clone(&self.parts).acquire_owned().await)
            })
            .map(move |(range, place)| {
                let (remote, object) = (Arc::clone(&self.remote), object.clone());
                let part = async move {
                    let cancelled = |_| Error::Cancelled { name: object.url.clone() };
                    let _place = place.map_err(cancelled)?;
                    let bytes = remote.piece(&object, range).await?;
                    if !with_digest {
                        return Ok(Part { bytes, digest: None, _place });
                    }
                    // MD5 is slower than most networks, but here several parts are at it.
                    let digested = spawn_blocking(move || (etag::part_digest(&bytes), bytes));
                    let (digest, bytes) = digested.await.map_err(broken)?;
                    Ok(Part { bytes, digest: Some(digest), _place })
                };
                // A task of its own, so that it goes on while the caller writes.
                Task(self.io.handle().spawn(part))
            })
            .map(async |mut task| (&mut task.0).await.unwrap_or_else(|error| Err(broken(error))))
            .buffered(self.parts_at_once)
    }
}

/// Ends its task when it is dropped, as after an error in another part.
struct Task<T>(JoinHandle<T>);

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn broken(error: JoinError) -> Error {
    Error::Thread(std::io::Error::other(error))
}
