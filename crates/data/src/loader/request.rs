//! What a loader is asked for.

use baton_recipe::spec::{Augment, Resize};

use crate::{
    Frame,
    augment::{Flip, center_crop, random_crop, random_flip},
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

/// How images become samples. Arrays are taken as they are.
#[derive(Clone, Debug, PartialEq)]
pub enum View {
    /// Random crop and flip, each a function of (seed, epoch, sample).
    Train {
        /// Root of the random draws.
        seed: u64,
        /// Side of the samples in pixels.
        resolution: u32,
        /// How crops get that size.
        resize: Resize,
        /// What is random.
        augment: Augment,
    },
    /// The centre.
    Evaluate {
        /// Side of the samples in pixels.
        resolution: u32,
        /// How crops get that size.
        resize: Resize,
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

    /// Which part of a sample's image is seen, and how.
    #[must_use]
    pub fn frame(&self, epoch: u32, sample: u64, width: u32, height: u32) -> Frame {
        match self {
            Self::Train { seed, augment, resolution, resize } => {
                let draws = |operation| Draws::new(*seed, epoch, sample, operation);
                Frame {
                    crop: random_crop(augment, width, height, draws(Operation::Crop)),
                    flip: random_flip(augment, draws(Operation::Flip)),
                    resolution: *resolution,
                    resize: *resize,
                }
            }
            Self::Evaluate { crop_ratio, resolution, resize } => Frame {
                crop: center_crop(*crop_ratio, width, height),
                flip: Flip::Keep,
                resolution: *resolution,
                resize: *resize,
            },
        }
    }
}
