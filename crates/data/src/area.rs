//! OpenCV's `INTER_AREA` resize, bit by bit: what FFCV does to every crop.
//!
//! Three cases, as in OpenCV 4 (`modules/imgproc/src/resize.cpp`):
//!
//! | scale | a target pixel is |
//! |---|---|
//! | whole factors on both axes | the mean of its block, in integers |
//! | no axis enlarged | the mean of the area it covers, edge pixels by their covered share, in f32 |
//! | an axis enlarged | two taps on *both* axes with the phase of an area, in 11-bit fixed point |
//!
//! Floating-point sums are taken in OpenCV's order, multiply then add, so that every bit is
//! OpenCV's. Therefore no sum here may be reordered or fused.

use wide::f32x4;

pub use crate::pixels::Pixels;
use crate::{SampleFault, augment::Crop};

/// Resizes one image after the other. Keeps its tables and rows: no allocation per image once it
/// has seen the largest.
#[derive(Debug, Default)]
pub struct AreaResizer {
    columns: Taps,
    rows: Taps,
    /// A source row as f32, and behind it zeros for taps of weight 0.
    wide: Vec<f32>,
    /// A source row at the target's width, and one lane more.
    narrow: Vec<f32>,
    /// Sum of weighted rows, u8 once rounded.
    sum: Vec<f32>,
    /// Two source rows at the target's width, in 7-bit fixed point.
    fixed: [Vec<i16>; 2],
    /// Sums over the rows of a block.
    block: Vec<u32>,
}

impl AreaResizer {
    /// A resizer without tables yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes `crop` of `source`, resized, to the start of `out`: u8, shape (target_height,
    /// target_width, 3). A crop of that very size is copied. Pixels outside the crop have no
    /// influence.
    ///
    /// Enlarging one axis switches both to two taps, as in OpenCV: where the other is reduced by
    /// more than two, pixels are skipped.
    ///
    /// # Errors
    /// [`SampleFault::Resize`]: crop or target has no pixels, the crop is not inside the image, the
    /// image not inside its bytes, or `out` is too short.
    pub fn resize(
        &mut self,
        source: Pixels<'_>,
        crop: Crop,
        target_width: u32,
        target_height: u32,
        out: &mut [u8],
    ) -> Result<(), SampleFault> {
        let lines = Lines::new(source, crop)?;
        let out = target(out, target_width, target_height)?;
        let columns = Axis::new(crop.width, target_width);
        let rows = Axis::new(crop.height, target_height);
        if columns.is_kept() && rows.is_kept() {
            copy(lines, out);
        } else if let (Some(across), Some(down)) = (columns.factor(), rows.factor()) {
            self.block_means(lines, across, down, out);
        } else if columns.is_reduced() && rows.is_reduced() {
            self.area_means(lines, columns, rows, out);
        } else {
            self.two_taps(lines, columns, rows, out);
        }
        Ok(())
    }

