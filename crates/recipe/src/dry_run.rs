//! A dry run: the steps, learning rates and saves of a recipe on a data set of a given size, without training.
//!
//! It goes through the epochs with the same [`TrainingPlan`] and the same [`learning_rate`] as training, so its result
//! is what will happen.

use serde::Serialize;

use crate::{
    Epoch, JobSpec,
    progress::{Progress, TrainingPlan},
    schedule::{self, learning_rate},
    spec::{self, Schedule, Violation},
};

/// Most samples of a data set: with the longest `train.epochs`, every count of a run then fits into 64 bits. No data set
/// is nearly as large.
pub const MAX_SAMPLES: u64 = 1_000_000_000_000;

/// Totals of a run that does not fail or end early.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DryRun {
    /// Samples of the training set.
    pub samples: u64,
    /// Consecutive epochs with the same resolution and batch size, in order.
    pub segments: Vec<EpochSegment>,
    /// Total number of optimizer updates.
    pub steps: u64,
    /// Samples trained on, over all epochs.
    pub samples_seen: u64,
    /// Learning rate of the first update of every epoch.
    pub epoch_lrs: Vec<f64>,
    /// Highest learning rate of any update.
    pub peak_lr: f64,
    /// Epoch of the first update with the highest rate.
    pub peak_epoch: Epoch,
    /// Learning rate of the last update.
    pub last_lr: f64,
    /// Number of evaluations on a subset of the validation set.
    pub subset_evaluations: u32,
    /// Number of evaluations on the whole validation set.
    pub full_evaluations: u32,
    /// Number of checkpoints saved.
    pub saves: u64,
}

/// Consecutive epochs with the same resolution and batch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct EpochSegment {
    /// First epoch.
    pub first_epoch: Epoch,
    /// Number of epochs.
    pub epochs: u32,
    /// Side of the training images in pixels.
    pub resolution: u32,
    /// Samples per update.
    pub global_batch: u64,
    /// Samples of one forward pass, which is one micro-batch of a virtual rank.
    pub micro_batch: u64,
    /// Updates per epoch.
    pub steps_per_epoch: u64,
}

impl EpochSegment {
    /// Last epoch.
    #[must_use]
    pub fn last_epoch(&self) -> Epoch {
        Epoch(self.first_epoch.0 + self.epochs.saturating_sub(1))
    }
}

impl DryRun {
    /// Calculates the whole run on a training set of `samples`.
    ///
    /// # Errors
    /// The run is impossible, or would learn nothing: all violations.
    pub fn new(spec: &JobSpec, samples: u64) -> Result<Self, Vec<Violation>> {
        if samples > MAX_SAMPLES {
            return Err(vec![Violation {
                field: "data.train".into(),
                value: format!("{samples} samples"),
                rule: format!("must have 1..{MAX_SAMPLES}"),
            }]);
        }
        let plan = TrainingPlan::new(spec, samples);
        let segments = segments(spec, &plan);
        let mut violations = unusable_batches(spec, samples);
        if !violations.is_empty() {
            return Err(violations);
        }
        if schedule::warmup(&spec.schedule, &plan) >= f64::from(plan.epochs) {
            let (field, value) = warmup_setting(&spec.schedule);
            let rule = format!("must be below the {} steps of the run", plan.total_steps());
            violations.push(Violation { field: field.into(), value, rule });
            return Err(violations);
        }
        let rates = RunRates { spec, plan: &plan };
        let (peak_lr, peak_epoch) = rates.peak();
        if peak_lr == 0.0 {
            violations.push(Violation {
                field: "schedule".into(),
                value: "0 throughout".to_owned(),
                rule: "trains nothing: raise the learning rate".to_owned(),
            });
            return Err(violations);
        }
        let evaluations = plan.epochs.div_ceil(plan.evaluate_every_epochs.max(1));
        let full_evaluations = if plan.subset { 1 } else { evaluations };
        let epochs = || (0..plan.epochs).map(Epoch);
        Ok(Self {
            samples,
            segments,
            steps: plan.total_steps(),
            samples_seen: epochs().map(|epoch| plan.epoch_samples(epoch)).sum(),
            epoch_lrs: epochs().map(|epoch| rates.of_update(epoch, 0)).collect(),
            peak_lr,
            peak_epoch,
            last_lr: rates.last_of(Epoch(plan.epochs.saturating_sub(1))),
            subset_evaluations: evaluations - full_evaluations,
            full_evaluations,
            saves: epochs().map(|epoch| saves_in(&plan, epoch)).sum(),
        })
    }

