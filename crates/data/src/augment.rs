//! Which part of an image becomes the sample. Arithmetic only; no pixel is touched here.

use baton_job::spec::Augment;

use crate::random::{Draws, Operation};

/// Tries of the random crop before it settles for the centre.
const TRIES: usize = 10;

/// A rectangle inside an image, in pixels. Neither side is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crop {
    /// First column.
    pub left: u32,
    /// First row.
    pub top: u32,
    /// Number of columns.
    pub width: u32,
    /// Number of rows.
    pub height: u32,
}

/// Whether an image is seen in a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flip {
    /// As stored.
    Keep,
    /// Left and right exchanged.
    Mirror,
}

/// The crop of a training sample: a random share of the area in a random shape at a random place.
///
/// The area is uniform in `augment.crop_scale`, the logarithm of width / height is uniform in
/// that of `augment.crop_ratio`. Szegedy et al., "Going deeper with convolutions", 2015, §6, in
/// the form of torchvision and FFCV (`RandomResizedCrop`): sides are rounded half to even, ten
/// tries, then the largest centred crop of an allowed shape. `width` and `height` are above 0.
#[must_use]
pub fn random_crop(
    augment: &Augment,
    seed: u64,
    epoch: u32,
    sample: u64,
    width: u32,
    height: u32,
) -> Crop {
    let [least, most] = augment.crop_scale;
    let [narrow, wide] = augment.crop_ratio;
    let area = f64::from(width) * f64::from(height);
    let mut draws = Draws::new(seed, epoch, sample, Operation::Crop);
    for _ in 0..TRIES {
        let area = area * draws.between(least, most);
        let ratio = draws.between(narrow.ln(), wide.ln()).exp();
        let crop_width = (area * ratio).sqrt().round_ties_even() as u32;
        let crop_height = (area / ratio).sqrt().round_ties_even() as u32;
        if (1..=width).contains(&crop_width) && (1..=height).contains(&crop_height) {
            let top = draws.below(u64::from(height - crop_height) + 1) as u32;
            let left = draws.below(u64::from(width - crop_width) + 1) as u32;
            return Crop { left, top, width: crop_width, height: crop_height };
        }
    }
    largest_of_shape(narrow, wide, width, height)
}

/// The largest centred crop with width / height in `narrow..=wide`.
fn largest_of_shape(narrow: f64, wide: f64, width: u32, height: u32) -> Crop {
    let ratio = f64::from(width) / f64::from(height);
    if ratio < narrow {
        let rows = (f64::from(width) / narrow).round_ties_even() as u32;
        centred(width, rows, width, height)
    } else if ratio > wide {
        let columns = (f64::from(height) * wide).round_ties_even() as u32;
        centred(columns, height, width, height)
    } else {
        centred(width, height, width, height)
    }
}

/// Whether a training sample is mirrored: with probability `augment.flip`.
#[must_use]
pub fn random_flip(augment: &Augment, seed: u64, epoch: u32, sample: u64) -> Flip {
    let draw = Draws::new(seed, epoch, sample, Operation::Flip).uniform();
    if draw < augment.flip { Flip::Mirror } else { Flip::Keep }
}

/// The square in the centre whose side is `ratio` times the short side, rounded down: FFCV's
/// `CenterCropRGBImageDecoder`. `width` and `height` are above 0.
#[must_use]
pub fn center_crop(ratio: f64, width: u32, height: u32) -> Crop {
    let side = (ratio * f64::from(width.min(height))) as u32;
    centred(side, side, width, height)
}

/// Sides are brought into the image, and up to one pixel; halves of a pixel go to the left and
/// upper edge's disadvantage, as in FFCV.
fn centred(crop_width: u32, crop_height: u32, width: u32, height: u32) -> Crop {
    let (crop_width, crop_height) = (crop_width.clamp(1, width), crop_height.clamp(1, height));
    Crop {
        left: (width - crop_width) / 2,
        top: (height - crop_height) / 2,
        width: crop_width,
        height: crop_height,
    }
}
