//! ResNet-18 to ResNet-152: He et al. 2015 (arXiv 1512.03385), with the stride of a bottleneck on its
//! 3×3 convolution ("v1.5", as in torchvision and in every published speed record); and ResNet-34 in
//! one dimension.
//!
//! Names, shapes, order and the distribution of initial values are torchvision's. In one dimension a
//! kernel has nine samples, as many as a 3×3 kernel has pixels (the first has fifteen), so that
//! ResNet-34 keeps its 21 M parameters.

use baton_recipe::spec::{Arch, Model, Stage};
use tch::{Device, Tensor};

use super::{
    flat::Layout,
    fused::{Fused, Layer, Then},
    init::Init,
};

/// Width of the first residual stage.
const WIDTH: i64 = 64;
/// Added to BatchNorm's variance; torch's default.
const EPSILON: f64 = 1e-5;
/// Strided convolutions of at least so many channels are blurred before, as in ffcv-imagenet: all but
/// the first.
const LEAST_BLURRED: i64 = 16;
/// Of any activation.
const MOST_CHANNELS: i64 = 2048;

/// What a forward pass reads.
#[derive(Clone, Copy)]
pub(super) struct Tensors<'a> {
    /// In the order of [`Layout::parameters`].
    pub(super) parameters: &'a [Tensor],
    /// In the order of [`Layout::statistics`]: what BatchNorm takes where it takes no batch's.
    pub(super) running: &'a [Tensor],
    /// As `running`; each layer overwrites its views with the batch's mean and unbiased variance.
    pub(super) batch: Option<&'a [Tensor]>,
    /// One 3×3 filter for each of the most channels that are blurred.
    pub(super) blur: Option<&'a Tensor>,
    /// Compute 1×1 convolutions as products of matrices: activations lie channels-last on a CPU.
    /// There libtorch spends up to half of their time on reordering weights.
    pub(super) pointwise_as_product: bool,
    /// What computes BatchNorm and all behind it where it takes a batch's statistics; libtorch if absent.
    pub(super) fused: Option<Fused>,
}

impl<'a> Tensors<'a> {
    /// Both if there are both.
    fn fused_batch(&self) -> Option<(Fused, &'a [Tensor])> {
        self.fused.zip(self.batch)
    }
}

/// A network: only its wiring. Numbers are indices into [`Tensors`].
#[derive(Debug)]
pub(super) struct Resnet {
    stem: ConvNorm,
    stages: Vec<Vec<Block>>,
    classifier: Linear,
    dimensions: Dimensions,
}

/// Of what the network sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dimensions {
    /// Signals.
    One,
    /// Images.
    Two,
}

/// A convolution without bias and the BatchNorm after it.
#[derive(Debug)]
struct ConvNorm {
    kernel: usize,
    dimensions: Dimensions,
    side: i64,
    stride: i64,
    /// Channels to blur before, if any.
    blurred: Option<i64>,
    scale: usize,
    shift: usize,
    mean: usize,
    variance: usize,
}

/// A residual block: `relu(body(x) + shortcut(x))`.
#[derive(Debug)]
struct Block {
    body: Vec<ConvNorm>,
    /// The identity if absent.
    shortcut: Option<ConvNorm>,
}

#[derive(Debug)]
struct Linear {
    weight: usize,
    bias: usize,
}

/// The two kinds of residual block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    /// 3×3, 3×3.
    Basic,
    /// 1×1, 3×3, 1×1 with four times the channels.
    Bottleneck,
}

impl BlockKind {
    fn expansion(self) -> i64 {
        match self {
            Self::Basic => 1,
            Self::Bottleneck => 4,
        }
    }
}

/// The network that `model` describes for inputs of so many channels, and where its tensors lie;
/// nothing if it is no ResNet.
pub(super) fn plan(model: &Model, channels: i64) -> Option<(Resnet, Layout)> {
    let (kind, depths) = match model.arch {
        Arch::Resnet18 => (BlockKind::Basic, [2, 2, 2, 2]),
        Arch::Resnet34 | Arch::Resnet34In1d => (BlockKind::Basic, [3, 4, 6, 3]),
        Arch::Resnet50 => (BlockKind::Bottleneck, [3, 4, 6, 3]),
        Arch::Resnet101 => (BlockKind::Bottleneck, [3, 4, 23, 3]),
        Arch::Resnet152 => (BlockKind::Bottleneck, [3, 8, 36, 3]),
        Arch::Linear => return None,
    };
    let (dimensions, sides) = match model.arch {
        Arch::Resnet34In1d => (Dimensions::One, Sides { stem: 15, block: 9 }),
        _ => (Dimensions::Two, Sides { stem: 7, block: 3 }),
    };
    let mut planner = Planner { model, kind, dimensions, sides, layout: Layout::default() };
    planner.enter(Stage::Stem);
    let shape = Shape { inputs: channels, outputs: WIDTH, side: sides.stem, stride: 2 };
    let stem = planner.conv_norm("conv1", "bn1", shape, 1.0);
    let mut stages = Vec::new();
    let mut inputs = WIDTH;
    let mut width = WIDTH;
    for ((number, stage), depth) in (1..).zip(&Stage::ALL[1..]).zip(depths) {
        planner.enter(*stage);
        let mut blocks = Vec::new();
        for index in 0..depth {
            let stride = if number > 1 && index == 0 { 2 } else { 1 };
            blocks.push(planner.block(&format!("layer{number}.{index}"), inputs, width, stride));
            inputs = width * kind.expansion();
        }
        stages.push(blocks);
        width *= 2;
    }
    planner.layout.freeze = false;
    let classifier = planner.linear("fc", inputs, i64::from(model.num_classes));
    Some((Resnet { stem, stages, classifier, dimensions }, planner.layout.finish()))
}

