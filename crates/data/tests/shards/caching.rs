//! The cache: eviction, prefetching and verification of copies.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use baton_data::Error;

use crate::kit::{Kit, PART, SHARD, cached_bytes, contents, key};

/// Changes one byte, and makes sure that the file system's clock has moved.
fn damage(copy: &Path) {
    use std::os::unix::fs::FileExt;
    let file = fs::File::options().write(true).open(copy).unwrap();
    let before = (file.metadata().unwrap().ctime(), file.metadata().unwrap().ctime_nsec());
    loop {
        file.write_all_at(&[255], SHARD as u64 / 2).unwrap();
        let metadata = file.metadata().unwrap();
        if (metadata.ctime(), metadata.ctime_nsec()) != before {
            break;
        }
    }
}

#[test]
fn a_fetched_shard_is_the_object_and_is_fetched_once() {
    let kit = Kit::new(2, 2);
    let shards = kit.open();

    for _ in 0..3 {
        assert_eq!(fs::read(shards.local(1).unwrap()).unwrap(), contents(1));
    }

    assert_eq!((kit.fetches(0), kit.fetches(1)), (0, 1));
    let bytes = kit.ranges(1).iter().map(|(first, last)| last + 1 - first).sum::<u64>();
    assert_eq!(bytes, SHARD as u64);
}

#[test]
fn an_empty_shard_is_an_empty_file() {
    let kit = Kit::new(1, 1);
    kit.server.bucket.put(&key(0), Vec::new());

    let shards = kit.open();

    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), b"");
    assert!(matches!(shards.samples(), Err(Error::File { .. })));
}

#[test]
fn a_full_cache_evicts_the_least_recently_used_shard() {
    let kit = Kit::new(6, 3);
    let (most, cache) = (Arc::new(AtomicU64::new(0)), kit.cache.path().to_owned());
    let seen = Arc::clone(&most);
    kit.proxy.inject(move |_| {
        // The cache is fullest while a shard is being fetched.
        seen.fetch_max(cached_bytes(&cache), Ordering::Relaxed);
        crate::proxy::Fault::None
    });
    let shards = kit.open();

    for shard in [0, 1, 2, 0, 3, 0, 4, 5] {
        drop(shards.local(shard).unwrap());
        assert!(kit.cached_bytes() <= kit.options.cache_bytes);
    }

    // Shard 0 was used repeatedly, so 1 to 3 were evicted before it.
    assert_eq!(kit.fetches(0), 1);
    assert_eq!(kit.cached(), [0, 4, 5]);
    assert_eq!(most.load(Ordering::Relaxed), kit.options.cache_bytes);
    drop(shards.local(0).unwrap());
    assert_eq!(kit.fetches(0), 1);
}

#[test]
fn a_shard_is_not_evicted_while_it_is_leased() {
    let kit = Kit::new(4, 2);
    let shards = kit.open();
    let first = shards.local(0).unwrap();

    for shard in 1..4 {
        drop(shards.local(shard).unwrap());
    }

    assert_eq!(fs::read(&first).unwrap(), contents(0));
}

#[test]
fn a_lease_outlives_its_set() {
    let kit = Kit::new(1, 1);
    let lease = kit.open().local(0).unwrap();

    assert_eq!(fs::read(&lease).unwrap(), contents(0));
}

#[test]
fn if_all_shards_remain_in_use_the_error_recommends_a_larger_cache() {
    let kit = Kit::new(3, 2);
    let shards = kit.open();
    let _leases = [shards.local(0).unwrap(), shards.local(1).unwrap()];

    let error = shards.local(2).unwrap_err();

    assert!(matches!(error, Error::NoRoom { in_use_bytes: 400_000, .. }), "{error:?}");
    let remedy = "raise data.cache_gib, or set data.order = \"quasi_random\"";
    assert!(error.to_string().ends_with(remedy), "{error}");
    assert_eq!(kit.fetches(2), 0);
}

#[test]
fn a_caller_waits_for_a_lease_to_end() {
    let mut kit = Kit::new(2, 1);
    kit.options.room_timeout = Duration::from_secs(60);
    let shards = kit.open();
    let lease = shards.local(0).unwrap();

    thread::scope(|scope| {
        let waiting = scope.spawn(|| fs::read(shards.local(1).unwrap()).unwrap());
        // Time in which a caller that does not wait would have ended; the test passes however long it is.
        thread::sleep(Duration::from_millis(200));
        assert!(!waiting.is_finished());
        drop(lease);
        assert_eq!(waiting.join().unwrap(), contents(1));
    });
}

#[test]
fn shards_are_prefetched_in_the_planned_order_as_far_as_they_fit() {
    let kit = Kit::new(6, 3);
    let shards = kit.open();
    kit.proxy.clear_log();

    shards.plan_prefetch([4, 2, 4, 0, 5]);
    kit.until_cached(&[0, 2, 4]);

    let firsts = |kit: &Kit| -> Vec<u8> {
        let log = kit.proxy.log();
        let firsts = log.iter().filter(|request| request.range == Some((0, PART - 1)));
        firsts.map(|get| (0..6).find(|&shard| get.gets(&key(shard))).unwrap()).collect()
    };
    assert_eq!(firsts(&kit), [4, 2, 0]);

    // The needed shards are in the cache; the next is fetched when an unneeded one can be evicted.
    drop(shards.local(4).unwrap());
    drop(shards.local(2).unwrap());
    kit.until_cached(&[0, 4, 5]);
    assert_eq!(firsts(&kit), [4, 2, 0, 5]);
    for shard in [4, 0, 5] {
        drop(shards.local(shard).unwrap());
    }
    assert_eq!(firsts(&kit), [4, 2, 0, 5]);
}

