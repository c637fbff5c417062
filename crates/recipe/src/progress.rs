//! The progress of training, and what is due next.
//!
//! Every rank has the same [`Progress`] and calls the same pure function, so all ranks evaluate, save and finish after
//! the same step without communication.
//!
//! It is stored in every checkpoint, and digests contain its JSON: a new field needs `#[serde(default)]` and must be
//! skipped while it has its default; none may be renamed or removed.

use serde::{Deserialize, Serialize};

pub use crate::fit::Fit;
use crate::{
    Epoch, JobSpec, Step,
    guard::{BatchMark, LossWatch},
    spec::{Pointwise, Target, TrainPhase},
    task,
};

/// Progress of training: a part of the state, which is sent to joining ranks and saved in checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Optimizer updates made.
    pub step: Step,
    /// Complete epochs.
    pub epoch: Epoch,
    /// Number of samples of the current epoch used so far, in its order. Together with `epoch`, this is the global
    /// sample cursor.
    pub cursor: u64,
    /// Epoch count at the last evaluation.
    pub evaluated: Option<Epoch>,
    /// Step of the last attempt to save, also of a failed one: no step is due for a second attempt.
    pub saved: Option<Step>,
    /// The last evaluation.
    pub last_evaluation: Option<Accuracy>,
    /// The newest evaluations of the job, oldest first. A coordinator whose journal lacks some learns of them here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub newest_evaluations: Vec<PastEvaluation>,
    /// The best evaluation so far and its step.
    pub best: Option<(Step, Accuracy)>,
    /// Epoch count at the last evaluation of the whole validation set.
    #[serde(default)]
    pub evaluated_fully: Option<Epoch>,
    /// Step of the last evaluation.
    #[serde(default)]
    pub evaluated_at: Option<Step>,
    /// The last evaluation of the averaged weights, if the recipe has them.
    #[serde(default)]
    pub last_ema: Option<Accuracy>,
    /// Evaluations since the best one.
    #[serde(default)]
    pub evaluations_since_best: u32,
    /// Score of the first evaluation; `None` also in a run that an older version began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_score: Option<f64>,
    /// Statistics of the training loss, to detect a divergence.
    #[serde(default)]
    pub watch: LossWatch,
    /// How many times the learning rate was lowered after a divergence.
    #[serde(default)]
    pub lr_cuts: u32,
    /// Batches to skip.
    #[serde(default)]
    pub skips: Vec<BatchMark>,
    /// How 1×1 convolutions are computed, if that was measured when the run began (`model.pointwise`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pointwise: Option<Pointwise>,
}

/// An evaluation that was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PastEvaluation {
    /// Updates made before it.
    pub step: Step,
    /// Complete epochs before it.
    pub epoch: Epoch,
    /// The evaluated part of the validation set.
    pub extent: Extent,
    /// Result of the raw weights.
    pub accuracy: Accuracy,
    /// Result of the averaged weights, if the recipe has them.
    pub ema: Option<Accuracy>,
}

/// Most evaluations in [`Progress::newest_evaluations`]: those of the time in which a silent machine is noticed.
pub const MAX_NEWEST_EVALUATIONS: usize = 16;

/// Result of an evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "SavedAccuracy", into = "SavedAccuracy")]
pub struct Accuracy {
    /// Number of samples; for a language model, of predicted tokens.
    pub samples: u64,
    /// Names and values of the task's metrics; evaluations are compared by the first one.
    pub metrics: Vec<(String, f64)>,
}

/// The serialized form of [`Accuracy`]: the fields of versions in which metrics had no names, and the named metrics if
/// those fields do not contain all of them.
#[derive(Serialize, Deserialize)]
struct SavedAccuracy {
    loss: f64,
    top1: f64,
    top5: f64,
    samples: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    fit: Option<Fit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<Vec<(String, f64)>>,
}

impl From<Accuracy> for SavedAccuracy {
    fn from(accuracy: Accuracy) -> Self {
        let [loss, top1, top5] =
            ["loss", "top1", "top5"].map(|name| accuracy.get(name).unwrap_or_default());
        let (samples, fit) = (accuracy.samples, accuracy.fit());
        let is_complete =
            accuracy == Accuracy::from_legacy_fields(samples, loss, (top1, top5), fit);
        let metrics = (!is_complete).then_some(accuracy.metrics);
        Self { loss, top1, top5, samples, fit, metrics }
    }
}