struct Planner<'a> {
    model: &'a Model,
    kind: BlockKind,
    dimensions: Dimensions,
    sides: Sides,
    layout: Layout,
}

/// Sides of the kernels larger than one.
#[derive(Clone, Copy)]
struct Sides {
    stem: i64,
    block: i64,
}

/// A convolution with equal sides.
#[derive(Clone, Copy)]
struct Shape {
    inputs: i64,
    outputs: i64,
    side: i64,
    stride: i64,
}

impl Planner<'_> {
    /// What is added from here on belongs to `stage`.
    fn enter(&mut self, stage: Stage) {
        self.layout.freeze = self.model.freeze.contains(&stage);
    }

    fn block(&mut self, name: &str, inputs: i64, width: i64, stride: i64) -> Block {
        let outputs = width * self.kind.expansion();
        let side = self.sides.block;
        let shapes = match self.kind {
            BlockKind::Basic => vec![
                Shape { inputs, outputs: width, side, stride },
                Shape { inputs: width, outputs, side, stride: 1 },
            ],
            BlockKind::Bottleneck => vec![
                Shape { inputs, outputs: width, side: 1, stride: 1 },
                Shape { inputs: width, outputs: width, side, stride },
                Shape { inputs: width, outputs, side: 1, stride: 1 },
            ],
        };
        let last = shapes.len();
        let last_scale = if self.model.zero_init_gamma { 0.0 } else { 1.0 };
        let mut layer = |(number, shape)| {
            let scale = if number == last { last_scale } else { 1.0 };
            let (conv, norm) = (format!("{name}.conv{number}"), format!("{name}.bn{number}"));
            self.conv_norm(&conv, &norm, shape, scale)
        };
        let body = (1..).zip(shapes).map(&mut layer).collect();
        let shortcut = (stride != 1 || inputs != outputs).then(|| {
            let (conv, norm) = (format!("{name}.downsample.0"), format!("{name}.downsample.1"));
            self.conv_norm(&conv, &norm, Shape { inputs, outputs, side: 1, stride }, 1.0)
        });
        Block { body, shortcut }
    }

    fn conv_norm(&mut self, conv: &str, norm: &str, shape: Shape, scale: f32) -> ConvNorm {
        let Shape { inputs, outputs, side, stride } = shape;
        let (size, taps) = match self.dimensions {
            Dimensions::One => (vec![outputs, inputs, side], side),
            Dimensions::Two => (vec![outputs, inputs, side, side], side * side),
        };
        // He et al. 2015 (arXiv 1502.01852) §2.2, backward case; torch's
        // `kaiming_normal_(mode="fan_out", nonlinearity="relu")`.
        let init = Init::Normal { std: (2.0 / (outputs * taps) as f64).sqrt() };
        let kernel = self.parameter(format!("{conv}.weight"), size, init);
        let statistic = |layout: &mut Layout, name, value| {
            layout.statistic(format!("{norm}.{name}"), outputs, Init::Constant(value))
        };
        let blurred = self.model.blur_pool && stride > 1 && inputs >= LEAST_BLURRED;
        ConvNorm {
            kernel,
            dimensions: self.dimensions,
            side,
            stride,
            blurred: blurred.then_some(inputs),
            scale: self.parameter(format!("{norm}.weight"), vec![outputs], Init::Constant(scale)),
            shift: self.parameter(format!("{norm}.bias"), vec![outputs], Init::Constant(0.0)),
            mean: statistic(&mut self.layout, "running_mean", 0.0),
            variance: statistic(&mut self.layout, "running_var", 1.0),
        }
    }

    fn linear(&mut self, name: &str, inputs: i64, outputs: i64) -> Linear {
        // torch's `Linear`: `kaiming_uniform_(a=sqrt(5))`, which comes to 1/sqrt(inputs) for the
        // weight, and the same bound for the bias.
        let init = Init::Uniform { bound: (inputs as f64).sqrt().recip() };
        Linear {
            weight: self.parameter(format!("{name}.weight"), vec![outputs, inputs], init),
            bias: self.parameter(format!("{name}.bias"), vec![outputs], init),
        }
    }

    fn parameter(&mut self, name: String, shape: Vec<i64>, init: Init) -> usize {
        self.layout.parameter(name, shape, self.model.channels_last, init)
    }
}

