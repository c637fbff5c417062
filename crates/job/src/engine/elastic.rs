//! Nodes that come and go while others train.
//!
//! To start processes takes longer than to bring them into a generation. So a node that joins is told to
//! start its processes first, and the others train on; when all are ready a new generation is opened.

use std::collections::BTreeSet;

use super::{Engine, Node, NoticeKind, Phase, Recovery, drain::Leaving, membership::Kind};
use crate::{
    exit::Failure,
    ids::{LocalRank, NodeId},
    message::Directive,
    plan::place_ranks,
    time::Time,
};

/// What a node was told to start before it is taken in.
#[derive(Clone, Debug)]
pub(super) struct Warming {
    wanted: BTreeSet<LocalRank>,
    ready: BTreeSet<LocalRank>,
    /// When nobody waits for it any more.
    pub(super) until: Time,
}

impl Warming {
    fn is_done(&self) -> bool {
        self.ready.is_superset(&self.wanted)
    }
}

impl Engine {
    /// Opens a generation of other nodes, if some must go or have become ready.
    pub(super) fn adapt(&mut self, now: Time) {
        let Phase::Training { world } = &self.phase else { return };
        // Who is away may have the furthest state; and what is all but done is better ended.
        let all_train = world.all_are(&[Kind::Started]);
        if self.drain.is_some() || self.away(world).is_some() || !all_train {
            return;
        }
        let leaving = self.nodes.iter().find_map(|(node, state)| {
            let Leaving { reason, end } = state.leaving.clone().filter(|_| world.includes(node))?;
            Some((node.clone(), format!("node {node}: {reason}"), end))
        });
        if let Some((node, reason, end)) = leaving {
            return match self.is_enough_without(&node) {
                true => self.regroup(now, &reason),
                false => self.drain(now, reason, end),
            };
        }
        let ready = self.nodes.iter().find_map(|(node, state)| {
            let is_ready = |warming: &&Warming| warming.is_done() && state.leaving.is_none();
            let warming = state.warming.as_ref().filter(is_ready)?;
            (!world.includes(node)).then(|| (node.clone(), warming.wanted.len()))
        });
        if let Some((node, count)) = ready {
            let ranks = if count == 1 { "rank" } else { "ranks" };
            let cause = format!("node {node} takes part with {count} {ranks} from here on");
            self.announce(NoticeKind::Grows, cause.clone());
            return self.regroup(now, &cause);
        }
        self.warm_up_newcomers(now);
    }

    /// Tells nodes that could take part to start their processes.
    fn warm_up_newcomers(&mut self, now: Time) {
        let Phase::Training { world } = &self.phase else { return };
        let (least, most) = (self.policy.min_ranks, self.policy.max_ranks);
        if world.size() >= most {
            return;
        }
        let offers = self.offers(|node| node.leaving.is_none());
        let Some(placements) = place_ranks(&offers, least, most) else { return };
        if placements.len() <= world.size() as usize {
            return;
        }
        let is_new = |node: &NodeId, state: &Node| !world.includes(node) && state.warming.is_none();
        let new = self.nodes.iter().filter(|(node, state)| is_new(node, state));
        let new: Vec<NodeId> = new.map(|(node, _)| node.clone()).collect();
        for node in new {
            let here = placements.iter().filter(|place| place.node == node);
            let wanted: BTreeSet<LocalRank> = here.map(|place| place.local_rank).collect();
            if wanted.is_empty() {
                continue;
            }
            let local_ranks = wanted.iter().copied().collect();
            if let Some(state) = self.nodes.get_mut(&node) {
                let until = now.after(self.policy.rendezvous);
                state.warming = Some(Warming { wanted, ready: BTreeSet::new(), until });
            }
            self.send(&node, Directive::Warm { local_ranks });
        }
    }

    /// A process of a node that joined is ready. Once all are, the node is taken in.
    pub(super) fn heard_warm(&mut self, now: Time, node: &NodeId, local_rank: LocalRank) {
        let warming = self.nodes.get_mut(node).and_then(|state| state.warming.as_mut());
        if let Some(warming) = warming {
            warming.ready.insert(local_rank);
            self.adapt(now);
        }
    }

    /// A process that was to be ready ended. It is tried once more.
    pub(super) fn warm_failed(
        &mut self,
        now: Time,
        node: &NodeId,
        local_rank: LocalRank,
        failure: &Failure,
    ) {
        let text = format!("a process that was to join on node {node} ended: {failure}");
        self.announce(NoticeKind::RankFailed, text);
        let Some(state) = self.nodes.get_mut(node) else { return };
        state.blamed = state.blamed.saturating_add(1);
        if state.is_bad() {
            state.warming = None;
            return self.rest(now, node);
        }
        if let Some(warming) = &mut state.warming {
            warming.ready.remove(&local_rank);
            self.send(node, Directive::Warm { local_ranks: vec![local_rank] });
        }
    }

    /// Gives up on nodes that are never ready.
    pub(super) fn give_up_warming(&mut self, now: Time) {
        let is_late = |state: &Node| state.warming.as_ref().is_some_and(|w| w.until <= now);
        let late = self.nodes.iter().filter(|(_, state)| is_late(state));
        let late: Vec<NodeId> = late.map(|(node, _)| node.clone()).collect();
        for node in late {
            if let Some(state) = self.nodes.get_mut(&node) {
                state.warming = None;
                state.blamed = state.blamed.saturating_add(1);
            }
            self.rest(now, &node);
        }
    }

    /// Opens a generation of other nodes although nothing failed. Every rank keeps its state.
    fn regroup(&mut self, now: Time, cause: &str) {
        let recovery = Recovery::new(self.generation, cause, now, self.reached);
        self.begin_recovery(now, Recovery { planned: true, ..recovery });
        self.open(now);
        self.release_the_leaving();
    }
}
