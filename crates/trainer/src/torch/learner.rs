//! [`TorchLearner`]: a ResNet with its optimizer, and [`TorchLeaf`], one contribution to an update.

use baton_collectives::BufferMut;
use baton_data::Batch;
use baton_job::{JobSpec, Step};
use tch::{Device, Kind, Tensor};

use super::{
    buffer::lend,
    failure::During,
    flat::{self, Layout, Slot},
    init,
    input::Input,
    objective::Objective,
    optimizer::Optimizer,
    resnet::{self, Resnet, Statistics, Tensors},
};
use crate::learner::{Error, Leaf, Learner, Region, Sums, TAIL, TensorPlace};

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

/// A ResNet and its optimizer on one device.
///
/// Regions, all f32: `weights`; the optimizer's `momentum` (SGD) or `exp_avg` and `exp_avg_sq`
/// (AdamW), as long and in the same order as the weights; `bn_running`.
#[derive(Debug)]
pub struct TorchLearner {
    device: Device,
    network: Resnet,
    pub(super) layout: Layout,
    input: Input,
    objective: Objective,
    optimizer: Optimizer,
    pub(super) weights: Tensor,
    pub(super) running: Tensor,
    /// Views of `weights`, each the start of a gradient.
    pub(super) parameters: Vec<Tensor>,
    /// Views of `running`.
    running_views: Vec<Tensor>,
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
}

impl TorchLearner {
    /// The network of `spec.model` with initial values from `spec.seed`, on `device` (see
    /// [`device::open`](super::device::open)).
    ///
    /// # Errors
    /// `model.arch` is no ResNet; out of memory.
    pub fn new(spec: &JobSpec, device: Device) -> Result<Self, Error> {
        let (network, layout) = resnet::plan(&spec.model).ok_or_else(|| Error::Torch {
            operation: "build the network",
            message: format!("{:?} is no ResNet", spec.model.arch),
        })?;
        Self::build(spec, device, network, layout).during("build the network")
    }

    fn build(spec: &JobSpec, device: Device, network: Resnet, layout: Layout) -> tch::Result<Self> {
        let float = (Kind::Float, device);
        let weights = Tensor::f_zeros([layout.parameters_len()], float)?;
        let running = Tensor::f_zeros([layout.statistics_len()], float)?;
        init::fill(&weights, &layout.parameters, spec.seed)?;
        init::fill(&running, &layout.statistics, spec.seed)?;
        let parameters = views(&layout.parameters, &weights, 0)?;
        for parameter in &parameters {
            let _ = parameter.f_set_requires_grad(true)?;
        }
        let running_views = views(&layout.statistics, &running, 0)?;
        let (model, data) = (&spec.model, &spec.data);
        Ok(Self {
            device,
            network,
            input: Input::new(data.mean, data.std, device, model.channels_last)?,
            objective: Objective {
                label_smoothing: spec.loss.label_smoothing,
                num_classes: model.num_classes,
            },
            optimizer: Optimizer::new(
                &spec.optimizer,
                layout.parameters_len(),
                layout.decayed,
                device,
            )?,
            layout,
            weights,
            running,
            parameters,
            running_views,
        })
    }

    /// Logits of `batch`, f32, shape (samples, classes); changes no state and records no gradient.
    ///
    /// # Errors
    /// The device failed; the images do not have the length that their number and side ask for.
    pub fn logits(&self, batch: &Batch, mode: Mode) -> Result<Tensor, Error> {
        let _no_grad = tch::no_grad_guard();
        match mode {
            Mode::Evaluation => self.forward(batch, Statistics::Running(&self.running_views)),
            Mode::Training => {
                let thrown_away = self.running.f_zeros_like();
                let thrown_away = thrown_away
                    .and_then(|flat| views(&self.layout.statistics, &flat, 0))
                    .during("allocate statistics")?;
                self.forward(batch, Statistics::Batch(&thrown_away))
            }
        }
    }

