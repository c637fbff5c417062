//! Threads that encode images and other values, a limited number in advance, and deliver the results in order.

use std::{
    collections::BTreeMap,
    num::NonZeroUsize,
    sync::{Mutex, PoisonError, mpsc},
    thread,
};

use super::Error;

/// Maximum number of results per thread that are in progress or wait for an earlier one. It is large enough that other
/// threads do not have to wait for a large image.
const AHEAD_PER_THREAD: usize = 4;

/// Does jobs, numbered from 0, with several threads, and calls `take` for each result, in order. Each thread has a state of its
/// own, which `start` makes. One is the calling thread itself: handing over a small result takes longer than making it.
///
/// # Errors
/// The first error of `job` or `take`, or threads cannot be started.
pub(super) fn in_order<S, R: Send>(
    jobs: usize,
    threads: NonZeroUsize,
    start: impl Fn() -> S + Sync,
    job: impl Fn(&mut S, usize) -> Result<R, Error> + Sync,
    mut take: impl FnMut(usize, R) -> Result<(), Error>,
) -> Result<(), Error> {
    let threads = threads.get().min(jobs);
    if threads <= 1 {
        let mut state = start();
        return (0..jobs).try_for_each(|number| take(number, job(&mut state, number)?));
    }
    let window = (threads * AHEAD_PER_THREAD).min(jobs);
    let (start, job) = (&start, &job);
    thread::scope(|scope| {
        // This closure owns its ends of the channels: when it returns, also with an error, the channels close and the
        // threads end.
        let (numbers, queue) = mpsc::channel();
        let queue = std::sync::Arc::new(Mutex::new(queue));
        let (results, done) = mpsc::channel();
        for number in 0..threads {
            let (queue, results) = (queue.clone(), results.clone());
            let next = move || queue.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
            let work = move || {
                let mut state = start();
                while let Some(number) = next() {
                    let result = job(&mut state, number).map(|result| (number, result));
                    if results.send(result).is_err() {
                        return;
                    }
                }
            };
            thread::Builder::new()
                .name(format!("write-{number}"))
                .spawn_scoped(scope, work)
                .map_err(Error::Thread)?;
        }
        drop((queue, results));

        let mut submitted = 0;
        let mut early = BTreeMap::new();
        for number in 0..jobs {
            while submitted < jobs && submitted < number + window {
                numbers.send(submitted).map_err(|_| Error::Ended)?;
                submitted += 1;
            }
            let result = loop {
                if let Some(result) = early.remove(&number) {
                    break result;
                }
                let (number, result) = done.recv().map_err(|_| Error::Ended)??;
                early.insert(number, result);
            };
            take(number, result)?;
        }
        Ok(())
    })
}
