//! [`TorchLearner`], a network with its optimizer, and [`TorchLeaf`], one contribution to an update.

use std::{ops::Range, path::PathBuf};

use baton_checkpoint::Float;
use baton_collectives::BufferMut;
use baton_data::{
    Batch, InputType,
    mix::Mix,
    random::{Draws, RandomPurpose},
};
use baton_gpu::Readback;
use baton_job::message::GeneratedText;
use baton_model::{InputShape, NetworkDescription};
use baton_recipe::{
    JobSpec,
    spec::{Adapter, Augment, Pointwise},
};
use tch::{Device, Kind, Tensor};

use super::{
    buffer::lend,
    completions::Completions,
    decoder::{DecoderNetwork, LoadedModel},
    failure::During,
    flat::{self, FlatLayout, FlatTensor, views},
    fused::Fused,
    init,
    input::{DeviceInput, signal_shape},
    layers::LayeredNetwork,
    mixing,
    network::{NetworkInputs, NetworkState, StageFinished, TorchNetwork},
    optimizer::{Optimizer, Rates},
    profiler,
    program::ProgramNetwork,
    task::{self, Task},
    weights,
    working::{self, FrozenTensors, WorkingWeights},
};
use crate::{
    learner::{
        BatchEvaluation, DeferredScalar, Error, EvaluatedWeights, Leaf, Learner, Region,
        SpanCompleted, Summand, TAIL, TensorLocation, Update, VOTE, rest,
    },
    profile::DeviceSpan,
    sampling::{Prompt, Sampling},
};

/// The statistics that BatchNorm uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchNormMode {
    /// Those of the batch.
    Training,
    /// The running averages.
    Evaluation,
}

/// A network and its optimizer on one device.
///
/// Regions, all f32: `weights`; with the same length and order the optimizer's `momentum` (SGD, LARS) or `exp_avg` and
/// `exp_avg_sq` (AdamW, LAMB, Muon) and the averaged weights `ema`; with fp16 the three values of `loss_scale`; `bn_running` and
/// its average `bn_running_ema`; `frozen`, if any block is frozen.
#[derive(Debug)]
pub struct TorchLearner {
    device: Device,
    pub(super) network: Box<dyn TorchNetwork>,
    pub(super) layout: FlatLayout,
    pub(super) recipe: Recipe,
    pub(super) input: DeviceInput,
    pub(super) task: Box<dyn Task>,
    /// `None` if evaluations write no texts.
    completions: Option<Completions>,
    optimizer: Optimizer,
    /// `None` if the recipe uses only libtorch's kernels.
    fused: Option<Fused>,
    pub(super) weights: Tensor,
    pub(super) running: Tensor,
    /// Parameters and statistics of frozen blocks.
    pub(super) frozen: FrozenTensors,
    /// Readable copies of `weights`; their gradients are computed.
    pub(super) working: WorkingWeights,
    /// Views of `running`.
    pub(super) running_views: Vec<Tensor>,
    averaged: Option<Averaged>,
    /// Ranges of the running statistics with the share that an update replaces.
    momenta: Vec<(i64, i64, f64)>,
    /// The largest range of each stage of the backward pass but the last.
    spans: Vec<Range<usize>>,
}

/// Fields of the recipe that the learner reads at every step.
#[derive(Debug)]
pub(super) struct Recipe {
    pub(super) seed: u64,
    augment: Augment,
    pretrained: Option<Pretrained>,
    pub(super) adapter: Option<Adapter>,
    /// Evaluate mirrored images too.
    flip: bool,
}

#[derive(Debug)]
struct Pretrained {
    path: PathBuf,
    head: weights::Head,
}

/// The averaged model; the optimizer owns its weights.
#[derive(Debug)]
struct Averaged {
    running: Tensor,
    running_views: Vec<Tensor>,
    working: WorkingWeights,
}

/// Batch statistics, gradient and tail, in this order, in one tensor.
#[derive(Debug)]
pub struct TorchLeaf {
    flat: Tensor,
    /// Views of `flat`.
    pub(super) statistics: Tensor,
    pub(super) gradient: Tensor,
    tail: Tensor,
    /// Views of `statistics`, one per running statistic of the network.
    pub(super) statistics_views: Vec<Tensor>,
    /// The copy of the tail from a GPU, once it was started.
    readback: Option<Readback<TAIL>>,
    is_readback_started: bool,
}

/// A batch's loss, a scalar on the device; `None` for an empty batch.
#[derive(Debug)]
pub struct TorchLoss(Option<Tensor>);

impl DeferredScalar for TorchLoss {
    fn value(&self) -> Result<f64, Error> {
        self.0.as_ref().map_or(Ok(0.0), |loss| f64::try_from(loss).during("read the loss"))
    }
}

