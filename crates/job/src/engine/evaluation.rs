//! Results of evaluations.
//!
//! They are in the journal: a new field needs `#[serde(default)]`, and none may be renamed or removed.

use serde::{Deserialize, Serialize};

use crate::message::GeneratedText;
use baton_recipe::{
    Epoch, Step,
    progress::{Accuracy, Extent, PastEvaluation, Progress},
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
    /// Some of the texts that a language model wrote, shortened.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub texts: Vec<GeneratedText>,
}

impl EvaluationResult {
    /// The evaluations that `progress` records, oldest first, with their epochs.
    pub(super) fn all_of(progress: &Progress) -> impl Iterator<Item = (Epoch, Self)> {
        let past = progress.newest_evaluations.iter().cloned();
        let past = past.map(|PastEvaluation { step, epoch, extent, accuracy, ema }| {
            (epoch, Self { step, accuracy, ema, extent, texts: Vec::new() })
        });
        // Older versions, and checkpoints of another job, have only this one.
        past.chain(Self::last_of(progress))
    }

    /// The last evaluation that `progress` records, with its epoch.
    #[must_use]
    pub fn last_of(progress: &Progress) -> Option<(Epoch, Self)> {
        let (epoch, step) = (progress.evaluated?, progress.evaluated_at?);
        let extent = match progress.evaluated_fully == Some(epoch) {
            true => Extent::Full,
            false => Extent::Subset,
        };
        let accuracy = progress.last_evaluation.clone()?;
        let (ema, texts) = (progress.last_ema.clone(), Vec::new());
        Some((epoch, Self { step, accuracy, ema, extent, texts }))
    }

    /// Whether both have the same numbers; a checkpoint keeps no texts.
    pub(super) fn is_equal_to(&self, other: &Self) -> bool {
        self.position() == other.position()
            && (&self.accuracy, &self.ema) == (&other.accuracy, &other.ema)
    }

    /// Sort key: later evaluations have a greater position.
    pub(super) fn position(&self) -> (Step, Extent) {
        (self.step, self.extent)
    }
}
