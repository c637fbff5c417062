//! [`TorchLearner`]: a network with its optimizer, and [`TorchLeaf`], one contribution to an update.

use std::path::PathBuf;

use baton_checkpoint::Float;
use baton_collectives::BufferMut;
use baton_data::{Batch, InputType, mix::Mix};
use baton_gpu::Readback;
use baton_model::{Description, Input as InputSize};
use baton_recipe::{JobSpec, spec::Augment};
use tch::{Device, Kind, Tensor};

use super::{
    backward::Pass,
    buffer::lend,
    failure::During,
    flat::{self, Layout, Slot, views},
    fused::Fused,
    init,
    input::{Input, Loaded, signal_shape},
    mixing,
    network::{self, Tensors},
    optimizer::{Optimizer, Rates},
    task::{self, Task},
    weights,
    working::{self, Frozen, Working},
};
use crate::learner::{
    Error, Judged, Leaf, Learner, Reading, Region, TAIL, TensorPlace, Update, VOTE, Weights,
};

/// Share of the running BatchNorm statistics that one update replaces; torch's `momentum`.
const STATISTICS_MOMENTUM: f64 = 0.1;

/// Where BatchNorm takes its statistics from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// From the batch.
    Training,
    /// From the running averages.
    Evaluation,
}

/// A network and its optimizer on one device.
///
/// Regions, all f32: `weights`; as long and in the same order the optimizer's `momentum` (SGD, LARS)
/// or `exp_avg` and `exp_avg_sq` (AdamW) and the averaged weights `ema`; with fp16 the three values of
/// `loss_scale`; `bn_running` and its average `bn_running_ema`; `frozen`, if anything is.
#[derive(Debug)]
pub struct TorchLearner {
    device: Device,
    network: Description,
    pub(super) layout: Layout,
    recipe: Recipe,
    input: Input,
    task: Box<dyn Task>,
    optimizer: Optimizer,
    /// Absent if the recipe wants libtorch's kernels alone.
    fused: Option<Fused>,
    pub(super) weights: Tensor,
    pub(super) running: Tensor,
    /// Parameters and statistics of frozen blocks.
    pub(super) frozen: Frozen,
    /// Of `weights`, each the start of a gradient.
    pub(super) working: Working,
    /// Views of `running`.
    running_views: Vec<Tensor>,
    averaged: Option<Averaged>,
    pub(super) blur: Option<Tensor>,
    /// Where batch statistics go that nobody needs, and views of it.
    spare_statistics: (Tensor, Vec<Tensor>),
}

/// What the learner reads of the recipe at every step.
#[derive(Debug)]
struct Recipe {
    seed: u64,
    augment: Augment,
    recompute: Vec<String>,
    pretrained: Option<Pretrained>,
    /// Mirror images in evaluations.
    flip: bool,
    channels_last: bool,
}

#[derive(Debug)]
struct Pretrained {
    path: PathBuf,
    head: weights::Head,
}

/// The averaged model; its weights are the optimizer's.
#[derive(Debug)]
struct Averaged {
    running: Tensor,
    running_views: Vec<Tensor>,
    working: Working,
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
    /// The tail on its way from a GPU, once it was sent for.
    readback: Option<Readback<TAIL>>,
    is_sent_for: bool,
}

/// A batch's loss, a scalar on the device; none of an empty batch.
#[derive(Debug)]
pub struct TorchLoss(Option<Tensor>);

impl Reading for TorchLoss {
    fn value(&self) -> Result<f64, Error> {
        self.0.as_ref().map_or(Ok(0.0), |loss| f64::try_from(loss).during("read the loss"))
    }
}

impl TorchLearner {
    /// The network of `spec.model` for such inputs, with initial values from `spec.seed`, on `device`
    /// (see [`device::open`](super::device::open)).
    ///
    /// # Errors
    /// `model.arch` is not made of layers; out of memory.
    pub fn new(spec: &JobSpec, input_type: &InputType, device: Device) -> Result<Self, Error> {
        let mut learner = Self::blank(spec, input_type, device)?;
        learner.initialise()?;
        Ok(learner)
    }