impl TorchLearner {
    /// The network of `spec.model` for inputs of this type, with initial values from `spec.seed`, on `device` (see
    /// [`device::open`](super::device::open)).
    ///
    /// # Errors
    /// `model.arch` is not made of layers; out of memory.
    pub fn new(spec: &JobSpec, input_type: &InputType, device: Device) -> Result<Self, Error> {
        let mut learner = Self::blank(spec, input_type, device)?;
        learner.initialise()?;
        Ok(learner)
    }

    /// The same with zero weights, to be [initialised](Learner::initialise) or restored later.
    ///
    /// # Errors
    /// `model.arch` is not made of layers; out of memory.
    pub fn blank(spec: &JobSpec, input_type: &InputType, device: Device) -> Result<Self, Error> {
        Self::blank_with(spec, input_type, device, None)
    }

    /// The same with frozen weights that are loaded.
    ///
    /// # Errors
    /// As [`blank`](Self::blank).
    pub fn blank_with(
        spec: &JobSpec,
        input_type: &InputType,
        device: Device,
        loaded: Option<LoadedModel>,
    ) -> Result<Self, Error> {
        if spec.model.arch.is_program() {
            let network = Box::new(ProgramNetwork::read(spec, input_type, device)?);
            return Self::with(spec, network, None, device);
        }
        if spec.model.arch.is_causal_lm() {
            let completions = Completions::of(spec)?;
            let network = Box::new(DecoderNetwork::read(spec, device, loaded)?);
            return Ok(Self { completions, ..Self::with(spec, network, None, device)? });
        }
        let channels = match input_type {
            InputType::Image | InputType::Tokens => 3,
            InputType::Array(shape) => signal_shape(shape).map_or(1, |[channels, _]| channels),
        };
        let network = spec.model.describe(channels as u64).ok_or_else(|| {
            Error::Recipe(format!(
                "model.arch = {:?} is only for trying out training, and cannot be evaluated or compared here: choose another",
                spec.model.arch.name()
            ))
        })?;
        Self::with_network(spec, network, device)
    }

    /// Like [`blank`](Self::blank), with `network` in place of the recipe's.
    ///
    /// # Errors
    /// Out of memory.
    pub fn with_network(
        spec: &JobSpec,
        network: NetworkDescription,
        device: Device,
    ) -> Result<Self, Error> {
        let fused = spec.precision.fused.then(|| Fused::on(device)).transpose()?;
        let network = LayeredNetwork::new(spec, network, fused, device);
        Self::with(spec, Box::new(network.during("build the network")?), fused, device)
    }

    fn with(
        spec: &JobSpec,
        network: Box<dyn TorchNetwork>,
        fused: Option<Fused>,
        device: Device,
    ) -> Result<Self, Error> {
        let input =
            DeviceInput::new(&spec.data, device, spec.model.channels_last, network.input_kind())?;
        Self::build(spec, device, network, input, fused).during("build the network")
    }

    fn build(
        spec: &JobSpec,
        device: Device,
        network: Box<dyn TorchNetwork>,
        input: DeviceInput,
        fused: Option<Fused>,
    ) -> tch::Result<Self> {
        let layout = FlatLayout::new(network.description(), spec.model.channels_last);
        let float = (Kind::Float, device);
        let weights = Tensor::f_zeros([layout.parameters_len()], float)?;
        let running = Tensor::f_zeros([layout.statistics_len()], float)?;
        let kind = working::kind(spec.precision.compute);
        let frozen = FrozenTensors::new(&layout, kind, device)?;
        let working = WorkingWeights::new(&layout, &weights, &frozen, kind)?;
        working.require_gradients(&layout)?;
        let optimizer = Optimizer::new(spec, &layout, device)?;
        let averaged = match optimizer.averaged() {
            None => None,
            Some(averaged) => {
                let working = WorkingWeights::new(&layout, averaged, &frozen, kind)?;
                let running = running.f_zeros_like()?;
                let running_views = views(&layout.statistics, &running, &frozen.masters)?;
                Some(Averaged { running, running_views, working })
            }
        };
        let momenta = layout.trained_statistics(|index| network.momentum(index));
        let stages = network.stages().into_iter();
        let spans = stages.map(|stage| layout.span_of(&stage)).collect();
        let model = &spec.model;
        let pretrained = (!model.pretrained.is_empty()).then(|| Pretrained {
            path: model.pretrained.clone().into(),
            head: if model.new_head { weights::Head::New } else { weights::Head::FromFile },
        });
        Ok(Self {
            device,
            input,
            task: task::of(spec, device)?,
            completions: None,
            optimizer,
            running_views: views(&layout.statistics, &running, &frozen.masters)?,
            momenta,
            spans,
            fused,
            recipe: Recipe {
                seed: spec.seed,
                augment: spec.augment.clone(),
                pretrained,
                adapter: spec.adapter.clone(),
                flip: spec.evaluation.flip,
            },
            network,
            layout,
            weights,
            running,
            frozen,
            working,
            averaged,
        })
    }

