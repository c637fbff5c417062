//! Networks as data: their tensors, and the layers that connect them.
//!
//! Training (`crates/trainer/src/torch`), `baton plan` and the validation of recipes all use the same
//! [`NetworkDescription`]; none of them contains code for a network by name. docs/models.md shows how to add a network.
//!
//! | module | contents |
//! |---|---|
//! | [`models`] | the networks that a recipe can name: one line each, one file per family |
//! | [`layer`] | the layers of networks |
//! | [`builder`] | builder for a network description |
//! | [`size`] | the sizes of activations |
//! | [`float`] | number formats of stored weights |

#![forbid(unsafe_code)]

pub mod builder;
mod depth;
pub mod float;
mod integers;
pub mod layer;
pub mod models;
pub mod size;

use std::ops::Range;

pub use self::{
    builder::Builder,
    depth::layers_above,
    float::Float,
    integers::Integers,
    layer::{ConvNorm, Layer, Linear},
    models::{Arch, InputKind},
    size::{InputShape, Size},
};

/// Options of a network, from the recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkOptions {
    /// Channels of the inputs: 3 for images.
    pub channels: u64,
    /// Number of outputs.
    pub outputs: u64,
    /// Whether the last BatchNorm scale of every residual block starts at zero.
    pub zero_init_gamma: bool,
    /// Whether the inputs of strided convolutions are blurred first.
    pub blur_pool: bool,
}

/// A network for inputs with a fixed number of channels and any height and width.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkDescription {
    /// Weights, scales, shifts and biases. Layers refer to them by index.
    pub parameters: Vec<Tensor>,
    /// Running means and variances of BatchNorm layers. Layers refer to them by index.
    pub statistics: Vec<Tensor>,
    /// Blocks in the order of the forward pass, without the head. Each can be frozen or recomputed by name.
    pub blocks: Vec<Block>,
    /// The layers from the activations of the last block to the outputs; replaced when the number of classes changes.
    pub head: Block,
}

/// A named part of a network.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Name in `model.freeze` and `train.recompute`.
    pub name: String,
    /// Layers in the order of the forward pass.
    pub layers: Vec<Layer>,
    /// Indices of its parameters.
    pub parameters: Range<usize>,
    /// Indices of its statistics.
    pub statistics: Range<usize>,
}

/// A named tensor of a network's state.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Name in checkpoints and exports.
    pub name: String,
    /// Its other names there, if several modules share it.
    pub aliases: Vec<String>,
    /// Shape; for a convolution's weight (out, in, height, width).
    pub shape: Vec<u64>,
    /// How it is initialized.
    pub init: Init,
    /// Whether weight decay applies by default (a recipe can extend it to all parameters), and whether LARS and
    /// LAMB compute a separate learning rate for it.
    pub decays: bool,
    /// Whether it is cast to the recipe's number format for computation; otherwise it stays in f32.
    pub is_cast: bool,
    /// Whether it is the weight of a convolution or a linear layer, but not of the last one: what Muon makes orthogonal.
    pub is_hidden: bool,
    /// Whether training changes it.
    pub role: TensorRole,
    /// Position among the parameters and statistics of a state dict.
    pub position: usize,
}

/// Initial value of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// The same value everywhere.
    Constant(f32),
    /// Normal distribution around 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform distribution on `-bound..bound`.
    Uniform {
        /// Largest absolute value.
        bound: f64,
    },
}

/// Whether training changes a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// Training changes it.
    Trained,
    /// The tensor keeps its value.
    Frozen,
    /// The same, and it is part of the network: files of weights may lack it. With its type if that is not f32.
    Constant(Option<Integers>),
}

impl Tensor {
    /// Number of values.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Whether it has no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `is_it` says so of one of its names.
    pub fn has_name(&self, is_it: impl Fn(&str) -> bool) -> bool {
        std::iter::once(&self.name).chain(&self.aliases).any(|name| is_it(name))
    }

    /// Whether it keeps its value.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.role != TensorRole::Trained
    }
}

impl NetworkDescription {
    /// Names of the blocks that can be frozen or recomputed, in order.
    pub fn block_names(&self) -> impl Iterator<Item = &str> {
        self.blocks.iter().map(|block| block.name.as_str())
    }

    /// Freezes the blocks with these names.
    #[must_use]
    pub fn frozen(mut self, names: &[String]) -> Self {
        for block in self.blocks.iter().filter(|block| names.contains(&block.name)) {
            let parameters = &mut self.parameters[block.parameters.clone()];
            let statistics = &mut self.statistics[block.statistics.clone()];
            for tensor in parameters.iter_mut().chain(statistics) {
                tensor.role = TensorRole::Frozen;
            }
        }
        self
    }

    /// Excludes parameters from weight decay, by any of their names.
    #[must_use]
    pub fn without_decay(mut self, is_excluded: impl Fn(&str) -> bool) -> Self {
        for tensor in &mut self.parameters {
            if tensor.has_name(&is_excluded) {
                tensor.decays = false;
            }
        }
        self
    }

    /// Number of frozen blocks before the first trained one.
    #[must_use]
    pub fn frozen_blocks(&self) -> usize {
        let is_frozen = |block: &&Block| {
            let mut parameters = self.parameters[block.parameters.clone()].iter();
            !block.parameters.is_empty() && parameters.all(Tensor::is_frozen)
        };
        self.blocks.iter().take_while(is_frozen).count()
    }

    /// All blocks, the head last.
    pub fn all_blocks(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().chain([&self.head])
    }

    /// Smallest batch size with which every BatchNorm layer gets more than one value per channel, which its unbiased
    /// variance requires.
    #[must_use]
    pub fn min_batch(&self, input: InputShape) -> u64 {
        let mut size = input.size();
        let mut min = 1;
        for layer in self.all_blocks().flat_map(|block| &block.layers) {
            let has_norm = layer.norms().next().is_some();
            size = layer.after(size, self);
            // Sizes only shrink, so a layer's last BatchNorm, on its output, has the fewest values.
            if has_norm && size.height * size.width == 1 {
                min = 2;
            }
        }
        min
    }
}
