//! Initial values: a function of the seed alone.
//!
//! The random numbers are computed here rather than by libtorch, because its CPU generator is shared by the whole
//! process (two learners in two threads would disturb each other), and because its normal distribution uses different
//! approximations, with different bits, on CPUs with AVX2. Logarithm and cosine come from the `libm` crate for the same
//! reason: those of the C library depend on its version and on the CPU.

use std::f64::consts::TAU;

use baton_model::Init;
use tch::Tensor;

use super::flat::FlatTensor;

/// Fills the buffers of trained and of frozen tensors with the initial values of `entries`.
///
/// Values are drawn in the order of `entries` and, within a tensor, in torchvision's (OIHW) order, so that they do not
/// depend on device or memory format.
pub(super) fn fill(
    trained: &Tensor,
    frozen: &Tensor,
    entries: &[FlatTensor],
    seed: u64,
) -> tch::Result<()> {
    let mut random = InitRandom(seed);
    for entry in entries {
        let mut view = entry.view(if entry.frozen { frozen } else { trained })?;
        let mut draw = || match entry.init {
            Init::Constant(value) => value,
            Init::Normal { std } => (std * random.normal()) as f32,
            Init::Uniform { bound } => (bound * (2.0 * random.unit() - 1.0)) as f32,
        };
        let values: Vec<f32> = (0..entry.len()).map(|_| draw()).collect();
        view.f_copy_(&Tensor::f_from_slice(&values)?.f_view(entry.shape.as_slice())?)?;
    }
    Ok(())
}

/// SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators").
struct InitRandom(u64);

impl InitRandom {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform on (0, 1], in steps of 2⁻⁵³.
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Box & Muller 1958; the second number of each pair is not used.
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * libm::log(self.unit())).sqrt();
        radius * libm::cos(TAU * self.unit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_mean_zero_and_variance_one() {
        let mut random = InitRandom(7);
        let sample: Vec<f64> = (0..100_000).map(|_| random.normal()).collect();
        let mean = sample.iter().sum::<f64>() / sample.len() as f64;
        let variance = sample.iter().map(|x| x * x).sum::<f64>() / sample.len() as f64;
        let beyond_two = sample.iter().filter(|x| x.abs() > 2.0).count();
        assert!(mean.abs() < 0.01, "{mean}");
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
        assert!((4_300..4_800).contains(&beyond_two), "{beyond_two}"); // 4.55 %
    }

    #[test]
    fn numbers_are_the_published_sequence() {
        // First output of the authors' SplitMix64 for state 0.
        assert_eq!(InitRandom(0).next(), 0xE220_A839_7B1D_CDAF);
    }
}
