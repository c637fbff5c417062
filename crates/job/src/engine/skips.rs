//! Samples that ranks could not use: how many in all, and when another word about them is due.

use std::collections::BTreeMap;

use crate::{
    ids::{LocalRank, NodeId},
    plan::Placement,
};

/// A word is due for the first skipped sample, and each time there are this many times as many.
const GROWTH: u64 = 10;

/// The counts of all rank processes heard of since the coordinator started.
///
/// A process counts from its start and may live through many generations, where its rank changes;
/// what stays is its place: node and local rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Skips {
    places: BTreeMap<(NodeId, LocalRank), Told>,
    total: u64,
}

/// What the process at one place told, and what was said of it.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    skipped: u64,
    announced: u64,
}

impl Skips {
    /// Takes in how many samples the process at `place` has skipped since it started, and says
    /// whether to announce it.
    pub(super) fn count(&mut self, place: &Placement, skipped: u64) -> bool {
        let told = self.places.entry(key(place)).or_default();
        if skipped < told.skipped {
            // Counts never shrink: this is another process.
            *told = Told::default();
        }
        self.total = self.total.saturating_add(skipped - told.skipped);
        told.skipped = skipped;
        let is_due = skipped > 0 && skipped >= told.announced.saturating_mul(GROWTH);
        if is_due {
            told.announced = skipped;
        }
        is_due
    }

    /// The process at `place` has ended: the next one there counts from nothing.
    pub(super) fn forget(&mut self, place: &Placement) {
        self.places.remove(&key(place));
    }

    /// Samples skipped by all processes together.
    pub(super) fn total(&self) -> u64 {
        self.total
    }
}

fn key(place: &Placement) -> (NodeId, LocalRank) {
    (place.node.clone(), place.local_rank)
}