impl From<SavedAccuracy> for Accuracy {
    fn from(SavedAccuracy { loss, top1, top5, samples, fit, metrics }: SavedAccuracy) -> Self {
        match metrics {
            Some(metrics) => Self { samples, metrics },
            None => Self::from_legacy_fields(samples, loss, (top1, top5), fit),
        }
    }
}

impl Accuracy {
    /// A result with these metrics; evaluations are compared by the first one.
    #[must_use]
    pub fn new<const N: usize>(samples: u64, metrics: [(&str, f64); N]) -> Self {
        let metrics = metrics.map(|(name, value)| (name.to_owned(), value)).into();
        Self { samples, metrics }
    }

    /// A result from the fields of versions in which metrics had no names: top-1 and top-5 accuracy, or the fit of a
    /// regression.
    #[must_use]
    pub fn from_legacy_fields(
        samples: u64,
        loss: f64,
        (top1, top5): (f64, f64),
        fit: Option<Fit>,
    ) -> Self {
        match fit {
            Some(Fit { mae, pearson, spearman }) => {
                let fit =
                    [("spearman", spearman), ("pearson", pearson), ("mae", mae), ("loss", loss)];
                Self::new(samples, fit)
            }
            None => Self::new(samples, [("top1", top1), ("top5", top5), ("loss", loss)]),
        }
    }

    /// The metrics of a regression.
    #[must_use]
    pub fn fit(&self) -> Option<Fit> {
        let (mae, pearson) = (self.get("mae")?, self.get("pearson")?);
        Some(Fit { mae, pearson, spearman: self.get("spearman")? })
    }

    /// The value of a metric.
    #[must_use]
    pub fn get(&self, metric: &str) -> Option<f64> {
        self.metrics.iter().find(|(name, _)| name == metric).map(|(_, value)| *value)
    }

    /// Name and value of the metric by which evaluations are compared.
    #[must_use]
    pub fn score(&self) -> Option<(&str, f64)> {
        self.metrics.first().map(|(name, value)| (name.as_str(), *value))
    }

    /// Whether this result is better than `other` in its first metric. A result without this metric is worse.
    #[must_use]
    pub fn is_better_than(&self, other: &Self) -> bool {
        let Some((name, value)) = self.score() else { return false };
        let is_better = |other| task::find(name).is_better(value, other);
        other.get(name).is_none_or(is_better)
    }
}

/// The evaluated part of the validation set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extent {
    /// The recipe's `evaluation.subset`.
    Subset,
    /// The whole validation set.
    Full,
}

/// Results in a saved progress that cannot be compared with new ones, because the recipe, the data or the network has
/// changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outdated {
    /// No results.
    #[default]
    Nothing,
    /// Training losses.
    Loss,
    /// Training losses and evaluations.
    Evaluations,
}

impl Progress {
    /// Removes outdated results, so that those of the guard and of evaluations begin anew.
    pub fn discard(&mut self, outdated: Outdated) {
        if outdated >= Outdated::Loss {
            self.watch = LossWatch::default();
        }
        if outdated >= Outdated::Evaluations {
            self.evaluated = None;
            self.evaluated_fully = None;
            self.evaluated_at = None;
            self.last_evaluation = None;
            self.last_ema = None;
            self.newest_evaluations.clear();
            self.best = None;
            self.evaluations_since_best = 0;
            self.first_score = None;
        }
    }

    /// Adds an evaluation of the raw weights and, if there are any, of the averaged weights; the better of the two
    /// counts.
    pub fn record_evaluation(&mut self, raw: Accuracy, ema: Option<Accuracy>, extent: Extent) {
        // A second evaluation of the same weights, on more samples, replaces the first.
        let again = self.evaluated == Some(self.epoch);
        self.evaluated = Some(self.epoch);
        self.evaluated_at = Some(self.step);
        if extent == Extent::Full {
            self.evaluated_fully = Some(self.epoch);
        }
        let now = better(&raw, ema.as_ref());
        if self.best.is_none() {
            self.first_score = now.score().map(|(_, score)| score);
        }
        let replaces = |(step, best): &(Step, Accuracy)| {
            now.is_better_than(best) || (again && *step == self.step)
        };
        if self.best.as_ref().is_none_or(replaces) {
            self.best = Some((self.step, now.clone()));
            self.evaluations_since_best = 0;
        } else if !again {
            self.evaluations_since_best += 1;
        }
        let (step, epoch, accuracy) = (self.step, self.epoch, raw.clone());
        let newest = &mut self.newest_evaluations;
        newest.retain(|past| (past.step, past.extent) != (step, extent));
        newest.push(PastEvaluation { step, epoch, extent, accuracy, ema: ema.clone() });
        newest.drain(..newest.len().saturating_sub(MAX_NEWEST_EVALUATIONS));
        self.last_evaluation = Some(raw);
        self.last_ema = ema;
    }

