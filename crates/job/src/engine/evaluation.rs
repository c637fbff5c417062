//! Evaluations as they are kept, and the best of them.

use serde::{Deserialize, Serialize};

use super::{Action, Engine, Measured, NoticeKind, Record, notice::describe_evaluation};
use crate::ids::Generation;
use baton_recipe::{
    Epoch, Step,
    progress::{Accuracy, Extent, Progress, better},
};

/// What an evaluation found, and when.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Updates made.
    pub step: Step,
    /// What was found.
    pub accuracy: Accuracy,
    /// What was found with the averaged weights, if the recipe has them.
    pub ema: Option<Accuracy>,
    /// Which part of the validation set was looked at.
    pub extent: Extent,
}

impl Evaluation {
    /// The last one before `progress`.
    #[must_use]
    pub fn last_of(progress: &Progress) -> Option<(Epoch, Self)> {
        let (epoch, step) = (progress.evaluated?, progress.evaluated_at?);
        let extent = match progress.evaluated_fully == Some(epoch) {
            true => Extent::Full,
            false => Extent::Subset,
        };
        let accuracy = progress.last_evaluation?;
        Some((epoch, Self { step, accuracy, ema: progress.last_ema, extent }))
    }

    /// Later ones are greater.
    fn place(&self) -> (Step, Extent) {
        (self.step, self.extent)
    }
}

impl Engine {
    /// Takes what a rank or its agent tells, possibly for the second time.
    pub(super) fn heard_evaluation(&mut self, epoch: Epoch, found: Evaluation) {
        let here = self.evaluated_in == self.generation;
        if !(here && self.knows(&found)) {
            self.evaluated(epoch, found);
        }
    }

    /// Takes what the ranks that begin know of: the one who was to tell may have died before.
    pub(super) fn inherit_evaluation(&mut self, progress: &Progress) {
        let last = Evaluation::last_of(progress);
        if let Some((epoch, found)) = last.filter(|(_, found)| !self.knows(found)) {
            self.evaluated(epoch, found);
        }
    }

    fn knows(&self, found: &Evaluation) -> bool {
        self.evaluation.is_some_and(|known| known.place() >= found.place())
    }

    fn evaluated(&mut self, epoch: Epoch, found: Evaluation) {
        self.take_evaluation(self.generation, found);
        self.actions.push(Action::Persist(Record::Evaluated {
            generation: self.generation,
            evaluation: found,
        }));
        self.actions.push(Action::Measured(Measured::Evaluation(found)));
        let text = describe_evaluation(epoch, &found);
        self.announce_at(NoticeKind::Evaluated, Some(found.step), text);
    }

    /// The better of raw and averaged weights counts, and a second look at the same weights replaces
    /// the first, as [`Progress::note_evaluation`](baton_recipe::progress::Progress::note_evaluation) has it.
    pub(super) fn take_evaluation(&mut self, generation: Generation, found: Evaluation) {
        let again = self.evaluation.is_some_and(|last| last.step == found.step);
        let now = better(found.accuracy, found.ema);
        let replaces = |(step, best): (Step, Accuracy)| {
            now.score() > best.score() || (again && step == found.step)
        };
        if self.best.is_none_or(replaces) {
            self.best = Some((found.step, now));
        }
        self.evaluation = Some(found);
        self.evaluated_in = generation;
    }
}
