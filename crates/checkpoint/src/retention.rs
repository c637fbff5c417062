//! Which checkpoints are kept.

use baton_job::{Generation, message::Restore};

use crate::{Store, Verdict, judge};

/// What to keep of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The newest ones; at least one is kept.
    pub keep_last: u32,
    /// The one with the best score too.
    pub keep_best: bool,
    /// Those of the end of every so many epochs too; 0 is off.
    pub keep_every_epochs: u32,
    /// What may be resumed from. Checkpoints of another run are left alone; those that a rollback made
    /// worthless count for nothing and are removed.
    pub restore: Restore,
    /// The generation that prunes.
    pub generation: Generation,
}

/// What pruning did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Names of what was removed.
    pub removed: Vec<String>,
    /// What could not be done. Nothing that would have to stop training.
    pub warnings: Vec<String>,
}

impl Store {
    /// Removes what `retention` does not keep, and what dead saves have left behind. Damaged ones
    /// stay: they are a person's to look at.
    pub fn prune(&self, retention: &Retention) -> Pruned {
        let mut pruned = Pruned::default();
        let listed = self.check_fence(retention.generation).and_then(|()| self.list());
        let entries = match listed {
            Ok(entries) => entries,
            Err(error) => {
                pruned.warnings.push(format!("old checkpoints are not pruned: {error}"));
                return pruned;
            }
        };
        let verdicts = judge(&entries, retention);
        let removed = entries.iter().zip(verdicts).filter_map(|(entry, verdict)| match verdict {
            Verdict::Removed(_) => Some(entry.id),
            Verdict::Kept(_) => None,
        });
        for id in removed {
            // A newer generation may go on from what an older one no longer wants.
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
            && let Err(error) = self.sweep_frozen(|| self.check_fence(retention.generation))
        {
            pruned.warnings.push(error.to_string());
        }
        pruned
    }
}
