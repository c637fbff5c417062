//! Requests to a loader.

use baton_recipe::{
    JobSpec,
    spec::{Augment, Resize},
};

use crate::{
    ImageTransform,
    augment::{Flip, center_crop, change_image, change_signal, random_crop, random_flip},
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

/// How stored images and arrays are turned into samples.
#[derive(Clone, Debug, PartialEq)]
pub enum Preprocessing {
    /// Random changes, each a function of (seed, epoch, sample).
    Train {
        /// Seed of the random numbers.
        seed: u64,
        /// Side of the samples in pixels.
        resolution: u32,
        /// Algorithm for resizing crops.
        resize: Resize,
        /// Parameters of the augmentation.
        augment: Augment,
        /// Colour of an erased part of an image: the mean of the data.
        mean: [u8; 3],
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
    /// That of a recipe's training samples, with images of this side in pixels.
    #[must_use]
    pub fn of_training(spec: &JobSpec, resolution: u32) -> Self {
        Self::Train {
            seed: spec.seed,
            resolution,
            resize: spec.data.resize,
            augment: spec.augment.clone(),
            mean: spec.data.mean.map(|value| value.round() as u8),
        }
    }

    /// That of a recipe's evaluations.
    #[must_use]
    pub fn of_evaluation(spec: &JobSpec) -> Self {
        Self::Evaluate {
            resolution: spec.evaluation_resolution(),
            resize: spec.data.resize,
            crop_ratio: spec.evaluation.crop_ratio,
        }
    }

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
            Self::Train { seed, augment, resolution, resize, .. } => {
                let draws = |epoch, purpose| Draws::new(*seed, epoch, sample, purpose);
                ImageTransform {
                    crop: random_crop(augment, width, height, draws(epoch, RandomPurpose::Crop)),
                    flip: random_flip(augment, epoch, |epoch| draws(epoch, RandomPurpose::Flip)),
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

    /// Changes the pixels of a sample after [`transform`](Self::transform): u8, shape (resolution, resolution, 3), RGB.
    /// `copy` is scratch memory.
    pub(crate) fn change_image(
        &self,
        epoch: u32,
        sample: u64,
        pixels: &mut [u8],
        copy: &mut Vec<u8>,
    ) {
        if let Self::Train { seed, augment, resolution, mean, .. } = self {
            let draws = |purpose| Draws::new(*seed, epoch, sample, purpose);
            change_image(augment, draws, *mean, (pixels, *resolution as usize), copy);
        }
    }

    /// Changes the values of a sample: f32, of this shape.
    pub(crate) fn change_signal(&self, epoch: u32, sample: u64, shape: &[u64], values: &mut [f32]) {
        if let Self::Train { seed, augment: Augment { signal: Some(signal), .. }, .. } = self {
            let draws = |purpose| Draws::new(*seed, epoch, sample, purpose);
            change_signal(signal, draws, shape, values);
        }
    }
}
