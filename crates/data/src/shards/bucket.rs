//! Shards in a bucket with copies in the cache: makes a shard available as a local file.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use baton_s3::Blocking;
use tokio::sync::Semaphore;

use super::{
    Error, Options,
    cache::{Cache, CacheEntry, HeldShard, Reservation, WorkLock},
    evict::Demand,
    fetch::Fetcher,
    plan::PrefetchPlan,
    remote::{BucketClient, Object},
    signal::ChangeSignal,
    source::Keys,
};

/// Poll interval for shards released by other processes.
const ROOM_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Wait for room after which the log says why the caller waits.
const LONG_WAIT: Duration = Duration::from_secs(10);

/// The remote half of a [`ShardSet`](super::ShardSet).
pub(super) struct CachedBucket {
    pub(super) objects: Vec<Object>,
    pub(super) signal: Arc<ChangeSignal>,
    entries: Vec<CacheEntry>,
    cache: Cache,
    room_timeout: Duration,
    fetcher: Fetcher,
    plan: Mutex<PrefetchPlan>,
}

/// Result of an attempt to obtain a shard.
pub(super) enum ObtainResult {
    Held(HeldShard),
    /// Another process is fetching or checking it, and it is not needed yet.
    Busy,
    /// The cache or its disk is full of shards that cannot be evicted.
    NoRoom {
        in_use_bytes: u64,
        is_disk_full: bool,
    },
}

impl CachedBucket {
    pub(super) fn open(
        source_text: &str,
        bucket: &str,
        keys: &Keys,
        options: &Options,
    ) -> Result<Self, Error> {
        let signal = Arc::new(ChangeSignal::new());
        // Two threads are enough to decrypt TLS at several GB/s; the caller computes digests and writes to disk.
        let io = Blocking::new("shards-io", 2).map_err(Error::FetchThread)?;
        let remote = BucketClient::new(bucket, &options.environment, options.retry);
        let remote = remote
            .map_err(|problem| Error::Source { source_text: source_text.to_owned(), problem })?;
        let objects = io.run(remote.list(source_text, keys))?;
        refuse_too_large(&objects, options.cache_bytes)?;
        let cache = Cache::open(&options.cache_dir, options.cache_bytes, Arc::clone(&signal))?;
        let entries = objects.iter().map(|object| cache.entry(remote.endpoint(), object)).collect();
        let max_concurrent_parts = options.max_concurrent_parts.max(1);
        let fetcher = Fetcher {
            io,
            remote: Arc::new(remote),
            signal: Arc::clone(&signal),
            part_bytes: options.part_bytes.max(1),
            // Twice as many, so that a waiting caller does not have to wait for the prefetch thread.
            parts: Arc::new(Semaphore::new(2 * max_concurrent_parts)),
            max_concurrent_parts,
        };
        Ok(Self {
            objects,
            signal,
            entries,
            cache,
            room_timeout: options.room_timeout,
            fetcher,
            plan: Mutex::default(),
        })
    }

    pub(super) fn headers(&self) -> Result<Vec<Vec<u8>>, Error> {
        self.fetcher.io.run(self.fetcher.remote.headers(&self.objects))
    }

    /// The shard as a local file. Waits until it has been fetched. `release` is that of
    /// [`ShardSet::local_releasing`](super::ShardSet::local_releasing).
    pub(super) fn local(
        &self,
        shard: usize,
        release: &dyn Fn() -> bool,
    ) -> Result<HeldShard, Error> {
        self.plan().remove_next_use(shard);
        let held = self.obtain_now(shard, release)?;
        // The plan is shorter by one, so the prefetch thread may fetch one more.
        self.signal.change();
        Ok(held)
    }

