//! The objective.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// The objective.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Loss {
    /// `cross_entropy`: classes; `mse`, `huber`: regression, which is evaluated by mean absolute error and
    /// the correlations of Pearson and Spearman, the last of which decides what is best.
    pub kind: LossKind,
    /// Share of the target spread over all classes, in [0, 1) (Szegedy et al. 2016, §7); classes only.
    pub label_smoothing: f64,
    /// Distance from the target at which Huber's loss turns from a square to a line, above 0; as
    /// `torch.nn.HuberLoss`.
    pub huber_delta: f64,
}

impl Default for Loss {
    fn default() -> Self {
        Self { kind: LossKind::CrossEntropy, label_smoothing: 0.0, huber_delta: 1.0 }
    }
}

/// What is minimised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// Classification.
    #[default]
    CrossEntropy,
    /// Regression: the square of the difference.
    Mse,
    /// Regression: Huber 1964; as `torch.nn.HuberLoss`.
    Huber,
}

impl LossKind {
    /// Whether labels are values rather than classes.
    #[must_use]
    pub fn is_regression(self) -> bool {
        self != Self::CrossEntropy
    }
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    rules.check(
        (0.0..1.0).contains(&spec.loss.label_smoothing),
        "loss.label_smoothing",
        spec.loss.label_smoothing,
        "must be in [0, 1)",
    );
    rules.positive("loss.huber_delta", spec.loss.huber_delta);
    if spec.loss.kind.is_regression() {
        let only_classes = "is of classes: set it to 0, or loss.kind = \"cross_entropy\"";
        for (field, value) in [
            ("loss.label_smoothing", spec.loss.label_smoothing),
            ("augment.mixup_alpha", spec.augment.mixup_alpha),
            ("augment.cutmix_probability", spec.augment.cutmix_probability),
        ] {
            rules.check(value == 0.0, field, value, only_classes);
        }
        let target = spec.limits.target_top1;
        rules.check(
            target.is_none(),
            "limits.target_top1",
            target.unwrap_or_default(),
            "is of classes: leave it out, or set loss.kind = \"cross_entropy\"",
        );
    }
}
