//! The thread that fetches shards before they are needed.

use std::{
    collections::HashSet,
    io,
    sync::Arc,
    thread::{Builder, JoinHandle},
    time::Duration,
};

use super::{
    Error,
    bucket::{Bucket, Obtained},
    evict::Need,
};

/// Other processes evict and release without a word to this one, so look that often.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

pub(super) fn spawn(bucket: Arc<Bucket>) -> io::Result<JoinHandle<()>> {
    Builder::new().name("shards-ahead".to_owned()).spawn(move || run(&bucket))
}

/// One shard after the other, each in many parts: the first that is needed has the whole network.
fn run(bucket: &Bucket) {
    let mut failed = HashSet::new();
    let mut edition = 0;
    while !bucket.signal.is_over() {
        let seen = bucket.signal.changes();
        let (current, window) = bucket.window();
        if current != edition {
            (edition, failed) = (current, HashSet::new());
        }
        for (position, shard) in window {
            if bucket.edition() != edition || bucket.signal.is_over() {
                break;
            }
            if failed.contains(&shard) || bucket.is_there(shard) {
                continue;
            }
            match bucket.obtain(shard, Need::At(position)) {
                // Released at once: nobody needs it yet.
                Ok(Obtained::Held(_)) => {}
                // No room, until something is released.
                Ok(Obtained::NoRoom { .. }) => break,
                Err(Error::Cancelled { .. }) => return,
                // Whoever asks for it tries again and gets the reason.
                Err(_) => {
                    bucket.counters.failed_ahead.add(1);
                    failed.insert(shard);
                }
            }
        }
        if bucket.edition() == edition {
            bucket.signal.wait_beyond(seen, LOOK_AGAIN);
        }
    }
}
