//! Shards in a bucket with their copies in the cache: how one becomes a local file.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::Semaphore;

use super::{
    Error, Options,
    cache::{Cache, Held, Room, Slot, Work},
    evict::Need,
    fetch::Fetcher,
    io::Io,
    plan::Plan,
    remote::{Object, Remote},
    signal::Signal,
    source::Keys,
    statistics::Counters,
};

/// Releases in other processes are noticed this late.
const ROOM_POLL: Duration = Duration::from_millis(100);

/// The remote half of a [`ShardSet`](super::ShardSet).
pub(super) struct Bucket {
    pub(super) objects: Vec<Object>,
    pub(super) counters: Arc<Counters>,
    pub(super) signal: Arc<Signal>,
    slots: Vec<Slot>,
    cache: Cache,
    room_wait: Duration,
    fetcher: Fetcher,
    plan: Mutex<Plan>,
}

/// How an attempt to have a shard ended.
pub(super) enum Obtained {
    Held(Held),
    /// Not asked for yet, and somebody else is at work on it.
    Busy,
    /// Not now: so many bytes of the cache may not be evicted.
    NoRoom {
        in_use_bytes: u64,
    },
}

impl Bucket {
    pub(super) fn open(
        source_text: &str,
        bucket: &str,
        keys: &Keys,
        options: &Options,
    ) -> Result<Self, Error> {
        let counters = Arc::new(Counters::default());
        let signal = Arc::new(Signal::new());
        let io = Io::new().map_err(Error::Thread)?;
        let remote =
            Remote::new(bucket, &options.environment, options.patience, Arc::clone(&counters));
        let remote = remote.map_err(|error| Error::Source {
            source_text: source_text.to_owned(),
            problem: error.to_string(),
        })?;
        let objects = io.run(remote.list(source_text, keys))?;
        refuse_too_large(&objects, options.cache_bytes)?;
        let cache = Cache::open(
            &options.cache_dir,
            options.cache_bytes,
            Arc::clone(&counters),
            Arc::clone(&signal),
        )?;
        let slots = objects.iter().map(|object| cache.slot(remote.endpoint(), object)).collect();
        let parts_at_once = options.parts_at_once.max(1);
        let fetcher = Fetcher {
            io,
            remote: Arc::new(remote),
            counters: Arc::clone(&counters),
            signal: Arc::clone(&signal),
            part_bytes: options.part_bytes.max(1),
            // Twice, so that a caller who waits need not wait for what is fetched ahead.
            parts: Arc::new(Semaphore::new(2 * parts_at_once)),
            parts_at_once,
        };
        Ok(Self {
            objects,
            counters,
            signal,
            slots,
            cache,
            room_wait: options.room_wait,
            fetcher,
            plan: Mutex::default(),
        })
    }

    pub(super) fn headers(&self) -> Result<Vec<Vec<u8>>, Error> {
        self.fetcher.io.run(self.fetcher.remote.headers(&self.objects))
    }

    /// The shard as a local file, now.
    pub(super) fn local(&self, shard: usize) -> Result<Held, Error> {
        let asked = Instant::now();
        self.plan().met(shard);
        let held = match self.cache.lease(&self.slots[shard])? {
            Some(held) => {
                self.counters.hits.add(1);
                held
            }
            None => {
                self.counters.misses.add(1);
                self.obtain_now(shard)?
            }
        };
        self.counters.waited_micros.add(asked.elapsed().as_micros() as u64);
        // The plan is one shorter, so one more may fit.
        self.signal.change();
        Ok(held)
    }

    /// Waits for room as long as somebody might release some.
    fn obtain_now(&self, shard: usize) -> Result<Held, Error> {
        let since = Instant::now();
        loop {
            let seen = self.signal.changes();
            let in_use_bytes = match self.obtain(shard, Need::Now)? {
                Obtained::Held(held) => return Ok(held),
                Obtained::Busy => continue,
                Obtained::NoRoom { in_use_bytes } => in_use_bytes,
            };
            let waited = since.elapsed();
            if waited >= self.room_wait {
                let object = &self.objects[shard];
                return Err(Error::NoRoom {
                    name: object.url.clone(),
                    bytes: object.meta.size,
                    cache_dir: self.cache.folder.clone(),
                    cache_bytes: self.cache.bound,
                    in_use_bytes,
                    waited,
                });
            }
            self.signal.wait_beyond(seen, ROOM_POLL.min(self.room_wait));
        }
    }

    /// Finds, checks or fetches a shard.
    pub(super) fn obtain(&self, shard: usize, need: Need) -> Result<Obtained, Error> {
        let (object, slot) = (&self.objects[shard], &self.slots[shard]);
        loop {
            if let Some(held) = self.cache.lease(slot)? {
                return Ok(Obtained::Held(held));
            }
            let work = match need {
                Need::Now => self.cache.work(slot)?,
                Need::At(_) => match self.cache.try_work(slot)? {
                    Some(work) => work,
                    None => return Ok(Obtained::Busy),
                },
            };
            // Whoever had the right before may have brought it meanwhile.
            if let Some(held) = self.cache.lease(slot)? {
                return Ok(Obtained::Held(held));
            }
            if let Some(held) = self.cache.check(slot, &work)? {
                return Ok(Obtained::Held(held));
            }
            if let Room::Taken { in_use_bytes } = self.reserve(shard, &work, need)? {
                return Ok(Obtained::NoRoom { in_use_bytes });
            }
            let digest = self.fetcher.fetch(object, &work.file, &work.path)?;
            if let Some(held) = self.cache.commit(slot, &object.url, work, digest)? {
                self.counters.fetched_shards.add(1);
                return Ok(Obtained::Held(held));
            }
        }
    }

    fn reserve(&self, shard: usize, work: &Work, need: Need) -> Result<Room, Error> {
        let needs = self.plan().next_needs();
        let needs: HashMap<&str, usize> = needs
            .iter()
            .map(|(&shard, &position)| (self.slots[shard].name.as_str(), position))
            .collect();
        let next_need = |name: &str| needs.get(name).copied();
        self.cache.reserve(work, self.objects[shard].meta.size, need, &next_need)
    }

    /// Whether a shard lies in the cache, without a look into it.
    pub(super) fn is_there(&self, shard: usize) -> bool {
        self.slots[shard].data().exists()
    }

    pub(super) fn will_need(&self, shards: impl Iterator<Item = usize>) {
        self.plan().replace(shards.filter(|&shard| shard < self.objects.len()));
        self.signal.change();
    }

    /// What to have in the cache from now on, and of which plan.
    pub(super) fn window(&self) -> (u64, Vec<(usize, usize)>) {
        let plan = self.plan();
        let bytes = |shard: usize| self.objects[shard].meta.size;
        (plan.edition, plan.window(self.cache.bound, bytes))
    }

    /// A panic elsewhere leaves a plan that is still one.
    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Better now than when its turn comes, hours later.
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
