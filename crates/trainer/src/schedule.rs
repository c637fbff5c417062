//! The learning rate: a pure function of the position in training.

use std::f64::consts::PI;

use baton_job::spec::Schedule;

/// Where an update stands. All lengths are in epochs, that is passes over the training data, so that
/// the rate depends on the samples seen and a change of the batch needs no other recipe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Position {
    /// Training done before this update: for update `step`, counting from 0, of equal batches
    /// `step / steps_per_epoch`.
    pub epochs: f64,
    /// Length of the whole training.
    pub total_epochs: f64,
    /// Updates per epoch.
    pub steps_per_epoch: f64,
}

/// The learning rate of the update at `position`.
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
pub fn learning_rate(schedule: &Schedule, position: Position) -> f64 {
    let Position { epochs, total_epochs, steps_per_epoch } = position;
    let update = 1.0 / steps_per_epoch;
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
