//! A described network as a list of operations with their sizes.
//!
//! What is kept for the gradient follows from what the trainer's operations do in place
//! (`crates/trainer/src/torch/network.rs`): BatchNorm keeps its input (the convolution's output), ReLU
//! its result, which is the next convolution's input; the sum at a block's end keeps nothing.

pub use baton_model::Input;
use baton_model::{ConvNorm, Description, Layer as Described, Linear, Size, Tensor};
use baton_recipe::spec::Model;

use crate::layer::{Kind, Layer, Traffic, Work};

/// Bytes of an index that max pooling keeps (libtorch: i64).
const INDEX_BYTES: u64 = 8;
/// Bytes of a number in f32.
const F32_BYTES: u64 = 4;

/// A network for samples of one size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    /// In the order of the forward pass.
    pub layers: Vec<Layer>,
}

impl Network {
    /// The network of `model` for such samples; nothing if it is not made of layers.
    #[must_use]
    pub fn new(model: &Model, input: Input) -> Option<Self> {
        let network = model.describe(input.size().channels)?;
        Some(Self::of(&network, input))
    }

    /// `network` for such samples.
    #[must_use]
    pub fn of(network: &Description, input: Input) -> Self {
        let first = network.all_blocks().next().map(|block| block.name.clone());
        let mut walk = Walk { network, block: first, size: input.size(), layers: Vec::new() };
        walk.input();
        for block in &network.blocks {
            walk.block = Some(block.name.clone());
            block.layers.iter().for_each(|layer| walk.layer(layer));
        }
        walk.block = None;
        network.head.layers.iter().for_each(|layer| walk.layer(layer));
        Self { layers: walk.layers }
    }

    fn trained(&self) -> impl Iterator<Item = &Layer> {
        self.layers.iter().filter(|layer| !layer.frozen)
    }

    /// Trained values.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        self.trained().map(|layer| layer.kernel + layer.other_parameters).sum()
    }

    /// Those of them that have a working copy: weights of convolutions and of the linear layer.
    #[must_use]
    pub fn kernels(&self) -> u64 {
        self.trained().map(|layer| layer.kernel).sum()
    }

    /// Running means and variances that training moves.
    #[must_use]
    pub fn statistics(&self) -> u64 {
        self.trained().map(|layer| layer.statistics).sum()
    }

    /// Frozen values, and those of them that have a working copy.
    #[must_use]
    pub fn frozen(&self) -> [u64; 2] {
        let frozen = self.layers.iter().filter(|layer| layer.frozen);
        let of = |layer: &Layer| {
            [layer.kernel + layer.other_parameters + layer.statistics, layer.kernel]
        };
        frozen.map(of).fold([0, 0], |[all, cast], [more, more_cast]| [all + more, cast + more_cast])
    }

    /// Multiplications with addition in a forward pass of one sample.
    #[must_use]
    pub fn macs(&self) -> u64 {
        self.layers.iter().map(|layer| layer.forward.macs).sum()
    }
}

/// Goes through a network and writes down its operations.
struct Walk<'a> {
    network: &'a Description,
    block: Option<String>,
    /// What the next operation sees.
    size: Size,
    layers: Vec<Layer>,
}