    /// Both axes are divided by a whole number.
    fn block_means(&mut self, lines: Lines<'_>, across: usize, down: usize, out: &mut [u8]) {
        let line_bytes = lines.bytes_per_line();
        fit(&mut self.block, line_bytes);
        let block = &mut self.block[..line_bytes];
        let share = 1.0 / (across * down) as f32;
        let row_bytes = line_bytes / across;
        for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
            block.fill(0);
            for line in row * down..(row + 1) * down {
                for (sum, value) in block.iter_mut().zip(lines.get(line)) {
                    *sum += u32::from(*value);
                }
            }
            if (across, down) == (2, 2) {
                quarters(block, out);
            } else {
                means(block, across, share, out);
            }
        }
    }

    /// No axis is enlarged.
    fn area_means(&mut self, lines: Lines<'_>, columns: Axis, rows: Axis, out: &mut [u8]) {
        self.columns.cover(columns);
        self.rows.cover(rows);
        let row_bytes = 3 * columns.target as usize;
        fit(&mut self.sum, row_bytes);
        let sum = &mut self.sum[..row_bytes];
        // The last line of a row is often the first of the next.
        let mut at_hand = None;
        for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
            let (first, weights) = self.rows.of(row);
            for (line, &weight) in (first..).zip(weights).filter(|(_, weight)| **weight != 0.0) {
                if at_hand != Some(line) {
                    narrow(lines.get(line), &self.columns, &mut self.wide, &mut self.narrow);
                    at_hand = Some(line);
                }
                let terms = sum.iter_mut().zip(&self.narrow);
                if line == first {
                    terms.for_each(|(sum, value)| *sum = value * weight);
                } else {
                    terms.for_each(|(sum, value)| *sum += value * weight);
                }
            }
            for (value, sum) in out.iter_mut().zip(&*sum) {
                *value = rounded(*sum);
            }
        }
    }

    /// An axis is enlarged.
    fn two_taps(&mut self, lines: Lines<'_>, columns: Axis, rows: Axis, out: &mut [u8]) {
        self.columns.interpolate(columns);
        self.rows.interpolate(rows);
        let row_bytes = 3 * columns.target as usize;
        self.fixed.iter_mut().for_each(|fixed| fit(fixed, row_bytes));
        let last = lines.crop.height as usize - 1;
        // The lines in `fixed`: an even one in the first buffer, an odd one in the second.
        let mut at_hand = [None; 2];
        for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
            let (first, weights) = self.rows.of(row);
            for line in [first, (first + 1).min(last)] {
                let buffer = line % 2;
                if at_hand[buffer] != Some(line) {
                    narrow(lines.get(line), &self.columns, &mut self.wide, &mut self.narrow);
                    for (fixed, value) in self.fixed[buffer].iter_mut().zip(&self.narrow) {
                        *fixed = (whole(*value) >> 4) as i16;
                    }
                    at_hand[buffer] = Some(line);
                }
            }
            // Behind the last line comes a tap of weight 0, so it does not matter what it meets.
            let (upper, lower) = (&self.fixed[first % 2], &self.fixed[(first + 1) % 2]);
            let [above, below] = [weights[0], weights[1]].map(|weight| weight as i16);
            for ((value, upper), lower) in out.iter_mut().zip(upper).zip(lower) {
                let (upper, lower) = (high_half(*upper, above), high_half(*lower, below));
                *value = ((upper + lower + 2) >> 2) as u8;
            }
        }
    }
}

/// Means of 2 x 2 pixels, from the sums of two lines. Halves go up, unlike in [`means`].
fn quarters(sums: &[u32], out: &mut [u8]) {
    let (sums, _) = sums.as_chunks::<6>();
    let (out, _) = out.as_chunks_mut::<3>();
    for (pixel, sums) in out.iter_mut().zip(sums) {
        *pixel =
            std::array::from_fn(|channel| ((sums[channel] + sums[3 + channel] + 2) >> 2) as u8);
    }
}

/// Means of blocks `across` pixels wide, from the sums of their lines; `share` is one part of a
/// block. Halves go to even.
fn means(sums: &[u32], across: usize, share: f32, out: &mut [u8]) {
    let (out, _) = out.as_chunks_mut::<3>();
    for (pixel, sums) in out.iter_mut().zip(sums.chunks_exact(3 * across)) {
        let mut block = [0_u64; 3];
        for sums in sums.as_chunks::<3>().0 {
            for (block, sum) in block.iter_mut().zip(sums) {
                *block += u64::from(*sum);
            }
        }
        *pixel = block.map(|sum| rounded(sum as f32 * share));
    }
}

/// The upper 16 of the 32 bits of a product.
fn high_half(a: i16, b: i16) -> i16 {
    ((i32::from(a) * i32::from(b)) >> 16) as i16
}

/// 2²³: the f32 that has no fraction bits.
const NO_FRACTION: f32 = 8_388_608.0;

/// Rounds half to even and clamps, for sums above -0.5 and below 2²².
fn rounded(sum: f32) -> u8 {
    // The library's function is a call on plain x86-64; this addition is the processor's own
    // rounding, and the low bits are the integer.
    (sum.min(255.0) + NO_FRACTION).to_bits() as u8
}

/// As [`rounded`], for sums in 0..2²³.
fn whole(value: f32) -> u32 {
    (value + NO_FRACTION).to_bits() & 0x7F_FFFF
}

/// Lines of a crop that is known to lie inside its image, and that inside its bytes.
#[derive(Clone, Copy)]
struct Lines<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
    crop: Crop,
}

