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

/// What the thread knows of its present plan.
#[derive(Default)]
struct Known {
    edition: u64,
    /// Found whole, or brought.
    whole: HashSet<usize>,
    failed: HashSet<usize>,
}

/// One shard after the other, and after each a new look at what is needed next.
fn run(bucket: &Bucket) {
    let mut known = Known::default();
    while !bucket.signal.is_over() {
        let seen = bucket.signal.changes();
        if !fetch_next(bucket, &mut known) {
            bucket.signal.wait_beyond(seen, LOOK_AGAIN);
        }
    }
}

/// Brings the first shard of the window that is not there, and says whether there was one.
///
/// Those at which other ranks are at work are left to them: their plans are much the same, so a
/// node fetches as many shards at once as it has ranks. One alone could not: digesting takes a core.
fn fetch_next(bucket: &Bucket, known: &mut Known) -> bool {
    let (edition, window) = bucket.window();
    if edition != known.edition {
        *known = Known { edition, ..Known::default() };
    }
    for (position, shard) in window {
        let is_known = known.whole.contains(&shard) && bucket.is_there(shard);
        if is_known || known.failed.contains(&shard) {
            continue;
        }
        match bucket.obtain(shard, Need::At(position)) {
            // Released at once: nobody needs it yet.
            Ok(Obtained::Held(_)) => {
                known.whole.insert(shard);
                return true;
            }
            Ok(Obtained::Busy) => {}
            // Until something is released.
            Ok(Obtained::NoRoom { .. }) | Err(Error::Cancelled { .. }) => return false,
            // Whoever asks for it tries again and gets the reason.
            Err(_) => {
                bucket.counters.failed_ahead.add(1);
                known.failed.insert(shard);
                return true;
            }
        }
    }
    false
}
