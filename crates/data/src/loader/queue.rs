//! The queue of batches between request and delivery. It has no threads or locks: [`super::Loader`] protects it with
//! a lock.

use std::{collections::VecDeque, time::Duration};

use bytes::BytesMut;

use super::{Preprocessing, Request};
use crate::{Batch, Error, InputType, Labels, batch::Inputs};

type Requests = Box<dyn Iterator<Item = Request> + Send>;

/// The batches between request and delivery, in order.
pub(super) struct BatchQueue {
    /// `None` once there are no more requests, or no more are needed.
    requests: Option<Requests>,
    contents: BatchContents,
    open: VecDeque<OpenBatch>,
    /// Number of the first open batch, counted from the start of the loader.
    first: u64,
    /// Maximum number of open batches.
    capacity: usize,
    /// Used batches whose memory can be reused.
    spare: Vec<Batch>,
    /// An error that belongs to no batch.
    failure: Option<Error>,
    stopped: bool,
}

/// What batches contain.
#[derive(Clone, Debug)]
pub(super) struct BatchContents {
    pub(super) input_type: InputType,
    /// Values per sample of each extra field.
    pub(super) extra_lens: Vec<u64>,
    pub(super) labels: Labels,
}

/// A sample that one thread prepares, and the memory for it, to which only this thread writes.
pub(super) struct Claim {
    /// Number of the batch.
    number: u64,
    /// Position in the batch.
    position: usize,
    pub(super) sample: u64,
    pub(super) epoch: u32,
    pub(super) preprocessing: Preprocessing,
    /// Memory for its pixels in a batch of images: u8, shape (resolution, resolution, 3).
    pub(super) pixels: BytesMut,
    /// All samples of a batch that was just started, to be read ahead.
    pub(super) read_ahead: Option<Vec<u64>>,
}

/// Result of preparing a sample.
pub(super) struct SampleResult<'a> {
    /// The sample and its class; `None` if it was skipped without a replacement.
    pub(super) sample: Option<(u64, i64)>,
    /// Elements of its array; empty for images.
    pub(super) values: &'a [f32],
    /// Tokens and labels of its text; empty for others.
    pub(super) tokens: (&'a [i64], &'a [i64]),
    /// Values of the extra fields.
    pub(super) extras: &'a [Vec<f32>],
    /// Target values; empty for a classification.
    pub(super) targets: &'a [f32],
    /// Number of skipped bad samples.
    pub(super) skipped: u64,
    /// Fault of the last skipped sample.
    pub(super) last_fault: Option<Error>,
    /// Time spent preparing the sample.
    pub(super) busy: Duration,
}

/// State of the batch at the head of the queue.
pub(super) enum NextBatch {
    Item(Result<Batch, Error>),
    Pending,
    End,
}

impl BatchQueue {
    pub(super) fn new(requests: Requests, capacity: usize, contents: BatchContents) -> Self {
        Self {
            requests: Some(requests),
            contents,
            open: VecDeque::new(),
            first: 0,
            capacity,
            spare: Vec::new(),
            failure: None,
            stopped: false,
        }
    }

    /// The next sample to prepare; starts a new batch if there is capacity.
    pub(super) fn claim(&mut self) -> Option<Claim> {
        let mut read_ahead = None;
        loop {
            let number = self.first + self.open.len() as u64;
            if let Some(last) = self.open.back_mut()
                && let Some(claim) = last.claim(number - 1)
            {
                return Some(Claim { read_ahead, ..claim });
            }
            if self.open.len() == self.capacity {
                return None;
            }
            let Some(request) = self.requests.as_mut()?.next() else {
                self.requests = None;
                return None;
            };
            read_ahead = Some(request.samples.clone());
            let memory = self.spare.pop().unwrap_or_default();
            let open = OpenBatch::new(request, &self.contents, memory);
            self.open.push_back(open);
        }
    }

    /// Stores a finished sample, or its error, in its batch.
    pub(super) fn finish(&mut self, claim: Claim, result: Result<SampleResult<'_>, Error>) {
        // Its batch is gone if the queue has stopped.
        let Some(index) = claim.number.checked_sub(self.first) else { return };
        let Some(open) = self.open.get_mut(index as usize) else { return };
        match result {
            Ok(result) => open.fill(claim, &result),
            Err(error) => {
                open.fail(claim, error);
                self.requests = None;
            }
        }
    }

