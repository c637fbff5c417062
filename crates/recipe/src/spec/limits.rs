//! When to stop early.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{JobSpec, evaluation::check_metric, rules::Rules};
use crate::task;

/// When to stop early.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// The job is **complete** once a metric of the whole validation set reaches a value:
    /// `{ metric = "top1", value = 0.78 }`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<Target>,
    /// Deprecated spelling of `target` for `top1`; still supported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_top1: Option<f64>,
    /// The job is **complete** after this many consecutive evaluations without improvement, at least 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u32>,
    /// The job **stops with a checkpoint** once at least one node has been attached for this many hours in total; raise it to
    /// resume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_hours: Option<f64>,
    /// Like `max_hours`, but for a cost in dollars; needs `dollars_per_hour`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_dollars: Option<f64>,
    /// Price of all nodes together, dollars per hour. A changed price applies from the next start on; the hours before keep
    /// theirs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dollars_per_hour: Option<f64>,
}

impl Limits {
    /// What ends a run before all epochs are done: a target, or this number of evaluations without improvement.
    #[must_use]
    pub fn early_end(&self) -> (Option<Target>, Option<u32>) {
        (self.target(), self.patience)
    }

    /// The target, from `target` or from the deprecated `target_top1`.
    #[must_use]
    pub fn target(&self) -> Option<Target> {
        let top1 = |value| Target { metric: "top1".to_owned(), value };
        self.target.clone().or_else(|| self.target_top1.map(top1))
    }
}

/// A value of a metric that completes the job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// The job is **complete** once this metric of the whole validation set reaches `target.value`:
    /// `target = { metric = "top1", value = 0.78 }`.
    pub metric: String,
    /// Target value. Fractions are 0..1; a metric for which lower is better reaches it from above.
    pub value: f64,
}

/// The form in a recipe.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "limits.target = {{ metric = \"{}\", value = {} }}", self.metric, self.value)
    }
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let limits = &spec.limits;
    let share = "must be above 0 and at most 1, e.g. 0.78 for 78 %";
    if let Some(Target { metric, value }) = &limits.target {
        check_metric(spec, "limits.target.metric", metric, rules);
        let metric = task::find(metric);
        let (least, most) = task::range(spec, &metric);
        // Every evaluation reaches a share of 0.
        let is_above = if metric.is_fraction { least < *value } else { least <= *value };
        let rule = match (metric.is_fraction, least.is_finite(), most.is_finite()) {
            (true, ..) => share.to_owned(),
            (false, true, true) => format!("must be a number from {least} to {most}"),
            (false, true, false) => format!("must be a number, at least {least}"),
            (false, false, _) => "must be a number".to_owned(),
        };
        let fits = value.is_finite() && is_above && *value <= most;
        rules.check(fits, "limits.target.value", value, &rule);
    }
    if let Some(target) = limits.target_top1 {
        rules.check(0.0 < target && target <= 1.0, "limits.target_top1", target, share);
        let twice = "is the deprecated spelling of limits.target, which is set too: remove it";
        rules.check(limits.target.is_none(), "limits.target_top1", target, twice);
    }
    rules.check(limits.patience != Some(0), "limits.patience", 0, "must be at least 1");
    for (field, value) in [
        ("limits.max_hours", limits.max_hours),
        ("limits.max_dollars", limits.max_dollars),
        ("limits.dollars_per_hour", limits.dollars_per_hour),
    ] {
        if let Some(value) = value {
            rules.positive(field, value);
        }
    }
    rules.check(
        limits.max_dollars.is_none() || limits.dollars_per_hour.is_some(),
        "limits.max_dollars",
        limits.max_dollars.unwrap_or_default(),
        "needs the price: set limits.dollars_per_hour",
    );
}