    /// Outputs for `batch`, f32, shape (samples, classes); changes no state and records no gradient.
    ///
    /// # Errors
    /// The device failed; the number of input values does not match the batch's size and shape.
    pub fn logits(&mut self, batch: &Batch, mode: BatchNormMode) -> Result<Tensor, Error> {
        let _no_grad = tch::no_grad_guard();
        self.refresh()?;
        let inputs = self.network.prepared(self.input.load(batch)?)?;
        let spare = self.running.f_zeros_like();
        let spare =
            spare.and_then(|spare| views(&self.layout.statistics, &spare, &self.frozen.masters));
        let spare = spare.during("allocate statistics")?;
        let batch = match mode {
            BatchNormMode::Evaluation => None,
            BatchNormMode::Training => Some(spare.as_slice()),
        };
        let state = state(&self.working, &self.running_views, batch);
        let outputs = self.network.outputs(&inputs, state, &mut || false)?;
        // It was not interrupted.
        outputs.ok_or_else(|| Error::Recipe("the forward pass was interrupted".to_owned()))
    }

    /// The network's inputs for a training batch, shape (samples, channels, …), and how they are mixed.
    ///
    /// # Errors
    /// The device failed; the number of input values does not match the batch's size and shape.
    pub fn mixed(&mut self, batch: &Batch) -> Result<(Tensor, Mix), Error> {
        let (inputs, mix) = self.load_mixed(batch)?;
        Ok((inputs.main, mix))
    }

    fn load_mixed(&mut self, batch: &Batch) -> Result<(NetworkInputs, Mix), Error> {
        let inputs = self.network.prepared(self.input.load(batch)?)?;
        let mix = Mix::of_batch(self.recipe.seed, batch, &self.recipe.augment);
        let main = mixing::inputs(&inputs.main, &mix).during("mix inputs")?;
        Ok((NetworkInputs { main, ..inputs }, mix))
    }

    /// Copies of every weight and running statistic, on the CPU, with their names, in the order of a state dict.
    ///
    /// # Errors
    /// Out of memory.
    pub fn state_dict(&self) -> Result<Vec<(String, Tensor)>, Error> {
        let tensors = self.state_views()?;
        tensors
            .into_iter()
            .map(|(entry, view)| Ok((entry.name.clone(), copy_out(&view)?)))
            .collect()
    }

    /// Copies of the gradients in `leaf`, on the CPU, with their names, in the order of the description.
    ///
    /// # Errors
    /// Out of memory.
    pub fn gradients(&self, leaf: &TorchLeaf) -> Result<Vec<(String, Tensor)>, Error> {
        let entries = self.layout.parameters.iter().filter(|entry| !entry.frozen);
        let view = |entry: &FlatTensor| entry.view(&leaf.gradient).during("view gradients");
        entries.map(|entry| Ok((entry.name.clone(), copy_out(&view(entry)?)?))).collect()
    }

    /// Views of every weight and running statistic in the order of a state dict. Writing to a view changes the learner;
    /// all views must be dropped before [`Learner::regions`] gives access to the same memory.
    pub(super) fn state_views(&self) -> Result<Vec<(&FlatTensor, Tensor)>, Error> {
        let entries = self.layout.state_dict().into_iter();
        let views = entries.map(|(entry, region)| {
            let buffer = match region {
                flat::WEIGHTS => &self.weights,
                flat::BN_RUNNING => &self.running,
                _ => &self.frozen.masters,
            };
            Ok((entry, entry.view(buffer)?))
        });
        views.collect::<tch::Result<_>>().during("view the state")
    }

    /// The network that it trains.
    #[must_use]
    pub fn network(&self) -> &NetworkDescription {
        self.network.description()
    }

    /// Names of the head's tensors.
    pub(super) fn head(&self) -> impl Iterator<Item = &str> {
        let parameters = &self.layout.parameters[self.network().head.parameters.clone()];
        parameters.iter().map(|entry| entry.name.as_str())
    }

    /// Marks the working copies as stale after a change of the f32 weights.
    pub(super) fn invalidate(&mut self) {
        self.working.cast.invalidate();
        self.frozen.cast.invalidate();
        if let Some(averaged) = &mut self.averaged {
            averaged.working.cast.invalidate();
        }
    }

    /// Continues each prompt, all of them at the same time. `on_token` gets the position of a prompt and its next token;
    /// generation ends early when it returns false.
    ///
    /// # Errors
    /// The network is no language model; a score is not finite; the device failed.
    pub fn generate(
        &mut self,
        prompts: &[Prompt],
        sampling: &Sampling,
        on_token: &mut dyn FnMut(usize, i64) -> bool,
    ) -> Result<(), Error> {
        self.refresh()?;
        let state = state(&self.working, &self.running_views, None);
        match self.network.generate(prompts, state, sampling, on_token)? {
            true => Ok(()),
            false => Err(Error::Recipe(
                "the model's scores are not finite: set precision.compute = fp32, and check the weights"
                    .to_owned(),
            )),
        }
    }