    /// The same with zeros for weights, for whoever [`initialise`](Learner::initialise)s or restores it.
    ///
    /// # Errors
    /// `model.arch` is not made of layers; out of memory.
    pub fn blank(spec: &JobSpec, input_type: &InputType, device: Device) -> Result<Self, Error> {
        let channels = match input_type {
            InputType::Image => 3,
            InputType::Array(shape) => signal_shape(shape).map_or(1, |[channels, _]| channels),
        };
        let network = spec.model.describe(channels as u64).ok_or_else(|| {
            Error::Recipe(format!("model.arch = {:?} has no layers", spec.model.arch))
        })?;
        Self::of(spec, network, device)
    }

    /// As [`blank`](Self::blank), with `network` in place of the recipe's.
    ///
    /// # Errors
    /// Out of memory.
    pub fn of(spec: &JobSpec, network: Description, device: Device) -> Result<Self, Error> {
        let kind = working::kind(spec.precision.compute);
        let input = Input::new(&spec.data, device, spec.model.channels_last, kind)?;
        let fused = spec.precision.fused.then(|| Fused::on(device)).transpose()?;
        Self::build(spec, device, network, input, fused).during("build the network")
    }

    fn build(
        spec: &JobSpec,
        device: Device,
        network: Description,
        input: Input,
        fused: Option<Fused>,
    ) -> tch::Result<Self> {
        let layout = Layout::new(&network, spec.model.channels_last);
        let float = (Kind::Float, device);
        let weights = Tensor::f_zeros([layout.parameters_len()], float)?;
        let running = Tensor::f_zeros([layout.statistics_len()], float)?;
        let kind = working::kind(spec.precision.compute);
        let frozen = Frozen::new(&layout, kind, device)?;
        let working = Working::new(&layout, &weights, &frozen, kind)?;
        working.require_gradients(&layout)?;
        let optimizer = Optimizer::new(spec, &layout, device)?;
        let averaged = match optimizer.averaged() {
            None => None,
            Some(averaged) => {
                let working = Working::new(&layout, averaged, &frozen, kind)?;
                let running = running.f_zeros_like()?;
                let running_views = views(&layout.statistics, &running, &frozen.masters)?;
                Some(Averaged { running, running_views, working })
            }
        };
        let spare = running.f_zeros_like()?;
        let model = &spec.model;
        let pretrained = (!model.pretrained.is_empty()).then(|| Pretrained {
            path: model.pretrained.clone().into(),
            head: if model.new_head { weights::Head::New } else { weights::Head::FromFile },
        });
        Ok(Self {
            device,
            input,
            task: task::of(spec),
            optimizer,
            running_views: views(&layout.statistics, &running, &frozen.masters)?,
            spare_statistics: {
                let spare_views = views(&layout.statistics, &spare, &frozen.masters)?;
                (spare, spare_views)
            },
            blur: network::blur_filters(&network, kind, device)?,
            fused,
            recipe: Recipe {
                seed: spec.seed,
                augment: spec.augment.clone(),
                recompute: spec.train.recompute.clone(),
                pretrained,
                flip: spec.evaluation.flip,
                channels_last: model.channels_last,
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
    /// The device failed; the inputs do not have the length that their number and shape ask for.
    pub fn logits(&mut self, batch: &Batch, mode: Mode) -> Result<Tensor, Error> {
        let _no_grad = tch::no_grad_guard();
        self.refresh()?;
        let Loaded { inputs, .. } = self.input.load(batch)?;
        let tensors = self.tensors(&self.working, &self.running_views);
        let batch = match mode {
            Mode::Evaluation => None,
            Mode::Training => Some(self.spare_statistics.1.as_slice()),
        };
        let tensors = Tensors { batch, ..tensors };
        tensors.forward(&self.network, &inputs).during("forward pass")
    }

    /// What the network sees of a training batch, shape (samples, channels, …), what it should say, and
    /// how both are mixed.
    ///
    /// # Errors
    /// The device failed; the inputs do not have the length that their number and shape ask for.
    pub fn mixed(&mut self, batch: &Batch) -> Result<(Tensor, Tensor, Mix), Error> {
        let Loaded { inputs, targets } = self.input.load(batch)?;
        let mix = Mix::of_batch(self.recipe.seed, batch, &self.recipe.augment);
        let mixed = mixing::inputs(&inputs, &mix).during("mix inputs")?;
        Ok((mixed, targets, mix))
    }

    fn tensors<'a>(&'a self, working: &'a Working, running: &'a [Tensor]) -> Tensors<'a> {
        Tensors {
            parameters: &working.parameters,
            running,
            batch: None,
            blur: self.blur.as_ref(),
            pointwise_as_product: self.device == Device::Cpu && self.recipe.channels_last,
            fused: self.fused,
        }
    }

    /// Copies of every weight and running statistic, on the CPU, by their names, in the order of a
    /// state dict.
    ///
    /// # Errors
    /// Out of memory.
    pub fn state_dict(&self) -> Result<Vec<(String, Tensor)>, Error> {
        let tensors = self.state_views()?;
        tensors.into_iter().map(|(slot, view)| Ok((slot.name.clone(), copy_out(&view)?))).collect()
    }

    /// Copies of the gradients in `leaf`, on the CPU, by their names, in the order of the
    /// description.
    ///
    /// # Errors
    /// Out of memory.
    pub fn gradients(&self, leaf: &TorchLeaf) -> Result<Vec<(String, Tensor)>, Error> {
        let slots = self.layout.parameters.iter().filter(|slot| !slot.frozen);
        let view = |slot: &Slot| slot.view(&leaf.gradient).during("view gradients");
        slots.map(|slot| Ok((slot.name.clone(), copy_out(&view(slot)?)?))).collect()
    }

    /// Every weight and running statistic in the order of a state dict. Writing to a view changes the
    /// learner; none may live on while [`Learner::regions`] lends out the same memory.
    pub(super) fn state_views(&self) -> Result<Vec<(&Slot, Tensor)>, Error> {
        let slots = self.layout.state_dict().into_iter();
        let views = slots.map(|(slot, region)| {
            let buffer = match region {
                flat::WEIGHTS => &self.weights,
                flat::BN_RUNNING => &self.running,
                _ => &self.frozen.masters,
            };
            Ok((slot, slot.view(buffer)?))
        });
        views.collect::<tch::Result<_>>().during("view the state")
    }

    /// What it trains.
    #[must_use]
    pub fn network(&self) -> &Description {
        &self.network
    }

    /// Names of the head's tensors.
    pub(super) fn head(&self) -> impl Iterator<Item = &str> {
        let parameters = &self.layout.parameters[self.network.head.parameters.clone()];
        parameters.iter().map(|slot| slot.name.as_str())
    }

    /// The masters have changed.
    pub(super) fn invalidate(&mut self) {
        self.working.cast.invalidate();
        self.frozen.cast.invalidate();
        if let Some(averaged) = &mut self.averaged {
            averaged.working.cast.invalidate();
        }
    }

    fn refresh(&mut self) -> Result<(), Error> {
        let refreshed = self.working.cast.refresh(&self.weights);
        refreshed.and_then(|()| self.frozen.refresh()).during("cast weights")
    }

    fn leaf(&self) -> tch::Result<TorchLeaf> {
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
            is_sent_for: false,
            flat,
        })
    }

