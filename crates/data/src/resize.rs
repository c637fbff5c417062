//! The `fast` resize: a triangle filter that becomes wider for larger reductions, to avoid aliasing.
//!
//! It equals torchvision's `antialias=True` and Pillow's `BILINEAR` up to one level: weights have 16 bits, and values
//! between and within the passes have 8 fractional bits.
//!
//! Sixteen output rows are made at a time. The first pass mixes input rows, many columns at once. Its result is
//! transposed, so that the sixteen rows of one column are adjacent in memory and the second pass can mix columns,
//! sixteen rows at once. That result is transposed back. So neither pass has to move single pixels within a register,
//! which takes most of the time of other resizers for RGB.
//!
//! The code uses integer arithmetic only, so the results are bit-identical on all processors and a run can move from
//! one machine to another.

mod avx2;
mod portable;
mod transpose;

use std::ops::Range;

use self::transpose::{transpose_bytes, transpose_words};
use crate::{SampleFault, augment::Flip, pixels::Pixels};

/// Output rows made at a time.
const LANES: usize = 16;
/// Columns that the first pass mixes at a time.
const COLUMNS: usize = 128;
/// Fractional bits of a value: 255 becomes 65,280, which fits into a u16.
const VALUE_BITS: u32 = 8;
/// Fractional bits of a weight.
const WEIGHT_BITS: u32 = 16;

/// One column of a tile: a value for each of its rows.
type Column = [u16; LANES];

/// A rectangle in an image, in pixels; its edges may be between pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SourceRect {
    pub(crate) left: f64,
    pub(crate) top: f64,
    pub(crate) width: f64,
    pub(crate) height: f64,
}

impl SourceRect {
    /// The complete image.
    pub(crate) fn whole(pixels: &Pixels<'_>) -> Self {
        let (width, height) = (pixels.width.into(), pixels.height.into());
        Self { left: 0.0, top: 0.0, width, height }
    }
}

/// Resizes images one after the other; reuses its tables and tiles.
pub(crate) struct Resizer {
    columns: Taps,
    rows: Taps,
    tile: Tile,
    mix_row: MixRow,
    mix_columns: MixColumns,
}

/// Buffers for sixteen output rows.
#[derive(Default)]
struct Tile {
    /// Mixed rows: one entry for each channel of each input column, and some unused ones.
    mixed: Vec<Column>,
    /// Finished values: one entry for each channel of each output column, and some unused ones.
    finished: Vec<[u8; LANES]>,
}

impl Resizer {
    pub(crate) fn new() -> Self {
        let (mix_row, mix_columns) =
            avx2::passes().unwrap_or((portable::mix_row, portable::mix_columns));
        Self {
            columns: Taps::default(),
            rows: Taps::default(),
            tile: Tile::default(),
            mix_row,
            mix_columns,
        }
    }

    /// Writes the rectangle `window` of `source`, resized to a square of `side` pixels and flipped, into `out`: u8,
    /// shape (side, side, 3). Pixels more than one pixel away from the window have no influence.
    pub(crate) fn resize(
        &mut self,
        source: Pixels<'_>,
        window: SourceRect,
        side: u32,
        flip: Flip,
        out: &mut [u8],
    ) -> Result<(), SampleFault> {
        let row_bytes = 3 * side as usize;
        if out.len() != row_bytes * side as usize || side == 0 {
            return Err(SampleFault::Resize(format!(
                "a buffer of {} bytes cannot hold exactly {side}x{side} pixels",
                out.len()
            )));
        }
        self.rows.lay_out(window.top, window.height, source.height, side);
        self.columns.lay_out(window.left, window.width, source.width, side);
        if flip == Flip::Mirror {
            self.columns.reverse();
        }
        let columns = 3 * source.width as usize;
        self.tile.mixed.resize(columns.next_multiple_of(COLUMNS), [0; LANES]);
        self.tile.finished.resize(row_bytes.next_multiple_of(LANES), [0; LANES]);
        for (number, out) in out.chunks_mut(LANES * row_bytes).enumerate() {
            let first = number * LANES;
            let rows = first..first + out.len() / row_bytes;
            mix_rows(&source, &self.rows, rows, self.mix_row, &mut self.tile.mixed);
            (self.mix_columns)(&self.tile.mixed, &self.columns, &mut self.tile.finished);
            transpose_back(&self.tile.finished, row_bytes, out);
        }
        Ok(())
    }
}

