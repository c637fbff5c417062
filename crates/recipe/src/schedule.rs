//! The learning rate, as a pure function of the position in training.

use std::f64::consts::PI;

use crate::{
    Epoch, JobSpec,
    progress::{Progress, TrainingPlan},
    spec::Schedule,
};

/// Position of an update in training, in epochs.
#[derive(Clone, Copy, Debug)]
struct UpdatePosition {
    /// Start of the update.
    start: f64,
    /// End of the update.
    end: f64,
}

/// The learning rate of the update that begins at `progress`.
///
/// Positions are in epochs, so the rate depends on the number of samples seen; a resume or another batch size does not
/// change it. Below, `s` is the number of an update, from 0, and `n` the number of updates per epoch.
///
/// - Constant.
/// - Warm-up and cosine: update `s` of `w` warm-up updates has the rate `peak · (s + 1) / w` (Goyal et al.
///   2017, §2.2, without an update at rate 0); the others follow half a cosine from the peak to
///   `final_lr` (Loshchilov & Hutter 2016, eq. 5, one cycle), which is reached one update after
///   the last.
/// - Warm-up and linear: the same rise, then a straight line to `final_lr`, which is reached one update after the last.
///   The fall is that of transformers' `get_linear_schedule_with_warmup`; its rise begins with a rate of 0.
/// - One cycle: `torch.optim.lr_scheduler.OneCycleLR` with `anneal_strategy="cos"`,
///   `three_phase=False`, `cycle_momentum=False`: of `n` updates, number `pct_start · n - 1` has the
///   peak and number `n - 1` the final rate.
/// - Piecewise linear: `numpy.interp` at the position; constant beyond the last point.
/// - Step: `torch.optim.lr_scheduler.MultiStepLR` with milestones in epochs; the warm-up as above.
///
/// The result is multiplied by `guard.lr_factor` for every divergence whose remedy was to lower the rate.
#[must_use]
pub fn learning_rate(spec: &JobSpec, plan: &TrainingPlan, progress: &Progress) -> f64 {
    let samples = plan.epoch_samples(progress.epoch).max(1) as f64;
    let at = plan.position_epochs(progress);
    // The length of a full batch, also for the shorter last batch, so that the rate has no kink there.
    let end = at + plan.global_batch(progress.epoch) as f64 / samples;
    let cuts = i32::try_from(progress.lr_cuts).unwrap_or(i32::MAX);
    scheduled(&spec.schedule, plan, UpdatePosition { start: at, end })
        * spec.guard.lr_factor.powi(cuts)
}

fn scheduled(schedule: &Schedule, plan: &TrainingPlan, position: UpdatePosition) -> f64 {
    let total = f64::from(plan.epochs);
    let rise = warmup(schedule, plan);
    let fallen = || fraction(position.start - rise, total - rise);
    match schedule {
        Schedule::WarmupCosine { peak_lr, .. }
        | Schedule::WarmupLinear { peak_lr, .. }
        | Schedule::Step { lr: peak_lr, .. }
            if position.start < rise =>
        {
            peak_lr * fraction(position.end, rise)
        }
        Schedule::Constant { lr } => *lr,
        Schedule::WarmupCosine { peak_lr, final_lr, .. } => {
            half_cosine(*peak_lr, *final_lr, fallen())
        }
        Schedule::WarmupLinear { peak_lr, final_lr, .. } => {
            peak_lr + (final_lr - peak_lr) * fallen()
        }
        Schedule::OneCycle { peak_lr, pct_start, div_factor, final_div_factor } => {
            let start_lr = peak_lr / div_factor;
            let peak_at = pct_start * total - update_length(plan, pct_start * total);
            let end_at = total - update_length(plan, total);
            if position.start <= peak_at {
                half_cosine(start_lr, *peak_lr, fraction(position.start, peak_at))
            } else {
                let done = fraction(position.start - peak_at, end_at - peak_at);
                half_cosine(*peak_lr, start_lr / final_div_factor, done)
            }
        }
        Schedule::PiecewiseLinear { points } => interpolate(points, position.start),
        Schedule::Step { lr, milestones, gamma, .. } => {
            let passed =
                milestones.iter().filter(|milestone| **milestone <= position.start).count();
            lr * gamma.powi(i32::try_from(passed).unwrap_or(i32::MAX))
        }
    }
}

