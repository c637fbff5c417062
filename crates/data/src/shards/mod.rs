//! A data set in shards: files on disk, or objects in a bucket with copies on a local disk.
//!
//! ```text
//! data.train ─▶ source ─▶ files ────────────────────────────────────────────────▶ Lease (a path)
//!                    └──▶ CachedBucket: remote ─▶ fetch ─▶ cache (folder, locks) ─▶ Lease (a path)
//!                                                  ▲ plan, prefetch: shards in the order of their use
//! ```
//!
//! Start with [`ShardSet`]. All its calls block; do not call it from async code.
//!
//! | module | content |
//! |---|---|
//! | `source` | paths, patterns and URLs |
//! | `remote` | the bucket: listing, range requests of one version of an object |
//! | `retry` | transient faults, backoff, error messages |
//! | `fetch` | download of a shard in parts, with digest; `etag` compares it |
//! | `cache` | the shared folder: names, locks, digests, size limit; `evict` decides what to remove |
//! | `bucket` | makes a shard available as a file: find, check or fetch it |
//! | `plan`, `prefetch` | the order in which shards are used, and the thread that fetches them in advance |
//! | `signal` | notifies waiting threads of changes and of shutdown |

use std::{
    fmt, fs,
    io::Read,
    ops::Deref,
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

mod bucket;
mod cache;
mod etag;
mod evict;
mod fetch;
mod plan;
mod prefetch;
mod remote;
mod retry;
mod signal;
mod source;

use bucket::CachedBucket;
use object_store::ObjectMeta;
pub use retry::{Remedy, RequestFault, RetryPolicy};
use source::SourceLocation;

use crate::{
    Error,
    beton::{HEADER_BYTES, Header},
};

/// Longest wait for space in the cache.
pub(crate) const MAX_ROOM_TIMEOUT: Duration = Duration::from_secs(300);

/// Options for fetching and caching remote shards. Not used for shards on disk.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folder for copies of remote shards, on a local disk; shared by all processes of a node.
    pub cache_dir: PathBuf,
    /// Maximum total size of the shards in the folder, including those being fetched, in bytes.
    pub cache_bytes: u64,
    /// Size of a part, which is fetched in one range request, in bytes. It should be the part size of the upload,
    /// because only then can the data be compared with the object's ETag.
    pub part_bytes: u64,
    /// Maximum number of parts of one shard that are fetched at a time. At most twice as many are in memory.
    pub max_concurrent_parts: usize,
    /// How long a caller waits for space when all shards in the cache are in use.
    pub room_timeout: Duration,
    /// Timeouts and retries of requests.
    pub retry: RetryPolicy,
    /// The `AWS_*` variables: `AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID` and others that `object_store`
    /// supports. Without credentials the machine's IAM role is used.
    pub environment: Vec<(String, String)>,
}

impl Options {
    /// 8 MiB parts, eight at a time, and the environment of this process.
    #[must_use]
    pub fn new(cache_dir: impl Into<PathBuf>, cache_bytes: u64) -> Self {
        Self {
            cache_dir: cache_dir.into(),
            cache_bytes,
            part_bytes: 8 << 20,
            max_concurrent_parts: 8,
            room_timeout: MAX_ROOM_TIMEOUT,
            retry: RetryPolicy::default(),
            environment: baton_s3::environment(),
        }
    }
}

/// Whether a data set is in a bucket, judged by its location alone.
///
/// # Errors
/// The location is empty, a URL of an unsupported scheme or without a bucket, or an invalid pattern.
pub fn is_remote(location: &str) -> Result<bool, Error> {
    Ok(matches!(source::parse(location)?, SourceLocation::Bucket { .. }))
}

/// The shards that `data.train` in a recipe refers to, sorted by name.
pub struct ShardSet {
    names: Vec<String>,
    shards: Shards,
}

enum Shards {
    Disk(Vec<PathBuf>),
    Bucket { bucket: Arc<CachedBucket>, prefetch: Option<JoinHandle<()>> },
}

impl ShardSet {
    /// Lists a file, a folder (its `*.beton`), or a pattern with `*`, `?`, `[…]`, each a path, a
    /// `file:///…` URL or an `s3://bucket/…` URL. A folder's URL ends in `/`.
    ///
    /// # Errors
    /// Nothing matches; a request to the store fails; the largest shard does not fit into the cache; the cache's
    /// folder cannot be used.
    pub fn open(source: &str, options: &Options) -> Result<Self, Error> {
        match source::parse(source)? {
            SourceLocation::Disk(path) => {
                let files = source::list_disk(&path)?;
                let names = files.iter().map(|file| file.display().to_string()).collect();
                Ok(Self { names, shards: Shards::Disk(files) })
            }
            SourceLocation::Bucket { bucket, keys } => {
                let bucket = Arc::new(CachedBucket::open(source, &bucket, &keys, options)?);
                let names = bucket.objects.iter().map(|object| object.url.clone()).collect();
                let thread = prefetch::spawn(Arc::clone(&bucket)).map_err(Error::FetchThread)?;
                Ok(Self { names, shards: Shards::Bucket { bucket, prefetch: Some(thread) } })
            }
        }
    }

