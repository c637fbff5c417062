//! Threads that encode images, a limited number in advance, and deliver the results in order.

use std::{
    collections::BTreeMap,
    num::NonZeroUsize,
    sync::{Mutex, PoisonError, mpsc},
    thread,
};

use super::{
    BadImage, Error, Item,
    encoding::{Encoding, ImageEncoder, StoredImage},
};

/// Maximum number of images per thread that are in progress or wait for an earlier one. It is large enough that other
/// threads do not have to wait for a large image.
const AHEAD_PER_THREAD: usize = 4;

/// Result of encoding one image.
pub(super) struct Prepared {
    pub(super) outcome: Result<StoredImage, BadImage>,
    /// Size of the image file, in bytes.
    pub(super) source_bytes: u64,
}

/// Encodes the items at these positions of the source and calls `take` for each, in order.
///
/// # Errors
/// The first error of `take`; or threads or libjpeg-turbo cannot be started.
pub(super) fn prepare_all(
    items: &[Item],
    positions: &[usize],
    encoding: Encoding,
    threads: NonZeroUsize,
    mut take: impl FnMut(&Item, Prepared) -> Result<(), Error>,
) -> Result<(), Error> {
    let threads = threads.get().min(positions.len());
    let window = (threads * AHEAD_PER_THREAD).min(positions.len());
    thread::scope(|scope| {
        // This closure owns its ends of the channels: when it returns, also with an error, the channels close and the
        // threads end.
        let (jobs, queue) = mpsc::channel();
        let queue = std::sync::Arc::new(Mutex::new(queue));
        let (results, prepared) = mpsc::channel();
        for number in 0..threads {
            let (queue, results) = (queue.clone(), results.clone());
            let next_job = move || queue.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
            thread::Builder::new()
                .name(format!("write-{number}"))
                .spawn_scoped(scope, move || work(items, encoding, next_job, &results))
                .map_err(Error::Thread)?;
        }
        drop((queue, results));

        let mut submitted = 0;
        let mut early = BTreeMap::new();
        for (taken, position) in positions.iter().enumerate() {
            while submitted < positions.len() && submitted < taken + window {
                jobs.send(positions[submitted]).map_err(|_| Error::Ended)?;
                submitted += 1;
            }
            let prepared = loop {
                if let Some(prepared) = early.remove(position) {
                    break prepared;
                }
                let (position, done) = prepared.recv().map_err(|_| Error::Ended)??;
                early.insert(position, done);
            };
            take(&items[*position], prepared)?;
        }
        Ok(())
    })
}

/// Main function of a thread: encodes images until there are no more positions or the results are no longer received.
fn work(
    items: &[Item],
    encoding: Encoding,
    next_job: impl Fn() -> Option<usize>,
    results: &mpsc::Sender<Result<(usize, Prepared), Error>>,
) {
    let mut encoder = ImageEncoder::new(encoding);
    let mut source = Vec::new();
    while let Some(position) = next_job() {
        let read = items[position].read(&mut source);
        let outcome = match read {
            Ok(()) => encoder.prepare(&source, position as u64),
            Err(error) => Ok(Err(BadImage::Read(error.to_string()))),
        };
        let done = outcome
            .map(|outcome| (position, Prepared { outcome, source_bytes: source.len() as u64 }));
        if results.send(done).is_err() {
            return;
        }
    }
}
