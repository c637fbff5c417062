//! The optimizer update from the summed gradient: unscale, clip, SGD, AdamW, LARS, LAMB or Muon, moving average.
//!
//! Formulas are those of `torch.nn.utils.clip_grad_norm_`, `torch.optim.SGD` (dampening 0),
//! `torch.optim.AdamW` (without amsgrad), You et al. 2017 (arXiv 1708.03888, algorithm 1, but with the
//! global rate outside the velocity, as in `torch.optim.SGD`: the same at a constant rate),
//! You et al. 2020 (arXiv 1904.00962, algorithm 2, with φ the identity), `torch.optim.Muon` (with `match_rms_adamw`),
//! `torch.optim.swa_utils.get_ema_multi_avg_fn` and `torch.amp.GradScaler`. Moments start at zero,
//! which for SGD equals torch's first step (`buffer = gradient`).
//!
//! Everything works on flat buffers, in three implementations of the same formulas: [`host`] makes one pass over
//! memory on a CPU; [`device`] uses a few libtorch kernels on a GPU and keeps every number that depends on the gradient
//! there, so that the host never waits; [`fused`] is a single kernel for SGD.

mod device;
mod fused;
mod host;
mod muon;

use baton_recipe::{
    JobSpec, Step,
    spec::{self, NamePatterns},
};
use tch::{Device, Kind, Tensor};

use self::muon::Muon;
use super::{buffer::read, flat::FlatLayout};

/// Added to the norm when clipping; torch's constant.
const CLIP_EPSILON: f64 = 1e-6;

/// A range of parameters with the same treatment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Segment {
    /// First value.
    pub(super) start: i64,
    /// Number of values.
    pub(super) len: i64,
    /// Whether weight decay applies, and LARS and LAMB use a separate rate.
    pub(super) decays: bool,
    /// Factor of the learning rate.
    pub(super) rate: f64,
    /// Size of the first axis of a tensor with a segment of its own: Muon's matrix has as many rows.
    pub(super) rows: Option<i64>,
}

/// The update rule with its state.
#[derive(Debug)]
pub(super) struct Optimizer {
    rule: Rule,
    /// The ranges to update. One segment per tensor if rates differ.
    segments: Vec<Segment>,
    /// Offset and length of the gaps that frozen parameters would fill.
    gaps: Vec<(usize, usize)>,
    weight_decay: f64,
    decay_all: bool,
    clip: Option<f64>,
    average: Option<Average>,
    scaler: Option<Scaler>,
}

#[derive(Debug)]
enum Rule {
    Sgd { momentum: f64, nesterov: bool, velocity: Option<Tensor> },
    AdamW { betas: [f64; 2], eps: f64, mean: Tensor, square: Tensor },
    Lars { momentum: f64, trust: f64, eps: f64, velocity: Tensor },
    Lamb { betas: [f64; 2], eps: f64, mean: Tensor, square: Tensor },
    Muon { muon: Muon, betas: [f64; 2], eps: f64, mean: Tensor, square: Tensor },
}

/// The moving average of the weights.
#[derive(Debug)]
struct Average {
    decay: f64,
    every: u64,
    weights: Tensor,
}

/// Dynamic loss scaling.
#[derive(Debug)]
struct Scaler {
    rule: spec::LossScale,
    /// Three f32 on the device of the weights: the scale, updates since it last changed, updates skipped.
    state: Tensor,
}

/// Step number and learning rate of an update.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    pub(super) step: Step,
    pub(super) lr: f64,
}

