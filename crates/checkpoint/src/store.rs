//! The place where checkpoints lie, and the write that commits one.

use std::{fmt, path, sync::Arc};

use baton_job::{Generation, Rank, message::Commit};
use bytes::Bytes;
use futures::TryStreamExt;
use object_store::{
    ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, local::LocalFileSystem,
    path::Path,
};
use serde::Deserialize;

use crate::{
    Error, Manifest, SaveId, ShardEntry, Snapshot,
    blocking::Blocking,
    folder,
    manifest::MAX_BYTES,
    name::{FENCE, LATEST, MANIFEST, shard_file},
};

/// A folder of checkpoints. All calls block.
///
/// Files are written under a temporary name, fsynced, renamed, and the folder is fsynced: when a
/// write returns it has survived the machine.
pub struct Store {
    location: String,
    objects: Arc<dyn ObjectStore>,
    blocking: Blocking,
}

/// One checkpoint folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub id: SaveId,
    /// Whether it can be resumed from.
    pub state: EntryState,
}

/// What a look at a checkpoint's manifest and file sizes tells. Digests are a matter of
/// [`Store::verify`].
#[derive(Clone, Debug, PartialEq)]
pub enum EntryState {
    /// All files are there and of the right size.
    Whole(Box<Manifest>),
    /// What is wrong with it.
    Damaged(String),
    /// Its save was never finished.
    Unfinished,
}

#[derive(Deserialize)]
struct Fence {
    generation: Generation,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("location", &self.location).finish_non_exhaustive()
    }
}

impl Store {
    /// Opens the folder `location` for writing and makes it if it is not there.
    ///
    /// # Errors
    /// It cannot be made, or not be written to.
    pub fn open(location: &str) -> Result<Self, Error> {
        let refused = |problem: String| Error::Location { location: location.to_owned(), problem };
        let path = path::Path::new(location);
        folder::create(path).map_err(|error| refused(error.to_string()))?;
        // Better now than at the first save, hours later.
        folder::probe(path).map_err(|error| refused(error.to_string()))?;
        Self::open_existing(location)
    }

    /// Opens the folder `location` as it is.
    ///
    /// # Errors
    /// It is not there.
    pub fn open_existing(location: &str) -> Result<Self, Error> {
        let refused = |problem: String| Error::Location { location: location.to_owned(), problem };
        let files = LocalFileSystem::new_with_prefix(location)
            .map_err(|error| refused(error.to_string()))?
            .with_fsync(true);
        let blocking = Blocking::new().map_err(|error| refused(error.to_string()))?;
        Ok(Self { location: location.to_owned(), objects: Arc::new(files), blocking })
    }

    /// The folder.
    #[must_use]
    pub fn location(&self) -> &str {
        &self.location
    }

