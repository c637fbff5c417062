//! The cache: a folder with copies of remote shards, shared by all processes of a node.
//!
//! ```text
//! .lock                 held while files are added or removed: eviction, and the rename that ends a fetch
//! HASH-NAME.beton       a complete shard; shared lock: in use, exclusive lock: being evicted
//! HASH-NAME.beton.json  its digest and fingerprint; the modification time is the time of the last use
//! HASH-NAME.beton.part  being fetched or checked by the process with the exclusive lock; has the full size
//!                       from the start, so that the files in the folder show the used space
//! ```
//!
//! HASH is computed from server, URL, size, tag and date: a changed object is another shard, and its old copy is
//! evicted when space is needed. The locks are those of the kernel (`flock`). They end with their process, so a
//! killed process leaves only a `.part` file, which the next process takes over or removes. The folder must be on a
//! local disk.
//!
//! **When a copy is verified.** The digest of a copy is computed again after a reboot, and if inode, size or change time
//! differ from the recorded fingerprint. Writes can be lost only in a reboot, and every write by a program changes
//! the change time. So a restarted job can use its cache immediately, and a node computes each digest once per boot,
//! not once per rank.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, SystemTime},
};

use baton_fingerprint::{BootId, Fingerprint};
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::{
    Error,
    evict::{self, Candidate, Demand},
    remote::Object,
    signal::ChangeSignal,
};
use crate::{
    file::{allocate, digest, is_at, is_disk_full, try_lock},
    with_suffix,
};

/// Poll interval for a lock. `flock` can wait itself, but then it cannot be cancelled.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(20);

const HASH_CHARS: usize = 32;
const RECORD: &str = ".json";
const NEW_RECORD: &str = ".json.new";
const PART: &str = ".part";

/// A folder of shards with a size limit.
pub(super) struct Cache {
    pub(super) folder: PathBuf,
    /// Maximum total size of the shards, bytes.
    pub(super) max_bytes: u64,
    boot: BootId,
    signal: Arc<ChangeSignal>,
}

/// Name and path of a shard in the cache, whether it is there or not.
#[derive(Clone, Debug)]
pub(super) struct CacheEntry {
    pub(super) name: String,
    data: PathBuf,
}

/// Content of the JSON file of a shard in the cache.
#[derive(Debug, Serialize, Deserialize)]
struct CacheRecord {
    url: String,
    bytes: u64,
    blake3: String,
    #[serde(rename = "vouch")]
    fingerprint: Fingerprint,
}

/// A shard that is not evicted while this exists.
pub(super) struct HeldShard {
    entry: CacheEntry,
    /// Owner of the shared lock.
    file: File,
    signal: Arc<ChangeSignal>,
}

/// Exclusive permission to fetch or check one shard.
pub(super) struct WorkLock {
    pub(super) path: PathBuf,
    /// Owner of the exclusive lock.
    pub(super) file: File,
    is_done: bool,
}

/// Result of making space in the cache.
pub(super) enum Reservation {
    Made,
    /// There is not enough space; `in_use_bytes` cannot be evicted.
    Full {
        in_use_bytes: u64,
        /// Whether the disk is full before the cache reaches its limit.
        is_disk_full: bool,
    },
}

/// What is in the cache's folder.
struct CacheContents {
    /// Total size of the shards, including those being fetched, bytes.
    used: u64,
    /// Shards that may be evicted if they are not in use, with their sizes, in the order of eviction.
    candidates: Vec<(CacheEntry, u64)>,
}

impl CacheEntry {
    pub(super) fn data(&self) -> &Path {
        &self.data
    }

    fn with(&self, suffix: &str) -> PathBuf {
        with_suffix(&self.data, suffix)
    }

    /// Records the use of the shard. Best effort: only the order of eviction depends on it.
    fn touch(&self) {
        let record = File::options().write(true).open(self.with(RECORD));
        let _ = record.and_then(|file| file.set_modified(SystemTime::now()));
    }
}

impl HeldShard {
    pub(super) fn path(&self) -> &Path {
        &self.entry.data
    }
}

