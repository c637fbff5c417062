//! Why each checkpoint stays or goes: one rule for pruning and for whoever lists them.

use std::fmt;

use crate::{Entry, EntryState, Manifest, Retention};

/// What becomes of a checkpoint when its run prunes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It stays, for all of these reasons; there is at least one.
    Kept(Vec<Kept>),
    /// It is removed.
    Removed(Removed),
}

/// Why a checkpoint stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The newest whole one of the run.
    Newest,
    /// One of so many newest ones.
    Last(u32),
    /// The one with the best score.
    Best,
    /// Of the end of every so many epochs.
    EveryEpochs(u32),
    /// Not this run's to judge.
    OutsideRun,
    /// A person's to look at.
    Damaged,
    /// Only a newer Baton can read it.
    Newer,
    /// Its save may still be going on.
    InProgress,
}

/// Why a checkpoint goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removed {
    /// Nothing asks for it any more.
    NotAskedFor,
    /// Training went wrong, and went back to before it.
    Condemned,
    /// Nobody will finish its save.
    DeadSave,
}

/// The verdict on each of `entries`, which come newest first.
#[must_use]
pub fn judge(entries: &[Entry], retention: &Retention) -> Vec<Verdict> {
    let whole = entries.iter().filter_map(|entry| entry.state.manifest());
    let ours: Vec<&Manifest> = whole.filter(|manifest| is_good(manifest, retention)).collect();
    let newest = ours.first().map(|manifest| manifest.id());
    let graded =
        ours.iter().filter_map(|manifest| Some((manifest.id(), manifest.best_accuracy()?)));
    // Newest first, and the last of equals is taken: the earliest.
    let best = graded.reduce(|best, next| if best.1.is_better_than(next.1) { best } else { next });
    let best = best.filter(|_| retention.keep_best).map(|(id, _)| id);

    let verdict = |entry: &Entry| match &entry.state {
        EntryState::Damaged(_) => Verdict::Kept(vec![Kept::Damaged]),
        EntryState::Newer(_) => Verdict::Kept(vec![Kept::Newer]),
        EntryState::Unfinished => {
            // What is newer than the newest whole one may be a save in progress, unless its generation
            // has ended. A generation that ended left no save in progress, whichever run it belonged to.
            let is_dead = entry.id.generation < retention.generation
                || newest.is_some_and(|newest| entry.id < newest);
            if is_dead {
                Verdict::Removed(Removed::DeadSave)
            } else {
                Verdict::Kept(vec![Kept::InProgress])
            }
        }
        EntryState::Whole(_) if entry.id.generation < retention.restore.not_before => {
            Verdict::Kept(vec![Kept::OutsideRun])
        }
        EntryState::Whole(manifest) => {
            let place = ours.iter().position(|ours| ours.id() == entry.id);
            match place {
                None => Verdict::Removed(Removed::Condemned),
                Some(place) => reasons(manifest, place, best == Some(entry.id), retention),
            }
        }
    };
    entries.iter().map(verdict).collect()
}

/// On a good one of the run, with so many good ones that are newer.
fn reasons(manifest: &Manifest, place: usize, is_best: bool, retention: &Retention) -> Verdict {
    let (last, every) = (retention.keep_last.max(1), retention.keep_every_epochs);
    let progress = &manifest.progress;
    let ends_epoch = progress.cursor == 0 && progress.epoch.0 > 0;
    let mut kept = Vec::new();
    match place {
        0 => kept.push(Kept::Newest),
        place if place < last as usize => kept.push(Kept::Last(last)),
        _ => {}
    }
    kept.extend(is_best.then_some(Kept::Best));
    let is_of_every = ends_epoch && progress.epoch.0.is_multiple_of(every);
    kept.extend(is_of_every.then_some(Kept::EveryEpochs(every)));
    if kept.is_empty() { Verdict::Removed(Removed::NotAskedFor) } else { Verdict::Kept(kept) }
}

/// Whether the run can go on from it.
fn is_good(manifest: &Manifest, retention: &Retention) -> bool {
    let restore = &retention.restore;
    manifest.generation >= restore.not_before
        && restore.condemned_by(manifest.generation, manifest.step).is_none()
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kept(reasons) => {
                let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
                f.write_str(&reasons.join(", "))
            }
            Self::Removed(reason) => write!(f, "no longer: {reason}"),
        }
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Newest => f.write_str("newest"),
            Self::Last(last) => write!(f, "last {last}"),
            Self::Best => f.write_str("best"),
            Self::EveryEpochs(1) => f.write_str("every epoch"),
            Self::EveryEpochs(every) => write!(f, "every {every} epochs"),
            Self::OutsideRun => f.write_str("outside this run"),
            Self::Damaged => f.write_str("damaged: yours to look at"),
            Self::Newer => f.write_str("a newer Baton's"),
            Self::InProgress => f.write_str("may be in progress"),
        }
    }
}

impl fmt::Display for Removed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotAskedFor => "nothing asks for it",
            Self::Condemned => "training went wrong here",
            Self::DeadSave => "nobody finishes it",
        })
    }
}