impl Optimizer {
    /// Initial state for the parameters of `layout`.
    pub(super) fn new(spec: &JobSpec, layout: &FlatLayout, device: Device) -> tch::Result<Self> {
        let parameters = layout.parameters_len();
        let zeros = || Tensor::f_zeros([parameters], (Kind::Float, device));
        let (rule, weight_decay, decay_all) = match spec.optimizer {
            spec::OptimizerSpec::Sgd { momentum, nesterov, weight_decay, decay_norm_and_bias } => {
                let velocity = (momentum != 0.0).then(zeros).transpose()?;
                (Rule::Sgd { momentum, nesterov, velocity }, weight_decay, decay_norm_and_bias)
            }
            spec::OptimizerSpec::AdamW { betas, eps, weight_decay, decay_norm_and_bias } => {
                let rule = Rule::AdamW { betas, eps, mean: zeros()?, square: zeros()? };
                (rule, weight_decay, decay_norm_and_bias)
            }
            spec::OptimizerSpec::Lars { momentum, weight_decay, trust_coefficient, eps } => {
                let (trust, velocity) = (trust_coefficient, zeros()?);
                (Rule::Lars { momentum, trust, eps, velocity }, weight_decay, false)
            }
            spec::OptimizerSpec::Lamb { betas, eps, weight_decay } => {
                let rule = Rule::Lamb { betas, eps, mean: zeros()?, square: zeros()? };
                (rule, weight_decay, false)
            }
            spec::OptimizerSpec::Muon {
                momentum,
                nesterov,
                betas,
                eps,
                weight_decay,
                decay_norm_and_bias,
                adamw: _,
            } => {
                let muon = Muon { momentum, nesterov, kind: muon::kind(spec.precision.compute) };
                let rule = Rule::Muon { muon, betas, eps, mean: zeros()?, square: zeros()? };
                (rule, weight_decay, decay_norm_and_bias)
            }
        };
        let average = match &spec.ema {
            None => None,
            Some(ema) => {
                let (decay, every) = (ema.decay, u64::from(ema.every_steps));
                Some(Average { decay, every, weights: zeros()? })
            }
        };
        let scaler = match spec.precision.compute {
            spec::Compute::Fp16 => {
                let rule = spec.precision.loss_scale;
                let state = Tensor::f_from_slice(&[rule.initial as f32, 0.0, 0.0])?;
                Some(Scaler { rule, state: state.f_to_device(device)? })
            }
            spec::Compute::Fp32 | spec::Compute::Bf16 => None,
        };
        let adamw = NamePatterns::of(spec.optimizer.adamw());
        let gaps = layout.gaps.iter();
        Ok(Self {
            gaps: gaps.map(|(at, len)| (*at as usize, *len as usize)).collect(),
            segments: layout.segments(spec.train.layer_decay, |entry| match rule {
                Rule::Sgd { .. } | Rule::AdamW { .. } => false,
                Rule::Lars { .. } | Rule::Lamb { .. } => true,
                Rule::Muon { .. } => entry.is_hidden(|name| adamw.matches(name)),
            }),
            rule,
            weight_decay,
            decay_all,
            clip: spec.train.clip_grad_norm,
            average,
            scaler,
        })
    }

    /// The state to save in checkpoints, with torch's names.
    pub(super) fn state(&mut self) -> Vec<(&'static str, &mut Tensor)> {
        let mut state = match &mut self.rule {
            Rule::Sgd { velocity, .. } => velocity.iter_mut().map(|v| ("momentum", v)).collect(),
            Rule::AdamW { mean, square, .. }
            | Rule::Lamb { mean, square, .. }
            | Rule::Muon { mean, square, .. } => vec![("exp_avg", mean), ("exp_avg_sq", square)],
            Rule::Lars { velocity, .. } => vec![("momentum", velocity)],
        };
        state.extend(self.average.iter_mut().map(|ema| ("ema", &mut ema.weights)));
        state.extend(self.scaler.iter_mut().map(|scaler| ("loss_scale", &mut scaler.state)));
        state
    }

    /// The averaged weights, if the recipe has an EMA.
    pub(super) fn averaged(&self) -> Option<&Tensor> {
        self.average.as_ref().map(|average| &average.weights)
    }

    /// Weight of the new values in the average after this step, or `None` if this step does not update the average. The
    /// first update replaces the average.
    pub(super) fn averaging_share(&self, step: Step) -> Option<f64> {
        let Average { decay, every, .. } = self.average.as_ref()?;
        let updates = step.0 + 1;
        updates.is_multiple_of(*every).then(|| if updates == *every { 1.0 } else { 1.0 - decay })
    }

    /// The loss scale, a scalar tensor, if the loss is scaled.
    pub(super) fn loss_scale(&self) -> tch::Result<Option<Tensor>> {
        self.scaler.as_ref().map(|scaler| scaler.state.f_select(0, 0)).transpose()
    }

    /// Writes the gradient's L2 norm, with the loss scale divided out, into the one value of `norm`.
    pub(super) fn measure(&self, gradient: &Tensor, norm: &mut Tensor) -> tch::Result<()> {
        let mut found = match gradient.device() {
            Device::Cpu => Tensor::f_from_slice(&[host::norm(read(gradient), &self.gaps) as f32])?,
            _ => gradient.f_norm()?.f_view([1])?,
        };
        if let Some(scale) = self.loss_scale()? {
            found = found.f_div(&scale)?;
        }
        norm.f_copy_(&found)
    }

    /// One update of `weights` with `gradient`, which has the same length and no defined values afterwards; `norm` is
    /// the result of [`Self::measure`]. If the gradient is not finite, only the loss scale changes, not the weights.
    pub(super) fn update(
        &mut self,
        weights: &mut Tensor,
        gradient: &Tensor,
        norm: &Tensor,
        rates: Rates,
    ) -> tch::Result<()> {
        match weights.device() {
            Device::Cpu => self.update_on_host(weights, gradient, norm, rates),
            _ => self.update_on_device(weights, gradient, norm, rates),
        }
    }

    /// Whether [`Self::update_fused`] can make the update.
    pub(super) fn is_sgd(&self) -> bool {
        matches!(self.rule, Rule::Sgd { .. })
    }

    fn decay_of(&self, segment: Segment) -> f64 {
        if segment.decays || self.decay_all { self.weight_decay } else { 0.0 }
    }
}