/// The first pass: weighted sums of input rows, transposed.
fn mix_rows(
    source: &Pixels<'_>,
    taps: &Taps,
    rows: Range<usize>,
    mix: MixRow,
    mixed: &mut [Column],
) {
    let mut block = [[0; COLUMNS]; LANES];
    for (number, out) in mixed.as_chunks_mut::<COLUMNS>().0.iter_mut().enumerate() {
        let start = number * COLUMNS;
        for (row, sums) in rows.clone().zip(&mut block) {
            let (first, weights) = taps.of(row);
            mix(source, first, weights, start, sums);
        }
        transpose_words(&block, out);
    }
}

/// Transposes finished columns back into the rows of `out`.
fn transpose_back(finished: &[[u8; LANES]], row_bytes: usize, out: &mut [u8]) {
    for (number, block) in finished.as_chunks::<LANES>().0.iter().enumerate() {
        let start = number * LANES;
        for (row, values) in out.chunks_exact_mut(row_bytes).zip(&transpose_bytes(block)) {
            let row = &mut row[start..];
            // The usual case: one store instruction.
            match row.first_chunk_mut::<LANES>() {
                Some(out) => *out = *values,
                None => row.copy_from_slice(&values[..row.len()]),
            }
        }
    }
}

/// Arguments: image, first row, weights of the rows, first column, sums. Computes the weighted sums of the rows, for
/// `COLUMNS` columns. The sums of columns after the end of the rows are undefined.
type MixRow = fn(&Pixels<'_>, usize, &[u16], usize, &mut [u16; COLUMNS]);
/// The second pass: weighted sums of columns, rounded to whole levels.
type MixColumns = fn(&[Column], &Taps, &mut [[u8; LANES]]);

/// Start value of a sum, which compensates the average error of rounding the products down.
fn rounding(weights: &[u16]) -> u16 {
    // This fits: there are no more weights than an image has rows or columns.
    (weights.len() / 2) as u16
}

/// The input pixels of each output pixel along one axis, and their weights.
#[derive(Debug, Default)]
struct Taps {
    /// For each output pixel: the first input pixel, and start and end of its weights in `weights`.
    spans: Vec<(u32, u32, u32)>,
    weights: Vec<u16>,
    /// Weights of the current output pixel before rounding.
    exact: Vec<f64>,
}

impl Taps {
    /// Computes the taps of `target` output pixels that cover `len` pixels from `start` on, in an axis of `pixels`
    /// pixels.
    ///
    /// The filter is a triangle as wide as two output pixels, but at least two input pixels wide. At the borders it
    /// is clipped and the remaining weights are scaled up.
    fn lay_out(&mut self, start: f64, len: f64, pixels: u32, target: u32) {
        let scale = len / f64::from(target);
        let support = scale.max(1.0);
        let last = f64::from(pixels);
        self.spans.clear();
        self.weights.clear();
        for number in 0..target {
            let centre = start + (f64::from(number) + 0.5) * scale;
            // Casts round down, and saturate at 0.
            let first = (centre - support + 0.5).clamp(0.0, last - 1.0) as u32;
            let end = (centre + support + 0.5).clamp(f64::from(first) + 1.0, last) as u32;
            self.exact.clear();
            let mut distance = f64::from(first) + 0.5 - centre;
            for _ in first..end {
                self.exact.push((support - distance.abs()).max(0.0));
                distance += 1.0;
            }
            let begin = self.weights.len() as u32;
            self.round();
            self.spans.push((first, begin, self.weights.len() as u32));
        }
    }

    /// Rounds the exact weights so that they sum to 1: the rounding error is added to the largest weight. A single
    /// weight of 1 becomes one unit too small, which does not change any level.
    fn round(&mut self) {
        const ONE: i32 = 1 << WEIGHT_BITS;
        let scale = f64::from(ONE) / self.exact.iter().sum::<f64>();
        let begin = self.weights.len();
        let fits = |weight: i32| weight.min(i32::from(u16::MAX)) as u16;
        let mut rest = ONE;
        for exact in &self.exact {
            let weight = (exact * scale + 0.5) as i32;
            rest -= weight;
            self.weights.push(fits(weight));
        }
        if let Some(largest) = self.weights[begin..].iter_mut().max() {
            *largest = fits(i32::from(*largest) + rest);
        }
    }

    fn len(&self) -> usize {
        self.spans.len()
    }

    /// The first input pixel of an output pixel, and the weights of this and the following input pixels.
    fn of(&self, number: usize) -> (usize, &[u16]) {
        let (first, begin, end) = self.spans[number];
        (first as usize, &self.weights[begin as usize..end as usize])
    }

    fn reverse(&mut self) {
        self.spans.reverse();
    }
}

#[cfg(test)]
mod tests;
