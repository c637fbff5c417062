//! The batches between request and delivery. No threads here: [`super::Loader`] keeps the queue
//! under a lock.

use std::{collections::VecDeque, time::Duration};

use bytes::BytesMut;

use super::{Request, View};
use crate::{Batch, Error, InputType, Labels, batch::Inputs};

type Requests = Box<dyn Iterator<Item = Request> + Send>;

/// The batches between request and delivery, in order.
pub(super) struct Queue {
    /// `None` once there are no more, or no more are wanted.
    requests: Option<Requests>,
    input_type: InputType,
    labels: Labels,
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

/// A sample for a thread to make, and the place where it goes: nobody else writes there.
pub(super) struct Claim {
    /// Number of its batch.
    number: u64,
    /// Position in the batch.
    position: usize,
    pub(super) sample: u64,
    pub(super) epoch: u32,
    pub(super) view: View,
    /// Its place in a batch of images: u8, shape (resolution, resolution, 3).
    pub(super) pixels: BytesMut,
    /// All samples of a batch just begun, for the system to fetch.
    pub(super) read_ahead: Option<Vec<u64>>,
}

/// What became of a claim.
pub(super) struct Made<'a> {
    /// The sample and its class; `None` if it is left out.
    pub(super) sample: Option<(u64, i64)>,
    /// Its elements, if it is an array.
    pub(super) values: &'a [f32],
    /// The values that are its label, if that is no class.
    pub(super) targets: &'a [f32],
    /// Samples that could not be used, and what is wrong with the last of them.
    pub(super) skipped: u64,
    pub(super) reason: Option<Error>,
    /// Time it took.
    pub(super) busy: Duration,
}

/// What the consumer finds at the head of the queue.
pub(super) enum Taken {
    Item(Result<Batch, Error>),
    NotYet,
    End,
}

impl Queue {
    pub(super) fn new(
        requests: Requests,
        room: usize,
        input_type: InputType,
        labels: Labels,
    ) -> Self {
        Self {
            requests: Some(requests),
            input_type,
            labels,
            open: VecDeque::new(),
            first: 0,
            room,
            spare: Vec::new(),
            failure: None,
            stopped: false,
        }
    }

    /// The next sample to make; opens a batch for it if there is room.
    pub(super) fn claim(&mut self) -> Option<Claim> {
        let mut read_ahead = None;
        loop {
            let number = self.first + self.open.len() as u64;
            if let Some(last) = self.open.back_mut()
                && let Some(claim) = last.claim(number - 1)
            {
                return Some(Claim { read_ahead, ..claim });
            }
            if self.open.len() == self.room {
                return None;
            }
            let Some(request) = self.requests.as_mut()?.next() else {
                self.requests = None;
                return None;
            };
            read_ahead = Some(request.samples.clone());
            let memory = self.spare.pop().unwrap_or_default();
            let open = OpenBatch::new(request, &self.input_type, self.labels, memory);
            self.open.push_back(open);
        }
    }

