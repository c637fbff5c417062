//! The metrics that a job's evaluations report.

use std::borrow::Cow;

use crate::{
    JobSpec,
    spec::{Generate, LossKind},
};

/// A metric that every evaluation reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name in recipes, messages and files.
    pub name: Cow<'static, str>,
    /// Name for people.
    pub title: Cow<'static, str>,
    /// Which values are better.
    pub direction: MetricDirection,
    /// How the values of all samples are combined.
    pub reduction: Reduction,
    /// Whether the value is a fraction, 0..1, that is shown in percent.
    pub is_fraction: bool,
}

/// Which values are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricDirection {
    /// Higher values are better.
    Higher,
    /// Lower values are better.
    Lower,
}

/// How the values of all samples are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Their mean.
    Mean,
    /// A function of the predictions and targets of all samples together.
    AllSamples,
    /// `e` to the mean loss.
    ExponentialOfLoss,
    /// A function of the texts that the model writes.
    Texts,
}

const LOSS: Metric = mean("loss", "loss", MetricDirection::Lower, false);

const CLASSIFICATION: &[Metric] = &[
    mean("top1", "top-1", MetricDirection::Higher, true),
    mean("top5", "top-5", MetricDirection::Higher, true),
    LOSS,
];

const NEXT_TOKEN: &[Metric] = &[
    LOSS,
    Metric {
        name: Cow::Borrowed("perplexity"),
        title: Cow::Borrowed("perplexity"),
        direction: MetricDirection::Lower,
        reduction: Reduction::ExponentialOfLoss,
        is_fraction: false,
    },
    mean("token_accuracy", "token accuracy", MetricDirection::Higher, true),
];

/// Metrics of the texts of `evaluation.generate`.
const TEXTS: &[Metric] = &[
    of_texts(BLEU, "BLEU", false),
    // Only with `evaluation.generate.syntax`.
    of_texts(VALID_SYNTAX, "valid syntax", true),
];

/// Name of the metric that compares the texts that a model writes with those of the validation set.
pub const BLEU: &str = "bleu";
/// Name of the share of the texts that a model writes that can be parsed.
pub const VALID_SYNTAX: &str = "valid_syntax";

const REGRESSION: &[Metric] = &[
    of_all("spearman", "Spearman", MetricDirection::Higher),
    of_all("pearson", "Pearson", MetricDirection::Higher),
    of_all("mae", "MAE", MetricDirection::Lower),
    LOSS,
];

/// Ends of the names of a program's metrics of which lower values are better.
pub const LOWER_IS_BETTER: [&str; 8] =
    ["loss", "error", "perplexity", "nll", "mse", "mae", "wer", "cer"];

/// The metrics that evaluations of `spec` report. By default, the first one decides which evaluation is best.
#[must_use]
pub fn metrics(spec: &JobSpec) -> Vec<Metric> {
    match spec.loss.kind {
        LossKind::CrossEntropy | LossKind::BinaryCrossEntropy => CLASSIFICATION.to_vec(),
        LossKind::Mse | LossKind::Huber | LossKind::Quantile => REGRESSION.to_vec(),
        LossKind::NextToken => {
            let texts = match &spec.evaluation.generate {
                None => &[],
                Some(Generate { syntax: None, .. }) => &TEXTS[..1],
                Some(_) => TEXTS,
            };
            [NEXT_TOKEN, texts].concat()
        }
        LossKind::Program => {
            // Also if a built-in task has a metric of this name, which is a function of all samples.
            let mean = |name: &String| Metric { reduction: Reduction::Mean, ..find(name) };
            let own = spec.loss.metrics.iter().map(mean);
            own.chain([LOSS]).collect()
        }
    }
}

/// Least and greatest value that a metric can have in evaluations of `spec`. Those of a program are not known.
#[must_use]
pub fn range(spec: &JobSpec, metric: &Metric) -> (f64, f64) {
    match &*metric.name {
        _ if metric.is_fraction => (0.0, 1.0),
        _ if spec.loss.kind == LossKind::Program => (f64::NEG_INFINITY, f64::INFINITY),
        "spearman" | "pearson" => (-1.0, 1.0),
        "perplexity" => (1.0, f64::INFINITY),
        BLEU => (0.0, 100.0),
        _ => (0.0, f64::INFINITY),
    }
}

/// Those of [`metrics`] that are means over all samples, without the loss, in the order of the task's sums.
#[must_use]
pub fn means(spec: &JobSpec) -> Vec<Metric> {
    let mut metrics = metrics(spec);
    metrics.retain(|metric| metric.reduction == Reduction::Mean && metric.name != LOSS.name);
    metrics
}

/// Like [`metrics`], but with the metric of `evaluation.best` first.
#[must_use]
pub fn best_first(spec: &JobSpec) -> Vec<Metric> {
    let mut metrics = metrics(spec);
    // The sort is stable, so the others keep their order.
    metrics.sort_by_key(|metric| Some(&*metric.name) != spec.evaluation.best.as_deref());
    metrics
}

