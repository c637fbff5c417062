//! Attention with capped scores: the Rust side of capped.cpp.
#![allow(unsafe_code)]

use tch::Tensor;
use torch_sys::C_tensor;

use super::super::error_text::ErrorText;

/// `softmax(cap · tanh(scale · Q Kᵀ / cap)) V`, without the scores where `hidden`. For the gradient, the scores are computed
/// again, as their memory grows with the square of the length.
///
/// Shapes, for H heads: queries (H, N, D), keys and values (H, L, D), hidden (N, L).
pub(super) fn capped_attention(
    [queries, keys, values]: [&Tensor; 3],
    hidden: &Tensor,
    scale: f64,
    cap: f64,
) -> tch::Result<Tensor> {
    let inputs = [queries, keys, values, hidden].map(Tensor::as_ptr);
    ErrorText::captured(|message| {
        // SAFETY: the tensors are alive.
        let output = unsafe { baton_capped_attention(inputs.as_ptr(), scale, cap, message) };
        // SAFETY: no other code has this pointer.
        (!output.is_null()).then(|| unsafe { Tensor::from_ptr(output) })
    })
}

unsafe extern "C" {
    fn baton_capped_attention(
        inputs: *const *const C_tensor,
        scale: f64,
        cap: f64,
        message: ErrorText,
    ) -> *mut C_tensor;
}
