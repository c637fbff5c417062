//! Regression: predicts one or several numbers.

use baton_data::Batch;
use tch::{Device, Kind, Reduction, Tensor};

use super::Task;
use crate::learner::{BatchEvaluation, Sums};

/// The mean over a sample's outputs.
#[derive(Clone, Copy, Debug)]
pub(in crate::torch) struct Regression {
    /// Number of predicted numbers per sample.
    pub(in crate::torch) outputs: u32,
    pub(in crate::torch) loss: ValueLoss,
}

/// The loss of one predicted number.
#[derive(Clone, Copy, Debug)]
pub(in crate::torch) enum ValueLoss {
    /// The squared error, as in `torch.nn.MSELoss`.
    Squared,
    /// As in `torch.nn.HuberLoss`; linear beyond this error.
    Huber(f64),
    /// Koenker & Bassett 1978, with the error e = target - prediction: q · e, or (q - 1) · e if e is negative.
    Quantile(f64),
}

impl Task for Regression {
    fn loss(&self, outputs: &Tensor, targets: &Tensor) -> tch::Result<Tensor> {
        let sum = match self.loss {
            ValueLoss::Squared => outputs.f_mse_loss(targets, Reduction::Sum)?,
            ValueLoss::Huber(delta) => outputs.f_huber_loss(targets, Reduction::Sum, delta)?,
            ValueLoss::Quantile(quantile) => {
                let error = targets.f_sub(outputs)?;
                let low = error.f_mul_scalar(quantile)?;
                low.f_maximum(&error.f_mul_scalar(quantile - 1.0)?)?.f_sum(Kind::Float)?
            }
        };
        sum.f_div_scalar(f64::from(self.outputs))
    }

    fn first_metric(&self, _outputs: &Tensor, _targets: &Tensor) -> tch::Result<Option<Tensor>> {
        Ok(None)
    }

    fn evaluate(
        &self,
        batch: &Batch,
        outputs: &Tensor,
        targets: &Tensor,
    ) -> tch::Result<BatchEvaluation> {
        let loss = self.loss(outputs, targets)?.f_detach()?.f_to_kind(Kind::Double)?;
        let count = outputs.size2()?.0 as u64;
        let sums = Sums { loss: f64::try_from(loss)?, others: Vec::new(), count };
        let predictions = outputs.f_to_device(Device::Cpu)?.f_reshape([-1])?;
        Ok(BatchEvaluation {
            sums,
            predictions: Vec::try_from(&predictions)?,
            targets: batch.targets.clone(),
        })
    }
}
