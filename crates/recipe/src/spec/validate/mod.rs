//! The rules a recipe must keep. Each is checked on its own, so that all faults show at once.

mod model;
mod running;
mod schedule;
mod training;

use std::fmt::Display;

use super::{JobSpec, Violation};

/// Every rule that `spec` breaks.
pub(super) fn violations(spec: &JobSpec) -> Vec<Violation> {
    let mut rules = Rules(Vec::new());
    model::check(spec, &mut rules);
    training::check(spec, &mut rules);
    schedule::check(spec, &mut rules);
    running::check(spec, &mut rules);
    rules.0
}

struct Rules(Vec<Violation>);

impl Rules {
    fn check(&mut self, holds: bool, field: &'static str, value: impl Display, rule: &str) {
        if !holds {
            self.0.push(Violation { field, value: value.to_string(), rule: rule.to_owned() });
        }
    }

    /// A share in [0, 1].
    fn share(&mut self, field: &'static str, value: f64) {
        self.check((0.0..=1.0).contains(&value), field, value, "must be in [0, 1]");
    }

    /// A finite number above 0.
    fn positive(&mut self, field: &'static str, value: f64) {
        self.check(value > 0.0 && value.is_finite(), field, value, "must be above 0");
    }

    /// A number of epochs at the start of training.
    fn warmup(&mut self, warmup_epochs: f64, epochs: u32) {
        self.check(
            (0.0..f64::from(epochs)).contains(&warmup_epochs),
            "schedule.warmup_epochs",
            warmup_epochs,
            &format!("must be at least 0 and below train.epochs = {epochs}"),
        );
    }
}

impl JobSpec {
    /// The most ranks that can take part: each runs at least one virtual rank.
    #[must_use]
    pub fn max_ranks(&self) -> u32 {
        match self.cluster.max_ranks {
            0 => self.train.virtual_ranks,
            most => most.min(self.train.virtual_ranks),
        }
    }

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
