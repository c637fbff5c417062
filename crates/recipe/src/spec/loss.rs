//! The loss function.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// The loss function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossSpec {
    /// `cross_entropy`: classification; `mse`, `huber`: regression, which is evaluated by the mean absolute error and
    /// the correlations of Pearson and Spearman; by default, Spearman's decides which evaluation is best; `program`: a
    /// program takes the target as its input `target` and returns the loss of each sample; `next_token`: cross entropy
    /// of every next token that has a label, required by `causal_lm` and only for it.
    pub kind: LossKind,
    /// Fraction of the target that is spread over all classes, in [0, 1) (Szegedy et al. 2016, §7); classification
    /// only.
    pub label_smoothing: f64,
    /// Distance from the target at which Huber's loss changes from quadratic to linear, above 0; as in
    /// `torch.nn.HuberLoss`.
    pub huber_delta: f64,
    /// With `kind = "program"`: names of the metrics that the program returns beside the loss, by default the first
    /// decides which evaluation is best. Lower values are better of a name that ends with `loss`, `error`, `perplexity`, `nll`,
    /// `mse`, `mae`, `wer` or `cer`, higher ones of all others.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub metrics: Vec<String>,
}

impl Default for LossSpec {
    fn default() -> Self {
        Self {
            kind: LossKind::CrossEntropy,
            label_smoothing: 0.0,
            huber_delta: 1.0,
            metrics: Vec::new(),
        }
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
    /// The program itself returns the loss.
    Program,
    /// Language models: cross entropy of every next token that has a label; the mean over these tokens.
    NextToken,
}

impl LossKind {
    /// Whether labels are classes; otherwise they are values.
    #[must_use]
    pub fn takes_classes(self) -> bool {
        self == Self::CrossEntropy
    }

    fn name(self) -> &'static str {
        match self {
            Self::CrossEntropy => "cross_entropy",
            Self::Mse => "mse",
            Self::Huber => "huber",
            Self::Program => "program",
            Self::NextToken => "next_token",
        }
    }
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let is_lm = spec.model.arch.is_causal_lm();
    rules.check(
        is_lm == (spec.loss.kind == LossKind::NextToken),
        "loss.kind",
        spec.loss.kind.name(),
        match is_lm {
            true => "must be next_token with model.arch = \"causal_lm\"",
            false => "needs model.arch = \"causal_lm\"",
        },
    );
    rules.below_1("loss.label_smoothing", spec.loss.label_smoothing);
    rules.positive("loss.huber_delta", spec.loss.huber_delta);
    program(spec, rules);
    if !spec.loss.kind.takes_classes() {
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

/// Rules for a loss that a program returns.
fn program(spec: &JobSpec, rules: &mut Rules) {
    let (metrics, is_program) = (&spec.loss.metrics, spec.loss.kind == LossKind::Program);
    let listed = format!("[{}]", metrics.join(", "));
    if !is_program {
        let rule = "are those of a program: remove them, or set loss.kind = \"program\"";
        rules.check(metrics.is_empty(), "loss.metrics", listed, rule);
        return;
    }
    rules.check(
        spec.model.arch.is_program(),
        "loss.kind",
        "program",
        "needs model.arch = \"program\"",
    );
    let is_name = |name: &String| {
        let is_allowed =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        !name.is_empty() && name.bytes().all(is_allowed) && name != "loss"
    };
    let is_unique = |index: usize| !metrics[..index].contains(&metrics[index]);
    rules.check(
        metrics.iter().all(is_name) && (0..metrics.len()).all(is_unique),
        "loss.metrics",
        listed,
        "must be different names of lower-case letters, digits and _, without loss",
    );
    let flip = "would average losses: remove it with loss.kind = \"program\"";
    rules.check(!spec.evaluation.flip, "evaluation.flip", true, flip);
}