    /// Whether the next batch is flagged: it must be skipped.
    fn is_flagged(&self) -> bool {
        let here = BatchMark { epoch: self.epoch, cursor: self.cursor };
        self.skips.contains(&here)
    }
}

/// The better result; that of the raw weights if they are equal.
#[must_use]
pub fn better<'a>(raw: &'a Accuracy, ema: Option<&'a Accuracy>) -> &'a Accuracy {
    ema.filter(|ema| ema.is_better_than(raw)).unwrap_or(raw)
}

/// The next action of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// One more optimizer update.
    Train,
    /// Skip the next batch.
    SkipBatch,
    /// Evaluate on the validation set.
    Evaluate(Extent),
    /// Save a checkpoint.
    Save,
    /// Finish: training is complete, evaluated and saved.
    Finish,
}

/// The constants of a run, which [`due`](Self::due) needs in addition to [`Progress`].
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingPlan {
    /// Number of epochs.
    pub epochs: u32,
    /// Samples of the training set.
    pub samples: u64,
    /// Whether the last samples of an epoch are skipped if they do not fill a batch.
    pub drop_last: bool,
    /// Resolution and batch from the first epoch of each phase; the first phase begins at epoch 0.
    pub phases: Vec<TrainPhase>,
    /// Epochs between evaluations.
    pub evaluate_every_epochs: u32,
    /// Whether evaluations before the end use only a subset of the validation set.
    pub subset: bool,
    /// Epochs between saves; 0 disables them.
    pub save_every_epochs: u32,
    /// Updates between saves; 0 disables them.
    pub save_every_steps: u64,
    /// Value of a metric that completes the job.
    pub target: Option<Target>,
    /// Consecutive evaluations without improvement that complete the job.
    pub patience: Option<u32>,
}

impl TrainingPlan {
    /// The plan of `spec` on a training set of `samples`.
    #[must_use]
    pub fn new(spec: &JobSpec, samples: u64) -> Self {
        let train = &spec.train;
        let first = TrainPhase {
            from_epoch: 0,
            resolution: train.resolution,
            global_batch: train.global_batch,
            ramp_epochs: 0,
        };
        Self {
            epochs: train.epochs,
            samples,
            drop_last: spec.data.drop_last,
            phases: std::iter::once(first).chain(train.phases.iter().cloned()).collect(),
            evaluate_every_epochs: spec.evaluation.every_epochs,
            subset: spec.evaluation.subset < 1.0,
            save_every_epochs: spec.checkpoint.every_epochs,
            save_every_steps: spec.checkpoint.every_steps,
            target: spec.limits.target(),
            patience: spec.limits.patience,
        }
    }

    /// The phase of `epoch`, and the previous phase, if there is one.
    fn phase(&self, epoch: Epoch) -> (Option<&TrainPhase>, Option<&TrainPhase>) {
        let next = self.phases.partition_point(|phase| phase.from_epoch <= epoch.0);
        let at = |number: Option<usize>| number.and_then(|number| self.phases.get(number));
        (at(next.checked_sub(1)), at(next.checked_sub(2)))
    }

    /// Samples per update in `epoch`.
    #[must_use]
    pub fn global_batch(&self, epoch: Epoch) -> u64 {
        let (phase, _) = self.phase(epoch);
        phase.map_or(1, |phase| u64::from(phase.global_batch).max(1))
    }

    /// Side of the training images in `epoch`, in pixels. On a ramp it is the nearest multiple of 32; a tie is rounded
    /// to an even multiple, like ffcv-imagenet's `get_resolution`.
    #[must_use]
    pub fn resolution(&self, epoch: Epoch) -> u32 {
        let (Some(phase), before) = self.phase(epoch) else { return 0 };
        let into = epoch.0 - phase.from_epoch;
        match before {
            Some(before) if into < phase.ramp_epochs => {
                let (from, to) = (f64::from(before.resolution), f64::from(phase.resolution));
                let done = f64::from(into) / f64::from(phase.ramp_epochs);
                ((from + (to - from) * done) / 32.0).round_ties_even() as u32 * 32
            }
            _ => phase.resolution,
        }
    }