    /// Prepares the weights for [`evaluation_state`](Self::evaluation_state).
    fn refresh_for_evaluation(&mut self) -> Result<(), Error> {
        self.refresh()?;
        if let (Some(averaged), Some(masters)) = (&mut self.averaged, self.optimizer.averaged()) {
            averaged.working.cast.refresh(masters).during("cast weights")?;
        }
        Ok(())
    }

    fn evaluation_state(&self, weights: EvaluatedWeights) -> NetworkState<'_> {
        match (weights, &self.averaged) {
            (EvaluatedWeights::Averaged, Some(averaged)) => {
                state(&averaged.working, &averaged.running_views, None)
            }
            _ => state(&self.working, &self.running_views, None),
        }
    }

    pub(super) fn refresh(&mut self) -> Result<(), Error> {
        let refreshed = self.working.cast.refresh(&self.weights);
        refreshed.and_then(|()| self.frozen.refresh()).during("cast weights")
    }

    pub(super) fn leaf(&self) -> tch::Result<TorchLeaf> {
        let start = self.layout.gradient_start();
        let gradient = self.layout.parameters_len();
        let len = start + gradient + TAIL as i64;
        let flat = Tensor::f_zeros([len], (Kind::Float, self.device))?;
        Ok(TorchLeaf {
            statistics: flat.f_narrow(0, 0, self.layout.statistics_len())?,
            gradient: flat.f_narrow(0, start, gradient)?,
            tail: flat.f_narrow(0, start + gradient, TAIL as i64)?,
            statistics_views: views(&self.layout.statistics, &flat, &self.frozen.masters)?,
            readback: None,
            is_readback_started: false,
            flat,
        })
    }

    fn gradient_of(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut TorchLeaf,
        completed: Option<&mut SpanCompleted<'_, TorchLeaf>>,
    ) -> Result<TorchLoss, Error> {
        leaf.is_readback_started = false;
        if batch.is_empty() {
            leaf.clear(&self.running).during("clear a leaf")?;
            return Ok(TorchLoss(None));
        }
        let size = size_of(batch);
        if (batch.len() as u64) < self.network.min_batch(size) {
            let side = size.size().width;
            return Err(Error::Recipe(format!(
                "batch normalisation: one sample of side {side} leaves one value per channel, which has no variance: \
                 raise train.global_batch or train.resolution, lower train.virtual_ranks or train.grad_accumulation, \
                 or set data.drop_last"
            )));
        }
        self.task.check(batch)?;
        self.refresh()?;
        let mixed = self.load_mixed(batch)?;
        // Momentum 1 multiplies the old value by 0, which would keep infinities and NaNs.
        let _ = leaf.statistics.f_zero_().during("clear statistics")?;
        self.pass(batch, &mixed, scale, leaf, completed)
    }

    /// Computes the gradient of the scaled loss of a batch, given with its mixed inputs, and writes it into `leaf`, with
    /// the batch's sums.
    fn pass(
        &self,
        batch: &Batch,
        (inputs, mix): &(NetworkInputs, Mix),
        scale: f32,
        leaf: &TorchLeaf,
        completed: Option<&mut SpanCompleted<'_, TorchLeaf>>,
    ) -> Result<TorchLoss, Error> {
        let targets = &inputs.targets;
        let state = state(&self.working, &self.running_views, Some(&leaf.statistics_views));
        let factor = self.optimizer.loss_scale().during("loss scale")?;
        let mut loss = |outputs: &Tensor| {
            let loss = mixing::loss(&*self.task, outputs, targets, mix)?;
            let scaled = loss.f_mul_scalar(f64::from(scale))?;
            match &factor {
                None => Ok((loss, scaled)),
                Some(factor) => Ok((loss, scaled.f_mul(factor)?)),
            }
        };
        let first = batch.samples.first().copied().unwrap_or_default();
        let random = Draws::new(self.recipe.seed, batch.epoch, first, RandomPurpose::Layer);
        let result = match completed {
            None => {
                let result = self.network.gradients(inputs, state, random, &mut loss, None)?;
                let whole = rest(&[], leaf.gradient.numel());
                self.write_gradients(&result.gradients, &leaf.gradient, &whole)?;
                result
            }
            Some(completed) => {
                let start = self.layout.gradient_start() as usize;
                let spans = self.spans.iter().map(|span| span.start - start..span.end - start);
                let spans: Vec<Range<usize>> = spans.collect();
                let gradient = &untracked(&leaf.gradient).during("view a leaf")?;
                let (mut stage, mut others) = (0, Vec::new());
                let mut finish = |mut gradients: Vec<(usize, Tensor)>| {
                    let Some(span) = spans.get(stage) else {
                        others.append(&mut gradients);
                        return Ok(());
                    };
                    self.write_gradients(&gradients, gradient, std::slice::from_ref(span))?;
                    let offset = |index: usize| self.layout.parameters[index].offset as usize;
                    gradients.retain(|(index, _)| !span.contains(&offset(*index)));
                    others.append(&mut gradients);
                    stage += 1;
                    completed(leaf)
                };
                let gradients = Some(&mut finish as &mut StageFinished<'_>);
                let mut result =
                    self.network.gradients(inputs, state, random, &mut loss, gradients)?;
                result.gradients.append(&mut others);
                let rest = rest(&spans, leaf.gradient.numel());
                self.write_gradients(&result.gradients, gradient, &rest)?;
                result
            }
        };
        let first_metric = self.task.first_metric(&result.outputs, targets);
        first_metric
            .and_then(|sum| leaf.set_sums(Some(&result.loss), sum.as_ref(), targets.size()[0]))
            .during("sum up the batch")?;
        Ok(TorchLoss(Some(result.loss)))
    }

    /// Writes those gradients that are in `ranges` of the flat gradient `to`, and zeros as padding between them.
    ///
    /// This is one gradient per parameter, then one concatenation. The alternative, `grad().set_data(view)` once and
    /// backward accumulating into the views, is slower: the views must be zeroed and then read as well as written
    /// (ResNet-50, one CPU thread: 40 ms against 16 ms). The views could not be in the leaf either: see [`untracked`].
    pub(super) fn write_gradients(
        &self,
        gradients: &[(usize, Tensor)],
        to: &Tensor,
        ranges: &[Range<usize>],
    ) -> Result<(), Error> {
        let write = || {
            for range in ranges {
                let (start, end) = (range.start as i64, range.end as i64);
                let mut flat: Vec<(i64, Tensor)> = Vec::with_capacity(gradients.len() + 1);
                for (index, gradient) in gradients {
                    let entry = &self.layout.parameters[*index];
                    // One without values has the offset of its neighbour.
                    if entry.len() > 0 && (start..end).contains(&entry.offset) {
                        flat.push((entry.offset, entry.flatten(gradient)?));
                    }
                }
                flat.sort_by_key(|(offset, _)| *offset);
                flat.push((end, to.f_narrow(0, 0, 0)?));
                let (mut whole, mut at) = (Vec::with_capacity(flat.len()), start);
                for (offset, gradient) in flat {
                    if at < offset {
                        whole.push(to.f_new_zeros([offset - at], (Kind::Float, self.device))?);
                    }
                    at = offset + gradient.size1()?;
                    whole.push(gradient);
                }
                let _ = Tensor::f_cat_out(&to.f_narrow(0, start, end - start)?, &whole, 0)?;
            }
            Ok(())
        };
        write().during("collect gradients")
    }

    /// `running = (1 - momentum) * running + momentum * mean`, for the mean over the micro-batches.
    pub(super) fn mix_statistics(&self, mean: &Tensor) -> tch::Result<()> {
        self.momenta.iter().try_for_each(|&(start, len, momentum)| {
            let mean = mean.f_narrow(0, start, len)?;
            self.running.f_narrow(0, start, len)?.f_lerp_(&mean, momentum).map(drop)
        })
    }

    /// Evaluates a batch that is not empty, and returns the network's outputs too, f32 of shape (samples, outputs) in the order
    /// of the batch.
    ///
    /// # Errors
    /// A target is invalid, or libtorch fails.
    pub fn evaluate_samples(
        &mut self,
        batch: &Batch,
        weights: EvaluatedWeights,
    ) -> Result<(BatchEvaluation, Vec<f32>), Error> {
        match self.evaluation_of(batch, weights, &mut || false)? {
            Some((evaluation, outputs)) => Ok((evaluation, values_of(&outputs)?)),
            None => Ok((BatchEvaluation::default(), Vec::new())),
        }
    }

    /// The network's outputs for a batch that is not empty, whatever its labels: f32, shape (samples, outputs).
    ///
    /// # Errors
    /// libtorch fails.
    pub fn predict(&mut self, batch: &Batch, weights: EvaluatedWeights) -> Result<Vec<f32>, Error> {
        let outputs = self.outputs_of(batch, weights, &mut || false)?;
        outputs.map_or_else(|| Ok(Vec::new()), |(_, outputs)| values_of(&outputs))
    }

    /// The evaluation of a batch with the network's outputs; `None` if it was interrupted.
    fn evaluation_of(
        &mut self,
        batch: &Batch,
        weights: EvaluatedWeights,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<(BatchEvaluation, Tensor)>, Error> {
        let _no_grad = tch::no_grad_guard();
        self.task.check(batch)?;
        let Some((inputs, outputs)) = self.outputs_of(batch, weights, is_interrupted)? else {
            return Ok(None);
        };
        let evaluation = self.task.evaluate(batch, &outputs, &inputs.targets);
        Ok(Some((evaluation.during("loss and metrics")?, outputs)))
    }

    /// The inputs of a batch and the network's outputs for them; `None` if it was interrupted.
    fn outputs_of(
        &mut self,
        batch: &Batch,
        weights: EvaluatedWeights,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<(NetworkInputs, Tensor)>, Error> {
        let _no_grad = tch::no_grad_guard();
        self.refresh_for_evaluation()?;
        let inputs = self.network.prepared(self.input.load(batch)?)?;
        let state = self.evaluation_state(weights);
        let outputs = self.evaluation_outputs(&inputs, state, is_interrupted)?;
        Ok(outputs.map(|outputs| (inputs, outputs)))
    }

    /// Outputs in evaluation mode, averaged with those for the mirrored images if the recipe requests it.
    fn evaluation_outputs(
        &self,
        inputs: &NetworkInputs,
        state: NetworkState<'_>,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Tensor>, Error> {
        let mut forward =
            |inputs: &NetworkInputs| self.network.outputs(inputs, state, is_interrupted);
        if !self.recipe.flip {
            return forward(inputs);
        }
        // Before the first pass: a program may change its inputs in place.
        let copies = inputs.extras.iter().map(Tensor::f_alias_copy).collect::<Result<_, _>>();
        let mirrored = NetworkInputs {
            main: inputs.main.f_flip([-1]).during("mirror the images")?,
            extras: copies.during("copy the inputs")?,
            targets: inputs.targets.shallow_clone(),
            lengths: inputs.lengths.clone(),
        };
        let Some(outputs) = forward(inputs)? else { return Ok(None) };
        let Some(mirrored) = forward(&mirrored)? else { return Ok(None) };
        let sum = outputs.f_add(&mirrored);
        sum.and_then(|sum| sum.f_div_scalar(2.0)).map(Some).during("average the outputs")
    }
}

impl Learner for TorchLearner {
    type Leaf = TorchLeaf;
    type Loss = TorchLoss;

    fn runs_ahead(&self) -> bool {
        self.device != Device::Cpu
    }

    fn prefetch(&mut self, batch: &Batch) -> Result<(), Error> {
        self.input.prefetch(batch)
    }

    fn begin_profile(&mut self) -> Result<(), Error> {
        profiler::start(self.device)
    }

    fn end_profile(&mut self) -> Result<Vec<DeviceSpan>, Error> {
        profiler::stop()
    }

    fn new_leaf(&mut self) -> Result<TorchLeaf, Error> {
        self.leaf().during("allocate a leaf")
    }

    fn initialise(&mut self) -> Result<(), Error> {
        let _no_grad = tch::no_grad_guard();
        self.invalidate();
        if let Some(values) = self.network.initial_values()? {
            let mut views = self.state_views()?;
            for (entry, view) in &mut views {
                if let Some((_, value)) = values.iter().find(|(name, _)| *name == entry.name) {
                    view.f_copy_(value).during("set the initial weights")?;
                }
            }
            return Ok(());
        }
        let (seed, frozen) = (self.recipe.seed, &self.frozen.masters);
        init::fill(&self.weights, frozen, &self.layout.parameters, seed)
            .and_then(|()| init::fill(&self.running, frozen, &self.layout.statistics, seed))
            .during("set the initial weights")
    }

    fn load_initial(&mut self) -> Result<(), Error> {
        let Some(Pretrained { path, head }) = &self.recipe.pretrained else { return Ok(()) };
        let (path, head) = (path.clone(), *head);
        let unusable = |problem: String| Error::Recipe(format!("model.pretrained: {problem}"));
        // The file is read as a whole: not before it is known to be one of weights.
        baton_checkpoint::check_weights_file(&path).map_err(unusable)?;
        weights::load(self, &path, head).map_err(|error| match error {
            weights::Error::Learner(error) => error,
            error => unusable(error.to_string()),
        })
    }

    fn measure_pointwise(&mut self) -> Result<Option<Pointwise>, Error> {
        self.network.measure_pointwise().during("measure 1×1 convolutions")
    }

    fn set_pointwise(&mut self, measured: Option<Pointwise>) {
        self.network.set_pointwise(measured);
    }

    fn gradient(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut TorchLeaf,
    ) -> Result<TorchLoss, Error> {
        self.gradient_of(batch, scale, leaf, None)
    }

    fn spans(&self) -> &[Range<usize>] {
        &self.spans
    }

    fn gradient_in_spans(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut TorchLeaf,
        completed: &mut SpanCompleted<'_, TorchLeaf>,
    ) -> Result<TorchLoss, Error> {
        self.gradient_of(batch, scale, leaf, Some(completed))
    }

    fn measure(&mut self, sum: &mut TorchLeaf) -> Result<(), Error> {
        let measure = || {
            self.optimizer.measure(&sum.gradient, &mut sum.norm()?)?;
            if let Some(scale) = self.optimizer.loss_scale()? {
                sum.tail.f_select(0, VOTE.end as i64 + 1)?.f_copy_(&scale)?;
            }
            Ok(())
        };
        measure().during("norm of the gradient")
    }

    fn update(&mut self, sum: &mut TorchLeaf, update: &Update) -> Result<(), Error> {
        let Update { step, lr, micro_batches } = *update;
        let norm = sum.norm().during("norm of the gradient")?;
        let rates = Rates { step, lr };
        match self.fused.filter(|_| self.optimizer.is_sgd()) {
            None => {
                self.optimizer
                    .update(&mut self.weights, &sum.gradient, &norm, rates)
                    .during("optimizer update")?;
                self.working.cast.invalidate();
            }
            Some(fused) => {
                let weights = (&self.weights, self.working.cast.copy());
                self.optimizer
                    .update_fused(fused, weights, &sum.gradient, &norm, rates)
                    .during("optimizer update")?;
            }
        }
        let mean = sum.statistics.f_div_scalar_(i64::from(micro_batches));
        mean.and_then(|mean| self.mix_statistics(&mean)).during("statistics update")?;
        if let (Some(share), Some(averaged)) =
            (self.optimizer.averaging_share(step), &mut self.averaged)
        {
            let _ = averaged.running.f_lerp_(&self.running, share).during("statistics update")?;
            averaged.working.cast.invalidate();
        }
        Ok(())
    }

    fn evaluate(
        &mut self,
        batch: &Batch,
        weights: EvaluatedWeights,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<BatchEvaluation>, Error> {
        if batch.is_empty() {
            return Ok(Some(BatchEvaluation::default()));
        }
        let evaluated = self.evaluation_of(batch, weights, is_interrupted)?;
        Ok(evaluated.map(|(evaluation, _)| evaluation))
    }

    fn write_texts(
        &mut self,
        batch: &Batch,
        weights: EvaluatedWeights,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Vec<GeneratedText>>, Error> {
        self.refresh_for_evaluation()?;
        let Some(completions) = &self.completions else { return Ok(Some(Vec::new())) };
        completions.write(batch, &*self.network, self.evaluation_state(weights), is_interrupted)
    }

    fn program(&self) -> Option<&str> {
        self.network.digest()
    }

    fn regions(&mut self) -> Vec<Region<'_>> {
        // The caller may write to the regions.
        self.invalidate();
        let averaged = self.averaged.as_mut();
        let averaged_running = averaged.map(|averaged| ("bn_running_ema", &mut averaged.running));
        let weights = (flat::WEIGHTS, &mut self.weights);
        let running = (flat::BN_RUNNING, &mut self.running);
        let state = self.optimizer.state();
        let all = std::iter::once(weights).chain(state).chain([running]).chain(averaged_running);
        let all = all.map(|(name, tensor)| Region { name, buffer: lend(tensor), frozen: None });
        let frozen = (self.layout.frozen_len() > 0).then(|| Region {
            name: flat::FROZEN_REGION,
            buffer: lend(&mut self.frozen.masters),
            frozen: Some(Float::F32),
        });
        all.chain(frozen).collect()
    }

    fn tensors(&self) -> Vec<TensorLocation> {
        self.layout.tensor_locations()
    }
}

impl TorchLeaf {
    /// The contribution of an empty batch: zero gradient, and statistics that do not change the running ones.
    fn clear(&mut self, running: &Tensor) -> tch::Result<()> {
        self.statistics.f_copy_(running)?;
        let _ = self.gradient.f_zero_()?;
        self.set_sums(None, None, 0)
    }

    /// Writes a batch's sums. The first two are on the device; `None` is written as 0.
    fn set_sums(
        &self,
        loss: Option<&Tensor>,
        first_metric: Option<&Tensor>,
        samples: i64,
    ) -> tch::Result<()> {
        let entry = |number| self.tail.f_select(0, number);
        for (number, sum) in [loss, first_metric].into_iter().enumerate() {
            let mut entry = entry(number as i64)?;
            match sum {
                Some(sum) => entry.f_copy_(sum)?,
                None => drop(entry.f_zero_()?),
            }
        }
        entry(2)?.f_fill_(samples as f64).map(drop)
    }

    /// The gradient's norm, as a view of one value.
    fn norm(&self) -> tch::Result<Tensor> {
        self.tail.f_narrow(0, VOTE.end as i64, 1)
    }
}

/// Some values of a leaf, in its memory. The spans that are added up at the same time do not overlap, and the step keeps
/// their leaves until all are back.
#[derive(Debug)]
pub struct TorchSpan(Tensor);

impl Summand for TorchSpan {
    fn add(&mut self, other: &Self) -> Result<(), Error> {
        let _ = self.0.f_add_(&other.0).during("add leaves")?;
        Ok(())
    }

    fn buffer(&mut self) -> BufferMut<'_> {
        lend(&mut self.0)
    }
}

impl Summand for TorchLeaf {
    fn add(&mut self, other: &Self) -> Result<(), Error> {
        let _ = self.flat.f_add_(&other.flat).during("add leaves")?;
        Ok(())
    }

    fn buffer(&mut self) -> BufferMut<'_> {
        lend(&mut self.flat)
    }
}

impl Leaf for TorchLeaf {
    type LeafSpan = TorchSpan;

    fn value_count(&self) -> usize {
        self.flat.numel()
    }

    fn span(&self, range: Range<usize>) -> Result<TorchSpan, Error> {
        let values = untracked(&self.flat);
        let span = values.and_then(|all| all.f_narrow(0, range.start as i64, range.len() as i64));
        span.map(TorchSpan).during("view a span of a leaf")
    }

    fn put_back(&mut self, start: usize, TorchSpan(span): TorchSpan) -> Result<(), Error> {
        let mut own = self.span(start..start + span.numel())?.0;
        match own.data_ptr() == span.data_ptr() {
            true => Ok(()),
            false => own.f_copy_(&span).during("write a span of a leaf"),
        }
    }

    fn set_vote(&mut self, vote: [f32; VOTE.end - VOTE.start]) -> Result<(), Error> {
        let write = || -> tch::Result<()> {
            let _ = self.tail.f_slice(0, VOTE.start as i64, None, 1)?.f_zero_()?;
            // Copying the votes from the host would make it wait for a GPU. They are rarely set.
            for (entry, vote) in VOTE.zip(vote).filter(|(_, vote)| *vote != 0.0) {
                let _ = self.tail.f_select(0, entry as i64)?.f_fill_(f64::from(vote))?;
            }
            Ok(())
        };
        write().during("write the vote")
    }

    fn start_tail_readback(&mut self) -> Result<(), Error> {
        let Device::Cuda(ordinal) = self.tail.device() else { return Ok(()) };
        let device = baton_gpu::Device::open(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
        let readback = match &mut self.readback {
            Some(readback) => readback,
            none => none.insert(Readback::new(device)?),
        };
        // SAFETY: libtorch allocated this many f32 in the device's primary context; they live as long as this leaf, and
        // only libtorch's default stream works on them.
        #[allow(unsafe_code)]
        unsafe {
            readback.start(self.tail.data_ptr() as u64)?;
        }
        self.is_readback_started = true;
        Ok(())
    }

    fn tail(&mut self) -> Result<[f32; TAIL], Error> {
        if !self.is_readback_started {
            self.start_tail_readback()?;
        }
        // The flag is cleared: a later call needs a new copy.
        if let (true, Some(readback)) =
            (std::mem::take(&mut self.is_readback_started), &self.readback)
        {
            return Ok(readback.values()?);
        }
        let mut tail = [0.0; TAIL];
        self.tail.f_copy_data(&mut tail, TAIL).during("read the tail")?;
        Ok(tail)
    }
}

/// The same values in the same memory, for changes that autograd does not see. It refuses those of a tensor that shares
/// memory with the statistics it keeps for BatchNorm, even if they are of other values.
fn untracked(flat: &Tensor) -> tch::Result<Tensor> {
    flat.f_data()
}

pub(super) fn state<'a>(
    working: &'a WorkingWeights,
    running: &'a [Tensor],
    batch: Option<&'a [Tensor]>,
) -> NetworkState<'a> {
    NetworkState { parameters: &working.parameters, running, batch }
}

