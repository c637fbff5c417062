//! Where training stands, and what is due next.
//!
//! Every rank holds the same [`Progress`] and asks the same pure function, so all ranks evaluate,
//! save and finish after the same step without asking each other.

use serde::{Deserialize, Serialize};

pub use crate::fit::Fit;
use crate::{
    Epoch, JobSpec, Step,
    guard::{BatchMark, LossWatch},
    spec::{Phase, Target},
    task,
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
    /// How the training loss has been.
    #[serde(default)]
    pub watch: LossWatch,
    /// Times the learning rate was lowered after training went wrong.
    #[serde(default)]
    pub lr_cuts: u32,
    /// Batches to leave out.
    #[serde(default)]
    pub skips: Vec<BatchMark>,
}

/// What an evaluation found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Saved", into = "Saved")]
pub struct Accuracy {
    /// Number of samples.
    pub samples: u64,
    /// Values by the names of the task's metrics; evaluations are compared by the first one.
    pub metrics: Vec<(String, f64)>,
}

/// An [`Accuracy`] as files have it: the fields of before metrics had names, and the metrics if that is not all.
#[derive(Serialize, Deserialize)]
struct Saved {
    loss: f64,
    top1: f64,
    top5: f64,
    samples: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    fit: Option<Fit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<Vec<(String, f64)>>,
}

impl From<Accuracy> for Saved {
    fn from(accuracy: Accuracy) -> Self {
        let [loss, top1, top5] =
            ["loss", "top1", "top5"].map(|name| accuracy.get(name).unwrap_or_default());
        let (samples, fit) = (accuracy.samples, accuracy.fit());
        let is_all = accuracy == Accuracy::before_names(samples, loss, (top1, top5), fit);
        let metrics = (!is_all).then_some(accuracy.metrics);
        Self { loss, top1, top5, samples, fit, metrics }
    }
}

impl From<Saved> for Accuracy {
    fn from(Saved { loss, top1, top5, samples, fit, metrics }: Saved) -> Self {
        match metrics {
            Some(metrics) => Self { samples, metrics },
            None => Self::before_names(samples, loss, (top1, top5), fit),
        }
    }
}

impl Accuracy {
    /// These values; evaluations are compared by the first one.
    #[must_use]
    pub fn new<const N: usize>(samples: u64, metrics: [(&str, f64); N]) -> Self {
        let metrics = metrics.map(|(name, value)| (name.to_owned(), value)).into();
        Self { samples, metrics }
    }

    /// What was kept before metrics had names: shares of right guesses, or the fit of a regression.
    #[must_use]
    pub fn before_names(
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

    /// Name and value of what evaluations are compared by.
    #[must_use]
    pub fn score(&self) -> Option<(&str, f64)> {
        self.metrics.first().map(|(name, value)| (name.as_str(), *value))
    }

    /// Whether it is better in what this one is compared by; what the other one lacks is worse.
    #[must_use]
    pub fn is_better_than(&self, other: &Self) -> bool {
        let Some((name, value)) = self.score() else { return false };
        let is_better =
            |other| task::find(name).is_none_or(|metric| metric.is_better(value, other));
        other.get(name).is_none_or(is_better)
    }
}

/// Which part of the validation set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extent {
    /// The recipe's `evaluation.subset`.
    Subset,
    /// All of it.
    Full,
}

impl Progress {
    /// Takes note of an evaluation of the raw and, if there are any, of the averaged weights; the
    /// better of the two counts.
    pub fn note_evaluation(&mut self, raw: Accuracy, ema: Option<Accuracy>, extent: Extent) {
        // A second look at the same weights, with more samples, replaces the first.
        let again = self.evaluated == Some(self.epoch);
        self.evaluated = Some(self.epoch);
        self.evaluated_at = Some(self.step);
        if extent == Extent::Full {
            self.evaluated_fully = Some(self.epoch);
        }
        let now = better(&raw, ema.as_ref());
        let replaces = |(step, best): &(Step, Accuracy)| {
            now.is_better_than(best) || (again && *step == self.step)
        };
        if self.best.as_ref().is_none_or(replaces) {
            self.best = Some((self.step, now.clone()));
            self.evaluations_since_best = 0;
        } else if !again {
            self.evaluations_since_best += 1;
        }
        self.last_evaluation = Some(raw);
        self.last_ema = ema;
    }

