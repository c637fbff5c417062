//! Both passes of resizing in portable Rust: the reference, and the implementation for processors without AVX2.
//!
//! Every other implementation must produce the same bits as this one.

use super::{COLUMNS, Column, LANES, Pixels, Taps, VALUE_BITS, WEIGHT_BITS, rounding};

/// The first pass: weighted sums of input rows, for `COLUMNS` values from `start`.
pub(super) fn mix_row(
    source: &Pixels<'_>,
    first: usize,
    weights: &[u16],
    start: usize,
    sums: &mut [u16; COLUMNS],
) {
    *sums = [rounding(weights); COLUMNS];
    for (row, weight) in (first..).zip(weights) {
        for (sum, value) in sums.iter_mut().zip(&source.row(row)[start..]) {
            add(sum, u16::from(*value) << VALUE_BITS, *weight);
        }
    }
}

/// The second pass: weighted sums of the mixed columns, rounded to bytes.
pub(super) fn mix_columns(mixed: &[Column], columns: &Taps, finished: &mut [[u8; LANES]]) {
    let (pixels, _) = mixed.as_chunks::<3>();
    for (number, out) in finished.as_chunks_mut::<3>().0.iter_mut().take(columns.len()).enumerate()
    {
        let (first, weights) = columns.of(number);
        let mut sums = [[rounding(weights); LANES]; 3];
        for (pixel, weight) in pixels[first..].iter().zip(weights) {
            for (sum, value) in sums.as_flattened_mut().iter_mut().zip(pixel.as_flattened()) {
                add(sum, *value, *weight);
            }
        }
        for (out, sum) in out.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
            *out = (sum.saturating_add(1 << (VALUE_BITS - 1)) >> VALUE_BITS) as u8;
        }
    }
}

/// Adds a product, rounded down: the instructions `pmulhuw` and `paddusw`.
fn add(sum: &mut u16, value: u16, weight: u16) {
    let product = (u32::from(value) * u32::from(weight)) >> WEIGHT_BITS;
    *sum = sum.saturating_add(product as u16);
}