impl Resnet {
    /// Outputs (samples, classes), f32, of `inputs`: images (samples, 3, height, width) or signals
    /// (samples, channels, length).
    pub(super) fn forward(&self, inputs: &Tensor, tensors: Tensors<'_>) -> tch::Result<Tensor> {
        let mut x = inputs.shallow_clone();
        for stage in Stage::ALL {
            x = self.stage(stage, &x, tensors)?;
        }
        self.head(&x, tensors)
    }

    /// One stage's activations.
    pub(super) fn stage(
        &self,
        stage: Stage,
        x: &Tensor,
        tensors: Tensors<'_>,
    ) -> tch::Result<Tensor> {
        let Some(blocks) = (stage as usize).checked_sub(1).and_then(|at| self.stages.get(at))
        else {
            let x = match tensors.fused_batch() {
                Some(fused) => self.stem.forward_fused(x, tensors, fused, Then::Relu)?,
                None => self.stem.forward(x, tensors)?.f_relu_()?,
            };
            return match self.dimensions {
                Dimensions::One => x.f_max_pool1d([3], [2], [1], [1], false),
                Dimensions::Two => x.f_max_pool2d([3, 3], [2, 2], [1, 1], [1, 1], false),
            };
        };
        let mut x = x.shallow_clone();
        for block in blocks {
            x = block.forward(&x, tensors)?;
        }
        Ok(x)
    }

    /// Outputs of the last stage's activations.
    pub(super) fn head(&self, x: &Tensor, tensors: Tensors<'_>) -> tch::Result<Tensor> {
        let pooled = match self.dimensions {
            Dimensions::One => x.f_adaptive_avg_pool1d([1])?,
            Dimensions::Two => x.f_adaptive_avg_pool2d([1, 1])?,
        };
        let pooled = pooled.f_flatten(1, -1)?;
        let weight = &tensors.parameters[self.classifier.weight];
        let bias = &tensors.parameters[self.classifier.bias];
        if weight.kind() == bias.kind() {
            return pooled.f_linear(weight, Some(bias));
        }
        // The product in the recipe's number format, the sum in f32.
        pooled.f_linear(weight, None::<&Tensor>)?.f_to_kind(bias.kind())?.f_add(bias)
    }

    /// Parameters of a stage.
    pub(super) fn parameters_of(&self, stage: Stage) -> Vec<usize> {
        let layers: Vec<&ConvNorm> = match stage {
            Stage::Stem => vec![&self.stem],
            _ => {
                let blocks = self.stages[stage as usize - 1].iter();
                blocks.flat_map(|block| block.body.iter().chain(&block.shortcut)).collect()
            }
        };
        layers.iter().flat_map(|layer| [layer.kernel, layer.scale, layer.shift]).collect()
    }

    /// Parameters of the head.
    pub(super) fn parameters_of_head(&self) -> Vec<usize> {
        vec![self.classifier.weight, self.classifier.bias]
    }

    /// Least number of samples per batch with which every BatchNorm layer sees more than one value
    /// per channel, as its unbiased variance needs, for inputs of so many pixels' side or samples'
    /// length.
    pub(super) fn least_batch(side: u64) -> usize {
        // Five halvings, each rounded up: up to 32 pixels, one value per sample is left.
        if side > 32 { 1 } else { 2 }
    }
}

impl Block {
    fn forward(&self, x: &Tensor, tensors: Tensors<'_>) -> tch::Result<Tensor> {
        if let Some(fused) = tensors.fused_batch() {
            return self.forward_fused(x, tensors, fused);
        }
        // BatchNorm and the sum do not need their output for the gradient, hence the operations in
        // place, as in torchvision.
        let mut y = x.shallow_clone();
        for (index, layer) in self.body.iter().enumerate() {
            if index > 0 {
                y = y.f_relu_()?;
            }
            y = layer.forward(&y, tensors)?;
        }
        let mut sum = match &self.shortcut {
            Some(layer) => y.f_add_(&layer.forward(x, tensors)?)?,
            None => y.f_add_(x)?,
        };
        sum.f_relu_()
    }

