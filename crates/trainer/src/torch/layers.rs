//! Runs a described network: the only module that maps kinds of layers to libtorch operations.

use baton_data::random::Draws;
use baton_model::{ConvNorm, InputShape, Layer, Linear, NetworkDescription, size::padding};
use baton_recipe::{
    JobSpec,
    spec::{Pointwise, Train},
};
use tch::{Device, Kind, Tensor};

use super::{
    backward::Pass,
    failure::During,
    fused::{self, Epilogue, Fused},
    network::{NetworkInputs, NetworkState, PassResult, StageFinished, TorchNetwork},
    pointwise, working,
};
use crate::learner::Error;

/// Added to BatchNorm's variance; torch's default.
const EPSILON: f64 = 1e-5;

/// A network of `crates/model`.
#[derive(Debug)]
pub(super) struct LayeredNetwork {
    description: NetworkDescription,
    /// Names of the blocks whose activations are recomputed.
    recompute: Vec<String>,
    /// Indices of the blocks with which a stage of the backward pass ends; one more than the last is the head.
    cuts: Vec<usize>,
    kind: Kind,
    blur: Option<Tensor>,
    /// `None` where libtorch's convolutions are used always.
    pointwise: Option<Pointwise>,
    /// What was measured when the run began.
    measured: Option<Pointwise>,
    /// Samples of a training batch, and their side in pixels.
    batch: (u64, u64),
    fused: Option<Fused>,
}

impl LayeredNetwork {
    pub(super) fn new(
        spec: &JobSpec,
        description: NetworkDescription,
        fused: Option<Fused>,
        device: Device,
    ) -> tch::Result<Self> {
        let kind = working::kind(spec.precision.compute);
        let products = device == Device::Cpu && spec.model.channels_last;
        let Train { global_batch, virtual_ranks, grad_accumulation, resolution, .. } = spec.train;
        let samples = global_batch / virtual_ranks.max(1) / grad_accumulation.max(1);
        Ok(Self {
            recompute: spec.train.recompute.clone(),
            cuts: cuts(&description),
            kind,
            blur: blur_filters(&description, kind, device)?,
            pointwise: products.then_some(spec.model.pointwise),
            measured: None,
            batch: (samples.into(), resolution.into()),
            fused,
            description,
        })
    }

    fn tensors<'a>(&'a self, state: NetworkState<'a>) -> Tensors<'a> {
        Tensors {
            state,
            blur: self.blur.as_ref(),
            pointwise_as_product: match self.pointwise {
                // A run that did not measure, such as one of an older version, uses products.
                Some(Pointwise::Auto) => self.measured != Some(Pointwise::Convolution),
                Some(Pointwise::Product) => true,
                Some(Pointwise::Convolution) | None => false,
            },
            fused: self.fused,
        }
    }
}

impl TorchNetwork for LayeredNetwork {
    fn description(&self) -> &NetworkDescription {
        &self.description
    }

    fn input_kind(&self) -> Kind {
        self.kind
    }

    fn measure_pointwise(&self) -> tch::Result<Option<Pointwise>> {
        let (samples, resolution) = self.batch;
        if self.pointwise != Some(Pointwise::Auto) {
            return Ok(None);
        }
        let input = InputShape::Image { resolution }.size();
        pointwise::measure(&self.description, input, samples, self.kind)
    }

    fn set_pointwise(&mut self, measured: Option<Pointwise>) {
        self.measured = measured;
    }

    fn prepared(&self, inputs: NetworkInputs) -> Result<NetworkInputs, Error> {
        let main = match inputs.main.dim() {
            // A signal (length) has one channel.
            2 => inputs.main.f_unsqueeze(1).during("prepare inputs")?,
            _ => inputs.main,
        };
        Ok(NetworkInputs { main, ..inputs })
    }

    fn outputs(
        &self,
        inputs: &NetworkInputs,
        state: NetworkState<'_>,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Tensor>, Error> {
        let outputs = self.tensors(state).forward(&self.description, &inputs.main, is_interrupted);
        outputs.during("forward pass")
    }

    fn gradients(
        &self,
        inputs: &NetworkInputs,
        state: NetworkState<'_>,
        _random: Draws,
        loss: &mut dyn FnMut(&Tensor) -> tch::Result<(Tensor, Tensor)>,
        finished: Option<&mut StageFinished<'_>>,
    ) -> Result<PassResult, Error> {
        // A recomputation writes the batch statistics again.
        let batch = state.batch.filter(|_| !self.recompute.is_empty()).unwrap_or_default();
        let spare: tch::Result<Vec<Tensor>> = batch.iter().map(Tensor::f_zeros_like).collect();
        let pass = Pass {
            network: &self.description,
            tensors: self.tensors(state),
            frozen: self.description.frozen_blocks(),
            recompute: &self.recompute,
            cuts: if finished.is_some() { &self.cuts } else { &[] },
            spare_statistics: &spare.during("allocate statistics")?,
        };
        pass.run(&inputs.main, loss, finished.unwrap_or(&mut |_| Ok(())))
    }

