//! The learning rate: a pure function of the position in training.

use std::f64::consts::PI;

use baton_job::spec::Schedule;

/// The learning rate of the update that begins `position_epochs` passes over the training data after
/// the start, of `total_epochs`.
///
/// Everything is measured in epochs, so that the rate follows the samples seen: update `s`, counting
/// from 0, of equal ones begins at `s / steps_per_epoch`.
///
/// - Constant.
/// - Warm-up and cosine: update `s` of `w` warm-up updates gets `peak · (s + 1) / w` (Goyal et al.
///   2017, §2.2, without an update at rate 0); the rest follows half a cosine from the peak to
///   `final_lr` (Loshchilov & Hutter 2016, eq. 5, one cycle), which it would reach one update after
///   the last.
/// - One cycle: `torch.optim.lr_scheduler.OneCycleLR` with `anneal_strategy="cos"`,
///   `three_phase=False`, `cycle_momentum=False`: of `n` updates, number `pct_start · n - 1` has the
///   peak and number `n - 1` the final rate.
/// - Piecewise linear: `numpy.interp` at the position; constant beyond the last point.
#[must_use]
pub fn learning_rate(
    schedule: &Schedule,
    position_epochs: f64,
    total_epochs: f64,
    steps_per_epoch: u64,
) -> f64 {
    let epochs = position_epochs;
    // Length of one update.
    let update = 1.0 / steps_per_epoch as f64;
    match schedule {
        Schedule::Constant { lr } => *lr,
        Schedule::WarmupCosine { peak_lr, warmup_epochs, final_lr } => {
            if epochs < *warmup_epochs {
                peak_lr * share(epochs + update, *warmup_epochs)
            } else {
                let done = share(epochs - warmup_epochs, total_epochs - warmup_epochs);
                half_cosine(*peak_lr, *final_lr, done)
            }
        }
        Schedule::OneCycle { peak_lr, pct_start, div_factor, final_div_factor } => {
            let start_lr = peak_lr / div_factor;
            let peak_at = pct_start * total_epochs - update;
            let end_at = total_epochs - update;
            if epochs <= peak_at {
                half_cosine(start_lr, *peak_lr, share(epochs, peak_at))
            } else {
                let done = share(epochs - peak_at, end_at - peak_at);
                half_cosine(*peak_lr, start_lr / final_div_factor, done)
            }
        }
        Schedule::PiecewiseLinear { points } => interpolate(points, epochs),
    }
}

/// `part / whole`, at most 1; nothing of nothing is all of it.
fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { (part / whole).min(1.0) } else { 1.0 }
}

/// From `start` at `done = 0` to `end` at `done = 1`.
fn half_cosine(start: f64, end: f64, done: f64) -> f64 {
    end + (start - end) / 2.0 * (1.0 + (PI * done).cos())
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

    /// The rates of all updates of `epochs` epochs.
    fn rates(schedule: &Schedule, epochs: u64, steps_per_epoch: u64) -> Vec<f64> {
        let rate = |step| {
            let position = step as f64 / steps_per_epoch as f64;
            learning_rate(schedule, position, epochs as f64, steps_per_epoch)
        };
        (0..epochs * steps_per_epoch).map(rate).collect()
    }

    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-9, "{found} is not {expected}");
        }
    }

    #[test]
    fn constant_never_changes() {
        assert_close(&rates(&Schedule::Constant { lr: 0.3 }, 2, 2), &[0.3; 4]);
    }

    #[test]
    fn warmup_rises_in_equal_parts_and_the_cosine_falls_to_the_final_rate() {
        let schedule = Schedule::WarmupCosine { peak_lr: 1.0, warmup_epochs: 1.0, final_lr: 0.2 };
        let half = |done: f64| 0.2 + 0.4 * (1.0 + (PI * done).cos());
        let expected = [0.25, 0.5, 0.75, 1.0, 1.0, half(0.25), 0.6, half(0.75)];
        assert_close(&rates(&schedule, 2, 4), &expected);
        assert_close(&[learning_rate(&schedule, 2.0, 2.0, 4)], &[0.2]);
    }

    #[test]
    fn warmup_may_end_within_an_epoch_or_not_be_there() {
        let warmup =
            |warmup_epochs| Schedule::WarmupCosine { peak_lr: 1.0, warmup_epochs, final_lr: 0.0 };
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
            assert_close(&rates(&schedule, epochs, 12 / epochs), &torch);
        }

        // Here an update has exactly the peak rate.
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
            assert_close(&rates(&schedule, epochs, 10 / epochs), &torch);
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
}