impl Drop for HeldShard {
    fn drop(&mut self) {
        self.entry.touch();
        // Unlock before waiting threads are notified.
        let _ = self.file.unlock();
        self.signal.change();
    }
}

impl Drop for WorkLock {
    fn drop(&mut self) {
        if !self.is_done {
            // The file is still locked, so it belongs to this process. If this fails, the next eviction removes it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Cache {
    /// Opens the folder, creates it if necessary, and evicts shards down to its size limit.
    pub(super) fn open(
        folder: &Path,
        max_bytes: u64,
        signal: Arc<ChangeSignal>,
    ) -> Result<Self, Error> {
        fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let boot = BootId::current();
        let cache = Self { folder: folder.to_owned(), max_bytes, boot, signal };
        {
            let _folder = cache.lock_folder()?;
            // Shards in use by other processes are kept even above the limit.
            cache.evict_for(None, 0, Demand::Now, &|_| None)?;
        }
        Ok(cache)
    }

    pub(super) fn entry(&self, endpoint: &str, object: &Object) -> CacheEntry {
        let meta = &object.meta;
        let tag = meta.e_tag.as_deref().unwrap_or_default();
        let version =
            (endpoint, &object.url, meta.size, tag, meta.last_modified.timestamp_millis());
        let hash = blake3::hash(format!("{version:?}").as_bytes()).to_hex();
        let file_name = meta.location.filename().unwrap_or_default();
        let plain = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
        let letters = file_name.chars().map(|letter| if plain(letter) { letter } else { '_' });
        let readable: String = letters.take(100).collect();
        // The name always ends in `.beton`, so that it cannot be mistaken for a record or part.
        let readable = readable.trim_end_matches(".beton");
        let name = format!("{}-{readable}.beton", &hash[..HASH_CHARS]);
        CacheEntry { data: self.folder.join(&name), name }
    }

    /// The shard, if it is in the cache and its fingerprint is unchanged.
    pub(super) fn lease(&self, entry: &CacheEntry) -> Result<Option<HeldShard>, Error> {
        let Some(file) = self.share(entry)? else { return Ok(None) };
        let metadata = file.metadata().map_err(Error::io("read metadata of", &entry.data))?;
        let record = self.read_record(entry);
        let is_whole = record.is_some_and(|record| {
            record.bytes == metadata.len() && record.fingerprint == self.fingerprint(&metadata)
        });
        Ok(is_whole.then(|| self.held(entry, file)))
    }

    /// The shard, if it is in the cache and matches the recorded digest; otherwise the copy is removed. `_work`
    /// ensures that no other process checks it at the same time.
    pub(super) fn check(
        &self,
        entry: &CacheEntry,
        _work: &WorkLock,
    ) -> Result<Option<HeldShard>, Error> {
        let Some(file) = self.share(entry)? else { return Ok(None) };
        // Without a record, the process that fetched it died after the rename, and the digest is unknown.
        if let Some(record) = self.read_record(entry) {
            // Read the metadata before the content, so that a write in between changes the fingerprint.
            let metadata = file.metadata().map_err(Error::io("read metadata of", &entry.data))?;
            let found = digest(&file).map_err(Error::io("read", &entry.data))?;
            if found.to_hex().as_str() == record.blake3 {
                let fingerprint = self.fingerprint(&metadata);
                self.write_record(entry, &CacheRecord { fingerprint, ..record })?;
                return Ok(Some(self.held(entry, file)));
            }
            warn!(
                copy = %entry.data.display(),
                "the copy of {} has changed since it was fetched, so it is fetched again: ranks of this machine that had it open \
                 may have read wrong samples, and the disk may be failing",
                entry.name
            );
        }
        let _folder = self.lock_folder()?;
        remove(entry)?;
        Ok(None)
    }

    /// The permission to fetch or check this shard; waits until no other process has it.
    pub(super) fn work(&self, entry: &CacheEntry) -> Result<WorkLock, Error> {
        loop {
            if let Some(work) = self.try_work(entry)? {
                return Ok(work);
            }
            if self.signal.is_shut_down() {
                return Err(Error::Cancelled { name: entry.name.clone() });
            }
            thread::sleep(LOCK_POLL_INTERVAL);
        }
    }

    /// The permission to fetch or check this shard; `None` if another process has it.
    pub(super) fn try_work(&self, entry: &CacheEntry) -> Result<Option<WorkLock>, Error> {
        let path = entry.with(PART);
        loop {
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)
                .map_err(Error::io("create", &path))?;
            if !try_lock(&file).map_err(Error::io("lock", &path))? {
                return Ok(None);
            }
            // Otherwise the previous owner has just renamed or removed the file: try again.
            if is_at(&file, &path) {
                return Ok(Some(WorkLock { path, file, is_done: false }));
            }
        }
    }

    /// Makes space for `bytes` and allocates it. `next_use` returns the position of a shard's next use.
    pub(super) fn reserve(
        &self,
        work: &WorkLock,
        bytes: u64,
        demand: Demand,
        next_use: &dyn Fn(&str) -> Option<usize>,
    ) -> Result<Reservation, Error> {
        self.reserve_with(work, bytes, demand, next_use, &|| allocate(&work.file, bytes))
    }

    fn reserve_with(
        &self,
        work: &WorkLock,
        bytes: u64,
        demand: Demand,
        next_use: &dyn Fn(&str) -> Option<usize>,
        allocate: &dyn Fn() -> io::Result<()>,
    ) -> Result<Reservation, Error> {
        let _folder = self.lock_folder()?;
        let room = self.evict_for(Some(&work.path), bytes, demand, next_use)?;
        if matches!(room, Reservation::Full { .. }) {
            return Ok(room);
        }
        let has_allocated = || match allocate() {
            Ok(()) => Ok(true),
            Err(error) if is_disk_full(&error) => Ok(false),
            Err(error) => Err(Error::io("reserve space for", &work.path)(error)),
        };
        if has_allocated()? {
            return Ok(Reservation::Made);
        }
        // The limit is above what the disk has for the cache.
        let CacheContents { mut used, candidates } =
            self.contents(Some(&work.path), demand, next_use)?;
        for (entry, entry_bytes) in &candidates {
            let Some(locked) = lock_unused(entry)? else { continue };
            remove(entry)?;
            // The disk gets its space back when nobody has the file open.
            drop(locked);
            used -= entry_bytes;
            if has_allocated()? {
                return Ok(Reservation::Made);
            }
        }
        Ok(Reservation::Full { in_use_bytes: used, is_disk_full: true })
    }

    /// Ends a fetch: makes the shard durable, renames it and holds it. `None` if another process evicted it between
    /// the exclusive lock and the shared lock.
    pub(super) fn commit(
        &self,
        entry: &CacheEntry,
        url: &str,
        mut work: WorkLock,
        digest: blake3::Hash,
    ) -> Result<Option<HeldShard>, Error> {
        work.file.sync_all().map_err(Error::io("sync", &work.path))?;
        {
            let _folder = self.lock_folder()?;
            fs::rename(&work.path, &entry.data).map_err(Error::io("rename", &work.path))?;
            work.is_done = true;
        }
        // Read the metadata after the rename, which changes the change time.
        let metadata = work.file.metadata().map_err(Error::io("read metadata of", &entry.data))?;
        let fingerprint = self.fingerprint(&metadata);
        let blake3 = digest.to_hex().to_string();
        let record =
            CacheRecord { url: url.to_owned(), bytes: metadata.len(), blake3, fingerprint };
        self.write_record(entry, &record)?;
        let file = work.file.try_clone().map_err(Error::io("open", &entry.data))?;
        file.unlock().map_err(Error::io("unlock", &entry.data))?;
        file.lock_shared().map_err(Error::io("lock", &entry.data))?;
        Ok(is_at(&file, &entry.data).then(|| self.held(entry, file)))
    }

    fn held(&self, entry: &CacheEntry, file: File) -> HeldShard {
        entry.touch();
        HeldShard { entry: entry.clone(), file, signal: Arc::clone(&self.signal) }
    }

    /// Opens the copy with a shared lock, which prevents its eviction.
    fn share(&self, entry: &CacheEntry) -> Result<Option<File>, Error> {
        loop {
            let file = match File::open(&entry.data) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(Error::io("open", &entry.data)(error)),
            };
            // Exclusive locks on copies are held for milliseconds only.
            file.lock_shared().map_err(Error::io("lock", &entry.data))?;
            if is_at(&file, &entry.data) {
                return Ok(Some(file));
            }
        }
    }