/// The size of a batch's samples.
fn size_of(batch: &Batch) -> InputShape {
    match &batch.inputs {
        baton_data::Inputs::Images { resolution, .. } => {
            InputShape::Image { resolution: u64::from(*resolution) }
        }
        baton_data::Inputs::Arrays { shape, .. } => {
            let [channels, length] = signal_shape(shape).unwrap_or_default();
            InputShape::Signal { channels: channels as u64, length: length as u64 }
        }
        // No BatchNorm depends on it.
        baton_data::Inputs::Tokens { .. } => InputShape::Signal { channels: 1, length: 1 },
    }
}

/// The values of the network's outputs, on the host.
fn values_of(outputs: &Tensor) -> Result<Vec<f32>, Error> {
    let flat = outputs.f_to_device(Device::Cpu).and_then(|outputs| outputs.f_to_kind(Kind::Float));
    let flat = flat.and_then(|outputs| outputs.f_reshape([-1])).during("read the outputs")?;
    Vec::try_from(&flat).during("read the outputs")
}

/// A contiguous copy on the CPU.
pub(super) fn copy_out(view: &Tensor) -> Result<Tensor, Error> {
    let copy = Tensor::f_zeros(view.size(), (view.kind(), Device::Cpu));
    copy.and_then(|mut copy| copy.f_copy_(view).map(|()| copy)).during("copy out a tensor")
}