    /// Settings that are valid, but probably not intended.
    #[must_use]
    pub fn warnings(&self, spec: &JobSpec) -> Vec<Violation> {
        let mut warnings = spec::ignored(spec);
        let mut warn = |field: &'static str, value: String, rule: String| {
            warnings.push(Violation { field: field.into(), value, rule });
        };
        let epochs = f64::from(spec.train.epochs);
        match &spec.schedule {
            Schedule::PiecewiseLinear { points } => {
                if let Some(beyond) = points.iter().find(|point| point[0] > epochs) {
                    warn(
                        "schedule.points",
                        format!("{beyond:?}"),
                        format!(
                            "is after train.epochs = {epochs}: the rate never reaches this point"
                        ),
                    );
                }
            }
            schedule => {
                let plan = TrainingPlan::new(spec, self.samples);
                if schedule::warmup(schedule, &plan) > epochs / 2.0 {
                    let (field, value) = warmup_setting(schedule);
                    let steps = self.steps;
                    let rule = format!("is more than half of the {epochs} epochs, {steps} steps");
                    warn(field, value, rule);
                }
            }
        }
        if let Some(ema) = &spec.ema {
            let steps = f64::from(ema.every_steps) / (1.0 - ema.decay);
            if steps > self.steps as f64 {
                warn(
                    "ema.decay",
                    ema.decay.to_string(),
                    format!(
                        "averages over {steps:.0} steps, but there are only {}: the average still \
                         contains much of the first weights",
                        self.steps
                    ),
                );
            }
        }
        if spec.guard.enabled && u64::from(spec.guard.window) >= self.steps {
            warn(
                "guard.window",
                spec.guard.window.to_string(),
                format!(
                    "is not below the {} steps of the run: a rise of the loss is never detected",
                    self.steps
                ),
            );
        }
        warnings
    }
}

/// Violations by batches that give a micro-batch fewer samples than BatchNorm needs, including the last batches of
/// epochs.
#[must_use]
pub fn unusable_batches(spec: &JobSpec, samples: u64) -> Vec<Violation> {
    let plan = TrainingPlan::new(spec, samples);
    let parts = u64::from(spec.train.virtual_ranks) * u64::from(spec.train.grad_accumulation);
    let mut violations: Vec<Violation> = Vec::new();
    for (number, phase) in plan.phases.iter().enumerate() {
        let batch = u64::from(phase.global_batch);
        let used = plan.epoch_samples(Epoch(phase.from_epoch));
        let field = if number == 0 { "train.global_batch" } else { "train.phases.global_batch" };
        if used == 0 {
            violations.push(Violation {
                field: field.into(),
                value: batch.to_string(),
                rule: format!("is more than the {samples} samples of data.train: lower it"),
            });
            continue;
        }
        let last = used % batch;
        // BatchNorm cannot compute a variance of one sample.
        let least = if spec.model.arch.is_causal_lm() { 1 } else { 2 };
        if last != 0 && last < least * parts {
            violations.push(Violation {
                field: "data.drop_last".into(),
                value: "false".to_owned(),
                rule: format!(
                    "leaves a last batch of {last} of {samples} samples, too few for {parts} \
                     micro-batches (train.virtual_ranks x train.grad_accumulation) of at least {least}: set \
                     it to true"
                ),
            });
        }
    }
    violations
}