    /// Whether a waiting consumer can continue.
    pub(super) fn is_consumer_ready(&self) -> bool {
        match self.open.front() {
            Some(first) => first.missing == 0 || self.failure.is_some(),
            None => self.requests.is_none(),
        }
    }

    /// Number of finished batches that can be delivered.
    pub(super) fn ready(&self) -> usize {
        self.open.iter().take_while(|open| open.missing == 0).count()
    }

    /// Whether [`take`](Self::take) would return something other than [`NextBatch::Pending`].
    pub(super) fn is_ready(&self) -> bool {
        self.failure.is_some()
            || match self.open.front() {
                None => self.requests.is_none(),
                Some(first) => first.missing == 0,
            }
    }

    /// The first batch if it is finished. After an error nothing follows.
    pub(super) fn take(&mut self) -> NextBatch {
        if let Some(error) = self.failure.take() {
            self.stop();
            return NextBatch::Item(Err(error));
        }
        match self.open.front() {
            None if self.requests.is_none() => return NextBatch::End,
            Some(first) if first.missing == 0 => {}
            _ => return NextBatch::Pending,
        }
        let Some(open) = self.open.pop_front() else { return NextBatch::Pending };
        self.first += 1;
        let finished = open.finish();
        if finished.is_err() {
            self.stop();
        }
        NextBatch::Item(finished)
    }

    /// Keeps the memory of a used batch.
    pub(super) fn recycle(&mut self, batch: Batch) {
        if self.spare.len() < self.capacity {
            self.spare.push(batch);
        }
    }

    /// Ends the queue with an error that belongs to no batch.
    pub(super) fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
        self.requests = None;
    }

    /// Drops all batches; the results of claimed samples will be ignored.
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

/// A batch in progress.
///
/// The memory of its images is split into one piece per sample, which one thread owns while it writes there. At the
/// end the pieces are joined again without a copy, because they are adjacent.
struct OpenBatch {
    preprocessing: Preprocessing,
    batch: Batch,
    /// Memory of the samples not claimed yet.
    rest: BytesMut,
    /// Pieces of finished samples.
    pieces: Vec<BytesMut>,
    piece_bytes: usize,
    /// Tokens and labels of each finished text.
    texts: Vec<(Vec<i64>, Vec<i64>)>,
    /// Number of samples claimed so far; they are claimed in order.
    claimed: usize,
    /// Number of samples not finished yet.
    missing: usize,
    /// Positions of samples that were skipped without a replacement.
    left_out: Vec<usize>,
    /// The failure at the lowest position. All positions before a failed one have been claimed and will be finished,
    /// so the reported failure does not depend on timing.
    failure: Option<(usize, Error)>,
}