    /// Finds the gradient of the scaled loss of `inputs` and writes it into `leaf`, with its sums.
    fn pass(
        &self,
        inputs: &Tensor,
        targets: &Tensor,
        mix: &Mix,
        scale: f32,
        leaf: &TorchLeaf,
    ) -> Result<TorchLoss, Error> {
        let tensors = self.tensors(&self.working, &self.running_views);
        let pass = Pass {
            network: &self.network,
            tensors: Tensors { batch: Some(&leaf.statistics_views), ..tensors },
            frozen: self.network.frozen_blocks(),
            recompute: &self.recipe.recompute,
            spare_statistics: &self.spare_statistics.1,
        };
        let factor = self.optimizer.loss_scale().during("loss scale")?;
        let loss = |outputs: &Tensor| {
            let loss = mixing::loss(&*self.task, outputs, targets, mix)?;
            let scaled = loss.f_mul_scalar(f64::from(scale))?;
            match &factor {
                None => Ok((loss, scaled)),
                Some(factor) => Ok((loss, scaled.f_mul(factor)?)),
            }
        };
        let found = pass.run(inputs, loss).during("forward and backward pass")?;
        self.keep(found.gradients, leaf).during("collect gradients")?;
        let first_metric = self.task.first_metric(&found.outputs, targets);
        first_metric
            .and_then(|sum| leaf.set_sums(Some(&found.loss), sum.as_ref(), targets.size()[0]))
            .during("sum up the batch")?;
        Ok(TorchLoss(Some(found.loss)))
    }