    /// Samples used in `epoch`: all, or only full batches.
    #[must_use]
    pub fn epoch_samples(&self, epoch: Epoch) -> u64 {
        let partial = if self.drop_last { self.samples % self.global_batch(epoch) } else { 0 };
        self.samples - partial
    }

    /// Optimizer updates in `epoch`.
    #[must_use]
    pub fn steps_of(&self, epoch: Epoch) -> u64 {
        self.epoch_samples(epoch).div_ceil(self.global_batch(epoch))
    }

    /// Batches of the current epoch that are done, including skipped ones.
    #[must_use]
    pub fn step_of_epoch(&self, progress: &Progress) -> u64 {
        progress.cursor.div_ceil(self.global_batch(progress.epoch))
    }

    /// Optimizer updates before `epoch`.
    #[must_use]
    pub fn steps_before(&self, epoch: Epoch) -> u64 {
        let ends = self.phases.iter().skip(1).map(|next| next.from_epoch).chain([u32::MAX]);
        let of_phase = |(phase, end): (&TrainPhase, u32)| {
            let epochs = end.min(epoch.0).saturating_sub(phase.from_epoch);
            self.steps_of(Epoch(phase.from_epoch)) * u64::from(epochs)
        };
        self.phases.iter().zip(ends).map(of_phase).sum()
    }

    /// Total number of optimizer updates, if the run does not end early.
    #[must_use]
    pub fn total_steps(&self) -> u64 {
        self.steps_before(Epoch(self.epochs))
    }

    /// Samples of the next update: a full batch, or the rest of the epoch.
    #[must_use]
    pub fn next_batch(&self, progress: &Progress) -> u64 {
        let left = self.epoch_samples(progress.epoch).saturating_sub(progress.cursor);
        self.global_batch(progress.epoch).min(left)
    }

    /// Moves the cursor over one update.
    pub fn advance(&self, progress: &mut Progress) {
        self.skip_batch(progress);
        progress.step = progress.step.next();
    }

    /// Moves the cursor over one batch without an update.
    pub fn skip_batch(&self, progress: &mut Progress) {
        progress.cursor += self.next_batch(progress);
        self.end_used_up_epoch(progress);
    }

    /// Moves the cursor to the next epoch if no batch is left in the current one, and returns whether it did. Except for
    /// the end of a batch, this happens only if a change of the recipe or the data has made the epoch shorter.
    pub fn end_used_up_epoch(&self, progress: &mut Progress) -> bool {
        let is_used_up = progress.cursor >= self.epoch_samples(progress.epoch);
        if is_used_up {
            progress.cursor = 0;
            progress.epoch = progress.epoch.next();
        }
        is_used_up
    }

    /// Moves the cursor over all following batches that must be skipped.
    pub fn skip_flagged_batches(&self, progress: &mut Progress) {
        while progress.is_flagged() && progress.epoch.0 < self.epochs {
            self.skip_batch(progress);
        }
    }

    /// A batch to skip, and the batch before it: if an update damages the weights, only the loss of the next batch
    /// shows it.
    pub fn with_preceding_batch(&self, batch: BatchMark) -> impl Iterator<Item = BatchMark> {
        let BatchMark { epoch, cursor } = batch;
        let before = match cursor.checked_sub(self.global_batch(epoch)) {
            Some(cursor) => Some(BatchMark { epoch, cursor }),
            None => epoch.0.checked_sub(1).map(Epoch).map(|epoch| {
                let last = self.steps_of(epoch).saturating_sub(1);
                BatchMark { epoch, cursor: last * self.global_batch(epoch) }
            }),
        };
        before.into_iter().chain([batch])
    }

    /// Training done so far, in fractional epochs: the argument of every schedule.
    #[must_use]
    pub fn position_epochs(&self, progress: &Progress) -> f64 {
        let samples = self.epoch_samples(progress.epoch).max(1);
        f64::from(progress.epoch.0) + progress.cursor as f64 / samples as f64
    }