impl OpenBatch {
    fn new(request: Request, contents: &BatchContents, mut batch: Batch) -> Self {
        let BatchContents { input_type, extra_lens, labels } = contents;
        let Request { epoch, samples, preprocessing } = request;
        let missing = samples.len();
        let side = preprocessing.resolution() as usize;
        let piece_bytes = if *input_type == InputType::Image { side * side * 3 } else { 0 };
        let mut rest = BytesMut::new();
        batch.inputs = match (input_type, batch.inputs) {
            (InputType::Image, memory) => {
                rest = match memory {
                    Inputs::Images { pixels, .. } => pixels,
                    Inputs::Arrays { .. } | Inputs::Tokens { .. } => BytesMut::new(),
                };
                let bytes = missing * piece_bytes;
                if rest.capacity() < bytes {
                    // The system zeroes this memory on first access, so it costs nothing while the lock is held.
                    rest = BytesMut::zeroed(bytes);
                } else {
                    rest.resize(bytes, 0);
                }
                Inputs::Images { pixels: BytesMut::new(), resolution: preprocessing.resolution() }
            }
            (InputType::Array(shape), memory) => {
                let mut values = match memory {
                    Inputs::Arrays { values, .. } => values,
                    Inputs::Images { .. } | Inputs::Tokens { .. } => Vec::new(),
                };
                values.resize(missing * shape.iter().product::<u64>() as usize, 0.0);
                Inputs::Arrays { values, shape: shape.clone() }
            }
            // Texts have different lengths: they are joined at the end.
            (InputType::Tokens, _) => Inputs::Tokens { tokens: Vec::new(), lengths: Vec::new() },
        };
        batch.extras.resize_with(extra_lens.len(), Vec::new);
        for (values, len) in batch.extras.iter_mut().zip(extra_lens) {
            values.clear();
            values.resize(missing * *len as usize, 0.0);
        }
        let has_classes = matches!(labels, Labels::Ints | Labels::Classes(_) | Labels::Absent);
        batch.labels.clear();
        batch.labels.resize(if has_classes { missing } else { 0 }, 0);
        batch.targets.clear();
        batch.targets.resize(missing * labels.targets(), 0.0);
        batch.samples = samples;
        batch.epoch = epoch;
        let mut pieces = Vec::new();
        pieces.resize_with(missing, BytesMut::new);
        Self {
            preprocessing,
            batch,
            rest,
            pieces,
            piece_bytes,
            texts: vec![
                Default::default();
                if *input_type == InputType::Tokens { missing } else { 0 }
            ],
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
            preprocessing: self.preprocessing.clone(),
            pixels: self.rest.split_to(self.piece_bytes),
            read_ahead: None,
        })
    }

    fn fill(&mut self, claim: Claim, result: &SampleResult<'_>) {
        let Claim { position, pixels, .. } = claim;
        self.missing -= 1;
        self.pieces[position] = pixels;
        let Some((sample, label)) = result.sample else {
            self.left_out.push(position);
            return;
        };
        self.batch.samples[position] = sample;
        if let Some(slot) = self.batch.labels.get_mut(position) {
            *slot = label;
        }
        for (values, all) in result.extras.iter().zip(&mut self.batch.extras) {
            put(values, position, all);
        }
        put(result.targets, position, &mut self.batch.targets);
        if let Inputs::Arrays { values, .. } = &mut self.batch.inputs {
            put(result.values, position, values);
        }
        if let Some(text) = self.texts.get_mut(position) {
            *text = (result.tokens.0.to_vec(), result.tokens.1.to_vec());
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
            // Also keep unused memory, so that it can be reused for a larger batch.
            pixels.unsplit(self.rest);
        }
        if let Inputs::Tokens { tokens, lengths } = &mut batch.inputs {
            for (text, labels) in self.texts {
                lengths.push(text.len() as i64);
                tokens.extend(text);
                batch.labels.extend(labels);
            }
        }
        self.left_out.sort_unstable();
        for position in self.left_out.into_iter().rev() {
            batch.remove(position);
        }
        Ok(batch)
    }
}

/// Copies the values of a sample to its position in the batch.
fn put(values: &[f32], position: usize, all: &mut [f32]) {
    all[position * values.len()..][..values.len()].copy_from_slice(values);
}

#[cfg(test)]
mod tests {
    use baton_recipe::spec::{Augment, Resize};

    use super::*;

    fn request(samples: &[u64]) -> Request {
        let preprocessing = Preprocessing::Train {
            seed: 0,
            resolution: 1,
            resize: Resize::Fast,
            augment: Augment::default(),
            mean: [0; 3],
        };
        Request { epoch: 0, samples: samples.to_vec(), preprocessing }
    }

    fn queue(capacity: usize, requests: &[&[u64]]) -> BatchQueue {
        queue_of(capacity, requests, InputType::Image, vec![], Labels::Ints)
    }

    fn queue_of(
        capacity: usize,
        requests: &[&[u64]],
        input_type: InputType,
        extra_lens: Vec<u64>,
        labels: Labels,
    ) -> BatchQueue {
        let requests: Vec<_> = requests.iter().map(|samples| request(samples)).collect();
        let contents = BatchContents { input_type, extra_lens, labels };
        BatchQueue::new(Box::new(requests.into_iter()), capacity, contents)
    }

    fn claims(queue: &mut BatchQueue) -> Vec<Claim> {
        std::iter::from_fn(|| queue.claim()).collect()
    }

