//! Batches decoded ahead of training by a few threads, delivered in the order asked for.
//!
//! All threads share one queue of open batches under one lock. A thread claims the next sample and
//! with it the place in the batch where its pixels go, makes it without the lock, and gives both
//! back: no two threads ever write to one place. Which thread makes a sample has no influence on its
//! pixels.

mod affinity;
mod queue;
mod request;
mod work;

use std::{
    iter::FusedIterator,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

pub use self::{
    affinity::CpuShare,
    request::{Request, View},
};
use self::{
    queue::{Made, Queue, Taken},
    work::Worker,
};
use crate::{Batch, Dataset, Error};

/// How a loader works.
#[derive(Clone, Debug)]
pub struct Options {
    /// Decoding threads, at least one.
    pub threads: usize,
    /// Most batches, at least one, begun or finished at any time besides those handed out.
    pub prefetch: usize,
    /// The cores that the threads keep to; empty is any.
    pub cpus: CpuShare,
}

impl Options {
    /// Threads that run anywhere.
    #[must_use]
    pub fn new(threads: usize, prefetch: usize) -> Self {
        Self { threads, prefetch, cpus: CpuShare::default() }
    }
}

/// What a loader has done so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Time that the consumer spent waiting for batches.
    pub waited: Duration,
    /// Finished batches that wait for the consumer, now.
    pub ready: usize,
    /// Most batches that may be begun or finished.
    pub room: usize,
    /// Time that the threads spent making samples, all together.
    pub busy: Duration,
    /// Samples left out or replaced because they cannot be used.
    pub skipped: u64,
    /// What is wrong with the last of them.
    pub last_skipped: Option<String>,
}

/// An iterator over finished batches, strictly in the order of the requests.
///
/// The first batch with a sample that cannot be decoded is an error, and the last item. Dropping
/// the loader stops its threads after the sample each is working on.
pub struct Loader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    room: usize,
    waited: Duration,
}

impl Loader {
    /// Starts decoding threads.
    ///
    /// `requests` may be endless. It is asked for a request only when there is room for its batch,
    /// by the decoding threads and under the loader's lock, so it must not block.
    #[must_use]
    pub fn start(
        dataset: Arc<Dataset>,
        options: &Options,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Self {
        let room = options.prefetch.max(1);
        let input_type = dataset.input_type().clone();
        let queue = Queue::new(Box::new(requests), room, input_type, dataset.labels());
        let shared = Arc::new(Shared {
            dataset,
            state: Mutex::new(State { queue, stats: Stats::default() }),
            work: Condvar::new(),
            news: Condvar::new(),
        });
        let mut loader = Self { shared, threads: Vec::new(), room, waited: Duration::ZERO };
        for number in 0..options.threads.max(1) {
            let (shared, cpus) = (loader.shared.clone(), options.cpus.clone());
            let thread = thread::Builder::new().name(format!("decode-{number}"));
            let started = thread.spawn(move || {
                cpus.keep_to();
                run(&shared);
            });
            match started {
                Ok(thread) => loader.threads.push(thread),
                Err(error) => loader.shared.fail(Error::Thread(error)),
            }
        }
        loader
    }

    /// The next batch, if it is finished; never waits.
    pub fn next_if_ready(&mut self) -> Option<Result<Batch, Error>> {
        let Taken::Item(item) = self.shared.lock().queue.take() else { return None };
        // There is room for another batch.
        self.shared.work.notify_all();
        Some(item)
    }

    /// Gives a used batch's memory back for a later one.
    pub fn recycle(&mut self, batch: Batch) {
        self.shared.lock().queue.recycle(batch);
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let state = self.shared.lock();
        let ready = state.queue.ready();
        Stats { waited: self.waited, ready, room: self.room, ..state.stats.clone() }
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let called = Instant::now();
        let mut state = self.shared.lock();
        let item = loop {
            match state.queue.take() {
                Taken::Item(item) => break Some(item),
                Taken::End => break None,
                Taken::NotYet => state = wait(&self.shared.news, state),
            }
        };
        drop(state);
        // There is room for another batch.
        self.shared.work.notify_all();
        self.waited += called.elapsed();
        item
    }
}

impl FusedIterator for Loader {}

impl Drop for Loader {
    fn drop(&mut self) {
        self.shared.lock().queue.stop();
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // Never an error: `run` catches panics.
            let _ = thread.join();
        }
    }
}

/// What the threads and the consumer share.
struct Shared {
    dataset: Arc<Dataset>,
    state: Mutex<State>,
    /// Threads wait here for a sample to make.
    work: Condvar,
    /// The consumer waits here for its next batch.
    news: Condvar,
}

struct State {
    queue: Queue,
    stats: Stats,
}

impl State {
    fn count(&mut self, made: &mut Made<'_>) {
        self.stats.busy += made.busy;
        self.stats.skipped += made.skipped;
        if let Some(reason) = made.reason.take() {
            self.stats.last_skipped = Some(reason.to_string());
        }
    }
}

impl Shared {
    /// A panic under the lock ends the loader by way of [`Shared::fail`] rather than by poison.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: Error) {
        self.lock().queue.fail(error);
        self.news.notify_one();
    }
}

fn wait<'a>(condvar: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    condvar.wait(state).unwrap_or_else(PoisonError::into_inner)
}

/// The life of a decoding thread. A panic must not leave the consumer waiting for a batch that
/// nobody will finish.
fn run(shared: &Shared) {
    // Nothing that a panic may have left half done is looked at again: the loader ends.
    match catch_unwind(AssertUnwindSafe(|| make_claims(shared))) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => shared.fail(error),
        Err(_panic) => shared.fail(Error::Panicked),
    }
}

fn make_claims(shared: &Shared) -> Result<(), Error> {
    let mut worker = Worker::new(&shared.dataset)?;
    let mut state = shared.lock();
    while !state.queue.is_stopped() {
        let claim = state.queue.claim();
        let found = claim.is_some();
        if let Some(mut claim) = claim {
            drop(state);
            if let Some(samples) = claim.read_ahead.take() {
                worker.read_ahead(&samples);
            }
            let mut made = worker.make(&mut claim);
            state = shared.lock();
            if let Ok(made) = &mut made {
                state.count(made);
            }
            state.queue.finish(claim, made);
        }
        if state.queue.has_news() {
            shared.news.notify_one();
        }
        if !found && !state.queue.is_stopped() {
            state = wait(&shared.work, state);
        }
    }
    Ok(())
}
