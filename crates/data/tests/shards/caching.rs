//! What the cache keeps, what it gives up, and what it fetches before it is asked.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use baton_data::shards::{Error, ShardSet, Statistics};

use crate::kit::{Kit, PART, SHARD, cached_bytes, contents, key};

/// Waits for what another thread will bring about, which tells nobody.
pub(crate) fn until(shards: &ShardSet, wanted: impl Fn(Statistics) -> bool) {
    let most = Instant::now() + Duration::from_secs(20);
    while !wanted(shards.statistics()) {
        assert!(Instant::now() < most, "{:?}", shards.statistics());
        thread::yield_now();
    }
}

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
    let statistics = shards.statistics();
    assert_eq!((statistics.misses, statistics.hits, statistics.fetched_shards), (1, 2, 1));
    assert_eq!(statistics.fetched_bytes, SHARD as u64);
    assert!(statistics.waited > Duration::ZERO);
}

#[test]
fn a_shard_without_bytes_is_a_file_without_bytes() {
    let kit = Kit::new(1, 1);
    kit.server.bucket.put(&key(0), Vec::new());

    let shards = kit.open();

    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), b"");
    assert!(matches!(shards.samples(), Err(Error::Header { .. })));
}

#[test]
fn a_full_cache_gives_up_the_least_recently_needed() {
    let kit = Kit::new(6, 3);
    let (most, cache) = (Arc::new(AtomicU64::new(0)), kit.cache.path().to_owned());
    let seen = Arc::clone(&most);
    kit.proxy.harm(move |_| {
        // While something is being fetched the cache is at its fullest.
        seen.fetch_max(cached_bytes(&cache), Ordering::Relaxed);
        crate::proxy::Harm::None
    });
    let shards = kit.open();

    for shard in [0, 1, 2, 0, 3, 0, 4, 5] {
        drop(shards.local(shard).unwrap());
        assert!(kit.cached_bytes() <= kit.options.cache_bytes);
    }

    // 0 was needed again and again, so 1 to 3 went before it.
    assert_eq!(kit.fetches(0), 1);
    assert_eq!(shards.statistics().evictions, 3);
    assert_eq!(most.load(Ordering::Relaxed), kit.options.cache_bytes);
    drop(shards.local(0).unwrap());
    assert_eq!(kit.fetches(0), 1);
}

