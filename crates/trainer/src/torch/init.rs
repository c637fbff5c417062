//! Initial values: a function of the seed alone.
//!
//! The numbers are drawn here rather than by libtorch, whose CPU generator is one per process (two
//! learners in two threads would disturb each other) and whose normal distribution uses other
//! approximations, hence other bits, on CPUs with AVX2 than without. Logarithm and cosine come from
//! the `libm` crate for the same reason: the C library's depend on its version and on the CPU.

use std::f64::consts::TAU;

use baton_model::Init;
use tch::Tensor;

use super::flat::Slot;

/// Fills the buffers of what is trained and of what is frozen with the initial values of `slots`.
///
/// Values are drawn in the order of `slots` and, within a tensor, in torchvision's (OIHW) order, so
/// that they do not depend on device or memory format.
pub(super) fn fill(
    trained: &Tensor,
    frozen: &Tensor,
    slots: &[Slot],
    seed: u64,
) -> tch::Result<()> {
    let mut draws = Draws(seed);
    for slot in slots {
        let mut view = slot.view(if slot.frozen { frozen } else { trained })?;
        let mut draw = || match slot.init {
            Init::Constant(value) => value,
            Init::Normal { std } => (std * draws.normal()) as f32,
            Init::Uniform { bound } => (bound * (2.0 * draws.unit() - 1.0)) as f32,
        };
        let values: Vec<f32> = (0..slot.len()).map(|_| draw()).collect();
        view.f_copy_(&Tensor::f_from_slice(&values)?.f_view(slot.shape.as_slice())?)?;
    }
    Ok(())
}

/// SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators").
struct Draws(u64);

impl Draws {
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
    fn normal_draws_have_mean_zero_and_variance_one() {
        let mut draws = Draws(7);
        let sample: Vec<f64> = (0..100_000).map(|_| draws.normal()).collect();
        let mean = sample.iter().sum::<f64>() / sample.len() as f64;
        let variance = sample.iter().map(|x| x * x).sum::<f64>() / sample.len() as f64;
        let beyond_two = sample.iter().filter(|x| x.abs() > 2.0).count();
        assert!(mean.abs() < 0.01, "{mean}");
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
        assert!((4_300..4_800).contains(&beyond_two), "{beyond_two}"); // 4.55 %
    }

    #[test]
    fn draws_are_the_published_sequence() {
        // First output of the authors' SplitMix64 for state 0.
        assert_eq!(Draws(0).next(), 0xE220_A839_7B1D_CDAF);
    }
}
