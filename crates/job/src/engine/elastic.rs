//! Nodes that join or leave while others train.
//!
//! Starting processes takes longer than opening a generation. So a joining node starts its processes first, while the
//! other nodes keep training; a new generation is opened when all processes are ready. When a node is leaving, the job
//! is drained only if too few ranks would remain. Otherwise a generation without that node is opened as soon as the
//! other ranks hold the state.

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

/// Departure of a node, whose machine will be taken away.
#[derive(Clone, Debug)]
pub(super) struct Departure {
    /// Why, as text.
    pub(super) reason: String,
    /// When the machine will be taken away, if known.
    pub(super) end: Option<Time>,
    /// When it was announced.
    pub(super) since: Time,
    /// When the node leaves at the latest.
    pub(super) until: Time,
}

/// The processes that a joining node starts before it takes part in training.
#[derive(Clone, Debug)]
pub(super) struct WarmUp {
    required: BTreeSet<LocalRank>,
    pub(super) ready: BTreeSet<LocalRank>,
    /// Deadline for the processes to be ready.
    until: Time,
}

impl WarmUp {
    fn is_done(&self) -> bool {
        self.ready.is_superset(&self.required)
    }

    /// A process is started once more.
    pub(super) fn restart(&mut self, local_rank: LocalRank, until: Time) {
        self.ready.remove(&local_rank);
        self.until = until;
    }

    /// Until when the processes that are not ready must be.
    pub(super) fn wakes_at(&self) -> Option<Time> {
        (!self.is_done()).then_some(self.until)
    }
}

/// A reason to open a generation with a different set of nodes.
pub(super) enum NodeChange {
    /// A node is leaving.
    Leaves { node: NodeId, reason: String, end: Option<Time> },
    /// The processes of a new node are ready.
    Joins { node: NodeId, ranks: usize },
}

impl Nodes {
    /// The most urgent change of the nodes in training, if there is one.
    pub(super) fn change(&self, world: &World) -> Option<NodeChange> {
        let leaving = self.iter().find_map(|(node, state)| {
            let Departure { reason, end, .. } =
                state.departure.clone().filter(|_| world.includes(node))?;
            let reason = format!("node {node}: {reason}");
            Some(NodeChange::Leaves { node: node.clone(), reason, end })
        });
        leaving.or_else(|| {
            self.iter().find_map(|(node, state)| {
                let is_ready = |warm_up: &&WarmUp| warm_up.is_done() && state.departure.is_none();
                let ranks = state.warm_up.as_ref().filter(is_ready)?.required.len();
                (!world.includes(node)).then(|| NodeChange::Joins { node: node.clone(), ranks })
            })
        })
    }

    /// Begins the warm-up of nodes that could take part but do not; returns the slots in which each must start a
    /// process by `until`.
    pub(super) fn begin_warm_ups(
        &mut self,
        world: &World,
        policy: &Policy,
        until: Time,
    ) -> Vec<(NodeId, Vec<LocalRank>)> {
        if world.size() >= policy.max_ranks {
            return Vec::new();
        }
        let offers = self.offers(|node| node.departure.is_none());
        let placements = place_ranks(&offers, policy.min_ranks, policy.max_ranks);
        let grows = |count: usize| count > world.size() as usize;
        let Some(placements) = placements.filter(|placements| grows(placements.len())) else {
            return Vec::new();
        };
        let is_new = |node: &NodeId, state: &Node| !world.includes(node) && state.warm_up.is_none();
        let new = self.iter().filter(|(node, state)| is_new(node, state));
        let mut begun = Vec::new();
        for node in new.map(|(node, _)| node.clone()).collect::<Vec<_>>() {
            let here = placements.iter().filter(|placement| placement.node == node);
            let required: BTreeSet<LocalRank> =
                here.map(|placement| placement.local_rank).collect();
            if let (false, Some(state)) = (required.is_empty(), self.get_mut(&node)) {
                let local_ranks = required.iter().copied().collect();
                state.warm_up = Some(WarmUp { required, ready: BTreeSet::new(), until });
                begun.push((node, local_ranks));
            }
        }
        begun
    }

    /// Ends the warm-up of nodes that are not ready in time, and counts that as a failure.
    pub(super) fn end_late_warm_ups(&mut self, now: Time) -> Vec<NodeId> {
        let deadline = |state: &Node| state.warm_up.as_ref().and_then(WarmUp::wakes_at);
        let is_late = |state: &Node| deadline(state).is_some_and(|at| at <= now);
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

    /// Leaving nodes that run no ranks of `world` and can be released, each with the reason. One with state is needed until
    /// the others train: the rank that seems to have it too may hang.
    pub(super) fn releasable_nodes(
        &self,
        world: Option<&World>,
        others_train: bool,
    ) -> Vec<(NodeId, String)> {
        let has_ranks = |node: &NodeId| world.is_some_and(|world| world.includes(node));
        let last_holder = self.last_holder().map(|offer| offer.node);
        self.iter()
            .filter(|(node, _)| !has_ranks(node) && last_holder.as_ref() != Some(*node))
            .filter(|(_, state)| others_train || state.holders.is_empty())
            .filter_map(|(node, state)| Some((node.clone(), state.departure.clone()?.reason)))
            .collect()
    }
}
