//! The place where checkpoints lie, and the write that commits one.

use std::{
    collections::HashMap,
    fmt, fs, io,
    path::{self, PathBuf},
    sync::Arc,
};

use baton_job::{Rank, message::Commit};
use object_store::{
    ObjectStore, PutMode, local::LocalFileSystem, memory::InMemory, path::Path, prefix::PrefixStore,
};

use crate::{
    Access, Error, Manifest, NewerVersion, SaveId, ShardEntry, Snapshot,
    access::Location,
    blocking::Blocking,
    fence::Tombstone,
    folder,
    manifest::MAX_BYTES,
    name::{FROZEN, LATEST, MANIFEST, shard_file},
};

/// A folder of checkpoints, on disk or in a bucket. All calls block.
///
/// When a write returns it has survived the machine: `access` says how.
pub struct Store {
    location: String,
    /// Where a folder is.
    pub(crate) folder: Option<PathBuf>,
    pub(crate) objects: Arc<dyn ObjectStore>,
    pub(crate) blocking: Blocking,
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
/// [`Store::prove`].
#[derive(Clone, Debug, PartialEq)]
pub enum EntryState {
    /// All files are there and of the right size.
    Whole(Box<Manifest>),
    /// What is wrong with it.
    Damaged(String),
    /// It may be whole, and only a newer Baton can read it.
    Newer(NewerVersion),
    /// Its save was never finished.
    Unfinished,
}

impl EntryState {
    /// The manifest of a whole one.
    #[must_use]
    pub fn manifest(&self) -> Option<&Manifest> {
        match self {
            Self::Whole(manifest) => Some(manifest),
            Self::Damaged(_) | Self::Newer(_) | Self::Unfinished => None,
        }
    }

    /// Why it cannot be resumed from.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        match self {
            Self::Whole(_) => None,
            Self::Damaged(problem) => Some(problem.clone()),
            Self::Newer(version) => Some(version.to_string()),
            Self::Unfinished => Some(UNFINISHED.to_owned()),
        }
    }
}

/// Why a save without a manifest cannot be resumed from.
pub const UNFINISHED: &str = "its save was never finished";

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("location", &self.location).finish_non_exhaustive()
    }
}

impl Store {
    /// Opens a folder or `s3://bucket/prefix` for writing, a bucket as the environment's `AWS_*` variables
    /// say. A folder is made if it is not there.
    ///
    /// # Errors
    /// It cannot be made, or not be written to.
    pub fn open(location: &str) -> Result<Self, Error> {
        Self::open_with(location, &Access::default())
    }

    /// As [`Store::open`], with another way to reach buckets.
    ///
    /// # Errors
    /// It cannot be made, or not be written to.
    pub fn open_with(location: &str, access: &Access) -> Result<Self, Error> {
        // Better now than at the first save, hours later.
        match Location::of(location).map_err(|problem| unusable(location, problem))? {
            Location::Bucket { name, prefix } => {
                let store = Self::in_bucket(location, name, prefix, access)?;
                let probe = format!("probe-{}", std::process::id());
                store.write(&probe, "probe".into(), PutMode::Overwrite)?;
                store.delete(&Path::from(probe))?;
                Ok(store)
            }
            Location::Folder(folder) => {
                let path = path::Path::new(folder);
                let prepared = folder::create(path).and_then(|()| folder::probe(path));
                prepared.map_err(|error| unusable(location, error))?;
                Self::in_folder(location)
            }
        }
    }

    /// Opens a folder or `s3://bucket/prefix` as it is.
    ///
    /// # Errors
    /// The folder is not there; the environment makes no way to the bucket. Whether the bucket is there is
    /// seen at the first use.
    pub fn open_existing(location: &str) -> Result<Self, Error> {
        match Location::of(location).map_err(|problem| unusable(location, problem))? {
            Location::Bucket { name, prefix } => {
                Self::in_bucket(location, name, prefix, &Access::default())
            }
            Location::Folder(_) => Self::in_folder(location),
        }
    }

    fn in_bucket(
        location: &str,
        bucket: &str,
        prefix: &str,
        access: &Access,
    ) -> Result<Self, Error> {
        let prefix = Path::parse(prefix).map_err(|error| unusable(location, error))?;
        let objects = access.bucket(bucket).map_err(|error| unusable(location, error))?;
        Self::over(location, Arc::new(PrefixStore::new(objects, prefix)))
    }