    /// Writes gradients into `leaf`.
    ///
    /// A gradient per parameter, then one concatenation. The other way, `grad().set_data(view)` once
    /// and backward accumulating into the views, costs more: the views must be zeroed and then read as
    /// well as written (ResNet-50, one CPU thread: 40 ms against 16 ms). Nor could they lie in the
    /// leaf, as autograd refuses changes to a tensor that shares memory with the statistics it keeps
    /// for BatchNorm.
    fn keep(&self, gradients: Vec<(usize, Tensor)>, leaf: &TorchLeaf) -> tch::Result<()> {
        let slots = &self.layout.parameters;
        let mut flat: Vec<(i64, Tensor)> = Vec::with_capacity(slots.len());
        for (index, gradient) in gradients {
            let slot = &slots[index];
            flat.push((slot.offset, slot.flatten(&gradient)?));
        }
        flat.sort_by_key(|(offset, _)| *offset);
        flat.push((self.layout.parameters_len(), leaf.gradient.f_narrow(0, 0, 0)?));
        // Zeros for what is between tensors.
        let (mut whole, mut end) = (Vec::with_capacity(flat.len()), 0);
        for (offset, gradient) in flat {
            if end < offset {
                let gap = (Kind::Float, self.device);
                whole.push(leaf.gradient.f_new_zeros([offset - end], gap)?);
            }
            end = offset + gradient.size1()?;
            whole.push(gradient);
        }
        let _ = Tensor::f_cat_out(&leaf.gradient, &whole, 0)?;
        Ok(())
    }

