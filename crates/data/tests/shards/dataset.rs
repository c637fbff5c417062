//! A data set in a bucket, from the order of its samples to finished batches.

use std::{
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_data::{
    Batch, Dataset, Labels, Loader, Mode, Options, Preprocessing, Request, SampleOrder, Source,
    shards,
    write::{Field, FieldKind, Value, Writer},
};
use baton_fake_s3::Server;
use baton_recipe::spec::{Augment, Order, Resize};
use tempfile::TempDir;

use crate::{
    kit::{key, options, source},
    proxy::Proxy,
};

const SHARDS: u8 = 8;
/// Number of samples of each shard; one is empty.
const SAMPLES: [u64; SHARDS as usize] = [20, 13, 0, 31, 20, 17, 25, 8];
/// Window of the quasi-random order in samples: two or three shards.
const WINDOW: u64 = 40;

/// Writes a shard whose images and labels differ from those of all others.
fn shard(path: &Path, number: u8) {
    let fields =
        vec![Field::new("image", FieldKind::RgbImage), Field::new("label", FieldKind::Int)];
    let samples = SAMPLES[usize::from(number)];
    let mut writer = Writer::create(path, fields, samples, 1 << 12).unwrap();
    for sample in 0..samples {
        let bytes = [[number * 30, sample as u8 * 8, 77]; 16 * 16];
        let (mode, width, height) = (Mode::Raw, 16, 16);
        let image = Value::Image { mode, width, height, bytes: bytes.as_flattened() };
        writer.push(&[image, Value::Int(i64::from(number))]).unwrap();
    }
    writer.finish().unwrap();
}

/// The same shards on disk and in a bucket, with a cache for six shards of the largest size.
struct TestSet {
    disk: TempDir,
    proxy: Proxy,
    server: Server,
    _cache: TempDir,
    options: shards::Options,
}

impl TestSet {
    fn new() -> Self {
        let (disk, cache, server) =
            (TempDir::new().unwrap(), TempDir::new().unwrap(), Server::start());
        let mut largest = 0;
        for number in 0..SHARDS {
            let path = disk.path().join(format!("train-{number}.beton"));
            shard(&path, number);
            let bytes = fs::read(&path).unwrap();
            largest = largest.max(bytes.len() as u64);
            server.bucket.put(&key(number), bytes);
        }
        let proxy = Proxy::start(server.address);
        let options = options(&proxy.address.to_string(), cache.path(), 6 * largest);
        Self { disk, proxy, server, _cache: cache, options }
    }

    fn local(&self) -> Arc<Dataset> {
        let pattern = self.disk.path().join("train-*.beton");
        Arc::new(Dataset::open(Source::new(pattern.to_str().unwrap())).unwrap())
    }

    fn remote(&self, labels: Labels) -> Result<Arc<Dataset>, baton_data::Error> {
        let cache_bytes = self.options.cache_bytes;
        let source = Source { labels, cache_bytes, ..Source::new(source()) };
        Dataset::open_with(source, &self.options).map(Arc::new)
    }

    /// Size of a shard.
    fn bytes(&self, number: u8) -> u64 {
        let path = self.disk.path().join(format!("train-{number}.beton"));
        fs::metadata(path).unwrap().len()
    }

    /// Number of times a shard was fetched; reading its header does not count.
    fn fetches(&self, number: u8) -> usize {
        let is_first = |range: Option<(u64, u64)>| range.is_some_and(|(a, b)| a == 0 && b > 23);
        let log = self.proxy.log();
        log.iter().filter(|get| get.gets(&key(number)) && is_first(get.range)).count()
    }
}

/// An epoch from a position on, in batches of seven.
fn batches(set: &Arc<Dataset>, kind: Order, epoch: u32, start: u64) -> Vec<Batch> {
    let order = SampleOrder::new(kind, 5, WINDOW, set.sample_blocks().unwrap());
    let (order, len) = (order.epoch(epoch), set.len());
    set.plan_prefetch(&order, start, None);
    let preprocessing = Preprocessing::Train {
        seed: 1,
        resolution: 8,
        resize: Resize::Fast,
        augment: Augment::default(),
        mean: [0; 3],
    };
    let requests = (start..len).step_by(7).map(move |first| Request {
        epoch,
        samples: (first..(first + 7).min(len)).map(|position| order.at(position)).collect(),
        preprocessing: preprocessing.clone(),
    });
    Loader::start(set.clone(), &Options::new(2, 2), requests).map(Result::unwrap).collect()
}

#[test]
fn a_bucket_gives_the_same_batches_as_files_on_disk() {
    let test_set = TestSet::new();
    let (local, remote) = (test_set.local(), test_set.remote(Labels::Ints).unwrap());
    assert_eq!(remote.len(), SAMPLES.iter().sum::<u64>());
    for kind in [Order::QuasiRandom, Order::Sequential, Order::Random] {
        for (epoch, start) in [(0, 0), (1, 63)] {
            let expected = batches(&local, kind, epoch, start);
            assert!(batches(&remote, kind, epoch, start) == expected, "{kind:?}, epoch {epoch}");
        }
    }
}

#[test]
fn the_summary_of_a_bucket_changes_with_any_object_and_its_size_is_that_of_the_files() {
    let test_set = TestSet::new();
    let summary = || test_set.remote(Labels::Ints).unwrap().summary().unwrap();
    let before = summary();
    assert_eq!(summary(), before);
    let local = test_set.local().summary().unwrap();
    assert_eq!((local.samples, local.bytes), (before.samples, before.bytes));
    assert_eq!(local.difference(&before), None, "contents cannot be compared");

    let path = test_set.disk.path().join("train-5.beton");
    let mut bytes = fs::read(path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    test_set.server.bucket.put(&key(5), bytes);
    let difference = summary().difference(&before);
    assert_eq!(difference.as_deref(), Some("other contents of the same size"));
}

/// The cache is smaller than the data set, and still no shard is fetched twice.
#[test]
fn quasi_random_order_fetches_every_shard_once_per_epoch() {
    let test_set = TestSet::new();
    let remote = test_set.remote(Labels::Ints).unwrap();
    // Opening fetched one shard, which may be evicted before it is used.
    let before: Vec<usize> = (0..SHARDS).map(|number| test_set.fetches(number)).collect();
    let visited = batches(&remote, Order::QuasiRandom, 0, 0);
    assert_eq!(visited.iter().map(Batch::len).sum::<usize>() as u64, remote.len());
    for number in 0..SHARDS {
        let fetches = test_set.fetches(number) - before[usize::from(number)];
        assert!(fetches <= 1, "shard {number} was fetched {fetches} times");
    }
}

/// The first sample of a shard.
fn first(number: u8) -> u64 {
    SAMPLES[..usize::from(number)].iter().sum()
}

/// Two ranks fill the cache with a shard each, and then need another one.
#[test]
fn ranks_close_shards_instead_of_waiting_for_each_other() {
    let mut test_set = TestSet::new();
    test_set.options.cache_bytes = test_set.bytes(3) + test_set.bytes(6);
    let ranks = [0, 1].map(|_| test_set.remote(Labels::Ints).unwrap());

    assert_eq!(ranks[0].label(first(3)).unwrap(), 3);
    assert_eq!(ranks[1].label(first(6)).unwrap(), 6);
    assert_eq!(ranks[0].label(first(0)).unwrap(), 0);
    assert_eq!(ranks[1].label(first(1)).unwrap(), 1);
}

/// Reading ahead must not wait for the same room first.
#[test]
fn a_batch_for_which_there_is_no_room_fails_after_the_timeout() {
    let mut test_set = TestSet::new();
    test_set.options.cache_bytes = test_set.bytes(3) + test_set.bytes(6) - 1;
    test_set.options.room_timeout = Duration::from_secs(2);
    let [rank, other] = [0, 1].map(|_| test_set.remote(Labels::Ints).unwrap());
    assert_eq!(other.label(first(3)).unwrap(), 3);
    let preprocessing =
        Preprocessing::Evaluate { resolution: 8, resize: Resize::Fast, crop_ratio: 1.0 };
    let requests = [Request { epoch: 0, samples: vec![first(6)], preprocessing }];

    let started = Instant::now();
    let mut loader = Loader::start(rank, &Options::new(1, 1), requests.into_iter());
    let error = loader.next().unwrap().unwrap_err();

    assert!(matches!(error, baton_data::Error::NoRoom { .. }), "{error}");
    assert!(started.elapsed() < 2 * test_set.options.room_timeout, "{:?}", started.elapsed());
}

#[test]
fn a_label_outside_the_classes_is_reported_when_its_shard_is_fetched() {
    let test_set = TestSet::new();
    // The first shard has label 0 only.
    let remote = test_set.remote(Labels::Classes(5)).unwrap();
    let last = remote.len() - 1;
    let refused = remote.label(last).unwrap_err().to_string();
    assert!(refused.contains("label 7, but model.num_classes = 5"), "{refused}");
    assert_eq!(remote.label(0).unwrap(), 0);
}
