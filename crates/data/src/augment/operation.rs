//! The operations of TrivialAugment and RandAugment, with the arithmetic of torchvision's functions for u8
//! tensors; halfway between two pixels, a shear or a rotation may take the other one.

use crate::random::Draws;

/// Kinds of operations.
const KINDS: u64 = 14;
/// Strengths of an operation, from none to the strongest.
const STRENGTHS: u64 = 31;

/// An operation on the pixels of an image.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ImageOperation {
    Identity,
    /// Moves rows sideways by this many pixels for each pixel from the top.
    ShearX(f64),
    /// Moves columns by this many pixels for each pixel from the left.
    ShearY(f64),
    /// Moves to the right by whole pixels.
    TranslateX(i32),
    /// Moves down by whole pixels.
    TranslateY(i32),
    /// Degrees, against the clock.
    Rotate(f64),
    /// Factor of the brightness.
    Brightness(f64),
    /// Factor of the distance from grey.
    Saturation(f64),
    /// Factor of the distance from the mean grey of the image.
    Contrast(f64),
    /// Factor of the distance from a blurred image.
    Sharpness(f64),
    /// Number of upper bits that are kept.
    Posterize(u32),
    /// Inverts values from here on.
    Solarize(f32),
    /// Stretches each channel to the whole range.
    AutoContrast,
    /// Makes all values of a channel equally frequent.
    Equalize,
}

/// The strongest operations: TrivialAugment's "wide" space, or that of RandAugment.
struct Space {
    shear: f32,
    translate: f32,
    rotate: f32,
    factor: f32,
    /// Bits that are removed.
    posterize: f64,
}

impl ImageOperation {
    /// The operation of TrivialAugment for a sample: one of all, of any strength.
    pub(crate) fn trivial(draws: &mut Draws) -> Self {
        let (kind, bin) = (draws.below(KINDS), draws.below(STRENGTHS));
        Space::trivial().operation(kind, bin, draws.below(2) == 1)
    }

    /// One operation of RandAugment, of strength `bin`, for an image with sides of this many pixels.
    pub(crate) fn rand(bin: u32, side: usize, draws: &mut Draws) -> Self {
        let kind = draws.below(KINDS);
        Space::rand(side).operation(kind, bin.into(), draws.below(2) == 1)
    }
}

impl Space {
    fn trivial() -> Self {
        Self { shear: 0.99, translate: 32.0, rotate: 135.0, factor: 0.99, posterize: 6.0 }
    }

    fn rand(side: usize) -> Self {
        let translate = (150.0 / 331.0 * side as f64) as f32;
        Self { shear: 0.3, translate, rotate: 30.0, factor: 0.9, posterize: 4.0 }
    }

    fn operation(&self, kind: u64, bin: u64, is_negative: bool) -> ImageOperation {
        let signed = |strongest| {
            let size = f64::from(linspace(0.0, strongest, bin));
            if is_negative { -size } else { size }
        };
        let factor = || 1.0 + signed(self.factor);
        let removed =
            (self.posterize * bin as f64 / (STRENGTHS - 1) as f64).round_ties_even() as u32;
        match kind {
            1 => ImageOperation::ShearX(signed(self.shear)),
            2 => ImageOperation::ShearY(signed(self.shear)),
            3 => ImageOperation::TranslateX(signed(self.translate) as i32),
            4 => ImageOperation::TranslateY(signed(self.translate) as i32),
            5 => ImageOperation::Rotate(signed(self.rotate)),
            6 => ImageOperation::Brightness(factor()),
            7 => ImageOperation::Saturation(factor()),
            8 => ImageOperation::Contrast(factor()),
            9 => ImageOperation::Sharpness(factor()),
            10 => ImageOperation::Posterize(8 - removed),
            11 => ImageOperation::Solarize(linspace(255.0, 0.0, bin)),
            12 => ImageOperation::AutoContrast,
            13 => ImageOperation::Equalize,
            _ => ImageOperation::Identity,
        }
    }
}

/// The value of `torch.linspace(start, end, STRENGTHS)` at `bin`, which counts from the nearer end.
fn linspace(start: f32, end: f32, bin: u64) -> f32 {
    let step = f64::from((end - start) / (STRENGTHS - 1) as f32);
    // Rounded once, as torch does.
    let value = match bin < STRENGTHS / 2 {
        true => f64::from(start) + step * bin as f64,
        false => f64::from(end) - step * (STRENGTHS - 1 - bin) as f64,
    };
    value as f32
}

