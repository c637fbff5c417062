//! Results that the ranks reported: progress, evaluations and checkpoints.

use std::collections::BTreeSet;

use super::{EvaluationResult, LocalCheckpoint, skips::Skips};
use crate::{
    ids::{Generation, NodeId},
    message::{Commit, Restore, StepReport},
};
use baton_recipe::{
    Step,
    progress::{Accuracy, Extent, better},
};

/// Most checkpoints that are known besides the newest one: more than are usually saved in a window of the guard.
const MAX_EARLIER_COMMITS: usize = 64;

/// The newest result of each kind.
#[derive(Clone, Debug, Default)]
pub(super) struct Results {
    /// The highest step that any rank has reported since the last rollback; only a higher step is progress.
    high_water: Step,
    /// The step that training has reached; lower than `high_water` while lost steps are repeated.
    pub(super) reached: Step,
    pub(super) latest: Option<StepReport>,
    pub(super) evaluation: Option<EvaluationResult>,
    /// Positions of all recorded evaluations.
    positions: BTreeSet<(Step, Extent)>,
    /// Estimated seconds that the newest evaluation takes or took.
    pub(super) evaluation_seconds: Option<f64>,
    /// The generation that reported the newest evaluation.
    evaluated_in: Generation,
    pub(super) best: Option<(Step, Accuracy)>,
    pub(super) commit: Option<Commit>,
    /// Those before it, oldest first: a rollback may invalidate the newest ones.
    earlier_commits: Vec<Commit>,
    /// The newest local checkpoint.
    pub(super) local: Option<LocalCheckpoint>,
    /// Why the newest save failed, if it did.
    pub(super) save_problem: Option<String>,
    pub(super) skips: Skips,
}

impl Results {
    /// Records that a rank holds the state after `step`; returns whether that is progress.
    pub(super) fn advance(&mut self, step: Option<Step>) -> bool {
        let progress = step.filter(|step| *step > self.high_water);
        self.high_water = progress.unwrap_or(self.high_water);
        progress.is_some()
    }

    /// Whether this evaluation is recorded. The copy of a lost coordinator's journal may lack one and have a later one.
    pub(super) fn has(&self, evaluation: &EvaluationResult) -> bool {
        self.positions.contains(&evaluation.position())
    }

    /// Whether this evaluation or a later one is already recorded.
    fn includes(&self, evaluation: &EvaluationResult) -> bool {
        self.evaluation.as_ref().is_some_and(|known| known.position() >= evaluation.position())
    }

    /// Whether this report of `generation`, which began at `began_at`, is a repetition: its agent has connected again,
    /// or an earlier generation reported the result and ended before the checkpoint contained it.
    pub(super) fn is_repeated(
        &self,
        (generation, began_at): (Generation, Option<Step>),
        evaluation: &EvaluationResult,
    ) -> bool {
        let from_before = began_at == Some(evaluation.step);
        (self.evaluated_in == generation && self.includes(evaluation))
            || (from_before
                && self.evaluation.as_ref().is_some_and(|known| known.is_equal_to(evaluation)))
    }

    /// Records an evaluation. The best of raw and averaged weights is used, and a second evaluation of the same
    /// weights replaces the first, as in
    /// [`Progress::record_evaluation`](baton_recipe::progress::Progress::record_evaluation).
    pub(super) fn record_evaluation(
        &mut self,
        generation: Generation,
        evaluation: EvaluationResult,
    ) {
        let is_repeated = self.evaluation.as_ref().is_some_and(|last| last.step == evaluation.step);
        let now = better(&evaluation.accuracy, evaluation.ema.as_ref());
        let replaces = |(step, best): &(Step, Accuracy)| {
            now.is_better_than(best) || (is_repeated && *step == evaluation.step)
        };
        if self.best.as_ref().is_none_or(replaces) {
            self.best = Some((evaluation.step, now.clone()));
        }
        let position = evaluation.position();
        self.positions.insert(position);
        let is_newest = |newest: &EvaluationResult| {
            (self.evaluated_in, newest.position()) <= (generation, position)
        };
        if self.evaluation.as_ref().is_none_or(is_newest) {
            self.evaluation = Some(evaluation);
            self.evaluated_in = generation;
            self.grade_commit();
        }
    }

