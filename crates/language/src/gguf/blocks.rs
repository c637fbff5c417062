//! The formats of tensors in GGUF files, and their values as f32.
//!
//! Quantized rows are divided into blocks of 32 values, each with its own scale as f16: ggml's `ggml-common.h`.

use baton_model::Float;
use half::f16;

/// The formats that are supported, for messages.
pub(super) const SUPPORTED: &str = "F32, F16, BF16, Q4_0, Q4_1 and Q8_0";

/// Values of a quantized block.
const BLOCK: usize = 32;

/// Format of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TensorFormat {
    /// Each value is a number.
    Plain(Float),
    /// Scale and 32 × 4 bits: `scale · (q − 8)`.
    Q4_0,
    /// Scale, minimum and 32 × 4 bits: `scale · q + minimum`.
    Q4_1,
    /// Scale and 32 signed bytes: `scale · q`.
    Q8_0,
}

impl TensorFormat {
    /// The format of a type number.
    pub(super) fn new(kind: u32) -> Option<Self> {
        Some(match kind {
            0 => Self::Plain(Float::F32),
            1 => Self::Plain(Float::F16),
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            30 => Self::Plain(Float::Bf16),
            _ => return None,
        })
    }

    /// Values and bytes of a block.
    pub(super) fn block(self) -> (u64, u64) {
        match self {
            Self::Plain(float) => (1, float.bytes() as u64),
            Self::Q4_0 => (BLOCK as u64, 18),
            Self::Q4_1 => (BLOCK as u64, 20),
            Self::Q8_0 => (BLOCK as u64, 34),
        }
    }

    /// The values of whole blocks.
    pub(super) fn decode(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::Plain(float) => float.decode(bytes),
            Self::Q4_0 => decode_blocks::<18>(bytes, |[low, high, quants @ ..], values| {
                let scale = half(*low, *high);
                nibbles(quants, values, |q| scale * (f32::from(q) - 8.0));
            }),
            Self::Q4_1 => decode_blocks::<20>(bytes, |[a, b, c, d, quants @ ..], values| {
                let (scale, minimum) = (half(*a, *b), half(*c, *d));
                nibbles(quants, values, |q| scale * f32::from(q) + minimum);
            }),
            Self::Q8_0 => decode_blocks::<34>(bytes, |[low, high, quants @ ..], values| {
                let scale = half(*low, *high);
                for (value, q) in values.iter_mut().zip(quants) {
                    *value = f32::from(i8::from_le_bytes([*q])) * scale;
                }
            }),
        }
    }
}

fn decode_blocks<const BYTES: usize>(
    bytes: &[u8],
    decode: impl Fn(&[u8; BYTES], &mut [f32; BLOCK]),
) -> Vec<f32> {
    let (blocks, _) = bytes.as_chunks::<BYTES>();
    let mut values = vec![0.0; blocks.len() * BLOCK];
    for (block, values) in blocks.iter().zip(values.as_chunks_mut::<BLOCK>().0) {
        decode(block, values);
    }
    values
}

fn half(low: u8, high: u8) -> f32 {
    f16::from_le_bytes([low, high]).to_f32()
}

/// The low halves of all bytes come first, then the high halves.
fn nibbles(bytes: &[u8], values: &mut [f32; BLOCK], value: impl Fn(u8) -> f32) {
    let (low, high) = values.split_at_mut(BLOCK / 2);
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = value(byte & 15);
        *high = value(byte >> 4);
    }
}

/// Name of a type number.
pub(super) fn type_name(kind: u32) -> String {
    let name = match kind {
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24..=28 => "integers or f64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return format!("the unknown type {kind}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Byte `i` has the low half `i` and the high half `15 - i`.
    fn quants() -> Vec<u8> {
        (0..16).map(|i| i | ((15 - i) << 4)).collect()
    }

    #[test]
    fn blocks_have_the_values_of_their_scales() {
        let [a, b] = f16::from_f32(0.5).to_le_bytes();
        let [c, d] = f16::from_f32(-3.0).to_le_bytes();
        let low = |i: u8| f32::from(i);
        let values = TensorFormat::Q4_0.decode(&[&[a, b][..], &quants()].concat());
        assert_eq!((values[3], values[16 + 3]), (0.5 * (low(3) - 8.0), 0.5 * (12.0 - 8.0)));
        let values = TensorFormat::Q4_1.decode(&[&[a, b, c, d][..], &quants()].concat());
        assert_eq!((values[3], values[31]), (0.5 * 3.0 - 3.0, -3.0));
        let bytes: Vec<u8> = (0..32).map(|i: u8| i.wrapping_mul(8)).collect();
        let values = TensorFormat::Q8_0.decode(&[&[a, b][..], &bytes].concat());
        assert_eq!((values[1], values[16], values[31]), (4.0, -64.0, -4.0));
        assert_eq!(values.len(), 32);
    }
}
