//! The folder in which copies of remote shards lie, shared by all processes of a node.
//!
//! ```text
//! .lock                 held while names change: making room, and the rename that ends a fetch
//! HASH-NAME.beton       a shard, whole; shared lock: in use, exclusive lock: being evicted
//! HASH-NAME.beton.json  its digest, and who vouches for it; its time is when it was last needed
//! HASH-NAME.beton.part  being fetched or checked by whoever has the exclusive lock; of full length
//!                       from the start, so that the folder itself tells how full it is
//! ```
//!
//! HASH names server, URL, length, tag and date: a changed object is another shard, and its old
//! copy goes when room is needed. Locks are the kernel's (`flock`) and end with their process, so
//! that a killed one leaves nothing behind but a `.part` that the next one takes over or removes.
//! The folder must be on a local disk.
//!
//! **When a copy is checked.** A copy is digested when nobody vouches for it: after a reboot, or
//! when inode, length or change time are not what they were when it was last digested. A reboot is
//! what loses writes, and a change time is what a program cannot write without; a restarted job
//! therefore finds its cache at once, and a node pays for digesting once per boot, not per rank.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};

use super::{
    Error,
    evict::{self, Candidate, Need},
    file::{allocate, digest, is_at, try_lock},
    remote::Object,
    signal::Signal,
    statistics::Counters,
};
use crate::with_suffix;

/// Locks are asked for anew after this long. `flock` can wait, but then it cannot be cancelled.
const LOCK_POLL: Duration = Duration::from_millis(20);

const HASH_LETTERS: usize = 32;
const RECORD: &str = ".json";
const NEW_RECORD: &str = ".json.new";
const PART: &str = ".part";

/// A bounded folder of shards.
pub(super) struct Cache {
    pub(super) folder: PathBuf,
    /// Most bytes of shards.
    pub(super) bound: u64,
    boot: String,
    counters: Arc<Counters>,
    signal: Arc<Signal>,
}

/// Where a shard lies, if it does.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) name: String,
    data: PathBuf,
}

/// What is known of a shard in the cache.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    url: String,
    bytes: u64,
    blake3: String,
    vouch: Vouch,
}

/// Since this was written down after digesting, nobody has written to the file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Vouch {
    boot: String,
    inode: u64,
    changed_seconds: i64,
    changed_nanos: i64,
}

/// A shard that stays as long as this lives.
pub(super) struct Held {
    slot: Slot,
    /// Has the shared lock.
    file: File,
    signal: Arc<Signal>,
}

/// The right to fetch or check one shard.
pub(super) struct Work {
    pub(super) path: PathBuf,
    /// Has the exclusive lock.
    pub(super) file: File,
    is_done: bool,
}

/// Whether there is room.
pub(super) enum Room {
    Made,
    /// Not now: so many bytes may not be evicted.
    Taken {
        in_use_bytes: u64,
    },
}

impl Slot {
    pub(super) fn data(&self) -> &Path {
        &self.data
    }

    fn with(&self, suffix: &str) -> PathBuf {
        with_suffix(&self.data, suffix)
    }

    /// Notes that the shard is needed. Only the order of eviction depends on it.
    fn touch(&self) {
        let record = File::options().write(true).open(self.with(RECORD));
        let _ = record.and_then(|file| file.set_modified(SystemTime::now()));
    }
}

