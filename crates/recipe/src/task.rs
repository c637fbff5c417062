//! What a job's evaluations measure.

use crate::JobSpec;

/// A number that every evaluation reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name in recipes and displays.
    pub name: &'static str,
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

const LOSS: Metric = mean("loss", Direction::Lower, false);

const CLASSIFICATION: &[Metric] =
    &[mean("top1", Direction::Higher, true), mean("top5", Direction::Higher, true), LOSS];

const REGRESSION: &[Metric] = &[
    of_all("spearman", Direction::Higher),
    of_all("pearson", Direction::Higher),
    of_all("mae", Direction::Lower),
    LOSS,
];

/// What evaluations of `spec` report. By default the first one decides which of them is the best.
#[must_use]
pub fn metrics(spec: &JobSpec) -> &'static [Metric] {
    if spec.loss.kind.is_regression() { REGRESSION } else { CLASSIFICATION }
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

const fn mean(name: &'static str, direction: Direction, is_share: bool) -> Metric {
    Metric { name, direction, reduction: Reduction::Mean, is_share }
}

const fn of_all(name: &'static str, direction: Direction) -> Metric {
    Metric { name, direction, reduction: Reduction::AllSamples, is_share: false }
}
