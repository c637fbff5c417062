//! Skipped samples, which ranks could not use: their total, and when to publish another event about them.

use std::collections::BTreeMap;

use crate::{
    ids::{LocalRank, NodeId},
    plan::Placement,
};

/// An event is due for the first skipped sample, and each time that the count has grown by this factor.
const EVENT_GROWTH_FACTOR: u64 = 10;

/// Counts of all rank processes that have reported since the coordinator started.
///
/// A process counts from its start and may live through many generations, in which its rank changes; its slot (node
/// and local rank) does not change.
#[derive(Clone, Debug, Default)]
pub(super) struct Skips {
    by_slot: BTreeMap<(NodeId, LocalRank), SkipCounts>,
    total: u64,
}

/// Counts of one process.
#[derive(Clone, Copy, Debug, Default)]
struct SkipCounts {
    /// Samples skipped so far.
    skipped: u64,
    /// Value of `skipped` at the last event.
    published: u64,
}

impl Skips {
    /// Records the number of samples that the process in a slot has skipped since it started; returns whether to
    /// publish it.
    pub(super) fn count(&mut self, placement: &Placement, skipped: u64) -> bool {
        let counts = self.by_slot.entry(key(placement)).or_default();
        if skipped < counts.skipped {
            // Counts never decrease, so this is another process.
            *counts = SkipCounts::default();
        }
        self.total = self.total.saturating_add(skipped - counts.skipped);
        counts.skipped = skipped;
        let is_due = skipped > 0 && skipped >= counts.published.saturating_mul(EVENT_GROWTH_FACTOR);
        if is_due {
            counts.published = skipped;
        }
        is_due
    }

    /// Removes the count of a process that ended; the next process in that slot counts from zero.
    pub(super) fn remove(&mut self, placement: &Placement) {
        self.by_slot.remove(&key(placement));
    }

    /// Number of samples skipped by all processes together.
    pub(super) fn total(&self) -> u64 {
        self.total
    }
}

fn key(placement: &Placement) -> (NodeId, LocalRank) {
    (placement.node.clone(), placement.local_rank)
}
