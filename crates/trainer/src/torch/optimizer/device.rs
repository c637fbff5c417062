//! Updates on a GPU: kernels over whole buffers; the host waits for no number.

use tch::{Device, Kind, Tensor};

use super::{CLIP_EPSILON, Optimizer, Rates, Rule, Scaler, Segment};

/// Scalars of one update, on the device.
struct DeviceScalars {
    device: Device,
    /// Factor of the gradient.
    factor: Option<Tensor>,
    /// Whether the gradient is finite; `None` if the loss is not scaled: training does not continue from such an update
    /// anyway.
    finite: Option<Tensor>,
}

impl Optimizer {
    pub(in crate::torch) fn update_on_device(
        &mut self,
        weights: &mut Tensor,
        gradient: &Tensor,
        norm: &Tensor,
        rates: Rates,
    ) -> tch::Result<()> {
        let scalars = self.scalars(gradient.device(), norm)?;
        if let Some(factor) = &scalars.factor {
            let _ = gradient.shallow_clone().f_mul_(factor)?;
        }
        if let Some(finite) = &scalars.finite {
            // A factor of 0 is not enough: 0 times infinity is NaN.
            let _ = gradient.shallow_clone().f_masked_fill_(&finite.f_logical_not()?, 0.0)?;
        }
        let updates = match &self.scaler {
            None => scalars.scalar(rates.step.0 as f64 + 1.0)?,
            Some(scaler) => {
                (scaler.state.f_select(0, 2)?.f_neg()?).f_add_scalar(rates.step.0 as f64 + 1.0)?
            }
        };
        let corrections = match &self.rule {
            Rule::AdamW { betas, .. } | Rule::Lamb { betas, .. } | Rule::Muon { betas, .. } => {
                let [mean, square] = betas.map(|beta| -> tch::Result<Tensor> {
                    let power = updates.f_mul_scalar(libm::log(beta))?.f_exp()?;
                    power.f_neg()?.f_add_scalar(1.0)
                });
                Some([mean?, square?])
            }
            Rule::Sgd { .. } | Rule::Lars { .. } => None,
        };
        for segment in &self.segments {
            let decay = self.decay_of(*segment);
            self.update_segment(
                *segment,
                weights,
                gradient,
                &scalars,
                (rates.lr * segment.rate, decay),
                corrections.as_ref(),
            )?;
        }
        if let (Some(share), Some(average)) = (self.averaging_share(rates.step), &mut self.average)
        {
            let _ = average.weights.f_lerp_(weights, share)?;
        }
        if let (Some(finite), Some(scaler)) = (&scalars.finite, &mut self.scaler) {
            scaler.adjust_on_device(finite)?;
        }
        Ok(())
    }

    fn scalars(&self, device: Device, norm: &Tensor) -> tch::Result<DeviceScalars> {
        let norm = norm.f_select(0, 0)?;
        let clip = self.clip.map(|most| {
            norm.f_add_scalar(CLIP_EPSILON)?.f_reciprocal()?.f_mul_scalar(most)?.f_clamp_max(1.0)
        });
        let clip = clip.transpose()?;
        let factor = match (clip, self.loss_scale()?) {
            (clip, None) => clip,
            (None, Some(scale)) => Some(scale.f_reciprocal()?),
            (Some(clip), Some(scale)) => Some(clip.f_div(&scale)?),
        };
        let finite = self.scaler.as_ref().map(|_| norm.f_isfinite()).transpose()?;
        Ok(DeviceScalars { device, factor, finite })
    }

