//! One operation of a network, counted per sample.

use serde::Serialize;

/// What an operation is, and with it what bounds its speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Bytes to normalised numbers.
    Input,
    /// Convolution with weights.
    Convolution,
    /// The product in front of the outputs.
    Linear,
    /// Blur before a strided convolution: one fixed filter per channel.
    Blur,
    /// BatchNorm.
    Norm,
    /// ReLU, in place.
    Relu,
    /// The sum at the end of a residual block, in place.
    Add,
    /// Max pooling and the mean over all pixels.
    Pool,
}

impl Kind {
    /// For people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Convolution => "convolution",
            Self::Linear => "linear",
            Self::Blur => "blur",
            Self::Norm => "BatchNorm",
            Self::Relu => "ReLU",
            Self::Add => "addition",
            Self::Pool => "pooling",
        }
    }
}

/// What moves between a GPU and its memory for one sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Values in the working format, read and written.
    pub values: u64,
    /// Bytes of other formats.
    pub bytes: u64,
}

impl Traffic {
    /// Only values in the working format.
    pub(crate) fn of(values: u64) -> Self {
        Self { values, bytes: 0 }
    }

    /// With values of so many bytes.
    #[must_use]
    pub fn total_bytes(self, value_bytes: u64) -> u64 {
        self.values * value_bytes + self.bytes
    }
}

/// One direction of an operation, for one sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Multiplications with addition; two floating-point operations each.
    pub macs: u64,
    /// To and from memory.
    pub traffic: Traffic,
    /// Operations that the host starts.
    pub launches: u64,
}

/// An operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Name of its weight, if it has one.
    pub name: String,
    /// The block it belongs to; absent in the head.
    pub block: Option<String>,
    /// What it is.
    pub kind: Kind,
    /// Weights of a convolution or of the linear layer.
    pub kernel: u64,
    /// Other parameters: BatchNorm's scale and shift, biases.
    pub other_parameters: u64,
    /// Running means and variances.
    pub statistics: u64,
    /// Whether its values are frozen.
    pub frozen: bool,
    /// Values that it puts out.
    pub outputs: u64,
    /// What stays in memory until the gradient has been found.
    pub kept: Traffic,
    /// Forward pass in training.
    pub forward: Work,
    /// Its gradient: of its weights and of its inputs.
    pub backward: Work,
    /// Forward pass in evaluation.
    pub evaluation: Work,
}

impl Layer {
    /// Whether it belongs to one of the blocks with these names.
    #[must_use]
    pub fn is_in(&self, blocks: &[String]) -> bool {
        self.block.as_ref().is_some_and(|block| blocks.contains(block))
    }
}