impl Held {
    pub(super) fn path(&self) -> &Path {
        &self.slot.data
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.slot.touch();
        // Unlocked before anybody is told.
        let _ = self.file.unlock();
        self.signal.change();
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if !self.is_done {
            // Still locked, so it is ours. If this fails, the next who makes room removes it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Cache {
    /// Opens the folder, makes it if need be, and brings it below its bound.
    pub(super) fn open(
        folder: &Path,
        bound: u64,
        counters: Arc<Counters>,
        signal: Arc<Signal>,
    ) -> Result<Self, Error> {
        fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        // Where the system does not tell, nobody vouches for a copy longer than this process lives.
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .unwrap_or_else(|_| fastrand::u128(..).to_string());
        let boot = boot.trim().to_owned();
        let cache = Self { folder: folder.to_owned(), bound, boot, counters, signal };
        {
            let _folder = cache.lock_folder()?;
            // If others hold more than that, they go on holding it.
            cache.make_room(None, 0, Need::Now, &|_| None)?;
        }
        Ok(cache)
    }

    pub(super) fn slot(&self, endpoint: &str, object: &Object) -> Slot {
        let meta = &object.meta;
        let tag = meta.e_tag.as_deref().unwrap_or_default();
        let version =
            (endpoint, &object.url, meta.size, tag, meta.last_modified.timestamp_millis());
        let hash = blake3::hash(format!("{version:?}").as_bytes()).to_hex();
        let file_name = meta.location.filename().unwrap_or_default();
        let plain = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
        let letters = file_name.chars().map(|letter| if plain(letter) { letter } else { '_' });
        let readable: String = letters.take(100).collect();
        // Whatever it was called, it is no record and no part.
        let readable = readable.trim_end_matches(".beton");
        let name = format!("{}-{readable}.beton", &hash[..HASH_LETTERS]);
        Slot { data: self.folder.join(&name), name }
    }

    /// The shard, if it is there and known to be whole.
    pub(super) fn lease(&self, slot: &Slot) -> Result<Option<Held>, Error> {
        let Some(file) = self.share(slot)? else { return Ok(None) };
        let metadata = file.metadata().map_err(Error::io("look at", &slot.data))?;
        let record = self.read_record(slot);
        let is_whole = record.is_some_and(|record| {
            record.bytes == metadata.len() && record.vouch == self.vouch(&metadata)
        });
        Ok(is_whole.then(|| self.held(slot, file)))
    }

    /// The shard, if it is there and has the digest that was written down. Nobody else checks it
    /// meanwhile, by the right of `_work`. What is not whole is removed.
    pub(super) fn check(&self, slot: &Slot, _work: &Work) -> Result<Option<Held>, Error> {
        let Some(file) = self.share(slot)? else { return Ok(None) };
        // Without a record, its fetcher died after the rename, and nobody knows the digest.
        if let Some(record) = self.read_record(slot) {
            // Before the bytes: what is written while they are read must not be vouched for.
            let metadata = file.metadata().map_err(Error::io("look at", &slot.data))?;
            let found = digest(&file).map_err(Error::io("read", &slot.data))?;
            if found.to_hex().as_str() == record.blake3 {
                let vouch = self.vouch(&metadata);
                self.write_record(slot, &Record { vouch, ..record })?;
                return Ok(Some(self.held(slot, file)));
            }
            self.counters.damaged.add(1);
        }
        let _folder = self.lock_folder()?;
        remove(slot)?;
        Ok(None)
    }

    /// The right to fetch or check this shard; waits for whoever has it.
    pub(super) fn work(&self, slot: &Slot) -> Result<Work, Error> {
        loop {
            if let Some(work) = self.try_work(slot)? {
                return Ok(work);
            }
            if self.signal.is_over() {
                return Err(Error::Cancelled { name: slot.name.clone() });
            }
            thread::sleep(LOCK_POLL);
        }
    }

    /// The right to fetch or check this shard, unless somebody has it.
    pub(super) fn try_work(&self, slot: &Slot) -> Result<Option<Work>, Error> {
        let path = slot.with(PART);
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
            // Else whoever had it has just ended, and renamed or removed the file.
            if is_at(&file, &path) {
                return Ok(Some(Work { path, file, is_done: false }));
            }
        }
    }

    /// Makes room for `bytes` more and takes it. `next_need` tells when a name is needed next.
    pub(super) fn reserve(
        &self,
        work: &Work,
        bytes: u64,
        need: Need,
        next_need: &dyn Fn(&str) -> Option<usize>,
    ) -> Result<Room, Error> {
        let _folder = self.lock_folder()?;
        let room = self.make_room(Some(&work.path), bytes, need, next_need)?;
        if matches!(room, Room::Made) {
            allocate(&work.file, bytes).map_err(Error::io("reserve room for", &work.path))?;
        }
        Ok(room)
    }

    /// Ends a fetch: the shard is durable, has its name, and is held. `None` if somebody made room
    /// at the very moment between the exclusive lock and the shared one.
    pub(super) fn commit(
        &self,
        slot: &Slot,
        url: &str,
        mut work: Work,
        digest: blake3::Hash,
    ) -> Result<Option<Held>, Error> {
        work.file.sync_all().map_err(Error::io("sync", &work.path))?;
        {
            let _folder = self.lock_folder()?;
            fs::rename(&work.path, &slot.data).map_err(Error::io("rename", &work.path))?;
            work.is_done = true;
        }
        // After the rename, which counts as a change.
        let metadata = work.file.metadata().map_err(Error::io("look at", &slot.data))?;
        let vouch = self.vouch(&metadata);
        let blake3 = digest.to_hex().to_string();
        let record = Record { url: url.to_owned(), bytes: metadata.len(), blake3, vouch };
        self.write_record(slot, &record)?;
        let file = work.file.try_clone().map_err(Error::io("open", &slot.data))?;
        file.unlock().map_err(Error::io("unlock", &slot.data))?;
        file.lock_shared().map_err(Error::io("lock", &slot.data))?;
        Ok(is_at(&file, &slot.data).then(|| self.held(slot, file)))
    }

    fn held(&self, slot: &Slot, file: File) -> Held {
        slot.touch();
        Held { slot: slot.clone(), file, signal: Arc::clone(&self.signal) }
    }

    /// Opens the copy and keeps it from being evicted.
    fn share(&self, slot: &Slot) -> Result<Option<File>, Error> {
        loop {
            let file = match File::open(&slot.data) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(Error::io("open", &slot.data)(error)),
            };
            // Exclusive locks on copies are held for milliseconds.
            file.lock_shared().map_err(Error::io("lock", &slot.data))?;
            if is_at(&file, &slot.data) {
                return Ok(Some(file));
            }
        }
    }