    fn fingerprint(&self, metadata: &fs::Metadata) -> Fingerprint {
        Fingerprint::of(metadata, &self.boot)
    }

    /// The record of a shard; `None` if it cannot be read: then the copy is fetched again.
    fn read_record(&self, entry: &CacheEntry) -> Option<CacheRecord> {
        serde_json::from_slice(&fs::read(entry.with(RECORD)).ok()?).ok()
    }

    fn write_record(&self, entry: &CacheEntry, record: &CacheRecord) -> Result<(), Error> {
        let (new, path) = (entry.with(NEW_RECORD), entry.with(RECORD));
        let write = || {
            let mut file = File::create(&new)?;
            serde_json::to_writer(&mut file, record)?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(&self.folder)?.sync_all()
        };
        write().map_err(Error::io("write", &path))
    }

    fn lock_folder(&self) -> Result<File, Error> {
        let path = self.folder.join(".lock");
        let open = File::options().write(true).create(true).truncate(false).open(&path);
        let file = open.map_err(Error::io("create", &path))?;
        file.lock().map_err(Error::io("lock", &path))?;
        Ok(file)
    }

    /// Evicts shards until `bytes` more fit; evicts nothing if that is impossible. The file `mine` does not count.
    /// The folder must be locked.
    fn evict_for(
        &self,
        mine: Option<&Path>,
        bytes: u64,
        demand: Demand,
        next_use: &dyn Fn(&str) -> Option<usize>,
    ) -> Result<Reservation, Error> {
        let CacheContents { mut used, candidates } = self.contents(mine, demand, next_use)?;
        let mut victims = Vec::new();
        for (entry, entry_bytes) in &candidates {
            if used + bytes <= self.max_bytes {
                break;
            }
            if let Some(file) = lock_unused(entry)? {
                used -= entry_bytes;
                victims.push((entry, file));
            }
        }
        if used + bytes > self.max_bytes {
            return Ok(Reservation::Full { in_use_bytes: used, is_disk_full: false });
        }
        for (entry, _locked) in victims {
            remove(entry)?;
        }
        Ok(Reservation::Made)
    }

