//! What training is for: what a target is, what is minimised, what is measured.

mod classification;
mod regression;

use std::fmt::Debug;

use baton_data::Batch;
use baton_recipe::{JobSpec, spec::LossKind};
use tch::Tensor;

pub(super) use self::{classification::Classification, regression::Regression};
use crate::learner::{Error, Judged};

/// A task. `baton_recipe::task` names its metrics.
pub(super) trait Task: Debug + Send {
    /// Refuses a batch with a target that no output can have: on a GPU, libtorch would only find it
    /// after the fact, and then the process is lost.
    fn check(&self, _batch: &Batch) -> Result<(), Error> {
        Ok(())
    }

    /// Sum of the losses of all samples, a scalar. `outputs` has shape (samples, outputs).
    fn loss(&self, outputs: &Tensor, targets: &Tensor) -> tch::Result<Tensor>;

    /// Sum of the first metric over a training batch, a scalar; absent if it has no sum.
    fn first_metric(&self, outputs: &Tensor, targets: &Tensor) -> tch::Result<Option<Tensor>>;

    /// What an evaluation finds in `batch`.
    ///
    /// This is where the host waits for the device.
    fn evaluate(&self, batch: &Batch, outputs: &Tensor, targets: &Tensor) -> tch::Result<Judged>;
}

/// The task of a recipe.
pub(super) fn of(spec: &JobSpec) -> Box<dyn Task> {
    let (loss, outputs) = (&spec.loss, spec.model.num_classes);
    match loss.kind {
        LossKind::CrossEntropy => {
            Box::new(Classification { classes: outputs, smoothing: loss.label_smoothing })
        }
        LossKind::Mse => Box::new(Regression { outputs, huber_delta: None }),
        LossKind::Huber => Box::new(Regression { outputs, huber_delta: Some(loss.huber_delta) }),
    }
}
