//! Checks the rules of a recipe. The rules of each section are in its own file; all are checked, so that all violations
//! are reported at once.

use std::{borrow::Cow, fmt::Display, ops::RangeInclusive};

use toml::Value;

use super::{
    JobSpec, NamePatterns, Violation, adapter, augment, checkpoint, cluster, data, ema, evaluation,
    guard, limits, loss, model, optimizer, precision, schedule, train,
};

/// Maximum length of a job's name. File systems allow 255 bytes; some is left for suffixes.
const MAX_NAME_CHARS: usize = 200;

/// All violations in `spec`.
pub(super) fn violations(spec: &JobSpec) -> Vec<Violation> {
    let mut rules = Rules::default();
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    rules.check(
        (1..=MAX_NAME_CHARS).contains(&spec.name.len()) && spec.name.chars().all(is_allowed) && !spec.name.starts_with('.'),
        "name",
        format!("{:?}", spec.name),
        &format!(
            "must be 1..{MAX_NAME_CHARS} letters, digits, '-', '_' and '.', because it is the name of the run folder"
        ),
    );
    for check in [
        model::check,
        adapter::check,
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
    // A recipe that cannot be written as TOML came as JSON, which has no other numbers than finite ones.
    if let Ok(tree) = Value::try_from(spec) {
        check_finite("", &tree, &mut rules);
    }
    rules.violations()
}

/// Checks that all numbers are finite: recipes are saved and sent as JSON, which has no other numbers.
fn check_finite(field: &str, value: &Value, rules: &mut Rules) {
    match value {
        Value::Float(number) if !number.is_finite() && !rules.has(field) => {
            rules.check(false, field.to_owned(), number, "must be a finite number");
        }
        Value::Array(values) => {
            for value in values {
                check_finite(field, value, rules);
            }
        }
        Value::Table(values) => {
            let dot = if field.is_empty() { "" } else { "." };
            for (key, value) in values {
                check_finite(&format!("{field}{dot}{key}"), value, rules);
            }
        }
        _ => {}
    }
}

/// The violations found so far.
#[derive(Default)]
pub(super) struct Rules(Vec<Violation>);

impl Rules {
    pub(super) fn violations(self) -> Vec<Violation> {
        self.0
    }

    /// Whether a value of this field violates a rule.
    fn has(&self, field: &str) -> bool {
        self.0.iter().any(|violation| violation.field == field)
    }

    /// Records a violation unless `holds`.
    pub(super) fn check(
        &mut self,
        holds: bool,
        field: impl Into<Cow<'static, str>>,
        value: impl Display,
        rule: &str,
    ) {
        if !holds {
            let field = field.into();
            self.0.push(Violation { field, value: value.to_string(), rule: rule.to_owned() });
        }
    }

    /// Checks that these are patterns for the names of parameters.
    pub(super) fn patterns(&mut self, field: &'static str, texts: &[String]) {
        if let Err((text, problem)) = NamePatterns::new(texts) {
            self.check(false, field, text, &problem);
        }
    }

    /// Checks that the value is a fraction in [0, 1].
    pub(super) fn fraction(&mut self, field: &'static str, value: f64) {
        self.check((0.0..=1.0).contains(&value), field, value, "must be in [0, 1]");
    }

    /// Checks that the value is a fraction in [0, 1).
    pub(super) fn below_1(&mut self, field: &'static str, value: f64) {
        self.check((0.0..1.0).contains(&value), field, value, "must be in [0, 1)");
    }

    /// Checks that the value is a number above 0 and at most 1.
    pub(super) fn above_0_to_1(&mut self, field: &'static str, value: f64) {
        self.check(0.0 < value && value <= 1.0, field, value, "must be above 0 and at most 1");
    }

    /// Checks that the value is a number above 0 and below 1.
    pub(super) fn between_0_and_1(&mut self, field: &'static str, value: f64) {
        self.check(0.0 < value && value < 1.0, field, value, "must be between 0 and 1");
    }

    /// Checks that the value is a finite number above 0, also as a 32-bit float.
    pub(super) fn positive(&mut self, field: &'static str, value: f64) {
        let is_positive = value > 0.0 && value.is_finite();
        self.check(is_positive, field, value, "must be above 0");
        let used = value as f32;
        let is_kept = used.is_normal() || !is_positive;
        self.check(is_kept, field, value, "must be from 1.2e-38 to 3.4e38, for 32-bit floats");
    }

    /// Checks that the value is a number of at least 1.
    pub(super) fn at_least_1(&mut self, field: &'static str, value: impl Into<f64>) {
        let value = value.into();
        self.check(value >= 1.0, field, value, "must be at least 1");
    }

    /// Checks that the value is a count in a range.
    pub(super) fn within(&mut self, field: &'static str, value: u32, range: RangeInclusive<u32>) {
        let rule = format!("must be {}..{}", range.start(), range.end());
        self.check(range.contains(&value), field, value, &rule);
    }
}
