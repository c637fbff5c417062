//! Regression: predicts one or several numbers.

use baton_data::Batch;
use tch::{Device, Kind, Reduction, Tensor};

use super::Task;
use crate::learner::{BatchEvaluation, Sums};

/// Mean squared error or Huber loss, as in `torch.nn.MSELoss` and `torch.nn.HuberLoss`; the mean over a sample's
/// outputs.
#[derive(Clone, Copy, Debug)]
pub(in crate::torch) struct Regression {
    /// Number of predicted numbers per sample.
    pub(in crate::torch) outputs: u32,
    /// Error beyond which the Huber loss is linear; `None`: mean squared error.
    pub(in crate::torch) huber_delta: Option<f64>,
}

impl Task for Regression {
    fn loss(&self, outputs: &Tensor, targets: &Tensor) -> tch::Result<Tensor> {
        let sum = match self.huber_delta {
            None => outputs.f_mse_loss(targets, Reduction::Sum)?,
            Some(delta) => outputs.f_huber_loss(targets, Reduction::Sum, delta)?,
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
