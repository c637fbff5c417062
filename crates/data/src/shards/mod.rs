//! A data set in shards: files on disk, or objects in a bucket with copies on a local disk.
//!
//! ```text
//! data.train ─▶ source ─▶ files ──────────────────────────────────────────▶ Lease (a path)
//!                    └──▶ Bucket: remote ─▶ fetch ─▶ cache (folder, locks) ─▶ Lease (a path)
//!                                             ▲ plan, ahead: what will be needed, in order
//! ```
//!
//! Start with [`ShardSet`]. All its calls block; none may be made from async code.
//!
//! | module | what it knows |
//! |---|---|
//! | `source` | paths, patterns and URLs |
//! | `remote` | the bucket: listing, range requests of one version of an object |
//! | `retry` | which faults pass, how long to wait, what to tell |
//! | `fetch` | a shard in parts, digested on the way; `etag` compares |
//! | `cache` | the shared folder: names, locks, digests, bound; `evict` decides what goes |
//! | `bucket` | find, check or fetch: how a shard becomes a file |
//! | `plan`, `ahead` | what will be needed, and the thread that fetches it before |

use std::{
    fmt, fs,
    io::Read,
    ops::Deref,
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

mod ahead;
mod bucket;
mod cache;
mod error;
mod etag;
mod evict;
mod fetch;
mod file;
mod io;
mod plan;
mod remote;
mod retry;
mod signal;
mod source;
mod statistics;

use bucket::Bucket;
pub use error::Error;
pub use retry::{Fault, Patience, Remedy};
use source::Place;
pub use statistics::Statistics;

use crate::beton::{HEADER_BYTES, samples_in_header};

/// How remote shards are fetched and kept. Shards on disk need none of it.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folder for copies of remote shards, on a local disk; all processes of a node share it.
    pub cache_dir: PathBuf,
    /// Most bytes that the shards in it may have together, those being fetched included.
    pub cache_bytes: u64,
    /// Length of a part in bytes: one range request. Best what the objects were uploaded with, since
    /// then their tags can be compared.
    pub part_bytes: u64,
    /// Parts of one shard fetched at the same moment. Memory holds twice as many at most.
    pub parts_at_once: usize,
    /// How long a caller waits for others to release shards when the cache is full of those in use.
    pub room_wait: Duration,
    /// When to call a request failed, and how often to repeat it.
    pub patience: Patience,
    /// The `AWS_*` variables: `AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID` and so on, as
    /// `object_store` knows them. Without credentials among them the machine's role is asked for.
    pub environment: Vec<(String, String)>,
}

impl Options {
    /// 8 MiB parts, eight at once, and the environment of this process.
    #[must_use]
    pub fn new(cache_dir: impl Into<PathBuf>, cache_bytes: u64) -> Self {
        Self {
            cache_dir: cache_dir.into(),
            cache_bytes,
            part_bytes: 8 << 20,
            parts_at_once: 8,
            room_wait: Duration::from_secs(300),
            patience: Patience::default(),
            environment: baton_s3::environment(),
        }
    }
}

/// What `data.train` in a recipe names: shards, in the order of their names.
pub struct ShardSet {
    names: Vec<String>,
    shards: Shards,
}

enum Shards {
    Disk(Vec<PathBuf>),
    Bucket { bucket: Arc<Bucket>, ahead: Option<JoinHandle<()>> },
}

impl ShardSet {
    /// Lists a file, a folder (its `*.beton`), or a pattern with `*`, `?`, `[…]`, each a path, a
    /// `file:///…` URL or an `s3://bucket/…` URL. A folder's URL ends in `/`.
    ///
    /// # Errors
    /// Nothing matches; the store cannot be reached or refuses; the largest shard does not fit into
    /// the cache; the cache's folder cannot be used.
    pub fn open(source: &str, options: &Options) -> Result<Self, Error> {
        match source::parse(source)? {
            Place::Disk(path) => {
                let files = source::list_disk(&path)?;
                let names = files.iter().map(|file| file.display().to_string()).collect();
                Ok(Self { names, shards: Shards::Disk(files) })
            }
            Place::Bucket { bucket, keys } => {
                let bucket = Arc::new(Bucket::open(source, &bucket, &keys, options)?);
                let names = bucket.objects.iter().map(|object| object.url.clone()).collect();
                let ahead = ahead::spawn(Arc::clone(&bucket)).map_err(Error::Thread)?;
                Ok(Self { names, shards: Shards::Bucket { bucket, ahead: Some(ahead) } })
            }
        }
    }

