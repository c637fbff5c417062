//! Tasks: targets, loss and metrics.

mod classification;
mod network_loss;
mod regression;

use std::fmt::Debug;

use baton_data::Batch;
use baton_recipe::{JobSpec, spec::LossKind};
use tch::Tensor;

pub(super) use self::{
    classification::Classification, network_loss::NetworkLoss, regression::Regression,
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

/// The task of a recipe.
pub(super) fn of(spec: &JobSpec) -> Box<dyn Task> {
    let (loss, outputs) = (&spec.loss, spec.model.num_classes);
    let metrics = loss.metrics.len();
    match loss.kind {
        LossKind::CrossEntropy => {
            Box::new(Classification { classes: outputs, smoothing: loss.label_smoothing })
        }
        LossKind::Mse => Box::new(Regression { outputs, huber_delta: None }),
        LossKind::Program => Box::new(NetworkLoss { metrics }),
        // Whether the most likely token is the right one.
        LossKind::NextToken => Box::new(NetworkLoss { metrics: 1 }),
        LossKind::Huber => Box::new(Regression { outputs, huber_delta: Some(loss.huber_delta) }),
    }
}