impl Walk<'_> {
    fn push(&mut self, name: &str, kind: Kind, after: Size, make: impl FnOnce(&mut Layer)) {
        let mut layer = Layer {
            name: name.to_owned(),
            block: self.block.clone(),
            kind,
            kernel: 0,
            other_parameters: 0,
            statistics: 0,
            frozen: false,
            outputs: after.values(),
            kept: Traffic::default(),
            forward: Work::default(),
            backward: Work::default(),
            evaluation: Work::default(),
        };
        make(&mut layer);
        self.layers.push(layer);
        self.size = after;
    }

    fn layer(&mut self, layer: &Described) {
        match layer {
            Described::ConvNorm(layer) => self.conv_norm(layer),
            Described::MaxPool { side, stride } => {
                self.max_pool(self.size.strided(*side, *stride));
            }
            Described::Residual { name, body, shortcut } => {
                self.residual(name, body, shortcut.as_ref());
            }
            Described::GlobalMean => self.global_mean(),
            Described::Linear(layer) => self.linear(layer),
        }
    }

    /// u8 to f32, minus the mean, by the deviation, to the working format.
    fn input(&mut self) {
        let (values, size) = (self.size.values(), self.size);
        let traffic = Traffic { values, bytes: values * (1 + 6 * F32_BYTES) };
        self.push("input", Kind::Input, size, |layer| {
            layer.kept = Traffic::of(values);
            layer.forward = Work { macs: 0, traffic, launches: 4 };
            layer.evaluation = layer.forward;
        });
    }

    fn conv_norm(&mut self, conv: &ConvNorm) {
        let (kernel, scale) =
            (&self.network.parameters[conv.kernel], &self.network.parameters[conv.scale]);
        if conv.blurred {
            self.blur(prefix(kernel));
        }
        let (before, after) = (self.size, conv.after(self.size, self.network));
        let macs = kernel.len() * after.height * after.width;
        let moved = before.values() + after.values();
        // Nobody asks for the gradient of the images.
        let directions = if self.layers.len() == 1 { 1 } else { 2 };
        self.push(&kernel.name, Kind::Convolution, after, |layer| {
            layer.kernel = kernel.len();
            layer.frozen = kernel.is_frozen();
            layer.kept = Traffic::of(after.values());
            layer.forward = Work { macs, traffic: Traffic::of(moved), launches: 1 };
            layer.backward = Work {
                macs: directions * macs,
                traffic: Traffic::of(directions * moved),
                launches: directions,
            };
            layer.evaluation = layer.forward;
        });
        self.push(prefix(scale), Kind::Norm, after, |layer| {
            layer.other_parameters = 2 * after.channels;
            layer.frozen = scale.is_frozen();
            layer.statistics = 2 * after.channels;
            // Statistics first, then the values themselves; the gradient likewise reads twice.
            layer.forward = pass(3 * after.values());
            layer.backward = pass(5 * after.values());
            layer.evaluation = pass(2 * after.values());
        });
        if conv.relu {
            self.relu(&format!("{}_relu", prefix(scale)));
        }
    }

    fn blur(&mut self, conv: &str) {
        let (values, size) = (self.size.values(), self.size);
        self.push(&format!("{conv}.blur"), Kind::Blur, size, |layer| {
            layer.kept = Traffic::of(values);
            layer.forward = pass(2 * values);
            layer.backward = pass(2 * values);
            layer.evaluation = layer.forward;
        });
    }

    fn relu(&mut self, name: &str) {
        let (values, size) = (self.size.values(), self.size);
        self.push(name, Kind::Relu, size, |layer| {
            layer.kept = Traffic::of(values);
            layer.forward = pass(2 * values);
            layer.backward = pass(3 * values);
            layer.evaluation = layer.forward;
        });
    }

    fn max_pool(&mut self, after: Size) {
        let before = self.size.values();
        let indices = after.values() * INDEX_BYTES;
        self.push("maxpool", Kind::Pool, after, |layer| {
            layer.kept = Traffic { values: after.values(), bytes: indices };
            let traffic = Traffic { values: before + after.values(), bytes: indices };
            layer.forward = Work { macs: 0, traffic, launches: 1 };
            layer.backward = layer.forward;
            layer.evaluation = layer.forward;
        });
    }

    fn residual(&mut self, name: &str, body: &[ConvNorm], shortcut: Option<&ConvNorm>) {
        let before = self.size;
        body.iter().for_each(|conv| self.conv_norm(conv));
        let after = self.size;
        if let Some(conv) = shortcut {
            self.size = before;
            self.conv_norm(conv);
        }
        self.push(&format!("{name}.add"), Kind::Add, after, |layer| {
            layer.forward = pass(3 * after.values());
            // The block's input has two gradients, which are added up.
            layer.backward = pass(3 * before.values());
            layer.evaluation = layer.forward;
        });
        self.relu(&format!("{name}.relu"));
    }

    fn global_mean(&mut self) {
        let (before, features) = (self.size.values(), self.size.channels);
        let pooled = Described::GlobalMean.after(self.size, self.network);
        self.push("avgpool", Kind::Pool, pooled, |layer| {
            layer.kept = Traffic::of(features);
            layer.forward = pass(before + features);
            layer.backward = layer.forward;
            layer.evaluation = layer.forward;
        });
    }

    fn linear(&mut self, linear: &Linear) {
        let weight = &self.network.parameters[linear.weight];
        let (features, macs) = (self.size.values(), weight.len());
        let outputs = self.network.parameters[linear.bias].len();
        let after = Size { channels: outputs, height: 1, width: 1 };
        self.push(prefix(weight), Kind::Linear, after, |layer| {
            layer.kernel = macs;
            layer.other_parameters = outputs;
            // The outputs and their logarithms of probability, in f32.
            layer.kept = Traffic { values: 0, bytes: 2 * outputs * F32_BYTES };
            layer.forward = Work { macs, traffic: Traffic::of(features + outputs), launches: 1 };
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

/// The name of the layer that a tensor belongs to.
fn prefix(tensor: &Tensor) -> &str {
    tensor.name.rsplit_once('.').map_or(&tensor.name, |(layer, _)| layer)
}

#[cfg(test)]
mod tests;
