//! The loss function.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// The loss function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossSpec {
    /// `cross_entropy`: classification; `mse`, `huber`: regression, which is evaluated by the mean absolute error and
    /// the correlations of Pearson and Spearman; by default, Spearman's decides which evaluation is best.
    pub kind: LossKind,
    /// Fraction of the target that is spread over all classes, in [0, 1) (Szegedy et al. 2016, §7); classification
    /// only.
    pub label_smoothing: f64,
    /// Distance from the target at which Huber's loss changes from quadratic to linear, above 0; as in
    /// `torch.nn.HuberLoss`.
    pub huber_delta: f64,
}

impl Default for LossSpec {
    fn default() -> Self {
        Self { kind: LossKind::CrossEntropy, label_smoothing: 0.0, huber_delta: 1.0 }
    }
}

/// Kind of the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// Classification.
    #[default]
    CrossEntropy,
    /// Regression: mean squared error.
    Mse,
    /// Regression: Huber 1964, as in `torch.nn.HuberLoss`.
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
    rules.below_1("loss.label_smoothing", spec.loss.label_smoothing);
    rules.positive("loss.huber_delta", spec.loss.huber_delta);
    if spec.loss.kind.is_regression() {
        let only_classification =
            "is for classification only: set it to 0, or loss.kind = \"cross_entropy\"";
        for (field, value) in [
            ("loss.label_smoothing", spec.loss.label_smoothing),
            ("augment.mixup_alpha", spec.augment.mixup_alpha),
            ("augment.cutmix_probability", spec.augment.cutmix_probability),
        ] {
            rules.check(value == 0.0, field, value, only_classification);
        }
        let target = spec.limits.target_top1;
        rules.check(
            target.is_none(),
            "limits.target_top1",
            target.unwrap_or_default(),
            "is for classification only: remove it, or set loss.kind = \"cross_entropy\"",
        );
    }
}
