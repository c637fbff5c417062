//! The interface between the step loop and a model with its optimizer.
//!
//! Two implementations: `torch` (described networks) and `linear` (plain Rust, for tests of everything around
//! training that take milliseconds).

use std::ops::Range;

use baton_checkpoint::Float;
use baton_collectives::BufferMut;
use baton_data::Batch;
use baton_job::message::GeneratedText;
use baton_recipe::{Step, spec::Pointwise};

use crate::{bits, profile::DeviceSpan};

/// Number of f32 slots at the end of every leaf that belong to the step loop. The same all-reduce adds them up together
/// with the gradient.
///
/// | slots | content | written by |
/// |---|---|---|
/// | 0..3 | sum of losses, sum of the task's first metric, samples | [`Learner::gradient`] |
/// | 3..7 | the votes | [`Leaf::set_vote`] |
/// | 7 | the gradient's norm | [`Learner::measure`] |
/// | 8 | the loss scale, 0 if the loss is not scaled | [`Learner::measure`] |
pub const TAIL: usize = baton_job::plan::GRADIENT_TAIL_LEN as usize;

/// Slots of the tail that hold the votes.
pub const VOTE: Range<usize> = 3..7;

/// A contiguous array of f32 that is added up over all virtual ranks.
pub trait Summand: Sized + Send {
    /// `self += other`, element by element.
    ///
    /// # Errors
    /// The device failed.
    fn add(&mut self, other: &Self) -> Result<(), Error>;

    /// The values, for the collective.
    fn buffer(&mut self) -> BufferMut<'_>;
}

/// Contribution of one virtual rank to an update: gradient, batch statistics and the step loop's tail.
pub trait Leaf: Summand {
    /// Some of the values, which another thread may add up while the others are still computed.
    type LeafSpan: Summand;

    /// Number of values, with the tail.
    fn value_count(&self) -> usize;

    /// The values of `range`. Until they are [put back](Self::put_back), no other code may use these values of the leaf.
    ///
    /// # Errors
    /// The device failed.
    fn span(&self, range: Range<usize>) -> Result<Self::LeafSpan, Error>;

    /// Overwrites the values from `start` on with those of `span`.
    ///
    /// # Errors
    /// The device failed.
    fn put_back(&mut self, start: usize, span: Self::LeafSpan) -> Result<(), Error>;

    /// Writes the votes, and zeros into the slots after them.
    ///
    /// # Errors
    /// The device failed.
    fn set_vote(&mut self, vote: [f32; VOTE.end - VOTE.start]) -> Result<(), Error>;

    /// Starts copying the current tail to the host, so that [`tail`](Self::tail) does not wait for work that is
    /// queued on the device after this call.
    ///
    /// # Errors
    /// The device failed.
    fn start_tail_readback(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// The last [`TAIL`] values, as of [`start_tail_readback`](Self::start_tail_readback) if it was called, else the
    /// current ones. Waits for the device.
    ///
    /// # Errors
    /// The device failed.
    fn tail(&mut self) -> Result<[f32; TAIL], Error>;
}

/// The ranges of a leaf of `len` values that are in none of `spans`, ascending.
pub(crate) fn rest(spans: &[Range<usize>], len: usize) -> Vec<Range<usize>> {
    let mut spans: Vec<&Range<usize>> = spans.iter().collect();
    spans.sort_by_key(|span| span.start);
    let starts = spans.iter().map(|span| span.end);
    let ends = spans.iter().map(|span| span.start).chain([len]);
    let gaps = [0].into_iter().chain(starts).zip(ends).map(|(start, end)| start..end);
    gaps.filter(|gap| !gap.is_empty()).collect()
}

/// A number that the device may still be computing.
pub trait DeferredScalar {
    /// The number; waits for the device.
    ///
    /// # Errors
    /// The device failed.
    fn value(&self) -> Result<f64, Error>;
}

impl DeferredScalar for f64 {
    fn value(&self) -> Result<f64, Error> {
        Ok(*self)
    }
}

/// Sums over the samples of one batch.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Sums {
    /// Sum of losses.
    #[serde(with = "bits")]
    pub loss: f64,
    /// Sums of the task's other metrics that are means, in the order of `baton_recipe::task::metrics`.
    #[serde(with = "bits::of_each")]
    pub others: Vec<f64>,
    /// Samples.
    pub count: u64,
}

impl Sums {
    /// Adds the sums of another batch.
    pub fn add(&mut self, batch: &Self) {
        self.loss += batch.loss;
        self.count += batch.count;
        self.others.resize(self.others.len().max(batch.others.len()), 0.0);
        self.others.iter_mut().zip(&batch.others).for_each(|(sum, other)| *sum += other);
    }
}