    /// The next action. A save comes before the evaluation of the same step: however long the evaluation takes, it puts no
    /// update at risk.
    #[must_use]
    pub fn due(&self, progress: &Progress) -> Due {
        let at_epoch_end = progress.cursor == 0 && progress.epoch.0 > 0;
        let done = progress.epoch.0 >= self.epochs || self.ends_early(progress).is_some();
        let every = |n: u32| n > 0 && progress.epoch.0.is_multiple_of(n);
        let by_epoch = at_epoch_end && (done || every(self.save_every_epochs));
        let by_step = self.save_every_steps > 0
            && progress.step.0 > 0
            && progress.step.0.is_multiple_of(self.save_every_steps);
        // A state is saved after the batches that are skipped: it has no other step until the next update.
        if progress.cursor > 0 && progress.is_flagged() {
            return Due::SkipBatch;
        }
        if (by_epoch || by_step) && progress.saved != Some(progress.step) {
            return Due::Save;
        }
        if at_epoch_end && let Some(extent) = self.evaluation_due(progress) {
            return Due::Evaluate(extent);
        }
        match progress {
            _ if done => Due::Finish,
            progress if progress.is_flagged() => Due::SkipBatch,
            _ => Due::Train,
        }
    }

    /// Whether a run of `spec` is complete at the position of a checkpoint. The sizes of its data do not matter for that.
    #[must_use]
    pub fn is_complete(spec: &JobSpec, saved: &Progress) -> bool {
        let saved = Progress { saved: Some(saved.step), ..saved.clone() };
        Self::new(spec, 0).due(&saved) == Due::Finish
    }

    /// The extent of an evaluation that is due. Before the end it may be a subset; a result that would end the run is
    /// confirmed on the whole set.
    fn evaluation_due(&self, progress: &Progress) -> Option<Extent> {
        let last = progress.epoch.0 >= self.epochs;
        let evaluated = progress.evaluated == Some(progress.epoch);
        let evaluated_fully = progress.evaluated_fully == Some(progress.epoch);
        let every = self.evaluate_every_epochs;
        let periodic = every > 0 && progress.epoch.0.is_multiple_of(every);
        if last || (evaluated && self.would_end(progress).is_some()) {
            return (!evaluated_fully).then_some(Extent::Full);
        }
        let extent = if self.subset { Extent::Subset } else { Extent::Full };
        (periodic && !evaluated).then_some(extent)
    }

    /// Why the run is complete before its last epoch, as text.
    #[must_use]
    pub fn ends_early(&self, progress: &Progress) -> Option<String> {
        let is_evaluated_fully = progress.evaluated_fully == Some(progress.epoch);
        let at_epoch_end = progress.cursor == 0;
        (is_evaluated_fully && at_epoch_end).then(|| self.would_end(progress)).flatten()
    }

