//! The sizes of activations.

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

impl Input {
    /// Its size.
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
    /// Channels.
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

    /// What comes out of a window of `side` values with [`padding`] that is moved by `stride`.
    #[must_use]
    pub fn strided(self, side: u64, stride: u64) -> Self {
        let along = |length: u64| (length + 2 * padding(side)).saturating_sub(side) / stride + 1;
        Self { height: along(self.height), width: along(self.width), ..self }
    }
}

/// Zeros on each side of what a window of `side` values goes over: as many as keep the size of an odd
/// one at a stride of 1.
#[must_use]
pub fn padding(side: u64) -> u64 {
    side.saturating_sub(1) / 2
}
