//! Operations on a single file of the store, in a folder or a bucket.

use std::{
    fs, io, thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, future::ready};
use object_store::{
    ObjectMeta, ObjectStoreExt, PutMode, PutPayload,
    path::{self, Path},
};

use crate::{
    Error, Store, direct,
    error::io_error,
    folder,
    manifest::MAX_BYTES,
    transfer::{upload, whole},
};

/// Time after which a claim of a name is one that a crash has left, see [`folder::create_by_claim`].
const CLAIM_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 5_000 });
const CLAIM_POLL: Duration = Duration::from_millis(20);
/// Number of attempts for operations that the object store's client does not retry by itself.
const ATTEMPTS: u32 = 4;

impl Store {
    /// Names of the folders in the store; empty if it does not exist.
    pub(crate) fn folders(&self) -> Result<Vec<String>, Error> {
        let Some(folder) = &self.folder else {
            let listing = self.wait(self.objects.list_with_delimiter(None));
            let listing = listing.map_err(|source| self.failed("list", "checkpoints", source))?;
            let names = listing.common_prefixes.iter().filter_map(Path::filename);
            return Ok(names.map(str::to_owned).collect());
        };
        // The object store's own listing fails for a name that is not UTF-8, which is never one of Baton's.
        folder::folders(folder).map_err(|error| {
            self.failed("list", "checkpoints", to_storage_error("checkpoints", error))
        })
    }

    /// All files in a folder of the store and its subfolders; empty if the folder does not exist. Other people's files
    /// whose names are not UTF-8 are left out.
    pub(crate) fn files(&self, folder: &str) -> Result<Vec<ObjectMeta>, Error> {
        let path = Path::from(folder);
        let listing = self.objects.list(Some(&path)).filter(|file| ready(!is_foreign(file)));
        self.wait(listing.try_collect()).map_err(|source| self.failed("list", folder, source))
    }

    /// The bytes of a small file, at most `max_bytes`; `None` if the file does not exist.
    pub(crate) fn read(&self, file: &str, max_bytes: u64) -> Result<Option<Bytes>, Error> {
        if self.is_special(file) {
            let error = io::Error::other(folder::NOT_REGULAR);
            return Err(self.failed("read", file, to_storage_error(file, error)));
        }
        let path = Path::from(file);
        match self.wait(whole(&*self.objects, &path, max_bytes)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(source) => Err(self.failed("read", file, source)),
        }
    }

    /// Whether something that is not a regular file has this name in a local folder. The object store would open it, and
    /// wait for ever if it is a named pipe.
    pub(crate) fn is_special(&self, file: &str) -> bool {
        let Some(folder) = &self.folder else { return false };
        fs::metadata(folder.join(file)).is_ok_and(|metadata| !metadata.is_file())
    }

    /// Writes a file. It appears atomically and is durable when this returns.
    pub(crate) fn write(
        &self,
        file: &str,
        payload: PutPayload,
        mode: PutMode,
    ) -> Result<(), Error> {
        let path = Path::from(file);
        if let (PutMode::Create, Some(folder)) = (&mode, &self.folder) {
            // A mount may come and go, so every file is tried anew.
            let linked = self.tries_links.then(|| {
                self.wait(self.objects.put_opts(&path, payload.clone(), PutMode::Create.into()))
            });
            return match linked {
                Some(Ok(_)) => Ok(()),
                Some(Err(source)) if !lacks_links(&source) => {
                    Err(self.failed("write", file, source))
                }
                _ => folder::create_by_claim(&folder.join(file), &Bytes::from(payload))
                    .map_err(|error| self.failed("write", file, to_storage_error(file, error))),
            };
        }
        let written = self.wait(async {
            match mode {
                PutMode::Overwrite if self.folder.is_none() => {
                    upload(&*self.objects, &path, payload).await
                }
                mode => self.objects.put_opts(&path, payload, mode.into()).await.map(drop),
            }
        });
        written.map_err(|source| self.failed("write", file, source))
    }

    /// Writes a large file as [`write`](Self::write) does and returns its BLAKE3 digest. `pieces` are not joined
    /// into one buffer.
    pub(crate) fn write_large(
        &self,
        file: &str,
        pieces: Vec<Bytes>,
    ) -> Result<blake3::Hash, Error> {
        match &self.folder {
            Some(folder) => {
                let path = folder.join(file);
                let created = path.parent().map_or(Ok(()), folder::create);
                let written =
                    created.and_then(|()| direct::write(&path, pieces.iter().map(AsRef::as_ref)));
                written.map_err(|error| self.failed("write", file, to_storage_error(file, error)))
            }
            None => {
                let mut hasher = blake3::Hasher::new();
                for piece in &pieces {
                    hasher.update(piece);
                }
                self.write(file, pieces.into_iter().collect(), PutMode::Overwrite)?;
                Ok(hasher.finalize())
            }
        }
    }

