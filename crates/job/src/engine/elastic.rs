//! Nodes that come and go while others train.
//!
//! To start processes takes longer than to bring them into a generation. So a node that joins starts its processes
//! first, and the others train on; when all are ready a new generation is opened. A node that must go takes the job
//! down with it only if too few ranks would be left. Else the others open a generation without it, as soon as they
//! hold the state.

use std::collections::BTreeSet;

use super::{
    membership::World,
    nodes::{Node, Nodes},
    policy::Policy,
};
use crate::{
    ids::{LocalRank, NodeId},
    plan::place_ranks,
    time::Time,
};

/// A node's machine is taken away.
#[derive(Clone, Debug)]
pub(super) struct Leaving {
    /// Why, in words.
    pub(super) reason: String,
    /// When, if that is known.
    pub(super) end: Option<Time>,
}

/// The processes that a node starts before it takes part.
#[derive(Clone, Debug)]
pub(super) struct WarmUp {
    wanted: BTreeSet<LocalRank>,
    pub(super) ready: BTreeSet<LocalRank>,
    /// When nobody waits for it any more.
    pub(super) until: Time,
}

impl WarmUp {
    fn is_done(&self) -> bool {
        self.ready.is_superset(&self.wanted)
    }
}

/// Why those that train need a generation of other nodes.
pub(super) enum Change {
    /// A node must go.
    Leaves { node: NodeId, reason: String, end: Option<Time> },
    /// The processes of a new node are ready.
    Joins { node: NodeId, ranks: usize },
}

impl Nodes {
    /// The most pressing change of those that train, if there is one.
    pub(super) fn change(&self, world: &World) -> Option<Change> {
        let leaving = self.iter().find_map(|(node, state)| {
            let Leaving { reason, end } = state.leaving.clone().filter(|_| world.includes(node))?;
            let reason = format!("node {node}: {reason}");
            Some(Change::Leaves { node: node.clone(), reason, end })
        });
        leaving.or_else(|| {
            self.iter().find_map(|(node, state)| {
                let is_ready = |warm_up: &&WarmUp| warm_up.is_done() && state.leaving.is_none();
                let ranks = state.warm_up.as_ref().filter(is_ready)?.wanted.len();
                (!world.includes(node)).then(|| Change::Joins { node: node.clone(), ranks })
            })
        })
    }

    /// Nodes that could take part and do not, and what they have to start, until `until`.
    pub(super) fn begin_warm_ups(
        &mut self,
        world: &World,
        policy: &Policy,
        until: Time,
    ) -> Vec<(NodeId, Vec<LocalRank>)> {
        if world.size() >= policy.max_ranks {
            return Vec::new();
        }
        let offers = self.offers(|node| node.leaving.is_none());
        let placements = place_ranks(&offers, policy.min_ranks, policy.max_ranks);
        let grows = |count: usize| count > world.size() as usize;
        let Some(placements) = placements.filter(|placements| grows(placements.len())) else {
            return Vec::new();
        };
        let is_new = |node: &NodeId, state: &Node| !world.includes(node) && state.warm_up.is_none();
        let new = self.iter().filter(|(node, state)| is_new(node, state));
        let mut begun = Vec::new();
        for node in new.map(|(node, _)| node.clone()).collect::<Vec<_>>() {
            let here = placements.iter().filter(|place| place.node == node);
            let wanted: BTreeSet<LocalRank> = here.map(|place| place.local_rank).collect();
            if let (false, Some(state)) = (wanted.is_empty(), self.get_mut(&node)) {
                let local_ranks = wanted.iter().copied().collect();
                state.warm_up = Some(WarmUp { wanted, ready: BTreeSet::new(), until });
                begun.push((node, local_ranks));
            }
        }
        begun
    }

    /// Gives up on nodes that are not ready in time, and counts that as a failure.
    pub(super) fn end_late_warm_ups(&mut self, now: Time) -> Vec<NodeId> {
        let is_late = |state: &Node| state.warm_up.as_ref().is_some_and(|w| w.until <= now);
        let late = self.iter().filter(|(_, state)| is_late(state));
        let late: Vec<NodeId> = late.map(|(node, _)| node.clone()).collect();
        for node in &late {
            if let Some(state) = self.get_mut(node) {
                state.warm_up = None;
                state.count_failure();
            }
        }
        late
    }

    /// Nodes that must go and that no generation counts on: they may go, and why.
    pub(super) fn free_to_leave(&self, world: Option<&World>) -> Vec<(NodeId, String)> {
        let is_counted_on = |node: &NodeId| world.is_some_and(|world| world.includes(node));
        self.iter()
            .filter(|(node, _)| !is_counted_on(node))
            .filter_map(|(node, state)| Some((node.clone(), state.leaving.clone()?.reason)))
            .collect()
    }
}
