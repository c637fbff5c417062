//! The loss function.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// The loss function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossSpec {
    /// `cross_entropy`: classification; `binary_cross_entropy`: classification too, but the output of each class is compared
    /// with 1 or 0 by itself, and the mean over the classes is taken (Wightman et al. 2021, arXiv 2110.00476, as in
    /// `torch.nn.BCEWithLogitsLoss`); `mse`, `huber`, `quantile`: regression, which is evaluated by the mean absolute error and
    /// the correlations of Pearson and Spearman; by default, Spearman's decides which evaluation is best; `program`: a
    /// program takes the target as its input `target` and returns the loss of each sample; `next_token`: cross entropy
    /// of every next token that has a label, required by `causal_lm` and only for it.
    pub kind: LossKind,
    /// Fraction of the target that is spread over all classes, in [0, 1) (Szegedy et al. 2016, §7); classification
    /// only.
    pub label_smoothing: f64,
    /// With `cross_entropy`: a factor for the loss of the samples of each class, above 0, one for each class; the `weight` of
    /// `torch.nn.CrossEntropyLoss`, but the sum is divided by the number of samples. Absent means 1 for all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub class_weights: Vec<f64>,
    /// With `quantile`, which needs it: the quantile to predict, between 0 and 1: 0.5 is the median (Koenker & Bassett 1978).
    /// An error costs `quantile` times its size if the prediction is too low, and `1 - quantile` times if it is too high.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantile: Option<f64>,
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
            class_weights: Vec::new(),
            quantile: None,
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
    /// Classification: every class by itself.
    BinaryCrossEntropy,
    /// Regression: mean squared error.
    Mse,
    /// Regression: Huber 1964, as in `torch.nn.HuberLoss`.
    Huber,
    /// Regression: the loss of quantiles, also called pinball loss.
    Quantile,
    /// The program itself returns the loss.
    Program,
    /// Language models: cross entropy of every next token that has a label; the mean over these tokens.
    NextToken,
}

impl LossKind {
    /// Whether labels are classes; otherwise they are values.
    #[must_use]
    pub fn takes_classes(self) -> bool {
        matches!(self, Self::CrossEntropy | Self::BinaryCrossEntropy)
    }

    /// Whether the network predicts the values of the labels.
    #[must_use]
    pub fn predicts_values(self) -> bool {
        matches!(self, Self::Mse | Self::Huber | Self::Quantile)
    }

    fn name(self) -> &'static str {
        match self {
            Self::CrossEntropy => "cross_entropy",
            Self::BinaryCrossEntropy => "binary_cross_entropy",
            Self::Mse => "mse",
            Self::Huber => "huber",
            Self::Quantile => "quantile",
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
    class_weights(spec, rules);
    quantile(spec, rules);
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

fn class_weights(spec: &JobSpec, rules: &mut Rules) {
    let (weights, classes) = (&spec.loss.class_weights, spec.model.num_classes);
    if weights.is_empty() {
        return;
    }
    let listed = format!("{weights:?}");
    rules.check(
        spec.loss.kind == LossKind::CrossEntropy,
        "loss.class_weights",
        &listed,
        "is for loss.kind = \"cross_entropy\" only: remove it",
    );
    rules.check(
        weights.len() == classes as usize,
        "loss.class_weights",
        &listed,
        &format!("must have a factor for each of the model.num_classes = {classes} classes"),
    );
    let is_factor = |weight: &f64| (*weight as f32).is_normal() && *weight > 0.0;
    rules.check(
        weights.iter().all(is_factor),
        "loss.class_weights",
        &listed,
        "must be above 0: from 1.2e-38 to 3.4e38, for 32-bit floats",
    );
}

fn quantile(spec: &JobSpec, rules: &mut Rules) {
    let is_needed = spec.loss.kind == LossKind::Quantile;
    match spec.loss.quantile {
        Some(quantile) if is_needed => rules.between_0_and_1("loss.quantile", quantile),
        Some(quantile) => {
            let rule = "needs loss.kind = \"quantile\"";
            rules.check(false, "loss.quantile", quantile, rule);
        }
        None => rules.check(
            !is_needed,
            "loss.quantile",
            "absent",
            "must be between 0 and 1 with loss.kind = \"quantile\", such as 0.9",
        ),
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
