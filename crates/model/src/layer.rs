//! The layers of networks.

use crate::{NetworkDescription, Size};

/// A layer. It refers to parameters and statistics by their indices in a [`NetworkDescription`].
#[derive(Clone, Debug, PartialEq)]
pub enum Layer {
    /// Convolution, BatchNorm, and an optional ReLU.
    ConvNorm(ConvNorm),
    /// Max pooling, with [`padding`](crate::size::padding).
    MaxPool {
        /// Window size: values along each side.
        side: u64,
        /// Stride.
        stride: u64,
    },
    /// `relu(body(x) + shortcut(x))`
    Residual {
        /// Prefix of its tensors' names.
        name: String,
        /// Convolutions of the main path, at least one.
        body: Vec<ConvNorm>,
        /// Convolution of the shortcut; the identity if absent.
        shortcut: Option<ConvNorm>,
    },
    /// Global mean pooling, to shape (samples, channels).
    GlobalMean,
    /// A linear layer with bias.
    Linear(Linear),
}

/// A convolution without bias, with [`padding`](crate::size::padding), and the BatchNorm after it.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvNorm {
    /// Parameter: the convolution's weight.
    pub kernel: usize,
    /// Stride.
    pub stride: u64,
    /// Whether the inputs are blurred first (Zhang 2019, arXiv 1904.11486).
    pub blurred: bool,
    /// Parameter: BatchNorm's scale.
    pub scale: usize,
    /// Parameter: BatchNorm's bias.
    pub shift: usize,
    /// Statistic: running mean.
    pub mean: usize,
    /// Statistic: running unbiased variance.
    pub variance: usize,
    /// Whether a ReLU follows.
    pub relu: bool,
}

/// A linear layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// Parameter of shape (out, in).
    pub weight: usize,
    /// Parameter of shape (out).
    pub bias: usize,
}

impl Layer {
    /// Its convolutions with BatchNorm.
    pub fn norms(&self) -> impl Iterator<Item = &ConvNorm> {
        let (body, last) = match self {
            Self::ConvNorm(layer) => (std::slice::from_ref(layer), None),
            Self::Residual { body, shortcut, .. } => (body.as_slice(), shortcut.as_ref()),
            Self::MaxPool { .. } | Self::GlobalMean | Self::Linear(_) => (&[][..], None),
        };
        body.iter().chain(last)
    }

    /// The size of its outputs for inputs of `size`, in `network`.
    #[must_use]
    pub fn after(&self, size: Size, network: &NetworkDescription) -> Size {
        match self {
            Self::ConvNorm(layer) => layer.after(size, network),
            Self::MaxPool { side, stride } => size.strided(*side, *stride),
            Self::Residual { body, .. } => {
                body.iter().fold(size, |size, layer| layer.after(size, network))
            }
            Self::GlobalMean => Size { height: 1, width: 1, ..size },
            Self::Linear(layer) => {
                let channels = network.parameters[layer.bias].len();
                Size { channels, height: 1, width: 1 }
            }
        }
    }
}

impl ConvNorm {
    /// The size of its outputs for inputs of `size`, in `network`.
    #[must_use]
    pub fn after(&self, size: Size, network: &NetworkDescription) -> Size {
        // (out, in, side, …)
        let shape = &network.parameters[self.kernel].shape;
        Size { channels: shape[0], ..size.strided(shape[2], self.stride) }
    }
}