    /// Creates a file, unless a file of that name exists: then its bytes are returned. A file with exactly the
    /// same bytes counts as created, because the response to an earlier successful attempt may have been lost.
    pub(crate) fn create(&self, file: &str, bytes: &[u8]) -> Result<Option<Bytes>, Error> {
        let payload = Bytes::copy_from_slice(bytes);
        let (mut attempt, begin) = (1, Instant::now());
        loop {
            let Err(error) = self.write(file, payload.clone().into(), PutMode::Create) else {
                return Ok(None);
            };
            match self.read(file, MAX_BYTES) {
                Ok(Some(existing)) if existing == payload => return Ok(None),
                // Somebody is creating it.
                Ok(Some(existing))
                    if existing.is_empty()
                        && self.folder.is_some()
                        && begin.elapsed() < CLAIM_TIMEOUT =>
                {
                    thread::sleep(CLAIM_POLL);
                }
                Ok(Some(existing)) => return Ok(Some(existing)),
                Ok(None) if attempt < ATTEMPTS && may_be_repeated(&error) => attempt += 1,
                _ => return Err(error),
            }
        }
    }

    /// Removes a file; not an error if it does not exist.
    pub(crate) fn delete(&self, file: &Path) -> Result<(), Error> {
        let mut attempt = 1;
        loop {
            match self.wait(self.objects.delete(file)) {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => return Ok(()),
                // A bucket's client does not retry this when the connection breaks.
                Err(object_store::Error::Generic { .. }) if attempt < ATTEMPTS => attempt += 1,
                Err(source) => return Err(self.failed("remove", file.as_ref(), source)),
            }
        }
    }

    pub(crate) fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.blocking.run(future)
    }

    pub(crate) fn failed(
        &self,
        operation: &'static str,
        subject: &str,
        source: object_store::Error,
    ) -> Error {
        let (subject, location) = (subject.to_owned(), self.location().to_owned());
        Error::Storage { operation, subject, location, source: Box::new(source) }
    }
}

/// Whether a file could not be created because the file system has no hard links.
fn lacks_links(error: &object_store::Error) -> bool {
    let kind = io_error(error).map(io::Error::kind);
    matches!(kind, Some(io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied))
}

/// Whether a file cannot be listed because its name is not UTF-8.
fn is_foreign(file: &object_store::Result<ObjectMeta>) -> bool {
    matches!(file, Err(object_store::Error::InvalidPath { source: path::Error::NonUnicode { .. } }))
}

/// Whether another attempt may succeed. S3 responds with "conflict" to one of two concurrent writes, and the other may
/// still fail. Also, the client does not retry create-only requests when the connection breaks.
fn may_be_repeated(error: &Error) -> bool {
    let Error::Storage { source, .. } = error else { return false };
    matches!(
        **source,
        object_store::Error::AlreadyExists { .. } | object_store::Error::Generic { .. }
    )
}

/// Converts an I/O error into the error that an object store would return.
pub(crate) fn to_storage_error(file: &str, error: io::Error) -> object_store::Error {
    let (store, source) = ("checkpoint", Box::new(error));
    match source.kind() {
        io::ErrorKind::NotFound => object_store::Error::NotFound { path: file.to_owned(), source },
        _ => object_store::Error::Generic { store, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_hard_link_counts_as_one() {
        let failed =
            |number| to_storage_error("manifest.json", io::Error::from_raw_os_error(number));
        let (not_supported, not_permitted, no_space, exists) = (95, 1, 28, 17);
        assert!(lacks_links(&failed(not_supported)) && lacks_links(&failed(not_permitted)));
        assert!(!lacks_links(&failed(no_space)) && !lacks_links(&failed(exists)));
    }

    #[test]
    fn a_claim_that_a_crash_left_is_taken_for_a_file_only_after_a_while() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open_without_links(folder.path().to_str().unwrap()).unwrap();
        fs::write(folder.path().join("claimed"), b"").unwrap();
        let begin = Instant::now();

        let existing = store.create("claimed", b"content").unwrap();

        assert_eq!(existing, Some(Bytes::new()));
        assert!(begin.elapsed() >= CLAIM_TIMEOUT);
    }
}
