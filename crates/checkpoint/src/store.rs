//! The store of checkpoints, and the write that commits one.

use std::{
    collections::HashMap,
    fmt, fs, io,
    path::{self, PathBuf},
    sync::Arc,
};

use baton_job::{Rank, message::Commit};
use baton_s3::Blocking;
use object_store::{
    ObjectStore, PutMode, local::LocalFileSystem, memory::InMemory, path::Path, prefix::PrefixStore,
};

use crate::{
    BucketAccess, Error, Manifest, NewerVersion, SaveId, ShardEntry, Snapshot,
    access::Location,
    error::OTHER_FOLDER,
    evaluation::evaluation_file,
    fence::Tombstone,
    folder,
    manifest::MAX_BYTES,
    name::{FROZEN, LATEST, MANIFEST, shard_file},
};

/// A folder of checkpoints, on disk or in a bucket. All calls block.
///
/// When a write returns, its data is durable; see module `access`.
pub struct Store {
    location: String,
    /// Path of the folder; `None` for a bucket.
    pub(crate) folder: Option<PathBuf>,
    /// Whether a file is created by a hard link, if the folder's file system has them. Not in some tests.
    pub(crate) tries_links: bool,
    pub(crate) objects: Arc<dyn ObjectStore>,
    pub(crate) blocking: Blocking,
}

/// One checkpoint folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Name of the checkpoint.
    pub name: String,
    /// Identity of the checkpoint.
    pub id: SaveId,
    /// Whether it can be resumed from.
    pub state: EntryState,
}

/// State of a checkpoint, judged by its manifest and file sizes only. [`Store::verify`] checks digests.
#[derive(Clone, Debug, PartialEq)]
pub enum EntryState {
    /// All files exist with the right size.
    Complete(Box<Manifest>),
    /// Damaged, with a description of the problem.
    Damaged(String),
    /// Only a newer Baton can read it; whether it is complete is unknown.
    Newer(NewerVersion),
    /// Its save was never finished.
    Unfinished,
}

impl EntryState {
    /// The manifest of a complete checkpoint.
    #[must_use]
    pub fn manifest(&self) -> Option<&Manifest> {
        match self {
            Self::Complete(manifest) => Some(manifest),
            Self::Damaged(_) | Self::Newer(_) | Self::Unfinished => None,
        }
    }

    /// Why it is impossible to resume from the checkpoint; `None` if it is possible.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        match self {
            Self::Complete(_) => None,
            Self::Damaged(problem) => Some(problem.clone()),
            Self::Newer(version) => Some(version.to_string()),
            Self::Unfinished => Some(UNFINISHED.to_owned()),
        }
    }
}

/// The problem of a checkpoint without a manifest.
pub const UNFINISHED: &str = "its save was never finished";

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("location", &self.location).finish_non_exhaustive()
    }
}

impl Store {
    /// Opens a folder or `s3://bucket/prefix` for writing. Access to a bucket uses the environment's `AWS_*` variables.
    /// A missing folder is created.
    ///
    /// # Errors
    /// The folder cannot be created, or the store is not writable.
    pub fn open(location: &str) -> Result<Self, Error> {
        Self::open_with(location, &BucketAccess::default())
    }