    /// What is in the folder, except for the file `mine`. Removes what ended processes have left. The folder must be
    /// locked.
    fn contents(
        &self,
        mine: Option<&Path>,
        demand: Demand,
        next_use: &dyn Fn(&str) -> Option<usize>,
    ) -> Result<CacheContents, Error> {
        let failed = |error| Error::io("list", &self.folder)(error);
        let (mut used, mut entries, mut uses) = (0, Vec::new(), Vec::new());
        for entry in fs::read_dir(&self.folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            let Some(kind) = FileKind::of(&name) else { continue };
            match kind {
                FileKind::Part if mine == Some(&path) => {}
                FileKind::Part => used += partial_bytes(&path).map_err(failed)?,
                FileKind::Record(data) => {
                    if !self.folder.join(data).exists() {
                        let _ = fs::remove_file(&path);
                    }
                }
                FileKind::Data => {
                    let Ok(metadata) = entry.metadata() else { continue };
                    used += metadata.len();
                    let record = fs::metadata(with_suffix(&path, RECORD));
                    let modified = record.and_then(|record| record.modified());
                    let last_used = modified.unwrap_or(SystemTime::UNIX_EPOCH);
                    uses.push(Candidate { last_used, next_use: next_use(&name) });
                    entries.push((CacheEntry { name, data: path }, metadata.len()));
                }
            }
        }
        let order = evict::order(&uses, demand);
        let candidates = order.into_iter().map(|index| entries[index].clone()).collect();
        Ok(CacheContents { used, candidates })
    }
}