    /// Outputs in evaluation mode, averaged with those for the mirrored images if the recipe says so.
    fn judge(&self, inputs: &Tensor, tensors: Tensors<'_>) -> tch::Result<Tensor> {
        let outputs = tensors.forward(&self.network, inputs)?;
        if !self.recipe.flip {
            return Ok(outputs);
        }
        let mirrored = tensors.forward(&self.network, &inputs.f_flip([-1])?)?;
        outputs.f_add(&mirrored)?.f_div_scalar(2.0)
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

    fn new_leaf(&mut self) -> Result<TorchLeaf, Error> {
        self.leaf().during("allocate a leaf")
    }

    fn initialise(&mut self) -> Result<(), Error> {
        let _no_grad = tch::no_grad_guard();
        self.invalidate();
        let (seed, frozen) = (self.recipe.seed, &self.frozen.masters);
        init::fill(&self.weights, frozen, &self.layout.parameters, seed)
            .and_then(|()| init::fill(&self.running, frozen, &self.layout.statistics, seed))
            .during("set the first weights")
    }

    fn load_initial(&mut self) -> Result<(), Error> {
        let Some(Pretrained { path, head }) = &self.recipe.pretrained else { return Ok(()) };
        let (path, head) = (path.clone(), *head);
        weights::load(self, &path, head).map_err(|error| match error {
            weights::Error::Learner(error) => error,
            error => Error::Recipe(format!("model.pretrained: {error}")),
        })
    }

    fn gradient(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut TorchLeaf,
    ) -> Result<TorchLoss, Error> {
        leaf.is_sent_for = false;
        if batch.is_empty() {
            leaf.contribute_nothing(&self.running).during("clear a leaf")?;
            return Ok(TorchLoss(None));
        }
        let size = size_of(batch);
        if (batch.len() as u64) < self.network.least_batch(size) {
            let side = size.size().width;
            return Err(Error::Torch {
                operation: "batch normalisation",
                message: format!(
                    "one sample of side {side} leaves one value per channel, which has no variance: \
                     raise train.global_batch or train.resolution, lower train.virtual_ranks or \
                     train.grad_accumulation, or set data.drop_last"
                ),
            });
        }
        self.task.check(batch)?;
        self.refresh()?;
        let (inputs, targets, mix) = self.mixed(batch)?;
        // Momentum 1 multiplies what was there by 0, which keeps infinities and NaNs alive.
        let _ = leaf.statistics.f_zero_().during("clear statistics")?;
        self.pass(&inputs, &targets, &mix, scale, leaf)
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
        // running = 0.9 * running + 0.1 * (mean over the micro-batches)
        let _ = sum
            .statistics
            .f_div_scalar_(i64::from(micro_batches))
            .and_then(|mean| self.running.f_lerp_(&mean, STATISTICS_MOMENTUM))
            .during("statistics update")?;
        if let (Some(share), Some(averaged)) =
            (self.optimizer.averaging_share(step), &mut self.averaged)
        {
            let _ = averaged.running.f_lerp_(&self.running, share).during("statistics update")?;
            averaged.working.cast.invalidate();
        }
        Ok(())
    }

    fn evaluate(&mut self, batch: &Batch, weights: Weights) -> Result<Judged, Error> {
        if batch.is_empty() {
            return Ok(Judged::default());
        }
        let _no_grad = tch::no_grad_guard();
        self.refresh()?;
        if let (Some(averaged), Some(masters)) = (&mut self.averaged, self.optimizer.averaged()) {
            averaged.working.cast.refresh(masters).during("cast weights")?;
        }
        self.task.check(batch)?;
        let Loaded { inputs, targets } = self.input.load(batch)?;
        let tensors = match (weights, &self.averaged) {
            (Weights::Averaged, Some(averaged)) => {
                self.tensors(&averaged.working, &averaged.running_views)
            }
            _ => self.tensors(&self.working, &self.running_views),
        };
        let outputs = self.judge(&inputs, tensors).during("forward pass")?;
        self.task.evaluate(batch, &outputs, &targets).during("loss and metrics")
    }

    fn regions(&mut self) -> Vec<Region<'_>> {
        // Whoever asks may write.
        self.invalidate();
        let averaged = self.averaged.as_mut();
        let averaged_running = averaged.map(|averaged| ("bn_running_ema", &mut averaged.running));
        let weights = (flat::WEIGHTS, &mut self.weights);
        let running = (flat::BN_RUNNING, &mut self.running);
        let state = self.optimizer.state();
        let all = std::iter::once(weights).chain(state).chain([running]).chain(averaged_running);
        let all = all.map(|(name, tensor)| Region { name, buffer: lend(tensor), frozen: None });
        let frozen = (self.layout.frozen_len() > 0).then(|| Region {
            name: flat::FROZEN,
            buffer: lend(&mut self.frozen.masters),
            frozen: Some(Float::F32),
        });
        all.chain(frozen).collect()
    }

    fn tensors(&self) -> Vec<TensorPlace> {
        self.layout.places()
    }
}

