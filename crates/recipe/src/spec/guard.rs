//! Detection and remedy of divergence.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// Detection and remedy of divergence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Guard {
    /// Whether the guard is on; without it, only a loss or gradient that is not finite ends the job.
    pub enabled: bool,
    /// Steps over which the loss is averaged, 1..100000. After a rise of the average, `lower_lr` returns to before them.
    pub window: u32,
    /// How far that average may rise above its lowest value, as a fraction of the average of the first window.
    pub loss_rise: f64,
    /// An evaluation below this fraction of the best one is a collapse, in [0, 1); 0 is off. If lower values are better, a
    /// collapse is an evaluation of which the best one is below this fraction, and that is worse than the first one of the
    /// run. For a regression, the score is Spearman's correlation, which cannot collapse from a best below 0.2.
    pub accuracy_collapse: f64,
    /// What changes after a rollback to the last valid checkpoint. `lower_lr`: the whole schedule is multiplied by
    /// `lr_factor` from then on; `skip_batch`: the batch at which training diverged and the batch before it are
    /// skipped, because only the loss of the next batch shows that an update damaged the weights; after a collapse, for
    /// which no batch is to blame, the learning rate is lowered.
    pub remedy: GuardRemedy,
    /// Factor by which the learning rate is multiplied from then on, between 0 and 1.
    pub lr_factor: f64,
    /// Most rollbacks before the job fails, at most 100.
    pub max_rollbacks: u32,
}

impl Default for Guard {
    fn default() -> Self {
        Self {
            enabled: true,
            window: 20,
            loss_rise: 0.5,
            accuracy_collapse: 0.25,
            remedy: GuardRemedy::LowerLr,
            lr_factor: 0.5,
            max_rollbacks: 3,
        }
    }
}

/// What changes after a rollback.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuardRemedy {
    /// The learning rate is lowered.
    #[default]
    LowerLr,
    /// The batch at which training diverged and the batch before it are skipped.
    SkipBatch,
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let guard = &spec.guard;
    rules.check(
        (1..=100_000).contains(&guard.window),
        "guard.window",
        guard.window,
        "must be 1..100000 steps",
    );
    rules.positive("guard.loss_rise", guard.loss_rise);
    rules.below_1("guard.accuracy_collapse", guard.accuracy_collapse);
    rules.between_0_and_1("guard.lr_factor", guard.lr_factor);
    rules.check(
        guard.max_rollbacks <= 100,
        "guard.max_rollbacks",
        guard.max_rollbacks,
        "must be at most 100",
    );
}