#[test]
fn a_new_plan_replaces_the_old_one() {
    let kit = Kit::new(4, 1);
    let shards = kit.open();

    shards.plan_prefetch([0, 1]);
    kit.until_cached(&[0]);
    shards.plan_prefetch([3, 99]);
    kit.until_cached(&[3]);

    assert_eq!([0, 1, 2, 3].map(|shard| kit.fetches(shard)), [1, 0, 0, 1]);
}

#[test]
fn the_next_run_uses_the_existing_copies() {
    let kit = Kit::new(2, 2);
    drop(kit.open().local(0).unwrap());
    kit.proxy.clear_log();

    let shards = kit.open();

    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
    assert_eq!(kit.fetches(0), 0);
}

#[test]
fn an_object_that_changed_between_runs_is_fetched_again() {
    let kit = Kit::new(2, 2);
    drop(kit.open().local(0).unwrap());

    kit.server.bucket.put(&key(0), contents(77));

    assert_eq!(fs::read(kit.open().local(0).unwrap()).unwrap(), contents(77));
}

#[test]
fn a_damaged_copy_is_detected_and_fetched_again() {
    let kit = Kit::new(2, 2);
    let copy = kit.open().local(0).unwrap().to_owned();
    damage(&copy);
    assert_ne!(fs::read(&copy).unwrap(), contents(0));

    let shards = kit.open();

    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
    assert_eq!(kit.fetches(0), 2);
}

#[test]
fn the_prefetch_thread_detects_damaged_copies() {
    let kit = Kit::new(1, 1);
    let copy = kit.open().local(0).unwrap().to_owned();
    damage(&copy);
    let shards = kit.open();

    shards.plan_prefetch([0]);
    kit.proxy.wait_for(|log| log.iter().filter(|request| request.gets(&key(0))).count() == 8);
    kit.until_cached(&[0]);

    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
    assert_eq!(kit.fetches(0), 2);
}

#[test]
fn two_prefetching_sets_share_the_work() {
    let kit = Kit::new(4, 4);
    let (most, cache) = (Arc::new(AtomicU64::new(0)), kit.cache.path().to_owned());
    let seen = Arc::clone(&most);
    kit.proxy.inject(move |_| {
        let is_part = |name: &str| name.ends_with(".part");
        let names = fs::read_dir(&cache).unwrap().map(|file| file.unwrap().file_name());
        let parts = names.filter(|name| is_part(name.to_str().unwrap())).count();
        seen.fetch_max(parts as u64, Ordering::Relaxed);
        crate::proxy::Fault::Trickle(4000)
    });
    let sets = [kit.open(), kit.open()];

    sets.iter().for_each(|shards| shards.plan_prefetch(0..4));
    kit.until_cached(&[0, 1, 2, 3]);

    // Each set prefetches one shard at a time.
    assert_eq!(most.load(Ordering::Relaxed), 2);
    assert_eq!([0, 1, 2, 3].map(|shard| kit.fetches(shard)), [1; 4]);
}

#[test]
fn a_rewritten_but_undamaged_copy_is_kept() {
    let kit = Kit::new(1, 1);
    let copy = kit.open().local(0).unwrap().to_owned();
    damage(&copy);
    fs::write(&copy, contents(0)).unwrap();

    let shards = kit.open();

    // Verifying a copy replaces its record by a new file.
    let record = copy.with_added_extension("json");
    let inode = || fs::metadata(&record).unwrap().ino();
    let old = inode();
    drop(shards.local(0).unwrap());
    let new = inode();
    assert_ne!(new, old);
    drop(shards.local(0).unwrap());
    assert_eq!(inode(), new);
    assert_eq!(kit.fetches(0), 1);
}

#[test]
fn a_copy_that_is_truncated_or_without_its_digest_is_fetched_again() {
    let kit = Kit::new(1, 1);
    for fetches in 2..4 {
        let copy = kit.open().local(0).unwrap().to_owned();
        if fetches == 2 {
            fs::File::options().write(true).open(&copy).unwrap().set_len(99).unwrap();
        } else {
            fs::remove_file(copy.with_added_extension("json")).unwrap();
        }
        assert_eq!(fs::read(kit.open().local(0).unwrap()).unwrap(), contents(0));
        assert_eq!(kit.fetches(0), fetches);
    }
}

#[test]
fn a_lower_size_limit_is_applied_at_start() {
    let mut kit = Kit::new(3, 3);
    let shards = kit.open();
    (0..3).for_each(|shard| drop(shards.local(shard).unwrap()));
    fs::write(kit.cache.path().join("notes.txt"), "not of the cache").unwrap();

    kit.options.cache_bytes = SHARD as u64;
    let shards = kit.open();

    assert_eq!(kit.cached_bytes(), SHARD as u64);
    drop(shards.local(2).unwrap());
    assert_eq!(kit.fetches(2), 1);
    assert!(kit.cache.path().join("notes.txt").exists());
}