    /// Puts a sample, or the reason why there is none, into its batch.
    pub(super) fn finish(&mut self, claim: Claim, made: Result<Made<'_>, Error>) {
        // A batch behind a failed one is gone by now.
        let Some(index) = claim.number.checked_sub(self.first) else { return };
        let Some(open) = self.open.get_mut(index as usize) else { return };
        match made {
            Ok(made) => open.fill(claim, &made),
            Err(error) => {
                open.fail(claim, error);
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

    /// Batches that are finished and wait for the consumer.
    pub(super) fn ready(&self) -> usize {
        self.open.iter().take_while(|open| open.missing == 0).count()
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
        let finished = open.finish();
        if finished.is_err() {
            self.stop();
        }
        Taken::Item(finished)
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
///
/// The memory of its images is cut into one piece per sample, each of which one thread owns while it
/// writes there; at the end the pieces are joined again, which copies nothing because they are
/// neighbours.
struct OpenBatch {
    view: View,
    batch: Batch,
    /// The pieces not claimed yet.
    rest: BytesMut,
    /// Pieces that came back.
    pieces: Vec<BytesMut>,
    piece_bytes: usize,
    /// Samples claimed so far; they are claimed in order.
    claimed: usize,
    /// Samples not finished yet.
    missing: usize,
    /// Positions without a sample.
    left_out: Vec<usize>,
    /// The failure at the lowest position. All positions before a failed one have been claimed and
    /// will be finished, so which one it is does not depend on timing.
    failure: Option<(usize, Error)>,
}

impl OpenBatch {
    fn new(request: Request, input_type: &InputType, labels: Labels, mut batch: Batch) -> Self {
        let Request { epoch, samples, view } = request;
        let missing = samples.len();
        let side = view.resolution() as usize;
        let piece_bytes = if *input_type == InputType::Image { side * side * 3 } else { 0 };
        let mut rest = BytesMut::new();
        batch.inputs = match (input_type, batch.inputs) {
            (InputType::Image, memory) => {
                rest = match memory {
                    Inputs::Images { pixels, .. } => pixels,
                    Inputs::Arrays { .. } => BytesMut::new(),
                };
                let bytes = missing * piece_bytes;
                if rest.capacity() < bytes {
                    // Zeroed memory straight from the system costs nothing yet, while the lock is held.
                    rest = BytesMut::zeroed(bytes);
                } else {
                    rest.resize(bytes, 0);
                }
                Inputs::Images { pixels: BytesMut::new(), resolution: view.resolution() }
            }
            (InputType::Array(shape), memory) => {
                let mut values = match memory {
                    Inputs::Arrays { values, .. } => values,
                    Inputs::Images { .. } => Vec::new(),
                };
                values.resize(missing * shape.iter().product::<u64>() as usize, 0.0);
                Inputs::Arrays { values, shape: shape.clone() }
            }
        };
        let are_values = matches!(labels, Labels::Values(_));
        batch.labels.clear();
        batch.labels.resize(if are_values { 0 } else { missing }, 0);
        batch.targets.clear();
        batch.targets.resize(missing * labels.targets(), 0.0);
        batch.samples = samples;
        batch.epoch = epoch;
        let mut pieces = Vec::new();
        pieces.resize_with(missing, BytesMut::new);
        Self {
            view,
            batch,
            rest,
            pieces,
            piece_bytes,
            claimed: 0,
            missing,
            left_out: Vec::new(),
            failure: None,
        }
    }

    fn claim(&mut self, number: u64) -> Option<Claim> {
        let position = self.claimed;
        let sample = *self.batch.samples.get(position)?;
        self.claimed += 1;
        Some(Claim {
            number,
            position,
            sample,
            epoch: self.batch.epoch,
            view: self.view.clone(),
            pixels: self.rest.split_to(self.piece_bytes),
            read_ahead: None,
        })
    }

    fn fill(&mut self, claim: Claim, made: &Made<'_>) {
        let Claim { position, pixels, .. } = claim;
        self.missing -= 1;
        self.pieces[position] = pixels;
        let Some((sample, label)) = made.sample else {
            self.left_out.push(position);
            return;
        };
        self.batch.samples[position] = sample;
        if let Some(place) = self.batch.labels.get_mut(position) {
            *place = label;
        }
        put(made.targets, position, &mut self.batch.targets);
        if let Inputs::Arrays { values, .. } = &mut self.batch.inputs {
            put(made.values, position, values);
        }
    }

    fn fail(&mut self, claim: Claim, error: Error) {
        let unclaimed = self.batch.samples.len() - self.claimed;
        self.claimed += unclaimed;
        self.missing -= unclaimed + 1;
        if self.failure.as_ref().is_none_or(|(lowest, _)| claim.position < *lowest) {
            self.failure = Some((claim.position, error));
        }
    }

    fn finish(mut self) -> Result<Batch, Error> {
        if let Some((_, error)) = self.failure {
            return Err(error);
        }
        let mut batch = self.batch;
        if let Inputs::Images { pixels, .. } = &mut batch.inputs {
            for piece in self.pieces {
                pixels.unsplit(piece);
            }
            // What is left of the memory, so that it is there for a larger batch.
            pixels.unsplit(self.rest);
        }
        self.left_out.sort_unstable();
        for position in self.left_out.into_iter().rev() {
            batch.remove(position);
        }
        Ok(batch)
    }
}

/// Copies a sample's values to their place among those of a batch.
fn put(values: &[f32], position: usize, all: &mut [f32]) {
    all[position * values.len()..][..values.len()].copy_from_slice(values);
}

#[cfg(test)]
mod tests {
    use baton_recipe::spec::{Augment, Resize};

    use super::*;

    fn request(samples: &[u64]) -> Request {
        let view = View::Train {
            seed: 0,
            resolution: 1,
            resize: Resize::Fast,
            augment: Augment::default(),
        };
        Request { epoch: 0, samples: samples.to_vec(), view }
    }

    fn queue(room: usize, requests: &[&[u64]]) -> Queue {
        queue_of(room, requests, InputType::Image, Labels::Ints)
    }

    fn queue_of(room: usize, requests: &[&[u64]], inputs: InputType, labels: Labels) -> Queue {
        let requests: Vec<_> = requests.iter().map(|samples| request(samples)).collect();
        Queue::new(Box::new(requests.into_iter()), room, inputs, labels)
    }

    fn claims(queue: &mut Queue) -> Vec<Claim> {
        std::iter::from_fn(|| queue.claim()).collect()
    }

    fn made(sample: Option<(u64, i64)>) -> Result<Made<'static>, Error> {
        let (values, targets) = (&[], &[]);
        Ok(Made { sample, values, targets, skipped: 0, reason: None, busy: Duration::ZERO })
    }

    fn finish(queue: &mut Queue, mut claim: Claim) {
        let sample = claim.sample;
        claim.pixels.fill(sample as u8);
        queue.finish(claim, made(Some((sample, sample as i64))));
    }

    fn fail(queue: &mut Queue, claim: Claim) {
        let error = Error::Decoder(format!("sample {}", claim.sample));
        queue.finish(claim, Err(error));
    }

    fn pixels(batch: &Batch) -> &[u8] {
        batch.images().unwrap().0
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
        let mut claims = claims(&mut queue);
        finish(&mut queue, claims.remove(2));
        finish(&mut queue, claims.remove(1));
        assert!(matches!(queue.take(), Taken::NotYet));
        assert_eq!(queue.ready(), 0);
        assert!(!queue.has_news());
        finish(&mut queue, claims.remove(0));
        assert_eq!(queue.ready(), 2);
        assert!(queue.has_news());

        let first = batch(&mut queue);
        assert_eq!(first.samples, [4, 9]);
        assert_eq!(first.labels, [4, 9]);
        assert_eq!(pixels(&first), [4, 4, 4, 9, 9, 9]);
        assert_eq!(batch(&mut queue).samples, [7]);
    }

    #[test]
    fn no_more_batches_are_open_than_there_is_room_for() {
        let mut queue = queue(2, &[&[0], &[1], &[2]]);
        let mut first = claims(&mut queue);
        assert_eq!(first.len(), 2);
        finish(&mut queue, first.remove(0));
        assert!(queue.claim().is_none(), "a finished batch takes up room, too");
        batch(&mut queue);
        assert_eq!(claims(&mut queue).len(), 1);
    }

    #[test]
    fn the_end_comes_after_the_last_batch() {
        let mut queue = queue(3, &[&[0], &[]]);
        let mut claims = claims(&mut queue);
        assert!(matches!(queue.take(), Taken::NotYet));
        finish(&mut queue, claims.remove(0));
        assert_eq!(batch(&mut queue).len(), 1);
        assert!(batch(&mut queue).is_empty());
        assert!(queue.has_news());
        assert!(matches!(queue.take(), Taken::End));
    }

    #[test]
    fn a_failure_is_the_last_item_and_comes_in_its_place() {
        let mut queue = queue(3, &[&[0], &[1], &[2], &[3]]);
        let mut claims = claims(&mut queue);
        fail(&mut queue, claims.remove(1));
        finish(&mut queue, claims.remove(1));
        finish(&mut queue, claims.remove(0));
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
            let mut claims = [(); 2].map(|()| queue.claim());
            let [first, second] = order.map(|index| claims[index].take().unwrap());
            fail(&mut queue, first);
            assert!(queue.claim().is_none(), "the rest of the batch is not worth decoding");
            assert!(matches!(queue.take(), Taken::NotYet));
            fail(&mut queue, second);
            assert!(error(&mut queue).contains("sample 5"));
        }
    }

    #[test]
    fn samples_of_a_forgotten_batch_go_nowhere() {
        let mut queue = queue(2, &[&[0, 1], &[2]]);
        let mut claims = claims(&mut queue);
        queue.stop();
        finish(&mut queue, claims.remove(0));
        fail(&mut queue, claims.remove(1));
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
                finish(&mut queue, claim);
            }
            let batch = batch(&mut queue);
            assert_eq!(pixels(&batch).len(), 3 * batch.len());
            memory.push(pixels(&batch).as_ptr());
            queue.recycle(batch);
        }
        assert_eq!(memory, [memory[0]; 3]);
    }

    #[test]
    fn values_go_to_their_places_and_their_memory_is_used_again() {
        let (inputs, labels) = (InputType::Array(vec![3]), Labels::Values(2));
        let mut queue = queue_of(1, &[&[1, 2, 3], &[4, 5], &[6, 7, 8]], inputs, labels);
        let mut memory = Vec::new();
        for left in [vec![1, 3], vec![4, 5], vec![6, 7, 8]] {
            for claim in claims(&mut queue).into_iter().rev() {
                let sample = (claim.sample != 2).then_some((claim.sample, 0));
                let (value, target) = (claim.sample as f32, -(claim.sample as f32));
                let (values, targets) = (&[value; 3], &[target; 2]);
                let made = Made { sample, values, targets, ..made(None).unwrap() };
                queue.finish(claim, Ok(made));
            }
            let batch = batch(&mut queue);
            assert_eq!(batch.samples, left);
            assert!(batch.labels.is_empty());
            let each = |count, sign: f32| -> Vec<f32> {
                left.iter().flat_map(|sample| vec![sign * *sample as f32; count]).collect()
            };
            assert_eq!(batch.targets, each(2, -1.0));
            let Inputs::Arrays { values, .. } = &batch.inputs else { panic!("no arrays") };
            assert_eq!(*values, each(3, 1.0));
            memory.push((batch.targets.as_ptr(), values.as_ptr()));
            queue.recycle(batch);
        }
        assert_eq!(memory, [memory[0]; 3]);
    }

    #[test]
    fn a_sample_left_out_leaves_no_gap() {
        let mut queue = queue(1, &[&[1, 2, 3, 4]]);
        for claim in claims(&mut queue) {
            if [1, 3].contains(&claim.sample) {
                queue.finish(claim, made(None));
            } else {
                finish(&mut queue, claim);
            }
        }
        let batch = batch(&mut queue);
        assert_eq!(batch.samples, [2, 4]);
        assert_eq!(batch.labels, [2, 4]);
        assert_eq!(pixels(&batch), [2, 2, 2, 4, 4, 4]);
    }

    #[test]
    fn a_sample_in_the_place_of_another_goes_by_its_own_name() {
        let mut queue = queue(1, &[&[7]]);
        let claim = claims(&mut queue).remove(0);
        queue.finish(claim, made(Some((8, 80))));
        let batch = batch(&mut queue);
        assert_eq!((batch.samples, batch.labels), (vec![8], vec![80]));
    }

    #[test]
    fn the_first_claim_of_a_batch_tells_what_will_be_read() {
        let mut queue = queue(2, &[&[1, 2], &[3]]);
        let told: Vec<_> = claims(&mut queue).into_iter().map(|claim| claim.read_ahead).collect();
        assert_eq!(told, [Some(vec![1, 2]), None, Some(vec![3])]);
    }
}
