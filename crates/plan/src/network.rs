//! The networks that a recipe can name, as lists of operations with their sizes.
//!
//! The same walk as the trainer's (`crates/trainer/src/torch/resnet.rs`), without tensors; a test there
//! compares the two. What is kept for the gradient follows from what its operations do in place:
//! BatchNorm keeps its input (the convolution's output), ReLU its result, which is the next
//! convolution's input; the sum at a block's end keeps nothing.

use baton_recipe::spec::{Arch, Model, Stage};

use crate::layer::{Kind, Layer, Traffic, Work};

/// Width of the first residual stage.
const WIDTH: u64 = 64;
/// Strided convolutions of at least so many channels are blurred before.
const LEAST_BLURRED: u64 = 16;
/// Bytes of an index that max pooling keeps (libtorch: i64).
const INDEX_BYTES: u64 = 8;
/// Bytes of a number in f32.
const F32_BYTES: u64 = 4;

/// What a network sees of one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// An RGB image.
    Image {
        /// Its side in pixels.
        resolution: u64,
    },
    /// A signal.
    Signal {
        /// Series side by side.
        channels: u64,
        /// Their length.
        length: u64,
    },
}

/// A network for samples of one size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    /// In the order of the forward pass.
    pub layers: Vec<Layer>,
}

impl Network {
    /// The network of `model` for such samples; nothing if it is no ResNet.
    #[must_use]
    pub fn new(model: &Model, input: Input) -> Option<Self> {
        let (bottleneck, depths) = match model.arch {
            Arch::Resnet18 => (false, [2, 2, 2, 2]),
            Arch::Resnet34 | Arch::Resnet34In1d => (false, [3, 4, 6, 3]),
            Arch::Resnet50 => (true, [3, 4, 6, 3]),
            Arch::Resnet101 => (true, [3, 4, 23, 3]),
            Arch::Resnet152 => (true, [3, 8, 36, 3]),
            Arch::Linear => return None,
        };
        let (map, flat, stem_side, side) = match input {
            Input::Image { resolution } => {
                (Map { channels: 3, height: resolution, width: resolution }, false, 7, 3)
            }
            Input::Signal { channels, length } => {
                (Map { channels, height: 1, width: length }, true, 15, 9)
            }
        };
        let mut walk = Walk { model, flat, stage: Some(Stage::Stem), map, layers: Vec::new() };
        walk.input();
        walk.conv_norm("conv1", Kernel { outputs: WIDTH, side: stem_side, stride: 2 });
        walk.relu("relu");
        walk.max_pool();
        let mut width = WIDTH;
        for ((number, stage), depth) in (1..).zip(&Stage::ALL[1..]).zip(depths) {
            walk.stage = Some(*stage);
            for index in 0..depth {
                let stride = if number > 1 && index == 0 { 2 } else { 1 };
                walk.block(&format!("layer{number}.{index}"), width, side, stride, bottleneck);
            }
            width *= 2;
        }
        walk.stage = None;
        walk.head(u64::from(model.num_classes));
        Some(Self { layers: walk.layers })
    }

    /// Trained values.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        self.layers.iter().map(|layer| layer.kernel + layer.other_parameters).sum()
    }

    /// Those of them that have a working copy: weights of convolutions and of the linear layer.
    #[must_use]
    pub fn kernels(&self) -> u64 {
        self.layers.iter().map(|layer| layer.kernel).sum()
    }

    /// Running means and variances.
    #[must_use]
    pub fn statistics(&self) -> u64 {
        self.layers.iter().map(|layer| layer.statistics).sum()
    }

    /// Multiplications with addition in a forward pass of one sample.
    #[must_use]
    pub fn macs(&self) -> u64 {
        self.layers.iter().map(|layer| layer.forward.macs).sum()
    }

    /// Values that convolutions put out for one sample.
    #[must_use]
    pub fn convolution_outputs(&self) -> u64 {
        let convolutions = self.layers.iter().filter(|layer| layer.kind == Kind::Convolution);
        convolutions.map(|layer| layer.outputs).sum()
    }
}