    fn stages(&self) -> Vec<Vec<usize>> {
        let blocks: Vec<_> = self.description.all_blocks().collect();
        let ends = [blocks.len()].into_iter().chain(self.cuts.iter().rev().copied());
        let stages = self.cuts.iter().rev().zip(ends).map(|(start, end)| {
            let blocks = blocks[*start..end].iter();
            blocks.flat_map(|block| block.parameters.clone()).collect()
        });
        stages.collect()
    }
}

/// Least number of values of a stage but the last: 1 MiB, which takes a network longer than to begin.
const MIN_STAGE: u64 = 1 << 18;

/// A stage of the backward pass, from the head on, has at least this share of all trained values: what is sent last is
/// little, and there are few messages.
const STAGE_SHARE: u64 = 8;

/// Where the backward pass of a network is cut, ascending: [`LayeredNetwork::cuts`].
fn cuts(network: &NetworkDescription) -> Vec<usize> {
    let blocks: Vec<u64> = network
        .all_blocks()
        .map(|block| {
            let parameters = network.parameters[block.parameters.clone()].iter();
            parameters.filter(|tensor| !tensor.is_frozen()).map(baton_model::Tensor::len).sum()
        })
        .collect();
    let least = (blocks.iter().sum::<u64>() / STAGE_SHARE).max(MIN_STAGE);
    let (mut cuts, mut stage) = (Vec::new(), 0);
    for (index, values) in blocks.iter().enumerate().rev() {
        stage += values;
        let is_last = blocks[..index].iter().all(|values| *values == 0);
        if stage >= least && !is_last {
            cuts.push(index);
            stage = 0;
        }
    }
    cuts.reverse();
    cuts
}

/// Tensors that a forward pass reads.
#[derive(Clone, Copy)]
pub(super) struct Tensors<'a> {
    pub(super) state: NetworkState<'a>,
    /// One 3×3 filter per channel, for as many channels as the widest blurred layer has.
    pub(super) blur: Option<&'a Tensor>,
    /// Compute 1×1 convolutions as matrix products, for channels-last activations on a CPU.
    pub(super) pointwise_as_product: bool,
    /// Kernels for BatchNorm with batch statistics and the operations after it; `None`: libtorch's.
    pub(super) fused: Option<Fused>,
}

