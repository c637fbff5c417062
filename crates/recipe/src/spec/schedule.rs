//! The learning rate.

use serde::{Deserialize, Serialize};

use super::{JobSpec, is_default, rules::Rules};

/// The learning rate as a function of the sample cursor. It is never scaled with the batch automatically.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// The same rate for the whole training.
    Constant {
        /// The rate, at least 0.
        lr: f64,
    },
    /// Linear rise from near 0 to the peak, then half a cosine down to `final_lr`.
    WarmupCosine {
        /// Highest rate, at least 0.
        peak_lr: f64,
        /// Length of the linear rise in epochs, which may be fractional; below `train.epochs`.
        #[serde(default)]
        warmup_epochs: f64,
        /// The same in steps; only one of the two may be above 0.
        #[serde(default, skip_serializing_if = "is_default")]
        warmup_steps: u64,
        /// Rate at the end of the cosine, directly after the last step.
        #[serde(default)]
        final_lr: f64,
    },
    /// Linear rise from near 0 to the peak, then linear fall to `final_lr`.
    WarmupLinear {
        /// Highest rate, at least 0.
        peak_lr: f64,
        /// Length of the linear rise in epochs, which may be fractional; below `train.epochs`.
        #[serde(default)]
        warmup_epochs: f64,
        /// The same in steps; only one of the two may be above 0.
        #[serde(default, skip_serializing_if = "is_default")]
        warmup_steps: u64,
        /// Rate at the end of the fall, directly after the last step.
        #[serde(default)]
        final_lr: f64,
    },
    /// Smith & Topin 2018 as in `torch.optim.lr_scheduler.OneCycleLR` with cosine annealing.
    OneCycle {
        /// Highest rate, at least 0.
        peak_lr: f64,
        /// Fraction of the training during which the rate rises, between 0 and 1.
        #[serde(default = "pct_start")]
        pct_start: f64,
        /// Ratio of the peak to the first rate, at least 1.
        #[serde(default = "div_factor")]
        div_factor: f64,
        /// Ratio of the first to the last rate, at least 1.
        #[serde(default = "final_div_factor")]
        final_div_factor: f64,
    },
    /// Straight lines between (epoch, rate) points, like ffcv-imagenet's "cyclic" schedule.
    PiecewiseLinear {
        /// `[[epoch, rate], …]` in increasing order of epochs, the first at epoch 0.
        points: Vec<[f64; 2]>,
    },
    /// `lr · gamma^n` after n of the milestones, as in `torch.optim.lr_scheduler.MultiStepLR`.
    Step {
        /// Rate before the first milestone, at least 0.
        lr: f64,
        /// Epochs of the drops, in increasing order, between 0 and `train.epochs`.
        milestones: Vec<f64>,
        /// Factor of each drop, above 0 and at most 1.
        #[serde(default = "gamma")]
        gamma: f64,
        /// Length of the linear rise in epochs, which may be fractional; below `train.epochs`.
        #[serde(default)]
        warmup_epochs: f64,
    },
}

fn pct_start() -> f64 {
    0.3
}
fn div_factor() -> f64 {
    25.0
}
fn final_div_factor() -> f64 {
    1e4
}
fn gamma() -> f64 {
    0.1
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let epochs = spec.train.epochs;
    let rate = |rules: &mut Rules, field, value: f64| {
        let rule = if value.is_infinite() { "must be finite" } else { "must be at least 0" };
        rules.check(value >= 0.0 && value.is_finite(), field, value, rule);
    };
    match &spec.schedule {
        Schedule::Constant { lr } => rate(rules, "schedule.lr", *lr),
        Schedule::WarmupCosine { peak_lr, warmup_epochs, warmup_steps, final_lr }
        | Schedule::WarmupLinear { peak_lr, warmup_epochs, warmup_steps, final_lr } => {
            rate(rules, "schedule.peak_lr", *peak_lr);
            rate(rules, "schedule.final_lr", *final_lr);
            warmup(rules, *warmup_epochs, epochs);
            let is_one = *warmup_epochs == 0.0 || *warmup_steps == 0;
            let both = "cannot be combined with schedule.warmup_epochs: remove one of them";
            rules.check(is_one, "schedule.warmup_steps", warmup_steps, both);
        }
        Schedule::OneCycle { peak_lr, pct_start, div_factor, final_div_factor } => {
            rate(rules, "schedule.peak_lr", *peak_lr);
            rules.between_0_and_1("schedule.pct_start", *pct_start);
            rules.at_least_1("schedule.div_factor", *div_factor);
            rules.at_least_1("schedule.final_div_factor", *final_div_factor);
        }
        Schedule::PiecewiseLinear { points } => {
            rules.check(
                points.first().is_some_and(|first| first[0] == 0.0),
                "schedule.points",
                format!("{points:?}"),
                "must begin with a point at epoch 0",
            );
            rules.check(
                points.windows(2).all(|pair| pair[0][0] < pair[1][0]),
                "schedule.points",
                format!("{points:?}"),
                "must be in increasing order of epochs",
            );
            for point in points {
                rate(rules, "schedule.points", point[1]);
            }
        }
        Schedule::Step { lr, milestones, gamma, warmup_epochs } => {
            rate(rules, "schedule.lr", *lr);
            let rising = milestones.windows(2).all(|pair| pair[0] < pair[1]);
            let within = |at: &f64| 0.0 < *at && *at < f64::from(epochs);
            rules.check(
                rising && milestones.iter().all(within),
                "schedule.milestones",
                format!("{milestones:?}"),
                &format!("must be increasing epochs between 0 and train.epochs = {epochs}"),
            );
            rules.above_0_to_1("schedule.gamma", *gamma);
            warmup(rules, *warmup_epochs, epochs);
        }
    }
}

/// Checks the length of the warm-up in epochs.
fn warmup(rules: &mut Rules, warmup_epochs: f64, epochs: u32) {
    rules.check(
        (0.0..f64::from(epochs)).contains(&warmup_epochs),
        "schedule.warmup_epochs",
        warmup_epochs,
        &format!("must be at least 0 and below train.epochs = {epochs}"),
    );
}