/// The metric of this name. If no task has it, a program returns it: a mean over all samples, of which higher values are
/// better unless its name ends as one of [`LOWER_IS_BETTER`].
#[must_use]
pub fn find(name: &str) -> Metric {
    let mut known = [CLASSIFICATION, REGRESSION, NEXT_TOKEN, TEXTS].into_iter().flatten();
    known.find(|metric| metric.name == name).cloned().unwrap_or_else(|| Metric {
        name: name.to_owned().into(),
        title: name.to_owned().into(),
        direction: match LOWER_IS_BETTER.iter().any(|end| name.ends_with(end)) {
            true => MetricDirection::Lower,
            false => MetricDirection::Higher,
        },
        reduction: Reduction::Mean,
        is_fraction: false,
    })
}

/// The title of the metric of this name.
#[must_use]
pub fn title(name: &str) -> String {
    find(name).title.into_owned()
}

/// Title and value of a metric for people: `top-1 78.06 %` or `Spearman 0.9120`.
#[must_use]
pub fn display((name, value): &(String, f64)) -> String {
    format!("{} {}", title(name), display_value(name, *value))
}

/// A value of the metric of this name for people: `78.06 %` or `0.9120`.
#[must_use]
pub fn display_value(name: &str, value: f64) -> String {
    match find(name).is_fraction && shown(value).is_finite() {
        true => format!("{:.2} %", value * 100.0),
        false => number(value),
    }
}

/// A number for people: `0.9120`, `1.798e200` or `not finite`.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        size if size < 1e12 => format!("{value:.4}"),
        size if size < f64::MAX => format!("{value:.3e}"),
        _ => "not finite".to_owned(),
    }
}

/// The value of a metric as users see it: NaN where an evaluation counts as [worst](MetricDirection::worst).
#[must_use]
pub fn shown(value: f64) -> f64 {
    if value.abs() < f64::MAX { value } else { f64::NAN }
}

impl MetricDirection {
    /// Stands for a metric that is infinite or NaN: worse than any other, and JSON can express it.
    #[must_use]
    pub fn worst(self) -> f64 {
        match self {
            Self::Lower => f64::MAX,
            Self::Higher => f64::MIN,
        }
    }
}

impl Metric {
    /// Whether `value` is better than `other`.
    #[must_use]
    pub fn is_better(&self, value: f64, other: f64) -> bool {
        match self.direction {
            MetricDirection::Higher => value > other,
            MetricDirection::Lower => value < other,
        }
    }
}

const fn mean(
    name: &'static str,
    title: &'static str,
    direction: MetricDirection,
    is_fraction: bool,
) -> Metric {
    Metric {
        name: Cow::Borrowed(name),
        title: Cow::Borrowed(title),
        direction,
        reduction: Reduction::Mean,
        is_fraction,
    }
}

const fn of_texts(name: &'static str, title: &'static str, is_fraction: bool) -> Metric {
    Metric {
        name: Cow::Borrowed(name),
        title: Cow::Borrowed(title),
        direction: MetricDirection::Higher,
        reduction: Reduction::Texts,
        is_fraction,
    }
}

const fn of_all(name: &'static str, title: &'static str, direction: MetricDirection) -> Metric {
    Metric {
        name: Cow::Borrowed(name),
        title: Cow::Borrowed(title),
        direction,
        reduction: Reduction::AllSamples,
        is_fraction: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_direction_decides_which_value_is_better() {
        let is_better = |name, value, other| find(name).is_better(value, other);
        assert!(is_better("top1", 0.8, 0.7) && !is_better("top1", 0.7, 0.7));
        assert!(is_better("loss", 0.7, 0.8) && !is_better("loss", 0.7, f64::NAN));
        assert_eq!((title("mae").as_str(), title("perplexity").as_str()), ("MAE", "perplexity"));
        assert!(is_better("perplexity", 7.0, 8.0) && is_better("angle_error", 0.1, 0.2));
        assert!(is_better("nll", -5.0, -4.0) && is_better("rmse", 0.1, 0.2));
        assert!(is_better("accuracy", 0.8, 0.7) && is_better("loss_reduction", 0.2, 0.1));
        assert_eq!(display(&("top1".to_owned(), 0.78064)), "top-1 78.06 %");
        assert_eq!(display(&("mae".to_owned(), 0.5)), "MAE 0.5000");
        assert_eq!(display(&("mae".to_owned(), 1e300)), "MAE 1.000e300");
        assert_eq!(display(&("mae".to_owned(), f64::MAX)), "MAE not finite");
        assert_eq!(display(&("top1".to_owned(), f64::MIN)), "top-1 not finite");
    }
}