    fn would_end(&self, progress: &Progress) -> Option<String> {
        let found = [progress.last_evaluation.as_ref()?].into_iter().chain(&progress.last_ema);
        if let Some(target) = &self.target
            && let metric = task::find(&target.metric)
            && let Some(value) = found
                .filter_map(|found| found.get(&metric.name))
                .reduce(|raw, ema| if metric.is_better(ema, raw) { ema } else { raw })
                .filter(|value| *value == target.value || metric.is_better(*value, target.value))
        {
            return Some(format!(
                "{target} is reached: {} after epoch {}",
                task::display(&(target.metric.clone(), value)),
                progress.epoch
            ));
        }
        let since = progress.evaluations_since_best;
        self.patience.filter(|patience| since >= *patience).map(|patience| {
            format!("limits.patience = {patience}: {since} evaluations without improvement")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(from_epoch: u32, resolution: u32, global_batch: u32, ramp_epochs: u32) -> TrainPhase {
        TrainPhase { from_epoch, resolution, global_batch, ramp_epochs }
    }

    fn top1(top1: f64) -> Accuracy {
        Accuracy::new(8, [("top1", top1), ("loss", 1.0 - top1)])
    }

    fn target(metric: &str, value: f64) -> Target {
        Target { metric: metric.to_owned(), value }
    }

    fn plan() -> TrainingPlan {
        TrainingPlan {
            epochs: 2,
            samples: 8,
            drop_last: false,
            phases: vec![phase(0, 32, 4, 0)],
            evaluate_every_epochs: 1,
            subset: false,
            save_every_epochs: 1,
            save_every_steps: 3,
            target: None,
            patience: None,
        }
    }

    fn actions(plan: &TrainingPlan) -> String {
        run_plan(plan, &mut Progress::default(), |_| 0.5)
    }

    /// Runs to the end and returns a letter for each action; `score` gives the result of an evaluation in an epoch.
    fn run_plan(
        plan: &TrainingPlan,
        progress: &mut Progress,
        score: impl Fn(u32) -> f64,
    ) -> String {
        let mut actions = String::new();
        loop {
            match plan.due(progress) {
                Due::Train => {
                    plan.advance(progress);
                    actions.push('t');
                }
                Due::SkipBatch => {
                    plan.skip_batch(progress);
                    actions.push('-');
                }
                Due::Evaluate(extent) => {
                    let found = top1(score(progress.epoch.0));
                    progress.record_evaluation(found, None, extent);
                    actions.push(if extent == Extent::Full { 'e' } else { 'q' });
                }
                Due::Save => {
                    progress.saved = Some(progress.step);
                    actions.push('s');
                }
                Due::Finish => return actions,
            }
        }
    }

    #[test]
    fn saves_before_evaluating_at_each_epoch_end_and_between() {
        assert_eq!(actions(&plan()), "ttsetstse");
    }

    #[test]
    fn last_epoch_is_evaluated_and_saved_even_when_nothing_periodic_is_due() {
        let rare = TrainingPlan {
            evaluate_every_epochs: 5,
            save_every_epochs: 0,
            save_every_steps: 0,
            ..plan()
        };
        assert_eq!(actions(&rare), "ttttse");
    }

    #[test]
    fn last_partial_batch_is_used_when_it_is_not_dropped() {
        let plan = TrainingPlan { samples: 10, ..plan() };
        let mut progress = Progress { cursor: 8, ..Progress::default() };
        assert_eq!(plan.next_batch(&progress), 2);
        plan.advance(&mut progress);
        assert_eq!((progress.epoch, progress.cursor), (Epoch(1), 0));
        assert_eq!(plan.steps_of(Epoch(0)), 3);
    }

    #[test]
    fn a_phase_changes_batch_and_resolution_at_its_first_epoch() {
        let plan = TrainingPlan {
            epochs: 6,
            samples: 20,
            drop_last: true,
            phases: vec![phase(0, 160, 8, 0), phase(2, 192, 4, 0), phase(5, 224, 20, 0)],
            ..plan()
        };
        let of = |epoch| {
            let epoch = Epoch(epoch);
            (plan.resolution(epoch), plan.steps_of(epoch), plan.steps_before(epoch))
        };
        assert_eq!([of(0), of(1), of(2)], [(160, 2, 0), (160, 2, 2), (192, 5, 4)]);
        assert_eq!([of(4), of(5)], [(192, 5, 14), (224, 1, 19)]);
        assert_eq!(plan.total_steps(), 20);
    }

    /// `get_resolution` of ffcv-imagenet with its 88-epoch recipe.
    #[test]
    fn a_ramp_rises_in_multiples_of_32_like_in_ffcv() {
        let phases = vec![phase(0, 160, 4, 0), phase(65, 192, 4, 11)];
        let plan = TrainingPlan { epochs: 88, phases, ..plan() };
        let changes: Vec<u32> = (1..88)
            .filter(|e| plan.resolution(Epoch(*e)) != plan.resolution(Epoch(e - 1)))
            .collect();
        // 160 + 32 x 6/11 is the first beyond 176.
        assert_eq!(changes, [71]);
        assert_eq!((plan.resolution(Epoch(65)), plan.resolution(Epoch(76))), (160, 192));
    }

    #[test]
    fn subset_evaluations_are_made_only_before_the_last_epoch() {
        let plan = TrainingPlan { subset: true, save_every_steps: 0, ..plan() };
        assert_eq!(actions(&plan), "ttsqttse");
    }

    #[test]
    fn a_target_reached_on_a_subset_is_confirmed_on_the_whole_set() {
        let plan = TrainingPlan {
            epochs: 9,
            subset: true,
            save_every_steps: 0,
            target: Some(target("top1", 0.7)),
            ..plan()
        };
        let mut progress = Progress::default();
        let score = |epoch| if epoch == 2 { 0.8 } else { 0.1 };
        assert_eq!(run_plan(&plan, &mut progress, score), "ttsqttsqe");
        assert!(
            plan.ends_early(&progress)
                .unwrap()
                .contains("{ metric = \"top1\", value = 0.7 } is reached: top-1 80.00 %")
        );
        assert_eq!(plan.due(&progress), Due::Finish);
    }

    #[test]
    fn a_run_without_improvement_ends_by_limits_patience() {
        let plan = TrainingPlan { epochs: 9, save_every_steps: 0, patience: Some(2), ..plan() };
        let mut progress = Progress::default();
        let score = |epoch: u32| if epoch == 2 { 0.8 } else { 0.1 };
        assert_eq!(run_plan(&plan, &mut progress, score), "ttsettsettsettse");
        assert_eq!(progress.best.unwrap().0, Step(4));
    }

    #[test]
    fn a_run_that_patience_ended_goes_on_where_its_evaluations_are_outdated() {
        let plan = TrainingPlan { epochs: 9, save_every_steps: 0, patience: Some(1), ..plan() };
        let mut ended = Progress::default();
        assert_eq!(run_plan(&plan, &mut ended, |_| 0.5), "ttsettse");
        ended.watch.updates = 4;

        let mut progress = ended.clone();
        progress.discard(Outdated::Nothing);
        assert_eq!(progress, ended);
        progress.discard(Outdated::Loss);
        assert_eq!(progress, Progress { watch: LossWatch::default(), ..ended.clone() });
        assert_eq!(plan.due(&progress), Due::Finish);

        progress.discard(Outdated::Evaluations);
        let Progress { step, epoch, cursor, saved, .. } = ended;
        assert_eq!(progress, Progress { step, epoch, cursor, saved, ..Progress::default() });
        // The first evaluation is of the state that was restored.
        assert_eq!(run_plan(&plan, &mut progress, |_| 0.1), "ettse");
    }

    #[test]
    fn the_newest_evaluations_are_kept_each_once_and_in_order() {
        let mut progress = Progress::default();
        for step in 1..=20 {
            progress.step = Step(step);
            progress.epoch = Epoch(step as u32);
            progress.record_evaluation(top1(0.3), None, Extent::Subset);
            progress.record_evaluation(top1(0.4), Some(top1(0.5)), Extent::Full);
            // Its result was lost, and it is made again.
            progress.record_evaluation(top1(0.4), Some(top1(0.5)), Extent::Full);
        }
        let newest = &progress.newest_evaluations;
        let steps: Vec<u64> = newest.iter().map(|past| past.step.0).collect();
        assert_eq!(steps, (13..=20).flat_map(|step| [step, step]).collect::<Vec<_>>());
        let extents: Vec<Extent> = newest[..2].iter().map(|past| past.extent).collect();
        assert_eq!(extents, [Extent::Subset, Extent::Full]);
        let text = serde_json::to_string(&progress).unwrap();
        assert_eq!(serde_json::from_str::<Progress>(&text).unwrap(), progress);
    }

    #[test]
    fn the_first_score_is_that_of_the_better_weights_in_the_first_evaluation() {
        let mut progress = Progress::default();
        progress.record_evaluation(top1(0.3), Some(top1(0.6)), Extent::Full);
        progress.epoch = Epoch(1);
        progress.record_evaluation(top1(0.9), None, Extent::Full);
        assert_eq!(progress.first_score, Some(0.6));
        let text = serde_json::to_string(&progress).unwrap();
        assert_eq!(serde_json::from_str::<Progress>(&text).unwrap(), progress);

        // An older version has saved no first score: a later one is not the first.
        progress.first_score = None;
        let older = serde_json::to_string(&progress).unwrap();
        assert!(!older.contains("first_score"), "{older}");
        let mut older: Progress = serde_json::from_str(&older).unwrap();
        older.record_evaluation(top1(0.8), None, Extent::Full);
        assert_eq!(older.first_score, None);
    }

    #[test]
    fn an_epoch_that_a_change_made_too_short_for_the_cursor_ends() {
        let plan = TrainingPlan { samples: 10, drop_last: true, save_every_steps: 0, ..plan() };
        assert_eq!(plan.epoch_samples(Epoch(0)), 8);
        for cursor in [8, 9] {
            let mut progress = Progress { step: Step(5), cursor, ..Progress::default() };
            assert!(plan.end_used_up_epoch(&mut progress));
            let ended = Progress { step: Step(5), epoch: Epoch(1), ..Progress::default() };
            assert_eq!(progress, ended);
            assert_eq!(run_plan(&plan, &mut progress, |_| 0.5), "settse");
            assert_eq!(progress.step, Step(7));
        }
        for cursor in [0, 7] {
            let progress = Progress { cursor, ..Progress::default() };
            let mut same = progress.clone();
            assert!(!plan.end_used_up_epoch(&mut same));
            assert_eq!(same, progress);
        }
    }

    #[test]
    fn the_better_of_raw_and_averaged_weights_counts() {
        let mut progress = Progress::default();
        progress.record_evaluation(top1(0.3), Some(top1(0.6)), Extent::Full);
        assert_eq!(progress.best.clone().unwrap().1, top1(0.6));
        progress.epoch = Epoch(1);
        progress.record_evaluation(top1(0.5), Some(top1(0.4)), Extent::Full);
        assert_eq!((progress.best.unwrap().1, progress.evaluations_since_best), (top1(0.6), 1));
    }

    #[test]
    fn a_target_of_a_metric_that_falls_is_reached_from_above() {
        let target = Some(target("loss", 0.25));
        let plan = TrainingPlan { epochs: 9, save_every_steps: 0, target, ..plan() };
        let mut progress = Progress::default();
        let top1 = |epoch: u32| f64::from(epoch) * 0.25;
        assert_eq!(run_plan(&plan, &mut progress, top1), "ttsettsettse");
        assert!(plan.ends_early(&progress).unwrap().contains("reached: loss 0.2500"));
    }

    #[test]
    fn evaluations_are_compared_by_their_first_metric() {
        let found = |loss, top1| Accuracy::new(8, [("loss", loss), ("top1", top1)]);
        let mut progress = Progress::default();
        progress.record_evaluation(found(0.5, 0.9), None, Extent::Full);
        progress.epoch = Epoch(1);
        progress.record_evaluation(found(0.4, 0.1), Some(found(0.6, 1.0)), Extent::Full);
        assert_eq!(progress.best, Some((Step(0), found(0.4, 0.1))));
        // After a change of the metric, the best result starts again: a result without the metric is worse.
        assert!(Accuracy::new(8, [("spearman", 0.1)]).is_better_than(&found(0.4, 0.1)));
    }

    #[test]
    fn results_from_before_metrics_had_names_can_be_read() {
        let read = |text| serde_json::from_str::<Accuracy>(text).unwrap();
        let classes = read(r#"{"loss":0.25,"top1":0.75,"top5":0.5,"samples":8}"#);
        assert_eq!(classes, Accuracy::new(8, [("top1", 0.75), ("top5", 0.5), ("loss", 0.25)]));
        let values = read(
            r#"{"loss":0.25,"top1":0.0,"top5":0.0,"samples":8,
                "fit":{"mae":0.5,"pearson":0.75,"spearman":0.125}}"#,
        );
        assert_eq!(values.score(), Some(("spearman", 0.125)));
        assert_eq!(values.get("mae"), Some(0.5));
        let other = Accuracy::new(8, [("perplexity", 0.5), ("loss", 0.25)]);
        for accuracy in [&classes, &values, &other] {
            let text = serde_json::to_string(accuracy).unwrap();
            assert_eq!(serde_json::from_str::<Accuracy>(&text).unwrap(), *accuracy);
        }
        // Digests of a state contain this text, and older programs read it.
        let text = r#"{"loss":0.25,"top1":0.75,"top5":0.5,"samples":8}"#;
        assert_eq!(serde_json::to_string(&classes).unwrap(), text);
    }

    #[test]
    fn the_batch_before_the_first_of_an_epoch_is_the_last_of_the_previous_epoch() {
        let plan = TrainingPlan { phases: vec![phase(0, 32, 4, 0), phase(1, 32, 2, 0)], ..plan() };
        let mark = |epoch, cursor| BatchMark { epoch: Epoch(epoch), cursor };
        let pair = |batch| plan.with_preceding_batch(batch).collect::<Vec<_>>();
        assert_eq!(pair(mark(1, 4)), [mark(1, 2), mark(1, 4)]);
        assert_eq!(pair(mark(1, 0)), [mark(0, 4), mark(1, 0)]);
        assert_eq!(pair(mark(0, 0)), [mark(0, 0)]);
    }

    #[test]
    fn flagged_batches_are_skipped_and_epoch_ends_are_kept() {
        let plan = TrainingPlan { save_every_steps: 0, ..plan() };
        let mark = |epoch, cursor| BatchMark { epoch: Epoch(epoch), cursor };
        let skips = vec![mark(0, 4), mark(1, 0)];
        let mut progress = Progress { skips, ..Progress::default() };
        assert_eq!(run_plan(&plan, &mut progress, |_| 0.5), "t-se-tse");
        assert_eq!(progress.step, Step(2));

        // A save within an epoch comes after the skipped batches, which are the last ones here.
        let plan = TrainingPlan { save_every_steps: 1, ..plan };
        let mut progress = Progress { skips: vec![mark(0, 4)], ..Progress::default() };
        assert_eq!(run_plan(&plan, &mut progress, |_| 0.5), "t-setstse");
    }
}
