//! The loader: threads decode batches in advance and deliver them in the requested order.
//!
//! All threads share one queue of open batches under one lock. A thread claims the next sample together with the
//! memory for its pixels in the batch, makes the sample without the lock, and returns both. So no two threads write
//! to the same memory. The pixels do not depend on the thread.

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

use tracing::trace_span;

pub use self::{
    affinity::CpuShare,
    request::{Preprocessing, Request},
};
use self::{
    queue::{BatchContents, BatchQueue, NextBatch, SampleResult},
    work::Worker,
};
use crate::{Batch, Dataset, Error};

/// Target of the `tracing` spans that a profile of a step has.
pub const PROFILE_TARGET: &str = "baton::profile";

/// Options of a loader.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of decoding threads, at least one.
    pub threads: usize,
    /// Maximum number of batches, at least one, that are in progress or ready, without those already delivered.
    pub prefetch: usize,
    /// The cores on which the threads run; empty means any.
    pub cpus: CpuShare,
}

impl Options {
    /// Options for threads that may run on any core.
    #[must_use]
    pub fn new(threads: usize, prefetch: usize) -> Self {
        Self { threads, prefetch, cpus: CpuShare::default() }
    }
}

/// Statistics of a loader since its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoaderStats {
    /// Time that the consumer spent waiting for batches.
    pub waited: Duration,
    /// Number of finished batches that are ready now.
    pub ready: usize,
    /// Maximum number of batches in progress or ready.
    pub capacity: usize,
    /// Time that the threads spent making samples, summed over all threads.
    pub busy: Duration,
    /// Number of bad samples that were skipped or replaced.
    pub skipped: u64,
    /// Fault of the last skipped sample.
    pub last_skipped: Option<String>,
}

/// An iterator over finished batches, strictly in the order of the requests.
///
/// The first batch with a sample that cannot be decoded is an error and the last item. When the loader is dropped,
/// each thread stops after its current sample, and the drop waits for that; [`detach`](Self::detach) does not wait.
pub struct Loader {
    shared: Arc<SharedState>,
    threads: Vec<JoinHandle<()>>,
    capacity: usize,
    waited: Duration,
}

impl Loader {
    /// Starts decoding threads.
    ///
    /// `requests` may be infinite. The decoding threads call it when there is capacity for another batch. They hold
    /// the loader's lock, so it must not block.
    #[must_use]
    pub fn start(
        dataset: Arc<Dataset>,
        options: &Options,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Self {
        let capacity = options.prefetch.max(1);
        let contents = BatchContents {
            input_type: dataset.input_type().clone(),
            extra_lens: dataset.extra_lens().to_vec(),
            labels: dataset.labels(),
        };
        let queue = BatchQueue::new(Box::new(requests), capacity, contents);
        let shared = Arc::new(SharedState {
            dataset,
            state: Mutex::new(LoaderState { queue, stats: LoaderStats::default() }),
            work: Condvar::new(),
            batch_ready: Condvar::new(),
        });
        let mut loader = Self { shared, threads: Vec::new(), capacity, waited: Duration::ZERO };
        for number in 0..options.threads.max(1) {
            let (shared, cpus) = (loader.shared.clone(), options.cpus.clone());
            let thread = thread::Builder::new().name(format!("decode-{number}"));
            let started = thread.spawn(move || {
                cpus.pin_thread();
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
        let NextBatch::Item(item) = self.shared.lock().queue.take() else { return None };
        // There is capacity for another batch.
        self.shared.work.notify_all();
        Some(item)
    }

    /// Waits until [`next`](Iterator::next) returns at once, for `timeout` at most; returns whether it does.
    pub fn wait_until_ready(&mut self, timeout: Duration) -> bool {
        let called = Instant::now();
        let state = self.shared.lock();
        let waited = self
            .shared
            .batch_ready
            .wait_timeout_while(state, timeout, |state| !state.queue.is_ready());
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let is_ready = state.queue.is_ready();
        drop(state);
        self.waited += called.elapsed();
        is_ready
    }

    /// Ends the loader without waiting for its threads, one of which may wait for a disk that does not answer.
    pub fn detach(mut self) {
        self.threads.clear();
    }

    /// Returns the memory of a used batch, for reuse.
    pub fn recycle(&mut self, batch: Batch) {
        self.shared.lock().queue.recycle(batch);
    }

    /// Statistics since the start.
    #[must_use]
    pub fn stats(&self) -> LoaderStats {
        let state = self.shared.lock();
        let ready = state.queue.ready();
        LoaderStats { waited: self.waited, ready, capacity: self.capacity, ..state.stats.clone() }
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let called = Instant::now();
        let mut state = self.shared.lock();
        let item = loop {
            match state.queue.take() {
                NextBatch::Item(item) => break Some(item),
                NextBatch::End => break None,
                NextBatch::Pending => state = wait(&self.shared.batch_ready, state),
            }
        };
        drop(state);
        // There is capacity for another batch.
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

/// State shared by the threads and the consumer.
struct SharedState {
    dataset: Arc<Dataset>,
    state: Mutex<LoaderState>,
    /// Notifies threads that a sample can be claimed.
    work: Condvar,
    /// Notifies the consumer that the next batch is ready.
    batch_ready: Condvar,
}

struct LoaderState {
    queue: BatchQueue,
    stats: LoaderStats,
}

impl LoaderState {
    fn count(&mut self, result: &mut SampleResult<'_>) {
        self.stats.busy += result.busy;
        self.stats.skipped += result.skipped;
        if let Some(last_fault) = result.last_fault.take() {
            self.stats.last_skipped = Some(last_fault.to_string());
        }
    }
}

impl SharedState {
    /// Ignores poisoning: a panic under the lock ends the loader with [`SharedState::fail`].
    fn lock(&self) -> MutexGuard<'_, LoaderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: Error) {
        self.lock().queue.fail(error);
        self.batch_ready.notify_one();
    }
}

fn wait<'a>(condvar: &Condvar, state: MutexGuard<'a, LoaderState>) -> MutexGuard<'a, LoaderState> {
    condvar.wait(state).unwrap_or_else(PoisonError::into_inner)
}

/// Main function of a decoding thread. After a panic the consumer must not wait forever for an unfinished batch.
fn run(shared: &SharedState) {
    // Unwind-safe: after a panic the loader ends and does not use the interrupted batch.
    match catch_unwind(AssertUnwindSafe(|| make_claims(shared))) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => shared.fail(error),
        Err(_panic) => shared.fail(Error::Panicked),
    }
}

fn make_claims(shared: &SharedState) -> Result<(), Error> {
    let mut worker = Worker::new(&shared.dataset)?;
    let mut state = shared.lock();
    while !state.queue.is_stopped() {
        let claim = state.queue.claim();
        let found = claim.is_some();
        if let Some(mut claim) = claim {
            drop(state);
            if let Some(samples) = claim.read_ahead.take() {
                let _span = trace_span!(target: PROFILE_TARGET, "read ahead").entered();
                worker.read_ahead(&samples);
            }
            let mut result = worker.make(&mut claim);
            state = shared.lock();
            if let Ok(result) = &mut result {
                state.count(result);
            }
            state.queue.finish(claim, result);
        }
        if state.queue.is_consumer_ready() {
            shared.batch_ready.notify_one();
        }
        if !found && !state.queue.is_stopped() {
            state = wait(&shared.work, state);
        }
    }
    Ok(())
}
