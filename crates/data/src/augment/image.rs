//! Random changes to the pixels of an image that is already cropped, flipped and resized.

use baton_recipe::spec::Augment;

use super::operation::{ImageOperation, move_by};
use crate::random::{Draws, RandomPurpose};

/// Attempts to find an erased rectangle that is smaller than the image.
const ERASE_ATTEMPTS: usize = 10;
/// Smallest and largest area of the erased rectangle, and its ratio of height to width; torchvision's defaults.
const ERASE_SCALE: [f64; 2] = [0.02, 0.33];
const ERASE_RATIO: [f64; 2] = [0.3, 3.3];

/// Changes a sample: u8, shape (side, side, 3), RGB. `draws` gives its random numbers, `mean` is the colour of an erased
/// rectangle, `copy` is scratch memory.
pub(crate) fn change(
    augment: &Augment,
    draws: impl Fn(RandomPurpose) -> Draws,
    mean: [u8; 3],
    (pixels, side): (&mut [u8], usize),
    copy: &mut Vec<u8>,
) {
    if augment.shift > 0 {
        let mut draws = draws(RandomPurpose::Shift);
        let largest = i64::from(augment.shift);
        let mut by = || (draws.below(2 * largest as u64 + 1) as i64 - largest) as i32;
        move_by(pixels, side, copy, [by(), by()]);
    }
    if augment.trivial_augment {
        ImageOperation::trivial(&mut draws(RandomPurpose::Operation)).apply(pixels, side, copy);
    }
    if let Some(rand) = &augment.rand_augment {
        let mut draws = draws(RandomPurpose::Operation);
        for _ in 0..rand.operations {
            ImageOperation::rand(rand.magnitude, side, &mut draws).apply(pixels, side, copy);
        }
    }
    if [augment.brightness, augment.contrast, augment.saturation].iter().any(|size| *size > 0.0) {
        for operation in colours(augment, draws(RandomPurpose::Colour)) {
            operation.apply(pixels, side, copy);
        }
    }
    if augment.erase > 0.0 {
        erase(augment.erase, draws(RandomPurpose::Erase), mean, (pixels, side));
    }
}

/// Brightness, contrast and saturation in random order, as far as they change.
fn colours(augment: &Augment, mut draws: Draws) -> impl Iterator<Item = ImageOperation> {
    let mut factor = |size: f64| {
        let factor = draws.between(1.0 - size, 1.0 + size);
        (size > 0.0).then_some(factor)
    };
    let mut operations = [
        factor(augment.brightness).map(ImageOperation::Brightness),
        factor(augment.contrast).map(ImageOperation::Contrast),
        factor(augment.saturation).map(ImageOperation::Saturation),
    ];
    // Fisher & Yates.
    operations.swap(2, draws.below(3) as usize);
    operations.swap(1, draws.below(2) as usize);
    operations.into_iter().flatten()
}

