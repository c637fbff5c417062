//! ResNet-18 to ResNet-152: He et al. 2015 (arXiv 1512.03385), with the stride of a bottleneck on its
//! 3×3 convolution ("v1.5", as in torchvision and in every published speed record).
//!
//! Names, shapes, order and the distribution of initial values are torchvision's.

use baton_job::spec::{Arch, Model};
use tch::Tensor;

use super::{flat::Layout, init::Init};

/// Width of the first residual stage.
const WIDTH: i64 = 64;
/// Added to BatchNorm's variance; torch's default.
const EPSILON: f64 = 1e-5;

/// Where BatchNorm takes its statistics from.
#[derive(Clone, Copy)]
pub(super) enum Statistics<'a> {
    /// From the batch; each layer overwrites its views with the batch's mean and unbiased variance.
    Batch(&'a [Tensor]),
    /// From these views, unchanged.
    Running(&'a [Tensor]),
}

/// What a forward pass reads.
#[derive(Clone, Copy)]
pub(super) struct Tensors<'a> {
    /// In the order of [`Layout::parameters`].
    pub(super) parameters: &'a [Tensor],
    /// In the order of [`Layout::statistics`].
    pub(super) statistics: Statistics<'a>,
}

/// A network: only its wiring. Numbers are indices into [`Tensors`].
#[derive(Debug)]
pub(super) struct Resnet {
    stem: ConvNorm,
    blocks: Vec<Block>,
    classifier: Linear,
}

/// A convolution without bias and the BatchNorm after it.
#[derive(Debug)]
struct ConvNorm {
    kernel: usize,
    stride: i64,
    padding: i64,
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
enum Kind {
    /// 3×3, 3×3.
    Basic,
    /// 1×1, 3×3, 1×1 with four times the channels.
    Bottleneck,
}

impl Kind {
    fn expansion(self) -> i64 {
        match self {
            Self::Basic => 1,
            Self::Bottleneck => 4,
        }
    }
}

/// The network that `model` describes and where its tensors lie; nothing if it is no ResNet.
pub(super) fn plan(model: &Model) -> Option<(Resnet, Layout)> {
    let (kind, depths) = match model.arch {
        Arch::Resnet18 => (Kind::Basic, [2, 2, 2, 2]),
        Arch::Resnet34 => (Kind::Basic, [3, 4, 6, 3]),
        Arch::Resnet50 => (Kind::Bottleneck, [3, 4, 6, 3]),
        Arch::Resnet101 => (Kind::Bottleneck, [3, 4, 23, 3]),
        Arch::Resnet152 => (Kind::Bottleneck, [3, 8, 36, 3]),
        Arch::Linear => return None,
    };
    let mut planner = Planner { model, kind, layout: Layout::default() };
    let shape = Shape { inputs: 3, outputs: WIDTH, side: 7, stride: 2 };
    let stem = planner.conv_norm("conv1", "bn1", shape, 1.0);
    let mut blocks = Vec::new();
    let mut channels = WIDTH;
    let mut width = WIDTH;
    for (stage, depth) in (1..).zip(depths) {
        for index in 0..depth {
            let stride = if stage > 1 && index == 0 { 2 } else { 1 };
            let name = format!("layer{stage}.{index}");
            blocks.push(planner.block(&name, channels, width, stride));
            channels = width * kind.expansion();
        }
        width *= 2;
    }
    let classifier = planner.linear("fc", channels, i64::from(model.num_classes));
    Some((Resnet { stem, blocks, classifier }, planner.layout.finish()))
}

struct Planner<'a> {
    model: &'a Model,
    kind: Kind,
    layout: Layout,
}

/// A square convolution.
#[derive(Clone, Copy)]
struct Shape {
    inputs: i64,
    outputs: i64,
    side: i64,
    stride: i64,
}

impl Planner<'_> {
    fn block(&mut self, name: &str, inputs: i64, width: i64, stride: i64) -> Block {
        let outputs = width * self.kind.expansion();
        let shapes = match self.kind {
            Kind::Basic => vec![
                Shape { inputs, outputs: width, side: 3, stride },
                Shape { inputs: width, outputs, side: 3, stride: 1 },
            ],
            Kind::Bottleneck => vec![
                Shape { inputs, outputs: width, side: 1, stride: 1 },
                Shape { inputs: width, outputs: width, side: 3, stride },
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
        // He et al. 2015 (arXiv 1502.01852) §2.2, backward case; torch's
        // `kaiming_normal_(mode="fan_out", nonlinearity="relu")`.
        let std = (2.0 / (outputs * side * side) as f64).sqrt();
        let size = vec![outputs, inputs, side, side];
        let init = Init::Normal { std };
        let kernel = self.parameter(format!("{conv}.weight"), size, init);
        let statistic = |layout: &mut Layout, name, value| {
            layout.statistic(format!("{norm}.{name}"), outputs, Init::Constant(value))
        };
        ConvNorm {
            kernel,
            stride,
            padding: side / 2,
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
    /// Logits (samples, classes) of `images` (samples, 3, height, width).
    pub(super) fn forward(&self, images: &Tensor, tensors: Tensors<'_>) -> tch::Result<Tensor> {
        let mut x = self.stem.forward(images, tensors)?;
        x = x.f_relu_()?.f_max_pool2d([3, 3], [2, 2], [1, 1], [1, 1], false)?;
        for block in &self.blocks {
            x = block.forward(&x, tensors)?;
        }
        let pooled = x.f_adaptive_avg_pool2d([1, 1])?.f_flatten(1, -1)?;
        let Linear { weight, bias } = self.classifier;
        pooled.f_linear(&tensors.parameters[weight], Some(&tensors.parameters[bias]))
    }

    /// Least number of samples per batch with which every BatchNorm layer sees more than one value
    /// per channel, as its unbiased variance needs, for images of so many pixels' side.
    pub(super) fn least_batch(resolution: u32) -> usize {
        // Five halvings, each rounded up: up to 32 pixels, one value per sample is left.
        if resolution > 32 { 1 } else { 2 }
    }
}

impl Block {
    fn forward(&self, x: &Tensor, tensors: Tensors<'_>) -> tch::Result<Tensor> {
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
}

impl ConvNorm {
    fn forward(&self, x: &Tensor, tensors: Tensors<'_>) -> tch::Result<Tensor> {
        let Tensors { parameters, statistics } = tensors;
        // Momentum 1 replaces the running statistics with the batch's.
        let (views, training, momentum) = match statistics {
            Statistics::Batch(views) => (views, true, 1.0),
            Statistics::Running(views) => (views, false, 0.0),
        };
        let stride = [self.stride, self.stride];
        let padding = [self.padding, self.padding];
        let kernel = &parameters[self.kernel];
        x.f_conv2d(kernel, None::<&Tensor>, stride, padding, [1, 1], 1)?.f_batch_norm(
            Some(&parameters[self.scale]),
            Some(&parameters[self.shift]),
            Some(&views[self.mean]),
            Some(&views[self.variance]),
            training,
            momentum,
            EPSILON,
            true,
        )
    }
}