/// The setting of the length of the warm-up, and its value.
fn warmup_setting(schedule: &Schedule) -> (&'static str, String) {
    match schedule {
        Schedule::WarmupCosine { warmup_steps: steps @ 1.., .. }
        | Schedule::WarmupLinear { warmup_steps: steps @ 1.., .. } => {
            ("schedule.warmup_steps", steps.to_string())
        }
        Schedule::WarmupCosine { warmup_epochs, .. }
        | Schedule::WarmupLinear { warmup_epochs, .. }
        | Schedule::Step { warmup_epochs, .. } => {
            ("schedule.warmup_epochs", warmup_epochs.to_string())
        }
        _ => ("schedule", "without a warm-up".to_owned()),
    }
}

fn segments(spec: &JobSpec, plan: &TrainingPlan) -> Vec<EpochSegment> {
    let parts = u64::from(spec.train.virtual_ranks) * u64::from(spec.train.grad_accumulation);
    let mut segments: Vec<EpochSegment> = Vec::new();
    for epoch in (0..plan.epochs).map(Epoch) {
        let (resolution, global_batch) = (plan.resolution(epoch), plan.global_batch(epoch));
        match segments.last_mut() {
            Some(last) if (last.resolution, last.global_batch) == (resolution, global_batch) => {
                last.epochs += 1;
            }
            _ => segments.push(EpochSegment {
                first_epoch: epoch,
                epochs: 1,
                resolution,
                global_batch,
                micro_batch: global_batch / parts.max(1),
                steps_per_epoch: plan.steps_of(epoch),
            }),
        }
    }
    segments
}

/// Number of checkpoints in and directly after `epoch`, one for each step at which [`TrainingPlan::due`] saves.
fn saves_in(plan: &TrainingPlan, epoch: Epoch) -> u64 {
    let (before, after) = (plan.steps_before(epoch), plan.steps_before(epoch.next()));
    let (by_step, on_a_step) = match plan.save_every_steps {
        0 => (0, false),
        every => (after / every - before / every, after.is_multiple_of(every)),
    };
    let completed = epoch.0 + 1;
    let every = plan.save_every_epochs;
    let by_epoch = completed == plan.epochs || (every > 0 && completed.is_multiple_of(every));
    by_step + u64::from(by_epoch && !on_a_step)
}

/// Calculates the learning rates of a run's updates.
#[derive(Clone, Copy)]
struct RunRates<'run> {
    spec: &'run JobSpec,
    plan: &'run TrainingPlan,
}