/// With this probability, fills a rectangle with `mean`.
fn erase(probability: f64, mut draws: Draws, mean: [u8; 3], (pixels, side): (&mut [u8], usize)) {
    if draws.uniform() >= probability {
        return;
    }
    let [low, high] = ERASE_RATIO.map(libm::log);
    for _ in 0..ERASE_ATTEMPTS {
        let area = (side * side) as f64 * draws.between(ERASE_SCALE[0], ERASE_SCALE[1]);
        let ratio = libm::exp(draws.between(low, high));
        let height = (area * ratio).sqrt().round_ties_even() as usize;
        let width = (area / ratio).sqrt().round_ties_even() as usize;
        if height < side && width < side {
            let top = draws.below((side - height) as u64 + 1) as usize;
            let left = draws.below((side - width) as u64 + 1) as usize;
            let rows = pixels.as_chunks_mut::<3>().0.chunks_exact_mut(side);
            for row in rows.skip(top).take(height) {
                row[left..left + width].fill(mean);
            }
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_recipe::spec::RandAugment;

    use super::*;

    const SIDE: usize = 16;
    const MEAN: [u8; 3] = [1, 2, 3];

    fn plain() -> Augment {
        Augment::default()
    }

    /// An image without equal pixels, and without `MEAN` and black.
    fn picture() -> Vec<u8> {
        (0..SIDE * SIDE).flat_map(|at| [at as u8, 255 - at as u8, 100]).collect()
    }

    fn changed(augment: &Augment, epoch: u32, sample: u64) -> Vec<u8> {
        let mut pixels = picture();
        let draws = |purpose| Draws::new(1, epoch, sample, purpose);
        change(augment, draws, MEAN, (&mut pixels, SIDE), &mut Vec::new());
        pixels
    }

    fn every_change() -> Augment {
        Augment {
            shift: 2,
            trivial_augment: true,
            brightness: 0.4,
            contrast: 0.4,
            saturation: 0.4,
            erase: 1.0,
            ..plain()
        }
    }

    #[test]
    fn without_an_option_an_image_keeps_its_bytes() {
        assert!((0..100).all(|sample| changed(&plain(), 0, sample) == picture()));
    }

    #[test]
    fn a_change_is_a_function_of_epoch_and_sample() {
        let of = |epoch, sample| changed(&every_change(), epoch, sample);
        assert_eq!(of(0, 3), of(0, 3));
        assert_ne!(of(0, 3), of(1, 3));
        assert_ne!(of(0, 3), of(0, 4));
    }

    #[test]
    fn shifts_are_uniform_and_leave_black_behind() {
        let augment = Augment { shift: 2, ..plain() };
        let mut counts = [0; 25];
        for sample in 0..5_000 {
            let moved = changed(&augment, 0, sample);
            let at = |x: i32, y: i32| &moved[3 * (y * 16 + x) as usize..][..3];
            // The pixel (8, 8) is where it has been moved to.
            let is_there = |(dx, dy): &(i32, i32)| at(8 + dx, 8 + dy) == [136, 119, 100];
            let shifts = (-2..=2).flat_map(|dy| (-2..=2).map(move |dx| (dx, dy)));
            let (dx, dy) = shifts.clone().find(is_there).unwrap();
            counts[((dy + 2) * 5 + dx + 2) as usize] += 1;
            let black = (0..256).filter(|index| at(index % 16, index / 16) == [0, 0, 0]).count();
            let kept = (16 - dx.abs()) * (16 - dy.abs());
            assert_eq!(black, 256 - kept as usize);
        }
        // 24 degrees of freedom: above 59 in 1 of 10,000 cases.
        let chi_square: f64 =
            counts.map(|count| f64::from(count - 200).powi(2) / 200.0).iter().sum();
        assert!(chi_square < 59.0, "{counts:?}");
    }

    #[test]
    fn an_erased_rectangle_has_the_colour_and_size_of_the_options() {
        let augment = Augment { erase: 0.25, ..plain() };
        let mut erased_samples = 0_u32;
        for sample in 0..4_000 {
            let pixels = changed(&augment, 0, sample);
            let is_erased = |at: &usize| pixels[3 * at..3 * at + 3] == MEAN;
            let erased: Vec<usize> = (0..SIDE * SIDE).filter(is_erased).collect();
            let (Some(first), Some(last)) = (erased.first(), erased.last()) else {
                assert_eq!(pixels, picture());
                continue;
            };
            erased_samples += 1;
            let width = last % SIDE - first % SIDE + 1;
            let height = last / SIDE - first / SIDE + 1;
            assert_eq!(erased.len(), width * height, "no rectangle");
            // Sides are rounded to whole pixels: an area of 5.1 may become 2 x 2.
            assert!((3..=95).contains(&erased.len()), "{width} x {height}");
        }
        assert!(erased_samples.abs_diff(1_000) < 120, "{erased_samples} of 4,000");
    }

    #[test]
    fn colours_change_within_their_limits_and_in_every_order() {
        let augment = Augment { brightness: 0.1, contrast: 0.2, saturation: 0.3, ..plain() };
        let mut orders = std::collections::BTreeMap::<String, u32>::new();
        for sample in 0..6_000 {
            let mut order = String::new();
            for operation in colours(&augment, Draws::new(1, 0, sample, RandomPurpose::Colour)) {
                let (name, factor, size) = match operation {
                    ImageOperation::Brightness(factor) => ('b', factor, 0.1),
                    ImageOperation::Contrast(factor) => ('c', factor, 0.2),
                    ImageOperation::Saturation(factor) => ('s', factor, 0.3),
                    other => panic!("{other:?}"),
                };
                assert!((1.0 - size..=1.0 + size).contains(&factor), "{operation:?}");
                order.push(name);
            }
            *orders.entry(order).or_default() += 1;
        }
        assert_eq!(orders.len(), 6);
        assert!(orders.values().all(|count| count.abs_diff(1_000) < 130), "{orders:?}");
    }

    #[test]
    fn rand_augment_applies_as_many_operations_as_it_says() {
        let of = |operations, magnitude| Augment {
            rand_augment: Some(RandAugment { operations, magnitude }),
            ..plain()
        };
        let differing = |augment: &Augment| {
            (0..500).filter(|sample| changed(augment, 0, *sample) != picture()).count()
        };
        let (one, four) = (differing(&of(1, 15)), differing(&of(4, 15)));
        // 13 of 14 change something; of these, some do not change this picture.
        assert!((300..500).contains(&one) && four > one, "{one}, {four}");
    }

    /// Resumed runs depend on these exact bytes.
    #[test]
    fn the_changes_of_a_seed_never_change() {
        let rand = Augment {
            trivial_augment: false,
            rand_augment: Some(RandAugment::default()),
            ..every_change()
        };
        let digests = [every_change(), rand].map(|augment| {
            let images: Vec<u8> = (0..50).flat_map(|sample| changed(&augment, 0, sample)).collect();
            blake3::hash(&images).to_hex()[..16].to_owned()
        });
        assert_eq!(digests, ["b1b06ba0d9f64305", "3f6d3b32b61a2d3c"]);
    }
}