impl ImageOperation {
    /// Changes an image: u8, shape (side, side, 3), RGB. `copy` is scratch memory.
    pub(crate) fn apply(self, pixels: &mut [u8], side: usize, copy: &mut Vec<u8>) {
        match self {
            Self::Identity => {}
            Self::ShearX(shear) => transform(pixels, side, copy, |x, y| (x + shear * y, y)),
            Self::ShearY(shear) => transform(pixels, side, copy, |x, y| (x, y + shear * x)),
            Self::TranslateX(by) => move_by(pixels, side, copy, [by, 0]),
            Self::TranslateY(by) => move_by(pixels, side, copy, [0, by]),
            Self::Rotate(degrees) => {
                let angle = degrees.to_radians();
                let (sin, cos) = (libm::sin(angle), libm::cos(angle));
                let centre = side as f64 / 2.0;
                transform(pixels, side, copy, |x, y| {
                    let (x, y) = (x - centre, y - centre);
                    (cos * x - sin * y + centre, sin * x + cos * y + centre)
                });
            }
            Self::Brightness(factor) => {
                pixels.iter_mut().for_each(|value| *value = blend(*value, 0.0, factor));
            }
            Self::Saturation(factor) => {
                for pixel in pixels.as_chunks_mut().0 {
                    let grey = f32::from(grey(*pixel));
                    *pixel = pixel.map(|value| blend(value, grey, factor));
                }
            }
            Self::Contrast(factor) => {
                let greys = pixels.as_chunks().0.iter().map(|pixel| u64::from(grey(*pixel)));
                let mean = greys.sum::<u64>() as f64 / (side * side) as f64;
                pixels.iter_mut().for_each(|value| *value = blend(*value, mean as f32, factor));
            }
            Self::Sharpness(factor) => sharpen(pixels, side, copy, factor),
            Self::Posterize(bits) => {
                let mask = (0xFF00_u32 >> bits) as u8;
                pixels.iter_mut().for_each(|value| *value &= mask);
            }
            Self::Solarize(threshold) => {
                let inverted = pixels.iter_mut().filter(|value| f32::from(**value) >= threshold);
                inverted.for_each(|value| *value = 255 - *value);
            }
            Self::AutoContrast => stretch(pixels),
            Self::Equalize => equalize(pixels),
        }
    }
}

/// Moves an image by (right, down) pixels; what becomes free is black.
pub(crate) fn move_by(pixels: &mut [u8], side: usize, copy: &mut Vec<u8>, by: [i32; 2]) {
    let [right, down] = by.map(f64::from);
    transform(pixels, side, copy, |x, y| (x - right, y - down));
}

/// Gives every pixel the value of the pixel nearest to `source`, which maps positions in pixels from the upper left corner;
/// black outside the image. The centre of the first pixel is at one half.
fn transform(
    pixels: &mut [u8],
    side: usize,
    copy: &mut Vec<u8>,
    source: impl Fn(f64, f64) -> (f64, f64),
) {
    copy.clear();
    copy.extend_from_slice(pixels);
    let (copy, _) = copy.as_chunks::<3>();
    let inside = 0.0..side as f64;
    for (index, pixel) in pixels.as_chunks_mut::<3>().0.iter_mut().enumerate() {
        let (x, y) = source((index % side) as f64 + 0.5, (index / side) as f64 + 0.5);
        let [x, y] = [x, y].map(|position| (position - 0.5).round_ties_even());
        *pixel = match inside.contains(&x) && inside.contains(&y) {
            true => copy[y as usize * side + x as usize],
            false => [0; 3],
        };
    }
}

/// `factor` times the value plus `1 - factor` times the other, cut to 0..=255 and rounded down.
fn blend(value: u8, other: f32, factor: f64) -> u8 {
    let sum = factor as f32 * f32::from(value) + (1.0 - factor) as f32 * other;
    sum.clamp(0.0, 255.0) as u8
}

fn grey([red, green, blue]: [u8; 3]) -> u8 {
    (0.2989 * f32::from(red) + 0.587 * f32::from(green) + 0.114 * f32::from(blue)) as u8
}

/// Blends with a blurred image, whose pixels are the mean of their 3 × 3 neighbours with weight 1, and 5 for themselves; at
/// the border they are unchanged.
fn sharpen(pixels: &mut [u8], side: usize, copy: &mut Vec<u8>, factor: f64) {
    if side <= 2 {
        return;
    }
    copy.clear();
    copy.extend_from_slice(pixels);
    for y in 1..side - 1 {
        for at in (y * side + 1) * 3..((y + 1) * side - 1) * 3 {
            let rows = [at - 3 * side, at, at + 3 * side];
            let around: u32 = rows
                .iter()
                .flat_map(|middle| [middle - 3, *middle, middle + 3])
                .map(|neighbour| u32::from(copy[neighbour]))
                .sum();
            // To the nearest; thirteenths are never halves.
            let blurred = (around + 4 * u32::from(copy[at]) + 6) / 13;
            pixels[at] = blend(copy[at], blurred as f32, factor);
        }
    }
    // Outside the middle, the two images are the same.
    let border = (0..side * side).filter(|index| {
        let (x, y) = (index % side, index / side);
        x == 0 || y == 0 || x == side - 1 || y == side - 1
    });
    for at in border.flat_map(|index| 3 * index..3 * index + 3) {
        pixels[at] = blend(copy[at], copy[at].into(), factor);
    }
}