/// Positions, in epochs, at which a schedule may jump or turn from rising to falling. Between two of them it only rises
/// or only falls.
pub(crate) fn turns(schedule: &Schedule, plan: &TrainingPlan) -> Vec<f64> {
    match schedule {
        Schedule::Constant { .. } => Vec::new(),
        Schedule::WarmupCosine { .. } | Schedule::WarmupLinear { .. } => {
            vec![warmup(schedule, plan)]
        }
        Schedule::OneCycle { pct_start, .. } => {
            let rise_end = pct_start * f64::from(plan.epochs);
            vec![rise_end - update_length(plan, rise_end)]
        }
        Schedule::PiecewiseLinear { points } => points.iter().map(|point| point[0]).collect(),
        Schedule::Step { milestones, warmup_epochs, .. } => {
            milestones.iter().chain([warmup_epochs]).copied().collect()
        }
    }
}

/// The learning rate for another batch by the linear scaling rule: if the batch is multiplied by k, so is the rate
/// (Goyal et al. 2017, §2.1). Only a suggestion: it is never applied automatically.
#[must_use]
pub fn linearly_scaled(lr: f64, global_batch: u64, other_batch: u64) -> f64 {
    lr * other_batch as f64 / global_batch.max(1) as f64
}

/// Length of the warm-up in epochs; 0 for a schedule that has none.
pub(crate) fn warmup(schedule: &Schedule, plan: &TrainingPlan) -> f64 {
    match schedule {
        Schedule::WarmupCosine { warmup_epochs, warmup_steps, .. }
        | Schedule::WarmupLinear { warmup_epochs, warmup_steps, .. } => {
            rise(plan, *warmup_epochs, *warmup_steps)
        }
        Schedule::Step { warmup_epochs, .. } => *warmup_epochs,
        _ => 0.0,
    }
}

/// Length of the rise in epochs, from one of the two units. Steps are those of the first epoch.
fn rise(plan: &TrainingPlan, epochs: f64, steps: u64) -> f64 {
    match steps {
        0 => epochs,
        steps => {
            let (per_epoch, samples) =
                (plan.steps_of(Epoch(0)).max(1), plan.epoch_samples(Epoch(0)));
            // The last batch of an epoch may be smaller.
            let rest = (steps % per_epoch * plan.global_batch(Epoch(0))).min(samples);
            (steps / per_epoch) as f64 + rest as f64 / samples.max(1) as f64
        }
    }
}

/// Length of the update that ends at `position`, in epochs.
fn update_length(plan: &TrainingPlan, position: f64) -> f64 {
    let epoch = Epoch((position.ceil() as u32).saturating_sub(1));
    1.0 / plan.steps_of(epoch).max(1) as f64
}

/// `part / whole`, at most 1; 1 if `whole` is 0.
fn fraction(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { (part / whole).min(1.0) } else { 1.0 }
}

/// Half a cosine from `start` at `done = 0` to `end` at `done = 1`.
fn half_cosine(start: f64, end: f64, done: f64) -> f64 {
    end + (start - end) / 2.0 * (1.0 + libm::cos(PI * done))
}

