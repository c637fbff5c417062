//! What a job's evaluations measure.

use crate::JobSpec;

/// A number that every evaluation reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name in recipes, messages and files.
    pub name: &'static str,
    /// Name for people.
    pub title: &'static str,
    /// Which values are better.
    pub direction: Direction,
    /// How the values of samples become one.
    pub reduction: Reduction,
    /// Whether it is a share, 0..1, that is shown in percent.
    pub is_share: bool,
}

/// Which values are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Greater ones.
    Higher,
    /// Smaller ones.
    Lower,
}

/// How the values of samples become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Their mean.
    Mean,
    /// A function of the predictions and targets of all samples together.
    AllSamples,
}

const LOSS: Metric = mean("loss", "loss", Direction::Lower, false);

const CLASSIFICATION: &[Metric] = &[
    mean("top1", "top-1", Direction::Higher, true),
    mean("top5", "top-5", Direction::Higher, true),
    LOSS,
];

const REGRESSION: &[Metric] = &[
    of_all("spearman", "Spearman", Direction::Higher),
    of_all("pearson", "Pearson", Direction::Higher),
    of_all("mae", "MAE", Direction::Lower),
    LOSS,
];

/// What evaluations of `spec` report. By default the first one decides which of them is the best.
#[must_use]
pub fn metrics(spec: &JobSpec) -> &'static [Metric] {
    if spec.loss.kind.is_regression() { REGRESSION } else { CLASSIFICATION }
}

/// As [`metrics`], but first of all the one that `evaluation.best` names.
#[must_use]
pub fn best_first(spec: &JobSpec) -> Vec<&'static Metric> {
    let mut metrics: Vec<_> = metrics(spec).iter().collect();
    // Stable: the others stay in their order.
    metrics.sort_by_key(|metric| Some(metric.name) != spec.evaluation.best.as_deref());
    metrics
}

/// The metric of this name, of whatever task.
#[must_use]
pub fn find(name: &str) -> Option<&'static Metric> {
    [CLASSIFICATION, REGRESSION].into_iter().flatten().find(|metric| metric.name == name)
}

/// The name for people of the metric of this name.
#[must_use]
pub fn title(name: &str) -> &str {
    find(name).map_or(name, |metric| metric.title)
}

/// Title and value of a metric for people: `top-1 78.06 %` or `Spearman 0.9120`.
#[must_use]
pub fn shown((name, value): &(String, f64)) -> String {
    format!("{} {}", title(name), shown_value(name, *value))
}

/// A value of the metric of this name for people: `78.06 %` or `0.9120`.
#[must_use]
pub fn shown_value(name: &str, value: f64) -> String {
    match find(name) {
        Some(Metric { is_share: true, .. }) => format!("{:.2} %", value * 100.0),
        _ => format!("{value:.4}"),
    }
}

impl Metric {
    /// Whether `value` is better than `other`.
    #[must_use]
    pub fn is_better(&self, value: f64, other: f64) -> bool {
        match self.direction {
            Direction::Higher => value > other,
            Direction::Lower => value < other,
        }
    }
}

const fn mean(
    name: &'static str,
    title: &'static str,
    direction: Direction,
    is_share: bool,
) -> Metric {
    Metric { name, title, direction, reduction: Reduction::Mean, is_share }
}

const fn of_all(name: &'static str, title: &'static str, direction: Direction) -> Metric {
    Metric { name, title, direction, reduction: Reduction::AllSamples, is_share: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_direction_decides_what_is_better() {
        let is_better = |name, value, other| find(name).unwrap().is_better(value, other);
        assert!(is_better("top1", 0.8, 0.7) && !is_better("top1", 0.7, 0.7));
        assert!(is_better("loss", 0.7, 0.8) && !is_better("loss", 0.7, f64::NAN));
        assert_eq!(find("perplexity"), None);
        assert_eq!((title("mae"), title("perplexity")), ("MAE", "perplexity"));
        assert_eq!(shown(&("top1".to_owned(), 0.78064)), "top-1 78.06 %");
        assert_eq!(shown(&("mae".to_owned(), 0.5)), "MAE 0.5000");
    }
}
