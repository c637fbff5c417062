//! Where training stands, and what is due next.
//!
//! Every rank holds the same [`Progress`] and asks the same pure function, so all ranks evaluate,
//! save and finish after the same step without asking each other.

use serde::{Deserialize, Serialize};

use crate::{
    JobSpec,
    ids::{Epoch, Step},
};

/// The position of training: part of the state that is broadcast to joiners and checkpointed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Optimizer updates made.
    pub step: Step,
    /// Whole passes made.
    pub epoch: Epoch,
    /// Samples of the current epoch's order already used: with `epoch` the global sample cursor.
    pub cursor: u64,
    /// Epoch count at the last evaluation.
    pub evaluated: Option<Epoch>,
    /// Step of the last committed checkpoint.
    pub saved: Option<Step>,
    /// The last evaluation.
    pub last_evaluation: Option<Accuracy>,
    /// The best evaluation so far and its step.
    pub best: Option<(Step, Accuracy)>,
}

/// What an evaluation found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Accuracy {
    /// Mean loss over all samples.
    pub loss: f64,
    /// Share of samples whose first guess is right, 0..1.
    pub top1: f64,
    /// Share of samples with the label among the first five guesses, 0..1.
    pub top5: f64,
    /// Number of samples.
    pub samples: u64,
}

/// What all ranks do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// One more optimizer update.
    Train,
    /// Measure accuracy on the validation set.
    Evaluate,
    /// Write a checkpoint.
    Save,
    /// All epochs are done, evaluated and saved.
    Finish,
}

/// The fixed shape of a run: what [`due`](Self::due) needs besides [`Progress`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agenda {
    /// Passes to make.
    pub epochs: u32,
    /// Samples per update.
    pub global_batch: u64,
    /// Samples used per epoch: all of them, or whole global batches only.
    pub epoch_samples: u64,
    /// Epochs between evaluations.
    pub evaluate_every_epochs: u32,
    /// Epochs between saves; 0 is off.
    pub save_every_epochs: u32,
    /// Updates between saves; 0 is off.
    pub save_every_steps: u64,
}

impl Agenda {
    /// The agenda of `spec` over a training set of `samples`.
    #[must_use]
    pub fn new(spec: &JobSpec, samples: u64) -> Self {
        let global_batch = u64::from(spec.train.global_batch).max(1);
        let partial = if spec.data.drop_last { samples % global_batch } else { 0 };
        Self {
            epochs: spec.train.epochs,
            global_batch,
            epoch_samples: samples - partial,
            evaluate_every_epochs: spec.evaluation.every_epochs,
            save_every_epochs: spec.checkpoint.every_epochs,
            save_every_steps: spec.checkpoint.every_steps,
        }
    }

    /// Optimizer updates per epoch.
    #[must_use]
    pub fn steps_per_epoch(&self) -> u64 {
        self.epoch_samples.div_ceil(self.global_batch)
    }

    /// Optimizer updates in all.
    #[must_use]
    pub fn total_steps(&self) -> u64 {
        self.steps_per_epoch() * u64::from(self.epochs)
    }

    /// Samples of the next update: a full batch, or what is left of the epoch.
    #[must_use]
    pub fn next_batch(&self, progress: &Progress) -> u64 {
        self.global_batch.min(self.epoch_samples.saturating_sub(progress.cursor))
    }

    /// Moves the cursor over one update.
    pub fn advance(&self, progress: &mut Progress) {
        progress.cursor += self.next_batch(progress);
        progress.step = progress.step.next();
        if progress.cursor >= self.epoch_samples {
            progress.cursor = 0;
            progress.epoch = progress.epoch.next();
        }
    }

    /// Training done so far in epochs, with fraction: the argument of every schedule.
    #[must_use]
    pub fn position_epochs(&self, progress: &Progress) -> f64 {
        f64::from(progress.epoch.0) + progress.cursor as f64 / self.epoch_samples.max(1) as f64
    }

    /// What comes next. An evaluation comes before the save of the same step, so that the
    /// checkpoint carries its own accuracy.
    #[must_use]
    pub fn due(&self, progress: &Progress) -> Due {
        let done = progress.epoch.0 >= self.epochs;
        let at_epoch_end = progress.cursor == 0 && progress.epoch.0 > 0;
        let every = |n: u32| n > 0 && progress.epoch.0.is_multiple_of(n);
        let unevaluated = progress.evaluated != Some(progress.epoch);
        if at_epoch_end && unevaluated && (done || every(self.evaluate_every_epochs)) {
            return Due::Evaluate;
        }
        let by_epoch = at_epoch_end && (done || every(self.save_every_epochs));
        let by_step = self.save_every_steps > 0
            && progress.step.0 > 0
            && progress.step.0.is_multiple_of(self.save_every_steps);
        if (by_epoch || by_step) && progress.saved != Some(progress.step) {
            return Due::Save;
        }
        if done { Due::Finish } else { Due::Train }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agenda() -> Agenda {
        Agenda {
            epochs: 2,
            global_batch: 4,
            epoch_samples: 8,
            evaluate_every_epochs: 1,
            save_every_epochs: 1,
            save_every_steps: 3,
        }
    }

    /// Runs to the end and writes down what was done.
    fn story(agenda: &Agenda) -> String {
        let mut progress = Progress::default();
        let mut story = String::new();
        loop {
            match agenda.due(&progress) {
                Due::Train => {
                    agenda.advance(&mut progress);
                    story.push('t');
                }
                Due::Evaluate => {
                    progress.evaluated = Some(progress.epoch);
                    story.push('e');
                }
                Due::Save => {
                    progress.saved = Some(progress.step);
                    story.push('s');
                }
                Due::Finish => return story,
            }
        }
    }

    #[test]
    fn evaluates_before_saving_at_each_epoch_end_and_saves_between() {
        assert_eq!(story(&agenda()), "ttestste".to_owned() + "s");
    }

    #[test]
    fn last_epoch_is_evaluated_and_saved_even_when_nothing_periodic_is_due() {
        let rare = Agenda {
            evaluate_every_epochs: 5,
            save_every_epochs: 0,
            save_every_steps: 0,
            ..agenda()
        };
        assert_eq!(story(&rare), "ttttes");
    }

    #[test]
    fn last_partial_batch_is_used_when_it_is_not_dropped() {
        let agenda = Agenda { epoch_samples: 10, ..agenda() };
        let mut progress = Progress { cursor: 8, ..Progress::default() };
        assert_eq!(agenda.next_batch(&progress), 2);
        agenda.advance(&mut progress);
        assert_eq!((progress.epoch, progress.cursor), (Epoch(1), 0));
        assert_eq!(agenda.steps_per_epoch(), 3);
    }
}
