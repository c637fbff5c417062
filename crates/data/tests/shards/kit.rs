//! What every story needs: a bucket behind a proxy, an empty cache, and little patience.

use std::{fs, path::Path, time::Duration};

use baton_data::shards::{Options, Patience, ShardSet};
use tempfile::TempDir;

use crate::{
    proxy::Proxy,
    server::{ACCESS_KEY, BUCKET, SECRET_KEY, Server},
};

/// Length of every shard in these stories.
pub(crate) const SHARD: usize = 200_000;
/// Length of a part: four to a shard.
pub(crate) const PART: u64 = 64 << 10;

pub(crate) struct Kit {
    pub(crate) server: Server,
    pub(crate) proxy: Proxy,
    pub(crate) cache: TempDir,
    pub(crate) options: Options,
}

impl Kit {
    /// Shards `train-0.beton` … and a cache with room for so many of them.
    pub(crate) fn new(shards: u8, room: u64) -> Self {
        let server = Server::start();
        for shard in 0..shards {
            server.bucket.put(&key(shard), contents(shard));
        }
        let proxy = Proxy::start(server.address);
        let cache = TempDir::new().unwrap();
        let options = options(&proxy.address.to_string(), cache.path(), room * SHARD as u64);
        Self { server, proxy, cache, options }
    }

    pub(crate) fn open(&self) -> ShardSet {
        ShardSet::open(&source(), &self.options).unwrap()
    }

    /// Bytes of shards in the cache, those being fetched included.
    pub(crate) fn cached_bytes(&self) -> u64 {
        cached_bytes(self.cache.path())
    }

    /// How often the first part of a shard was asked for.
    pub(crate) fn fetches(&self, shard: u8) -> usize {
        let is_first = |first| first == Some((0, PART - 1));
        let log = self.proxy.log();
        log.iter().filter(|request| request.gets(&key(shard)) && is_first(request.range)).count()
    }
}

pub(crate) fn options(endpoint: &str, cache: &Path, cache_bytes: u64) -> Options {
    let mut options = Options::new(cache, cache_bytes);
    options.part_bytes = PART;
    options.parts_at_once = 4;
    options.room_wait = Duration::from_millis(200);
    options.patience = Patience {
        // Long enough for a busy machine.
        stall: Duration::from_secs(5),
        request: Duration::from_secs(10),
        attempts: 4,
        attempts_at_open: 3,
        first_pause: Duration::from_millis(2),
        longest_pause: Duration::from_millis(10),
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

/// The header of a beton file with `1000 + shard` samples, and bytes that no other shard has.
pub(crate) fn contents(shard: u8) -> Vec<u8> {
    let mut bytes = vec![2, 0, 2, 0];
    bytes.extend((8_u32 << 20).to_le_bytes());
    bytes.extend((1000 + u64::from(shard)).to_le_bytes());
    bytes.extend(4096_u64.to_le_bytes());
    let rest = bytes.len()..SHARD;
    bytes.extend(
        rest.map(|place| (place as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ shard),
    );
    bytes
}

pub(crate) fn cached_bytes(cache: &Path) -> u64 {
    let is_bytes = |name: &str| name.ends_with(".beton") || name.ends_with(".part");
    let files = fs::read_dir(cache).unwrap().map(Result::unwrap);
    files
        .filter(|file| is_bytes(file.file_name().to_str().unwrap()))
        // It may be evicted while we look.
        .filter_map(|file| Some(file.metadata().ok()?.len()))
        .sum()
}
