//! Both passes with AVX2, 32 bytes at a time: bit-identical to [`super::portable`].
#![allow(unsafe_code)] // Calls of code that needs AVX2.

use std::arch::x86_64::{
    __m256i, _mm256_adds_epu16, _mm256_castsi256_si128, _mm256_cvtepu8_epi16, _mm256_mulhi_epu16,
    _mm256_packus_epi16, _mm256_permute4x64_epi64, _mm256_set1_epi16, _mm256_slli_epi16,
    _mm256_srli_epi16,
};

use bytemuck::cast;

use super::{
    COLUMNS, Column, LANES, MixColumns, MixRow, Pixels, Taps, VALUE_BITS, portable, rounding,
};

const SHIFT: i32 = VALUE_BITS as i32;

/// The passes, if this processor has AVX2.
pub(super) fn passes() -> Option<(MixRow, MixColumns)> {
    std::arch::is_x86_feature_detected!("avx2").then_some((mix_row, mix_columns))
}

/// Must be called only through the result of [`passes`].
fn mix_row(
    source: &Pixels<'_>,
    first: usize,
    weights: &[u16],
    start: usize,
    sums: &mut [u16; COLUMNS],
) {
    // At the end of a row, reads continue into the next row. The last row has none, so use the portable code.
    let last = (first + weights.len() - 1) * source.row_bytes + start;
    if last + COLUMNS > source.bytes.len() {
        return portable::mix_row(source, first, weights, start, sums);
    }
    let rows = &source.bytes[first * source.row_bytes + start..];
    // SAFETY: `passes` has checked that the processor supports AVX2.
    unsafe { mix_row_avx2(rows, source.row_bytes, weights, sums) }
}

/// Must be called only through the result of [`passes`].
fn mix_columns(mixed: &[Column], columns: &Taps, finished: &mut [[u8; LANES]]) {
    // SAFETY: `passes` has checked that the processor supports AVX2.
    unsafe { mix_columns_avx2(mixed, columns, finished) }
}

// The functions below use no closures or iterator adaptors around intrinsics: code called by those is compiled for
// AVX2 only if it happens to be inlined.

#[target_feature(enable = "avx2")]
fn mix_row_avx2(rows: &[u8], row_bytes: usize, weights: &[u16], sums: &mut [u16; COLUMNS]) {
    let begin = _mm256_set1_epi16(rounding(weights) as i16);
    let (parts, _) = sums.as_chunks_mut::<{ 4 * LANES }>();
    for (part, sums) in parts.iter_mut().enumerate() {
        let mut start = part * 4 * LANES;
        let (mut sum0, mut sum1, mut sum2, mut sum3) = (begin, begin, begin, begin);
        for weight in weights {
            let weight = _mm256_set1_epi16(*weight as i16);
            let (values, _) = rows[start..start + 4 * LANES].as_chunks::<LANES>();
            start += row_bytes;
            sum0 = add(sum0, widen(&values[0]), weight);
            sum1 = add(sum1, widen(&values[1]), weight);
            sum2 = add(sum2, widen(&values[2]), weight);
            sum3 = add(sum3, widen(&values[3]), weight);
        }
        let (sums, _) = sums.as_chunks_mut::<LANES>();
        (sums[0], sums[1], sums[2], sums[3]) = (cast(sum0), cast(sum1), cast(sum2), cast(sum3));
    }
}

#[target_feature(enable = "avx2")]
fn mix_columns_avx2(mixed: &[Column], columns: &Taps, finished: &mut [[u8; LANES]]) {
    let (pixels, _) = mixed.as_chunks::<3>();
    let (finished, _) = finished.as_chunks_mut::<3>();
    for (number, out) in finished[..columns.len()].iter_mut().enumerate() {
        let (first, weights) = columns.of(number);
        let begin = _mm256_set1_epi16(rounding(weights) as i16);
        let (mut red, mut green, mut blue) = (begin, begin, begin);
        for (pixel, weight) in pixels[first..first + weights.len()].iter().zip(weights) {
            let weight = _mm256_set1_epi16(*weight as i16);
            red = add(red, cast(pixel[0]), weight);
            green = add(green, cast(pixel[1]), weight);
            blue = add(blue, cast(pixel[2]), weight);
        }
        *out = [rounded(red), rounded(green), rounded(blue)];
    }
}

/// Adds products, rounded down.
#[inline]
#[target_feature(enable = "avx2")]
fn add(sum: __m256i, values: __m256i, weight: __m256i) -> __m256i {
    _mm256_adds_epu16(sum, _mm256_mulhi_epu16(values, weight))
}

/// Converts bytes to values.
#[inline]
#[target_feature(enable = "avx2")]
fn widen(bytes: &[u8; LANES]) -> __m256i {
    _mm256_slli_epi16::<SHIFT>(_mm256_cvtepu8_epi16(cast(*bytes)))
}

/// Converts values to bytes, rounded to whole levels.
#[inline]
#[target_feature(enable = "avx2")]
fn rounded(values: __m256i) -> [u8; LANES] {
    let half = _mm256_set1_epi16(1 << (SHIFT - 1));
    let levels = _mm256_srli_epi16::<SHIFT>(_mm256_adds_epu16(values, half));
    // Packing works on halves of a register: the bytes are in the first and third quarter.
    let packed = _mm256_permute4x64_epi64::<0b10_00>(_mm256_packus_epi16(levels, levels));
    cast(_mm256_castsi256_si128(packed))
}