    /// Copies of every weight and running statistic, on the CPU, by torchvision's names, in its
    /// order and shapes.
    ///
    /// # Errors
    /// Out of memory.
    pub fn state_dict(&self) -> Result<Vec<(String, Tensor)>, Error> {
        let tensors = self.state_views()?;
        tensors.into_iter().map(|(slot, view)| Ok((slot.name.clone(), copy_out(&view)?))).collect()
    }

    /// Copies of the gradients in `leaf`, on the CPU, by torchvision's names, in its order and
    /// shapes.
    ///
    /// # Errors
    /// Out of memory.
    pub fn gradients(&self, leaf: &TorchLeaf) -> Result<Vec<(String, Tensor)>, Error> {
        let start = self.layout.statistics_len();
        let slots = &self.layout.parameters;
        let views = views(slots, &leaf.flat, start).during("view gradients")?;
        let named = slots.iter().zip(views);
        named.map(|(slot, view)| Ok((slot.name.clone(), copy_out(&view)?))).collect()
    }

    /// Every weight and running statistic in torchvision's order. Writing to a view changes the
    /// learner; none may live on while [`Learner::regions`] lends out the same memory.
    pub(super) fn state_views(&self) -> Result<Vec<(&Slot, Tensor)>, Error> {
        let slots = self.layout.state_dict().into_iter();
        let views = slots.map(|(slot, region)| {
            let buffer = if region == flat::WEIGHTS { &self.weights } else { &self.running };
            Ok((slot, slot.view(buffer, 0)?))
        });
        views.collect::<tch::Result<_>>().during("view the state")
    }

    fn forward(&self, batch: &Batch, statistics: Statistics<'_>) -> Result<Tensor, Error> {
        let images = self.input.images(batch).during("copy images")?;
        let tensors = Tensors { parameters: &self.parameters, statistics };
        self.network.forward(&images, tensors).during("forward pass")
    }

    fn leaf(&self) -> tch::Result<TorchLeaf> {
        let statistics = self.layout.statistics_len();
        let gradient = self.layout.parameters_len();
        let len = statistics + gradient + TAIL as i64;
        let flat = Tensor::f_zeros([len], (Kind::Float, self.device))?;
        Ok(TorchLeaf {
            statistics: flat.f_narrow(0, 0, statistics)?,
            gradient: flat.f_narrow(0, statistics, gradient)?,
            tail: flat.f_narrow(0, statistics + gradient, TAIL as i64)?,
            statistics_views: views(&self.layout.statistics, &flat, 0)?,
            flat,
        })
    }

    /// Writes the gradient of `loss` into `leaf`.
    fn backward(&self, loss: &Tensor, leaf: &TorchLeaf) -> tch::Result<()> {
        // A gradient per parameter, then one concatenation. The other way, `grad().set_data(view)`
        // once and backward accumulating into the views, costs more: the views must be zeroed and
        // then read as well as written (ResNet-50, one CPU thread: 40 ms against 16 ms). Nor could
        // they lie in the leaf, as autograd refuses changes to a tensor that shares memory with the
        // statistics it keeps for BatchNorm.
        let gradients = Tensor::f_run_backward(&[loss], &self.parameters, false, false)?;
        let slots = &self.layout.parameters;
        let mut flat: Vec<(i64, Tensor)> = Vec::with_capacity(slots.len());
        for (slot, gradient) in slots.iter().zip(gradients) {
            flat.push((slot.offset, slot.flatten(&gradient)?));
        }
        flat.sort_by_key(|(offset, _)| *offset);
        let flat: Vec<Tensor> = flat.into_iter().map(|(_, gradient)| gradient).collect();
        let _ = Tensor::f_cat_out(&leaf.gradient, &flat, 0)?;
        Ok(())
    }
}

impl Learner for TorchLearner {
    type Leaf = TorchLeaf;

    fn new_leaf(&mut self) -> Result<TorchLeaf, Error> {
        self.leaf().during("allocate a leaf")
    }

