//! Augmentation: random crops and flips of images; below, changes to their pixels, and to signals.

mod image;
mod operation;
mod signal;

use baton_recipe::spec::Augment;

pub(crate) use self::{image::change as change_image, signal::change as change_signal};
use crate::{SampleFault, random::Draws};

/// Attempts of the random crop before it uses a centred crop.
const MAX_ATTEMPTS: usize = 10;

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

impl Crop {
    /// Checks that the crop is inside an image and not empty.
    pub(crate) fn check_inside(self, width: u32, height: u32) -> Result<(), SampleFault> {
        let Self { left, top, .. } = self;
        let is_inside = left.checked_add(self.width).is_some_and(|right| right <= width)
            && top.checked_add(self.height).is_some_and(|bottom| bottom <= height);
        if is_inside && self.width > 0 && self.height > 0 {
            return Ok(());
        }
        Err(SampleFault::Resize(format!(
            "a crop of {}x{} pixels at ({left}, {top}) is not inside {width}x{height}",
            self.width, self.height
        )))
    }
}

/// Whether an image is flipped horizontally.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flip {
    /// Not flipped.
    Keep,
    /// Left and right exchanged.
    Mirror,
}

/// The crop of a training sample: a random share of the area with a random aspect ratio at a random position.
///
/// The area is uniform in `augment.crop_scale`; the logarithm of width / height is uniform between the logarithms
/// of `augment.crop_ratio`. Szegedy et al., "Going deeper with convolutions", 2015, §6, in the form of torchvision
/// and FFCV (`RandomResizedCrop`): sides are rounded half to even, ten attempts, then the largest centred crop with
/// an allowed ratio. `width` and `height` must be above 0.
#[must_use]
pub fn random_crop(augment: &Augment, width: u32, height: u32, mut draws: Draws) -> Crop {
    let [min_scale, max_scale] = augment.crop_scale;
    let [narrow, wide] = augment.crop_ratio;
    let area = f64::from(width) * f64::from(height);
    for _ in 0..MAX_ATTEMPTS {
        let area = area * draws.between(min_scale, max_scale);
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

/// Whether a training sample is mirrored: with probability `augment.flip`. `draws` gives the random numbers of an epoch; if
/// flips alternate, only those of the first are used.
#[must_use]
pub fn random_flip(augment: &Augment, epoch: u32, draws: impl Fn(u32) -> Draws) -> Flip {
    let is_mirrored = |epoch| draws(epoch).uniform() < augment.flip;
    let is_mirrored = match augment.alternate_flips {
        true => is_mirrored(0) ^ (epoch % 2 == 1),
        false => is_mirrored(epoch),
    };
    if is_mirrored { Flip::Mirror } else { Flip::Keep }
}

/// The centred square whose side is `ratio` times the short side, rounded down: FFCV's
/// `CenterCropRGBImageDecoder`. `width` and `height` must be above 0.
#[must_use]
pub fn center_crop(ratio: f64, width: u32, height: u32) -> Crop {
    let side = (ratio * f64::from(width.min(height))) as u32;
    centred(side, side, width, height)
}

/// A centred crop, half a pixel further left and up if the margins cannot be equal. Its sides are first clamped to
/// between 1 pixel and the image's size.
fn centred(crop_width: u32, crop_height: u32, width: u32, height: u32) -> Crop {
    let (crop_width, crop_height) = (crop_width.clamp(1, width), crop_height.clamp(1, height));
    Crop {
        left: (width - crop_width) / 2,
        top: (height - crop_height) / 2,
        width: crop_width,
        height: crop_height,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::random::RandomPurpose;

    fn crop(sample: u64) -> Draws {
        Draws::new(1, 2, sample, RandomPurpose::Crop)
    }

    fn augment(crop_scale: [f64; 2], crop_ratio: [f64; 2]) -> Augment {
        Augment { crop_scale, crop_ratio, ..Augment::default() }
    }

    #[test]
    fn a_crop_is_a_function_of_its_sample() {
        let of = |sample| random_crop(&Augment::default(), 500, 375, crop(sample));
        assert_eq!(of(3), of(3));
        assert_ne!(of(3), of(4));
    }

    #[test]
    fn areas_are_uniform_and_shapes_log_uniform() {
        // Far smaller than the image, so that no attempt fails.
        let augment = augment([0.02, 0.1], [0.5, 2.0]);
        let (count, side) = (20_000, 10_000_u32);
        let (mut areas, mut shapes, mut wide) = (0.0, 0.0, 0);
        for sample in 0..count {
            let Crop { width, height, .. } = random_crop(&augment, side, side, crop(sample));
            let (width, height) = (f64::from(width), f64::from(height));
            areas += width * height / f64::from(side).powi(2);
            shapes += (width / height).ln();
            wide += u32::from(width / height > 2_f64.sqrt());
        }
        // Means of 20,000 draws; limits are about four standard deviations.
        let (area, shape) = (areas / count as f64, shapes / count as f64);
        assert!((area - 0.06).abs() < 0.0007, "mean area {area}");
        assert!(shape.abs() < 0.012, "mean logarithm of the shape {shape}");
        let wide = f64::from(wide) / count as f64;
        assert!((wide - 0.25).abs() < 0.0125, "{wide} are wider than the root of two");
    }

    #[test]
    fn all_positions_of_a_crop_are_equally_likely() {
        let augment = augment([0.25, 0.25], [1.0, 1.0]);
        let mut counts = [0; 36];
        for sample in 0..36_000 {
            let Crop { left, top, width, height } = random_crop(&augment, 10, 10, crop(sample));
            assert_eq!((width, height), (5, 5));
            counts[(top * 6 + left) as usize] += 1;
        }
        let chi_square: f64 = counts.map(|count| f64::from(count - 1_000).powi(2)).iter().sum();
        // 35 degrees of freedom: above 74 in 1 of 10,000 cases.
        assert!(chi_square / 1_000.0 < 74.0, "{counts:?}");
    }

    #[test]
    fn an_extreme_shape_gets_the_largest_centred_crop() {
        let augment = Augment::default();
        let of = |width, height| random_crop(&augment, width, height, crop(0));
        assert_eq!(of(1_000, 10), Crop { left: 493, top: 0, width: 13, height: 10 });
        assert_eq!(of(10, 1_000), Crop { left: 0, top: 493, width: 10, height: 13 });
    }

    #[test]
    fn the_centre_crop_equals_that_of_ffcv() {
        let ratio = 224.0 / 256.0;
        let landscape = Crop { left: 86, top: 23, width: 328, height: 328 };
        assert_eq!(center_crop(ratio, 500, 375), landscape);
        let portrait = Crop { left: 23, top: 86, width: 328, height: 328 };
        assert_eq!(center_crop(ratio, 375, 500), portrait);
        assert_eq!(center_crop(1.0, 7, 4), Crop { left: 1, top: 0, width: 4, height: 4 });
        assert_eq!(center_crop(0.1, 3, 3), Crop { left: 1, top: 1, width: 1, height: 1 });
    }

    fn flip_of(augment: &Augment, epoch: u32, sample: u64) -> Flip {
        let draws = |epoch| Draws::new(1, epoch, sample, RandomPurpose::Flip);
        random_flip(augment, epoch, draws)
    }

    #[test]
    fn alternating_flips_show_both_sides_in_any_two_epochs() {
        let augment = Augment { alternate_flips: true, ..Augment::default() };
        let in_epoch = |epoch| (0..10_000).map(move |sample| (sample, epoch));
        let is_mirrored = |(sample, epoch)| flip_of(&augment, epoch, sample) == Flip::Mirror;
        let first: Vec<bool> = in_epoch(0).map(is_mirrored).collect();
        let mirrored = first.iter().filter(|is_mirrored| **is_mirrored).count();
        assert!(mirrored.abs_diff(5_000) < 200, "{mirrored} in the first epoch");
        for epoch in 1..5 {
            let turned = epoch % 2 == 1;
            let expected: Vec<bool> = first.iter().map(|first| first ^ turned).collect();
            assert_eq!(in_epoch(epoch).map(is_mirrored).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn flips_have_the_configured_probability() {
        let mirrored = |flip| {
            let augment = Augment { flip, ..Augment::default() };
            (0..10_000).filter(|sample| flip_of(&augment, 2, *sample) == Flip::Mirror).count()
        };
        assert_eq!(mirrored(0.0), 0);
        assert_eq!(mirrored(1.0), 10_000);
        assert!(mirrored(0.5).abs_diff(5_000) < 200);
    }

    proptest! {
        #[test]
        fn a_crop_is_never_empty_and_never_outside(
            width in 1_u32..=65_535, height in 1_u32..=65_535,
            least in 0.0001_f64..1.0, ratio in 0.01_f64..100.0, sample: u64,
        ) {
            let augment = augment([least, 1.0], [ratio, ratio * 1.5]);
            for crop in [
                random_crop(&augment, width, height, crop(sample)),
                center_crop(least, width, height),
            ] {
                prop_assert!(crop.width >= 1 && crop.left + crop.width <= width);
                prop_assert!(crop.height >= 1 && crop.top + crop.height <= height);
            }
        }
    }
}
