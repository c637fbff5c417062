//! Mixed images and their loss.

use baton_data::mix::Mix;
use baton_trainer::{Learner, learner::DeferredScalar};
use tch::Tensor;

use crate::case::{Case, Named, Result};

/// For each batch: the mix, the mixed images, and the mean loss.
pub(crate) fn results(case: &Case) -> Result<Named> {
    let mut learner = case.learner()?;
    let mut leaf = learner.new_leaf()?;
    let mut results = Named::new();
    for (number, batch) in case.batches()?.iter().enumerate() {
        let (images, mix) = learner.mixed(batch)?;
        let loss = learner.gradient(batch, 1.0 / batch.len() as f32, &mut leaf)?;
        let mut add = |name, tensor| results.push((format!("{name}/{number}"), tensor));
        let lambda = match mix {
            Mix::None => return Err(format!("batch {number} is not mixed").into()),
            Mix::MixUp { lambda } => lambda,
            Mix::CutMix { lambda, window } => {
                let edges =
                    [&window.columns, &window.rows].map(|r| [r.start, r.end].map(i64::from));
                add("window", Tensor::from_slice(edges.as_flattened()));
                lambda
            }
        };
        add("lambda", Tensor::from(lambda));
        add("images", images.f_contiguous()?);
        add("loss", Tensor::from(loss.value()? / batch.len() as f64));
    }
    Ok(results)
}
