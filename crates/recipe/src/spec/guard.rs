//! What is done against training that goes wrong.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// What is done against training that goes wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Guard {
    /// Watch at all; without it only a loss or gradient that is no number ends the job.
    pub enabled: bool,
    /// Updates over which the loss is averaged, 1..100000.
    pub window: u32,
    /// How far that average may rise above its lowest value, as a share of the average of the first
    /// window.
    pub loss_rise: f64,
    /// An evaluation below this share of the best one is a collapse, in [0, 1); 0 is off. Of a regression:
    /// Spearman's correlation.
    pub accuracy_collapse: f64,
    /// What changes after going back to the last good checkpoint. `lower_lr`: the whole schedule times
    /// `lr_factor` from then on; `skip_batch`: the batch at which training went wrong and the one before
    /// it are left out, as an update that spoils the weights shows in the next batch's loss.
    pub remedy: Remedy,
    /// Factor on the learning rate from then on, between 0 and 1.
    pub lr_factor: f64,
    /// Times to go back before the job fails, at most 100.
    pub max_rollbacks: u32,
}

impl Default for Guard {
    fn default() -> Self {
        Self {
            enabled: true,
            window: 20,
            loss_rise: 0.5,
            accuracy_collapse: 0.25,
            remedy: Remedy::LowerLr,
            lr_factor: 0.5,
            max_rollbacks: 3,
        }
    }
}

/// What changes after a rollback.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Remedy {
    /// The learning rate.
    #[default]
    LowerLr,
    /// The batch at which training went wrong and the one before it are left out.
    SkipBatch,
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let guard = &spec.guard;
    rules.check(
        (1..=100_000).contains(&guard.window),
        "guard.window",
        guard.window,
        "must be 1..100000 updates",
    );
    rules.positive("guard.loss_rise", guard.loss_rise);
    rules.check(
        (0.0..1.0).contains(&guard.accuracy_collapse),
        "guard.accuracy_collapse",
        guard.accuracy_collapse,
        "must be in [0, 1)",
    );
    rules.between_0_and_1("guard.lr_factor", guard.lr_factor);
    rules.check(
        guard.max_rollbacks <= 100,
        "guard.max_rollbacks",
        guard.max_rollbacks,
        "must be at most 100",
    );
}