impl<'a> Lines<'a> {
    fn new(source: Pixels<'a>, crop: Crop) -> Result<Self, SampleFault> {
        let Pixels { bytes, width, height, row_bytes } = source;
        let Crop { left, top, width: columns, height: rows } = crop;
        if columns == 0 || rows == 0 {
            return Err(SampleFault::Resize(format!("a crop of {columns}x{rows} pixels")));
        }
        let inside = |start: u32, length, end| start.checked_add(length).is_some_and(|e| e <= end);
        if !inside(left, columns, width) || !inside(top, rows, height) {
            return Err(SampleFault::Resize(format!(
                "a crop of {columns}x{rows} pixels at ({left}, {top}) leaves an image of \
                 {width}x{height}"
            )));
        }
        let line_bytes = 3 * width as usize;
        let needed = (height as usize - 1)
            .checked_mul(row_bytes)
            .and_then(|above| above.checked_add(line_bytes));
        if row_bytes < line_bytes || needed.is_none_or(|needed| needed > bytes.len()) {
            return Err(SampleFault::Resize(format!(
                "{} bytes in rows of {row_bytes} do not hold {width}x{height} pixels",
                bytes.len()
            )));
        }
        let start = top as usize * row_bytes + 3 * left as usize;
        Ok(Self { bytes: &bytes[start..], row_bytes, crop })
    }

    fn bytes_per_line(self) -> usize {
        3 * self.crop.width as usize
    }

    fn get(self, line: usize) -> &'a [u8] {
        &self.bytes[line * self.row_bytes..][..self.bytes_per_line()]
    }
}

/// The part of `out` to be written.
fn target(out: &mut [u8], width: u32, height: u32) -> Result<&mut [u8], SampleFault> {
    if width == 0 || height == 0 {
        return Err(SampleFault::Resize(format!("a target of {width}x{height} pixels")));
    }
    let have = out.len();
    (3 * width as usize).checked_mul(height as usize).and_then(|len| out.get_mut(..len)).ok_or_else(
        || SampleFault::Resize(format!("{have} bytes for a target of {width}x{height} pixels")),
    )
}

fn copy(lines: Lines<'_>, out: &mut [u8]) {
    for (line, out) in out.chunks_exact_mut(lines.bytes_per_line()).enumerate() {
        out.copy_from_slice(lines.get(line));
    }
}

/// Makes room. What the buffer held is of no interest, so it only grows.
fn fit<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}

/// One axis of a resize, in pixels; neither side is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    source: u32,
    target: u32,
}

impl Axis {
    fn new(source: u32, target: u32) -> Self {
        Self { source, target }
    }

    fn is_kept(self) -> bool {
        self.source == self.target
    }

    fn is_reduced(self) -> bool {
        self.scale() >= 1.0
    }

    /// Target pixels per source pixel.
    fn inverse(self) -> f64 {
        f64::from(self.target) / f64::from(self.source)
    }

    /// Source pixels per target pixel, with OpenCV's two roundings.
    fn scale(self) -> f64 {
        1.0 / self.inverse()
    }

    /// The scale if it is whole, and two roundings have not hidden that.
    fn factor(self) -> Option<usize> {
        let (scale, whole) = (self.scale(), self.scale().round_ties_even());
        (scale >= 1.0 && (scale - whole).abs() < f64::EPSILON).then_some(whole as usize)
    }
}

/// Which source pixels make a target pixel, along one axis.
#[derive(Debug, Default)]
struct Taps {
    /// What the tables below are for, if for anything.
    built: Option<(Axis, Kernel)>,
    /// Taps of every target pixel.
    count: usize,
    /// First source pixel of each target pixel.
    starts: Vec<u32>,
    /// `count` weights per target pixel; those beyond its own number of taps are 0, which adds
    /// nothing to a sum of such numbers.
    weights: Vec<f32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    Area,
    Linear,
}

/// A shorter piece of a pixel is left out.
const LEAST_PIECE: f64 = 1e-3;
/// One, as a fixed-point weight.
const ONE: f32 = 2_048.0;

impl Taps {
    /// Start and weights of a target pixel.
    fn of(&self, target: usize) -> (usize, &[f32]) {
        (self.starts[target] as usize, &self.weights[target * self.count..][..self.count])
    }

    /// Prepares for tables of another axis; whether they have to be built.
    fn begin(&mut self, axis: Axis, kernel: Kernel, count: usize) -> bool {
        let wanted = Some((axis, kernel));
        if self.built == wanted {
            return false;
        }
        self.built = wanted;
        self.count = count;
        self.starts.clear();
        self.weights.clear();
        true
    }

