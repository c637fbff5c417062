//! A short training.

use baton_recipe::Step;
use baton_trainer::{Learner, Update, learner::DeferredScalar};
use tch::Tensor;

use crate::{
    case::{Case, Named, Result, under},
    updates::averages,
};

/// The loss before every update, the loss scale after it, and the averages at the end.
pub(crate) fn results(case: &Case) -> Result<Named> {
    let mut learner = case.learner()?;
    let mut leaf = learner.new_leaf()?;
    let lr = case.rate()?;
    let (mut losses, mut scales) = (Vec::new(), Vec::new());
    let batches = case.batches()?;
    let epochs = 0..case.spec.train.epochs;
    for (step, batch) in (0..).zip(epochs.flat_map(|_| &batches)) {
        let loss = learner.gradient(batch, 1.0 / batch.len() as f32, &mut leaf)?;
        losses.push(loss.value()? / batch.len() as f64);
        learner.measure(&mut leaf)?;
        learner.update(&mut leaf, &Update { step: Step(step), lr, micro_batches: 1 })?;
        let scale = learner.regions().into_iter().find(|region| region.name == "loss_scale");
        scales.extend(
            scale.map(|scale| scale.buffer.to_host()).transpose()?.map(|it| f64::from(it[0])),
        );
    }
    let mut results = vec![("loss".to_owned(), Tensor::from_slice(&losses))];
    if !scales.is_empty() {
        results.push(("scale".to_owned(), Tensor::from_slice(&scales)));
    }
    results.extend(under("average", averages(&mut learner)?));
    Ok(results)
}
