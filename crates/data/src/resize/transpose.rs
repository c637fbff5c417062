//! Transposition of square blocks: rows become columns.

use bytemuck::cast;
use wide::{u8x16, u16x8};

/// Transposes rows of words: `transposed[i][j]` becomes `rows[j][i]`.
#[inline(always)]
pub(super) fn transpose_words<const N: usize>(
    rows: &[[u16; N]; 16],
    transposed: &mut [[u16; 16]; N],
) {
    for (down, rows) in rows.as_chunks::<8>().0.iter().enumerate() {
        for (across, out) in transposed.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let corner = rows.each_ref().map(|row| u16x8::new(row.as_chunks::<8>().0[across]));
            for (out, values) in out.iter_mut().zip(u16x8::transpose(corner)) {
                out.as_chunks_mut::<8>().0[down] = values.to_array();
            }
        }
    }
}

/// Transposes 16 x 16 bytes by interleaving row i with row i + 8, four times. Each time the position of every byte in
/// the block, as an 8-bit number, is rotated by one bit. (`u8x16::transpose` is slower: it moves single bytes.)
#[inline(always)]
pub(super) fn transpose_bytes(square: &[[u8; 16]; 16]) -> [[u8; 16]; 16] {
    let mut rows: [u8x16; 16] = cast(*square);
    for _ in 0..4 {
        let mut next = rows;
        for i in 0..8 {
            next[2 * i] = u8x16::unpack_low(rows[i], rows[i + 8]);
            next[2 * i + 1] = u8x16::unpack_high(rows[i], rows[i + 8]);
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
        let transposed_bytes = transpose_bytes(&bytes);
        let mut transposed_words = [[0; 16]; 16];
        transpose_words(&words, &mut transposed_words);
        for i in 0..16 {
            for j in 0..16 {
                assert_eq!(transposed_bytes[i][j], bytes[j][i]);
                assert_eq!(transposed_words[i][j], words[j][i]);
            }
        }
    }
}
