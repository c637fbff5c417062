//! What the store does with a single file, in a folder or a bucket.

use std::io;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::{ObjectMeta, ObjectStoreExt, PutMode, PutPayload, path::Path};

use crate::{
    Error, Store, direct, folder,
    manifest::MAX_BYTES,
    transfer::{download, upload, whole},
};

/// How often is tried what the object store's client does not repeat by itself.
const ATTEMPTS: u32 = 4;

impl Store {
    /// All files in a folder of the store and below; none if it is not there.
    pub(crate) fn files(&self, folder: &str) -> Result<Vec<ObjectMeta>, Error> {
        let path = Path::from(folder);
        let listing = self.objects.list(Some(&path)).try_collect();
        self.wait(listing).map_err(|source| self.failed("list", folder, source))
    }

    /// A file's bytes if it is there and no larger than `most`.
    pub(crate) fn read(&self, file: &str, most: u64) -> Result<Option<Bytes>, Error> {
        let path = Path::from(file);
        // A disk is fastest in one go.
        let read = match self.folder.is_some() {
            true => self.wait(whole(&*self.objects, &path, most)),
            false => self.wait(download(&*self.objects, &path, most)),
        };
        match read {
            Ok(bytes) => Ok(Some(bytes)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(source) => Err(self.failed("read", file, source)),
        }
    }

    /// Writes a file that appears in one piece and is durable on return.
    pub(crate) fn write(
        &self,
        file: &str,
        payload: PutPayload,
        mode: PutMode,
    ) -> Result<(), Error> {
        let path = Path::from(file);
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

    /// Writes a large file as [`write`](Self::write) does; its BLAKE3 digest. The memory of `pieces` is read
    /// where it lies.
    pub(crate) fn write_large(
        &self,
        file: &str,
        pieces: Vec<Bytes>,
    ) -> Result<blake3::Hash, Error> {
        match &self.folder {
            Some(folder) => {
                let path = folder.join(file);
                let made = path.parent().map_or(Ok(()), folder::create);
                let written =
                    made.and_then(|()| direct::write(&path, pieces.iter().map(AsRef::as_ref)));
                written.map_err(|error| self.failed("write", file, of_disk(file, error)))
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

    /// Creates a file, unless there is one of that name: then its bytes are returned. A file with the very
    /// same bytes is taken for ours, for an answer may be lost after the work was done.
    pub(crate) fn create(&self, file: &str, bytes: &[u8]) -> Result<Option<Bytes>, Error> {
        let payload = Bytes::copy_from_slice(bytes);
        let mut attempt = 1;
        loop {
            let Err(error) = self.write(file, payload.clone().into(), PutMode::Create) else {
                return Ok(None);
            };
            match self.read(file, MAX_BYTES) {
                Ok(Some(there)) if there == payload => return Ok(None),
                Ok(Some(there)) => return Ok(Some(there)),
                Ok(None) if attempt < ATTEMPTS && may_be_repeated(&error) => attempt += 1,
                _ => return Err(error),
            }
        }
    }

    /// Removes a file; fine if there is none.
    pub(crate) fn delete(&self, file: &Path) -> Result<(), Error> {
        let mut attempt = 1;
        loop {
            match self.wait(self.objects.delete(file)) {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => return Ok(()),
                // A bucket's client does not repeat it when the connection breaks.
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

/// S3 answers "conflict" to one of two that write at the same moment, and the other may fail; and a request
/// that must not be done twice is not repeated by its client when the connection breaks.
fn may_be_repeated(error: &Error) -> bool {
    let Error::Storage { source, .. } = error else { return false };
    matches!(
        **source,
        object_store::Error::AlreadyExists { .. } | object_store::Error::Generic { .. }
    )
}

/// As the store would tell it.
pub(crate) fn of_disk(file: &str, error: io::Error) -> object_store::Error {
    let (store, source) = ("checkpoint", Box::new(error));
    match source.kind() {
        io::ErrorKind::NotFound => object_store::Error::NotFound { path: file.to_owned(), source },
        _ => object_store::Error::Generic { store, source },
    }
}
