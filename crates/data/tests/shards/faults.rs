//! Stores and networks at their worst.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use baton_data::shards::{Error, Fault, Remedy};

use crate::{
    caching::until,
    kit::{Kit, PART, SHARD, contents, key},
    proxy::{Harm, Request},
};

/// The start of the `part`th part of any shard.
fn starts_part(request: &Request, part: u64) -> bool {
    request.range.is_some_and(|(first, _)| first == part * PART)
}

/// Some of the last part of a shard.
fn ends_shard(request: &Request) -> bool {
    request.range.is_some_and(|(_, last)| last == SHARD as u64 - 1)
}

/// Harms the first request that is meant, and no other.
fn once(
    harm: Harm,
    is_meant: impl Fn(&Request) -> bool + Send + 'static,
) -> impl FnMut(&Request) -> Harm + Send + 'static {
    let mut is_done = false;
    move |request| {
        if is_done || !is_meant(request) {
            return Harm::None;
        }
        is_done = true;
        harm
    }
}

#[test]
fn what_passes_is_survived() {
    for harm in [Harm::Status(503), Harm::Status(500), Harm::CutAfter(1000), Harm::CutAfter(0)] {
        let kit = Kit::new(1, 1);
        kit.proxy.harm(once(harm, |request| starts_part(request, 1)));
        let shards = kit.open();

        assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0), "{harm:?}");
        assert_eq!(shards.statistics().retries, 1, "{harm:?}");
        // What came before the cut is not asked for again.
        assert_eq!(shards.statistics().fetched_bytes, SHARD as u64, "{harm:?}");
    }
}

#[test]
fn listing_and_headers_survive_too() {
    let kit = Kit::new(2, 1);
    let mut count = 0;
    kit.proxy.harm(move |_| {
        count += 1;
        if count % 2 == 1 { Harm::Status(503) } else { Harm::None }
    });

    assert_eq!(kit.open().samples().unwrap(), [1000, 1001]);
}

#[test]
fn a_connection_that_stalls_is_left() {
    let mut kit = Kit::new(1, 1);
    kit.options.patience.stall = Duration::from_millis(300);
    kit.proxy.harm(once(Harm::StallAfter(70), |request| starts_part(request, 2)));
    let shards = kit.open();

    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
    assert!(shards.statistics().retries >= 1);
}

#[test]
fn what_trickles_is_left_but_never_given_up() {
    let mut kit = Kit::new(1, 1);
    kit.options.patience.request = Duration::from_millis(300);
    // Of the last part's 3392 bytes, every connection brings some 600 in time.
    kit.proxy.harm(|request| match ends_shard(request) {
        true => Harm::Trickle(20),
        false => Harm::None,
    });
    let shards = kit.open();

    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
    assert!(shards.statistics().retries >= u64::from(kit.options.patience.attempts));
}

#[test]
fn a_byte_changed_on_the_way_is_noticed() {
    for is_in_parts in [false, true] {
        let kit = Kit::new(1, 1);
        if is_in_parts {
            kit.server.bucket.put_in_parts(&key(0), contents(0), PART as usize);
        }
        kit.proxy.harm(once(Harm::Corrupt(5), |request| starts_part(request, 3)));
        let shards = kit.open();

        assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
        assert_eq!((shards.statistics().damaged, kit.fetches(0)), (1, 2));
    }
}

#[test]
fn bytes_that_change_every_time_are_an_error() {
    let kit = Kit::new(1, 1);
    let mut byte = 0;
    kit.proxy.harm(move |request| {
        byte += 1;
        if starts_part(request, 0) { Harm::Corrupt(byte) } else { Harm::None }
    });

    let error = kit.open().local(0).unwrap_err();

    assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
    assert_eq!(kit.cached_bytes(), 0);
}

#[test]
fn a_tag_that_is_no_digest_costs_one_more_download_and_no_more() {
    let kit = Kit::new(2, 2);
    for shard in 0..2 {
        // As S3 does with KMS encryption.
        kit.server.bucket.put_tagged(&key(shard), contents(shard), &format!("{shard:032x}"));
    }
    let shards = kit.open();

    for shard in 0..2 {
        assert_eq!(fs::read(shards.local(shard.into()).unwrap()).unwrap(), contents(shard));
    }
    assert_eq!((kit.fetches(0), kit.fetches(1)), (2, 1));
}

#[test]
fn an_object_replaced_during_its_download_is_refused() {
    for ignores_conditions in [false, true] {
        let kit = Kit::new(1, 1);
        let bucket = kit.server.bucket.clone();
        bucket.ignores_conditions.store(ignores_conditions, Ordering::Relaxed);
        kit.proxy.harm(move |request| {
            if starts_part(request, 1) {
                bucket.put(&key(0), contents(5));
            }
            Harm::None
        });

        let error = kit.open().local(0).unwrap_err();

        let Error::Store { fault, remedy: Remedy::Restart, attempts: 1, .. } = &error else {
            panic!("{error:?}");
        };
        assert!(matches!(**fault, Fault::Changed), "{error:?}");
        assert_eq!(kit.cached_bytes(), 0);
    }
}

#[test]
fn a_store_that_stays_broken_gives_one_clear_error() {
    let kit = Kit::new(1, 1);
    let shards = kit.open();
    kit.proxy.harm(|_| Harm::Status(503));

    let message = shards.local(0).unwrap_err().to_string();

    let start = "cannot fetch s3://data/set/train-0.beton: the store answers SlowDown: \
                 Please reduce your request rate. (4 attempts in ";
    assert!(message.starts_with(start), "{message}");
    assert!(message.ends_with("check AWS_ENDPOINT_URL, the network, and the store's health"));
    assert_eq!(kit.cached_bytes(), 0);

    // And when it is mended, so is everything.
    kit.proxy.harm(|_| Harm::None);
    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
}

#[test]
fn what_cannot_be_fetched_ahead_is_passed_over() {
    let kit = Kit::new(3, 3);
    let is_broken = Arc::new(AtomicBool::new(true));
    let broken = Arc::clone(&is_broken);
    kit.proxy.harm(move |request| match request.gets(&key(0)) && broken.load(Ordering::Relaxed) {
        true => Harm::Status(503),
        false => Harm::None,
    });
    let shards = kit.open();

    shards.will_need([0, 1, 2]);
    until(&shards, |statistics| statistics.fetched_shards == 2);

    assert_eq!(shards.statistics().failed_ahead, 1);
    is_broken.store(false, Ordering::Relaxed);
    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
}

#[test]
fn parts_in_flight_are_bounded() {
    let kit = Kit::new(3, 3);
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let shards = kit.open();
    kit.proxy.harm(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Harm::StallAfter(0)
    });
    shards.will_need([0]);
    kit.proxy.wait_for(|log| log.iter().filter(|request| request.gets(&key(0))).count() == 4);

    // All of them stall, so that nothing more is asked for until they are given up.
    drop(shards);
    assert_eq!(asked.load(Ordering::Relaxed), 4);
}

#[test]
fn a_set_that_is_dropped_leaves_a_stalled_download_at_once() {
    let mut kit = Kit::new(1, 1);
    kit.options.patience.stall = Duration::from_secs(600);
    kit.options.patience.request = Duration::from_secs(600);
    let shards = kit.open();
    kit.proxy.harm(|_| Harm::StallAfter(10));
    shards.will_need([0]);
    kit.proxy.wait_for(|log| log.iter().any(|request| request.gets(&key(0))));

    let dropped = Instant::now();
    drop(shards);

    assert!(dropped.elapsed() < Duration::from_secs(60));
    assert_eq!(kit.cached_bytes(), 0);
}
