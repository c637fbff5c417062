//! Requests to a loader.

use baton_recipe::spec::{Augment, Resize};

use crate::{
    ImageTransform,
    augment::{Flip, center_crop, random_crop, random_flip},
    random::{Draws, RandomPurpose},
};

/// A request for one batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The epoch; part of the key of all random numbers.
    pub epoch: u32,
    /// Positions in the data set, in the order of the batch.
    pub samples: Vec<u64>,
    /// How images are turned into samples.
    pub preprocessing: Preprocessing,
}

/// How images are turned into samples. Arrays are not changed.
#[derive(Clone, Debug, PartialEq)]
pub enum Preprocessing {
    /// Random crop and flip, each a function of (seed, epoch, sample).
    Train {
        /// Seed of the random numbers.
        seed: u64,
        /// Side of the samples in pixels.
        resolution: u32,
        /// Algorithm for resizing crops.
        resize: Resize,
        /// Parameters of the augmentation.
        augment: Augment,
    },
    /// Centre crop without flip.
    Evaluate {
        /// Side of the samples in pixels.
        resolution: u32,
        /// Algorithm for resizing crops.
        resize: Resize,
        /// Side of the centre crop as a share of the short side.
        crop_ratio: f64,
    },
}

impl Preprocessing {
    /// Side of the samples in pixels.
    #[must_use]
    pub fn resolution(&self) -> u32 {
        match self {
            Self::Train { resolution, .. } | Self::Evaluate { resolution, .. } => *resolution,
        }
    }

    /// Crop, flip and resize of a sample's image.
    #[must_use]
    pub fn transform(&self, epoch: u32, sample: u64, width: u32, height: u32) -> ImageTransform {
        match self {
            Self::Train { seed, augment, resolution, resize } => {
                let draws = |operation| Draws::new(*seed, epoch, sample, operation);
                ImageTransform {
                    crop: random_crop(augment, width, height, draws(RandomPurpose::Crop)),
                    flip: random_flip(augment, draws(RandomPurpose::Flip)),
                    resolution: *resolution,
                    resize: *resize,
                }
            }
            Self::Evaluate { crop_ratio, resolution, resize } => ImageTransform {
                crop: center_crop(*crop_ratio, width, height),
                flip: Flip::Keep,
                resolution: *resolution,
                resize: *resize,
            },
        }
    }
}
