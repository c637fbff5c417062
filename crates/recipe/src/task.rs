//! The metrics that a job's evaluations report.

use crate::JobSpec;

/// A metric that every evaluation reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name in recipes, messages and files.
    pub name: &'static str,
    /// Name for people.
    pub title: &'static str,
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
}

const LOSS: Metric = mean("loss", "loss", MetricDirection::Lower, false);

const CLASSIFICATION: &[Metric] = &[
    mean("top1", "top-1", MetricDirection::Higher, true),
    mean("top5", "top-5", MetricDirection::Higher, true),
    LOSS,
];

const REGRESSION: &[Metric] = &[
    of_all("spearman", "Spearman", MetricDirection::Higher),
    of_all("pearson", "Pearson", MetricDirection::Higher),
    of_all("mae", "MAE", MetricDirection::Lower),
    LOSS,
];

/// The metrics that evaluations of `spec` report. By default, the first one decides which evaluation is best.
#[must_use]
pub fn metrics(spec: &JobSpec) -> &'static [Metric] {
    if spec.loss.kind.is_regression() { REGRESSION } else { CLASSIFICATION }
}

/// Like [`metrics`], but with the metric of `evaluation.best` first.
#[must_use]
pub fn best_first(spec: &JobSpec) -> Vec<&'static Metric> {
    let mut metrics: Vec<_> = metrics(spec).iter().collect();
    // The sort is stable, so the others keep their order.
    metrics.sort_by_key(|metric| Some(metric.name) != spec.evaluation.best.as_deref());
    metrics
}

/// The metric of this name, of any task.
#[must_use]
pub fn find(name: &str) -> Option<&'static Metric> {
    [CLASSIFICATION, REGRESSION].into_iter().flatten().find(|metric| metric.name == name)
}

/// The title of the metric of this name.
#[must_use]
pub fn title(name: &str) -> &str {
    find(name).map_or(name, |metric| metric.title)
}

/// Title and value of a metric for people: `top-1 78.06 %` or `Spearman 0.9120`.
#[must_use]
pub fn display((name, value): &(String, f64)) -> String {
    format!("{} {}", title(name), display_value(name, *value))
}

/// A value of the metric of this name for people: `78.06 %` or `0.9120`.
#[must_use]
pub fn display_value(name: &str, value: f64) -> String {
    match find(name) {
        Some(Metric { is_fraction: true, .. }) => format!("{:.2} %", value * 100.0),
        _ => format!("{value:.4}"),
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
    Metric { name, title, direction, reduction: Reduction::Mean, is_fraction }
}

const fn of_all(name: &'static str, title: &'static str, direction: MetricDirection) -> Metric {
    Metric { name, title, direction, reduction: Reduction::AllSamples, is_fraction: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_direction_decides_which_value_is_better() {
        let is_better = |name, value, other| find(name).unwrap().is_better(value, other);
        assert!(is_better("top1", 0.8, 0.7) && !is_better("top1", 0.7, 0.7));
        assert!(is_better("loss", 0.7, 0.8) && !is_better("loss", 0.7, f64::NAN));
        assert_eq!(find("perplexity"), None);
        assert_eq!((title("mae"), title("perplexity")), ("MAE", "perplexity"));
        assert_eq!(display(&("top1".to_owned(), 0.78064)), "top-1 78.06 %");
        assert_eq!(display(&("mae".to_owned(), 0.5)), "MAE 0.5000");
    }
}