    fn gradient(&mut self, batch: &Batch, scale: f32, leaf: &mut TorchLeaf) -> Result<Sums, Error> {
        if batch.is_empty() {
            leaf.contribute_nothing(&self.running).during("clear a leaf")?;
            return Ok(Sums::default());
        }
        let (_, resolution) = batch.images().unwrap_or_default();
        if batch.len() < Resnet::least_batch(resolution) {
            return Err(Error::Torch {
                operation: "batch normalisation",
                message: format!(
                    "one sample of {resolution}x{resolution} pixels leaves one value per channel, which has no \
                     variance: raise train.global_batch or train.resolution, lower \
                     train.virtual_ranks, or set data.drop_last"
                ),
            });
        }
        let labels = self.objective.labels(batch, self.device)?;
        // Momentum 1 multiplies what was there by 0, which keeps infinities and NaNs alive.
        let _ = leaf.statistics.f_zero_().during("clear statistics")?;
        let logits = self.forward(batch, Statistics::Batch(&leaf.statistics_views))?;
        let loss = self.objective.loss(&logits, &labels).during("loss")?;
        let scaled = loss.f_mul_scalar(f64::from(scale)).during("loss")?;
        self.backward(&scaled, leaf).during("backward pass")?;
        self.objective.sums(&loss, &logits, &labels).during("sum up the batch")
    }

    fn update(
        &mut self,
        sum: &TorchLeaf,
        step: Step,
        lr: f64,
        virtual_ranks: u32,
    ) -> Result<(), Error> {
        self.optimizer
            .update(&mut self.weights, &sum.gradient, step, lr)
            .during("optimizer update")?;
        // running = 0.9 * running + 0.1 * (mean over the virtual ranks)
        let _ = sum
            .statistics
            .f_div_scalar(i64::from(virtual_ranks))
            .and_then(|mean| self.running.f_lerp_(&mean, STATISTICS_MOMENTUM))
            .during("statistics update")?;
        Ok(())
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<Sums, Error> {
        if batch.is_empty() {
            return Ok(Sums::default());
        }
        let labels = self.objective.labels(batch, self.device)?;
        let logits = self.logits(batch, Mode::Evaluation)?;
        let loss = self.objective.loss(&logits, &labels).during("loss")?;
        self.objective.sums(&loss, &logits, &labels).during("sum up the batch")
    }

    fn regions(&mut self) -> Vec<Region<'_>> {
        let weights = (flat::WEIGHTS, &mut self.weights);
        let running = (flat::BN_RUNNING, &mut self.running);
        let moments = self.optimizer.moments();
        let all = std::iter::once(weights).chain(moments).chain([running]);
        all.map(|(name, tensor)| Region { name, buffer: lend(tensor) }).collect()
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
        Ok(())
    }
}

impl Leaf for TorchLeaf {
    fn add(&mut self, other: &Self) -> Result<(), Error> {
        let _ = self.flat.f_add_(&other.flat).during("add leaves")?;
        Ok(())
    }

    fn set_tail(&mut self, tail: [f32; TAIL]) -> Result<(), Error> {
        let copy = Tensor::f_from_slice(&tail).and_then(|tail| self.tail.f_copy_(&tail));
        copy.during("write the tail")
    }

    fn tail(&self) -> Result<[f32; TAIL], Error> {
        let mut tail = [0.0; TAIL];
        let here = self.tail.f_to_device(Device::Cpu);
        here.and_then(|here| here.f_copy_data(&mut tail, TAIL)).during("read the tail")?;
        Ok(tail)
    }

    fn buffer(&mut self) -> BufferMut<'_> {
        lend(&mut self.flat)
    }
}

/// `slots` as views of `buffer`, whose first tensor starts at `start`.
///
/// `detach` makes each a tensor of its own for autograd.
fn views(slots: &[Slot], buffer: &Tensor, start: i64) -> tch::Result<Vec<Tensor>> {
    slots.iter().map(|slot| slot.view(buffer, start)?.f_detach()).collect()
}

/// A contiguous copy on the CPU.
fn copy_out(view: &Tensor) -> Result<Tensor, Error> {
    let copy = Tensor::f_zeros(view.size(), (view.kind(), Device::Cpu));
    copy.and_then(|mut copy| copy.f_copy_(view).map(|()| copy)).during("copy out a tensor")
}
