//! Retention: rules for which checkpoints are kept, and pruning of the others.
//!
//! Pruning must never remove the newest checkpoint from which the run can resume, a complete checkpoint of another run,
//! a checkpoint that is damaged or that only a newer Baton can read, or a save that may be in progress. A generation
//! that has been replaced must remove nothing, so the fence is checked before each removal.

use baton_job::{Generation, message::Restore};
use baton_recipe::spec::Guard;

use crate::{PruneDecision, Store, prune_decisions};

/// Rules for which checkpoints of a run are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Number of newest checkpoints to keep; at least one is kept.
    pub keep_last: u32,
    /// Whether to keep the checkpoint with the best score too.
    pub keep_best: bool,
    /// Also keep checkpoints from the end of every n-th epoch; 0 disables this.
    pub keep_every_epochs: u32,
    /// What a divergence that is noticed from now on must leave; `None`: the guard is off.
    pub guard: Option<GuardedSteps>,
    /// Which checkpoints the run may resume from. Checkpoints of another run are left alone; checkpoints that a
    /// rollback invalidated do not count and are removed.
    pub restore: Restore,
    /// The generation that prunes.
    pub generation: Generation,
}

/// The checkpoints that training can go back to if it turns out that it has diverged:
/// [`Diagnosis::suspect_from`](baton_recipe::guard::Diagnosis::suspect_from).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuardedSteps {
    /// Steps over which the loss is averaged: one checkpoint is at least as much older than the newest one.
    pub window: u32,
    /// Whether evaluations are watched: one checkpoint is not newer than the last of them.
    pub evaluations: bool,
}

impl GuardedSteps {
    /// Those of a recipe.
    #[must_use]
    pub fn of(guard: &Guard) -> Option<Self> {
        let (window, evaluations) = (guard.window, guard.accuracy_collapse > 0.0);
        guard.enabled.then_some(Self { window, evaluations })
    }
}

/// Result of pruning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Names of the removed checkpoints.
    pub removed: Vec<String>,
    /// Removals that failed. Training can continue regardless.
    pub warnings: Vec<String>,
}

impl Store {
    /// Removes checkpoints that `retention` does not keep, and the files of abandoned saves. Damaged checkpoints
    /// are kept so that a person can inspect them.
    pub fn prune(&self, retention: &Retention) -> Pruned {
        let mut pruned = Pruned::default();
        let listed = self.check_fence(retention.generation).and_then(|_| self.list());
        let entries = match listed {
            Ok(entries) => entries,
            Err(error) => {
                pruned.warnings.push(format!("old checkpoints are not pruned: {error}"));
                return pruned;
            }
        };
        let decisions = prune_decisions(&entries, retention);
        let removed =
            entries.iter().zip(decisions).filter_map(|(entry, decision)| match decision {
                PruneDecision::Removed(_) => Some(entry.id),
                PruneDecision::Kept(_) => None,
            });
        for id in removed {
            // A newer generation may resume from a checkpoint that this generation would remove.
            if let Err(error) = self.check_fence(retention.generation) {
                pruned.warnings.push(format!("old checkpoints are not pruned: {error}"));
                break;
            }
            match self.remove(id) {
                Ok(()) => pruned.removed.push(id.name()),
                Err(error) => pruned.warnings.push(error.to_string()),
            }
        }
        if !pruned.removed.is_empty()
            && let Err(error) =
                self.sweep_frozen(|| self.check_fence(retention.generation).map(|_| ()))
        {
            pruned.warnings.push(error.to_string());
        }
        pruned
    }
}
