//! What a loader is asked for.

use baton_job::spec::Augment;

use crate::{
    augment::{Crop, Flip, center_crop, random_crop, random_flip},
    random::{Draws, Operation},
};

/// One batch to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The pass over the data; part of the key of every random draw.
    pub epoch: u32,
    /// Positions in the data set, in the order of the batch.
    pub samples: Vec<u64>,
    /// How images become samples.
    pub view: View,
}

/// How images become samples.
#[derive(Clone, Debug, PartialEq)]
pub enum View {
    /// Random crop and flip, each a function of (seed, epoch, sample).
    Train {
        /// Root of the random draws.
        seed: u64,
        /// Side of the samples in pixels.
        resolution: u32,
        /// What is random.
        augment: Augment,
    },
    /// The centre.
    Evaluate {
        /// Side of the samples in pixels.
        resolution: u32,
        /// Side of the centre crop as a share of the short side.
        crop_ratio: f64,
    },
}

impl View {
    /// Side of the samples in pixels.
    #[must_use]
    pub fn resolution(&self) -> u32 {
        match self {
            Self::Train { resolution, .. } | Self::Evaluate { resolution, .. } => *resolution,
        }
    }

    /// Which part of a sample's image is seen, and which way round.
    pub(super) fn frame(&self, epoch: u32, sample: u64, width: u32, height: u32) -> (Crop, Flip) {
        match self {
            Self::Train { seed, augment, .. } => {
                let draws = |operation| Draws::new(*seed, epoch, sample, operation);
                (
                    random_crop(augment, width, height, draws(Operation::Crop)),
                    random_flip(augment, draws(Operation::Flip)),
                )
            }
            Self::Evaluate { crop_ratio, .. } => {
                (center_crop(*crop_ratio, width, height), Flip::Keep)
            }
        }
    }
}