    /// A target pixel covers `scale` source pixels, those at its ends in part.
    fn cover(&mut self, axis: Axis) {
        let scale = axis.scale();
        // At most so many whole pixels, and a piece on each side.
        let most = scale as usize + 2;
        if !self.begin(axis, Kernel::Area, most) {
            return;
        }
        for target in 0..axis.target {
            let begin = f64::from(target) * scale;
            let end = begin + scale;
            let covered = scale.min(f64::from(axis.source) - begin);
            let last = (end as u32).min(axis.source - 1);
            let first = ceil(begin).min(last);

            let left = f64::from(first) - begin;
            let right = end - f64::from(last);
            let has_left = left > LEAST_PIECE;
            self.starts.push(if has_left { first - 1 } else { first });
            if has_left {
                self.weights.push((left / covered) as f32);
            }
            self.weights.extend((first..last).map(|_| (1.0 / covered) as f32));
            if right > LEAST_PIECE {
                self.weights.push((right.min(1.0).min(covered) / covered) as f32);
            }
            self.weights.resize(self.starts.len() * most, 0.0);
        }
    }

    /// Two neighbours, weighted in units of 1/2048.
    fn interpolate(&mut self, axis: Axis) {
        if !self.begin(axis, Kernel::Linear, 2) {
            return;
        }
        let (scale, inverse) = (axis.scale(), axis.inverse());
        for target in 0..axis.target {
            let start = (f64::from(target) * scale) as u32;
            let phase =
                (f64::from(target + 1) - f64::from(start.saturating_add(1)) * inverse) as f32;
            let phase = if phase <= 0.0 { 0.0 } else { phase - (phase as u32) as f32 };
            let (start, phase) =
                if start >= axis.source - 1 { (axis.source - 1, 0.0) } else { (start, phase) };
            self.starts.push(start);
            self.weights.extend([1.0 - phase, phase].map(|share| whole(share * ONE) as f32));
        }
    }
}

/// For a position that is not negative.
fn ceil(position: f64) -> u32 {
    let floor = position as u32;
    if f64::from(floor) < position { floor + 1 } else { floor }
}

/// Resizes one line to the target's width: at the start of `out` afterwards, followed by a lane
/// without meaning.
fn narrow(line: &[u8], taps: &Taps, wide: &mut Vec<f32>, out: &mut Vec<f32>) {
    let padded = line.len() + 3 * taps.count + 1;
    fit(wide, padded);
    let wide = &mut wide[..padded];
    for (wide, value) in wide.iter_mut().zip(line) {
        *wide = f32::from(*value);
    }
    // A longer line may have been here.
    wide[line.len()..].fill(0.0);
    fit(out, 3 * taps.starts.len() + 1);
    match taps.count {
        2 => convolve::<2>(wide, taps, out),
        3 => convolve::<3>(wide, taps, out),
        4 => convolve::<4>(wide, taps, out),
        5 => convolve::<5>(wide, taps, out),
        6 => convolve::<6>(wide, taps, out),
        _ => convolve_any(wide, taps, out),
    }
}

/// Lanes of a vector register: a pixel and the next pixel's red, which the next pixel overwrites.
const LANES: usize = 4;

/// As [`convolve_any`] for a number of taps known to the compiler, which then keeps sums in
/// registers.
fn convolve<const TAPS: usize>(wide: &[f32], taps: &Taps, out: &mut [f32]) {
    let (weights, _) = taps.weights.as_chunks::<TAPS>();
    for (target, (start, weights)) in taps.starts.iter().zip(weights).enumerate() {
        let pixels = &wide[3 * *start as usize..][..3 * TAPS + 1];
        let mut sum = lanes(pixels) * weights[0];
        for tap in 1..TAPS {
            sum += lanes(&pixels[3 * tap..]) * weights[tap];
        }
        out[3 * target..][..LANES].copy_from_slice(sum.as_array());
    }
}

/// The first lanes of a slice that has as many.
fn lanes(values: &[f32]) -> f32x4 {
    f32x4::new([values[0], values[1], values[2], values[3]])
}