    fn forward_fused(
        &self,
        x: &Tensor,
        tensors: Tensors<'_>,
        fused: (Fused, &[Tensor]),
    ) -> tch::Result<Tensor> {
        let shortcut = match &self.shortcut {
            Some(layer) => layer.forward_fused(x, tensors, fused, Then::Nothing)?,
            None => x.shallow_clone(),
        };
        let mut y = x.shallow_clone();
        for (index, layer) in (1..).zip(&self.body) {
            let last = index == self.body.len();
            let then = if last { Then::AddRelu(&shortcut) } else { Then::Relu };
            y = layer.forward_fused(&y, tensors, fused, then)?;
        }
        Ok(y)
    }
}

impl ConvNorm {
    fn forward(&self, x: &Tensor, tensors: Tensors<'_>) -> tch::Result<Tensor> {
        // Momentum 1 replaces the running statistics with the batch's.
        let (views, training, momentum) = match tensors.batch {
            Some(views) => (views, true, 1.0),
            None => (tensors.running, false, 0.0),
        };
        self.convolve_all(x, tensors)?.f_batch_norm(
            Some(&tensors.parameters[self.scale]),
            Some(&tensors.parameters[self.shift]),
            Some(&views[self.mean]),
            Some(&views[self.variance]),
            training,
            momentum,
            EPSILON,
            true,
        )
    }

    fn forward_fused(
        &self,
        x: &Tensor,
        tensors: Tensors<'_>,
        (fused, batch): (Fused, &[Tensor]),
        then: Then<'_>,
    ) -> tch::Result<Tensor> {
        let layer = Layer {
            scale: &tensors.parameters[self.scale],
            shift: &tensors.parameters[self.shift],
            batch_mean: &batch[self.mean],
            batch_variance: &batch[self.variance],
            epsilon: EPSILON,
        };
        fused.batch_norm(&self.convolve_all(x, tensors)?, layer, then)
    }

    /// Blurred before if the recipe says so.
    fn convolve_all(&self, x: &Tensor, tensors: Tensors<'_>) -> tch::Result<Tensor> {
        let blurred = match (self.blurred, tensors.blur) {
            (Some(channels), Some(filters)) => Some(blur(x, channels, filters)?),
            _ => None,
        };
        let x = blurred.as_ref().unwrap_or(x);
        self.convolve(x, &tensors.parameters[self.kernel], tensors)
    }

    fn convolve(&self, x: &Tensor, kernel: &Tensor, tensors: Tensors<'_>) -> tch::Result<Tensor> {
        let none = None::<&Tensor>;
        let (stride, padding) = (self.stride, self.side / 2);
        match self.dimensions {
            Dimensions::One => x.f_conv1d(kernel, none, [stride], [padding], [1], 1),
            Dimensions::Two if self.side == 1 && tensors.pointwise_as_product => {
                let mut pixels = x.f_permute([0, 2, 3, 1])?;
                if stride > 1 {
                    pixels =
                        pixels.f_slice(1, None, None, stride)?.f_slice(2, None, None, stride)?;
                }
                // Of more than two dimensions, `linear` would choose between one product and one per
                // image by whether the weight asks for a gradient, and the two round differently on
                // some processors: averaged and frozen weights, which ask for none, must give the bits
                // of trained ones.
                let mut shape = pixels.size();
                let channels = shape.pop().unwrap_or_default();
                shape.push(-1);
                let matrix = kernel.f_flatten(1, -1)?;
                let product = pixels.f_reshape([-1, channels])?.f_linear(&matrix, none)?;
                product.f_reshape(&shape)?.f_permute([0, 3, 1, 2])
            }
            Dimensions::Two => {
                x.f_conv2d(kernel, none, [stride, stride], [padding, padding], [1, 1], 1)
            }
        }
    }
}

/// The filters that `model` blurs with, one per channel, if it does: outer product of (1, 2, 1) with
/// itself, over 16.
pub(super) fn blur_filters(
    model: &Model,
    kind: tch::Kind,
    device: Device,
) -> tch::Result<Option<Tensor>> {
    if !model.blur_pool {
        return Ok(None);
    }
    let row = Tensor::f_from_slice(&[1.0_f32, 2.0, 1.0])?;
    let filter = row.f_outer(&row)?.f_div_scalar(16.0)?;
    let filters = filter.f_repeat([MOST_CHANNELS, 1, 1, 1])?.f_to_kind(kind)?;
    filters.f_to_device(device).map(Some)
}

/// Zhang 2019 (arXiv 1904.11486): each channel with its own filter.
fn blur(x: &Tensor, channels: i64, filters: &Tensor) -> tch::Result<Tensor> {
    let filters = filters.f_narrow(0, 0, channels)?;
    x.f_conv2d(&filters, None::<&Tensor>, [1, 1], [1, 1], [1, 1], channels)
}