    fn result(sample: Option<(u64, i64)>) -> Result<SampleResult<'static>, Error> {
        Ok(SampleResult {
            sample,
            values: &[],
            tokens: (&[], &[]),
            extras: &[],
            targets: &[],
            skipped: 0,
            last_fault: None,
            busy: Duration::ZERO,
        })
    }

    fn finish(queue: &mut BatchQueue, mut claim: Claim) {
        let sample = claim.sample;
        claim.pixels.fill(sample as u8);
        queue.finish(claim, result(Some((sample, sample as i64))));
    }

    fn fail(queue: &mut BatchQueue, claim: Claim) {
        let error = Error::Decoder(format!("sample {}", claim.sample));
        queue.finish(claim, Err(error));
    }

    fn pixels(batch: &Batch) -> &[u8] {
        batch.images().unwrap().0
    }

    fn batch(queue: &mut BatchQueue) -> Batch {
        match queue.take() {
            NextBatch::Item(Ok(batch)) => batch,
            NextBatch::Item(Err(error)) => panic!("{error}"),
            NextBatch::Pending => panic!("not finished"),
            NextBatch::End => panic!("no more batches"),
        }
    }

    fn error(queue: &mut BatchQueue) -> String {
        match queue.take() {
            NextBatch::Item(Err(error)) => error.to_string(),
            _ => panic!("no error"),
        }
    }

    #[test]
    fn batches_are_delivered_in_order_whatever_the_order_of_their_samples() {
        let mut queue = queue(2, &[&[4, 9], &[7]]);
        let mut claims = claims(&mut queue);
        finish(&mut queue, claims.remove(2));
        finish(&mut queue, claims.remove(1));
        assert!(matches!(queue.take(), NextBatch::Pending));
        assert_eq!(queue.ready(), 0);
        assert!(!queue.is_consumer_ready());
        finish(&mut queue, claims.remove(0));
        assert_eq!(queue.ready(), 2);
        assert!(queue.is_consumer_ready());

        let first = batch(&mut queue);
        assert_eq!(first.samples, [4, 9]);
        assert_eq!(first.labels, [4, 9]);
        assert_eq!(pixels(&first), [4, 4, 4, 9, 9, 9]);
        assert_eq!(batch(&mut queue).samples, [7]);
    }

    #[test]
    fn open_batches_are_limited_by_the_capacity() {
        let mut queue = queue(2, &[&[0], &[1], &[2]]);
        let mut first = claims(&mut queue);
        assert_eq!(first.len(), 2);
        finish(&mut queue, first.remove(0));
        assert!(queue.claim().is_none(), "a finished batch uses capacity too");
        batch(&mut queue);
        assert_eq!(claims(&mut queue).len(), 1);
    }

    #[test]
    fn the_queue_ends_after_the_last_batch() {
        let mut queue = queue(3, &[&[0], &[]]);
        let mut claims = claims(&mut queue);
        assert!(matches!(queue.take(), NextBatch::Pending));
        finish(&mut queue, claims.remove(0));
        assert_eq!(batch(&mut queue).len(), 1);
        assert!(batch(&mut queue).is_empty());
        assert!(queue.is_consumer_ready());
        assert!(matches!(queue.take(), NextBatch::End));
    }

    #[test]
    fn a_failure_is_delivered_in_order_and_is_the_last_item() {
        let mut queue = queue(3, &[&[0], &[1], &[2], &[3]]);
        let mut claims = claims(&mut queue);
        fail(&mut queue, claims.remove(1));
        finish(&mut queue, claims.remove(1));
        finish(&mut queue, claims.remove(0));
        assert_eq!(batch(&mut queue).samples, [0]);
        assert!(queue.claim().is_none(), "nothing is started after a failure");
        assert!(error(&mut queue).contains("sample 1"));
        assert!(matches!(queue.take(), NextBatch::End));
        assert!(queue.claim().is_none());
    }

    #[test]
    fn the_failure_at_the_lowest_position_is_reported_whichever_came_first() {
        for order in [[0, 1], [1, 0]] {
            let mut queue = queue(1, &[&[5, 6, 7, 8]]);
            let mut claims = [(); 2].map(|()| queue.claim());
            let [first, second] = order.map(|index| claims[index].take().unwrap());
            fail(&mut queue, first);
            assert!(queue.claim().is_none(), "the rest of the batch is not decoded");
            assert!(matches!(queue.take(), NextBatch::Pending));
            fail(&mut queue, second);
            assert!(error(&mut queue).contains("sample 5"));
        }
    }

    #[test]
    fn samples_of_a_dropped_batch_are_ignored() {
        let mut queue = queue(2, &[&[0, 1], &[2]]);
        let mut claims = claims(&mut queue);
        queue.stop();
        finish(&mut queue, claims.remove(0));
        fail(&mut queue, claims.remove(1));
        assert!(queue.is_stopped());
        assert!(matches!(queue.take(), NextBatch::End));
    }

    #[test]
    fn an_error_that_belongs_to_no_batch_is_delivered_first() {
        let mut queue = queue(2, &[&[0, 1]]);
        claims(&mut queue);
        queue.fail(Error::Panicked);
        assert!(queue.is_consumer_ready());
        assert!(matches!(queue.take(), NextBatch::Item(Err(Error::Panicked))));
        assert!(matches!(queue.take(), NextBatch::End));
    }

    #[test]
    fn the_memory_of_used_batches_is_reused() {
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
    fn values_are_stored_at_their_positions_and_their_memory_is_reused() {
        let (inputs, labels) = (InputType::Array(vec![3]), Labels::Values(2));
        let requests: [&[u64]; 3] = [&[1, 2, 3], &[4, 5], &[6, 7, 8]];
        let mut queue = queue_of(1, &requests, inputs, vec![1, 2], labels);
        let mut memory = Vec::new();
        for kept in [vec![1, 3], vec![4, 5], vec![6, 7, 8]] {
            for claim in claims(&mut queue).into_iter().rev() {
                let sample = (claim.sample != 2).then_some((claim.sample, 0));
                let (value, target) = (claim.sample as f32, -(claim.sample as f32));
                let (values, targets) = (&[value; 3], &[target; 2]);
                let extras = &[vec![value], vec![target; 2]];
                let result =
                    SampleResult { sample, values, extras, targets, ..result(None).unwrap() };
                queue.finish(claim, Ok(result));
            }
            let batch = batch(&mut queue);
            assert_eq!(batch.samples, kept);
            assert!(batch.labels.is_empty());
            let each = |count, sign: f32| -> Vec<f32> {
                kept.iter().flat_map(|sample| vec![sign * *sample as f32; count]).collect()
            };
            assert_eq!(batch.targets, each(2, -1.0));
            assert_eq!(batch.extras, [each(1, 1.0), each(2, -1.0)]);
            let Inputs::Arrays { values, .. } = &batch.inputs else { panic!("no arrays") };
            assert_eq!(*values, each(3, 1.0));
            memory.push((batch.targets.as_ptr(), values.as_ptr(), batch.extras[1].as_ptr()));
            queue.recycle(batch);
        }
        assert_eq!(memory, [memory[0]; 3]);
    }

    #[test]
    fn a_skipped_sample_leaves_no_gap() {
        let mut queue = queue(1, &[&[1, 2, 3, 4]]);
        for claim in claims(&mut queue) {
            if [1, 3].contains(&claim.sample) {
                queue.finish(claim, result(None));
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
    fn a_replacement_sample_has_its_own_number_and_label() {
        let mut queue = queue(1, &[&[7]]);
        let claim = claims(&mut queue).remove(0);
        queue.finish(claim, result(Some((8, 80))));
        let batch = batch(&mut queue);
        assert_eq!((batch.samples, batch.labels), (vec![8], vec![80]));
    }

    #[test]
    fn the_first_claim_of_a_batch_lists_the_samples_to_read_ahead() {
        let mut queue = queue(2, &[&[1, 2], &[3]]);
        let lists: Vec<_> = claims(&mut queue).into_iter().map(|claim| claim.read_ahead).collect();
        assert_eq!(lists, [Some(vec![1, 2]), None, Some(vec![3])]);
    }
}