impl RunRates<'_> {
    /// Learning rate of an update of an epoch; updates count from 0.
    fn of_update(&self, epoch: Epoch, update: u64) -> f64 {
        let cursor = update * self.plan.global_batch(epoch);
        learning_rate(self.spec, self.plan, &Progress { epoch, cursor, ..Progress::default() })
    }

    fn last_of(&self, epoch: Epoch) -> f64 {
        self.of_update(epoch, self.plan.steps_of(epoch).saturating_sub(1))
    }

    /// The highest rate, and its epoch. Between two turns a schedule only rises or only falls, so only the first and
    /// last update of an epoch and the updates around the turns can have the highest rate.
    fn peak(&self) -> (f64, Epoch) {
        let ends = (0..self.plan.epochs)
            .map(Epoch)
            .flat_map(|epoch| [(epoch, self.of_update(epoch, 0)), (epoch, self.last_of(epoch))]);
        let turns = schedule::turns(&self.spec.schedule, self.plan);
        let within = turns.into_iter().filter(|turn| *turn < f64::from(self.plan.epochs));
        let around = within.flat_map(|turn| {
            let epoch = Epoch(turn as u32);
            let cursor = turn.fract() * self.plan.epoch_samples(epoch) as f64;
            let update = cursor as u64 / self.plan.global_batch(epoch);
            let near = update.saturating_sub(1)..(update + 2).min(self.plan.steps_of(epoch));
            near.map(move |update| (epoch, self.of_update(epoch, update)))
        });
        let mut peak = (0.0, Epoch(0));
        for (epoch, rate) in ends.chain(around) {
            if rate > peak.0 || (rate == peak.0 && epoch < peak.1) {
                peak = (rate, epoch);
            }
        }
        peak
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        kit::recipe,
        progress::{Accuracy, Due, Extent},
    };

    fn spec(overrides: &[&str]) -> JobSpec {
        recipe(&["train={ epochs=4, global_batch=16, resolution=64, virtual_ranks=2 }"], overrides)
    }

    fn text(violations: &[Violation]) -> String {
        violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    fn refused(overrides: &[&str], samples: u64) -> String {
        text(&DryRun::new(&spec(overrides), samples).unwrap_err())
    }

    fn warned(overrides: &[&str], samples: u64) -> String {
        let spec = spec(overrides);
        text(&DryRun::new(&spec, samples).unwrap().warnings(&spec))
    }

    /// The same result, by simulating every update like training.
    fn by_every_update(spec: &JobSpec, samples: u64) -> DryRun {
        let plan = TrainingPlan::new(spec, samples);
        let mut run = DryRun {
            samples,
            segments: segments(spec, &plan),
            steps: 0,
            samples_seen: 0,
            epoch_lrs: Vec::new(),
            peak_lr: 0.0,
            peak_epoch: Epoch(0),
            last_lr: 0.0,
            subset_evaluations: 0,
            full_evaluations: 0,
            saves: 0,
        };
        let mut progress = Progress::default();
        loop {
            match plan.due(&progress) {
                Due::Train => {
                    run.last_lr = learning_rate(spec, &plan, &progress);
                    if progress.cursor == 0 {
                        run.epoch_lrs.push(run.last_lr);
                    }
                    if run.last_lr > run.peak_lr {
                        (run.peak_lr, run.peak_epoch) = (run.last_lr, progress.epoch);
                    }
                    run.samples_seen += plan.next_batch(&progress);
                    plan.advance(&mut progress);
                    run.steps += 1;
                }
                Due::Evaluate(extent) => {
                    match extent {
                        Extent::Subset => run.subset_evaluations += 1,
                        Extent::Full => run.full_evaluations += 1,
                    }
                    progress.record_evaluation(Accuracy::default(), None, extent);
                }
                Due::Save => {
                    progress.saved = Some(progress.step);
                    run.saves += 1;
                }
                Due::Finish => return run,
                Due::SkipBatch => unreachable!("no batch is flagged"),
            }
        }
    }

    fn schedules() -> impl Strategy<Value = String> {
        prop_oneof![
            Just("{ kind = 'constant', lr = 0.5 }".to_owned()),
            (0.0..3.9).prop_map(|warmup| format!(
                "{{ kind = 'warmup_cosine', peak_lr = 0.8, warmup_epochs = {warmup:?} }}"
            )),
            (0.01..0.99).prop_map(|rise| format!(
                "{{ kind = 'one_cycle', peak_lr = 0.8, pct_start = {rise:?} }}"
            )),
            (0.1..6.0, 0.0..1.0).prop_map(|(turn, end)| format!(
                "{{ kind = 'piecewise_linear', points = [[0.0, 0.1], [{turn:?}, 1.0], [9.0, {end:?}]] }}"
            )),
            (0.1..3.9, 0.0..3.9).prop_map(|(drop, warmup)| format!(
                "{{ kind = 'step', lr = 0.5, milestones = [{drop:?}], warmup_epochs = {warmup:?} }}"
            )),
        ]
    }

    proptest! {
        #[test]
        fn the_dry_run_equals_a_simulation_of_every_update(
            schedule in schedules(), samples in 48u64..400, drop_last in any::<bool>(),
            phased in any::<bool>(), evaluate in 1u32..6, epochs in 0u32..6, steps in 0u64..30,
        ) {
            let phases = "[{ from_epoch = 1, resolution = 128, global_batch = 48, ramp_epochs = 3 }]";
            let spec = spec(&[
                &format!("schedule={schedule}"),
                &format!("data.drop_last={drop_last}"),
                &format!("train.phases={}", if phased { phases } else { "[]" }),
                &format!("evaluation={{ every_epochs = {evaluate}, subset = 0.5 }}"),
                &format!("checkpoint={{ every_epochs = {epochs}, every_steps = {steps} }}"),
            ]);
            prop_assume!(unusable_batches(&spec, samples).is_empty());
            prop_assert_eq!(DryRun::new(&spec, samples).unwrap(), by_every_update(&spec, samples));
        }
    }

    #[test]
    fn a_ramp_is_one_segment_per_resolution() {
        let phases = "train.phases=[{ from_epoch = 1, resolution = 128, global_batch = 32, \
                      ramp_epochs = 2 }]";
        let run = DryRun::new(&spec(&[phases]), 160).unwrap();
        let shown: Vec<_> = run
            .segments
            .iter()
            .map(|s| (s.first_epoch.0, s.last_epoch().0, s.resolution, s.micro_batch))
            .collect();
        assert_eq!(shown, [(0, 0, 64, 8), (1, 1, 64, 16), (2, 2, 96, 16), (3, 3, 128, 16)]);
        assert_eq!((run.steps, run.samples_seen), (10 + 3 * 5, 4 * 160));
    }

    #[test]
    fn a_data_set_below_one_batch_is_refused() {
        assert_eq!(
            refused(&[], 15),
            "train.global_batch = 16: is more than the 15 samples of data.train: lower it"
        );
        let phases = "train.phases=[{ from_epoch = 1, resolution = 64, global_batch = 32 }]";
        assert!(refused(&[phases], 31).starts_with("train.phases.global_batch = 32: is more than"));
    }

    #[test]
    fn a_number_of_samples_that_would_overflow_is_refused() {
        for samples in [MAX_SAMPLES + 1, u64::MAX] {
            let expected = format!("data.train = {samples} samples: must have 1..{MAX_SAMPLES}");
            assert_eq!(refused(&[], samples), expected);
        }
        let long = spec(&["train.epochs=1000000"]);
        let run = DryRun::new(&long, MAX_SAMPLES).unwrap();
        assert_eq!(run.samples_seen, MAX_SAMPLES * 1_000_000);
    }

    #[test]
    fn a_last_batch_without_two_samples_for_every_micro_batch_is_refused() {
        let accumulated = ["data.drop_last=false", "train.grad_accumulation=2"];
        assert!(refused(&accumulated, 16 + 7).starts_with(
            "data.drop_last = false: leaves a last batch of 7 of 23 samples, too few for 4 micro-batches"
        ));
        assert!(DryRun::new(&spec(&accumulated), 16 + 8).is_ok());
        assert!(DryRun::new(&spec(&["train.grad_accumulation=2"]), 16 + 7).is_ok());
    }

    #[test]
    fn a_rate_of_zero_throughout_is_refused() {
        assert_eq!(
            refused(&["schedule.lr=0.0"], 160),
            "schedule = 0 throughout: trains nothing: raise the learning rate"
        );
    }

    #[test]
    fn a_warmup_that_never_ends_is_refused() {
        let schedule = "schedule={ kind = 'warmup_linear', peak_lr = 0.1, warmup_steps = 40 }";
        assert_eq!(
            refused(&[schedule], 160),
            "schedule.warmup_steps = 40: must be below the 40 steps of the run"
        );
    }

    #[test]
    fn settings_that_are_probably_not_intended_are_warned_about() {
        let points = "schedule={ kind = 'piecewise_linear', points = [[0.0, 0.1], [16.0, 0.0]] }";
        for (entries, expected) in [
            (&[points][..], "schedule.points = [16.0, 0.0]: is after train.epochs = 4"),
            (
                &["schedule={ kind = 'warmup_cosine', peak_lr = 0.1, warmup_epochs = 2.5 }"],
                "schedule.warmup_epochs = 2.5: is more than half of the 4 epochs, 40 steps",
            ),
            (
                &["ema.decay=0.99"],
                "ema.decay = 0.99: averages over 100 steps, but there are only 40",
            ),
            (
                &["schedule={ kind = 'warmup_linear', peak_lr = 0.1, warmup_steps = 25 }"],
                "schedule.warmup_steps = 25: is more than half of the 4 epochs, 40 steps",
            ),
            (&["guard.window=40"], "guard.window = 40: is not below the 40 steps of the run"),
        ] {
            let warnings = warned(entries, 160);
            assert!(warnings.starts_with(expected), "{warnings}");
        }
        assert_eq!(warned(&[], 160), "");
    }
}
