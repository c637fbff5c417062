//! OpenCV's `INTER_AREA` resize, bit-identical: FFCV applies it to every crop.
//!
//! Three cases, as in OpenCV 4 (`modules/imgproc/src/resize.cpp`):
//!
//! | scale | a target pixel is |
//! |---|---|
//! | whole factors on both axes | the mean of its block, in integers |
//! | no axis enlarged | the mean of the area it covers, edge pixels by their covered share, in f32 |
//! | an axis enlarged | two taps on *both* axes with the phase of an area, in 11-bit fixed point |
//!
//! Floating-point sums are computed in OpenCV's order, multiply then add, so that every bit is equal. Therefore no
//! sum here may be reordered or fused.

use wide::f32x4;

use crate::SampleFault;
pub use crate::pixels::Pixels;

/// Resizes images one after the other. Reuses its tables and rows: there is no allocation per image after the
/// largest one.
#[derive(Debug, Default)]
pub struct AreaResizer {
    columns: Taps,
    rows: Taps,
    /// A source row as f32, followed by zeros for taps of weight 0.
    wide: Vec<f32>,
    /// A source row resized to the target's width, and one lane more.
    narrow: Vec<f32>,
    /// Sum of weighted rows, before rounding to u8.
    sum: Vec<f32>,
    /// Two source rows resized to the target's width, in 7-bit fixed point.
    fixed: [Vec<i16>; 2],
    /// Sums over the rows of a block.
    block: Vec<u32>,
}

impl AreaResizer {
    /// Resizes `source`, which may be a [crop](Pixels::crop) of an image, and writes the result to the start of
    /// `out`: u8, shape (target_height, target_width, 3). If the sizes are equal, the pixels are copied.
    ///
    /// Enlarging one axis switches both to two taps, as in OpenCV: if the other is reduced by more than two, pixels
    /// are skipped.
    ///
    /// # Errors
    /// [`SampleFault::Resize`]: source or target has no pixels, the source has too few bytes, or `out` is too short.
    pub fn resize(
        &mut self,
        source: Pixels<'_>,
        target_width: u32,
        target_height: u32,
        out: &mut [u8],
    ) -> Result<(), SampleFault> {
        check(source)?;
        let out = target(out, target_width, target_height)?;
        let columns = Axis { source: source.width, target: target_width };
        let rows = Axis { source: source.height, target: target_height };
        if columns.is_kept() && rows.is_kept() {
            copy(source, out);
        } else if let (Some(across), Some(down)) = (columns.factor(), rows.factor()) {
            self.block_means(source, across, down, out);
        } else if columns.is_reduced() && rows.is_reduced() {
            self.area_means(source, columns, rows, out);
        } else {
            self.two_taps(source, columns, rows, out);
        }
        Ok(())
    }