    fn update_segment(
        &self,
        segment: Segment,
        weights: &Tensor,
        gradient: &Tensor,
        scalars: &DeviceScalars,
        (lr, decay): (f64, f64),
        corrections: Option<&[Tensor; 2]>,
    ) -> tch::Result<()> {
        let of = |buffer: &Tensor| buffer.f_narrow(0, segment.start, segment.len);
        let (mut weights, gradient) = (of(weights)?, of(gradient)?);
        // tch offers no `add_` with a factor; `addcmul_` with a scalar tensor does the same.
        let minus_lr = scalars.if_finite(-lr)?;
        match &self.rule {
            Rule::Sgd { velocity: None, .. } => {
                let _ = weights.f_mul_(&scalars.shrink(lr * decay)?)?;
                let _ = weights.f_addcmul_(&gradient, &minus_lr)?;
            }
            Rule::Sgd { momentum, nesterov, velocity: Some(velocity) } => {
                let mut velocity = of(velocity)?;
                // velocity = gradient + momentum * velocity + weight_decay * weights
                let _ = velocity.f_mul_(&scalars.else_one(*momentum)?)?.f_add_(&gradient)?;
                let _ = velocity.f_addcmul_(&weights, &scalars.if_finite(decay)?)?;
                if *nesterov {
                    // weights -= lr * (gradient + weight_decay * weights + momentum * velocity)
                    let _ = weights.f_mul_(&scalars.shrink(lr * decay)?)?;
                    let _ = weights.f_addcmul_(&gradient, &minus_lr)?;
                    let ahead = scalars.if_finite(-lr * momentum)?;
                    let _ = weights.f_addcmul_(&velocity, &ahead)?;
                } else {
                    let _ = weights.f_addcmul_(&velocity, &minus_lr)?;
                }
            }
            Rule::Lars { momentum, trust, eps, velocity } => {
                let mut velocity = of(velocity)?;
                let decayed = gradient.f_addcmul(&weights, &scalars.scalar(decay)?)?;
                let rate = match segment.decays {
                    true => layer_rate(&weights, &gradient, *trust, decay, *eps)?,
                    false => scalars.scalar(1.0)?,
                };
                let rate = rate.f_mul(&scalars.if_finite(1.0)?)?;
                let _ = velocity.f_mul_(&scalars.else_one(*momentum)?)?;
                let _ = velocity.f_addcmul_(&decayed, &rate)?;
                let _ = weights.f_addcmul_(&velocity, &minus_lr)?;
            }
            Rule::AdamW { betas, eps, mean, square } => {
                let moments = [of(mean)?, of(square)?];
                let _ = weights.f_mul_(&scalars.shrink(lr * decay)?)?;
                let Some([mean_correction, square_correction]) = corrections else { return Ok(()) };
                let direction = scalars.adam_direction(
                    moments,
                    &gradient,
                    (*betas, *eps),
                    square_correction,
                )?;
                let _ = weights.f_addcmul_(&direction, &minus_lr.f_div(mean_correction)?)?;
            }
            Rule::Lamb { betas, eps, mean, square } => {
                let moments = [of(mean)?, of(square)?];
                let Some([mean_correction, square_correction]) = corrections else { return Ok(()) };
                let mut step = scalars.adam_direction(
                    moments,
                    &gradient,
                    (*betas, *eps),
                    square_correction,
                )?;
                let _ = step.f_div_(mean_correction)?;
                let _ = step.f_addcmul_(&weights, &scalars.scalar(decay)?)?;
                let rate = match segment.decays {
                    true => layer_rate(&weights, &step, 1.0, 0.0, 0.0)?.f_mul(&minus_lr)?,
                    false => minus_lr,
                };
                let _ = weights.f_addcmul_(&step, &rate)?;
            }
            Rule::Muon { muon, betas, eps, mean, square } => {
                let _ = weights.f_mul_(&scalars.shrink(lr * decay)?)?;
                let mut mean = of(mean)?;
                if let Some(rows) = segment.rows {
                    let _ =
                        mean.f_lerp_tensor_(&gradient, &scalars.if_finite(1.0 - muon.momentum)?)?;
                    let direction = match muon.nesterov {
                        true => gradient.f_lerp(&mean, muon.momentum)?,
                        false => mean,
                    };
                    let _ =
                        weights.f_addcmul_(&muon.step_on_device(&direction, rows)?, &minus_lr)?;
                } else {
                    let Some([mean_correction, square_correction]) = corrections else {
                        return Ok(());
                    };
                    let direction = scalars.adam_direction(
                        [mean, of(square)?],
                        &gradient,
                        (*betas, *eps),
                        square_correction,
                    )?;
                    let _ = weights.f_addcmul_(&direction, &minus_lr.f_div(mean_correction)?)?;
                }
            }
        }
        Ok(())
    }
}

