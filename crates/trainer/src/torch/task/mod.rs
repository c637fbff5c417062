//! Tasks: targets, loss and metrics.

mod classification;
mod network_loss;
mod regression;

use std::fmt::Debug;

use baton_data::Batch;
use baton_recipe::{JobSpec, spec::LossKind};
use tch::{Device, Tensor};

pub(super) use self::{
    classification::Classification,
    network_loss::NetworkLoss,
    regression::{Regression, ValueLoss},
};
use crate::learner::{BatchEvaluation, Error};

/// A task. `baton_recipe::task` names its metrics.
pub(super) trait Task: Debug + Send {
    /// Returns an error for a batch with an invalid target. On a GPU, libtorch would detect it only after the kernel
    /// has failed, and the process would be lost.
    fn check(&self, _batch: &Batch) -> Result<(), Error> {
        Ok(())
    }

    /// Sum of the losses of all samples, a scalar. `outputs` has shape (samples, outputs).
    fn loss(&self, outputs: &Tensor, targets: &Tensor) -> tch::Result<Tensor>;

    /// Sum of the first metric over a training batch, a scalar; `None` if the metric is not a sum.
    fn first_metric(&self, outputs: &Tensor, targets: &Tensor) -> tch::Result<Option<Tensor>>;

    /// Evaluates `batch`.
    ///
    /// The host waits for the device here.
    fn evaluate(
        &self,
        batch: &Batch,
        outputs: &Tensor,
        targets: &Tensor,
    ) -> tch::Result<BatchEvaluation>;
}

/// The task of a recipe, for outputs on `device`.
pub(super) fn of(spec: &JobSpec, device: Device) -> tch::Result<Box<dyn Task>> {
    let (loss, outputs) = (&spec.loss, spec.model.num_classes);
    let metrics = loss.metrics.len();
    let class_weights = || {
        let weights: Vec<f32> = loss.class_weights.iter().map(|weight| *weight as f32).collect();
        let is_used = !weights.is_empty();
        is_used.then(|| Tensor::f_from_slice(&weights)?.f_to_device(device)).transpose()
    };
    Ok(match loss.kind {
        LossKind::CrossEntropy | LossKind::BinaryCrossEntropy => Box::new(Classification {
            classes: outputs,
            smoothing: loss.label_smoothing,
            weights: class_weights()?,
            is_binary: loss.kind == LossKind::BinaryCrossEntropy,
        }),
        LossKind::Mse => Box::new(Regression { outputs, loss: ValueLoss::Squared }),
        LossKind::Program => Box::new(NetworkLoss { metrics }),
        // Whether the most likely token is the right one.
        LossKind::NextToken => Box::new(NetworkLoss { metrics: 1 }),
        LossKind::Huber => {
            Box::new(Regression { outputs, loss: ValueLoss::Huber(loss.huber_delta) })
        }
        LossKind::Quantile => {
            // The rules of recipes require it.
            let quantile = loss.quantile.unwrap_or(0.5);
            Box::new(Regression { outputs, loss: ValueLoss::Quantile(quantile) })
        }
    })
}
