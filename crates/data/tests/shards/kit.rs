//! Test fixture: a bucket behind a proxy, an empty cache, and a short retry policy.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use baton_data::shards::{Options, RetryPolicy, ShardSet};
use baton_fake_s3::{ACCESS_KEY, BUCKET, SECRET_KEY, Server};
use tempfile::TempDir;

use crate::proxy::Proxy;

/// Size of every shard in these tests, bytes.
pub(crate) const SHARD: usize = 200_000;
/// Size of a part, bytes; a shard has four.
pub(crate) const PART: u64 = 64 << 10;

pub(crate) struct Kit {
    pub(crate) server: Server,
    pub(crate) proxy: Proxy,
    pub(crate) cache: TempDir,
    pub(crate) options: Options,
}

impl Kit {
    /// Shards `train-0.beton` … and a cache for `capacity` of them.
    pub(crate) fn new(shards: u8, capacity: u64) -> Self {
        let server = Server::start();
        for shard in 0..shards {
            server.bucket.put(&key(shard), contents(shard));
        }
        let proxy = Proxy::start(server.address);
        let cache = TempDir::new().unwrap();
        let options = options(&proxy.address.to_string(), cache.path(), capacity * SHARD as u64);
        Self { server, proxy, cache, options }
    }

    pub(crate) fn open(&self) -> ShardSet {
        ShardSet::open(&source(), &self.options).unwrap()
    }

    /// Total size of the shards in the cache, including those being fetched, bytes.
    pub(crate) fn cached_bytes(&self) -> u64 {
        cached_bytes(self.cache.path())
    }

    /// The complete shards in the cache, by their records.
    pub(crate) fn cached(&self) -> Vec<u8> {
        let number =
            |name: &str| name.strip_suffix(".beton.json")?.rsplit_once('-')?.1.parse().ok();
        let files = fs::read_dir(self.cache.path()).unwrap().map(Result::unwrap);
        let mut shards: Vec<u8> =
            files.filter_map(|file| number(file.file_name().to_str().unwrap())).collect();
        shards.sort_unstable();
        shards
    }

    /// Waits until the cache contains exactly these shards.
    pub(crate) fn until_cached(&self, shards: &[u8]) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.cached() != shards {
            assert!(Instant::now() < deadline, "{:?} instead of {shards:?}", self.cached());
            thread::yield_now();
        }
    }

    /// The requested ranges of a shard.
    pub(crate) fn ranges(&self, shard: u8) -> Vec<(u64, u64)> {
        let log = self.proxy.log();
        let gets = log.iter().filter(|request| request.gets(&key(shard)));
        gets.filter_map(|request| request.range).collect()
    }

    /// Number of requests for the first part of a shard.
    pub(crate) fn fetches(&self, shard: u8) -> usize {
        self.ranges(shard).into_iter().filter(|range| *range == (0, PART - 1)).count()
    }
}

pub(crate) fn options(endpoint: &str, cache: &Path, cache_bytes: u64) -> Options {
    let mut options = Options::new(cache, cache_bytes);
    options.part_bytes = PART;
    options.max_concurrent_parts = 4;
    options.room_timeout = Duration::from_millis(200);
    options.retry = RetryPolicy {
        // Long enough for a busy machine.
        stall_timeout: Duration::from_secs(5),
        request_timeout: Duration::from_secs(10),
        max_attempts: 4,
        max_attempts_at_open: 3,
        first_backoff: Duration::from_millis(2),
        max_backoff: Duration::from_millis(10),
    };
    options.environment = [
        ("AWS_ENDPOINT_URL", format!("http://{endpoint}")),
        ("AWS_ACCESS_KEY_ID", ACCESS_KEY.to_owned()),
        ("AWS_SECRET_ACCESS_KEY", SECRET_KEY.to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec();
    options
}

pub(crate) fn source() -> String {
    format!("s3://{BUCKET}/set/train-*.beton")
}

pub(crate) fn key(shard: u8) -> String {
    format!("set/train-{shard}.beton")
}

/// The header of a beton file with `1000 + shard` samples, and bytes that differ for every shard.
pub(crate) fn contents(shard: u8) -> Vec<u8> {
    let mut bytes = vec![2, 0, 2, 0];
    bytes.extend((8_u32 << 20).to_le_bytes());
    bytes.extend((1000 + u64::from(shard)).to_le_bytes());
    bytes.extend(4096_u64.to_le_bytes());
    let rest = bytes.len()..SHARD;
    bytes.extend(
        rest.map(|position| (position as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ shard),
    );
    bytes
}

pub(crate) fn cached_bytes(cache: &Path) -> u64 {
    let is_bytes = |name: &str| name.ends_with(".beton") || name.ends_with(".part");
    let files = fs::read_dir(cache).unwrap().map(Result::unwrap);
    files
        .filter(|file| is_bytes(file.file_name().to_str().unwrap()))
        // A file may be evicted in the meantime.
        .filter_map(|file| Some(file.metadata().ok()?.len()))
        .sum()
}
