//! MixUp (Zhang et al. 2018, arXiv 1710.09412) and CutMix (Yun et al. 2019, arXiv 1905.04899).
//!
//! Sample i of a micro-batch is mixed with sample i - 1 (torchvision's `roll(1)`): the order of samples is random
//! already. The weighted sum of two losses equals the loss of the mixed target.

use std::ops::Range;

use baton_data::mix::Mix;
use tch::Tensor;

use super::task::Task;

/// The mixed inputs for the network.
pub(super) fn inputs(inputs: &Tensor, mix: &Mix) -> tch::Result<Tensor> {
    match mix {
        Mix::None => Ok(inputs.shallow_clone()),
        Mix::MixUp { lambda } => inputs.f_lerp(&inputs.f_roll([1], [0])?, 1.0 - lambda),
        Mix::CutMix { window, .. } => {
            let (mut mixed, other) = (inputs.f_empty_like()?, inputs.f_roll([1], [0])?);
            mixed.f_copy_(inputs)?;
            let cut = |x: &Tensor| -> tch::Result<Tensor> {
                let within = |x: Tensor, axis, range: &Range<u32>| {
                    let (start, end) = (i64::from(range.start), i64::from(range.end));
                    x.f_slice(axis, start, end, 1)
                };
                let x = within(x.shallow_clone(), -1, &window.columns)?;
                if x.dim() == 4 { within(x, -2, &window.rows) } else { Ok(x) }
            };
            cut(&mixed)?.f_copy_(&cut(&other)?)?;
            Ok(mixed)
        }
    }
}

/// Sum of the losses of all samples.
pub(super) fn loss(
    task: &dyn Task,
    outputs: &Tensor,
    targets: &Tensor,
    mix: &Mix,
) -> tch::Result<Tensor> {
    let own = task.loss(outputs, targets)?;
    let lambda = match mix {
        Mix::None => return Ok(own),
        Mix::MixUp { lambda } | Mix::CutMix { lambda, .. } => *lambda,
    };
    let other = task.loss(outputs, &targets.f_roll([1], [0])?)?;
    own.f_mul_scalar(lambda)?.f_add(&other.f_mul_scalar(1.0 - lambda)?)
}
