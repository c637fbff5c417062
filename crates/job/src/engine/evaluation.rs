//! Results of evaluations.
//!
//! They are in the journal: a new field needs `#[serde(default)]`, and none may be renamed or removed.

use serde::{Deserialize, Serialize};

use baton_recipe::{
    Epoch, Step,
    progress::{Accuracy, Extent, Progress},
};

/// Result of an evaluation, and its step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationResult {
    /// Updates made.
    pub step: Step,
    /// The result.
    pub accuracy: Accuracy,
    /// The result with the averaged weights (EMA), if the recipe averages them.
    pub ema: Option<Accuracy>,
    /// Which part of the validation set was evaluated.
    pub extent: Extent,
}

impl EvaluationResult {
    /// The last evaluation that `progress` records, with its epoch.
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

    /// Sort key: later evaluations have a greater position.
    pub(super) fn position(&self) -> (Step, Extent) {
        (self.step, self.extent)
    }
}
