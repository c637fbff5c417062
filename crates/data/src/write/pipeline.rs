//! Threads that encode images, a limited number in advance, and deliver the results in order.

use std::{
    collections::BTreeMap,
    fs::File,
    io::Read,
    num::NonZeroUsize,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
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

/// Encodes all items and calls `take` for each, in order. `first` is the position of the first item in the source.
///
/// # Errors
/// The first error of `take`; or threads or libjpeg-turbo cannot be started.
pub(super) fn prepare_all(
    items: &[Item],
    first: u64,
    encoding: Encoding,
    threads: NonZeroUsize,
    mut take: impl FnMut(&Item, Prepared) -> Result<(), Error>,
) -> Result<(), Error> {
    let threads = threads.get().min(items.len());
    let window = (threads * AHEAD_PER_THREAD).min(items.len());
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
                .spawn_scoped(scope, move || work(items, first, encoding, next_job, &results))
                .map_err(Error::Thread)?;
        }
        drop((queue, results));

        let mut submitted = 0;
        let mut early = BTreeMap::new();
        for (position, item) in items.iter().enumerate() {
            while submitted < items.len() && submitted < position + window {
                jobs.send(submitted).map_err(|_| Error::Ended)?;
                submitted += 1;
            }
            let prepared = loop {
                if let Some(prepared) = early.remove(&position) {
                    break prepared;
                }
                let (position, done) = prepared.recv().map_err(|_| Error::Ended)??;
                early.insert(position, done);
            };
            take(item, prepared)?;
        }
        Ok(())
    })
}

/// Main function of a thread: encodes images until there are no more positions or the results are no longer received.
fn work(
    items: &[Item],
    first: u64,
    encoding: Encoding,
    next_job: impl Fn() -> Option<usize>,
    results: &mpsc::Sender<Result<(usize, Prepared), Error>>,
) {
    let mut encoder = None;
    let mut source = Vec::new();
    while let Some(position) = next_job() {
        let mut attempt = || {
            let encoder = match &mut encoder {
                Some(encoder) => encoder,
                none => none.insert(ImageEncoder::new(encoding)?),
            };
            let outcome = read(&items[position].path, &mut source)
                .and_then(|()| encoder.prepare(&source, first + position as u64));
            Ok((position, Prepared { outcome, source_bytes: source.len() as u64 }))
        };
        // Decoders of rare formats may panic on unusual files.
        let done = catch_unwind(AssertUnwindSafe(&mut attempt)).unwrap_or_else(|_| {
            encoder = None;
            let reason = "its decoder panicked, see the message on stderr".to_owned();
            let outcome = Err(BadImage::Decode(reason));
            Ok((position, Prepared { outcome, source_bytes: source.len() as u64 }))
        });
        if results.send(done).is_err() {
            return;
        }
    }
}

/// Reads a whole file into a buffer that is reused.
fn read(path: &Path, buffer: &mut Vec<u8>) -> Result<(), BadImage> {
    buffer.clear();
    let read = File::open(path).and_then(|mut file| file.read_to_end(buffer));
    read.map(|_| ()).map_err(|error| BadImage::Read(error.to_string()))
}
