//! Networks as data: their tensors, and the layers that connect them.
//!
//! Training (`crates/trainer/src/torch`), `baton plan` and the recipe's rules all work from the same
//! [`Description`]; none of them knows a network by name. docs/models.md shows how to add one.
//!
//! | module | what it holds |
//! |---|---|
//! | [`models`] | the networks that a recipe can name: a line and a file each |
//! | [`layer`] | the layers that networks are made of |
//! | [`builder`] | how a network is written down |
//! | [`size`] | the sizes of activations |

#![forbid(unsafe_code)]

pub mod builder;
pub mod layer;
pub mod models;
pub mod size;

use std::ops::Range;

pub use self::{
    builder::Builder,
    layer::{ConvNorm, Layer, Linear},
    models::{Arch, Sees},
    size::{Input, Size},
};

/// What a recipe says about a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Channels of the inputs: 3 for images.
    pub channels: u64,
    /// Number of outputs.
    pub outputs: u64,
    /// Start the last BatchNorm scale of every residual block at zero.
    pub zero_init_gamma: bool,
    /// Blur before strided convolutions.
    pub blur_pool: bool,
}

/// A network for inputs of a number of channels and any size.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// Weights, scales, shifts and biases. Layers refer to them by index.
    pub parameters: Vec<Tensor>,
    /// Running means and variances of BatchNorm layers. Layers refer to them by index.
    pub statistics: Vec<Tensor>,
    /// In the order of the forward pass. Each can be frozen or recomputed by its name.
    pub blocks: Vec<Block>,
    /// From the activations of the last block to the outputs; replaced for other classes.
    pub head: Block,
}

/// A named part of a network.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Name in `model.freeze` and `train.recompute`.
    pub name: String,
    /// In the order of the forward pass.
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
    /// Sides; (out, in, height, width) of a convolution's weight.
    pub shape: Vec<u64>,
    /// Value before training.
    pub init: Init,
    /// Whether weight decay applies unless the recipe extends it to all parameters, and whether LARS
    /// gives it a rate of its own.
    pub decays: bool,
    /// Whether it is computed with in the recipe's number format, rather than in f32.
    pub is_cast: bool,
    /// Whether training changes it.
    pub role: Role,
    /// Place among the parameters and statistics of a state dict.
    pub position: usize,
}

/// How a tensor starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// One value throughout.
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
pub enum Role {
    /// It does.
    Trained,
    /// The tensor keeps its value.
    Frozen,
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

    /// Whether it keeps its value.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.role == Role::Frozen
    }
}

impl Description {
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
                tensor.role = Role::Frozen;
            }
        }
        self
    }

    /// Number of frozen blocks before the first that is trained.
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

    /// Least number of samples per batch with which every BatchNorm layer sees more than one value per
    /// channel, as its unbiased variance needs.
    #[must_use]
    pub fn least_batch(&self, input: Input) -> u64 {
        let mut size = input.size();
        let mut least = 1;
        for layer in self.all_blocks().flat_map(|block| &block.layers) {
            let norms = layer.norms().next().is_some();
            size = layer.after(size, self);
            // Sizes shrink, and a layer's last BatchNorm sees its output.
            if norms && size.height * size.width == 1 {
                least = 2;
            }
        }
        least
    }
}
