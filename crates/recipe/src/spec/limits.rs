//! When to stop early.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// When to stop early.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// The job is **complete** once top-1 accuracy of the whole validation set reaches this share, e.g.
    /// 0.78; classes only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_top1: Option<f64>,
    /// The job is **complete** after so many evaluations without a better one, at least 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u32>,
    /// The job **stops with a checkpoint** once nodes have been attached for so many hours; raise it to go
    /// on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_hours: Option<f64>,
    /// The same for so many dollars; needs the price.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_dollars: Option<f64>,
    /// Price of all nodes together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dollars_per_hour: Option<f64>,
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let limits = &spec.limits;
    if let Some(target) = limits.target_top1 {
        rules.check(
            0.0 < target && target <= 1.0,
            "limits.target_top1",
            target,
            "must be above 0 and at most 1, e.g. 0.78 for 78 %",
        );
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