    /// All checkpoints, newest first.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn list(&self) -> Result<Vec<Entry>, Error> {
        Ok(self.ids()?.into_iter().map(|id| self.entry(id)).collect())
    }

    /// All checkpoints, finished or not, newest first.
    pub(crate) fn ids(&self) -> Result<Vec<SaveId>, Error> {
        let listing = self.wait(self.objects.list_with_delimiter(None));
        let listing = listing.map_err(|source| self.failed("list", "checkpoints", source))?;
        let names = listing.common_prefixes.iter().filter_map(Path::filename);
        let mut ids: Vec<SaveId> = names.filter_map(SaveId::parse).collect();
        ids.sort_unstable_by(|a, b| b.cmp(a));
        Ok(ids)
    }

    /// The checkpoint called `name`.
    ///
    /// # Errors
    /// There is none, or it is damaged.
    pub fn manifest(&self, name: &str) -> Result<Manifest, Error> {
        let missing = || Error::Missing { name: name.to_owned(), location: self.location.clone() };
        self.inspect(SaveId::parse(name).ok_or_else(missing)?)?.ok_or_else(missing)
    }

    /// The newest generation that was ever opened on this store; 0 if none was.
    ///
    /// # Errors
    /// The fence cannot be read.
    pub fn fence(&self) -> Result<Generation, Error> {
        let Some(bytes) = self.read(FENCE, MAX_BYTES)? else { return Ok(Generation(0)) };
        let fence: Fence = serde_json::from_slice(&bytes).map_err(|error| Error::Location {
            location: self.location.clone(),
            problem: format!("{FENCE} is not readable ({error})"),
        })?;
        Ok(fence.generation)
    }

    /// Keeps generations below `generation` from changing anything here; never lowers the fence.
    ///
    /// # Errors
    /// The fence cannot be read or written.
    pub fn raise_fence(&self, generation: Generation) -> Result<(), Error> {
        if self.fence()? >= generation {
            return Ok(());
        }
        let text = serde_json::json!({ "generation": generation }).to_string();
        self.write(FENCE, text.into(), PutMode::Overwrite)
    }

    /// Writes one rank's slices, durable on return. Their memory is read where it lies.
    ///
    /// # Errors
    /// The checkpoint is committed already, or the file cannot be written, for example because the
    /// disk is full.
    pub fn write_shard(
        &self,
        save: &SaveId,
        rank: Rank,
        world_size: u32,
        snapshot: &Snapshot,
    ) -> Result<ShardEntry, Error> {
        if self.read(&format!("{}/{MANIFEST}", save.name()), MAX_BYTES)?.is_some() {
            return Err(Error::Exists(save.name()));
        }
        let file = shard_file(rank, world_size);
        let encoded = snapshot.encode().map_err(|error| Error::Unfit {
            name: save.name(),
            problem: format!("{file} cannot be encoded: {error}"),
        })?;
        let (bytes, blake3) = (encoded.len(), encoded.blake3());
        let entry = ShardEntry { file: file.clone(), bytes, blake3, rank };
        let payload = encoded.into_payload();
        self.write(&format!("{}/{file}", save.name()), payload, PutMode::Overwrite)?;
        Ok(entry)
    }

    /// Commits a checkpoint whose shards are all durable.
    ///
    /// # Errors
    /// A newer generation has taken over; there is one of that name; the manifest is not consistent
    /// or not that of the shards in the folder; it cannot be written.
    pub fn commit(&self, manifest: &Manifest) -> Result<Commit, Error> {
        self.check_fence(manifest.generation)?;
        let name = manifest.name();
        let bytes = manifest.encode()?;
        if let Some(problem) = self.wrong_file(manifest)? {
            let problem = format!("{problem}; do all nodes share {}?", self.location);
            return Err(Error::Unfit { name, problem });
        }
        match self.write(&format!("{name}/{MANIFEST}"), bytes.into(), PutMode::Create) {
            Err(Error::Storage { source, .. })
                if matches!(*source, object_store::Error::AlreadyExists { .. }) =>
            {
                return Err(Error::Exists(name));
            }
            other => other?,
        }
        // The commit stands without it: no reader relies on it, and the next commit mends it.
        let _ = self.write(LATEST, format!("{name}\n").into(), PutMode::Overwrite);
        Ok(manifest.to_commit())
    }

    /// Removes one checkpoint, its manifest first: half removed it is no checkpoint.
    pub(crate) fn remove(&self, id: SaveId) -> Result<(), Error> {
        let name = id.name();
        let removed = self.wait(async {
            let manifest = Path::from(format!("{name}/{MANIFEST}"));
            match self.objects.delete(&manifest).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
            let files: Vec<_> =
                self.objects.list(Some(&Path::from(name.as_str()))).try_collect().await?;
            for file in files {
                self.objects.delete(&file.location).await?;
            }
            Ok(())
        });
        removed.map_err(|source| self.failed("remove", &name, source))?;
        // An object store knows no folders, and hides the temporary files that a crash leaves.
        folder::remove(&path::Path::new(&self.location).join(&name)).map_err(|error| {
            Error::Location { location: self.location.clone(), problem: format!("{name}: {error}") }
        })
    }

    pub(crate) fn check_fence(&self, mine: Generation) -> Result<(), Error> {
        let fence = self.fence()?;
        if mine < fence { Err(Error::Fenced { mine, fence }) } else { Ok(()) }
    }

    /// A file's bytes if it is there and no larger than `most`.
    pub(crate) fn read(&self, file: &str, most: u64) -> Result<Option<Bytes>, Error> {
        let path = Path::from(file);
        let read = self.wait(async {
            let object = self.objects.get(&path).await?;
            if object.meta.size > most {
                let text =
                    format!("it has {} bytes, more than the {most} expected", object.meta.size);
                return Err(object_store::Error::Generic {
                    store: "checkpoint",
                    source: text.into(),
                });
            }
            object.bytes().await
        });
        match read {
            Ok(bytes) => Ok(Some(bytes)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(source) => Err(self.failed("read", file, source)),
        }
    }

    fn write(&self, file: &str, payload: PutPayload, mode: PutMode) -> Result<(), Error> {
        let path = Path::from(file);
        let put = self.objects.put_opts(&path, payload, PutOptions::from(mode));
        self.wait(put).map(|_| ()).map_err(|source| self.failed("write", file, source))
    }

    fn entry(&self, id: SaveId) -> Entry {
        let state = match self.inspect(id) {
            Ok(Some(manifest)) => EntryState::Whole(Box::new(manifest)),
            Ok(None) => EntryState::Unfinished,
            Err(Error::Damaged { problem, .. }) => EntryState::Damaged(problem),
            Err(error) => EntryState::Damaged(error.to_string()),
        };
        Entry { name: id.name(), id, state }
    }

    /// The manifest of a checkpoint whose files have the right sizes; `None` if it is unfinished.
    pub(crate) fn inspect(&self, id: SaveId) -> Result<Option<Manifest>, Error> {
        let Some(bytes) = self.read(&format!("{}/{MANIFEST}", id.name()), MAX_BYTES)? else {
            return Ok(None);
        };
        let manifest = Manifest::parse(id, &bytes)?;
        match self.wrong_file(&manifest)? {
            Some(problem) => Err(Error::Damaged { name: id.name(), problem }),
            None => Ok(Some(manifest)),
        }
    }

    /// The first file that is not there, or not of the size that the manifest tells.
    fn wrong_file(&self, manifest: &Manifest) -> Result<Option<String>, Error> {
        let name = manifest.name();
        let files = self.wait(async {
            self.objects.list(Some(&Path::from(name.as_str()))).try_collect::<Vec<_>>().await
        });
        let files = files.map_err(|source| self.failed("list", &name, source))?;
        Ok(manifest.shards.iter().find_map(|shard| {
            let file = files.iter().find(|file| file.location.filename() == Some(&shard.file));
            match file {
                None => Some(format!("{} is missing", shard.file)),
                Some(file) if file.size != shard.bytes => Some(format!(
                    "{} has {} bytes instead of {}",
                    shard.file, file.size, shard.bytes
                )),
                Some(_) => None,
            }
        }))
    }

    fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.blocking.run(future)
    }

    fn failed(&self, operation: &'static str, subject: &str, source: object_store::Error) -> Error {
        let (subject, location) = (subject.to_owned(), self.location.clone());
        Error::Storage { operation, subject, location, source: Box::new(source) }
    }
}
