//! The learning rate of every update of a run.

use baton_recipe::{
    progress::{Progress, TrainingPlan},
    schedule::learning_rate,
};
use tch::Tensor;

use crate::case::{Case, Named, Result};

/// The same number as in schedules.py.
const SAMPLES: u64 = 301;

pub(crate) fn results(case: &Case) -> Result<Named> {
    let plan = TrainingPlan::new(&case.spec, SAMPLES);
    let mut progress = Progress::default();
    let mut rates = Vec::new();
    while progress.epoch.0 < plan.epochs {
        rates.push(learning_rate(&case.spec, &plan, &progress));
        plan.advance(&mut progress);
    }
    Ok(vec![("rates".to_owned(), Tensor::from_slice(&rates))])
}
