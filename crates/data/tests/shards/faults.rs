//! Faults of stores and networks.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use baton_data::{
    Error,
    shards::{Remedy, RequestFault},
};

use crate::{
    kit::{Kit, PART, SHARD, contents, key},
    proxy::{Fault, Request},
};

/// Whether the request is for the start of part number `part` of a shard.
fn starts_part(request: &Request, part: u64) -> bool {
    request.range.is_some_and(|(first, _)| first == part * PART)
}

/// Whether the request is for the end of a shard.
fn ends_shard(request: &Request) -> bool {
    request.range.is_some_and(|(_, last)| last == SHARD as u64 - 1)
}

/// Injects the fault into the first selected request only.
fn once(
    fault: Fault,
    is_selected: impl Fn(&Request) -> bool + Send + 'static,
) -> impl FnMut(&Request) -> Fault + Send + 'static {
    let mut is_done = false;
    move |request| {
        if is_done || !is_selected(request) {
            return Fault::None;
        }
        is_done = true;
        fault
    }
}

#[test]
fn transient_faults_are_survived() {
    for fault in [Fault::Status(503), Fault::Status(500), Fault::CutAfter(1000), Fault::CutAfter(0)]
    {
        let kit = Kit::new(1, 1);
        kit.proxy.inject(once(fault, |request| starts_part(request, 1)));
        let shards = kit.open();

        assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0), "{fault:?}");
        // Four parts, and one more request for the missing bytes of one part.
        let ranges = kit.ranges(0);
        assert_eq!(ranges.len(), 5, "{fault:?}");
        // Bytes received before the cut are not requested again.
        let received = if fault == Fault::CutAfter(1000) { 1000 } else { 0 };
        assert!(ranges.contains(&(PART + received, 2 * PART - 1)), "{fault:?}, {ranges:?}");
    }
}

#[test]
fn listing_and_headers_survive_too() {
    let kit = Kit::new(2, 1);
    let mut count = 0;
    kit.proxy.inject(move |_| {
        count += 1;
        if count % 2 == 1 { Fault::Status(503) } else { Fault::None }
    });

    assert_eq!(kit.open().samples().unwrap(), [1000, 1001]);
}

#[test]
fn a_stalled_connection_is_replaced() {
    let mut kit = Kit::new(1, 1);
    kit.options.retry.stall_timeout = Duration::from_millis(300);
    kit.proxy.inject(once(Fault::StallAfter(70), |request| starts_part(request, 2)));
    let shards = kit.open();

    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
    assert!(kit.ranges(0).len() > 4);
}

#[test]
fn a_slow_connection_is_replaced_but_the_download_continues() {
    let mut kit = Kit::new(1, 1);
    kit.options.retry.request_timeout = Duration::from_millis(300);
    // The last part has 3392 bytes, of which every connection transfers about 600 before the timeout.
    kit.proxy.inject(|request| match ends_shard(request) {
        true => Fault::Trickle(20),
        false => Fault::None,
    });
    let shards = kit.open();

    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
    assert!(kit.ranges(0).len() >= 4 + kit.options.retry.max_attempts as usize);
}

#[test]
fn a_byte_changed_in_transfer_is_detected() {
    for is_in_parts in [false, true] {
        let kit = Kit::new(1, 1);
        if is_in_parts {
            kit.server.bucket.put_in_parts(&key(0), contents(0), PART as usize);
        }
        kit.proxy.inject(once(Fault::Corrupt(5), |request| starts_part(request, 3)));
        let shards = kit.open();

        assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
        assert_eq!(kit.fetches(0), 2);
    }
}

#[test]
fn bytes_that_change_every_time_are_an_error() {
    let kit = Kit::new(1, 1);
    let mut byte = 0;
    kit.proxy.inject(move |request| {
        byte += 1;
        if starts_part(request, 0) { Fault::Corrupt(byte) } else { Fault::None }
    });

    let error = kit.open().local(0).unwrap_err();

    assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
    assert_eq!(kit.cached_bytes(), 0);
}

#[test]
fn a_tag_that_is_not_a_digest_costs_only_one_more_download() {
    let kit = Kit::new(2, 2);
    for shard in 0..2 {
        // Like S3 with KMS encryption.
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
        bucket.ignores_conditions(ignores_conditions);
        kit.proxy.inject(move |request| {
            if starts_part(request, 1) {
                bucket.put(&key(0), contents(5));
            }
            Fault::None
        });

        let error = kit.open().local(0).unwrap_err();

        let Error::Store { fault, remedy: Remedy::Restart, attempts: 1, .. } = &error else {
            panic!("{error:?}");
        };
        assert!(matches!(**fault, RequestFault::Changed), "{error:?}");
        assert_eq!(kit.cached_bytes(), 0);
    }
}

#[test]
fn a_permanently_failing_store_gives_one_clear_error() {
    let kit = Kit::new(1, 1);
    let shards = kit.open();
    kit.proxy.inject(|_| Fault::Status(503));

    let message = shards.local(0).unwrap_err().to_string();

    let start = "cannot fetch s3://bucket/set/train-0.beton: the store responded with SlowDown: \
                 Please reduce your request rate. (4 attempts in ";
    assert!(message.starts_with(start), "{message}");
    assert!(message.ends_with("check AWS_ENDPOINT_URL, the network, and the status of the store"));
    assert_eq!(kit.cached_bytes(), 0);

    // Fetching works again when the store does.
    kit.proxy.inject(|_| Fault::None);
    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
}

#[test]
fn shards_that_cannot_be_prefetched_are_skipped() {
    let kit = Kit::new(3, 3);
    let is_broken = Arc::new(AtomicBool::new(true));
    let broken = Arc::clone(&is_broken);
    kit.proxy.inject(move |request| {
        match request.gets(&key(0)) && broken.load(Ordering::Relaxed) {
            true => Fault::Status(503),
            false => Fault::None,
        }
    });
    let shards = kit.open();

    shards.plan_prefetch([0, 1, 2]);
    kit.until_cached(&[1, 2]);

    is_broken.store(false, Ordering::Relaxed);
    assert_eq!(fs::read(shards.local(0).unwrap()).unwrap(), contents(0));
}

#[test]
fn parts_in_flight_are_limited() {
    let kit = Kit::new(3, 3);
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let shards = kit.open();
    kit.proxy.inject(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Fault::StallAfter(0)
    });
    shards.plan_prefetch([0]);
    kit.proxy.wait_for(|log| log.iter().filter(|request| request.gets(&key(0))).count() == 4);

    // All of them stall, so there are no more requests until the timeout.
    drop(shards);
    assert_eq!(asked.load(Ordering::Relaxed), 4);
}

#[test]
fn dropping_a_set_cancels_a_stalled_download_immediately() {
    let mut kit = Kit::new(1, 1);
    kit.options.retry.stall_timeout = Duration::from_secs(600);
    kit.options.retry.request_timeout = Duration::from_secs(600);
    let shards = kit.open();
    kit.proxy.inject(|_| Fault::StallAfter(10));
    shards.plan_prefetch([0]);
    kit.proxy.wait_for(|log| log.iter().any(|request| request.gets(&key(0))));

    let dropped = Instant::now();
    drop(shards);

    assert!(dropped.elapsed() < Duration::from_secs(60));
    assert_eq!(kit.cached_bytes(), 0);
}
