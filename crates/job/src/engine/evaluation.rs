//! Evaluations as they are kept.

use serde::{Deserialize, Serialize};

use baton_recipe::{
    Epoch, Step,
    progress::{Accuracy, Extent, Progress},
};

/// What an evaluation found, and when.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Updates made.
    pub step: Step,
    /// What was found.
    pub accuracy: Accuracy,
    /// What was found with the averaged weights, if the recipe has them.
    pub ema: Option<Accuracy>,
    /// Which part of the validation set was looked at.
    pub extent: Extent,
}

impl Evaluation {
    /// The last one before `progress`.
    #[must_use]
    pub fn last_of(progress: &Progress) -> Option<(Epoch, Self)> {
        let (epoch, step) = (progress.evaluated?, progress.evaluated_at?);
        let extent = match progress.evaluated_fully == Some(epoch) {
            true => Extent::Full,
            false => Extent::Subset,
        };
        let accuracy = progress.last_evaluation.clone()?;
        Some((epoch, Self { step, accuracy, ema: progress.last_ema.clone(), extent }))
    }

    /// Later ones are greater.
    pub(super) fn place(&self) -> (Step, Extent) {
        (self.step, self.extent)
    }
}