    /// Like [`Store::open`], with explicit settings for bucket access.
    ///
    /// # Errors
    /// The folder cannot be created, or the store is not writable, or it is inside a checkpoint.
    pub fn open_with(location: &str, access: &BucketAccess) -> Result<Self, Error> {
        if let Some(name) = SaveId::around(location) {
            let problem = format!("it is inside checkpoint {name}, and would be removed with it");
            return Err(Error::unusable(
                location,
                problem,
                "choose a folder beside the checkpoints",
            ));
        }
        // Test a write now: otherwise the first save would fail, hours later.
        match parsed(location)? {
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
                prepared.map_err(|error| Error::unusable_folder(location, &error))?;
                Self::in_folder(location)
            }
        }
    }

    /// Opens an existing folder or `s3://bucket/prefix` without changing it.
    ///
    /// # Errors
    /// The folder does not exist; the environment has invalid settings for the bucket. A missing bucket is
    /// detected only when it is first used.
    pub fn open_existing(location: &str) -> Result<Self, Error> {
        Self::open_existing_with(location, &BucketAccess::default())
    }

    /// Like [`Store::open_existing`], with explicit settings for bucket access.
    ///
    /// # Errors
    /// As for [`Store::open_existing`].
    pub fn open_existing_with(location: &str, access: &BucketAccess) -> Result<Self, Error> {
        match parsed(location)? {
            Location::Bucket { name, prefix } => Self::in_bucket(location, name, prefix, access),
            Location::Folder(_) => Self::in_folder(location),
        }
    }

    fn in_bucket(
        location: &str,
        bucket: &str,
        prefix: &str,
        access: &BucketAccess,
    ) -> Result<Self, Error> {
        let prefix = Path::parse(prefix)
            .map_err(|error| Error::unusable(location, error, "give another prefix"))?;
        let objects = access
            .bucket(bucket)
            .map_err(|problem| Error::Access { location: location.to_owned(), problem })?;
        Self::from_object_store(location, Arc::new(PrefixStore::new(objects, prefix)))
    }

    fn in_folder(location: &str) -> Result<Self, Error> {
        // The library's message says neither that the folder is missing nor what to do.
        let found = fs::read_dir(location);
        found.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                Error::unusable(location, "it does not exist", "give the folder of the checkpoints")
            }
            _ => Error::unusable_folder(location, &error),
        })?;
        let files = LocalFileSystem::new_with_prefix(location)
            .map_err(|error| Error::unusable(location, error, OTHER_FOLDER))?
            .with_fsync(true);
        let store = Self::from_object_store(location, Arc::new(files))?;
        Ok(Self { folder: Some(PathBuf::from(location)), ..store })
    }

    /// Like [`Store::open`] for a folder whose file system has no hard links, for tests.
    ///
    /// # Errors
    /// As for [`Store::open`].
    #[doc(hidden)]
    pub fn open_without_links(folder: &str) -> Result<Self, Error> {
        Ok(Self { tries_links: false, ..Self::open(folder)? })
    }

    /// A store in memory, for tests.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn memory() -> Result<Self, Error> {
        Self::from_object_store("memory", Arc::new(InMemory::new()))
    }

    /// A store on any object store with consistent listings and create-only writes. `location` is its name in
    /// messages.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn from_object_store(location: &str, objects: Arc<dyn ObjectStore>) -> Result<Self, Error> {
        let blocking = Blocking::new("checkpoint-io", 1).map_err(|error| {
            Error::unusable(location, error, "raise this user's limit of processes (ulimit -u)")
        })?;
        let location = location.to_owned();
        Ok(Self { location, folder: None, tries_links: true, objects, blocking })
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
            if entry.state != EntryState::Unfinished || !self.only_tombstone_left(id)? {
                entries.push(entry);
            }
        }
        Ok(entries)
    }

    /// All checkpoints, finished or not, newest first.
    pub(crate) fn ids(&self) -> Result<Vec<SaveId>, Error> {
        let folders = self.folders()?;
        let mut ids: Vec<SaveId> = folders.iter().filter_map(|name| SaveId::parse(name)).collect();
        ids.sort_unstable_by(|a, b| b.cmp(a));
        Ok(ids)
    }

    /// The manifest of the checkpoint `name`.
    ///
    /// # Errors
    /// It does not exist or is damaged.
    pub fn manifest(&self, name: &str) -> Result<Manifest, Error> {
        let missing = || Error::Missing { name: name.to_owned(), location: self.location.clone() };
        self.inspect(SaveId::parse(name).ok_or_else(missing)?)?.ok_or_else(missing)
    }

    /// Writes the slices of one rank, durable on return. The snapshot is not copied.
    ///
    /// # Errors
    /// A newer generation has taken over; the checkpoint is already committed; the file cannot be
    /// written, for example because the disk is full.
    pub fn write_shard(
        &self,
        save: &SaveId,
        rank: Rank,
        world_size: u32,
        snapshot: &Snapshot,
    ) -> Result<ShardEntry, Error> {
        self.check_fence(save.generation)?;
        if let Some(existing) = self.read(&format!("{}/{MANIFEST}", save.name()), MAX_BYTES)? {
            return Err(self.taken(*save, &existing));
        }
        let file = shard_file(rank, world_size);
        let pieces = snapshot.encode().map_err(|error| Error::NotCommittable {
            name: save.name(),
            problem: format!("{file} cannot be encoded: {error}"),
        })?;
        let bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
        let digest = self.write_large(&format!("{}/{file}", save.name()), pieces)?;
        Ok(ShardEntry { file, bytes, blake3: digest.to_hex().to_string(), rank })
    }

    /// Commits a checkpoint whose shards are all durable. Committing the same checkpoint again changes nothing.
    ///
    /// # Errors
    /// A newer generation has taken over; a different checkpoint of that name exists; the manifest is inconsistent
    /// or does not match the shards in the folder; it cannot be written.
    pub fn commit(&self, manifest: &Manifest) -> Result<Commit, Error> {
        let name = manifest.name();
        let bytes = manifest.encode()?;
        if let Some(problem) = first_wrong_file(manifest, &self.file_sizes(manifest)?) {
            // A newer generation may have pruned the files.
            self.check_fence(manifest.generation)?;
            let problem = format!("{problem}; do all nodes share {}?", self.location);
            return Err(Error::NotCommittable { name, problem });
        }
        // Check the fence before creating the manifest: module `fence` explains why.
        let fence = self.check_fence(manifest.generation)?;
        if let Some(existing) = self.create(&format!("{name}/{MANIFEST}"), &bytes)? {
            return Err(self.taken(manifest.id(), &existing));
        }
        // Best effort: no code reads this file, and the next commit writes it again.
        let _ = self.write(LATEST, format!("{name}\n").into(), PutMode::Overwrite);
        Ok(Commit { fence_lost: fence < manifest.generation, ..manifest.to_commit() })
    }

    /// Removes one checkpoint, the manifest first, so that a partly removed checkpoint no longer counts as one. If the
    /// manifest file is a tombstone, which closes an unfinished save, it is kept.
    pub(crate) fn remove(&self, id: SaveId) -> Result<(), Error> {
        let name = id.name();
        // A user's link to a checkpoint of another job: that one stays.
        if self.folder.as_ref().is_some_and(|folder| folder.join(&name).is_symlink()) {
            return self.in_checkpoint_folder(id, |link| fs::remove_file(link));
        }
        let manifest = format!("{name}/{MANIFEST}");
        let existing =
            if self.is_special(&manifest) { None } else { self.read(&manifest, MAX_BYTES)? };
        let has_tombstone = existing.is_some_and(|bytes| Tombstone::parse(&bytes).is_some());
        if !has_tombstone {
            self.delete(&Path::from(manifest))?;
            // After a power failure the manifest must not reappear without its shards.
            self.in_checkpoint_folder(id, folder::sync)?;
        }
        for file in self.files(&name)? {
            if !has_tombstone || file.location.filename() != Some(MANIFEST) {
                self.delete(&file.location)?;
            }
        }
        // `LocalFileSystem` has no operations on folders, and hides the temporary files that a crash leaves.
        self.in_checkpoint_folder(id, |folder| match has_tombstone {
            true => folder::clear(folder, MANIFEST),
            false => fs::remove_dir_all(folder),
        })
    }

    /// Removes a rank's shard of a save that will not be committed, and the save's folder if nothing else is in it, best
    /// effort: without it, repeated failures would fill the disk. A committed checkpoint is kept, and a bucket is left to
    /// [`prune`](Self::prune): it is not full, and may be out of reach.
    pub fn discard_shard(&self, save: SaveId, rank: Rank, world_size: u32) {
        let manifest = format!("{}/{MANIFEST}", save.name());
        if self.folder.is_none() || !matches!(self.read(&manifest, MAX_BYTES), Ok(None)) {
            return;
        }
        let shard = format!("{}/{}", save.name(), shard_file(rank, world_size));
        let _ = self.delete(&Path::from(shard));
        let _ = self.in_checkpoint_folder(save, |folder| fs::remove_dir(folder));
    }

    /// Runs a file system operation on the checkpoint's folder, unless this is a bucket. Not an error if the folder
    /// is gone.
    fn in_checkpoint_folder(
        &self,
        id: SaveId,
        work: impl FnOnce(&path::Path) -> io::Result<()>,
    ) -> Result<(), Error> {
        let Some(folder) = &self.folder else { return Ok(()) };
        match work(&folder.join(id.name())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let remedy = "check that this user may remove files there";
                Err(Error::unusable(&self.location, format!("{}: {error}", id.name()), remedy))
            }
            _ => Ok(()),
        }
    }

    fn entry(&self, id: SaveId) -> Result<Entry, Error> {
        let state = match self.inspect(id) {
            Ok(Some(manifest)) => EntryState::Complete(Box::new(manifest)),
            Ok(None) => EntryState::Unfinished,
            Err(Error::Damaged { problem, .. }) => EntryState::Damaged(problem),
            Err(Error::NewerVersion { version, .. }) => EntryState::Newer(version),
            Err(error) if error.is_unreachable() => return Err(error),
            Err(error) => EntryState::Damaged(error.to_string()),
        };
        Ok(Entry { name: id.name(), id, state })
    }

    /// The manifest of a checkpoint, after a check of the file sizes; `None` if it is unfinished.
    pub(crate) fn inspect(&self, id: SaveId) -> Result<Option<Manifest>, Error> {
        let path = format!("{}/{MANIFEST}", id.name());
        if self.is_special(&path) {
            let problem = format!("its {MANIFEST} is not a regular file");
            return Err(Error::Damaged { name: id.name(), problem });
        }
        let Some(bytes) = self.read(&path, MAX_BYTES)? else {
            return Ok(None);
        };
        if Tombstone::parse(&bytes).is_some() {
            return Ok(None);
        }
        let mut manifest = Manifest::parse(id, &bytes)?;
        let sizes = self.file_sizes(&manifest)?;
        if let Some(problem) = first_wrong_file(&manifest, &sizes) {
            return Err(Error::Damaged { name: id.name(), problem });
        }
        if sizes.contains_key(&evaluation_file(id)) {
            self.read_evaluation(&mut manifest)?;
        }
        Ok(Some(manifest))
    }

    /// Whether an unfinished save was pruned and only its tombstone remains.
    fn only_tombstone_left(&self, id: SaveId) -> Result<bool, Error> {
        let files = self.files(&id.name())?;
        Ok(matches!(files.as_slice(), [only] if only.location.filename() == Some(MANIFEST)))
    }

    /// The error for a write to a save whose manifest file exists; `existing` is its content.
    pub(crate) fn taken(&self, id: SaveId, existing: &[u8]) -> Error {
        match Tombstone::parse(existing) {
            Some(tombstone) => self.fenced(id.generation, tombstone.abandoned_by),
            None => Error::Exists(id.name()),
        }
    }

    /// Sizes of the files of a checkpoint, by path.
    pub(crate) fn file_sizes(&self, manifest: &Manifest) -> Result<HashMap<String, u64>, Error> {
        let mut files = self.files(&manifest.name())?;
        if !manifest.frozen.is_empty() {
            files.extend(self.files(FROZEN)?);
        }
        Ok(files.into_iter().map(|file| (file.location.to_string(), file.size)).collect())
    }
}

/// The problem of the first file that is missing or does not have the size in the manifest.
pub(crate) fn first_wrong_file(
    manifest: &Manifest,
    sizes: &HashMap<String, u64>,
) -> Option<String> {
    manifest.files().find_map(|file| match sizes.get(file.path.as_str()) {
        None => Some(format!("{} is missing", file.name)),
        Some(size) if *size != file.bytes => {
            Some(format!("{} has {size} bytes instead of {}", file.name, file.bytes))
        }
        Some(_) => None,
    })
}

fn parsed(location: &str) -> Result<Location<'_>, Error> {
    let remedy = "set checkpoint.dir to a folder or s3://BUCKET/PREFIX";
    Location::of(location).map_err(|problem| Error::unusable(location, problem, remedy))
}