    /// The generation that made an evaluation which nobody has reported, as the state of `step` knows it: if a later one is
    /// known that this state has too, that of the later one, and else the current one.
    pub(super) fn generation_of(
        &self,
        lost: &EvaluationResult,
        step: Step,
        current: Generation,
    ) -> Generation {
        let later = self.evaluation.as_ref();
        let later = later.filter(|later| later.step <= step && later.position() > lost.position());
        later.map_or(current, |_| self.evaluated_in)
    }

    /// Records a checkpoint.
    pub(super) fn record_commit(&mut self, commit: Commit) {
        let is_other =
            |known: &Commit| (known.generation, known.step) != (commit.generation, commit.step);
        self.earlier_commits.extend(self.commit.take().filter(is_other));
        if self.earlier_commits.len() > MAX_EARLIER_COMMITS {
            self.earlier_commits.remove(0);
        }
        self.commit = Some(commit);
        self.grade_commit();
    }

    /// Gives the newest checkpoint the accuracy of an evaluation of the same state, which usually ends after the commit.
    fn grade_commit(&mut self) {
        if let (Some(commit), Some(evaluation)) = (&mut self.commit, &self.evaluation)
            && commit.step == evaluation.step
        {
            commit.accuracy = Some(evaluation.accuracy.clone());
        }
    }

    /// Whether a checkpoint is newer than all recorded ones.
    pub(super) fn is_new(&self, commit: &Commit) -> bool {
        let position = |commit: &Commit| (commit.generation, commit.step);
        self.commit.as_ref().is_none_or(|known| position(known) < position(commit))
    }

    /// The checkpoint from which a job resumes: the newest one that is not the last resort of a rollback, if there is one.
    pub(super) fn valid_commit(&self, restore: &Restore) -> Option<&Commit> {
        let is_good =
            |commit: &&Commit| restore.suspected_by(commit.generation, commit.step).is_none();
        let found = self.valid_commits(restore).find(is_good);
        let key = |commit: &&Commit| Restore::last_resort_key(commit.generation, commit.step);
        found.or_else(|| self.valid_commits(restore).min_by_key(key))
    }

    /// The newest checkpoint that no rollback has invalidated.
    pub(super) fn newest_valid_commit(&self, restore: &Restore) -> Option<&Commit> {
        self.valid_commits(restore).next()
    }

    fn valid_commits(&self, restore: &Restore) -> impl Iterator<Item = &Commit> {
        let newest_first = self.commit.iter().chain(self.earlier_commits.iter().rev());
        newest_first
            .filter(|commit| restore.invalidated_by(commit.generation, commit.step).is_none())
    }

    /// Seconds that the last checkpoint took, from the copy of the state to the commit, if they are known.
    pub(super) fn save_seconds(&self) -> Option<f64> {
        Some(self.commit.as_ref()?.took?.seconds)
    }

    /// Records that the local checkpoint of a node is complete.
    pub(super) fn record_local(&mut self, node: NodeId, step: Step, seconds: f64) {
        match &mut self.local {
            Some(known) if known.step > step => {}
            Some(known) if known.step == step => {
                known.nodes.insert(node);
                known.seconds = known.seconds.max(seconds);
            }
            _ => self.local = Some(LocalCheckpoint { step, seconds, nodes: [node].into() }),
        }
    }

    /// Records a checkpoint from the journal.
    pub(super) fn replay_commit(&mut self, commit: &Commit) {
        self.high_water = self.high_water.max(commit.step);
        self.reached = commit.step;
        self.record_commit(commit.clone());
    }

    /// Discards results from step `before` on, because training is rolled back. Steps that are repeated count as
    /// progress again.
    pub(super) fn roll_back(&mut self, before: Step) {
        self.high_water = Step(0);
        self.reached = Step(0);
        self.local = None;
        self.evaluation.take_if(|evaluation| evaluation.step >= before);
        self.positions.retain(|(step, _)| *step < before);
        self.best.take_if(|(step, _)| *step >= before);
    }
}
