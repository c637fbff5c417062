//! What the step loop needs of a model and its optimizer.
//!
//! Two implementations: `torch` (described networks) and `linear` (plain Rust, for trying out everything
//! around the training in milliseconds).

use baton_checkpoint::Float;
use baton_collectives::BufferMut;
use baton_data::Batch;
use baton_recipe::Step;

use crate::bits;

/// Number of f32 slots at the end of every leaf that belong to the step loop. They travel in the same
/// all-reduce as the gradient.
///
/// | slots | what | written by |
/// |---|---|---|
/// | 0..3 | sum of losses, sum of the task's first metric, samples | [`Learner::gradient`] |
/// | 3..7 | the vote | [`Leaf::set_vote`] |
/// | 7 | the gradient's norm | [`Learner::measure`] |
/// | 8 | the loss's own factor, 0 where there is none | [`Learner::measure`] |
pub const TAIL: usize = baton_job::plan::TAIL as usize;

/// Slots of the tail that hold the vote.
pub const VOTE: std::ops::Range<usize> = 3..7;

/// One virtual rank's contribution to an update: gradient, batch statistics and the loop's tail, in
/// one contiguous run of f32.
pub trait Leaf: Sized {
    /// `self += other`, element by element.
    ///
    /// # Errors
    /// The device failed.
    fn add(&mut self, other: &Self) -> Result<(), Error>;

    /// Overwrites the vote, and clears what is behind it.
    ///
    /// # Errors
    /// The device failed.
    fn set_vote(&mut self, vote: [f32; VOTE.end - VOTE.start]) -> Result<(), Error>;

    /// Sends for the tail as it is now, so that [`tail`](Self::tail) need not wait for what is queued
    /// on the device from now on.
    ///
    /// # Errors
    /// The device failed.
    fn send_for_tail(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// The last [`TAIL`] values: those sent for, or as they are now. Waits for the device.
    ///
    /// # Errors
    /// The device failed.
    fn tail(&mut self) -> Result<[f32; TAIL], Error>;

    /// The whole leaf, tail included, for the collective.
    fn buffer(&mut self) -> BufferMut<'_>;
}

/// A number that the device may still be at.
pub trait Reading {
    /// The number; waits for the device.
    ///
    /// # Errors
    /// The device failed.
    fn value(&self) -> Result<f64, Error>;
}

impl Reading for f64 {
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
    pub others: Vec<f64>,
    /// Samples.
    pub count: u64,
}

impl Sums {
    /// Adds those of another batch.
    pub fn add(&mut self, batch: &Self) {
        self.loss += batch.loss;
        self.count += batch.count;
        self.others.resize(self.others.len().max(batch.others.len()), 0.0);
        self.others.iter_mut().zip(&batch.others).for_each(|(sum, other)| *sum += other);
    }
}

/// What an evaluation found in one batch.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Judged {
    /// Sums over its samples.
    pub sums: Sums,
    /// What the model says, shape (samples, outputs), if a metric is of all samples together.
    #[serde(with = "bits::of_each")]
    pub predictions: Vec<f32>,
    /// What is true, likewise.
    #[serde(with = "bits::of_each")]
    pub targets: Vec<f32>,
}

/// Which weights are evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Those that are trained.
    Raw,
    /// Their moving average.
    Averaged,
}

/// What an update is told besides the gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Update {
    /// Updates made before; counts from 0.
    pub step: Step,
    /// Learning rate.
    pub lr: f64,
    /// Micro-batches that the gradient is the sum of: their statistics are averaged.
    pub micro_batches: u32,
}

/// A part of the replicated state, as one buffer.
#[derive(Debug)]
pub struct Region<'a> {
    /// Its name in checkpoints, e.g. `weights`, `momentum`.
    pub name: &'static str,
    /// Its values.
    pub buffer: BufferMut<'a>,
    /// Of what training leaves as it is, such as the weights of frozen blocks: the type of the values, of
    /// which `buffer` holds the bytes as 32-bit words. Checkpoints share one file of it.
    pub frozen: Option<Float>,
}

/// A named tensor inside a region, so that checkpoints can be exported without libtorch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPlace {
    /// torchvision's name, e.g. `layer1.0.conv1.weight`.
    pub name: String,
    /// torchvision's shape, e.g. `[64, 64, 3, 3]` (OIHW).
    pub shape: Vec<usize>,
    /// Region that holds it.
    pub region: &'static str,
    /// First value in the region, at a multiple of [`baton_checkpoint::ALIGNMENT`].
    pub offset: usize,
    /// Whether the values are stored in channels-last (OHWI) order.
    pub channels_last: bool,
}

