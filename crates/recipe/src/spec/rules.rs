//! The rules that a recipe must keep: each section's in its own file, and all checked, so that every
//! fault shows at once.

use std::fmt::Display;

use super::{
    JobSpec, Violation, augment, checkpoint, cluster, data, ema, evaluation, guard, limits, loss,
    model, optimizer, precision, schedule, train,
};

/// Every rule that `spec` breaks.
pub(super) fn violations(spec: &JobSpec) -> Vec<Violation> {
    let mut rules = Rules::default();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    rules.check(
        !spec.name.is_empty() && spec.name.chars().all(plain) && !spec.name.starts_with('.'),
        "name",
        format!("{:?}", spec.name),
        "must be letters, digits, '-', '_' and '.', as it names the run folder",
    );
    for check in [
        model::check,
        data::check,
        augment::check,
        train::check,
        optimizer::check,
        schedule::check,
        loss::check,
        precision::check,
        ema::check,
        evaluation::check,
        checkpoint::check,
        cluster::check,
        limits::check,
        guard::check,
    ] {
        check(spec, &mut rules);
    }
    rules.violations()
}

/// What the rules found so far.
#[derive(Default)]
pub(super) struct Rules(Vec<Violation>);

impl Rules {
    pub(super) fn violations(self) -> Vec<Violation> {
        self.0
    }

    pub(super) fn check(
        &mut self,
        holds: bool,
        field: &'static str,
        value: impl Display,
        rule: &str,
    ) {
        if !holds {
            self.0.push(Violation { field, value: value.to_string(), rule: rule.to_owned() });
        }
    }

    /// A share in [0, 1].
    pub(super) fn share(&mut self, field: &'static str, value: f64) {
        self.check((0.0..=1.0).contains(&value), field, value, "must be in [0, 1]");
    }

    /// A number above 0 and below 1.
    pub(super) fn between_0_and_1(&mut self, field: &'static str, value: f64) {
        self.check(0.0 < value && value < 1.0, field, value, "must be between 0 and 1");
    }

    /// A finite number above 0.
    pub(super) fn positive(&mut self, field: &'static str, value: f64) {
        self.check(value > 0.0 && value.is_finite(), field, value, "must be above 0");
    }
}
