//! NF4 with double quantisation (Dettmers et al. 2023, arXiv 2305.14314), as bitsandbytes 0.50 stores it.
//!
//! ```text
//! weight  = CODES[code] · scale                       one code of 4 bits each, one scale per 64 weights
//! scale   = scale_codes()[code] · scale' + offset     one code of 8 bits each, one scale' per 256 scales
//! ```
//!
//! 4.127 bits per weight. All arithmetic is in f32, so the same weights give the same bytes on every machine.

mod cache;

use std::array;

pub use self::cache::Nf4Source;

/// Number of weights that share a scale.
pub const BLOCK: usize = 64;
/// Number of scales that share a scale.
pub const SCALE_BLOCK: usize = 256;
/// Number of blocks of a weight that are made dense at a time, a multiple of [`SCALE_BLOCK`]: 32 MiB as f32.
pub const BLOCKS_AT_ONCE: usize = 1 << 17;

/// The values of the codes: quantiles of a normal distribution, from the paper's reference code.
pub const CODES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The code of 0.
const ZERO: u8 = 7;

/// A quantised tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Nf4 {
    /// Two codes a byte, the first one in the high half.
    pub packed: Vec<u8>,
    /// Code of each block's scale.
    pub scales: Vec<u8>,
    /// Scale of each block of scales.
    pub outer_scales: Vec<f32>,
    /// Added to every scale.
    pub offset: f32,
}

impl Nf4 {
    /// Quantises the values of a tensor, in its order.
    #[must_use]
    pub fn quantize(values: &[f32]) -> Self {
        let scales: Vec<f32> = values.chunks(BLOCK).map(largest).collect();
        let mut codes = Vec::with_capacity(values.len().next_multiple_of(2));
        let bounds = midpoints(&CODES);
        for (block, scale) in values.chunks(BLOCK).zip(&scales) {
            let scale = scale.max(SMALLEST_SCALE);
            // As bitsandbytes does: a last block that is not full is divided.
            let is_full = block.len() == BLOCK;
            let inverse = 1.0 / scale;
            codes.extend(block.iter().map(|value| {
                let scaled = if is_full { value * inverse } else { value / scale };
                code(&bounds, scaled)
            }));
        }
        codes.resize(codes.len().next_multiple_of(2), ZERO);
        let packed = codes.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect();

        // Not in f32, where the sum depends on its order.
        let sum: f64 = scales.iter().map(|scale| f64::from(*scale)).sum();
        let offset = (sum / scales.len().max(1) as f64) as f32;
        let centred: Vec<f32> = scales.iter().map(|scale| scale - offset).collect();
        let outer_scales: Vec<f32> = centred.chunks(SCALE_BLOCK).map(largest).collect();
        let bounds = midpoints(&scale_codes());
        let blocks = centred.chunks(SCALE_BLOCK).zip(&outer_scales);
        let scales = blocks.flat_map(|(block, scale)| {
            let scale = scale.max(SMALLEST_SCALE);
            block.iter().map(move |value| code(&bounds, value / scale))
        });
        Self { packed, scales: scales.collect(), outer_scales, offset }
    }

    /// The first `count` values.
    #[must_use]
    pub fn values(&self, count: usize) -> Vec<f32> {
        let codes = scale_codes();
        let outer = self.outer_scales.iter().flat_map(|scale| [*scale; SCALE_BLOCK]);
        let scales = self.scales.iter().zip(outer);
        let scales = scales.map(|(code, scale)| codes[usize::from(*code)] * scale + self.offset);
        let scales = scales.flat_map(|scale| [scale; BLOCK]);
        let codes = self.packed.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        let values = codes.zip(scales).map(|(code, scale)| CODES[usize::from(code)] * scale);
        values.take(count).collect()
    }
}

/// Instead of a scale of 0, so that nothing is divided by 0.
const SMALLEST_SCALE: f32 = 1e-38;

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

/// The values halfway between neighbours.
fn midpoints<const N: usize>(codes: &[f32; N]) -> [f32; N] {
    // The last one is beyond all values.
    array::from_fn(|i| codes.get(i + 1).map_or(f32::INFINITY, |next| (codes[i] + next) / 2.0))
}

/// The code of the nearest value, the lower one of two.
fn code<const N: usize>(bounds: &[f32; N], value: f32) -> u8 {
    match N {
        16 => bounds.iter().map(|bound| u8::from(*bound < value)).sum(),
        _ => bounds.partition_point(|bound| *bound < value) as u8,
    }
}

/// The values of the scales' codes, ascending: bitsandbytes' signed "dynamic" map, with its roundings in f32. Seven powers
/// of ten with 1, 2, 4, … 64 values each, equally spaced, of either sign; and 0 and 1.
#[must_use]
pub fn scale_codes() -> [f32; 256] {
    let mut codes = vec![0.0, 1.0];
    for power in 0..7_u32 {
        let steps = 2_u32.pow(power);
        let (first, last) = (0.1_f32, 1.0_f32);
        let step = (last - first) / steps as f32;
        // `torch.linspace`, with its product and sum rounded once.
        let bound = |i: u32| match i < steps.div_ceil(2) {
            true => step.mul_add(i as f32, first),
            false => (-step).mul_add((steps - i) as f32, last),
        };
        let unit = 10_f64.powi(power as i32 - 6) as f32;
        for i in 0..steps {
            let value = unit * ((bound(i) + bound(i + 1)) / 2.0);
            codes.extend([value, -value]);
        }
    }
    codes.sort_by(f32::total_cmp);
    array::from_fn(|i| codes.get(i).copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_of_scales_are_those_of_bitsandbytes() {
        let codes = scale_codes();
        // Of `create_dynamic_map()` in bitsandbytes 0.50.2; `make parity ARGS=language` compares all.
        assert_eq!(codes[..3], [-0.992_968_74, -0.978_906_3, -0.964_843_75]);
        assert_eq!(codes[126..=129], [-5.500_000_4e-7, 0.0, 5.500_000_4e-7, 3.250_000_2e-6]);
        assert_eq!(codes[255], 1.0);
        assert!(codes.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn every_value_becomes_the_nearest_of_sixteen() {
        let values: Vec<f32> = (0..=640).map(|i| (i as f32 - 320.0) / 320.0).collect();
        let quantized = Nf4::quantize(&values);
        assert_eq!(quantized.packed.len(), values.len().div_ceil(2));
        for (block, found) in values.chunks(BLOCK).zip(quantized.values(values.len()).chunks(BLOCK))
        {
            let scale = largest(block);
            for (value, found) in block.iter().zip(found) {
                let distance = |code: &f32| (code * scale - value).abs();
                let nearest = CODES.iter().map(distance).fold(f32::INFINITY, f32::min);
                // And the error of the scale: at most half a step of its map.
                assert!((found - value).abs() <= nearest + 0.01, "{value} {found}");
            }
        }
        let zeros = Nf4::quantize(&[0.0; 100]);
        assert_eq!(zeros.values(100), [0.0; 100]);
        assert_eq!(Nf4::quantize(&[]), Nf4::default());
    }
}
