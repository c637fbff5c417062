//! The learning rate.

use super::Rules;
use crate::spec::{JobSpec, Schedule};

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let epochs = spec.train.epochs;
    let rate = |rules: &mut Rules, field, value: f64| {
        rules.check(value >= 0.0 && value.is_finite(), field, value, "must be at least 0");
    };
    match &spec.schedule {
        Schedule::Constant { lr } => rate(rules, "schedule.lr", *lr),
        Schedule::WarmupCosine { peak_lr, warmup_epochs, final_lr } => {
            rate(rules, "schedule.peak_lr", *peak_lr);
            rate(rules, "schedule.final_lr", *final_lr);
            rules.warmup(*warmup_epochs, epochs);
        }
        Schedule::OneCycle { peak_lr, pct_start, div_factor, final_div_factor } => {
            rate(rules, "schedule.peak_lr", *peak_lr);
            rules.check(
                *pct_start > 0.0 && *pct_start < 1.0,
                "schedule.pct_start",
                pct_start,
                "must be between 0 and 1",
            );
            rules.check(
                *div_factor >= 1.0,
                "schedule.div_factor",
                div_factor,
                "must be at least 1",
            );
            rules.check(
                *final_div_factor >= 1.0,
                "schedule.final_div_factor",
                final_div_factor,
                "must be at least 1",
            );
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
                "must be in rising order of epoch",
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
                &format!("must be rising epochs between 0 and train.epochs = {epochs}"),
            );
            rules.check(
                0.0 < *gamma && *gamma <= 1.0,
                "schedule.gamma",
                gamma,
                "must be above 0 and at most 1",
            );
            rules.warmup(*warmup_epochs, epochs);
        }
    }
}
