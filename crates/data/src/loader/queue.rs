//! The batches between request and delivery. No threads here: [`super::Loader`] keeps the queue
//! under a lock.

use std::collections::VecDeque;

use super::{Request, View};
use crate::{Batch, Error};

type Requests = Box<dyn Iterator<Item = Request> + Send>;

/// The batches between request and delivery, in order.
pub(super) struct Queue {
    /// `None` once there are no more, or no more are wanted.
    requests: Option<Requests>,
    open: VecDeque<OpenBatch>,
    /// Number of the first open batch, counted from the start of the loader.
    first: u64,
    /// Most batches open at a time.
    room: usize,
    /// Memory of used batches.
    spare: Vec<Batch>,
    /// An error that belongs to no batch.
    failure: Option<Error>,
    stopped: bool,
}

/// A sample for a thread to decode.
pub(super) struct Claim {
    /// Number of its batch.
    number: u64,
    /// Position in the batch.
    position: usize,
    pub(super) sample: u64,
    pub(super) epoch: u32,
    pub(super) view: View,
}

/// What the consumer finds at the head of the queue.
pub(super) enum Taken {
    Item(Result<Batch, Error>),
    NotYet,
    End,
}

impl Queue {
    pub(super) fn new(requests: Requests, room: usize) -> Self {
        Self {
            requests: Some(requests),
            open: VecDeque::new(),
            first: 0,
            room,
            spare: Vec::new(),
            failure: None,
            stopped: false,
        }
    }

    /// The next sample to decode; opens a batch for it if there is room.
    pub(super) fn claim(&mut self) -> Option<Claim> {
        loop {
            let number = self.first + self.open.len() as u64;
            if let Some(last) = self.open.back_mut()
                && let Some(claim) = last.claim(number - 1)
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

    /// Puts a decoded sample, its label and pixels, or the reason why there is none, into its batch.
    pub(super) fn finish(&mut self, claim: &Claim, label: Result<i64, Error>, pixels: &[u8]) {
        // A batch behind a failed one is gone by now.
        let Some(index) = claim.number.checked_sub(self.first) else { return };
        let Some(open) = self.open.get_mut(index as usize) else { return };
        match label {
            Ok(label) => open.fill(claim.position, label, pixels),
            Err(error) => {
                open.fail(claim.position, error);
                self.requests = None;
            }
        }
    }

    /// Whether the consumer, if it waits, can go on.
    pub(super) fn has_news(&self) -> bool {
        match self.open.front() {
            Some(first) => first.missing == 0 || self.failure.is_some(),
            None => self.requests.is_none(),
        }
    }

    /// The first batch if it is finished. After an error nothing follows.
    pub(super) fn take(&mut self) -> Taken {
        if let Some(error) = self.failure.take() {
            self.stop();
            return Taken::Item(Err(error));
        }
        match self.open.front() {
            None if self.requests.is_none() => return Taken::End,
            Some(first) if first.missing == 0 => {}
            _ => return Taken::NotYet,
        }
        let Some(open) = self.open.pop_front() else { return Taken::NotYet };
        self.first += 1;
        match open.failure {
            None => Taken::Item(Ok(open.batch)),
            Some((_, error)) => {
                self.stop();
                Taken::Item(Err(error))
            }
        }
    }

    /// Keeps a used batch's memory.
    pub(super) fn recycle(&mut self, batch: Batch) {
        if self.spare.len() < self.room {
            self.spare.push(batch);
        }
    }

    /// Ends everything with an error that belongs to no batch.
    pub(super) fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
        self.requests = None;
    }

    /// Forgets all batches; samples in the works will find no batch to go to.
    pub(super) fn stop(&mut self) {
        self.stopped = true;
        self.requests = None;
        self.first += self.open.len() as u64;
        self.open.clear();
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped
    }
}

/// A batch in the making.
struct OpenBatch {
    epoch: u32,
    view: View,
    batch: Batch,
    /// Samples claimed so far; they are claimed in order.
    claimed: usize,
    /// Samples not finished yet.
    missing: usize,
    /// The failure at the lowest position. All positions before a failed one have been claimed and
    /// will be finished, so which one it is does not depend on timing.
    failure: Option<(usize, Error)>,
}

impl OpenBatch {
    fn new(request: Request, mut batch: Batch) -> Self {
        let Request { epoch, samples, view } = request;
        let missing = samples.len();
        batch.resolution = view.resolution();
        let pixels = batch.resolution as usize * batch.resolution as usize;
        let image_bytes = missing * pixels * 3;
        if batch.images.capacity() < image_bytes {
            // Zeroed memory straight from the system costs nothing yet, while the lock is held.
            batch.images = vec![0; image_bytes];
        } else {
            batch.images.resize(image_bytes, 0);
        }
        batch.labels.clear();
        batch.labels.resize(missing, 0);
        batch.samples = samples;
        Self { epoch, view, batch, claimed: 0, missing, failure: None }
    }

    fn claim(&mut self, number: u64) -> Option<Claim> {
        let position = self.claimed;
        let sample = *self.batch.samples.get(position)?;
        self.claimed += 1;
        Some(Claim { number, position, sample, epoch: self.epoch, view: self.view.clone() })
    }

    fn fill(&mut self, position: usize, label: i64, pixels: &[u8]) {
        self.batch.images[position * pixels.len()..][..pixels.len()].copy_from_slice(pixels);
        self.batch.labels[position] = label;
        self.missing -= 1;
    }

