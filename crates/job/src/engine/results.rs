//! What the ranks reported of training: how far it has come, what it found and what is saved.

use super::{Evaluation, skips::Skips};
use crate::{
    ids::Generation,
    message::{Commit, StepNews},
};
use baton_recipe::{
    Step,
    progress::{Accuracy, better},
};

/// The newest of each kind.
#[derive(Clone, Debug, Default)]
pub(super) struct Results {
    /// The furthest step that any rank has reported since the last rollback; only beyond it there is progress.
    high_water: Step,
    /// The step that training has reached, which is less while steps are made again.
    pub(super) reached: Step,
    pub(super) latest: Option<StepNews>,
    pub(super) evaluation: Option<Evaluation>,
    /// The generation that reported the newest evaluation.
    evaluated_in: Generation,
    pub(super) best: Option<(Step, Accuracy)>,
    pub(super) commit: Option<Commit>,
    /// Why the newest save failed, if it did.
    pub(super) save_problem: Option<String>,
    pub(super) skips: Skips,
}

impl Results {
    /// A rank holds the state after `step`; whether that is progress.
    pub(super) fn advance(&mut self, step: Option<Step>) -> bool {
        let progress = step.filter(|step| *step > self.high_water);
        self.high_water = progress.unwrap_or(self.high_water);
        progress.is_some()
    }

    /// Whether this evaluation, or a later one, is known.
    pub(super) fn knows(&self, found: &Evaluation) -> bool {
        self.evaluation.as_ref().is_some_and(|known| known.place() >= found.place())
    }

    /// The same, as `generation` found it.
    pub(super) fn knows_of(&self, generation: Generation, found: &Evaluation) -> bool {
        self.evaluated_in == generation && self.knows(found)
    }

    /// The better of raw and averaged weights counts, and a second look at the same weights replaces
    /// the first, as [`Progress::note_evaluation`](baton_recipe::progress::Progress::note_evaluation) has it.
    pub(super) fn take_evaluation(&mut self, generation: Generation, found: Evaluation) {
        let again = self.evaluation.as_ref().is_some_and(|last| last.step == found.step);
        let now = better(&found.accuracy, found.ema.as_ref());
        let replaces = |(step, best): &(Step, Accuracy)| {
            now.is_better_than(best) || (again && *step == found.step)
        };
        if self.best.as_ref().is_none_or(replaces) {
            self.best = Some((found.step, now.clone()));
        }
        self.evaluation = Some(found);
        self.evaluated_in = generation;
    }

    /// Whether a checkpoint is newer than all that are known.
    pub(super) fn is_new(&self, commit: &Commit) -> bool {
        let age = |commit: &Commit| (commit.generation, commit.step);
        self.commit.as_ref().is_none_or(|known| age(known) < age(commit))
    }

    /// A checkpoint from the journal.
    pub(super) fn replay_commit(&mut self, commit: &Commit) {
        self.high_water = self.high_water.max(commit.step);
        self.reached = commit.step;
        self.commit = Some(commit.clone());
    }

    /// Training goes back to before a step. Steps that are made again are progress again.
    pub(super) fn roll_back(&mut self, before: Step) {
        self.high_water = Step(0);
        self.reached = Step(0);
        self.evaluation.take_if(|found| found.step >= before);
        self.best.take_if(|(step, _)| *step >= before);
    }
}