/// A model with its optimizer: computes gradients, applies updates, exposes its whole state.
///
/// All ranks build it from the same recipe and seed and thus hold the same values; the loop keeps
/// it so.
pub trait Learner {
    /// Storage of one contribution.
    type Leaf: Leaf + Send;
    /// A batch's loss.
    type Loss: Reading + Send;

    /// Whether work is queued here and done later, as on a GPU. The step loop then hands over inputs
    /// before their turn, and reads what an update came to while the next one is under way, so that the
    /// device never waits for the host.
    fn runs_ahead(&self) -> bool {
        false
    }

    /// Begins to bring `batch` to the device. It should be that of the next [`gradient`](Self::gradient).
    ///
    /// # Errors
    /// The device failed.
    fn prefetch(&mut self, _batch: &Batch) -> Result<(), Error> {
        Ok(())
    }

    /// A zeroed leaf.
    ///
    /// # Errors
    /// Out of memory.
    fn new_leaf(&mut self) -> Result<Self::Leaf, Error>;

    /// Sets the weights that the seed says, in a learner that has not been used. Called on every rank, and only if
    /// there is nothing to go on from: drawing millions of numbers takes longer than to read them.
    ///
    /// # Errors
    /// The device failed.
    fn initialise(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Loads what the recipe begins with, if it is not the seed's weights. Called after
    /// [`initialise`](Self::initialise) on one rank only, which then gives its state to the others.
    ///
    /// # Errors
    /// The file cannot be read or does not fit.
    fn load_initial(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Overwrites `leaf` with the gradient of `scale ·` (sum of losses over `batch`), with the batch's
    /// normalisation statistics, and with its sums in the tail; the rest of the tail is left with no
    /// particular values. `batch` holds one micro-batch of one virtual rank and `scale` is 1 / (samples
    /// of the whole global batch), so that the sum of all leaves is the gradient of the mean loss. With
    /// fp16 all this is times the loss's own factor.
    ///
    /// Yields the sum of losses, without any factor.
    ///
    /// # Errors
    /// The device failed, or a label is out of range.
    fn gradient(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut Self::Leaf,
    ) -> Result<Self::Loss, Error>;

    /// Writes the L2 norm of the summed gradient, without the loss's factor, and that factor into the
    /// tail.
    ///
    /// # Errors
    /// The device failed.
    fn measure(&mut self, sum: &mut Self::Leaf) -> Result<(), Error>;

    /// One optimizer update from the measured sum of all leaves, which is of no use afterwards.
    ///
    /// # Errors
    /// The device failed.
    fn update(&mut self, sum: &mut Self::Leaf, update: &Update) -> Result<(), Error>;

    /// Loss, correct guesses and predictions in evaluation mode; changes no state.
    ///
    /// # Errors
    /// The device failed, or a label is out of range.
    fn evaluate(&mut self, batch: &Batch, weights: Weights) -> Result<Judged, Error>;

    /// The whole state, in a fixed order.
    fn regions(&mut self) -> Vec<Region<'_>>;

    /// Where each named tensor lies, for export.
    fn tensors(&self) -> Vec<TensorPlace>;
}

/// Why a learner failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// libtorch refused.
    #[error("{operation}: {message}")]
    Torch {
        /// What was being done.
        operation: &'static str,
        /// libtorch's first line.
        message: String,
    },
    /// There was too little memory.
    #[error("{operation}: {message}")]
    OutOfMemory {
        /// Whose memory.
        memory: Memory,
        /// What was being done.
        operation: &'static str,
        /// libtorch's first line.
        message: String,
    },
    /// A sample's label does not fit the model.
    #[error(
        "sample {sample} has label {label}, but model.num_classes = {num_classes}: raise it or mend the data set"
    )]
    Label {
        /// Position in the data set.
        sample: u64,
        /// The label found.
        label: i64,
        /// Outputs of the model.
        num_classes: u32,
    },
    /// No such device.
    #[error("{0}")]
    Device(String),
    /// A GPU or its driver failed.
    #[error(transparent)]
    Gpu(#[from] baton_gpu::Error),
    /// The recipe asks for something that this model does not have.
    #[error("{0}")]
    Recipe(String),
}

/// A memory that can be too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// The machine's.
    Host,
    /// A GPU's.
    Gpu,
}

impl Error {
    /// The memory that was too small, if that is what went wrong.
    #[must_use]
    pub fn out_of_memory(&self) -> Option<Memory> {
        match self {
            Self::OutOfMemory { memory, .. } => Some(*memory),
            Self::Gpu(error) => error.is_out_of_memory().then_some(Memory::Gpu),
            _ => None,
        }
    }
}
