//! Dropout of the adapters' inputs: the Rust side of dropout.cpp.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::super::error_text::ErrorText;

/// Dropout in one pass. What is dropped depends on the seed and the linear layer alone, so that a recomputation drops
/// the same.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dropout {
    share: f64,
    seed: u64,
    /// Factor of the values that stay.
    scale: f64,
}

impl Dropout {
    /// Drops a `share` of the values of tensors of this `kind`.
    pub(super) fn new(share: f64, seed: u64, kind: Kind) -> tch::Result<Self> {
        // Rounded to their number format, as the values of a mask of that format would be.
        let scale = Tensor::f_ones([1], (kind, Device::Cpu))?.f_div_scalar_(1.0 - share)?;
        Ok(Self { share, seed, scale: scale.f_double_value(&[0])? })
    }

    /// `x` with some values set to zero, and the others scaled up; `number` is that of the linear layer.
    pub(super) fn apply(&self, x: &Tensor, number: u64) -> tch::Result<Tensor> {
        // An odd factor, so that different numbers never give the same seed.
        let seed = self.seed.wrapping_add(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        // SAFETY: `x` is alive.
        let mask = ErrorText::captured(|message| unsafe {
            let mask = baton_dropout_mask(x.as_ptr(), self.share, seed, message);
            // SAFETY: no other code has this pointer.
            (!mask.is_null()).then(|| Tensor::from_ptr(mask))
        })?;
        // Only the mask is kept for the gradient: a byte per value.
        x.f_mul_scalar(self.scale)?.f_mul(&mask)
    }
}

unsafe extern "C" {
    fn baton_dropout_mask(
        input: *const C_tensor,
        share: f64,
        seed: u64,
        message: ErrorText,
    ) -> *mut C_tensor;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_values_is_dropped_and_the_others_are_scaled_up() {
        const COUNT: i64 = 20_000;
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            let x = Tensor::arange(COUNT, (Kind::Float, Device::Cpu)).sin().to_kind(kind);
            let x = x.set_requires_grad(true);
            let dropped =
                |seed, number| Dropout::new(0.3, seed, kind).unwrap().apply(&x, number).unwrap();
            let y = dropped(5, 1);
            assert_eq!(dropped(5, 1), y, "{kind:?}");
            assert!(dropped(5, 2) != y && dropped(6, 1) != y, "{kind:?}");
            let scale = x.full_like(1.0).detach() / 0.7;
            // Where the value 0 stays, which is the first one's, does not matter.
            let stays = y.ne(0.0).to_kind(kind);
            assert_eq!(y, &x * &stays * &scale, "{kind:?}");
            let share = 1.0 - stays.mean(Kind::Float).double_value(&[]);
            assert!((share - 0.3).abs() < 0.02, "{kind:?} {share}");
            let gradient = Tensor::run_backward(&[y.sum(kind)], &[&x], false, false).remove(0);
            assert_eq!(gradient.narrow(0, 1, COUNT - 1), (stays * scale).narrow(0, 1, COUNT - 1));
        }
    }
}
