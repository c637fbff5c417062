//! Nodes whose ranks fail again and again are left out for a while.

use std::time::Duration;

use super::{
    membership::{Member, World},
    nodes::{Node, Nodes},
};
use crate::{
    ids::{NodeId, Rank},
    time::Time,
};

/// Generations in a row that a node's ranks may end before it is left out.
const TOLERATED: u32 = 2;
/// For how long it is left out then; twice as long each further time, up to [`LONGEST`].
const SHORTEST: Duration = Duration::from_secs(60);
const LONGEST: Duration = Duration::from_secs(960);

impl Node {
    /// Whether its ranks have failed too often one after the other.
    pub(super) fn is_failing(&self) -> bool {
        self.failures >= TOLERATED
    }

    pub(super) fn count_failure(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }
}

impl Nodes {
    /// Counts a failure for each node on which one of `ranks` has died.
    pub(super) fn count_failures(&mut self, world: &World, ranks: &[Rank]) {
        let node_of = |rank: &Rank| Some(world.place_of(*rank)?.node.clone());
        let mut nodes: Vec<NodeId> = ranks.iter().filter_map(node_of).collect();
        nodes.dedup();
        for node in nodes {
            if let Some(state) = self.get_mut(&node) {
                state.count_failure();
            }
        }
    }

    /// There was progress: nodes that took part start from zero.
    pub(super) fn reset_failure_counts(&mut self, world: &World) {
        // Almost always all are zero.
        if self.values().all(|state| state.failures == 0) {
            return;
        }
        for (node, state) in self.iter_mut() {
            if world.includes(node) {
                state.failures = 0;
            }
        }
    }

    /// Nodes that failed too often, and do not hold the only state of `world`.
    pub(super) fn failing(&self, world: &World) -> Vec<NodeId> {
        let holds = |member: &Member| {
            matches!(member, Member::Lost | Member::Started | Member::Ready { step: Some(_), .. })
        };
        let holder_among = |wanted: &dyn Fn(&NodeId) -> bool| {
            world.members().any(|(place, member)| holds(member) && wanted(&place.node))
        };
        self.iter()
            .filter(|(_, state)| state.is_failing() && state.quarantined_until.is_none())
            .filter(|(node, _)| {
                !holder_among(&|other| other == *node) || holder_among(&|other| other != *node)
            })
            .map(|(node, _)| node.clone())
            .collect()
    }

    /// Leaves a node out for a while; what to announce.
    pub(super) fn quarantine(&mut self, now: Time, node: &NodeId) -> Option<String> {
        let state = self.get_mut(node)?;
        let failures = state.failures;
        let doubled = 1 << failures.saturating_sub(TOLERATED).min(8);
        let time = (SHORTEST * doubled).min(LONGEST);
        state.quarantined_until = Some(now.after(time));
        let seconds = time.as_secs();
        Some(format!(
            "node {node} is left out for {seconds} s: its ranks failed {failures} times one after the other; look \
             at its logs, its memory and its GPUs"
        ))
    }

    /// Takes back all that are left out; whether there are any.
    pub(super) fn end_all_quarantines(&mut self) -> bool {
        self.end_quarantines_of(|node, _| node.is_attached())
    }

    /// Takes back those that have been left out long enough; whether there are any.
    pub(super) fn end_quarantines(&mut self, now: Time) -> bool {
        self.end_quarantines_of(|_, until| until <= now)
    }

    fn end_quarantines_of(&mut self, ends: impl Fn(&Node, Time) -> bool) -> bool {
        let mut any = false;
        for state in self.values_mut() {
            if state.quarantined_until.is_some_and(|until| ends(state, until)) {
                state.quarantined_until = None;
                any = true;
            }
        }
        any
    }
}