    fn in_folder(location: &str) -> Result<Self, Error> {
        let files = LocalFileSystem::new_with_prefix(location)
            .map_err(|error| unusable(location, error))?
            .with_fsync(true);
        let store = Self::over(location, Arc::new(files))?;
        Ok(Self { folder: Some(PathBuf::from(location)), ..store })
    }

    /// A store in memory, for tests.
    ///
    /// # Errors
    /// The system refuses threads.
    pub fn memory() -> Result<Self, Error> {
        Self::over("memory", Arc::new(InMemory::new()))
    }

    /// A store on any object store that lists what was written and knows create-only writes. Messages
    /// call it `location`.
    ///
    /// # Errors
    /// The system refuses threads.
    pub fn over(location: &str, objects: Arc<dyn ObjectStore>) -> Result<Self, Error> {
        let blocking = Blocking::new().map_err(|error| unusable(location, error))?;
        Ok(Self { location: location.to_owned(), folder: None, objects, blocking })
    }

    /// The folder, or `s3://bucket/prefix`.
    #[must_use]
    pub fn location(&self) -> &str {
        &self.location
    }

    /// All checkpoints, newest first.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn list(&self) -> Result<Vec<Entry>, Error> {
        let mut entries = Vec::new();
        for id in self.ids()? {
            let entry = self.entry(id)?;
            if entry.state != EntryState::Unfinished || !self.is_cleared(id)? {
                entries.push(entry);
            }
        }
        Ok(entries)
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

    /// Writes one rank's slices, durable on return. Their memory is read where it lies.
    ///
    /// # Errors
    /// A newer generation has taken over; the checkpoint is committed already; the file cannot be
    /// written, for example because the disk is full.
    pub fn write_shard(
        &self,
        save: &SaveId,
        rank: Rank,
        world_size: u32,
        snapshot: &Snapshot,
    ) -> Result<ShardEntry, Error> {
        self.check_fence(save.generation)?;
        if let Some(there) = self.read(&format!("{}/{MANIFEST}", save.name()), MAX_BYTES)? {
            return Err(taken(*save, &there));
        }
        let file = shard_file(rank, world_size);
        let pieces = snapshot.encode().map_err(|error| Error::Unfit {
            name: save.name(),
            problem: format!("{file} cannot be encoded: {error}"),
        })?;
        let bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
        let digest = self.write_large(&format!("{}/{file}", save.name()), pieces)?;
        Ok(ShardEntry { file, bytes, blake3: digest.to_hex().to_string(), rank })
    }

    /// Commits a checkpoint whose shards are all durable. To commit the very same one again changes
    /// nothing.
    ///
    /// # Errors
    /// A newer generation has taken over; there is another of that name; the manifest is not
    /// consistent or not that of the shards in the folder; it cannot be written.
    pub fn commit(&self, manifest: &Manifest) -> Result<Commit, Error> {
        let name = manifest.name();
        let bytes = manifest.encode()?;
        if let Some(problem) = self.wrong_file(manifest)? {
            // Pruned by a newer generation?
            self.check_fence(manifest.generation)?;
            let problem = format!("{problem}; do all nodes share {}?", self.location);
            return Err(Error::Unfit { name, problem });
        }
        // In this order: `fence` says why.
        self.check_fence(manifest.generation)?;
        if let Some(there) = self.create(&format!("{name}/{MANIFEST}"), &bytes)? {
            return Err(taken(manifest.id(), &there));
        }
        // The commit stands without it: no reader relies on it, and the next commit mends it.
        let _ = self.write(LATEST, format!("{name}\n").into(), PutMode::Overwrite);
        Ok(manifest.to_commit())
    }

