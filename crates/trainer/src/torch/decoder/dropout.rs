//! Dropout of the adapters' inputs: the Rust side of dropout.cpp.
#![allow(unsafe_code)]

use tch::Tensor;
use torch_sys::C_tensor;

use super::super::error_text::ErrorText;

/// Dropout in one pass. What is dropped depends on the seed and the linear layer alone, so that a recomputation drops
/// the same.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dropout {
    /// Share of the values that are dropped.
    pub(super) share: f64,
    pub(super) seed: u64,
}

impl Dropout {
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
        // A byte per value is kept for the gradient. The factor is rounded to the number format of the values.
        let scale = Tensor::f_ones([1], (x.kind(), x.device()))?.f_div_scalar_(1.0 - self.share)?;
        x.f_mul(&scale)?.f_mul(&mask)
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