    /// Number of shards.
    #[must_use]
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there are none, which [`open`](Self::open) refuses.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Path or URL of a shard, for messages; empty if there is no such shard.
    #[must_use]
    pub fn name(&self, shard: usize) -> &str {
        self.names.get(shard).map_or("", String::as_str)
    }

    /// Whether shards are copied before they can be read.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        matches!(self.shards, Shards::Bucket { .. })
    }

    /// Number of samples of each shard. Only headers are read: 24 bytes of each shard.
    ///
    /// # Errors
    /// A header cannot be read or is not that of a finished beton file.
    pub fn samples(&self) -> Result<Vec<u64>, Error> {
        let headers = match &self.shards {
            Shards::Disk(files) => files.iter().map(|file| read_header(file)).collect(),
            Shards::Bucket { bucket, .. } => bucket.headers(),
        };
        let samples = |(shard, bytes): (usize, Vec<u8>)| {
            samples_in_header(&bytes)
                .map_err(|fault| Error::Header { name: self.names[shard].clone(), fault })
        };
        headers?.into_iter().enumerate().map(samples).collect()
    }

    /// Length in bytes of the largest shard that has to be copied; 0 if none has.
    #[must_use]
    pub fn largest_copy(&self) -> u64 {
        match &self.shards {
            Shards::Disk(_) => 0,
            Shards::Bucket { bucket, .. } => {
                bucket.objects.iter().map(|object| object.meta.size).max().unwrap_or_default()
            }
        }
    }

    /// The shard as a local file; blocks until it is there, and keeps it there while the lease
    /// lives.
    ///
    /// # Errors
    /// There is no such shard; it cannot be fetched; there is no room for it in the cache, because
    /// all that is there stays in use.
    pub fn local(&self, shard: usize) -> Result<Lease, Error> {
        if shard >= self.len() {
            return Err(Error::OutOfRange { shard, shards: self.len() });
        }
        Ok(Lease(match &self.shards {
            Shards::Disk(files) => Local::File(files[shard].clone()),
            Shards::Bucket { bucket, .. } => Local::Copy(bucket.local(shard)?),
        }))
    }

    /// Tells the order in which shards will be needed from now on, in place of what was told
    /// before; shards that do not exist are passed over. A thread fetches as many of them ahead as the cache can hold; a call of
    /// [`local`](Self::local) strikes the shard's first mention off.
    pub fn will_need(&self, shards: impl IntoIterator<Item = usize>) {
        if let Shards::Bucket { bucket, .. } = &self.shards {
            bucket.will_need(shards.into_iter());
        }
    }

    /// What happened so far.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        match &self.shards {
            Shards::Disk(_) => Statistics::default(),
            Shards::Bucket { bucket, .. } => bucket.counters.read(),
        }
    }
}

impl Drop for ShardSet {
    /// Ends what is being fetched ahead.
    fn drop(&mut self) {
        if let Shards::Bucket { bucket, ahead } = &mut self.shards {
            bucket.signal.end();
            // If it panicked, its message is on stderr.
            let _ = ahead.take().map(JoinHandle::join);
        }
    }
}

impl fmt::Debug for ShardSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardSet").field("names", &self.names).finish_non_exhaustive()
    }
}

/// A shard on a local disk, which stays there while this lives; outlives its [`ShardSet`] if need
/// be.
pub struct Lease(Local);

enum Local {
    File(PathBuf),
    Copy(cache::Held),
}

impl Deref for Lease {
    type Target = Path;

    fn deref(&self) -> &Path {
        match &self.0 {
            Local::File(path) => path,
            Local::Copy(held) => held.path(),
        }
    }
}

impl AsRef<Path> for Lease {
    fn as_ref(&self) -> &Path {
        self
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&&**self).finish()
    }
}

fn read_header(file: &Path) -> Result<Vec<u8>, Error> {
    let opened = fs::File::open(file).map_err(Error::io("open", file))?;
    let mut header = Vec::new();
    opened.take(HEADER_BYTES as u64).read_to_end(&mut header).map_err(Error::io("read", file))?;
    Ok(header)
}
