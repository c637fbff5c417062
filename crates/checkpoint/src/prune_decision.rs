//! Decides which checkpoints are kept and which are removed, and why. Pruning and listing use the same rule.
//!
//! The newest checkpoint from which the run can resume must be kept whatever the settings are, so `keep_last` counts as
//! at least 1. What cannot be judged, because it is damaged, of a newer version or perhaps still being written, must be
//! kept too.

use std::fmt;

use baton_job::message::Restore;
use baton_recipe::{Step, progress::Accuracy};

use crate::{Entry, EntryState, Manifest, Retention, SaveId};

/// What pruning does with a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PruneDecision {
    /// It is kept, for all of these reasons; there is at least one.
    Kept(Vec<KeepReason>),
    /// It is removed.
    Removed(RemovalReason),
}

/// Why a checkpoint is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepReason {
    /// It is the newest complete checkpoint of the run.
    Newest,
    /// It is one of the newest checkpoints; the number is `keep_last`.
    Last(u32),
    /// It has the best score.
    Best,
    /// Training goes back to it if it turns out that it has diverged already.
    Guard,
    /// It was saved at the end of an epoch that `keep_every_epochs`, the number, selects.
    EveryEpochs(u32),
    /// It belongs to another run.
    OutsideRun,
    /// It is damaged and needs inspection by a person.
    Damaged,
    /// Only a newer Baton can read it.
    Newer,
    /// Its save may still be in progress.
    InProgress,
}

/// Why a checkpoint is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovalReason {
    /// No retention rule keeps it.
    NotAskedFor,
    /// Training diverged and was rolled back to an earlier step.
    Invalidated,
    /// Its save was abandoned and will never finish.
    DeadSave,
}

/// The decision for each of `entries`, which must be sorted newest first.
#[must_use]
pub fn prune_decisions(entries: &[Entry], retention: &Retention) -> Vec<PruneDecision> {
    let complete = entries.iter().filter_map(|entry| entry.state.manifest());
    let ours: Vec<&Manifest> = complete.filter(|manifest| is_valid(manifest, retention)).collect();
    let restore = &retention.restore;
    let is_suspect =
        |manifest: &&Manifest| restore.suspected_by(manifest.generation, manifest.step).is_some();
    let (mut suspects, ours): (Vec<_>, Vec<_>) = ours.into_iter().partition(is_suspect);
    suspects.sort_by_key(|manifest| Restore::last_resort_key(manifest.generation, manifest.step));
    let guarded = guarded(&ours, &suspects, retention);
    let newest = ours.first().or(suspects.first()).map(|manifest| manifest.id());
    // The run may have gone on from its best state as a last resort.
    let best_suspect = suspects.iter().find(|suspect| is_best_of(&ours, suspect)).copied();
    let graded: Vec<&Manifest> = ours.iter().copied().chain(best_suspect).collect();
    let best = if retention.keep_best { best_of_each_series(&graded) } else { Vec::new() };

    let decision = |entry: &Entry| match &entry.state {
        EntryState::Damaged(_) => PruneDecision::Kept(vec![KeepReason::Damaged]),
        EntryState::Newer(_) => PruneDecision::Kept(vec![KeepReason::Newer]),
        EntryState::Unfinished => {
            // A save newer than the newest complete checkpoint may be in progress, unless its generation has
            // ended. An ended generation has no save in progress, whichever run it belonged to.
            let is_dead = entry.id.generation < retention.generation
                || newest.is_some_and(|newest| entry.id < newest);
            if is_dead {
                PruneDecision::Removed(RemovalReason::DeadSave)
            } else {
                PruneDecision::Kept(vec![KeepReason::InProgress])
            }
        }
        EntryState::Complete(_) if entry.id.generation < retention.restore.not_before => {
            PruneDecision::Kept(vec![KeepReason::OutsideRun])
        }
        EntryState::Complete(manifest) => {
            let age_rank = ours.iter().position(|ours| ours.id() == entry.id);
            let [is_best, is_guarded] = [&best, &guarded].map(|kept| kept.contains(&entry.id));
            match age_rank {
                None if newest == Some(entry.id) => PruneDecision::Kept(vec![KeepReason::Newest]),
                None if is_best => PruneDecision::Kept(vec![KeepReason::Best]),
                // It was rolled back: no part of the run, and only a last resort.
                None if is_guarded => PruneDecision::Kept(vec![KeepReason::Guard]),
                None => PruneDecision::Removed(RemovalReason::Invalidated),
                Some(age_rank) => reasons(manifest, age_rank, [is_best, is_guarded], retention),
            }
        }
    };
    entries.iter().map(decision).collect()
}

/// Whether this checkpoint has the evaluation that the newest one of `ours` knows as the best, and none of `ours` has.
fn is_best_of(ours: &[&Manifest], other: &Manifest) -> bool {
    let best = ours.first().and_then(|newest| newest.progress.best.as_ref());
    best.is_some_and(|(step, best)| {
        *step == other.step
            && other.best_accuracy() == Some(best)
            && ours.iter().all(|manifest| manifest.step != *step)
    })
}