/// The size of an activation.
#[derive(Clone, Copy)]
struct Map {
    channels: u64,
    height: u64,
    width: u64,
}

impl Map {
    fn values(self) -> u64 {
        self.channels * self.height * self.width
    }
}

/// A convolution with equal sides, padded by half a side.
#[derive(Clone, Copy)]
struct Kernel {
    outputs: u64,
    side: u64,
    stride: u64,
}

/// Goes through a network and writes down what it meets.
struct Walk<'a> {
    model: &'a Model,
    /// One dimension.
    flat: bool,
    stage: Option<Stage>,
    /// What the next operation sees.
    map: Map,
    layers: Vec<Layer>,
}

impl Walk<'_> {
    /// What comes out of a window of `side` values, moved by `stride`.
    fn strided(&self, side: u64, stride: u64) -> Map {
        let along = |length: u64| (length + 2 * (side / 2)).saturating_sub(side) / stride + 1;
        let height = if self.flat { 1 } else { along(self.map.height) };
        Map { channels: self.map.channels, height, width: along(self.map.width) }
    }

    fn push(&mut self, name: &str, kind: Kind, after: Map, make: impl FnOnce(&mut Layer)) {
        let mut layer = Layer {
            name: name.to_owned(),
            stage: self.stage,
            kind,
            kernel: 0,
            other_parameters: 0,
            statistics: 0,
            outputs: after.values(),
            kept: Traffic::default(),
            forward: Work::default(),
            backward: Work::default(),
            evaluation: Work::default(),
        };
        make(&mut layer);
        self.layers.push(layer);
        self.map = after;
    }

    /// u8 to f32, minus the mean, by the deviation, to the working format.
    fn input(&mut self) {
        let (values, map) = (self.map.values(), self.map);
        let traffic = Traffic { values, bytes: values * (1 + 6 * F32_BYTES) };
        self.push("input", Kind::Input, map, |layer| {
            layer.kept = Traffic::of(values);
            layer.forward = Work { macs: 0, traffic, launches: 4 };
            layer.evaluation = layer.forward;
        });
    }

    fn conv_norm(&mut self, conv: &str, kernel: Kernel) {
        let Kernel { outputs, side, stride } = kernel;
        if self.model.blur_pool && stride > 1 && self.map.channels >= LEAST_BLURRED {
            self.blur(conv);
        }
        let before = self.map;
        let taps = if self.flat { side } else { side * side };
        let after = Map { channels: outputs, ..self.strided(side, stride) };
        let weights = before.channels * outputs * taps;
        let macs = weights * after.height * after.width;
        let moved = before.values() + after.values();
        // Nobody asks for the gradient of the images.
        let directions = if self.layers.len() == 1 { 1 } else { 2 };
        self.push(&format!("{conv}.weight"), Kind::Convolution, after, |layer| {
            layer.kernel = weights;
            layer.kept = Traffic::of(after.values());
            layer.forward = Work { macs, traffic: Traffic::of(moved), launches: 1 };
            layer.backward = Work {
                macs: directions * macs,
                traffic: Traffic::of(directions * moved),
                launches: directions,
            };
            layer.evaluation = layer.forward;
        });
        self.push(&norm_of(conv), Kind::Norm, after, |layer| {
            layer.other_parameters = 2 * after.channels;
            layer.statistics = 2 * after.channels;
            // Statistics first, then the values themselves; the gradient likewise reads twice.
            layer.forward = pass(3 * after.values());
            layer.backward = pass(5 * after.values());
            layer.evaluation = pass(2 * after.values());
        });
    }

    fn blur(&mut self, conv: &str) {
        let (values, map) = (self.map.values(), self.map);
        self.push(&format!("{conv}.blur"), Kind::Blur, map, |layer| {
            layer.kept = Traffic::of(values);
            layer.forward = pass(2 * values);
            layer.backward = pass(2 * values);
            layer.evaluation = layer.forward;
        });
    }

    fn relu(&mut self, name: &str) {
        let (values, map) = (self.map.values(), self.map);
        self.push(name, Kind::Relu, map, |layer| {
            layer.kept = Traffic::of(values);
            layer.forward = pass(2 * values);
            layer.backward = pass(3 * values);
            layer.evaluation = layer.forward;
        });
    }

    fn max_pool(&mut self) {
        let (before, after) = (self.map.values(), self.strided(3, 2));
        let indices = after.values() * INDEX_BYTES;
        self.push("maxpool", Kind::Pool, after, |layer| {
            layer.kept = Traffic { values: after.values(), bytes: indices };
            let traffic = Traffic { values: before + after.values(), bytes: indices };
            layer.forward = Work { macs: 0, traffic, launches: 1 };
            layer.backward = layer.forward;
            layer.evaluation = layer.forward;
        });
    }

    fn block(&mut self, name: &str, width: u64, side: u64, stride: u64, bottleneck: bool) {
        let before = self.map;
        let outputs = if bottleneck { 4 * width } else { width };
        let kernel = |outputs, side, stride| Kernel { outputs, side, stride };
        let body = match bottleneck {
            false => vec![kernel(width, side, stride), kernel(outputs, side, 1)],
            true => vec![kernel(width, 1, 1), kernel(width, side, stride), kernel(outputs, 1, 1)],
        };
        for (number, kernel) in (1..).zip(body) {
            if number > 1 {
                self.relu(&format!("{name}.relu{}", number - 1));
            }
            self.conv_norm(&format!("{name}.conv{number}"), kernel);
        }
        let after = self.map;
        if stride != 1 || before.channels != outputs {
            self.map = before;
            self.conv_norm(&format!("{name}.downsample.0"), kernel(outputs, 1, stride));
        }
        self.push(&format!("{name}.add"), Kind::Add, after, |layer| {
            layer.forward = pass(3 * after.values());
            // The block's input has two gradients, which are added up.
            layer.backward = pass(3 * before.values());
            layer.evaluation = layer.forward;
        });
        self.relu(&format!("{name}.relu"));
    }

    fn head(&mut self, outputs: u64) {
        let (before, features) = (self.map.values(), self.map.channels);
        let pooled = Map { channels: features, height: 1, width: 1 };
        self.push("avgpool", Kind::Pool, pooled, |layer| {
            layer.kept = Traffic::of(features);
            layer.forward = pass(before + features);
            layer.backward = layer.forward;
            layer.evaluation = layer.forward;
        });
        let after = Map { channels: outputs, height: 1, width: 1 };
        self.push("fc", Kind::Linear, after, |layer| {
            layer.kernel = features * outputs;
            layer.other_parameters = outputs;
            // The outputs and their logarithms of probability, in f32.
            layer.kept = Traffic { values: 0, bytes: 2 * outputs * F32_BYTES };
            let (macs, moved) = (features * outputs, Traffic::of(features + outputs));
            layer.forward = Work { macs, traffic: moved, launches: 1 };
            let back = Traffic::of(2 * (features + outputs));
            layer.backward = Work { macs: 2 * macs, traffic: back, launches: 2 };
            layer.evaluation = layer.forward;
        });
    }
}

/// An operation that only moves values.
fn pass(values: u64) -> Work {
    Work { macs: 0, traffic: Traffic::of(values), launches: 1 }
}

/// torchvision's name of the BatchNorm after a convolution.
fn norm_of(conv: &str) -> String {
    match conv.strip_suffix(".0") {
        Some(shortcut) => format!("{shortcut}.1"),
        None => conv.replace("conv", "bn"),
    }
}

#[cfg(test)]
mod tests;