    /// Whether the batch that comes next is to be left out.
    fn is_marked(&self) -> bool {
        let here = BatchMark { epoch: self.epoch, cursor: self.cursor };
        self.skips.contains(&here)
    }
}

/// The better one; raw weights if they are equal.
#[must_use]
pub fn better<'a>(raw: &'a Accuracy, ema: Option<&'a Accuracy>) -> &'a Accuracy {
    ema.filter(|ema| ema.is_better_than(raw)).unwrap_or(raw)
}

/// What all ranks do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// One more optimizer update.
    Train,
    /// Go over the next batch without using it.
    PassOver,
    /// Measure accuracy on the validation set.
    Evaluate(Extent),
    /// Write a checkpoint.
    Save,
    /// All is done, evaluated and saved.
    Finish,
}

/// The fixed shape of a run: what [`due`](Self::due) needs besides [`Progress`].
#[derive(Clone, Debug, PartialEq)]
pub struct Agenda {
    /// Passes to make.
    pub epochs: u32,
    /// Samples of the training set.
    pub samples: u64,
    /// Whether the last samples of an epoch that do not fill a batch are left out.
    pub drop_last: bool,
    /// What holds from each phase's first epoch on; the first begins at epoch 0.
    pub phases: Vec<Phase>,
    /// Epochs between evaluations.
    pub evaluate_every_epochs: u32,
    /// Whether evaluations between use a part of the validation set only.
    pub subset: bool,
    /// Epochs between saves; 0 is off.
    pub save_every_epochs: u32,
    /// Updates between saves; 0 is off.
    pub save_every_steps: u64,
    /// What completes the job.
    pub target: Option<Target>,
    /// Evaluations without a better one that complete the job.
    pub patience: Option<u32>,
}