/// The best of these checkpoints, newest first; and, where a change of the recipe or the data has begun evaluations anew, the
/// best of each series whose evaluations can be compared.
fn best_of_each_series(manifests: &[&Manifest]) -> Vec<SaveId> {
    let mut series: Vec<(&Manifest, (SaveId, &Accuracy))> = Vec::new();
    for &manifest in manifests {
        let Some(accuracy) = manifest.best_accuracy() else { continue };
        let found = (manifest.id(), accuracy);
        match series.iter_mut().find(|(newest, _)| newest.is_comparable_with(manifest)) {
            // The last of equals is taken, so the oldest of equals is kept.
            Some((_, best)) if best.1.is_better_than(accuracy) => {}
            Some((_, best)) => *best = found,
            None => series.push((manifest, found)),
        }
    }
    series.into_iter().map(|(_, (id, _))| id).collect()
}

/// The checkpoints that training goes back to if it has diverged and this was not noticed before the newest one. Those that are
/// good are sorted newest first; `suspects` are a last resort, the least suspect first.
fn guarded(good: &[&Manifest], suspects: &[&Manifest], retention: &Retention) -> Vec<SaveId> {
    let (Some(guard), Some((newest, older))) = (retention.guard, good.split_first()) else {
        return Vec::new();
    };
    let window = u64::from(guard.window);
    let is_in_window =
        |manifest: &&&Manifest| newest.step.0.saturating_sub(manifest.step.0) < window;
    let before_window = older.iter().find(|manifest| manifest.step.0 + window <= newest.step.0);
    // It replaces the one before the window when it is old enough.
    let next = older.iter().rev().find(is_in_window);
    // Until there is one that is good, training goes back to a last resort.
    let last_resort = suspects.first().filter(|_| before_window.is_none());
    // The newest one is saved before its own evaluation.
    let evaluated = newest.progress.evaluated_at.filter(|_| guard.evaluations);
    let up_to = |step: Step| good.iter().chain(suspects).find(|manifest| manifest.step <= step);
    let kept = [before_window, next, last_resort, evaluated.and_then(up_to)];
    kept.into_iter().flatten().map(|manifest| manifest.id()).collect()
}

/// The decision for a checkpoint of the run; `age_rank` is the number of newer ones.
fn reasons(
    manifest: &Manifest,
    age_rank: usize,
    [is_best, is_guarded]: [bool; 2],
    retention: &Retention,
) -> PruneDecision {
    let (last, every) = (retention.keep_last.max(1), retention.keep_every_epochs);
    let progress = &manifest.progress;
    let ends_epoch = progress.cursor == 0 && progress.epoch.0 > 0;
    let mut kept = Vec::new();
    match age_rank {
        0 => kept.push(KeepReason::Newest),
        age_rank if age_rank < last as usize => kept.push(KeepReason::Last(last)),
        _ => {}
    }
    kept.extend(is_best.then_some(KeepReason::Best));
    let is_of_every = ends_epoch && progress.epoch.0.is_multiple_of(every);
    kept.extend(is_of_every.then_some(KeepReason::EveryEpochs(every)));
    // Not named where there are other reasons.
    kept.extend((is_guarded && kept.is_empty()).then_some(KeepReason::Guard));
    if kept.is_empty() {
        PruneDecision::Removed(RemovalReason::NotAskedFor)
    } else {
        PruneDecision::Kept(kept)
    }
}

/// Whether the run can resume from it, if there is no better one.
fn is_valid(manifest: &Manifest, retention: &Retention) -> bool {
    let restore = &retention.restore;
    manifest.generation >= restore.not_before
        && restore.invalidated_by(manifest.generation, manifest.step).is_none()
}

impl fmt::Display for PruneDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kept(reasons) => {
                let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
                f.write_str(&reasons.join(", "))
            }
            Self::Removed(reason) => write!(f, "to be removed: {reason}"),
        }
    }
}

impl fmt::Display for KeepReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Newest => f.write_str("newest"),
            Self::Last(last) => write!(f, "last {last}"),
            Self::Best => f.write_str("best"),
            Self::Guard => f.write_str("in case training has diverged"),
            Self::EveryEpochs(1) => f.write_str("every epoch"),
            Self::EveryEpochs(every) => write!(f, "every {every} epochs"),
            Self::OutsideRun => f.write_str("outside this run"),
            Self::Damaged => f.write_str("damaged: please inspect"),
            Self::Newer => f.write_str("needs a newer Baton"),
            Self::InProgress => f.write_str("may be in progress"),
        }
    }
}

impl fmt::Display for RemovalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotAskedFor => "no retention rule keeps it",
            Self::Invalidated => "training diverged here",
            Self::DeadSave => "its save was abandoned",
        })
    }
}
