//! One forward and backward pass.

use baton_recipe::Step;
use baton_trainer::{
    Learner, Update,
    learner::DeferredScalar,
    torch::{BatchNormMode, TorchLearner},
};
use tch::Tensor;

use crate::case::{Case, Named, Result, under};

/// Logits, loss, gradients, and the running statistics after one update.
pub(crate) fn results(case: &Case) -> Result<Named> {
    let mut learner = case.learner()?;
    let batch = &case.batches()?[0];
    let evaluation = learner.logits(batch, BatchNormMode::Evaluation)?;
    let training = learner.logits(batch, BatchNormMode::Training)?;
    let mut leaf = learner.new_leaf()?;
    let loss = learner.gradient(batch, 1.0 / batch.len() as f32, &mut leaf)?;
    let loss = Tensor::from(loss.value()? / batch.len() as f64);
    let mut results = vec![
        ("logits.evaluation".to_owned(), evaluation),
        ("logits.training".to_owned(), training),
        ("loss".to_owned(), loss),
    ];
    results.extend(under("gradient", learner.gradients(&leaf)?));
    learner.measure(&mut leaf)?;
    learner.update(&mut leaf, &Update { step: Step(0), lr: 0.0, micro_batches: 1 })?;
    let (_, running) = weights_and_running(&learner)?;
    results.extend(under("running", running));
    Ok(results)
}

/// The weights, and BatchNorm's running statistics.
pub(crate) fn weights_and_running(learner: &TorchLearner) -> Result<(Named, Named)> {
    let all = learner.state_dict()?;
    Ok(all.into_iter().partition(|(name, _)| !name.contains("running_")))
}