/// The weighted sum of each target pixel's taps.
fn convolve_any(wide: &[f32], taps: &Taps, out: &mut [f32]) {
    let weights = taps.weights.chunks_exact(taps.count.max(1));
    for (target, (start, weights)) in taps.starts.iter().zip(weights).enumerate() {
        let mut sum = [0.0; LANES];
        let (pixels, _) = wide[3 * *start as usize..].as_chunks::<3>();
        for (pixel, weight) in pixels.iter().zip(weights) {
            for (sum, value) in sum.iter_mut().zip(pixel) {
                *sum += value * weight;
            }
        }
        out[3 * target..][..LANES].copy_from_slice(&sum);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pixels(bytes: &[u8], width: u32, height: u32) -> Pixels<'_> {
        Pixels { bytes, width, height, row_bytes: 3 * width as usize }
    }

    fn noise(len: usize) -> Vec<u8> {
        (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    /// Resizes to a buffer that holds one byte more, which must stay.
    fn resize(
        resizer: &mut AreaResizer,
        source: Pixels<'_>,
        crop: Crop,
        target: [u32; 2],
    ) -> Vec<u8> {
        let [width, height] = target;
        let mut out = vec![77; 3 * (width * height) as usize + 1];
        resizer.resize(source, crop, width, height, &mut out).unwrap();
        assert_eq!(out.pop(), Some(77));
        out
    }

    #[test]
    fn what_does_not_fit_is_refused_before_anything_is_written() {
        let bytes = noise(3 * 10 * 8);
        let image = pixels(&bytes, 10, 8);
        let whole = Crop { left: 0, top: 0, width: 10, height: 8 };
        let mut out = [0; 3 * 4 * 4];
        let cases = [
            (image, Crop { width: 0, ..whole }, [4, 4]),
            (image, Crop { height: 0, ..whole }, [4, 4]),
            (image, Crop { left: 1, ..whole }, [4, 4]),
            (image, Crop { top: u32::MAX, ..whole }, [4, 4]),
            (image, whole, [0, 4]),
            (image, whole, [4, 0]),
            (image, whole, [4, 5]),
            (image, whole, [u32::MAX, u32::MAX]),
            (Pixels { bytes: &bytes[1..], ..image }, whole, [4, 4]),
            (Pixels { row_bytes: 29, ..image }, whole, [4, 4]),
            (Pixels { row_bytes: usize::MAX, ..image }, whole, [4, 4]),
        ];
        for (source, crop, [width, height]) in cases {
            let refused = AreaResizer::new().resize(source, crop, width, height, &mut out);
            assert!(matches!(refused, Err(SampleFault::Resize(_))), "{crop:?} {width}x{height}");
        }
        assert_eq!(out, [0; 3 * 4 * 4]);
    }

    #[test]
    fn blocks_round_halves_to_even_but_two_by_two_up() {
        let whole = |width, height| Crop { left: 0, top: 0, width, height };
        let mut resizer = AreaResizer::new();
        let bytes = [0, 0, 0, 1, 1, 1];
        assert_eq!(resize(&mut resizer, pixels(&bytes, 2, 1), whole(2, 1), [1, 1]), [0; 3]);
        let bytes = [1, 1, 1, 2, 2, 2];
        assert_eq!(resize(&mut resizer, pixels(&bytes, 2, 1), whole(2, 1), [1, 1]), [2; 3]);
        let bytes = [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1];
        assert_eq!(resize(&mut resizer, pixels(&bytes, 2, 2), whole(2, 2), [1, 1]), [1; 3]);
    }

    #[test]
    fn a_used_resizer_gives_what_a_new_one_gives() {
        let bytes = noise(3 * 90 * 70);
        let image = pixels(&bytes, 90, 70);
        let crops = [(90, 70), (33, 64), (90, 12), (5, 70), (64, 64)];
        let targets = [[32, 32], [90, 70], [7, 80], [16, 16], [45, 35]];
        let mut used = AreaResizer::new();
        for (width, height) in crops {
            for target in targets {
                let crop = Crop { left: 90 - width, top: 70 - height, width, height };
                let fresh = resize(&mut AreaResizer::new(), image, crop, target);
                assert_eq!(resize(&mut used, image, crop, target), fresh, "{crop:?} {target:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn only_the_crop_has_influence_and_one_colour_stays_itself(
            left in 0_u32..5, top in 0_u32..5, width in 1_u32..300, height in 1_u32..40,
            target_width in 1_u32..120, target_height in 1_u32..60, value: u8,
        ) {
            let (full_width, full_height) = (left + width + 3, top + height + 2);
            let row_bytes = 3 * full_width as usize + 5;
            let mut bytes = noise(row_bytes * full_height as usize);
            for line in bytes.chunks_exact_mut(row_bytes).skip(top as usize).take(height as usize) {
                line[3 * left as usize..][..3 * width as usize].fill(value);
            }
            let source = Pixels { bytes: &bytes, width: full_width, height: full_height, row_bytes };
            let crop = Crop { left, top, width, height };
            let out = resize(&mut AreaResizer::new(), source, crop, [target_width, target_height]);
            // Pieces below 1/1000 pixel are left out of a mean, which may cost a level; and so may
            // the truncation in fixed point.
            let near = |v: &u8| v.abs_diff(value) <= 1;
            prop_assert!(out.iter().all(near), "{out:?}");
        }
    }
}