/// The same as `layer_rates` on a CPU.
fn layer_rate(
    weights: &Tensor,
    gradient: &Tensor,
    trust: f64,
    decay: f64,
    eps: f64,
) -> tch::Result<Tensor> {
    let (weight_norm, gradient_norm) = (weights.f_norm()?, gradient.f_norm()?);
    let whole = weight_norm.f_mul_scalar(decay)?.f_add_(&gradient_norm)?.f_add_scalar(eps)?;
    let rate = weight_norm.f_mul_scalar(trust)?.f_div(&whole)?;
    let known = weight_norm.f_mul(&gradient_norm)?.f_gt(0.0)?;
    rate.f_where_self(&known, &rate.f_ones_like()?)
}

impl DeviceScalars {
    /// Updates Adam's moments, mean and square; returns `mean / (√square / √square_correction + eps)`, which is not divided
    /// by the bias correction of the mean yet.
    fn adam_direction(
        &self,
        [mut mean, mut square]: [Tensor; 2],
        gradient: &Tensor,
        ([beta1, beta2], eps): ([f64; 2], f64),
        square_correction: &Tensor,
    ) -> tch::Result<Tensor> {
        let _ = mean.f_lerp_tensor_(gradient, &self.if_finite(1.0 - beta1)?)?;
        let _ = square.f_mul_(&self.else_one(beta2)?)?;
        let new = self.if_finite(1.0 - beta2)?;
        let _ = square.f_addcmul_(&gradient.f_square()?, &new)?;
        let root = square.f_sqrt()?.f_div_(&square_correction.f_sqrt()?)?;
        mean.f_div(&root.f_add_scalar(eps)?)
    }

    fn scalar(&self, value: f64) -> tch::Result<Tensor> {
        Tensor::f_full(&[] as &[i64], value, (Kind::Float, self.device))
    }

    /// `value`, or 0 if the update is skipped.
    fn if_finite(&self, value: f64) -> tch::Result<Tensor> {
        self.choose(value, 0.0)
    }

    /// `value`, or 1 if the update is skipped.
    fn else_one(&self, value: f64) -> tch::Result<Tensor> {
        self.choose(value, 1.0)
    }

    fn choose(&self, value: f64, otherwise: f64) -> tch::Result<Tensor> {
        let value = self.scalar(value)?;
        match &self.finite {
            None => Ok(value),
            Some(finite) => value.f_where_self(finite, &self.scalar(otherwise)?),
        }
    }

    /// `1 - part`, or 1 if the update is skipped.
    fn shrink(&self, part: f64) -> tch::Result<Tensor> {
        self.else_one(1.0 - part)
    }
}

impl Scaler {
    /// The same as `adjust` on a CPU.
    pub(super) fn adjust_on_device(&mut self, finite: &Tensor) -> tch::Result<()> {
        let value = |index| self.state.f_select(0, index);
        let (scale, skipped) = (value(0)?, value(2)?);
        let good = value(1)?.f_add_scalar(1.0)?;
        let due = good.f_ge(f64::from(self.rule.growth_interval))?;
        let zero = good.f_zeros_like()?;

        let grown = scale.f_mul_scalar(self.rule.growth)?;
        let grown = grown.f_where_self(&grown.f_isfinite()?.f_logical_and(&due)?, &scale)?;
        let scale = grown.f_where_self(finite, &scale.f_mul_scalar(self.rule.backoff)?)?;
        let good = zero.f_where_self(&due.f_logical_or(&finite.f_logical_not()?)?, &good)?;
        let skipped = skipped.f_where_self(finite, &skipped.f_add_scalar(1.0)?)?;
        self.state.f_copy_(&Tensor::f_stack(&[scale, good, skipped], 0)?)
    }
}
