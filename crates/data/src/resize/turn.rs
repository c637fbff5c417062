//! Squares of numbers, turned round: rows become columns.
#![allow(unsafe_code)] // The instructions are SSE2's, which every x86-64 processor has.

use std::arch::x86_64::{
    __m128i, _mm_unpackhi_epi8, _mm_unpackhi_epi16, _mm_unpackhi_epi32, _mm_unpackhi_epi64,
    _mm_unpacklo_epi8, _mm_unpacklo_epi16, _mm_unpacklo_epi32, _mm_unpacklo_epi64,
};

use bytemuck::cast;

/// Turns rows of words round: `turned[i][j]` becomes `rows[j][i]`.
#[inline(always)]
pub(super) fn turn_words<const N: usize>(rows: &[[u16; N]; 16], turned: &mut [[u16; 16]; N]) {
    for (down, rows) in rows.as_chunks::<8>().0.iter().enumerate() {
        for (across, out) in turned.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let corner = rows.each_ref().map(|row| row.as_chunks::<8>().0[across]);
            for (out, values) in out.iter_mut().zip(turn_eight(corner)) {
                out.as_chunks_mut::<8>().0[down] = values;
            }
        }
    }
}

/// Turns 8 x 8 words round: three times each register meets the one half of all further on.
#[inline(always)]
fn turn_eight(rows: [[u16; 8]; 8]) -> [[u16; 8]; 8] {
    let r: [__m128i; 8] = cast(rows);
    // SAFETY: SSE2 is a part of x86-64.
    let turned = unsafe {
        let pairs = [
            _mm_unpacklo_epi16(r[0], r[1]),
            _mm_unpackhi_epi16(r[0], r[1]),
            _mm_unpacklo_epi16(r[2], r[3]),
            _mm_unpackhi_epi16(r[2], r[3]),
            _mm_unpacklo_epi16(r[4], r[5]),
            _mm_unpackhi_epi16(r[4], r[5]),
            _mm_unpacklo_epi16(r[6], r[7]),
            _mm_unpackhi_epi16(r[6], r[7]),
        ];
        let fours = [
            _mm_unpacklo_epi32(pairs[0], pairs[2]),
            _mm_unpackhi_epi32(pairs[0], pairs[2]),
            _mm_unpacklo_epi32(pairs[1], pairs[3]),
            _mm_unpackhi_epi32(pairs[1], pairs[3]),
            _mm_unpacklo_epi32(pairs[4], pairs[6]),
            _mm_unpackhi_epi32(pairs[4], pairs[6]),
            _mm_unpacklo_epi32(pairs[5], pairs[7]),
            _mm_unpackhi_epi32(pairs[5], pairs[7]),
        ];
        [
            _mm_unpacklo_epi64(fours[0], fours[4]),
            _mm_unpackhi_epi64(fours[0], fours[4]),
            _mm_unpacklo_epi64(fours[1], fours[5]),
            _mm_unpackhi_epi64(fours[1], fours[5]),
            _mm_unpacklo_epi64(fours[2], fours[6]),
            _mm_unpackhi_epi64(fours[2], fours[6]),
            _mm_unpacklo_epi64(fours[3], fours[7]),
            _mm_unpackhi_epi64(fours[3], fours[7]),
        ]
    };
    cast(turned)
}

/// Turns 16 x 16 bytes round. Interleaving row i with row i + 8, four times over, does it: each time
/// every byte's place in the whole, seen as an 8-bit number, is rotated by one bit.
#[inline(always)]
pub(super) fn turn_bytes(square: &[[u8; 16]; 16]) -> [[u8; 16]; 16] {
    let mut rows: [__m128i; 16] = cast(*square);
    for _ in 0..4 {
        let mut next = rows;
        for i in 0..8 {
            // SAFETY: SSE2 is a part of x86-64.
            unsafe {
                next[2 * i] = _mm_unpacklo_epi8(rows[i], rows[i + 8]);
                next[2 * i + 1] = _mm_unpackhi_epi8(rows[i], rows[i + 8]);
            }
        }
        rows = next;
    }
    cast(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_columns() {
        let bytes = std::array::from_fn(|i| std::array::from_fn(|j| (16 * i + j) as u8));
        let words = bytes.map(|row: [u8; 16]| row.map(|value| u16::from(value) * 100));
        let turned_bytes = turn_bytes(&bytes);
        let mut turned_words = [[0; 16]; 16];
        turn_words(&words, &mut turned_words);
        for i in 0..16 {
            for j in 0..16 {
                assert_eq!(turned_bytes[i][j], bytes[j][i]);
                assert_eq!(turned_words[i][j], words[j][i]);
            }
        }
    }
}
