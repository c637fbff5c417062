//! The learning rate of every update of a run.

use baton_recipe::{
    progress::{Agenda, Progress},
    schedule::learning_rate,
};
use tch::Tensor;

use crate::case::{Case, Named, Result};

/// As in schedules.py.
const SAMPLES: u64 = 301;

pub(crate) fn results(case: &Case) -> Result<Named> {
    let agenda = Agenda::new(&case.spec, SAMPLES);
    let mut progress = Progress::default();
    let mut rates = Vec::new();
    while progress.epoch.0 < agenda.epochs {
        rates.push(learning_rate(&case.spec, &agenda, &progress));
        agenda.advance(&mut progress);
    }
    Ok(vec![("rates".to_owned(), Tensor::from_slice(&rates))])
}
