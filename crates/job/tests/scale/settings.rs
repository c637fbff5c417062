//! Settings of a run: the fleet, the rate of interruptions, and durations.

use std::{collections::BTreeMap, fmt, time::Duration};

use baton_recipe::JobSpec;

use crate::common;

/// Milliseconds in an hour.
pub(crate) const HOUR: f64 = 3_600_000.0;

/// Settings of one run. Times are in seconds, rates per hour; see [`Settings::DESCRIPTION`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings(BTreeMap<&'static str, f64>);

macro_rules! settings {
    ($($name:ident = $default:literal: $description:literal,)*) => {
        impl Settings {
            /// All settings with defaults and descriptions.
            pub(crate) const DESCRIPTION: &[(&str, f64, &str)] =
                &[$((stringify!($name), $default, $description)),*];

            $(#[doc = $description] pub(crate) fn $name(&self) -> f64 { self.0[stringify!($name)] })*
        }
    };
}

settings! {
    nodes = 1024.0: "machines that train",
    spares = 0.0: "additional machines, as spares",
    ranks = 8.0: "ranks on each machine",
    parts = 4.0: "virtual ranks for each rank of the whole fleet",
    least = 0.5: "smallest share of the ranks with which training continues",
    days = 7.0: "simulated days",
    seed = 1.0: "seed of all random decisions",
    interruptions = 0.005: "interruptions per machine and hour",
    together = 1.0: "machines that are interrupted at the same time",
    unnoticed = 0.05: "share of the interruptions without a notice",
    notice = 120.0: "seconds from the notice of an interruption to the machine's end",
    replacement = 300.0: "seconds from a machine's end to its replacement, on average",
    crashes = 2e-5: "crashes per rank process and hour",
    step = 0.5: "seconds of a step with all ranks",
    save_every = 600.0: "seconds between checkpoints",
    save = 30.0: "seconds until a checkpoint is committed",
    stall = 0.1: "seconds that training pauses for a checkpoint",
    start = 20.0: "seconds until a new process is ready",
    leave = 0.5: "most seconds until a process has left its generation",
    meet = 30.0: "seconds of a rendezvous",
    restore = 2.0: "seconds to copy the state to ranks without it",
    first = 1.0: "additional seconds of the first step",
}

impl Settings {
    /// The defaults, changed by `text`: `name=value`, separated by spaces.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut settings: BTreeMap<&'static str, f64> =
            Self::DESCRIPTION.iter().map(|(name, default, _)| (*name, *default)).collect();
        for entry in text.split_whitespace() {
            let (name, value) = entry.split_once('=').ok_or(format!("{entry}: not NAME=VALUE"))?;
            let known = settings.get_mut(name).ok_or_else(|| {
                let names: Vec<String> = Self::DESCRIPTION
                    .iter()
                    .map(|(n, d, description)| format!("  {n}={d}: {description}"))
                    .collect();
                format!("{name}: no such setting; valid settings:\n{}", names.join("\n"))
            })?;
            let number = value.parse::<f64>().ok().filter(|v| *v >= 0.0 && v.is_finite());
            *known = number.ok_or(format!("{entry}: must be a number of 0 or more"))?;
        }
        let settings = Self(settings);
        if settings.nodes() < 1.0 || settings.ranks() < 1.0 || settings.parts() < 1.0 {
            return Err("nodes, ranks and parts: must be 1 or more".to_owned());
        }
        if settings.step_ms(settings.world_size()) == 0 {
            return Err("step: must be a millisecond or more".to_owned());
        }
        Ok(settings)
    }

    /// Number of machines at a time, including spares.
    pub(crate) fn machines(&self) -> usize {
        (self.nodes() + self.spares()) as usize
    }

    /// Number of ranks that train when all machines are there.
    pub(crate) fn world_size(&self) -> u32 {
        (self.nodes() * self.ranks()) as u32
    }

    pub(crate) fn virtual_ranks(&self) -> u32 {
        self.world_size() * self.parts() as u32
    }

    pub(crate) fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.days() * 86_400.0)
    }

    /// Time of an update with `world_size` ranks: that of the rank with the most virtual ranks.
    pub(crate) fn step_ms(&self, world_size: u32) -> u64 {
        let most = self.virtual_ranks().div_ceil(world_size.max(1));
        millis(self.step() * f64::from(most) / self.parts().floor())
    }

    /// Number of updates between two checkpoints.
    pub(crate) fn save_every_steps(&self) -> u64 {
        (self.save_every() / self.step()).round().max(1.0) as u64
    }

    /// The recipe. It is past its validation, which allows 4,096 virtual ranks: of description stands in it, the
    /// machines look only at the `cluster` section and the number of ranks.
    pub(crate) fn spec(&self) -> JobSpec {
        let mut spec = common::recipe::recipe();
        spec.train.virtual_ranks = self.virtual_ranks();
        spec.cluster.max_ranks = self.world_size();
        spec.cluster.min_ranks = ((f64::from(self.world_size()) * self.least()) as u32).max(1);
        // Most heartbeats are not simulated, so hangs must not be detected.
        spec.cluster.hang_seconds = 0.0;
        spec
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = Self::DESCRIPTION.iter().map(|(name, ..)| format!("{name}={}", self.0[name]));
        f.write_str(&all.collect::<Vec<_>>().join(" "))
    }
}

/// Seconds as milliseconds.
pub(crate) fn millis(seconds: f64) -> u64 {
    (seconds * 1_000.0).round() as u64
}