    /// Obtains a shard. Waits for space in the cache until the timeout.
    fn obtain_now(&self, shard: usize, release: &dyn Fn() -> bool) -> Result<HeldShard, Error> {
        let since = Instant::now();
        let mut has_warned = false;
        loop {
            let seen = self.signal.changes();
            let (in_use_bytes, is_disk_full) = match self.obtain(shard, Demand::Now)? {
                ObtainResult::Held(held) => return Ok(held),
                ObtainResult::Busy => continue,
                ObtainResult::NoRoom { in_use_bytes, is_disk_full } => (in_use_bytes, is_disk_full),
            };
            // Without this, ranks that share the cache could all wait for each other.
            if release() {
                continue;
            }
            let (object, waited) = (&self.objects[shard], since.elapsed());
            let error = || Error::NoRoom {
                name: object.url.clone(),
                bytes: object.meta.size,
                cache_dir: self.cache.folder.clone(),
                cache_bytes: self.cache.max_bytes,
                in_use_bytes,
                is_disk_full,
                waited,
            };
            if waited >= self.room_timeout {
                return Err(error());
            }
            if waited >= LONG_WAIT && !has_warned {
                has_warned = true;
                tracing::warn!("{}; still waiting", error());
            }
            self.signal.wait_for_change(seen, ROOM_POLL_INTERVAL.min(self.room_timeout));
        }
    }

    /// Finds a shard in the cache, or fetches it.
    pub(super) fn obtain(&self, shard: usize, demand: Demand) -> Result<ObtainResult, Error> {
        let (object, entry) = (&self.objects[shard], &self.entries[shard]);
        loop {
            if let Some(held) = self.cache.lease(entry)? {
                return Ok(ObtainResult::Held(held));
            }
            let work = match demand {
                Demand::Now => self.cache.work(entry)?,
                Demand::At(_) => match self.cache.try_work(entry)? {
                    Some(work) => work,
                    None => return Ok(ObtainResult::Busy),
                },
            };
            // The previous owner of the lock may have fetched it.
            if let Some(held) = self.cache.lease(entry)? {
                return Ok(ObtainResult::Held(held));
            }
            if let Some(held) = self.cache.check(entry, &work)? {
                return Ok(ObtainResult::Held(held));
            }
            let room = self.reserve(shard, &work, demand)?;
            if let Reservation::Full { in_use_bytes, is_disk_full } = room {
                return Ok(ObtainResult::NoRoom { in_use_bytes, is_disk_full });
            }
            let digest = self.fetcher.fetch(object, &work.file, &work.path)?;
            if let Some(held) = self.cache.commit(entry, &object.url, work, digest)? {
                return Ok(ObtainResult::Held(held));
            }
        }
    }

    fn reserve(&self, shard: usize, work: &WorkLock, demand: Demand) -> Result<Reservation, Error> {
        let uses = self.plan().next_uses();
        let uses: HashMap<&str, usize> = uses
            .iter()
            .map(|(&shard, &position)| (self.entries[shard].name.as_str(), position))
            .collect();
        let next_use = |name: &str| uses.get(name).copied();
        self.cache.reserve(work, self.objects[shard].meta.size, demand, &next_use)
    }

    /// Whether a copy of the shard exists in the cache, without checking it.
    pub(super) fn is_there(&self, shard: usize) -> bool {
        self.entries[shard].data().exists()
    }

    pub(super) fn plan_prefetch(&self, shards: impl Iterator<Item = usize>) {
        self.plan().replace(shards.filter(|&shard| shard < self.objects.len()));
        self.signal.change();
    }

    /// The version of the plan, and the shards to keep in the cache from now on, as (position, shard).
    pub(super) fn window(&self) -> (u64, Vec<(usize, usize)>) {
        let plan = self.plan();
        let bytes = |shard: usize| self.objects[shard].meta.size;
        (plan.version, plan.window(self.cache.max_bytes, bytes))
    }

    /// Ignores poisoning: the plan is valid after any panic.
    fn plan(&self) -> MutexGuard<'_, PrefetchPlan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks that every shard fits into the cache: otherwise the error would occur hours later.
fn refuse_too_large(objects: &[Object], cache_bytes: u64) -> Result<(), Error> {
    match objects.iter().max_by_key(|object| object.meta.size) {
        Some(largest) if largest.meta.size > cache_bytes => Err(Error::CacheTooSmall {
            name: largest.url.clone(),
            bytes: largest.meta.size,
            cache_bytes,
        }),
        _ => Ok(()),
    }
}
