//! Evaluations as they are kept, and the best of them.

use super::{Engine, NoticeKind, notice::describe_evaluation};
use crate::{
    ids::{Epoch, Step},
    progress::{Accuracy, Extent, better},
};

/// What an evaluation found, and when.
#[derive(Clone, Copy, Debug, PartialEq)]
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

impl Engine {
    pub(super) fn evaluated(&mut self, epoch: Epoch, found: Evaluation) {
        self.take_evaluation(found);
        let text = describe_evaluation(epoch, &found);
        self.announce_at(NoticeKind::Evaluated, Some(found.step), text);
    }

    /// The better of raw and averaged weights counts, and a second look at the same weights replaces
    /// the first, as [`Progress::note_evaluation`](crate::progress::Progress::note_evaluation) has it.
    pub(super) fn take_evaluation(&mut self, found: Evaluation) {
        let again = self.evaluation.is_some_and(|last| last.step == found.step);
        let now = better(found.accuracy, found.ema);
        let replaces = |(step, best): (Step, Accuracy)| {
            now.score() > best.score() || (again && step == found.step)
        };
        if self.best.is_none_or(replaces) {
            self.best = Some((found.step, now));
        }
        self.evaluation = Some(found);
    }
}