    /// Removes one checkpoint, its manifest first: half removed it is no checkpoint. A tombstone stays.
    pub(crate) fn remove(&self, id: SaveId) -> Result<(), Error> {
        let name = id.name();
        let manifest = format!("{name}/{MANIFEST}");
        let there = self.read(&manifest, MAX_BYTES)?;
        let is_closed = there.is_some_and(|bytes| Tombstone::parse(&bytes).is_some());
        if !is_closed {
            self.delete(&Path::from(manifest))?;
            // A power cut must not bring the manifest back without its shards.
            self.in_its_folder(id, folder::sync)?;
        }
        for file in self.files(&name)? {
            if !is_closed || file.location.filename() != Some(MANIFEST) {
                self.delete(&file.location)?;
            }
        }
        // An object store knows no folders, and hides the temporary files that a crash leaves.
        self.in_its_folder(id, |folder| match is_closed {
            true => folder::clear(folder, MANIFEST),
            false => fs::remove_dir_all(folder),
        })
    }

    /// Does what an object store cannot, if this is a folder; fine if that is gone.
    fn in_its_folder(
        &self,
        id: SaveId,
        work: impl FnOnce(&path::Path) -> io::Result<()>,
    ) -> Result<(), Error> {
        let Some(folder) = &self.folder else { return Ok(()) };
        match work(&folder.join(id.name())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(unusable(&self.location, format!("{}: {error}", id.name())))
            }
            _ => Ok(()),
        }
    }

    fn entry(&self, id: SaveId) -> Result<Entry, Error> {
        let state = match self.inspect(id) {
            Ok(Some(manifest)) => EntryState::Whole(Box::new(manifest)),
            Ok(None) => EntryState::Unfinished,
            Err(Error::Damaged { problem, .. }) => EntryState::Damaged(problem),
            Err(Error::NewerVersion { version, .. }) => EntryState::Newer(version),
            Err(error) if self.is_unreachable(&error) => return Err(error),
            Err(error) => EntryState::Damaged(error.to_string()),
        };
        Ok(Entry { name: id.name(), id, state })
    }

    /// Whether the network failed, where a disk would have lost a file.
    pub(crate) fn is_unreachable(&self, error: &Error) -> bool {
        matches!(error, Error::Storage { .. })
            && matches!(Location::of(&self.location), Ok(Location::Bucket { .. }))
    }

    /// The manifest of a checkpoint whose files have the right sizes; `None` if it is unfinished.
    pub(crate) fn inspect(&self, id: SaveId) -> Result<Option<Manifest>, Error> {
        let Some(bytes) = self.read(&format!("{}/{MANIFEST}", id.name()), MAX_BYTES)? else {
            return Ok(None);
        };
        if Tombstone::parse(&bytes).is_some() {
            return Ok(None);
        }
        let manifest = Manifest::parse(id, &bytes)?;
        match self.wrong_file(&manifest)? {
            Some(problem) => Err(Error::Damaged { name: id.name(), problem }),
            None => Ok(Some(manifest)),
        }
    }

    /// Whether an unfinished save was pruned and only its tombstone is left.
    fn is_cleared(&self, id: SaveId) -> Result<bool, Error> {
        let files = self.files(&id.name())?;
        Ok(matches!(files.as_slice(), [only] if only.location.filename() == Some(MANIFEST)))
    }

    /// The first file that is not there, or not of the size that the manifest tells.
    fn wrong_file(&self, manifest: &Manifest) -> Result<Option<String>, Error> {
        let mut files = self.files(&manifest.name())?;
        if !manifest.frozen.is_empty() {
            files.extend(self.files(FROZEN)?);
        }
        let sizes: HashMap<&str, u64> =
            files.iter().map(|file| (file.location.as_ref(), file.size)).collect();
        Ok(manifest.files().find_map(|file| match sizes.get(file.path.as_str()) {
            None => Some(format!("{} is missing", file.name)),
            Some(size) if *size != file.bytes => {
                Some(format!("{} has {size} bytes instead of {}", file.name, file.bytes))
            }
            Some(_) => None,
        }))
    }
}

fn unusable(location: &str, problem: impl fmt::Display) -> Error {
    Error::Location { location: location.to_owned(), problem: problem.to_string() }
}

/// Why nothing can be written to a save, given what stands in its manifest's place.
pub(crate) fn taken(id: SaveId, there: &[u8]) -> Error {
    match Tombstone::parse(there) {
        Some(tombstone) => Error::Fenced { mine: id.generation, fence: tombstone.abandoned_by },
        None => Error::Exists(id.name()),
    }
}