    /// Both axes are divided by a whole number.
    fn block_means(&mut self, source: Pixels<'_>, across: usize, down: usize, out: &mut [u8]) {
        let line_bytes = 3 * source.width as usize;
        grow(&mut self.block, line_bytes);
        let block = &mut self.block[..line_bytes];
        let share = 1.0 / (across * down) as f32;
        let row_bytes = line_bytes / across;
        for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
            block.fill(0);
            for line in row * down..(row + 1) * down {
                for (sum, value) in block.iter_mut().zip(source.row(line)) {
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
    fn area_means(&mut self, source: Pixels<'_>, columns: Axis, rows: Axis, out: &mut [u8]) {
        self.columns.cover(columns);
        self.rows.cover(rows);
        let row_bytes = 3 * columns.target as usize;
        grow(&mut self.sum, row_bytes);
        let sum = &mut self.sum[..row_bytes];
        // The last source line of a target row is often the first of the next row.
        let mut loaded_line = None;
        for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
            let (first, weights) = self.rows.of(row);
            for (line, &weight) in (first..).zip(weights).filter(|(_, weight)| **weight != 0.0) {
                if loaded_line != Some(line) {
                    narrow(source.row(line), &self.columns, &mut self.wide, &mut self.narrow);
                    loaded_line = Some(line);
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
    fn two_taps(&mut self, source: Pixels<'_>, columns: Axis, rows: Axis, out: &mut [u8]) {
        self.columns.interpolate(columns);
        self.rows.interpolate(rows);
        let row_bytes = 3 * columns.target as usize;
        self.fixed.iter_mut().for_each(|fixed| grow(fixed, row_bytes));
        let last = source.height as usize - 1;
        // The lines in `fixed`: even lines in the first buffer, odd lines in the second.
        let mut loaded_lines = [None; 2];
        for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
            let (first, weights) = self.rows.of(row);
            for line in [first, (first + 1).min(last)] {
                let buffer = line % 2;
                if loaded_lines[buffer] != Some(line) {
                    narrow(source.row(line), &self.columns, &mut self.wide, &mut self.narrow);
                    for (fixed, value) in self.fixed[buffer].iter_mut().zip(&self.narrow) {
                        *fixed = (whole(*value) >> 4) as i16;
                    }
                    loaded_lines[buffer] = Some(line);
                }
            }
            // After the last line the second tap has weight 0, so its value does not matter.
            let (upper, lower) = (&self.fixed[first % 2], &self.fixed[(first + 1) % 2]);
            let [above, below] = [weights[0], weights[1]].map(|weight| weight as i16);
            for ((value, upper), lower) in out.iter_mut().zip(upper).zip(lower) {
                let (upper, lower) = (high_half(*upper, above), high_half(*lower, below));
                *value = ((upper + lower + 2) >> 2) as u8;
            }
        }
    }
}

/// Means of 2 x 2 pixels, from the sums of two lines. Halves are rounded up, unlike in [`means`].
fn quarters(sums: &[u32], out: &mut [u8]) {
    let (sums, _) = sums.as_chunks::<6>();
    let (out, _) = out.as_chunks_mut::<3>();
    for (pixel, sums) in out.iter_mut().zip(sums) {
        *pixel =
            std::array::from_fn(|channel| ((sums[channel] + sums[3 + channel] + 2) >> 2) as u8);
    }
}

/// Means of blocks `across` pixels wide, from the sums of their lines; `share` is 1 / pixels per block. Halves are
/// rounded to even.
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
    // The library function would be a call on plain x86-64. This addition rounds in the processor, and the low bits
    // are the integer.
    (sum.min(255.0) + NO_FRACTION).to_bits() as u8
}

/// Like [`rounded`], for sums in 0..2²³.
fn whole(value: f32) -> u32 {
    (value + NO_FRACTION).to_bits() & 0x7F_FFFF
}

/// Checks that there are pixels, and enough bytes for them.
fn check(source: Pixels<'_>) -> Result<(), SampleFault> {
    let Pixels { bytes, width, height, row_bytes } = source;
    if width == 0 || height == 0 {
        return Err(SampleFault::Resize(format!("a crop of {width}x{height} pixels")));
    }
    let line_bytes = 3 * width as usize;
    let needed = (height as usize - 1)
        .checked_mul(row_bytes)
        .and_then(|above| above.checked_add(line_bytes));
    if row_bytes < line_bytes || needed.is_none_or(|needed| needed > bytes.len()) {
        return Err(SampleFault::Resize(format!(
            "{} bytes in rows of {row_bytes} bytes are too few for {width}x{height} pixels",
            bytes.len()
        )));
    }
    Ok(())
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

fn copy(source: Pixels<'_>, out: &mut [u8]) {
    for (line, out) in out.chunks_exact_mut(3 * source.width as usize).enumerate() {
        out.copy_from_slice(source.row(line));
    }
}

/// Grows a buffer to at least `len` elements. Its old content is not needed.
fn grow<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) {
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

    /// The scale if it is an integer, up to the error of two roundings.
    fn factor(self) -> Option<usize> {
        let (scale, whole) = (self.scale(), self.scale().round_ties_even());
        (scale >= 1.0 && (scale - whole).abs() < f64::EPSILON).then_some(whole as usize)
    }
}

/// Source pixels and weights of each target pixel, along one axis.
#[derive(Debug, Default)]
struct Taps {
    /// Axis and kernel for which the tables below were built.
    built: Option<(Axis, Kernel)>,
    /// Number of taps of every target pixel.
    count: usize,
    /// First source pixel of each target pixel.
    starts: Vec<u32>,
    /// `count` weights per target pixel; unused ones are 0, which does not change a sum.
    weights: Vec<f32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    Area,
    Linear,
}

/// Smaller shares of a source pixel are ignored.
const MIN_PIECE: f64 = 1e-3;
/// One, as a fixed-point weight.
const ONE: f32 = 2_048.0;

impl Taps {
    /// Start and weights of a target pixel.
    fn of(&self, target: usize) -> (usize, &[f32]) {
        (self.starts[target] as usize, &self.weights[target * self.count..][..self.count])
    }

    /// Prepares the tables for an axis. Returns whether they have to be built.
    fn begin(&mut self, axis: Axis, kernel: Kernel, count: usize) -> bool {
        let requested = Some((axis, kernel));
        if self.built == requested {
            return false;
        }
        self.built = requested;
        self.count = count;
        self.starts.clear();
        self.weights.clear();
        true
    }

    /// Builds the tables for reduction: a target pixel covers `scale` source pixels, the outer ones in part.
    fn cover(&mut self, axis: Axis) {
        let scale = axis.scale();
        // At most `scale` whole pixels, and a partial one on each side.
        let max_taps = scale as usize + 2;
        if !self.begin(axis, Kernel::Area, max_taps) {
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
            let has_left = left > MIN_PIECE;
            self.starts.push(if has_left { first - 1 } else { first });
            if has_left {
                self.weights.push((left / covered) as f32);
            }
            self.weights.extend((first..last).map(|_| (1.0 / covered) as f32));
            if right > MIN_PIECE {
                self.weights.push((right.min(1.0).min(covered) / covered) as f32);
            }
            self.weights.resize(self.starts.len() * max_taps, 0.0);
        }
    }

    /// Builds the tables for enlargement: two neighbours, weighted in units of 1/2048.
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

/// Rounds up a position that is not negative.
fn ceil(position: f64) -> u32 {
    let floor = position as u32;
    if f64::from(floor) < position { floor + 1 } else { floor }
}

/// Resizes one line to the target's width and writes it to the start of `out`, followed by one unused lane.
fn narrow(line: &[u8], taps: &Taps, wide: &mut Vec<f32>, out: &mut Vec<f32>) {
    let padded = line.len() + 3 * taps.count + 1;
    grow(wide, padded);
    let wide = &mut wide[..padded];
    for (wide, value) in wide.iter_mut().zip(line) {
        *wide = f32::from(*value);
    }
    // The buffer may contain the end of a longer line.
    wide[line.len()..].fill(0.0);
    grow(out, 3 * taps.starts.len() + 1);
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

/// Like [`convolve_any`] for a constant number of taps, so that the compiler can keep sums in registers.
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

/// The first [`LANES`] values of a slice.
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
    use crate::augment::Crop;

    fn pixels(bytes: &[u8], width: u32, height: u32) -> Pixels<'_> {
        Pixels { bytes, width, height, row_bytes: 3 * width as usize }
    }

    fn noise(len: usize) -> Vec<u8> {
        (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    /// Resizes to a buffer with one extra byte, which must not change.
    fn resize(
        resizer: &mut AreaResizer,
        source: Pixels<'_>,
        crop: Crop,
        target: [u32; 2],
    ) -> Vec<u8> {
        let [width, height] = target;
        let mut out = vec![77; 3 * (width * height) as usize + 1];
        resizer.resize(source.crop(crop).unwrap(), width, height, &mut out).unwrap();
        assert_eq!(out.pop(), Some(77));
        out
    }

    #[test]
    fn invalid_sizes_are_refused_before_anything_is_written() {
        let bytes = noise(3 * 10 * 8);
        let image = pixels(&bytes, 10, 8);
        let whole = Crop { left: 0, top: 0, width: 10, height: 8 };
        let mut out = [0; 3 * 4 * 4];
        let cases = [
            (Pixels { width: 0, ..image }, [4, 4]),
            (Pixels { height: 0, ..image }, [4, 4]),
            (image, [0, 4]),
            (image, [4, 0]),
            (image, [4, 5]),
            (image, [u32::MAX, u32::MAX]),
            (Pixels { bytes: &bytes[1..], ..image }, [4, 4]),
            (Pixels { row_bytes: 29, ..image }, [4, 4]),
            (Pixels { row_bytes: usize::MAX, ..image }, [4, 4]),
        ];
        for (source, [width, height]) in cases {
            let refused = AreaResizer::default().resize(source, width, height, &mut out);
            assert!(matches!(refused, Err(SampleFault::Resize(_))), "{source:?} {width}x{height}");
        }
        for crop in [
            Crop { width: 0, ..whole },
            Crop { height: 0, ..whole },
            Crop { left: 1, ..whole },
            Crop { top: u32::MAX, ..whole },
        ] {
            assert!(matches!(image.crop(crop), Err(SampleFault::Resize(_))), "{crop:?}");
        }
        assert_eq!(out, [0; 3 * 4 * 4]);
    }

    #[test]
    fn halves_are_rounded_to_even_but_up_in_two_by_two_blocks() {
        let whole = |width, height| Crop { left: 0, top: 0, width, height };
        let mut resizer = AreaResizer::default();
        let bytes = [0, 0, 0, 1, 1, 1];
        assert_eq!(resize(&mut resizer, pixels(&bytes, 2, 1), whole(2, 1), [1, 1]), [0; 3]);
        let bytes = [1, 1, 1, 2, 2, 2];
        assert_eq!(resize(&mut resizer, pixels(&bytes, 2, 1), whole(2, 1), [1, 1]), [2; 3]);
        let bytes = [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1];
        assert_eq!(resize(&mut resizer, pixels(&bytes, 2, 2), whole(2, 2), [1, 1]), [1; 3]);
    }

    #[test]
    fn a_used_resizer_gives_the_same_result_as_a_new_one() {
        let bytes = noise(3 * 90 * 70);
        let image = pixels(&bytes, 90, 70);
        let crops = [(90, 70), (33, 64), (90, 12), (5, 70), (64, 64)];
        let targets = [[32, 32], [90, 70], [7, 80], [16, 16], [45, 35]];
        let mut used = AreaResizer::default();
        for (width, height) in crops {
            for target in targets {
                let crop = Crop { left: 90 - width, top: 70 - height, width, height };
                let fresh = resize(&mut AreaResizer::default(), image, crop, target);
                assert_eq!(resize(&mut used, image, crop, target), fresh, "{crop:?} {target:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn only_the_crop_has_influence_and_a_single_colour_is_kept(
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
            let out = resize(&mut AreaResizer::default(), source, crop, [target_width, target_height]);
            // Shares below 1/1000 of a pixel are ignored, which may change a value by one level; so may the
            // truncation in fixed point.
            let near = |v: &u8| v.abs_diff(value) <= 1;
            prop_assert!(out.iter().all(near), "{out:?}");
        }
    }
}