/// Stretches each channel so that its smallest value becomes 0 and its largest 255.
fn stretch(pixels: &mut [u8]) {
    for channel in 0..3 {
        let values = || pixels.iter().skip(channel).step_by(3);
        let (Some(min), Some(max)) = (values().min().copied(), values().max().copied()) else {
            return;
        };
        if min == max {
            continue;
        }
        let scale = 255.0 / (f32::from(max) - f32::from(min));
        for value in pixels.iter_mut().skip(channel).step_by(3) {
            *value = ((f32::from(*value) - f32::from(min)) * scale).clamp(0.0, 255.0) as u8;
        }
    }
}

/// Replaces each value of a channel by the number of smaller ones, scaled to 0..=255.
fn equalize(pixels: &mut [u8]) {
    for channel in 0..3 {
        let mut counts = [0_u64; 256];
        for value in pixels.iter().skip(channel).step_by(3) {
            counts[usize::from(*value)] += 1;
        }
        let total: u64 = counts.iter().sum();
        let last = counts.iter().rev().find(|count| **count > 0).copied().unwrap_or_default();
        let step = (total - last) / 255;
        if step == 0 {
            continue;
        }
        let mut smaller = 0;
        let table = counts.map(|count| {
            let value = (smaller + step / 2) / step;
            smaller += count;
            value.min(255) as u8
        });
        for value in pixels.iter_mut().skip(channel).step_by(3) {
            *value = table[usize::from(*value)];
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::*;
    use crate::random::RandomPurpose;

    const SIDE: usize = 20;
    const IMAGE_BYTES: usize = SIDE * SIDE * 3;
    /// The strengths in the file.
    const CHOSEN: [u64; 3] = [5, 15, 30];

    /// An image, and what torchvision 0.26 makes of it: see `scripts/parity/operations.py`.
    fn images() -> Vec<Vec<u8>> {
        let file = include_bytes!("../../tests/fixtures/operations.rgb.gz");
        let mut bytes = Vec::new();
        GzDecoder::new(&file[..]).read_to_end(&mut bytes).unwrap();
        bytes.chunks(IMAGE_BYTES).map(<[u8]>::to_vec).collect()
    }

    fn cases() -> Vec<ImageOperation> {
        let mut cases = Vec::new();
        for space in [Space::trivial(), Space::rand(SIDE)] {
            for kind in 0..KINDS {
                let signs: &[bool] =
                    if (1..=9).contains(&kind) { &[false, true] } else { &[false] };
                for bin in CHOSEN {
                    cases.extend(signs.iter().map(|sign| space.operation(kind, bin, *sign)));
                }
            }
        }
        cases
    }

    #[test]
    fn operations_equal_those_of_torchvision() {
        let images = images();
        let (original, expected) = images.split_first().unwrap();
        let cases = cases();
        assert_eq!(cases.len(), expected.len());
        let mut copy = Vec::new();
        for (operation, expected) in cases.into_iter().zip(expected) {
            let mut pixels = original.clone();
            operation.apply(&mut pixels, SIDE, &mut copy);
            let pairs = pixels.as_chunks::<3>().0.iter().zip(expected.as_chunks::<3>().0);
            let differing = pairs.filter(|(found, expected)| found != expected).count();
            assert_eq!(differing, 0, "pixels differ after {operation:?}");
        }
    }

    #[test]
    fn every_kind_and_strength_of_operation_is_drawn() {
        let mut draws = Draws::new(1, 0, 0, RandomPurpose::Operation);
        let found: Vec<ImageOperation> =
            (0..20_000).map(|_| ImageOperation::trivial(&mut draws)).collect();
        let share = |is_kind: fn(&ImageOperation) -> bool| {
            found.iter().filter(|operation| is_kind(operation)).count().abs_diff(20_000 / 14)
        };
        assert!(share(|operation| *operation == ImageOperation::Identity) < 150);
        assert!(share(|operation| matches!(operation, ImageOperation::Rotate(_))) < 150);
        assert!(share(|operation| matches!(operation, ImageOperation::Solarize(_))) < 150);
        assert!(found.contains(&ImageOperation::Rotate(135.0)));
        assert!(found.contains(&ImageOperation::Rotate(-135.0)));
        assert!(found.contains(&ImageOperation::Solarize(255.0)));
        assert!(found.contains(&ImageOperation::Solarize(0.0)));
    }
}