impl TorchLeaf {
    /// No gradient, and statistics that leave the running ones where they are.
    fn contribute_nothing(&mut self, running: &Tensor) -> tch::Result<()> {
        self.statistics.f_copy_(running)?;
        let _ = self.gradient.f_zero_()?;
        self.set_sums(None, None, 0)
    }

    /// Writes a batch's sums, of which the first two are on the device; absent is 0.
    fn set_sums(
        &self,
        loss: Option<&Tensor>,
        first_metric: Option<&Tensor>,
        samples: i64,
    ) -> tch::Result<()> {
        let slot = |number| self.tail.f_select(0, number);
        for (number, sum) in [loss, first_metric].into_iter().enumerate() {
            let mut slot = slot(number as i64)?;
            match sum {
                Some(sum) => slot.f_copy_(sum)?,
                None => drop(slot.f_zero_()?),
            }
        }
        slot(2)?.f_fill_(samples as f64).map(drop)
    }

    /// The one value of the gradient's norm.
    fn norm(&self) -> tch::Result<Tensor> {
        self.tail.f_narrow(0, VOTE.end as i64, 1)
    }
}

impl Leaf for TorchLeaf {
    fn add(&mut self, other: &Self) -> Result<(), Error> {
        let _ = self.flat.f_add_(&other.flat).during("add leaves")?;
        Ok(())
    }

    fn set_vote(&mut self, vote: [f32; VOTE.end - VOTE.start]) -> Result<(), Error> {
        let write = || -> tch::Result<()> {
            let _ = self.tail.f_slice(0, VOTE.start as i64, None, 1)?.f_zero_()?;
            // To copy them from the host would make it wait for a GPU. They are rarely set.
            for (slot, vote) in VOTE.zip(vote).filter(|(_, vote)| *vote != 0.0) {
                let _ = self.tail.f_select(0, slot as i64)?.f_fill_(f64::from(vote))?;
            }
            Ok(())
        };
        write().during("write the vote")
    }

    fn send_for_tail(&mut self) -> Result<(), Error> {
        let Device::Cuda(ordinal) = self.tail.device() else { return Ok(()) };
        let device = baton_gpu::Device::open(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
        let readback = match &mut self.readback {
            Some(readback) => readback,
            none => none.insert(Readback::new(device)?),
        };
        // SAFETY: libtorch allocated so many f32 in the device's primary context, for as long as this leaf
        // lives, and works on them on its default stream alone.
        #[allow(unsafe_code)]
        unsafe {
            readback.send_for(self.tail.data_ptr() as u64)?;
        }
        self.is_sent_for = true;
        Ok(())
    }

    fn tail(&mut self) -> Result<[f32; TAIL], Error> {
        if !self.is_sent_for {
            self.send_for_tail()?;
        }
        // Another time it may be another one.
        if let (true, Some(readback)) = (std::mem::take(&mut self.is_sent_for), &self.readback) {
            return Ok(readback.values()?);
        }
        let mut tail = [0.0; TAIL];
        self.tail.f_copy_data(&mut tail, TAIL).during("read the tail")?;
        Ok(tail)
    }

    fn buffer(&mut self) -> BufferMut<'_> {
        lend(&mut self.flat)
    }
}

/// The size of a batch's samples.
fn size_of(batch: &Batch) -> InputSize {
    match &batch.inputs {
        baton_data::Inputs::Images { resolution, .. } => {
            InputSize::Image { resolution: u64::from(*resolution) }
        }
        baton_data::Inputs::Arrays { shape, .. } => {
            let [channels, length] = signal_shape(shape).unwrap_or_default();
            InputSize::Signal { channels: channels as u64, length: length as u64 }
        }
    }
}

/// A contiguous copy on the CPU.
fn copy_out(view: &Tensor) -> Result<Tensor, Error> {
    let copy = Tensor::f_zeros(view.size(), (view.kind(), Device::Cpu));
    copy.and_then(|mut copy| copy.f_copy_(view).map(|()| copy)).during("copy out a tensor")
}