    fn vouch(&self, metadata: &fs::Metadata) -> Vouch {
        Vouch {
            boot: self.boot.clone(),
            inode: metadata.ino(),
            changed_seconds: metadata.ctime(),
            changed_nanos: metadata.ctime_nsec(),
        }
    }

    /// `None` if there is none that can be read: then the copy is fetched again.
    fn read_record(&self, slot: &Slot) -> Option<Record> {
        serde_json::from_slice(&fs::read(slot.with(RECORD)).ok()?).ok()
    }

    fn write_record(&self, slot: &Slot, record: &Record) -> Result<(), Error> {
        let (new, path) = (slot.with(NEW_RECORD), slot.with(RECORD));
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

    /// Evicts until `bytes` more fit, or nothing at all if they cannot. `mine` does not count. The
    /// folder must be locked.
    fn make_room(
        &self,
        mine: Option<&Path>,
        bytes: u64,
        need: Need,
        next_need: &dyn Fn(&str) -> Option<usize>,
    ) -> Result<Room, Error> {
        let look = |error| Error::io("look into", &self.folder)(error);
        let (mut used, mut slots, mut candidates) = (0, Vec::new(), Vec::new());
        for entry in fs::read_dir(&self.folder).map_err(look)? {
            let entry = entry.map_err(look)?;
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            let Some(kind) = Kind::of(&name) else { continue };
            match kind {
                Kind::Part if mine == Some(&path) => {}
                Kind::Part => used += leftover_bytes(&path).map_err(look)?,
                Kind::Record(data) => {
                    if !self.folder.join(data).exists() {
                        let _ = fs::remove_file(&path);
                    }
                }
                Kind::Data => {
                    let Ok(metadata) = entry.metadata() else { continue };
                    used += metadata.len();
                    let needed = fs::metadata(with_suffix(&path, RECORD));
                    let needed = needed.and_then(|record| record.modified());
                    let last_needed = needed.unwrap_or(SystemTime::UNIX_EPOCH);
                    candidates.push(Candidate { last_needed, next_need: next_need(&name) });
                    slots.push((Slot { name, data: path }, metadata.len()));
                }
            }
        }
        let mut victims = Vec::new();
        for index in evict::order(&candidates, need) {
            if used + bytes <= self.bound {
                break;
            }
            let (slot, slot_bytes) = &slots[index];
            let Ok(file) = File::open(&slot.data) else { continue };
            if try_lock(&file).map_err(Error::io("lock", &slot.data))? {
                used -= slot_bytes;
                victims.push((slot, file));
            }
        }
        if used + bytes > self.bound {
            return Ok(Room::Taken { in_use_bytes: used });
        }
        for (slot, _locked) in victims {
            remove(slot)?;
            self.counters.evictions.add(1);
        }
        Ok(Room::Made)
    }
}

/// What a file of the cache's folder is, by its name.
enum Kind<'a> {
    Data,
    Part,
    /// Of the shard called so.
    Record(&'a str),
}

impl<'a> Kind<'a> {
    /// `None`: not ours.
    fn of(name: &'a str) -> Option<Self> {
        let (hash, rest) = name.split_at_checked(HASH_LETTERS)?;
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

/// The bytes of somebody's unfinished fetch; if its process is gone, it is removed.
fn leftover_bytes(path: &Path) -> io::Result<u64> {
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

/// Removes a copy; without it, its record means nothing.
fn remove(slot: &Slot) -> Result<(), Error> {
    for path in [slot.data.clone(), slot.with(RECORD)] {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::io("remove", path)(error));
            }
            _ => {}
        }
    }
    Ok(())
}