/// Kind of a file in the cache's folder, by its name.
enum FileKind<'a> {
    Data,
    Part,
    /// Record of the shard with this name.
    Record(&'a str),
}

impl<'a> FileKind<'a> {
    /// Parses a file name; `None` if the file does not belong to the cache.
    fn of(name: &'a str) -> Option<Self> {
        let (hash, rest) = name.split_at_checked(HASH_CHARS)?;
        if !rest.starts_with('-') || !hash.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let record = name.strip_suffix(NEW_RECORD).or_else(|| name.strip_suffix(RECORD));
        Some(match record {
            Some(data) => Self::Record(data),
            None if name.ends_with(PART) => Self::Part,
            None => Self::Data,
        })
    }
}

/// Size of an unfinished fetch, bytes. If its process has ended, the file is removed.
fn partial_bytes(path: &Path) -> io::Result<u64> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    if !try_lock(&file)? {
        return Ok(file.metadata()?.len());
    }
    if is_at(&file, path) {
        fs::remove_file(path)?;
    }
    Ok(0)
}

/// A copy with its exclusive lock; `None` if it is in use or cannot be opened.
fn lock_unused(entry: &CacheEntry) -> Result<Option<File>, Error> {
    let Ok(file) = File::open(&entry.data) else { return Ok(None) };
    let is_locked = try_lock(&file).map_err(Error::io("lock", &entry.data))?;
    Ok(is_locked.then_some(file))
}

/// Removes a copy, then its record, which is not needed without it.
fn remove(entry: &CacheEntry) -> Result<(), Error> {
    for path in [entry.data.clone(), entry.with(RECORD)] {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::io("remove", path)(error));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARD: u64 = 100;

    fn entry(cache: &Cache, number: usize) -> CacheEntry {
        let name = format!("{number:032}-{number}.beton");
        CacheEntry { data: cache.folder.join(&name), name }
    }

    /// A cache that is far below its limit, with the shards 0 to 2.
    fn cache(folder: &Path) -> Cache {
        let cache = Cache::open(folder, 1 << 20, Arc::new(ChangeSignal::new())).unwrap();
        for number in 0..3 {
            fs::write(entry(&cache, number).data(), [0_u8; SHARD as usize]).unwrap();
        }
        cache
    }

    fn cached(cache: &Cache) -> Vec<usize> {
        (0..3).filter(|&number| entry(cache, number).data().exists()).collect()
    }

    /// Shards are needed in the order of their numbers.
    fn next_use(name: &str) -> Option<usize> {
        name.strip_suffix(".beton")?.rsplit_once('-')?.1.parse().ok()
    }

    /// Reserves space for another shard on a disk that has space for `capacity` of them.
    fn reserve(cache: &Cache, capacity: usize, demand: Demand) -> Reservation {
        let work = cache.work(&entry(cache, 3)).unwrap();
        let allocate = || -> io::Result<()> {
            match cached(cache).len() < capacity {
                true => Ok(()),
                false => Err(io::ErrorKind::StorageFull.into()),
            }
        };
        cache.reserve_with(&work, SHARD, demand, &next_use, &allocate).unwrap()
    }

    #[test]
    fn on_a_full_disk_shards_are_evicted_until_the_new_one_fits() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path());

        assert!(matches!(reserve(&cache, 2, Demand::Now), Reservation::Made));

        assert_eq!(cached(&cache), [0]);
    }

    #[test]
    fn on_a_full_disk_shards_in_use_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path());
        let _in_use = cache.share(&entry(&cache, 2)).unwrap().unwrap();

        let room = reserve(&cache, 0, Demand::Now);

        let Reservation::Full { in_use_bytes: SHARD, is_disk_full: true } = room else {
            panic!("there is room")
        };
        assert_eq!(cached(&cache), [2]);
    }

    #[test]
    fn on_a_full_disk_prefetching_keeps_shards_that_are_needed_earlier() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path());

        let room = reserve(&cache, 0, Demand::At(1));

        assert!(matches!(room, Reservation::Full { is_disk_full: true, .. }));
        assert_eq!(cached(&cache), [0, 1]);
    }
}