/// Result of the evaluation of one batch.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct BatchEvaluation {
    /// Sums over the samples of the batch.
    pub sums: Sums,
    /// Outputs of the model, shape (samples, outputs), if a metric needs all samples together.
    #[serde(with = "bits::of_each")]
    pub predictions: Vec<f32>,
    /// The target values, same shape, in the same case.
    #[serde(with = "bits::of_each")]
    pub targets: Vec<f32>,
}

/// Which weights are evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvaluatedWeights {
    /// The trained weights.
    Raw,
    /// The moving average of the trained weights (EMA).
    Averaged,
}

/// Inputs of an optimizer update other than the gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Update {
    /// Number of updates made before; counts from 0.
    pub step: Step,
    /// Learning rate.
    pub lr: f64,
    /// Number of micro-batches in the gradient's sum: their batch statistics are averaged.
    pub micro_batches: u32,
}

/// A part of the replicated state, as one buffer.
#[derive(Debug)]
pub struct Region<'a> {
    /// Name in checkpoints, e.g. `weights`, `momentum`.
    pub name: &'static str,
    /// The values.
    pub buffer: BufferMut<'a>,
    /// For values that training does not change, such as the weights of frozen blocks: their type; `buffer` holds their
    /// bytes as 32-bit words. Checkpoints share one file of such a region.
    pub frozen: Option<Float>,
}

/// Location of a named tensor in a region, so that checkpoints can be exported without libtorch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorLocation {
    /// Name in torchvision, e.g. `layer1.0.conv1.weight`.
    pub name: String,
    /// Shape in torchvision, e.g. `[64, 64, 3, 3]` (OIHW).
    pub shape: Vec<usize>,
    /// Region that contains the tensor.
    pub region: &'static str,
    /// Index of the first value in the region, a multiple of [`baton_checkpoint::ALIGNMENT`].
    pub offset: usize,
    /// Whether the values are stored in channels-last (OHWI) order.
    pub channels_last: bool,
    /// The type in PyTorch, if that is not floating-point.
    pub integers: Option<baton_model::Integers>,
}

/// Gets a leaf whenever the next of its spans is complete.
pub type SpanCompleted<'a, F> = dyn FnMut(&F) -> Result<(), Error> + 'a;

/// A model with its optimizer: computes gradients, applies updates, gives access to its whole state.
///
/// All ranks build it from the same recipe and seed and therefore start with the same values; the step loop keeps all
/// ranks equal.
pub trait Learner {
    /// Storage of one virtual rank's contribution.
    type Leaf: Leaf;
    /// Sum of losses of one batch.
    type Loss: DeferredScalar + Send;

    /// Whether calls queue work that the device does later, as on a GPU. The step loop then passes inputs before they
    /// are needed, and reads the result of an update while the next one is running, so that the device never waits for
    /// the host.
    fn runs_ahead(&self) -> bool {
        false
    }

    /// Starts copying `batch` to the device. It should be the batch of the next [`gradient`](Self::gradient).
    ///
    /// # Errors
    /// The device failed.
    fn prefetch(&mut self, _batch: &Batch) -> Result<(), Error> {
        Ok(())
    }

    /// A new leaf, filled with zeros.
    ///
    /// # Errors
    /// Out of memory.
    fn new_leaf(&mut self) -> Result<Self::Leaf, Error>;