    fn fail(&mut self, position: usize, error: Error) {
        let unclaimed = self.batch.samples.len() - self.claimed;
        self.claimed += unclaimed;
        self.missing -= unclaimed + 1;
        if self.failure.as_ref().is_none_or(|(lowest, _)| position < *lowest) {
            self.failure = Some((position, error));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(samples: &[u64]) -> Request {
        let view = View::Evaluate { resolution: 1, crop_ratio: 1.0 };
        Request { epoch: 0, samples: samples.to_vec(), view }
    }

    fn queue(room: usize, requests: &[&[u64]]) -> Queue {
        let requests: Vec<_> = requests.iter().map(|samples| request(samples)).collect();
        Queue::new(Box::new(requests.into_iter()), room)
    }

    fn claims(queue: &mut Queue) -> Vec<Claim> {
        std::iter::from_fn(|| queue.claim()).collect()
    }

    fn finish(queue: &mut Queue, claim: &Claim) {
        let sample = claim.sample;
        queue.finish(claim, Ok(sample as i64), &[sample as u8; 3]);
    }

    fn fail(queue: &mut Queue, claim: &Claim) {
        queue.finish(claim, Err(Error::Decoder(format!("sample {}", claim.sample))), &[]);
    }

    fn batch(queue: &mut Queue) -> Batch {
        match queue.take() {
            Taken::Item(Ok(batch)) => batch,
            Taken::Item(Err(error)) => panic!("{error}"),
            Taken::NotYet => panic!("not finished"),
            Taken::End => panic!("no more batches"),
        }
    }

    fn error(queue: &mut Queue) -> String {
        match queue.take() {
            Taken::Item(Err(error)) => error.to_string(),
            _ => panic!("no error"),
        }
    }

    #[test]
    fn batches_come_in_order_whatever_the_order_of_their_samples() {
        let mut queue = queue(2, &[&[4, 9], &[7]]);
        let claims = claims(&mut queue);
        finish(&mut queue, &claims[2]);
        finish(&mut queue, &claims[1]);
        assert!(matches!(queue.take(), Taken::NotYet));
        assert!(!queue.has_news());
        finish(&mut queue, &claims[0]);
        assert!(queue.has_news());

        let first = batch(&mut queue);
        assert_eq!(first.samples, [4, 9]);
        assert_eq!(first.labels, [4, 9]);
        assert_eq!(first.images, [4, 4, 4, 9, 9, 9]);
        assert_eq!(batch(&mut queue).samples, [7]);
    }

    #[test]
    fn no_more_batches_are_open_than_there_is_room_for() {
        let mut queue = queue(2, &[&[0], &[1], &[2]]);
        let first = claims(&mut queue);
        assert_eq!(first.len(), 2);
        finish(&mut queue, &first[0]);
        assert!(queue.claim().is_none(), "a finished batch takes up room, too");
        batch(&mut queue);
        assert_eq!(claims(&mut queue).len(), 1);
    }

    #[test]
    fn the_end_comes_after_the_last_batch() {
        let mut queue = queue(3, &[&[0], &[]]);
        let claims = claims(&mut queue);
        assert!(matches!(queue.take(), Taken::NotYet));
        finish(&mut queue, &claims[0]);
        assert_eq!(batch(&mut queue).len(), 1);
        assert!(batch(&mut queue).is_empty());
        assert!(queue.has_news());
        assert!(matches!(queue.take(), Taken::End));
    }

    #[test]
    fn a_failure_is_the_last_item_and_comes_in_its_place() {
        let mut queue = queue(3, &[&[0], &[1], &[2], &[3]]);
        let claims = claims(&mut queue);
        fail(&mut queue, &claims[1]);
        finish(&mut queue, &claims[2]);
        finish(&mut queue, &claims[0]);
        assert_eq!(batch(&mut queue).samples, [0]);
        assert!(queue.claim().is_none(), "nothing is begun behind a failure");
        assert!(error(&mut queue).contains("sample 1"));
        assert!(matches!(queue.take(), Taken::End));
        assert!(queue.claim().is_none());
    }

    #[test]
    fn the_failure_at_the_lowest_position_is_told_whichever_came_first() {
        for order in [[0, 1], [1, 0]] {
            let mut queue = queue(1, &[&[5, 6, 7, 8]]);
            let claims = [(); 2].map(|()| queue.claim().unwrap());
            fail(&mut queue, &claims[order[0]]);
            assert!(queue.claim().is_none(), "the rest of the batch is not worth decoding");
            assert!(matches!(queue.take(), Taken::NotYet));
            fail(&mut queue, &claims[order[1]]);
            assert!(error(&mut queue).contains("sample 5"));
        }
    }

    #[test]
    fn samples_of_a_forgotten_batch_go_nowhere() {
        let mut queue = queue(2, &[&[0, 1], &[2]]);
        let claims = claims(&mut queue);
        queue.stop();
        finish(&mut queue, &claims[0]);
        fail(&mut queue, &claims[2]);
        assert!(queue.is_stopped());
        assert!(matches!(queue.take(), Taken::End));
    }

    #[test]
    fn an_error_of_no_batch_comes_first() {
        let mut queue = queue(2, &[&[0, 1]]);
        claims(&mut queue);
        queue.fail(Error::Panicked);
        assert!(queue.has_news());
        assert!(matches!(queue.take(), Taken::Item(Err(Error::Panicked))));
        assert!(matches!(queue.take(), Taken::End));
    }

    #[test]
    fn the_memory_of_used_batches_is_used_again() {
        let mut queue = queue(1, &[&[1, 2], &[3], &[4, 5]]);
        let mut memory = Vec::new();
        for _ in 0..3 {
            for claim in claims(&mut queue) {
                finish(&mut queue, &claim);
            }
            let batch = batch(&mut queue);
            assert_eq!(batch.images.len(), 3 * batch.len());
            memory.push(batch.images.as_ptr());
            queue.recycle(batch);
        }
        assert_eq!(memory, [memory[0]; 3]);
    }
}
