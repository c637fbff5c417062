//! What is simulated: the fleet, how often it is interrupted, and how long things take.

use std::{collections::BTreeMap, fmt, time::Duration};

use baton_recipe::JobSpec;

use crate::common;

/// Milliseconds of an hour.
pub(crate) const HOUR: f64 = 3_600_000.0;

/// The facts of one run. Times are in seconds, rates per hour; see [`Settings::DESCRIPTION`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings(BTreeMap<&'static str, f64>);

macro_rules! settings {
    ($($name:ident = $default:literal: $what:literal,)*) => {
        impl Settings {
            /// All of them with their defaults, and what they mean.
            pub(crate) const DESCRIPTION: &[(&str, f64, &str)] =
                &[$((stringify!($name), $default, $what)),*];

            $(#[doc = $what] pub(crate) fn $name(&self) -> f64 { self.0[stringify!($name)] })*
        }
    };
}

settings! {
    nodes = 1024.0: "machines that train",
    spares = 0.0: "machines beyond them, which stand by",
    ranks = 8.0: "ranks of each machine",
    parts = 4.0: "virtual ranks for each rank of the whole fleet",
    least = 0.5: "share of the ranks with which training goes on",
    days = 7.0: "simulated",
    seed = 1.0: "decides everything that is left to chance",
    interruptions = 0.005: "of a machine and hour",
    together = 1.0: "machines that are interrupted at the same time",
    unnoticed = 0.05: "share of the interruptions that nobody is told of before",
    notice = 120.0: "seconds from the word of an interruption to the machine's end",
    replacement = 300.0: "seconds from a machine's end to another one, on average",
    crashes = 2e-5: "of a rank's process and hour",
    step = 0.5: "seconds of an update with all ranks",
    save_every = 600.0: "seconds between checkpoints",
    save = 30.0: "seconds until one is committed",
    stall = 0.1: "seconds that training stands still for one",
    start = 20.0: "seconds until a new process is ready",
    leave = 0.5: "seconds until a process has left its generation, at most",
    meet = 30.0: "seconds that ranks take to meet",
    restore = 2.0: "seconds to hand the state to those who lack it",
    first = 1.0: "seconds that the first update takes longer",
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
                    .map(|(n, d, what)| format!("  {n}={d}: {what}"))
                    .collect();
                format!("{name}: no such setting; there are\n{}", names.join("\n"))
            })?;
            let number = value.parse::<f64>().ok().filter(|v| *v >= 0.0 && v.is_finite());
            *known = number.ok_or(format!("{entry}: not a number from zero on"))?;
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

    /// Machines that somebody pays for at a time.
    pub(crate) fn machines(&self) -> usize {
        (self.nodes() + self.spares()) as usize
    }

    /// Ranks that train when all machines are there.
    pub(crate) fn world_size(&self) -> u32 {
        (self.nodes() * self.ranks()) as u32
    }

    pub(crate) fn virtual_ranks(&self) -> u32 {
        self.world_size() * self.parts() as u32
    }

    pub(crate) fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.days() * 86_400.0)
    }

    /// How long an update takes with so many ranks: the one with most virtual ranks keeps the others waiting.
    pub(crate) fn step_ms(&self, world_size: u32) -> u64 {
        let most = self.virtual_ranks().div_ceil(world_size.max(1));
        millis(self.step() * f64::from(most) / self.parts().floor())
    }

    /// Updates between two checkpoints.
    pub(crate) fn save_every_steps(&self) -> u64 {
        (self.save_every() / self.step()).round().max(1.0) as u64
    }

    /// The recipe. It is past its validation, which allows 4,096 virtual ranks: of what stands in it, the machines
    /// look only at the `cluster` section and the number of ranks.
    pub(crate) fn spec(&self) -> JobSpec {
        let mut spec = common::recipe::recipe();
        spec.train.virtual_ranks = self.virtual_ranks();
        spec.cluster.max_ranks = self.world_size();
        spec.cluster.min_ranks = ((f64::from(self.world_size()) * self.least()) as u32).max(1);
        // The pulses that would tell a hang are left out.
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

/// Seconds, as the machines' clocks go.
pub(crate) fn millis(seconds: f64) -> u64 {
    (seconds * 1_000.0).round() as u64
}
