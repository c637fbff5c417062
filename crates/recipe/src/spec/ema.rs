//! Moving average of the weights.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// Moving average of the weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ema {
    /// Share kept each time, between 0 and 1; reaches back over about `every_steps / (1 − decay)` updates.
    pub decay: f64,
    /// Updates between two times, at least 1.
    #[serde(default = "every_steps")]
    pub every_steps: u32,
}

fn every_steps() -> u32 {
    1
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let Some(ema) = &spec.ema else { return };
    rules.between_0_and_1("ema.decay", ema.decay);
    rules.check(ema.every_steps >= 1, "ema.every_steps", ema.every_steps, "must be at least 1");
}