    /// Sets the initial weights from the seed, in a learner that has not been used. Called on every rank, and only if
    /// there is no state to continue from: computing millions of random numbers takes longer than reading them.
    ///
    /// # Errors
    /// The device failed.
    fn initialise(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Loads the pretrained weights that the recipe names. Called after [`initialise`](Self::initialise) on one rank
    /// only, which then sends its state to the others.
    ///
    /// # Errors
    /// The file cannot be read or does not fit.
    fn load_initial(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// The faster way to compute 1×1 convolutions on this processor, if the recipe leaves it open. Called on one rank,
    /// where a run begins.
    ///
    /// # Errors
    /// Out of memory.
    fn measure_pointwise(&mut self) -> Result<Option<Pointwise>, Error> {
        Ok(None)
    }

    /// Sets what was [measured](Self::measure_pointwise) when the run began, on every rank and before any computation.
    fn set_pointwise(&mut self, _measured: Option<Pointwise>) {}

    /// Overwrites `leaf` with the gradient of `scale ·` (sum of losses over `batch`), with the batch statistics of the
    /// normalisation layers, and with the batch's sums in the tail; the other slots of the tail have no defined
    /// value. `batch` is one micro-batch of one virtual rank and `scale` is 1 / (samples of the global batch), so that
    /// the sum of all leaves is the gradient of the mean loss. With fp16 all these values are multiplied by the loss
    /// scale.
    ///
    /// Returns the sum of losses, not scaled.
    ///
    /// # Errors
    /// The device failed, or a label is out of range.
    fn gradient(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut Self::Leaf,
    ) -> Result<Self::Loss, Error>;

    /// Ranges of a leaf that [`gradient_in_spans`](Self::gradient_in_spans) completes before its end, in this order; the
    /// same on all ranks. They do not overlap.
    fn spans(&self) -> &[Range<usize>] {
        &[]
    }

    /// [`gradient`](Self::gradient), which calls `completed` after each of the [`spans`](Self::spans), and after those
    /// only that it completes before its end. The values are those of `gradient`, bit by bit.
    ///
    /// # Errors
    /// As `gradient`, and those of `completed`.
    fn gradient_in_spans(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut Self::Leaf,
        _completed: &mut SpanCompleted<'_, Self::Leaf>,
    ) -> Result<Self::Loss, Error> {
        self.gradient(batch, scale, leaf)
    }

    /// Writes the L2 norm of the summed gradient, with the loss scale divided out, and the loss scale into the tail.
    ///
    /// # Errors
    /// The device failed.
    fn measure(&mut self, sum: &mut Self::Leaf) -> Result<(), Error>;

    /// One optimizer update from the sum of all leaves after [`measure`](Self::measure). The sum has no defined values
    /// afterwards.
    ///
    /// # Errors
    /// The device failed.
    fn update(&mut self, sum: &mut Self::Leaf, update: &Update) -> Result<(), Error>;

    /// Loss, correct predictions and outputs in evaluation mode; changes no state. Where a batch may take more than a
    /// moment, `is_interrupted` is called several times; `None` if it returned true.
    ///
    /// # Errors
    /// The device failed, or a label is out of range.
    fn evaluate(
        &mut self,
        batch: &Batch,
        weights: EvaluatedWeights,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<BatchEvaluation>, Error>;

    /// Texts that a language model writes for the samples of `batch`, as `evaluation.generate` says; changes no state. `is_interrupted` is called after every token; `None` if it returned true.
    ///
    /// # Errors
    /// The device failed.
    fn write_texts(
        &mut self,
        _batch: &Batch,
        _weights: EvaluatedWeights,
        _is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Vec<GeneratedText>>, Error> {
        Ok(Some(Vec::new()))
    }

    /// Begins to record the operations of the device, called by this thread.
    ///
    /// # Errors
    /// They cannot be recorded; training is not affected.
    fn begin_profile(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Ends the recording; returns the operations since it began.
    ///
    /// # Errors
    /// They cannot be read.
    fn end_profile(&mut self) -> Result<Vec<DeviceSpan>, Error> {
        Ok(Vec::new())
    }

    /// Digest of the network's definition if that is a file, which must be the same on all ranks and for the whole run.
    fn program(&self) -> Option<&str> {
        None
    }

    /// The whole state, in a fixed order.
    fn regions(&mut self) -> Vec<Region<'_>>;

    /// Location of each named tensor, for export.
    fn tensors(&self) -> Vec<TensorLocation>;
}

/// Error of a learner.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// libtorch reported an error.
    #[error("{operation}: {message}")]
    Torch {
        /// The operation that failed.
        operation: &'static str,
        /// First line of libtorch's message.
        message: String,
    },
    /// Out of memory.
    #[error("{operation}: {message}")]
    OutOfMemory {
        /// The kind of memory.
        memory: MemoryKind,
        /// The operation that failed.
        operation: &'static str,
        /// First line of libtorch's message.
        message: String,
    },
    /// A sample's label does not fit the model.
    #[error(
        "sample {sample} has label {label}, but model.num_classes = {num_classes}: raise it or correct the data set"
    )]
    Label {
        /// Index of the sample in the data set.
        sample: u64,
        /// Its label.
        label: i64,
        /// Number of outputs of the model.
        num_classes: u32,
    },
    /// The device does not exist or cannot be used.
    #[error("{0}")]
    Device(String),
    /// A GPU or its driver failed.
    #[error(transparent)]
    Gpu(#[from] baton_gpu::Error),
    /// The recipe asks for something that this model does not support.
    #[error("{0}")]
    Recipe(String),
}

/// A kind of memory that can be exhausted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Memory of the machine.
    Host,
    /// Memory of a GPU.
    Gpu,
}

impl Error {
    /// The kind of memory that was exhausted, if that is the cause.
    #[must_use]
    pub fn out_of_memory(&self) -> Option<MemoryKind> {
        match self {
            Self::OutOfMemory { memory, .. } => Some(*memory),
            Self::Gpu(error) => error.is_out_of_memory().then_some(MemoryKind::Gpu),
            _ => None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_a_leaf_is_what_no_span_has() {
        assert_eq!(rest(&[], 9), [0..9]);
        assert_eq!(rest(&[5..7, 2..5], 9), [0..2, 7..9]);
        assert_eq!(rest(&[0..2, 4..9], 9), [2..4]);
        assert!(rest(&[0..4, 4..9], 9).is_empty());
    }
}
