//! Batches decoded ahead of training by a few threads, delivered in the order asked for.
//!
//! All threads share one queue of open batches under one lock. A thread claims the next sample,
//! decodes it without the lock into a buffer of its own, and copies the finished pixels into the
//! batch under the lock: the copy is about a hundredth of the work, and in return no two threads
//! ever write to one buffer. Samples are claimed in order, so batches finish nearly in order, and
//! which thread decodes a sample has no influence on its pixels.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use baton_job::spec::Augment;

use crate::{
    Batch, Dataset, Decoder, Error,
    augment::{Flip, center_crop, random_crop, random_flip},
};

/// One batch to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The pass over the data; part of the key of every random draw.
    pub epoch: u32,
    /// Positions in the data set, in the order of the batch.
    pub samples: Vec<u64>,
    /// How images become samples.
    pub view: View,
}

/// How images become samples.
#[derive(Clone, Debug, PartialEq)]
pub enum View {
    /// Random crop and flip, each a function of (seed, epoch, sample).
    Train {
        /// Root of the random draws.
        seed: u64,
        /// Side of the samples in pixels.
        resolution: u32,
        /// What is random.
        augment: Augment,
    },
    /// The centre.
    Evaluate {
        /// Side of the samples in pixels.
        resolution: u32,
        /// Side of the centre crop as a share of the short side.
        crop_ratio: f64,
    },
}

impl View {
    /// Side of the samples in pixels.
    #[must_use]
    pub fn resolution(&self) -> u32 {
        match self {
            Self::Train { resolution, .. } | Self::Evaluate { resolution, .. } => *resolution,
        }
    }
}

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
    /// are open or finished at any time, besides those handed out.
    ///
    /// `requests` may be endless. It is asked for the next request only when there is room for it,
    /// from the decoding threads and under the loader's lock, so it must not block.
    #[must_use]
    pub fn start(
        dataset: Arc<Dataset>,
        threads: usize,
        prefetch: usize,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Self {
        let queue = Queue {
            requests: Some(Box::new(requests)),
            open: VecDeque::new(),
            first: 0,
            room: prefetch.max(1),
            spare: Vec::new(),
            failure: None,
            stopped: false,
        };
        let shared = Arc::new(Shared {
            dataset,
            queue: Mutex::new(queue),
            work: Condvar::new(),
            news: Condvar::new(),
        });
        let mut loader = Self { shared, threads: Vec::new(), waited: Duration::ZERO };
        for number in 0..threads.max(1) {
            let shared = loader.shared.clone();
            let builder = thread::Builder::new().name(format!("decode-{number}"));
            match builder.spawn(move || run(&shared)) {
                Ok(thread) => loader.threads.push(thread),
                Err(error) => loader.shared.fail(Error::Thread(error)),
            }
        }
        loader
    }

    /// Gives a used batch's memory back for a later one.
    pub fn recycle(&mut self, batch: Batch) {
        let mut queue = self.shared.lock();
        if queue.spare.len() < queue.room {
            queue.spare.push(batch);
        }
    }

    /// Time spent waiting in `next` so far.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut queue = self.shared.lock();
        let mut started = None;
        let item = loop {
            match queue.take_first() {
                Taken::Item(item) => break Some(item),
                Taken::End => break None,
                Taken::NotYet => {
                    started.get_or_insert_with(Instant::now);
                    queue = self.shared.news.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        drop(queue);
        self.shared.work.notify_all();
        self.waited += started.map_or(Duration::ZERO, |started| started.elapsed());
        item
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.shared.lock().stop();
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A panic was caught and reported inside the thread.
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
    /// A panic under the lock ends the loader through [`Shared::fail`], not through poison.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the loader with an error that belongs to no batch.
    fn fail(&self, error: Error) {
        let mut queue = self.lock();
        queue.failure.get_or_insert(error);
        queue.requests = None;
        self.news.notify_all();
    }
}

/// The batches between request and delivery, in order.
struct Queue {
    /// `None` once there are no more, or no more are wanted.
    requests: Option<Box<dyn Iterator<Item = Request> + Send>>,
    open: VecDeque<OpenBatch>,
    /// Number of the first open batch, counted from the start of the loader.
    first: u64,
    /// Most batches open at a time.
    room: usize,
    /// Memory of used batches.
    spare: Vec<Batch>,
    failure: Option<Error>,
    stopped: bool,
}

/// A batch in the making.
struct OpenBatch {
    epoch: u32,
    view: View,
    batch: Batch,
    /// Samples claimed so far; they are claimed in order.
    claimed: usize,
    /// Samples claimed or to be claimed, and not finished.
    missing: usize,
    /// The failure at the lowest position. All positions before a failed one have been claimed and
    /// will be finished, so it does not depend on timing.
    failure: Option<(usize, Error)>,
}

/// A sample for a thread to decode.
struct Claim {
    /// Number of its batch.
    number: u64,
    position: usize,
    sample: u64,
    epoch: u32,
    view: View,
}

/// What the consumer finds at the head of the queue.
enum Taken {
    Item(Result<Batch, Error>),
    NotYet,
    End,
}

impl Queue {
    fn take_first(&mut self) -> Taken {
        if let Some(error) = self.failure.take() {
            self.stop();
            return Taken::Item(Err(error));
        }
        match self.open.pop_front_if(|open| open.missing == 0) {
            Some(open) => {
                self.first += 1;
                match open.failure {
                    None => Taken::Item(Ok(open.batch)),
                    Some((_, error)) => {
                        self.stop();
                        Taken::Item(Err(error))
                    }
                }
            }
            None if self.stopped || (self.open.is_empty() && self.requests.is_none()) => Taken::End,
            None => Taken::NotYet,
        }
    }

    /// The next sample to decode; opens a batch for it if there is room.
    fn claim(&mut self) -> Option<Claim> {
        loop {
            let number = self.first + self.open.len() as u64;
            if let Some(open) = self.open.back_mut()
                && let Some(claim) = open.claim(number - 1)
            {
                return Some(claim);
            }
            if self.open.len() == self.room {
                return None;
            }
            let Some(request) = self.requests.as_mut()?.next() else {
                self.requests = None;
                return None;
            };
            self.open.push_back(OpenBatch::new(request, self.spare.pop().unwrap_or_default()));
        }
    }

    /// Puts a decoded sample, or the reason why there is none, into its batch.
    fn finish(&mut self, claim: &Claim, outcome: Result<i64, Error>, pixels: &[u8]) {
        // A batch behind a failed one is gone by now.
        let Some(index) = claim.number.checked_sub(self.first) else { return };
        let Some(open) = self.open.get_mut(index as usize) else { return };
        match outcome {
            Ok(label) => open.fill(claim.position, label, pixels),
            Err(error) => {
                open.fail(claim.position, error);
                self.requests = None;
            }
        }
        open.missing -= 1;
    }

    fn stop(&mut self) {
        self.stopped = true;
        self.requests = None;
        self.first += self.open.len() as u64;
        self.open.clear();
    }
}
