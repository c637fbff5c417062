//! SGD and AdamW as a handful of operations on flat buffers, in place.
//!
//! Formulas are those of `torch.optim.SGD` (dampening 0) and `torch.optim.AdamW` (without amsgrad);
//! sums are only ordered so that each operation is one pass over memory. Moments start at zero,
//! which for SGD equals torch's first step (`buffer = gradient`).

use baton_job::{Step, spec};
use tch::{Device, Kind, Tensor};

/// The update rule with its state.
#[derive(Debug)]
pub(super) struct Optimizer {
    rule: Rule,
    weight_decay: f64,
    /// So many parameters from the start of the buffer decay.
    decayed: i64,
}

#[derive(Debug)]
enum Rule {
    Sgd,
    Momentum {
        momentum: f64,
        nesterov: bool,
        /// Running gradient.
        velocity: Tensor,
    },
    AdamW {
        betas: [f64; 2],
        eps: f64,
        /// Running gradient.
        mean: Tensor,
        /// Running square of the gradient.
        square: Tensor,
        /// Working memory, so that no step allocates.
        scratch: Tensor,
    },
}

impl Optimizer {
    /// State for `parameters` values, of which the first `decayed` decay by default.
    pub(super) fn new(
        optimizer: &spec::Optimizer,
        parameters: i64,
        decayed: i64,
        device: Device,
    ) -> tch::Result<Self> {
        let zeros = || Tensor::f_zeros([parameters], (Kind::Float, device));
        let (rule, weight_decay, decay_all) = match *optimizer {
            spec::Optimizer::Sgd { momentum, nesterov, weight_decay, decay_norm_and_bias } => {
                let rule = if momentum == 0.0 {
                    Rule::Sgd
                } else {
                    Rule::Momentum { momentum, nesterov, velocity: zeros()? }
                };
                (rule, weight_decay, decay_norm_and_bias)
            }
            spec::Optimizer::AdamW { betas, eps, weight_decay, decay_norm_and_bias } => {
                let (mean, square, scratch) = (zeros()?, zeros()?, zeros()?);
                let rule = Rule::AdamW { betas, eps, mean, square, scratch };
                (rule, weight_decay, decay_norm_and_bias)
            }
        };
        let decayed = if decay_all { parameters } else { decayed };
        Ok(Self { rule, weight_decay, decayed })
    }

    /// The state that must survive, by torch's names.
    pub(super) fn moments(&mut self) -> Vec<(&'static str, &mut Tensor)> {
        match &mut self.rule {
            Rule::Sgd => Vec::new(),
            Rule::Momentum { velocity, .. } => vec![("momentum", velocity)],
            Rule::AdamW { mean, square, .. } => vec![("exp_avg", mean), ("exp_avg_sq", square)],
        }
    }

    /// One update of `weights` with `gradient`, both as flat as the state; `step` counts from 0.
    pub(super) fn update(
        &mut self,
        weights: &mut Tensor,
        gradient: &Tensor,
        step: Step,
        lr: f64,
    ) -> tch::Result<()> {
        let decay = self.weight_decay;
        let mut decaying = weights.f_narrow(0, 0, self.decayed)?;
        match &mut self.rule {
            Rule::Sgd => {
                scale(&mut decaying, 1.0 - lr * decay)?;
                add_scaled(weights, -lr, gradient)
            }
            Rule::Momentum { momentum, nesterov, velocity } => {
                // velocity = momentum * velocity + gradient + decay * weights
                scale(velocity, *momentum)?;
                let _ = velocity.f_add_(gradient)?;
                if decay != 0.0 {
                    add_scaled(&mut velocity.f_narrow(0, 0, self.decayed)?, decay, &decaying)?;
                }
                if *nesterov {
                    // weights -= lr * (gradient + decay * weights + momentum * velocity)
                    scale(&mut decaying, 1.0 - lr * decay)?;
                    add_scaled(weights, -lr, gradient)?;
                    add_scaled(weights, -lr * *momentum, velocity)
                } else {
                    add_scaled(weights, -lr, velocity)
                }
            }
            Rule::AdamW { betas: [beta1, beta2], eps, mean, square, scratch } => {
                let updates = step.0 as f64 + 1.0;
                let correction1 = 1.0 - beta1.powf(updates);
                let correction2 = 1.0 - beta2.powf(updates);
                scale(&mut decaying, 1.0 - lr * decay)?;
                let _ = mean.f_lerp_(gradient, 1.0 - *beta1)?;
                let _ = gradient.f_mul_out(scratch, gradient)?;
                let _ = square.f_lerp_(scratch, 1.0 - *beta2)?;
                // scratch = mean / (sqrt(square) / sqrt(correction2) + eps)
                let _ = square.f_sqrt_out(scratch)?;
                let _ = scratch.f_div_scalar_(correction2.sqrt())?.f_add_scalar_(*eps)?;
                let _ = mean.f_div_out(scratch, scratch)?;
                add_scaled(weights, -lr / correction1, scratch)
            }
        }
    }
}

fn scale(target: &mut Tensor, factor: f64) -> tch::Result<()> {
    if factor != 1.0 {
        let _ = target.f_mul_scalar_(factor)?;
    }
    Ok(())
}

/// `target += factor * term` in one pass. tch offers no `add_` with a factor; `addcmul_` with a
/// scalar tensor is the same operation.
fn add_scaled(target: &mut Tensor, factor: f64, term: &Tensor) -> tch::Result<()> {
    let none: [i64; 0] = [];
    let factor = Tensor::f_full(none, factor, (Kind::Float, target.device()))?;
    let _ = target.f_addcmul_(term, &factor)?;
    Ok(())
}
