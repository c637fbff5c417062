//! SGD in a single kernel: weights, velocity, average and working copy in one pass over memory.
#![allow(unsafe_code)]

use baton_gpu::kernels::{Element, sgd::Sgd};
use tch::{Kind, TchError, Tensor};

use super::{Optimizer, Rates, Rule, Segment};
use crate::torch::fused::Fused;

/// A contiguous range of weights; those with weight decay come first.
#[derive(Clone, Copy, Debug, PartialEq)]
struct WeightRun {
    start: i64,
    len: i64,
    /// Number of values with weight decay.
    decayed: i64,
    /// Factor of the learning rate.
    rate: f64,
}

impl Optimizer {
    /// Like [`Self::update`], for SGD only; also updates the working copy of the weights. The gradient is not changed.
    pub(in crate::torch) fn update_fused(
        &mut self,
        fused: Fused,
        (weights, working): (&Tensor, Option<&Tensor>),
        gradient: &Tensor,
        norm: &Tensor,
        rates: Rates,
    ) -> tch::Result<()> {
        let Rule::Sgd { momentum, nesterov, velocity } = &self.rule else {
            return Err(TchError::Torch("only SGD has a fused update".to_owned()));
        };
        let share = self.averaging_share(rates.step);
        let average = share.and(self.averaged());
        let (element, cast) = match working {
            None => (Element::F32, 0),
            Some(working) => (element(working.kind())?, working.size1()?),
        };
        let float = |buffer: Option<&Tensor>, start| {
            buffer.map_or(0, |buffer| address(buffer, start, Element::F32))
        };
        let runs = self.runs();
        for run in &runs {
            let cast = (cast - run.start).clamp(0, run.len);
            let working = working.filter(|_| cast > 0);
            let update = Sgd {
                weights: float(Some(weights), run.start),
                gradient: float(Some(gradient), run.start),
                velocity: float(velocity.as_ref(), run.start),
                average: float(average, run.start),
                working: working.map_or(0, |working| address(working, run.start, element)),
                element,
                norm: float(Some(norm), 0),
                loss_scale: float(self.scaler.as_ref().map(|scaler| &scaler.state), 0),
                len: length(run.len),
                decayed: length(run.decayed),
                cast: length(cast),
                clip: self.clip.unwrap_or_default(),
                lr: (rates.lr * run.rate) as f32,
                momentum: *momentum as f32,
                nesterov: *nesterov,
                weight_decay: self.weight_decay as f32,
                share: share.unwrap_or_default() as f32,
            };
            // SAFETY: flat buffers of the same length in separate memory on the kernels' device, used only on
            // libtorch's stream; the runs are within the buffers.
            unsafe { update.run(fused.kernels()) }
                .map_err(|error| TchError::Torch(error.to_string()))?;
        }
        if let Some(scaler) = &mut self.scaler {
            scaler.adjust_on_device(&norm.f_select(0, 0)?.f_isfinite()?)?;
        }
        Ok(())
    }

    /// The segments, joined into as few runs as possible.
    fn runs(&self) -> Vec<WeightRun> {
        let mut runs: Vec<WeightRun> = Vec::new();
        for segment in &self.segments {
            let Segment { start, len, rate, .. } = *segment;
            let decayed = if self.decay_of(*segment) == 0.0 { 0 } else { len };
            match runs.last_mut() {
                Some(last)
                    if last.start + last.len == start
                        && last.rate == rate
                        && (decayed == 0 || last.decayed == last.len) =>
                {
                    last.len += len;
                    last.decayed += decayed;
                }
                _ => runs.push(WeightRun { start, len, decayed, rate }),
            }
        }
        runs
    }
}

fn address(buffer: &Tensor, start: i64, element: Element) -> u64 {
    buffer.data_ptr() as u64 + start as u64 * element.bytes() as u64
}

fn length(values: i64) -> usize {
    usize::try_from(values).unwrap_or_default()
}

fn element(kind: Kind) -> tch::Result<Element> {
    match kind {
        Kind::Float => Ok(Element::F32),
        Kind::BFloat16 => Ok(Element::Bf16),
        Kind::Half => Ok(Element::F16),
        other => Err(TchError::Torch(format!("no fused update for a working copy of {other:?}"))),
    }
}
