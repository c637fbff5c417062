//! What the ranks of a generation do at the moment, and who holds the others up.

use std::time::Duration;

use crate::{ids::Rank, message::Pulse, time::Time};

/// Times the median of all ranks' own time per update from which a rank is slow.
const SLOW: f64 = 1.5;
/// Pulses in a row before anybody is told: one update may be slow for any reason.
const TOLD_AFTER: u32 = 10;

/// How long a median counts: to find one looks at every rank, and there is one pulse a second from each.
const MEDIAN_COUNTS: Duration = Duration::from_millis(500);

/// By rank.
#[derive(Clone, Debug)]
pub(super) struct Pulses {
    heard: Vec<Option<Heard>>,
    /// The last median, and when it was found.
    median: Option<(Time, Option<f64>)>,
}

/// The newest word on a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Heard {
    pub(super) at: Time,
    pub(super) pulse: Pulse,
    /// Pulses in a row that it has been slow.
    slow: u32,
}

impl Pulses {
    pub(super) fn new(ranks: usize) -> Self {
        Self { heard: vec![None; ranks], median: None }
    }

    pub(super) fn of(&self, rank: Rank) -> Option<&Heard> {
        self.heard.get(rank.0 as usize)?.as_ref()
    }

    pub(super) fn forget(&mut self, rank: Rank) {
        if let Some(heard) = self.heard.get_mut(rank.0 as usize) {
            (*heard, self.median) = (None, None);
        }
    }

    /// Takes in a pulse; how slow the rank is, if that has just become worth telling.
    pub(super) fn hear(&mut self, at: Time, rank: Rank, pulse: Pulse) -> Option<f64> {
        let slot = self.heard.get_mut(rank.0 as usize)?;
        let before = slot.map_or(0, |heard| heard.slow);
        *slot = Some(Heard { at, pulse, slow: 0 });
        let median = match self.median {
            Some((found_at, median)) if at.since(found_at) < MEDIAN_COUNTS => median,
            _ => {
                let median = self.median();
                self.median = Some((at, median));
                median
            }
        };
        let slowness = self.of(rank)?.slowness(median);
        let slowness = slowness.filter(|slowness| *slowness >= SLOW)?;
        let slow = before.saturating_add(1);
        self.heard.get_mut(rank.0 as usize)?.as_mut()?.slow = slow;
        (slow == TOLD_AFTER).then_some(slowness)
    }

    /// The median of all ranks' own time per update; absent while there are not two to compare.
    pub(super) fn median(&self) -> Option<f64> {
        let own = self.heard.iter().flatten().map(|heard| heard.pulse.own_step_seconds);
        let mut own: Vec<f64> = own.filter(|seconds| *seconds > 0.0).collect();
        if own.len() < 2 {
            return None;
        }
        // Of two the faster: the mean of both would hide half of the difference.
        let middle = (own.len() - 1) / 2;
        Some(*own.select_nth_unstable_by(middle, f64::total_cmp).1)
    }
}

impl Heard {
    /// The rank's own time per update, divided by the median over all ranks.
    pub(super) fn slowness(&self, median: Option<f64>) -> Option<f64> {
        let mine = self.pulse.own_step_seconds;
        (mine > 0.0).then_some(mine / median?)
    }
}
