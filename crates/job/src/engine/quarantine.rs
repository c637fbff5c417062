//! Quarantine of nodes whose ranks fail repeatedly: they get no ranks for some time.

use std::{collections::BTreeSet, time::Duration};

use super::{
    membership::{Member, World},
    nodes::{Node, Nodes},
    policy::Policy,
};
use crate::{
    ids::{NodeId, Rank},
    time::Time,
};

/// A node is quarantined when its ranks have ended this number of generations in a row.
const QUARANTINE_AFTER_FAILURES: u32 = 2;
/// Length of the first quarantine; each further one is twice as long, up to [`MAX_QUARANTINE`].
const MIN_QUARANTINE: Duration = Duration::from_secs(60);
const MAX_QUARANTINE: Duration = Duration::from_secs(960);

impl Node {
    /// Whether its ranks have failed too often in a row.
    pub(super) fn is_failing(&self) -> bool {
        self.failures >= QUARANTINE_AFTER_FAILURES
    }

    pub(super) fn count_failure(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }
}

impl Nodes {
    /// Counts a failure for each node on which one of `ranks` has died.
    pub(super) fn count_failures(&mut self, world: &World, ranks: &[Rank]) {
        let node_of = |rank: &Rank| Some(world.placement_of(*rank)?.node.clone());
        self.count_failures_of(&ranks.iter().filter_map(node_of).collect());
    }

    /// Counts a failure for each of these nodes.
    pub(super) fn count_failures_of(&mut self, nodes: &BTreeSet<NodeId>) {
        for node in nodes {
            if let Some(state) = self.get_mut(node) {
                state.count_failure();
            }
        }
    }

    /// Sets the failure counts of all nodes in `world` to zero, because training made progress. A node that was in quarantine
    /// has a part in that only if `world` trains: else it is the progress of the generation before.
    pub(super) fn reset_failure_counts(&mut self, world: &World, trains: bool) {
        // Fast path: almost always, all counts are zero.
        if self.values().all(|state| state.failures == 0) {
            return;
        }
        for (node, state) in self.iter_mut() {
            if world.includes(node) && (trains || !state.is_failing()) {
                state.failures = 0;
            }
        }
    }

    /// A node that failed too often and can be spared: the others are enough, and one of them has reported in `world` that
    /// it holds state, unless this one holds none.
    pub(super) fn failing(&self, world: &World, policy: &Policy) -> Option<NodeId> {
        let holds = |member: &Member| {
            matches!(member, Member::Lost | Member::Started | Member::Ready { step: Some(_), .. })
        };
        let can_take_part = |node| self.get(node).is_some_and(Node::can_take_part);
        let others_hold_state = |node: &NodeId| {
            let mut members = world.members();
            members.any(|(placement, member)| {
                placement.node != *node && holds(member) && can_take_part(&placement.node)
            })
        };
        let failing = self.iter().filter(|(_, state)| state.is_failing() && state.can_take_part());
        failing
            .filter(|(node, state)| state.holders.is_empty() || others_hold_state(node))
            .map(|(node, _)| node.clone())
            .find(|node| self.is_enough_without(node, policy))
    }

    /// Quarantines a node; returns the text to publish.
    pub(super) fn quarantine(&mut self, now: Time, node: &NodeId) -> Option<String> {
        let seconds = self.begin_quarantine(now, node)?.as_secs();
        let failures = self.get(node)?.failures;
        Some(format!(
            "node {node} is quarantined for {seconds} s: its ranks failed {failures} times in a row; check its logs, \
             --host, memory and GPUs"
        ))
    }

    /// Quarantines a node as one whose ranks have failed too often; returns for how long.
    pub(super) fn quarantine_unreached(&mut self, now: Time, node: &NodeId) -> Option<Duration> {
        let state = self.get_mut(node)?;
        state.failures = state.failures.saturating_add(1).max(QUARANTINE_AFTER_FAILURES);
        self.begin_quarantine(now, node)
    }

    fn begin_quarantine(&mut self, now: Time, node: &NodeId) -> Option<Duration> {
        let state = self.get_mut(node)?;
        let doubled = 1 << state.failures.saturating_sub(QUARANTINE_AFTER_FAILURES).min(8);
        let time = (MIN_QUARANTINE * doubled).min(MAX_QUARANTINE);
        state.quarantined_until = Some(now.after(time));
        Some(time)
    }

    /// Ends the quarantines of attached nodes that hold state; returns whether there were any.
    pub(super) fn end_quarantines_of_holders(&mut self) -> bool {
        self.end_quarantines_of(|node, _| node.is_attached() && !node.holders.is_empty())
    }

    /// Ends the quarantines whose time is over; returns whether there were any.
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
