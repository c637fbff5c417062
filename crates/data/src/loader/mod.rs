//! Batches decoded ahead of training by a few threads, delivered in the order asked for.
//!
//! All threads share one queue of open batches under one lock. A thread claims the next sample,
//! decodes it without the lock into a buffer of its own, and copies the finished pixels into the
//! batch under the lock: the copy is about a hundredth of the work, and in return no two threads
//! ever write to one buffer. Which thread decodes a sample has no influence on its pixels.

mod queue;
mod request;

use std::{
    iter::FusedIterator,
    panic::catch_unwind,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use self::queue::{Claim, Queue, Taken};
pub use self::request::{Request, View};
use crate::{Batch, Dataset, Decoder, Error};

/// An iterator over finished batches, strictly in the order of the requests.
///
/// The first batch with a sample that cannot be decoded is an error, and the last item. Dropping
/// the loader stops its threads after the sample each is working on.
pub struct Loader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    waited: Duration,
}

impl Loader {
    /// Starts `threads` decoding threads (at least one). At most `prefetch` batches (at least one)
    /// are begun or finished at any time, besides those handed out.
    ///
    /// `requests` may be endless. It is asked for a request only when there is room for its batch,
    /// by the decoding threads and under the loader's lock, so it must not block.
    #[must_use]
    pub fn start(
        dataset: Arc<Dataset>,
        threads: usize,
        prefetch: usize,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Self {
        let queue = Queue::new(Box::new(requests), prefetch.max(1));
        let shared = Arc::new(Shared {
            dataset,
            queue: Mutex::new(queue),
            work: Condvar::new(),
            news: Condvar::new(),
        });
        let mut loader = Self { shared, threads: Vec::new(), waited: Duration::ZERO };
        for number in 0..threads.max(1) {
            let shared = loader.shared.clone();
            let thread = thread::Builder::new().name(format!("decode-{number}"));
            match thread.spawn(move || run(&shared)) {
                Ok(thread) => loader.threads.push(thread),
                Err(error) => loader.shared.fail(Error::Thread(error)),
            }
        }
        loader
    }

    /// Gives a used batch's memory back for a later one.
    pub fn recycle(&mut self, batch: Batch) {
        self.shared.lock().recycle(batch);
    }

    /// Time that `next` has spent waiting for a batch so far.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let called = Instant::now();
        let mut queue = self.shared.lock();
        let item = loop {
            match queue.take() {
                Taken::Item(item) => break Some(item),
                Taken::End => break None,
                Taken::NotYet => queue = wait(&self.shared.news, queue),
            }
        };
        drop(queue);
        // There is room for another batch.
        self.shared.work.notify_all();
        self.waited += called.elapsed();
        item
    }
}

impl FusedIterator for Loader {}

impl Drop for Loader {
    fn drop(&mut self) {
        self.shared.lock().stop();
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
    queue: Mutex<Queue>,
    /// Threads wait here for a sample to decode.
    work: Condvar,
    /// The consumer waits here for its next batch.
    news: Condvar,
}

impl Shared {
    /// A panic under the lock ends the loader by way of [`Shared::fail`] rather than by poison.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: Error) {
        self.lock().fail(error);
        self.news.notify_one();
    }
}

fn wait<'a>(condvar: &Condvar, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
    condvar.wait(queue).unwrap_or_else(PoisonError::into_inner)
}

/// The life of a decoding thread. A panic must not leave the consumer waiting for a batch that
/// nobody will finish.
fn run(shared: &Shared) {
    match catch_unwind(|| decode_claims(shared)) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => shared.fail(error),
        Err(_panic) => shared.fail(Error::Panicked),
    }
}

fn decode_claims(shared: &Shared) -> Result<(), Error> {
    let mut decoder = Decoder::new()?;
    let mut pixels = Vec::new();
    let mut queue = shared.lock();
    while !queue.is_stopped() {
        let claim = queue.claim();
        if let Some(claim) = &claim {
            drop(queue);
            let label = decode(&shared.dataset, &mut decoder, claim, &mut pixels);
            queue = shared.lock();
            queue.finish(claim, label, &pixels);
        }
        if queue.has_news() {
            shared.news.notify_one();
        }
        if claim.is_none() && !queue.is_stopped() {
            queue = wait(&shared.work, queue);
        }
    }
    Ok(())
}

/// Decodes one sample into `pixels` and returns its label.
fn decode(
    dataset: &Dataset,
    decoder: &mut Decoder,
    claim: &Claim,
    pixels: &mut Vec<u8>,
) -> Result<i64, Error> {
    let &Claim { sample, epoch, ref view, .. } = claim;
    let image = dataset.image(sample)?;
    let (crop, flip) = view.frame(epoch, sample, image.width, image.height);
    let side = view.resolution() as usize;
    pixels.resize(side * side * 3, 0);
    decoder
        .render(&image, crop, flip, view.resolution(), pixels)
        .map_err(|fault| dataset.sample_error(sample, fault))?;
    dataset.label(sample)
}