    /// Number of shards.
    #[must_use]
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there are no shards; never true, because [`open`](Self::open) returns an error then.
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

    /// Number of samples of each shard. Only the headers are read: 24 bytes of each shard.
    ///
    /// # Errors
    /// A header cannot be read, or does not belong to a finished beton file.
    pub fn samples(&self) -> Result<Vec<u64>, Error> {
        let headers = match &self.shards {
            Shards::Disk(files) => files.iter().map(|file| read_header(file)).collect(),
            Shards::Bucket { bucket, .. } => bucket.headers(),
        };
        let samples = |(shard, bytes): (usize, Vec<u8>)| {
            Header::read(&bytes)
                .map(|header| header.samples)
                .map_err(|fault| Error::File { path: self.names[shard].clone().into(), fault })
        };
        headers?.into_iter().enumerate().map(samples).collect()
    }

    /// Size of the largest shard that has to be copied, in bytes; 0 if no shard has to be copied.
    #[must_use]
    pub fn largest_copy(&self) -> u64 {
        match &self.shards {
            Shards::Disk(_) => 0,
            Shards::Bucket { bucket, .. } => {
                bucket.objects.iter().map(|object| object.meta.size).max().unwrap_or_default()
            }
        }
    }

    /// Total size of the shards in a bucket, bytes, and their sizes and ETags, one shard a line; 0 and an empty text if
    /// they are on disk.
    #[must_use]
    pub fn tags(&self) -> (u64, String) {
        let Shards::Bucket { bucket, .. } = &self.shards else { return Default::default() };
        let objects = bucket.objects.iter().map(|object| &object.meta);
        let line = |meta: &ObjectMeta| {
            format!("{} {}\n", meta.size, etag::bare(meta.e_tag.as_deref().unwrap_or("-")))
        };
        (objects.clone().map(|meta| meta.size).sum(), objects.map(line).collect())
    }

    /// The shard as a local file. Blocks until it has been fetched; it is not evicted while the lease exists.
    ///
    /// # Errors
    /// There is no such shard; it cannot be fetched; all shards in the cache remain in use, so that there is no space
    /// for it.
    pub fn local(&self, shard: usize) -> Result<Lease, Error> {
        self.local_releasing(shard, &|| false)
    }

    /// Like [`local`](Self::local). While there is no space, `release` is called, which drops a lease of the caller
    /// and returns whether there was one.
    pub(crate) fn local_releasing(
        &self,
        shard: usize,
        release: &dyn Fn() -> bool,
    ) -> Result<Lease, Error> {
        if shard >= self.len() {
            return Err(Error::OutOfRange { shard, shards: self.len() });
        }
        Ok(Lease(match &self.shards {
            Shards::Disk(files) => Local::File(files[shard].clone()),
            Shards::Bucket { bucket, .. } => Local::Copy(bucket.local(shard, release)?),
        }))
    }

    /// Replaces the order in which shards will be needed from now on; shards that do not exist are skipped. A thread
    /// prefetches as many of them as fit into the cache. Each call of [`local`](Self::local) removes the shard's
    /// first occurrence from the order.
    pub fn plan_prefetch(&self, shards: impl IntoIterator<Item = usize>) {
        if let Shards::Bucket { bucket, .. } = &self.shards {
            bucket.plan_prefetch(shards.into_iter());
        }
    }
}

impl Drop for ShardSet {
    /// Stops prefetching.
    fn drop(&mut self) {
        if let Shards::Bucket { bucket, prefetch } = &mut self.shards {
            bucket.signal.shut_down();
            // If the thread panicked, its message is already on stderr.
            let _ = prefetch.take().map(JoinHandle::join);
        }
    }
}

impl fmt::Debug for ShardSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardSet").field("names", &self.names).finish_non_exhaustive()
    }
}

/// A shard on a local disk, which is not evicted while this exists. May outlive its [`ShardSet`].
pub struct Lease(Local);

enum Local {
    File(PathBuf),
    Copy(cache::HeldShard),
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