#[test]
fn a_shard_stays_while_it_is_leased() {
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
fn when_everything_stays_in_use_the_error_says_to_raise_the_bound() {
    let kit = Kit::new(3, 2);
    let shards = kit.open();
    let _leases = [shards.local(0).unwrap(), shards.local(1).unwrap()];

    let error = shards.local(2).unwrap_err();

    assert!(matches!(error, Error::NoRoom { in_use_bytes: 400_000, .. }), "{error:?}");
    assert!(error.to_string().contains("raise data.cache_gib"), "{error}");
    assert_eq!(kit.fetches(2), 0);
}

#[test]
fn a_caller_waits_for_a_lease_to_end() {
    let mut kit = Kit::new(2, 1);
    kit.options.room_wait = Duration::from_secs(60);
    let shards = kit.open();
    let lease = shards.local(0).unwrap();

    thread::scope(|scope| {
        let waiting = scope.spawn(|| fs::read(shards.local(1).unwrap()).unwrap());
        until(&shards, |statistics| statistics.misses == 2);
        drop(lease);
        assert_eq!(waiting.join().unwrap(), contents(1));
    });
}

#[test]
fn shards_are_fetched_ahead_in_the_order_told_as_far_as_they_fit() {
    let kit = Kit::new(6, 3);
    let shards = kit.open();
    kit.proxy.forget_log();

    shards.will_need([4, 2, 4, 0, 5]);
    until(&shards, |statistics| statistics.fetched_shards == 3);

    let firsts = |kit: &Kit| -> Vec<u8> {
        let log = kit.proxy.log();
        let firsts = log.iter().filter(|request| request.range == Some((0, PART - 1)));
        firsts.map(|get| (0..6).find(|&shard| get.gets(&key(shard))).unwrap()).collect()
    };
    assert_eq!(firsts(&kit), [4, 2, 0]);

    // What is needed now is there; the next comes when something that nobody needs can go.
    drop(shards.local(4).unwrap());
    drop(shards.local(2).unwrap());
    until(&shards, |statistics| statistics.fetched_shards == 4);
    assert_eq!(firsts(&kit), [4, 2, 0, 5]);
    for shard in [4, 0, 5] {
        drop(shards.local(shard).unwrap());
    }
    assert_eq!(shards.statistics().hits, 5);
    assert_eq!(shards.statistics().misses, 0);
}

#[test]
fn a_new_plan_takes_the_place_of_the_old() {
    let kit = Kit::new(4, 1);
    let shards = kit.open();

    shards.will_need([0, 1]);
    until(&shards, |statistics| statistics.fetched_shards == 1);
    shards.will_need([3, 99]);
    until(&shards, |statistics| statistics.fetched_shards == 2);

    assert_eq!([0, 1, 2, 3].map(|shard| kit.fetches(shard)), [1, 0, 0, 1]);
}

#[test]
fn the_next_run_finds_what_this_one_left() {
    let kit = Kit::new(2, 2);
    drop(kit.open().local(0).unwrap());
    kit.proxy.forget_log();

    let shards = kit.open();

    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
    assert_eq!(kit.fetches(0), 0);
    assert_eq!(shards.statistics().hits, 1);
}

#[test]
fn an_object_that_changed_between_runs_is_fetched_anew() {
    let kit = Kit::new(2, 2);
    drop(kit.open().local(0).unwrap());

    kit.server.bucket.put(&key(0), contents(77));

    assert_eq!(fs::read(kit.open().local(0).unwrap()).unwrap(), contents(77));
}

#[test]
fn a_copy_that_was_damaged_is_found_out_and_fetched_anew() {
    let kit = Kit::new(2, 2);
    let copy = kit.open().local(0).unwrap().to_owned();
    damage(&copy);
    assert_ne!(fs::read(&copy).unwrap(), contents(0));

    let shards = kit.open();

    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
    assert_eq!(shards.statistics().damaged, 1);
    assert_eq!(kit.fetches(0), 2);
}

#[test]
fn a_damaged_copy_is_found_out_ahead_of_its_need() {
    let kit = Kit::new(1, 1);
    let copy = kit.open().local(0).unwrap().to_owned();
    damage(&copy);
    let shards = kit.open();

    shards.will_need([0]);
    until(&shards, |statistics| statistics.fetched_shards == 1);

    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
    assert_eq!((shards.statistics().damaged, shards.statistics().hits), (1, 1));
}

#[test]
fn two_sets_that_fetch_ahead_share_the_work() {
    let kit = Kit::new(4, 4);
    kit.proxy.harm(|_| crate::proxy::Harm::Trickle(4000));
    let sets = [kit.open(), kit.open()];
    let fetched = || sets.each_ref().map(|shards| shards.statistics().fetched_shards);

    sets.iter().for_each(|shards| shards.will_need(0..4));
    until(&sets[0], |_| fetched().iter().sum::<u64>() == 4);

    assert!(fetched().iter().all(|&shards| shards > 0), "{:?}", fetched());
    assert_eq!([0, 1, 2, 3].map(|shard| kit.fetches(shard)), [1; 4]);
}

#[test]
fn a_copy_that_was_touched_but_is_whole_is_kept() {
    let kit = Kit::new(1, 1);
    let copy = kit.open().local(0).unwrap().to_owned();
    damage(&copy);
    fs::write(&copy, contents(0)).unwrap();

    let shards = kit.open();

    for hits in 0..2 {
        drop(shards.local(0).unwrap());
        assert_eq!(shards.statistics().hits, hits);
    }
    assert_eq!(kit.fetches(0), 1);
}

#[test]
fn a_copy_cut_short_or_without_its_digest_is_fetched_anew() {
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
fn a_lower_bound_holds_from_the_start() {
    let mut kit = Kit::new(3, 3);
    let shards = kit.open();
    (0..3).for_each(|shard| drop(shards.local(shard).unwrap()));
    fs::write(kit.cache.path().join("notes.txt"), "not ours").unwrap();

    kit.options.cache_bytes = SHARD as u64;
    let shards = kit.open();

    assert_eq!(kit.cached_bytes(), SHARD as u64);
    drop(shards.local(2).unwrap());
    assert_eq!(shards.statistics().hits, 1);
    assert!(kit.cache.path().join("notes.txt").exists());
}
