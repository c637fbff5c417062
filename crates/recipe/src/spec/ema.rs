//! Moving average of the weights.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// Moving average of the weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ema {
    /// Fraction of the average that is kept at each change of it, between 0 and 1; the average covers about
    /// `every_steps / (1 − decay)` steps.
    pub decay: f64,
    /// Steps between two changes of the average, at least 1.
    #[serde(default = "every_steps")]
    pub every_steps: u32,
}

fn every_steps() -> u32 {
    1
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let Some(ema) = &spec.ema else { return };
    rules.between_0_and_1("ema.decay", ema.decay);
    rules.at_least_1("ema.every_steps", ema.every_steps);
}
