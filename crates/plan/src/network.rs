//! A network as a list of operations with their sizes and costs.
//!
//! Which data is kept for the gradient depends on which of the trainer's operations work in place
//! (`crates/trainer/src/torch/network.rs`): BatchNorm keeps its input (the convolution's output), ReLU keeps its
//! result, which is the next convolution's input; the addition at the end of a block keeps nothing.

pub use baton_model::InputShape;
use baton_model::{ConvNorm, Layer, Linear, NetworkDescription, Size, Tensor};
use baton_recipe::{
    JobSpec,
    spec::{ModelSpec, NamePatterns, OptimizerSpec},
};

use crate::{
    layer::{NetworkOperation, OperationKind, PassCost, Traffic},
    memory::MemoryPart,
};

/// Size of an index that max pooling keeps (libtorch uses i64).
const INDEX_BYTES: u64 = 8;
/// Size of an f32 value.
pub(crate) const F32_BYTES: u64 = 4;

/// A network for samples of one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// Its operations in the order of the forward pass.
    pub layers: Vec<NetworkOperation>,
    /// Data kept in memory during a pass whatever the number of samples, bytes: copies of weights that autocast makes in
    /// every pass, and the statistics of BatchNorm in programs.
    pub kept_per_pass: u64,
    /// Trained weights whose steps Muon makes orthogonal, unless the recipe leaves them to AdamW.
    pub hidden: Vec<Tensor>,
    /// Memory for uses that other networks do not have.
    pub parts: Vec<MemoryPart>,
    /// Blocks that are recomputed for the gradient even if `train.recompute` does not name them.
    pub recomputed: Vec<String>,
    /// Blocks of `recomputed` whose outputs are not kept, so that they run a third time, for the next block.
    pub recomputed_twice: Vec<String>,
}

impl Network {
    /// Number and multiply-adds of the matrices that Muon makes orthogonal in each step; none with another optimizer.
    #[must_use]
    pub fn muon(&self, spec: &JobSpec) -> (u64, u64) {
        if !matches!(spec.optimizer, OptimizerSpec::Muon { .. }) {
            return (0, 0);
        }
        let adamw = NamePatterns::of(spec.optimizer.adamw());
        let is_adamw = |weight: &&Tensor| weight.has_name(|name| adamw.matches(name));
        let matrices = self.hidden.iter().filter(|weight| !is_adamw(weight));
        matrices.fold((0, 0_u64), |(count, macs), weight| {
            (count + 1, macs.saturating_add(muon_macs(weight)))
        })
    }

    /// The network of `model` for samples of this shape; `None` if it is not made of layers.
    #[must_use]
    pub fn new(model: &ModelSpec, input: InputShape) -> Option<Self> {
        let network = model.describe(input.size().channels)?;
        Some(Self::of(&network, input))
    }

    /// The operations of `network` for samples of this shape.
    #[must_use]
    pub fn of(network: &NetworkDescription, input: InputShape) -> Self {
        let first = network.all_blocks().next().map(|block| block.name.clone());
        let mut walk =
            NetworkWalker { network, block: first, size: input.size(), layers: Vec::new() };
        walk.input();
        for block in &network.blocks {
            walk.block = Some(block.name.clone());
            block.layers.iter().for_each(|layer| walk.layer(layer));
        }
        walk.block = None;
        network.head.layers.iter().for_each(|layer| walk.layer(layer));
        Self { hidden: hidden(network), ..Self::of_operations(walk.layers) }
    }

    pub(crate) fn of_operations(layers: Vec<NetworkOperation>) -> Self {
        Self {
            layers,
            kept_per_pass: 0,
            hidden: Vec::new(),
            parts: Vec::new(),
            recomputed: Vec::new(),
            recomputed_twice: Vec::new(),
        }
    }

    /// Whether an operation is computed again for the gradient.
    #[must_use]
    pub fn recomputes(&self, spec: &JobSpec, layer: &NetworkOperation) -> bool {
        layer.is_in(&spec.train.recompute) || layer.is_in(&self.recomputed)
    }

    /// How often an operation's forward pass is computed in training.
    #[must_use]
    pub fn forward_passes(&self, spec: &JobSpec, layer: &NetworkOperation) -> usize {
        let again = self.recomputes(spec, layer);
        1 + usize::from(again) + usize::from(again && layer.is_in(&self.recomputed_twice))
    }

    fn trained(&self) -> impl Iterator<Item = &NetworkOperation> {
        self.layers.iter().filter(|layer| !layer.frozen)
    }

