//! Which checkpoints are kept.

use baton_job::{Generation, message::Restore};

use crate::{Entry, EntryState, Manifest, SaveId, Store};

/// What to keep of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The newest ones; at least one is kept.
    pub keep_last: u32,
    /// The one with the best score too.
    pub keep_best: bool,
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
        for id in superfluous(&entries, retention) {
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
        pruned
    }
}

/// What is to be removed of `entries`, which come newest first.
fn superfluous(entries: &[Entry], retention: &Retention) -> Vec<SaveId> {
    let restore = &retention.restore;
    let whole = entries
        .iter()
        .filter(|entry| entry.id.generation >= restore.not_before)
        .filter_map(|entry| match &entry.state {
            EntryState::Whole(manifest) => Some(&**manifest),
            _ => None,
        });
    let (worthless, ours): (Vec<&Manifest>, Vec<&Manifest>) = whole
        .partition(|manifest| restore.condemned_by(manifest.generation, manifest.step).is_some());
    let graded = ours.iter().filter_map(|manifest| Some((manifest.id(), manifest.score()?)));
    // Newest first, and the last of equals is taken: the earliest.
    let best = graded.reduce(|best, next| if next.1 >= best.1 { next } else { best });
    let best = best.filter(|_| retention.keep_best).map(|(id, _)| id);
    let beyond =
        ours.iter().skip(retention.keep_last.max(1) as usize).map(|manifest| manifest.id());

    // What is newer than the newest whole one may be a save in progress, unless its generation has
    // ended. A generation that ended left no save in progress, whichever run it belonged to.
    let newest = ours.first().map(|manifest| manifest.id());
    let dead = |id: SaveId| {
        id.generation < retention.generation || newest.is_some_and(|newest| id < newest)
    };
    let leftovers = entries
        .iter()
        .filter(|entry| entry.state == EntryState::Unfinished && dead(entry.id))
        .map(|entry| entry.id);
    let worthless = worthless.iter().map(|manifest| manifest.id());
    beyond.filter(|id| Some(*id) != best).chain(worthless).chain(leftovers).collect()
}
