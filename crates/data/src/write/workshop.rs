//! Threads that prepare images, a bounded number ahead, and hand them over in order.

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
    picture::{Encoding, Picture, Studio},
};

/// Images under way or waiting for an earlier one, per thread. Enough that a large image does not
/// make the other threads wait.
const AHEAD_PER_THREAD: usize = 4;

/// What became of one image.
pub(super) struct Prepared {
    pub(super) outcome: Result<Picture, BadImage>,
    /// Length of its file.
    pub(super) source_bytes: u64,
}

/// Prepares all items and calls `take` for each, in order. `first` is the position of the first
/// item in the source.
///
/// # Errors
/// The first error of `take`; or threads or libjpeg-turbo do not start.
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
        // Both ends live in here: when this closure returns, however it does, the threads find
        // their queues closed and end.
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

        let mut begun = 0;
        let mut early = BTreeMap::new();
        for (position, item) in items.iter().enumerate() {
            while begun < items.len() && begun < position + window {
                jobs.send(begun).map_err(|_| Error::Ended)?;
                begun += 1;
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

/// One thread: takes positions until there are no more, or nobody wants the results.
fn work(
    items: &[Item],
    first: u64,
    encoding: Encoding,
    next_job: impl Fn() -> Option<usize>,
    results: &mpsc::Sender<Result<(usize, Prepared), Error>>,
) {
    let mut studio = None;
    let mut source = Vec::new();
    while let Some(position) = next_job() {
        let mut attempt = || {
            let studio = match &mut studio {
                Some(studio) => studio,
                none => none.insert(Studio::new(encoding)?),
            };
            let outcome = read(&items[position].path, &mut source)
                .and_then(|()| studio.prepare(&source, first + position as u64));
            Ok((position, Prepared { outcome, source_bytes: source.len() as u64 }))
        };
        // Decoders of rare formats meet files here that nobody tested them with.
        let done = catch_unwind(AssertUnwindSafe(&mut attempt)).unwrap_or_else(|_| {
            studio = None;
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
