//! Heartbeats of the ranks of a generation, and detection of stragglers.

use std::time::Duration;

use crate::{ids::Rank, message::RankHeartbeat, time::Time};

/// A rank is slow if its own time per update is at least this many times the median of all ranks.
const SLOW_FACTOR: f64 = 1.5;
/// Number of slow heartbeats in a row before an event is published: a single update may be slow for many reasons.
const REPORT_AFTER_HEARTBEATS: u32 = 10;

/// How long a computed median is reused: computing it visits every rank, and each rank sends a heartbeat every second.
const MEDIAN_MAX_AGE: Duration = Duration::from_millis(500);

/// The last heartbeats of all ranks.
#[derive(Clone, Debug)]
pub(super) struct RankHeartbeats {
    /// Indexed by rank.
    latest: Vec<Option<LastRankHeartbeat>>,
    /// The last median, and when it was computed.
    median: Option<(Time, Option<f64>)>,
}

/// The last heartbeat of a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LastRankHeartbeat {
    pub(super) at: Time,
    pub(super) heartbeat: RankHeartbeat,
    /// Number of heartbeats in a row in which it was slow.
    slow: u32,
}

impl RankHeartbeats {
    pub(super) fn new(ranks: usize) -> Self {
        Self { latest: vec![None; ranks], median: None }
    }

    pub(super) fn latest(&self, rank: Rank) -> Option<&LastRankHeartbeat> {
        self.latest.get(rank.0 as usize)?.as_ref()
    }

    pub(super) fn remove(&mut self, rank: Rank) {
        if let Some(last) = self.latest.get_mut(rank.0 as usize) {
            (*last, self.median) = (None, None);
        }
    }

    /// Records a heartbeat; returns how slow the rank is, if an event about it is due now.
    pub(super) fn record(&mut self, at: Time, rank: Rank, heartbeat: RankHeartbeat) -> Option<f64> {
        let slot = self.latest.get_mut(rank.0 as usize)?;
        let before = slot.map_or(0, |last| last.slow);
        *slot = Some(LastRankHeartbeat { at, heartbeat, slow: 0 });
        let median = match self.median {
            Some((computed_at, median)) if at.since(computed_at) < MEDIAN_MAX_AGE => median,
            _ => {
                let median = self.median();
                self.median = Some((at, median));
                median
            }
        };
        let slowdown = self.latest(rank)?.slowdown(median);
        let slowdown = slowdown.filter(|slowdown| *slowdown >= SLOW_FACTOR)?;
        let slow = before.saturating_add(1);
        self.latest.get_mut(rank.0 as usize)?.as_mut()?.slow = slow;
        (slow == REPORT_AFTER_HEARTBEATS).then_some(slowdown)
    }

    /// The median of all ranks' own time per update; absent with fewer than two values.
    pub(super) fn median(&self) -> Option<f64> {
        let own = self.latest.iter().flatten().map(|last| last.heartbeat.own_step_seconds);
        let mut own: Vec<f64> = own.filter(|seconds| *seconds > 0.0).collect();
        if own.len() < 2 {
            return None;
        }
        // Of two middle values, the lower one: the mean of both would hide half of the difference.
        let middle = (own.len() - 1) / 2;
        Some(*own.select_nth_unstable_by(middle, f64::total_cmp).1)
    }
}

impl LastRankHeartbeat {
    /// The rank's own time per update, divided by the median over all ranks.
    pub(super) fn slowdown(&self, median: Option<f64>) -> Option<f64> {
        let mine = self.heartbeat.own_step_seconds;
        (mine > 0.0).then_some(mine / median?)
    }
}