impl Agenda {
    /// The agenda of `spec` over a training set of `samples`.
    #[must_use]
    pub fn new(spec: &JobSpec, samples: u64) -> Self {
        let train = &spec.train;
        let first = Phase {
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

    /// What holds in `epoch` and what held before, if anything.
    fn phase(&self, epoch: Epoch) -> (Option<&Phase>, Option<&Phase>) {
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

    /// Side of the training images in `epoch`, in pixels. On a ramp it is the nearest multiple of 32,
    /// of two as near the one with an even number of 32s, as ffcv-imagenet's `get_resolution` has it.
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

    /// Samples used in `epoch`: all of them, or whole batches only.
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

    /// Batches of the present epoch that are behind, those that were left out too.
    #[must_use]
    pub fn step_of_epoch(&self, progress: &Progress) -> u64 {
        progress.cursor.div_ceil(self.global_batch(progress.epoch))
    }

    /// Optimizer updates before `epoch`.
    #[must_use]
    pub fn steps_before(&self, epoch: Epoch) -> u64 {
        let ends = self.phases.iter().skip(1).map(|next| next.from_epoch).chain([u32::MAX]);
        let of_phase = |(phase, end): (&Phase, u32)| {
            let epochs = end.min(epoch.0).saturating_sub(phase.from_epoch);
            self.steps_of(Epoch(phase.from_epoch)) * u64::from(epochs)
        };
        self.phases.iter().zip(ends).map(of_phase).sum()
    }

    /// Optimizer updates in all, if nothing ends the run early.
    #[must_use]
    pub fn total_steps(&self) -> u64 {
        self.steps_before(Epoch(self.epochs))
    }

    /// Samples of the next update: a full batch, or what is left of the epoch.
    #[must_use]
    pub fn next_batch(&self, progress: &Progress) -> u64 {
        let left = self.epoch_samples(progress.epoch).saturating_sub(progress.cursor);
        self.global_batch(progress.epoch).min(left)
    }

    /// Moves the cursor over one update.
    pub fn advance(&self, progress: &mut Progress) {
        self.pass_over(progress);
        progress.step = progress.step.next();
    }

    /// Moves the cursor over one batch that is left out.
    pub fn pass_over(&self, progress: &mut Progress) {
        progress.cursor += self.next_batch(progress);
        if progress.cursor >= self.epoch_samples(progress.epoch) {
            progress.cursor = 0;
            progress.epoch = progress.epoch.next();
        }
    }

    /// Moves the cursor over all batches that are to be left out.
    pub fn pass_over_marked(&self, progress: &mut Progress) {
        while progress.is_marked() && progress.epoch.0 < self.epochs {
            self.pass_over(progress);
        }
    }

    /// A batch that is to be left out, and the one before it: an update that spoils the weights shows in
    /// the loss of the next batch.
    pub fn with_the_one_before(&self, batch: BatchMark) -> impl Iterator<Item = BatchMark> {
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

    /// Training done so far in epochs, with fraction: the argument of every schedule.
    #[must_use]
    pub fn position_epochs(&self, progress: &Progress) -> f64 {
        let samples = self.epoch_samples(progress.epoch).max(1);
        f64::from(progress.epoch.0) + progress.cursor as f64 / samples as f64
    }

    /// What comes next. An evaluation comes before the save of the same step, so that the
    /// checkpoint carries its own accuracy.
    #[must_use]
    pub fn due(&self, progress: &Progress) -> Due {
        let at_epoch_end = progress.cursor == 0 && progress.epoch.0 > 0;
        let done = progress.epoch.0 >= self.epochs || self.ends_early(progress).is_some();
        let every = |n: u32| n > 0 && progress.epoch.0.is_multiple_of(n);
        if at_epoch_end && let Some(extent) = self.evaluation_due(progress) {
            return Due::Evaluate(extent);
        }
        let by_epoch = at_epoch_end && (done || every(self.save_every_epochs));
        let by_step = self.save_every_steps > 0
            && progress.step.0 > 0
            && progress.step.0.is_multiple_of(self.save_every_steps);
        if (by_epoch || by_step) && progress.saved != Some(progress.step) {
            return Due::Save;
        }
        match progress {
            _ if done => Due::Finish,
            progress if progress.is_marked() => Due::PassOver,
            _ => Due::Train,
        }
    }

    /// Before the end only a part may be looked at; what would end the run is looked at in full.
    fn evaluation_due(&self, progress: &Progress) -> Option<Extent> {
        let last = progress.epoch.0 >= self.epochs;
        let seen = progress.evaluated == Some(progress.epoch);
        let seen_fully = progress.evaluated_fully == Some(progress.epoch);
        let every = self.evaluate_every_epochs;
        let periodic = every > 0 && progress.epoch.0.is_multiple_of(every);
        if last || (seen && self.would_end(progress).is_some()) {
            return (!seen_fully).then_some(Extent::Full);
        }
        let extent = if self.subset { Extent::Subset } else { Extent::Full };
        (periodic && !seen).then_some(extent)
    }

    /// Why the run is complete before its last epoch, in words.
    #[must_use]
    pub fn ends_early(&self, progress: &Progress) -> Option<String> {
        let looked_at_fully = progress.evaluated_fully == Some(progress.epoch);
        let at_epoch_end = progress.cursor == 0;
        (looked_at_fully && at_epoch_end).then(|| self.would_end(progress)).flatten()
    }

    fn would_end(&self, progress: &Progress) -> Option<String> {
        let found = [progress.last_evaluation.as_ref()?].into_iter().chain(&progress.last_ema);
        if let Some(target) = &self.target
            && let Some(metric) = task::find(&target.metric)
            && let Some(value) = found
                .filter_map(|found| found.get(metric.name))
                .reduce(|raw, ema| if metric.is_better(ema, raw) { ema } else { raw })
                .filter(|value| *value == target.value || metric.is_better(*value, target.value))
        {
            return Some(format!(
                "{target} is reached: {} after epoch {}",
                task::shown(&(target.metric.clone(), value)),
                progress.epoch
            ));
        }
        let since = progress.evaluations_since_best;
        self.patience.filter(|patience| since >= *patience).map(|patience| {
            format!("limits.patience = {patience}: {since} evaluations without a better one")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(from_epoch: u32, resolution: u32, global_batch: u32, ramp_epochs: u32) -> Phase {
        Phase { from_epoch, resolution, global_batch, ramp_epochs }
    }

    fn top1(top1: f64) -> Accuracy {
        Accuracy::new(8, [("top1", top1), ("loss", 1.0 - top1)])
    }

    fn target(metric: &str, value: f64) -> Target {
        Target { metric: metric.to_owned(), value }
    }

    fn agenda() -> Agenda {
        Agenda {
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

    fn story(agenda: &Agenda) -> String {
        story_of(agenda, &mut Progress::default(), |_| 0.5)
    }

    /// Runs to the end and writes down what was done; `score` is what an evaluation in an epoch finds.
    fn story_of(agenda: &Agenda, progress: &mut Progress, score: impl Fn(u32) -> f64) -> String {
        let mut story = String::new();
        loop {
            match agenda.due(progress) {
                Due::Train => {
                    agenda.advance(progress);
                    story.push('t');
                }
                Due::PassOver => {
                    agenda.pass_over(progress);
                    story.push('-');
                }
                Due::Evaluate(extent) => {
                    let found = top1(score(progress.epoch.0));
                    progress.note_evaluation(found, None, extent);
                    story.push(if extent == Extent::Full { 'e' } else { 'q' });
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
        let agenda = Agenda { samples: 10, ..agenda() };
        let mut progress = Progress { cursor: 8, ..Progress::default() };
        assert_eq!(agenda.next_batch(&progress), 2);
        agenda.advance(&mut progress);
        assert_eq!((progress.epoch, progress.cursor), (Epoch(1), 0));
        assert_eq!(agenda.steps_of(Epoch(0)), 3);
    }

    #[test]
    fn a_phase_changes_batch_and_resolution_at_its_first_epoch() {
        let agenda = Agenda {
            epochs: 6,
            samples: 20,
            drop_last: true,
            phases: vec![phase(0, 160, 8, 0), phase(2, 192, 4, 0), phase(5, 224, 20, 0)],
            ..agenda()
        };
        let of = |epoch| {
            let epoch = Epoch(epoch);
            (agenda.resolution(epoch), agenda.steps_of(epoch), agenda.steps_before(epoch))
        };
        assert_eq!([of(0), of(1), of(2)], [(160, 2, 0), (160, 2, 2), (192, 5, 4)]);
        assert_eq!([of(4), of(5)], [(192, 5, 14), (224, 1, 19)]);
        assert_eq!(agenda.total_steps(), 20);
    }

    /// `get_resolution` of ffcv-imagenet with its 88-epoch recipe.
    #[test]
    fn a_ramp_rises_in_multiples_of_32_as_ffcv_has_it() {
        let phases = vec![phase(0, 160, 4, 0), phase(65, 192, 4, 11)];
        let agenda = Agenda { epochs: 88, phases, ..agenda() };
        let changes: Vec<u32> = (1..88)
            .filter(|e| agenda.resolution(Epoch(*e)) != agenda.resolution(Epoch(e - 1)))
            .collect();
        // 160 + 32 x 6/11 is the first beyond 176.
        assert_eq!(changes, [71]);
        assert_eq!((agenda.resolution(Epoch(65)), agenda.resolution(Epoch(76))), (160, 192));
    }

    #[test]
    fn quick_evaluations_come_before_the_last_epoch_only() {
        let agenda = Agenda { subset: true, save_every_steps: 0, ..agenda() };
        assert_eq!(story(&agenda), "ttqsttes");
    }

    #[test]
    fn a_target_seen_by_a_quick_evaluation_must_hold_in_full() {
        let agenda = Agenda {
            epochs: 9,
            subset: true,
            save_every_steps: 0,
            target: Some(target("top1", 0.7)),
            ..agenda()
        };
        let mut progress = Progress::default();
        let score = |epoch| if epoch == 2 { 0.8 } else { 0.1 };
        assert_eq!(story_of(&agenda, &mut progress, score), "ttqsttqes");
        assert!(
            agenda
                .ends_early(&progress)
                .unwrap()
                .contains("{ metric = \"top1\", value = 0.7 } is reached: top-1 80.00 %")
        );
        assert_eq!(agenda.due(&progress), Due::Finish);
    }

    #[test]
    fn patience_ends_a_run_that_gets_no_better() {
        let agenda = Agenda { epochs: 9, save_every_steps: 0, patience: Some(2), ..agenda() };
        let mut progress = Progress::default();
        let score = |epoch: u32| if epoch == 2 { 0.8 } else { 0.1 };
        assert_eq!(story_of(&agenda, &mut progress, score), "ttesttesttesttes");
        assert_eq!(progress.best.unwrap().0, Step(4));
    }

    #[test]
    fn the_better_of_raw_and_averaged_weights_counts() {
        let mut progress = Progress::default();
        progress.note_evaluation(top1(0.3), Some(top1(0.6)), Extent::Full);
        assert_eq!(progress.best.clone().unwrap().1, top1(0.6));
        progress.epoch = Epoch(1);
        progress.note_evaluation(top1(0.5), Some(top1(0.4)), Extent::Full);
        assert_eq!((progress.best.unwrap().1, progress.evaluations_since_best), (top1(0.6), 1));
    }

    #[test]
    fn a_target_of_a_metric_that_falls_is_reached_from_above() {
        let target = Some(target("loss", 0.25));
        let agenda = Agenda { epochs: 9, save_every_steps: 0, target, ..agenda() };
        let mut progress = Progress::default();
        let top1 = |epoch: u32| f64::from(epoch) * 0.25;
        assert_eq!(story_of(&agenda, &mut progress, top1), "ttesttesttes");
        assert!(agenda.ends_early(&progress).unwrap().contains("reached: loss 0.2500"));
    }

    #[test]
    fn evaluations_are_compared_by_their_first_metric() {
        let found = |loss, top1| Accuracy::new(8, [("loss", loss), ("top1", top1)]);
        let mut progress = Progress::default();
        progress.note_evaluation(found(0.5, 0.9), None, Extent::Full);
        progress.epoch = Epoch(1);
        progress.note_evaluation(found(0.4, 0.1), Some(found(0.6, 1.0)), Extent::Full);
        assert_eq!(progress.best, Some((Step(0), found(0.4, 0.1))));
        // A recipe that names another metric begins anew: what the best one lacks is worse.
        assert!(Accuracy::new(8, [("spearman", 0.1)]).is_better_than(&found(0.4, 0.1)));
    }

    #[test]
    fn what_was_written_before_metrics_had_names_is_read() {
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
        // Digests of a state have it, and an older program reads it.
        let text = r#"{"loss":0.25,"top1":0.75,"top5":0.5,"samples":8}"#;
        assert_eq!(serde_json::to_string(&classes).unwrap(), text);
    }

    #[test]
    fn the_batch_before_the_first_of_an_epoch_is_the_last_of_the_one_before() {
        let agenda = Agenda { phases: vec![phase(0, 32, 4, 0), phase(1, 32, 2, 0)], ..agenda() };
        let mark = |epoch, cursor| BatchMark { epoch: Epoch(epoch), cursor };
        let pair = |batch| agenda.with_the_one_before(batch).collect::<Vec<_>>();
        assert_eq!(pair(mark(1, 4)), [mark(1, 2), mark(1, 4)]);
        assert_eq!(pair(mark(1, 0)), [mark(0, 4), mark(1, 0)]);
        assert_eq!(pair(mark(0, 0)), [mark(0, 0)]);
    }

    #[test]
    fn marked_batches_are_passed_over_and_epoch_ends_are_kept() {
        let agenda = Agenda { save_every_steps: 0, ..agenda() };
        let mark = |epoch, cursor| BatchMark { epoch: Epoch(epoch), cursor };
        let skips = vec![mark(0, 4), mark(1, 0)];
        let mut progress = Progress { skips, ..Progress::default() };
        assert_eq!(story_of(&agenda, &mut progress, |_| 0.5), "t-es-tes");
        assert_eq!(progress.step, Step(2));
    }
}