    /// Number of trained parameters.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        self.trained().map(|layer| layer.kernel + layer.other_parameters).sum()
    }

    /// Number of tensors of trained parameters: of a layer its weight, and BatchNorm's two.
    #[must_use]
    pub fn tensors(&self) -> u64 {
        self.trained()
            .map(|layer| u64::from(layer.kernel > 0) + 2 * u64::from(layer.other_parameters > 0))
            .sum()
    }

    /// Number of trained parameters with a working copy: the weights of convolutions and of the linear layer.
    #[must_use]
    pub fn kernels(&self) -> u64 {
        self.trained().map(|layer| layer.kernel).sum()
    }

    /// Number of running means and variances that training updates.
    #[must_use]
    pub fn statistics(&self) -> u64 {
        self.trained().map(|layer| layer.statistics).sum()
    }

    /// Number of frozen values, and number of those that have a working copy.
    #[must_use]
    pub fn frozen(&self) -> [u64; 2] {
        let frozen = self.layers.iter().filter(|layer| layer.frozen);
        let of = |layer: &NetworkOperation| {
            [layer.kernel + layer.other_parameters + layer.statistics, layer.kernel]
        };
        frozen.map(of).fold([0, 0], |[all, cast], [more, more_cast]| [all + more, cast + more_cast])
    }

    /// Multiply-add operations in a forward pass of one sample.
    #[must_use]
    pub fn macs(&self) -> u64 {
        self.layers.iter().map(|layer| layer.forward.macs).fold(0, u64::saturating_add)
    }

    /// Whether cuDNN computes a part of it.
    #[must_use]
    pub fn uses_cudnn(&self) -> bool {
        use OperationKind::{Convolution, Recurrent};
        self.layers.iter().any(|layer| matches!(layer.kind, Convolution | Recurrent))
    }
}

/// Visits a network's layers in order and collects their operations.
struct NetworkWalker<'a> {
    network: &'a NetworkDescription,
    block: Option<String>,
    /// Shape of the next operation's input.
    size: Size,
    layers: Vec<NetworkOperation>,
}

