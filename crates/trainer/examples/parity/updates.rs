//! Two optimizer updates with the same gradient and different rates.

use std::collections::HashMap;

use baton_recipe::Step;
use baton_trainer::{Learner, Update, learner::Summand, torch::TorchLearner};
use tch::Tensor;

use crate::{
    case::{Case, Named, Result, under},
    models::weights_and_running,
};

/// The same rates as in updates.py: the second update depends on the moments, and on where the rate is applied.
const RATES: [f64; 2] = [1.0, 0.5];

/// Weights after both updates, and their moving average if the recipe has it.
pub(crate) fn results(case: &Case) -> Result<Named> {
    let mut learner = case.learner()?;
    let batch = &case.batches()?[0];
    let mut gradient = learner.new_leaf()?;
    learner.gradient(batch, 1.0 / batch.len() as f32, &mut gradient)?;
    for (step, factor) in (0..).zip(RATES) {
        // An update destroys its leaf.
        let mut leaf = learner.new_leaf()?;
        leaf.add(&gradient)?;
        learner.measure(&mut leaf)?;
        let lr = factor * case.rate()?;
        learner.update(&mut leaf, &Update { step: Step(step), lr, micro_batches: 1 })?;
    }
    let (weights, _) = weights_and_running(&learner)?;
    let mut results: Named = under("weights", weights).collect();
    if case.spec.ema.is_some() {
        results.extend(under("average", averages(&mut learner)?));
    }
    Ok(results)
}

/// The moving averages of all weights and running statistics.
pub(crate) fn averages(learner: &mut TorchLearner) -> Result<Named> {
    let locations = learner.tensors();
    let mut regions = HashMap::new();
    for region in learner.regions() {
        regions.insert(region.name, region.buffer.to_host()?);
    }
    let mut averages = Named::new();
    for location in locations {
        let region = averages_of(location.region);
        let len = location.shape.iter().product::<usize>();
        let values = Tensor::from_slice(&regions[region][location.offset..location.offset + len]);
        let shape: Vec<i64> = location.shape.iter().map(|side| *side as i64).collect();
        let tensor = match *shape {
            [o, i, h, w] if location.channels_last => {
                values.f_view([o, h, w, i])?.f_permute([0, 3, 1, 2])?.f_contiguous()?
            }
            _ => values.f_view(shape.as_slice())?,
        };
        averages.push((location.name, tensor));
    }
    Ok(averages)
}

/// The region with the averages of another one.
pub(crate) fn averages_of(region: &str) -> &'static str {
    if region == "weights" { "ema" } else { "bn_running_ema" }
}
