//! One operation of a network, with its sizes and costs per sample.
//!
//! Serialized names of fields and variants are part of `baton plan --json`: they are added, never renamed.

use serde::Serialize;

/// Kind of an operation, which decides what limits its speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OperationKind {
    /// Conversion of bytes to normalised numbers.
    Input,
    /// Convolution with weights.
    Convolution,
    /// Linear layer.
    Linear,
    /// Blur before a strided convolution: one fixed filter per channel.
    Blur,
    /// BatchNorm.
    Norm,
    /// ReLU.
    Relu,
    /// Sum of two tensors, such as at the end of a residual block.
    Add,
    /// Max pooling, and the mean over all pixels.
    Pool,
    /// Product of matrices, in a program.
    MatrixProduct,
    /// Scaled dot-product attention.
    Attention,
    /// LSTM, GRU and plain recurrent layers.
    Recurrent,
    /// Any other operator of a program.
    Other,
}

impl OperationKind {
    /// The name shown to users.
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
            Self::MatrixProduct => "matrix product",
            Self::Attention => "attention",
            Self::Recurrent => "recurrent",
            Self::Other => "other",
        }
    }
}

/// Amount of data moved between a GPU and its memory for one sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Values in the working format, read and written.
    pub values: u64,
    /// Bytes in other formats.
    pub bytes: u64,
}

impl Traffic {
    /// Traffic of values in the working format only.
    pub(crate) fn of(values: u64) -> Self {
        Self { values, bytes: 0 }
    }

    /// All bytes, if a value has `value_bytes` bytes.
    #[must_use]
    pub fn total_bytes(self, value_bytes: u64) -> u64 {
        self.values * value_bytes + self.bytes
    }
}

/// Cost of one pass of an operation for one sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassCost {
    /// Multiply-add operations; two floating-point operations each.
    pub macs: u64,
    /// Traffic to and from the GPU's memory.
    pub traffic: Traffic,
    /// Bytes that move once, whatever the number of samples.
    pub bytes_per_pass: u64,
    /// Number of kernels that the host launches.
    pub launches: u64,
}

/// One operation of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkOperation {
    /// Name of its weight tensor, or of the operation if it has no weight.
    pub name: String,
    /// The block it belongs to; `None` in the head.
    pub block: Option<String>,
    /// Kind of operation.
    pub kind: OperationKind,
    /// Number of weights, for a convolution or the linear layer.
    pub kernel: u64,
    /// Number of other parameters: BatchNorm's scale and shift, biases.
    pub other_parameters: u64,
    /// Number of running means and variances.
    pub statistics: u64,
    /// Whether its parameters are frozen.
    pub frozen: bool,
    /// Number of output values.
    pub outputs: u64,
    /// Data kept in memory until the gradient is computed.
    pub kept: Traffic,
    /// Forward pass in training.
    pub forward: PassCost,
    /// Backward pass: gradients of its weights and inputs.
    pub backward: PassCost,
    /// Forward pass in evaluation.
    pub evaluation: PassCost,
}

impl NetworkOperation {
    /// An operation without parameters that costs nothing yet.
    pub(crate) fn new(
        name: &str,
        block: Option<String>,
        kind: OperationKind,
        outputs: u64,
    ) -> Self {
        Self {
            name: name.to_owned(),
            block,
            kind,
            kernel: 0,
            other_parameters: 0,
            statistics: 0,
            frozen: false,
            outputs,
            kept: Traffic::default(),
            forward: PassCost::default(),
            backward: PassCost::default(),
            evaluation: PassCost::default(),
        }
    }

    /// Whether it belongs to one of the blocks with these names.
    #[must_use]
    pub fn is_in(&self, blocks: &[String]) -> bool {
        self.block.as_ref().is_some_and(|block| blocks.contains(block))
    }
}
