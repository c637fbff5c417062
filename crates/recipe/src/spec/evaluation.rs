//! When and how accuracy is measured.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules, train};
use crate::task;

/// When and how accuracy is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Evaluation {
    /// Epochs between evaluations, at least 1; the last epoch is always evaluated, on the whole validation
    /// set.
    pub every_epochs: u32,
    /// Side of the images in pixels; 0 is that at the end of training.
    pub resolution: u32,
    /// Side of the centre crop as a share of the short side, above 0 and at most 1.
    pub crop_ratio: f64,
    /// Images per forward pass; changes no result but the last bits.
    pub batch: u32,
    /// Average with the mirrored image; images only.
    pub flip: bool,
    /// Share of the validation set used before the last epoch: always the same samples, evenly spread.
    pub subset: f64,
    /// The metric that decides which evaluation and which checkpoint is the best, and so `limits.patience` and
    /// the guard; absent: the task's first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<String>,
}

impl Default for Evaluation {
    fn default() -> Self {
        Self {
            every_epochs: 1,
            resolution: 0,
            crop_ratio: 224.0 / 256.0,
            batch: 64,
            flip: false,
            subset: 1.0,
            best: None,
        }
    }
}

impl JobSpec {
    /// Side of the evaluation images in pixels: if the recipe leaves it open, that at the end of
    /// training.
    #[must_use]
    pub fn evaluation_resolution(&self) -> u32 {
        match self.evaluation.resolution {
            0 => self.train.phases.last().map_or(self.train.resolution, |last| last.resolution),
            side => side,
        }
    }
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let evaluation = &spec.evaluation;
    rules.check(
        evaluation.every_epochs >= 1,
        "evaluation.every_epochs",
        evaluation.every_epochs,
        "must be at least 1",
    );
    let sides = train::sides(spec);
    rules.check(
        evaluation.resolution == 0 || sides.contains(&evaluation.resolution),
        "evaluation.resolution",
        evaluation.resolution,
        &format!("must be 0 (as in training) or {}..4096 pixels", sides.start()),
    );
    rules.check(evaluation.batch >= 1, "evaluation.batch", evaluation.batch, "must be at least 1");
    let share = |value: f64| 0.0 < value && value <= 1.0;
    let rule = "must be above 0 and at most 1";
    let crop = evaluation.crop_ratio;
    rules.check(share(crop), "evaluation.crop_ratio", crop, rule);
    rules.check(share(evaluation.subset), "evaluation.subset", evaluation.subset, rule);
    if let Some(best) = &evaluation.best {
        is_metric(spec, "evaluation.best", best, rules);
    }
}

/// Refuses a name that is no metric of the recipe's task.
pub(super) fn is_metric(spec: &JobSpec, field: &'static str, name: &str, rules: &mut Rules) {
    let names: Vec<&str> = task::metrics(spec).iter().map(|metric| metric.name).collect();
    let rule = format!("is no metric of this recipe; there are {}", names.join(", "));
    rules.check(names.contains(&name), field, name, &rule);
}
