//! Generations whose ranks do not connect.
//!
//! Ranks that hold the state wait for the others until `cluster.rendezvous_seconds` are over. A node that joined without
//! state is then sent away, if the others are enough: its address may be wrong, and every further generation would wait
//! for it again. A job or a node that must leave does not wait that long: the ranks that hold the state save it alone.

use std::time::Duration;

use super::{Engine, JobEventKind, lifecycle::Phase, nodes::Nodes, opening::NodeChangeCause};
use crate::{
    exit::{Failure, Outcome, crash},
    ids::NodeId,
    message::Directive,
    plan::Placement,
    time::Time,
};

/// How long ranks may connect during a drain.
const DRAIN_CONNECT: Duration = Duration::from_secs(5);
/// Number of ranks that a text names.
const NAMED_RANKS: usize = 3;

impl Engine {
    /// When the current generation is broken off, unless its ranks have connected by then, so that those that hold the
    /// state can save it in time.
    pub(super) fn breaks_off_at(&self) -> Option<Time> {
        let (Phase::Forming { world, .. } | Phase::Meeting { world, .. }) = &self.lifecycle.phase
        else {
            return None;
        };
        if self.drain.is_none() && !self.nodes.is_any_leaving() {
            return None;
        }
        // A node that reconnects may hold the newest state.
        if self.nodes.disconnected_in(world).is_some() || self.nodes.holders(|_| true) == 0 {
            return None;
        }
        let earliest = self.lifecycle.since.after(DRAIN_CONNECT);
        if self.drain.is_some() {
            let holds = |placement: &Placement| self.nodes.may_hold_state(placement);
            return (!world.placements().iter().all(holds)).then_some(earliest);
        }
        let leaving = self.nodes.values().filter(|node| !node.holders.is_empty());
        let saves_at = leaving.filter_map(|node| Some(node.departure.as_ref()?.saves_at)).min();
        saves_at.map(|at| at.max(earliest))
    }

    pub(super) fn break_off_if_due(&mut self, now: Time) {
        if self.breaks_off_at().is_none_or(|at| at > now) {
            return;
        }
        if self.drain.is_none() {
            match self.nodes.leaving_holder() {
                Some((node, reason, end)) => {
                    self.drain(now, format!("node {node}: {reason}"), end);
                }
                // Another rank that holds the state does not respond. The next generation replaces it, with the state of
                // the leaving node.
                None => return self.fail_late(now),
            }
        }
        if self.breaks_off_at().is_some_and(|at| at <= now) {
            let text = "ranks that hold the state save it without the others, which do not connect";
            let cause = NodeChangeCause { text: text.to_owned(), joins: false };
            self.open_for_change(now, cause);
        }
    }

    /// Opens a generation without a leaving node that has no state, if the current one still connects: the others need not
    /// wait for it.
    pub(super) fn continue_without_leaving(&mut self, now: Time, node: &NodeId, reason: &str) {
        let (Phase::Forming { world, .. } | Phase::Meeting { world, .. }) = &self.lifecycle.phase
        else {
            return;
        };
        let is_any_away = self.nodes.disconnected_in(world).is_some();
        if world.includes(node) && !is_any_away && self.nodes.brings_no_state(node) {
            let text = format!("node {node}: {reason}");
            self.open_for_change(now, NodeChangeCause { text, joins: false });
        }
    }

    /// Sends away nodes that joined without state, if a generation with them has ended before any rank trained although
    /// no process has died and all ranks that hold the state respond.
    pub(super) fn send_away_if_not_connected(&mut self, failure: &Failure) {
        let Some(world) = self.lifecycle.world() else { return };
        let responds = |placement: &&Placement| !self.nodes.may_hold_state(placement);
        let late = world.late();
        if self.lifecycle.began_at.is_some() || world.has_gone() || !late.iter().all(responds) {
            return;
        }
        let mut newcomers: Vec<NodeId> = world.nodes().cloned().collect();
        newcomers.retain(|node| self.nodes.brings_no_state(node));
        for node in newcomers {
            if self.nodes.is_enough_without(&node, &self.policy) {
                let message = format!(
                    "its ranks did not connect to the others: {}; give with --host an address of this machine that the \
                     other nodes reach",
                    failure.message
                );
                self.send_away(&node, crash(message));
            }
        }
    }

    /// Whether a generation has ended before any rank trained only because of nodes without state that can be spared: they
    /// are quarantined, and must not end the job of the others.
    pub(super) fn only_newcomers_failed(&self) -> bool {
        let Some(world) = self.lifecycle.world() else { return false };
        let can_be_spared = |node: &NodeId| {
            self.nodes.brings_no_state(node) && self.nodes.is_enough_without(node, &self.policy)
        };
        self.lifecycle.began_at.is_none()
            && world.has_gone()
            && world.gone().all(|placement| can_be_spared(&placement.node))
    }

    /// Removes a node whose ranks would fail again.
    pub(super) fn send_away(&mut self, node: &NodeId, failure: Failure) {
        let text =
            format!("node {node} is sent away, and training continues without it: {failure}");
        self.publish(JobEventKind::NodeLeaves, text);
        self.send(node, Directive::Dismiss { outcome: Outcome::Failed { failure } });
        self.nodes.remove(node);
    }

    /// What a generation waits for whose ranks have not all started their processes; `None` if none has.
    pub(super) fn missing_ranks(&self) -> Option<String> {
        let Phase::Forming { world, .. } = &self.lifecycle.phase else { return None };
        let late = world.late();
        let ready = world.placements().len().checked_sub(late.len()).filter(|ready| *ready > 0)?;
        (!late.is_empty())
            .then(|| format!("waiting for {} to start; {ready} ready", ranks_on_nodes(&late)))
    }
}

/// Ranks with their nodes, as text.
pub(super) fn ranks_on_nodes(placements: &[&Placement]) -> String {
    let named = placements.iter().take(NAMED_RANKS);
    let named: Vec<String> = named
        .map(|placement| format!("rank {} on node {}", placement.rank, placement.node))
        .collect();
    match placements.len().saturating_sub(NAMED_RANKS) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

impl Nodes {
    fn may_hold_state(&self, placement: &Placement) -> bool {
        let node = self.get(&placement.node);
        node.is_some_and(|node| node.holders.contains(&placement.local_rank))
    }

    /// Whether this node holds no state, and another one does.
    pub(super) fn brings_no_state(&self, node: &NodeId) -> bool {
        self.get(node).is_some_and(|state| state.holders.is_empty())
            && self.values().any(|state| !state.holders.is_empty())
    }

    /// A leaving node that must hand its state over, since no node that stays has any: its name, and why and when it
    /// leaves.
    fn leaving_holder(&self) -> Option<(NodeId, String, Option<Time>)> {
        let node = self.last_holder()?.node;
        let departure = self.get(&node)?.departure.clone()?;
        Some((node, departure.reason, departure.end))
    }
}
