//! The sizes of activations.

/// Shape of a network's input for one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputShape {
    /// An RGB image.
    Image {
        /// Side length in pixels.
        resolution: u64,
    },
    /// A one-dimensional signal, with one or more channels.
    Signal {
        /// Number of channels.
        channels: u64,
        /// Number of values per channel.
        length: u64,
    },
}

impl InputShape {
    /// The size of the input.
    #[must_use]
    pub fn size(self) -> Size {
        match self {
            Self::Image { resolution } => {
                Size { channels: 3, height: resolution, width: resolution }
            }
            Self::Signal { channels, length } => Size { channels, height: 1, width: length },
        }
    }
}

/// The size of one sample's activations; signals have a height of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Number of channels.
    pub channels: u64,
    /// Height in values.
    pub height: u64,
    /// Width in values, or length.
    pub width: u64,
}

impl Size {
    /// Number of values.
    #[must_use]
    pub fn values(self) -> u64 {
        self.channels * self.height * self.width
    }

    /// Output size of a window of `side` values with [`padding`] and the given stride.
    #[must_use]
    pub fn strided(self, side: u64, stride: u64) -> Self {
        let along = |length: u64| (length + 2 * padding(side)).saturating_sub(side) / stride + 1;
        Self { height: along(self.height), width: along(self.width), ..self }
    }
}

/// Number of zeros added at each end of an input for a window of `side` values. With an odd `side` and a stride of 1,
/// the output has the size of the input.
#[must_use]
pub fn padding(side: u64) -> u64 {
    side.saturating_sub(1) / 2
}
