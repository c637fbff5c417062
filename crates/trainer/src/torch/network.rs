//! What the learner needs of a network. Three implementations: [`layers`](super::layers) for the networks of
//! `crates/model`, [`program`](super::program) for those that `torch.export` wrote, [`decoder`](super::decoder) for
//! language models.

use std::fmt::Debug;

use baton_data::random::Draws;
use baton_model::{InputShape, NetworkDescription};
use baton_recipe::spec::Pointwise;
use tch::{Kind, Tensor};

use crate::{
    learner::Error,
    sampling::{Prompt, Sampling},
};

/// A network on a device. Its state belongs to the learner.
pub(super) trait TorchNetwork: Debug + Send {
    /// Its tensors.
    fn description(&self) -> &NetworkDescription;

    /// Digest of its definition, if that is a file.
    fn digest(&self) -> Option<&str> {
        None
    }

    /// Smallest batch size with which every BatchNorm layer gets more than one value per channel.
    fn min_batch(&self, input: InputShape) -> u64 {
        self.description().min_batch(input)
    }

    /// Share of a running statistic that one update replaces; torch's `momentum`.
    fn momentum(&self, _statistic: usize) -> f64 {
        0.1
    }

    /// The values to start from by name, if they are not those of [`baton_model::Init`].
    ///
    /// # Errors
    /// They cannot be read.
    fn initial_values(&self) -> Result<Option<Vec<(String, Tensor)>>, Error> {
        Ok(None)
    }

    /// The inputs, with each sample's shape in the data, in the form that it takes.
    ///
    /// # Errors
    /// It does not take inputs of this shape.
    fn prepared(&self, inputs: NetworkInputs) -> Result<NetworkInputs, Error>;

    /// Number format of its inputs.
    fn input_kind(&self) -> Kind;

    /// [`Learner::measure_pointwise`](crate::Learner::measure_pointwise).
    ///
    /// # Errors
    /// Out of memory.
    fn measure_pointwise(&self) -> tch::Result<Option<Pointwise>> {
        Ok(None)
    }

    /// [`Learner::set_pointwise`](crate::Learner::set_pointwise).
    fn set_pointwise(&mut self, _measured: Option<Pointwise>) {}

    /// Outputs (samples, outputs), f32, of a pass without a gradient. `is_interrupted` is called several times; `None`
    /// if it returned true.
    ///
    /// # Errors
    /// The device failed.
    fn outputs(
        &self,
        inputs: &NetworkInputs,
        state: NetworkState<'_>,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Tensor>, Error>;

    /// Scores of all classes, if the outputs are losses.
    ///
    /// # Errors
    /// The device failed.
    fn scores(
        &self,
        _inputs: &NetworkInputs,
        _state: NetworkState<'_>,
    ) -> Result<Option<Tensor>, Error> {
        Ok(None)
    }

    /// Continues texts: see [`TorchLearner::generate`](super::TorchLearner::generate). Returns false if a score is not
    /// finite; all texts end there.
    ///
    /// # Errors
    /// The network has no texts; the device failed.
    fn generate(
        &self,
        _prompts: &[Prompt],
        _state: NetworkState<'_>,
        _sampling: &Sampling,
        _on_token: &mut dyn FnMut(usize, i64) -> bool,
    ) -> Result<bool, Error> {
        Err(Error::Recipe("model.arch: only a causal_lm generates text".to_owned()))
    }

    /// The parameters, by index, whose gradients are computed in each stage of a backward pass, the last stage left out. One
    /// stage by default.
    fn stages(&self) -> Vec<Vec<usize>> {
        Vec::new()
    }

    /// Outputs, loss and gradients of a batch. `loss(outputs)` returns the loss to report, and the scalar to
    /// differentiate. `finished` is called after each of the [`stages`](Self::stages) with its gradients, which are then
    /// not in the result.
    ///
    /// # Errors
    /// The device failed; those of `finished`.
    fn gradients(
        &self,
        inputs: &NetworkInputs,
        state: NetworkState<'_>,
        random: Draws,
        loss: &mut dyn FnMut(&Tensor) -> tch::Result<(Tensor, Tensor)>,
        finished: Option<&mut StageFinished<'_>>,
    ) -> Result<PassResult, Error>;
}

/// Gets the gradients of a stage with the index of their parameter.
pub(super) type StageFinished<'a> = dyn FnMut(Vec<(usize, Tensor)>) -> Result<(), Error> + 'a;

/// A batch on the device.
#[derive(Debug)]
pub(super) struct NetworkInputs {
    /// Images, shape (samples, 3, resolution, resolution), in channels-last memory format if the network uses it; or
    /// arrays, shape (samples, …); or the tokens of all texts, i64, shape (tokens).
    pub(super) main: Tensor,
    /// Values of the extra fields, f32, shape (samples, values) until they are prepared. For texts: the position of the
    /// token before each label, i64, shape (labels).
    pub(super) extras: Vec<Tensor>,
    /// Labels, i64, shape (samples); or values, f32, shape (samples, outputs). For texts: the tokens to be predicted, i64,
    /// shape (labels).
    pub(super) targets: Tensor,
    /// Number of tokens of each text; empty for others.
    pub(super) lengths: Vec<i64>,
}

/// The tensors that a pass uses; the lists have the order of those in the [`NetworkDescription`].
#[derive(Clone, Copy)]
pub(super) struct NetworkState<'a> {
    pub(super) parameters: &'a [Tensor],
    /// Running statistics, for BatchNorm layers that do not use those of the batch.
    pub(super) running: &'a [Tensor],
    /// Receives the batch's mean and unbiased variance, in the order of `running`. `None`: use `running`.
    pub(super) batch: Option<&'a [Tensor]>,
}

/// Result of a pass.
pub(super) struct PassResult {
    /// Outputs (samples, outputs), detached.
    pub(super) outputs: Tensor,
    /// The loss, detached.
    pub(super) loss: Tensor,
    /// Gradients with the index of their parameter. Frozen parameters have none, nor have those without influence.
    pub(super) gradients: Vec<(usize, Tensor)>,
}