impl NetworkWalker<'_> {
    fn push(
        &mut self,
        name: &str,
        kind: OperationKind,
        after: Size,
        make: impl FnOnce(&mut NetworkOperation),
    ) {
        let mut layer = NetworkOperation::new(name, self.block.clone(), kind, after.values());
        make(&mut layer);
        self.layers.push(layer);
        self.size = after;
    }

    fn layer(&mut self, layer: &Layer) {
        match layer {
            Layer::ConvNorm(layer) => self.conv_norm(layer),
            Layer::MaxPool { side, stride } => {
                self.max_pool(self.size.strided(*side, *stride));
            }
            Layer::Residual { name, body, shortcut } => {
                self.residual(name, body, shortcut.as_ref());
            }
            Layer::GlobalMean => self.global_mean(),
            Layer::Linear(layer) => self.linear(layer),
        }
    }

    fn input(&mut self) {
        let (values, size) = (self.size.values(), self.size);
        self.push("input", OperationKind::Input, size, |layer| {
            layer.kept = Traffic::of(values);
            layer.forward = input_cost(values);
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
        // The first convolution needs no gradient of its input, the images.
        let directions = if self.layers.len() == 1 { 1 } else { 2 };
        self.push(&kernel.name, OperationKind::Convolution, after, |layer| {
            layer.kernel = kernel.len();
            layer.frozen = kernel.is_frozen();
            layer.kept = Traffic::of(after.values());
            layer.forward =
                PassCost { macs, traffic: Traffic::of(moved), launches: 1, ..PassCost::default() };
            layer.backward = PassCost {
                macs: directions * macs,
                traffic: Traffic::of(directions * moved),
                launches: directions,
                ..PassCost::default()
            };
            layer.evaluation = layer.forward;
        });
        self.push(prefix(scale), OperationKind::Norm, after, |layer| {
            layer.other_parameters = 2 * after.channels;
            layer.frozen = scale.is_frozen();
            layer.statistics = 2 * after.channels;
            // The input is read twice: for the statistics, then to normalise it. The backward pass reads twice too.
            layer.forward = move_only(3 * after.values());
            layer.backward = move_only(5 * after.values());
            layer.evaluation = move_only(2 * after.values());
        });
        if conv.relu {
            self.relu(&format!("{}_relu", prefix(scale)));
        }
    }

    fn blur(&mut self, conv: &str) {
        let (values, size) = (self.size.values(), self.size);
        self.push(&format!("{conv}.blur"), OperationKind::Blur, size, |layer| {
            layer.kept = Traffic::of(values);
            layer.forward = move_only(2 * values);
            layer.backward = move_only(2 * values);
            layer.evaluation = layer.forward;
        });
    }

    fn relu(&mut self, name: &str) {
        let (values, size) = (self.size.values(), self.size);
        self.push(name, OperationKind::Relu, size, |layer| {
            layer.kept = Traffic::of(values);
            layer.forward = move_only(2 * values);
            layer.backward = move_only(3 * values);
            layer.evaluation = layer.forward;
        });
    }

    fn max_pool(&mut self, after: Size) {
        let before = self.size.values();
        let indices = after.values() * INDEX_BYTES;
        self.push("maxpool", OperationKind::Pool, after, |layer| {
            layer.kept = Traffic { values: after.values(), bytes: indices };
            let traffic = Traffic { values: before + after.values(), bytes: indices };
            layer.forward = PassCost { macs: 0, traffic, launches: 1, ..PassCost::default() };
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
        self.push(&format!("{name}.add"), OperationKind::Add, after, |layer| {
            layer.forward = move_only(3 * after.values());
            // The block's input has two gradients, which are added up.
            layer.backward = move_only(3 * before.values());
            layer.evaluation = layer.forward;
        });
        self.relu(&format!("{name}.relu"));
    }

    fn global_mean(&mut self) {
        let (before, features) = (self.size.values(), self.size.channels);
        let pooled = Layer::GlobalMean.after(self.size, self.network);
        self.push("avgpool", OperationKind::Pool, pooled, |layer| {
            layer.kept = Traffic::of(features);
            layer.forward = move_only(before + features);
            layer.backward = layer.forward;
            layer.evaluation = layer.forward;
        });
    }

    fn linear(&mut self, linear: &Linear) {
        let weight = &self.network.parameters[linear.weight];
        let (features, macs) = (self.size.values(), weight.len());
        let outputs = self.network.parameters[linear.bias].len();
        let after = Size { channels: outputs, height: 1, width: 1 };
        self.push(prefix(weight), OperationKind::Linear, after, |layer| {
            layer.kernel = macs;
            layer.other_parameters = outputs;
            // The outputs and their log probabilities, in f32.
            layer.kept = Traffic { values: 0, bytes: 2 * outputs * F32_BYTES };
            layer.forward = PassCost {
                macs,
                traffic: Traffic::of(features + outputs),
                launches: 1,
                ..PassCost::default()
            };
            let back = Traffic::of(2 * (features + outputs));
            layer.backward =
                PassCost { macs: 2 * macs, traffic: back, launches: 2, ..PassCost::default() };
            layer.evaluation = layer.forward;
        });
    }
}

pub(crate) fn hidden(network: &NetworkDescription) -> Vec<Tensor> {
    let weights = network.parameters.iter();
    weights.filter(|tensor| tensor.is_hidden && !tensor.is_frozen()).cloned().collect()
}

/// Multiply-adds of Muon's five iterations for an m x n matrix, m not above n: two products with n columns and one of m x m
/// matrices each (`crates/trainer/src/torch/optimizer/muon.rs`).
fn muon_macs(weight: &Tensor) -> u64 {
    let rows = weight.shape.first().copied().unwrap_or(1).max(1);
    let columns = weight.len() / rows;
    let (m, n) = (rows.min(columns), rows.max(columns));
    m.saturating_mul(m).saturating_mul(n.saturating_mul(2).saturating_add(m)).saturating_mul(5)
}

/// Converts u8 to f32, subtracts the mean, divides by the deviation, converts to the working format.
pub(crate) fn input_cost(values: u64) -> PassCost {
    let traffic = Traffic { values, bytes: values * (1 + 6 * F32_BYTES) };
    PassCost { macs: 0, traffic, launches: 4, ..PassCost::default() }
}

/// Cost of an operation that only reads and writes `values` values.
fn move_only(values: u64) -> PassCost {
    PassCost { macs: 0, traffic: Traffic::of(values), launches: 1, ..PassCost::default() }
}

/// Name of the layer to which a tensor belongs.
fn prefix(tensor: &Tensor) -> &str {
    tensor.name.rsplit_once('.').map_or(&tensor.name, |(layer, _)| layer)
}

#[cfg(test)]
mod tests;