impl Tensors<'_> {
    /// The same with the running statistics.
    pub(super) fn with_running(self) -> Self {
        Self { state: NetworkState { batch: None, ..self.state }, ..self }
    }

    /// Outputs (samples, classes), f32, of `inputs`: images (samples, 3, height, width) or signals
    /// (samples, channels, length). `is_interrupted` is called before each layer; `None` if it returned true.
    fn forward(
        self,
        network: &NetworkDescription,
        inputs: &Tensor,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> tch::Result<Option<Tensor>> {
        let mut x = inputs.shallow_clone();
        let (frozen, trained) = network.blocks.split_at(network.frozen_blocks());
        let frozen = frozen.iter().map(|block| (block, self.with_running()));
        let trained = trained.iter().chain([&network.head]).map(|block| (block, self));
        for (block, tensors) in frozen.chain(trained) {
            for layer in &block.layers {
                if is_interrupted() {
                    return Ok(None);
                }
                x = tensors.layer(layer, &x)?;
            }
        }
        Ok(Some(x))
    }

    /// Output of `layers` for the input `x`.
    pub(super) fn layers<'l>(
        self,
        layers: impl IntoIterator<Item = &'l Layer>,
        x: &Tensor,
    ) -> tch::Result<Tensor> {
        layers.into_iter().try_fold(x.shallow_clone(), |x, layer| self.layer(layer, &x))
    }

    fn layer(self, layer: &Layer, x: &Tensor) -> tch::Result<Tensor> {
        let is_signal = x.dim() == 3;
        match layer {
            Layer::ConvNorm(layer) => self.conv_norm(layer, x),
            Layer::MaxPool { side, stride } => {
                let [side, stride, padding] = [*side, *stride, padding(*side)].map(|n| n as i64);
                match is_signal {
                    true => x.f_max_pool1d([side], [stride], [padding], [1], false),
                    false => x.f_max_pool2d([side; 2], [stride; 2], [padding; 2], [1, 1], false),
                }
            }
            Layer::Residual { body, shortcut, .. } => self.residual(body, shortcut.as_ref(), x),
            Layer::GlobalMean => {
                let pooled = match is_signal {
                    true => x.f_adaptive_avg_pool1d([1])?,
                    false => x.f_adaptive_avg_pool2d([1, 1])?,
                };
                pooled.f_flatten(1, -1)
            }
            Layer::Linear(layer) => self.linear(layer, x),
        }
    }

    fn residual(
        self,
        body: &[ConvNorm],
        shortcut: Option<&ConvNorm>,
        x: &Tensor,
    ) -> tch::Result<Tensor> {
        let through_shortcut = || match shortcut {
            Some(layer) => self.conv_norm(layer, x),
            None => Ok(x.shallow_clone()),
        };
        let through = |body: &[ConvNorm]| {
            body.iter().try_fold(x.shallow_clone(), |y, layer| self.conv_norm(layer, &y))
        };
        if let (Some((fused, batch)), Some((last, first))) = (self.fused_batch(), body.split_last())
        {
            let shortcut = through_shortcut()?;
            return self.fused_conv_norm(
                last,
                &through(first)?,
                (fused, batch),
                Epilogue::AddRelu(&shortcut),
            );
        }
        // BatchNorm and the addition do not need their output for the gradient, so the operations can be in place, as
        // in torchvision.
        through(body)?.f_add_(&through_shortcut()?)?.f_relu_()
    }

    fn conv_norm(self, layer: &ConvNorm, x: &Tensor) -> tch::Result<Tensor> {
        if let Some(fused) = self.fused_batch() {
            let then = if layer.relu { Epilogue::Relu } else { Epilogue::None };
            return self.fused_conv_norm(layer, x, fused, then);
        }
        // Momentum 1 replaces the running statistics with the batch's.
        let (views, training, momentum) = match self.state.batch {
            Some(views) => (views, true, 1.0),
            None => (self.state.running, false, 0.0),
        };
        let mut y = self.convolve(layer, x)?.f_batch_norm(
            Some(&self.state.parameters[layer.scale]),
            Some(&self.state.parameters[layer.shift]),
            Some(&views[layer.mean]),
            Some(&views[layer.variance]),
            training,
            momentum,
            EPSILON,
            true,
        )?;
        if layer.relu { y.f_relu_() } else { Ok(y) }
    }

    fn fused_conv_norm(
        self,
        layer: &ConvNorm,
        x: &Tensor,
        (fused, batch): (Fused, &[Tensor]),
        epilogue: Epilogue<'_>,
    ) -> tch::Result<Tensor> {
        let norm = fused::NormLayer {
            scale: &self.state.parameters[layer.scale],
            shift: &self.state.parameters[layer.shift],
            batch_mean: &batch[layer.mean],
            batch_variance: &batch[layer.variance],
            epsilon: EPSILON,
        };
        fused.batch_norm(&self.convolve(layer, x)?, norm, epilogue)
    }

    /// The convolution, after a blur if the layer has one.
    fn convolve(self, layer: &ConvNorm, x: &Tensor) -> tch::Result<Tensor> {
        let kernel = &self.state.parameters[layer.kernel];
        let blurred = match self.blur {
            Some(filters) if layer.blurred => Some(blur(x, filters)?),
            _ => None,
        };
        let x = blurred.as_ref().unwrap_or(x);
        let (none, stride) = (None::<&Tensor>, layer.stride as i64);
        let side = kernel.size().last().copied().unwrap_or(1);
        let padding = padding(side as u64) as i64;
        if x.dim() == 3 {
            return x.f_conv1d(kernel, none, [stride], [padding], [1], 1);
        }
        if side == 1 && self.pointwise_as_product {
            return pointwise::product(x, kernel, stride);
        }
        x.f_conv2d(kernel, none, [stride; 2], [padding; 2], [1, 1], 1)
    }

    fn linear(self, layer: &Linear, x: &Tensor) -> tch::Result<Tensor> {
        let (weight, bias) =
            (&self.state.parameters[layer.weight], &self.state.parameters[layer.bias]);
        if weight.kind() == bias.kind() {
            return x.f_linear(weight, Some(bias));
        }
        // The product in the recipe's number format, the sum in f32.
        x.f_linear(weight, None::<&Tensor>)?.f_to_kind(bias.kind())?.f_add(bias)
    }

    /// The kernels and the batch statistics, if both are present.
    fn fused_batch(&self) -> Option<(Fused, &[Tensor])> {
        self.fused.zip(self.state.batch)
    }
}

/// The blur filters of `network`, one per channel, or `None` if no layer is blurred: outer product of (1, 2, 1) with
/// itself, divided by 16.
pub(super) fn blur_filters(
    network: &NetworkDescription,
    kind: Kind,
    device: Device,
) -> tch::Result<Option<Tensor>> {
    let layers = network.blocks.iter().flat_map(|block| &block.layers);
    let blurred = layers.flat_map(Layer::norms).filter(|layer| layer.blurred);
    let channels = blurred.map(|layer| network.parameters[layer.kernel].shape[1]);
    let Some(most) = channels.max() else { return Ok(None) };
    let row = Tensor::f_from_slice(&[1.0_f32, 2.0, 1.0])?;
    let filter = row.f_outer(&row)?.f_div_scalar(16.0)?;
    let filters = filter.f_repeat([most as i64, 1, 1, 1])?.f_to_kind(kind)?;
    filters.f_to_device(device).map(Some)
}

/// Zhang 2019 (arXiv 1904.11486): each channel with its own filter.
fn blur(x: &Tensor, filters: &Tensor) -> tch::Result<Tensor> {
    let channels = x.size().get(1).copied().unwrap_or_default();
    let filters = filters.f_narrow(0, 0, channels)?;
    x.f_conv2d(&filters, None::<&Tensor>, [1, 1], [1, 1], [1, 1], channels)
}