fn interpolate(points: &[[f64; 2]], at: f64) -> f64 {
    let after = points.partition_point(|point| point[0] <= at);
    match (after.checked_sub(1).and_then(|before| points.get(before)), points.get(after)) {
        (Some([x0, y0]), Some([x1, y1])) => y0 + (y1 - y0) * (at - x0) / (x1 - x0),
        (Some([_, y]), None) | (None, Some([_, y])) => *y,
        (None, None) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kit::recipe;

    fn plan(epochs: u32, steps_per_epoch: u64) -> TrainingPlan {
        let spec = recipe(&["train.global_batch=8"], &[]);
        TrainingPlan { epochs, ..TrainingPlan::new(&spec, 8 * steps_per_epoch) }
    }

    fn rate_at(schedule: &Schedule, plan: &TrainingPlan, at: f64, steps_per_epoch: u64) -> f64 {
        scheduled(
            schedule,
            plan,
            UpdatePosition { start: at, end: at + 1.0 / steps_per_epoch as f64 },
        )
    }

    /// The rates of all updates of `epochs` epochs.
    fn rates(schedule: &Schedule, epochs: u32, steps_per_epoch: u64) -> Vec<f64> {
        let plan = plan(epochs, steps_per_epoch);
        let rate = |step| {
            let at = step as f64 / steps_per_epoch as f64;
            rate_at(schedule, &plan, at, steps_per_epoch)
        };
        (0..u64::from(epochs) * steps_per_epoch).map(rate).collect()
    }

    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-9, "{found} is not {expected}");
        }
    }

    fn cosine(warmup_epochs: f64, warmup_steps: u64, final_lr: f64) -> Schedule {
        Schedule::WarmupCosine { peak_lr: 1.0, warmup_epochs, warmup_steps, final_lr }
    }

    #[test]
    fn a_warmup_in_steps_is_the_same_as_that_in_epochs() {
        assert_close(&rates(&cosine(0.0, 6, 0.2), 3, 4), &rates(&cosine(1.5, 0, 0.2), 3, 4));

        // An epoch of 100 samples is three batches of 32 and one of 4.
        let spec = recipe(
            &["train={ epochs=2, global_batch=32, resolution=32 }", "data.drop_last=false"],
            &["schedule={ kind='warmup_cosine', peak_lr=1.0, warmup_steps=3 }"],
        );
        let plan = TrainingPlan::new(&spec, 100);
        let rate =
            |cursor| learning_rate(&spec, &plan, &Progress { cursor, ..Progress::default() });
        assert_close(&[0, 32, 64].map(rate), &[1.0 / 3.0, 2.0 / 3.0, 1.0]);
    }

    #[test]
    fn warmup_rises_in_equal_parts_and_the_line_falls_to_the_final_rate() {
        let schedule = Schedule::WarmupLinear {
            peak_lr: 1.0,
            warmup_epochs: 0.0,
            warmup_steps: 2,
            final_lr: 0.2,
        };
        assert_close(&rates(&schedule, 2, 3), &[0.5, 1.0, 1.0, 0.8, 0.6, 0.4]);
    }

    #[test]
    fn constant_never_changes() {
        assert_close(&rates(&Schedule::Constant { lr: 0.3 }, 2, 2), &[0.3; 4]);
    }

    #[test]
    fn warmup_rises_in_equal_parts_and_the_cosine_falls_to_the_final_rate() {
        let schedule = cosine(1.0, 0, 0.2);
        let half = |done: f64| 0.2 + 0.4 * (1.0 + (PI * done).cos());
        let expected = [0.25, 0.5, 0.75, 1.0, 1.0, half(0.25), 0.6, half(0.75)];
        assert_close(&rates(&schedule, 2, 4), &expected);
        assert_close(&[rate_at(&schedule, &plan(2, 4), 2.0, 4)], &[0.2]);
    }

    #[test]
    fn warmup_may_end_within_an_epoch_or_be_absent() {
        let warmup = |epochs| cosine(epochs, 0, 0.0);
        let ragged = rates(&warmup(0.3), 1, 5);
        assert_close(&ragged[..2], &[0.2 / 0.3, 1.0]);
        assert!(ragged.windows(2).skip(1).all(|pair| pair[1] < pair[0]), "{ragged:?}");
        assert_close(&rates(&warmup(0.0), 1, 2), &[1.0, 0.5]);
    }

    /// Values printed by `torch.optim.lr_scheduler.OneCycleLR` (torch 2.11.0) with
    /// `cycle_momentum=False`.
    #[test]
    fn one_cycle_equals_torch_at_every_update() {
        let schedule = Schedule::OneCycle {
            peak_lr: 0.5,
            pct_start: 0.3,
            div_factor: 25.0,
            final_div_factor: 1e4,
        };
        let torch = [
            0.020000000000000018,
            0.17489482710979154,
            0.43964257956106434,
            0.49720771772545586,
            0.46650648492070584,
            0.4058728269748815,
            0.32368949884755166,
            0.23131855133348753,
            0.14153049910434962,
            0.0667387650944153,
            0.01728349371269761,
            2e-06,
        ];
        for epochs in [1, 2, 3, 4, 6, 12] {
            assert_close(&rates(&schedule, epochs, 12 / u64::from(epochs)), &torch);
        }

        // Here, one update has exactly the peak rate.
        let schedule = Schedule::OneCycle {
            peak_lr: 2.0,
            pct_start: 0.5,
            div_factor: 10.0,
            final_div_factor: 100.0,
        };
        let torch = [
            0.19999999999999996,
            0.46360389693210724,
            1.1,
            1.7363961030678927,
            2.0,
            1.8092079773805725,
            1.3097079773805724,
            0.6922920226194276,
            0.1927920226194276,
            0.002,
        ];
        for epochs in [1, 2, 5, 10] {
            assert_close(&rates(&schedule, epochs, 10 / u64::from(epochs)), &torch);
        }
    }

    #[test]
    fn one_cycle_of_a_single_update_is_finite() {
        let schedule = Schedule::OneCycle {
            peak_lr: 1.0,
            pct_start: 0.3,
            div_factor: 25.0,
            final_div_factor: 1e4,
        };
        assert!(rates(&schedule, 1, 1)[0].is_finite());
    }

    #[test]
    fn piecewise_linear_joins_its_points_and_stays_at_the_last() {
        let points = vec![[0.0, 0.2], [1.0, 1.0], [1.5, 0.0]];
        let schedule = Schedule::PiecewiseLinear { points };
        let expected = [0.2, 0.4, 0.6, 0.8, 1.0, 0.5, 0.0, 0.0];
        assert_close(&rates(&schedule, 2, 4), &expected);
    }

    #[test]
    fn step_drops_at_its_milestones_after_the_warmup() {
        let schedule =
            Schedule::Step { lr: 1.0, milestones: vec![1.0, 1.5], gamma: 0.1, warmup_epochs: 0.5 };
        assert_close(&rates(&schedule, 2, 4), &[0.5, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]);
    }

    #[test]
    fn neither_a_resume_nor_another_batch_size_changes_the_rate() {
        let cosine = "schedule={ kind='warmup_cosine', peak_lr=0.8, warmup_epochs=2.0 }";
        let one_cycle = "schedule={ kind='one_cycle', peak_lr=0.8 }";
        for schedule in [cosine, one_cycle] {
            let rate = |phases: &str, epoch, cursor| {
                let train = "train={ epochs=10, global_batch=8, resolution=160 }";
                let spec = recipe(&[train, schedule], &[&format!("train.phases={phases}")]);
                let plan = TrainingPlan::new(&spec, 160);
                let progress = Progress { epoch: Epoch(epoch), cursor, ..Progress::default() };
                learning_rate(&spec, &plan, &progress)
            };
            let halved = "[{from_epoch=5, resolution=192, global_batch=16}]";
            for (epoch, cursor) in [(2, 80), (5, 0), (5, 16), (7, 48)] {
                let (one, other) = (rate("[]", epoch, cursor), rate(halved, epoch, cursor));
                // The peak is one update before its epoch's end, and updates have become longer.
                assert!((one - other).abs() < 0.8 * 0.02, "{schedule} {epoch} {one} {other}");
            }
        }
    }

    #[test]
    fn linear_scaling_keeps_rate_per_sample() {
        assert_eq!(linearly_scaled(0.8, 2048, 4096), 1.6);
        assert_eq!(linearly_scaled(0.8, 2048, 512), 0.2);
    }

    #[test]
    fn every_lr_cut_lowers_the_whole_schedule() {
        let spec = recipe(&["train.global_batch=8", "schedule.lr=1.0"], &["guard.lr_factor=0.3"]);
        let progress = Progress { lr_cuts: 2, ..Progress::default() };
        let rate = learning_rate(&spec, &TrainingPlan::new(&spec, 80), &progress);
        assert!((rate - 0.09).abs() < 1e-12, "{rate}");
    }
}
