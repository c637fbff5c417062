//! Generations whose ranks do not connect.
//!
//! Ranks that hold the state wait for the others until `cluster.rendezvous_seconds` are over. A node that joined and has
//! not connected then gets no ranks for a while, and is sent away the next time, if the others are enough: its address may
//! be wrong, and every further generation would wait for it again.
//!
//! If ranks report which others they could not connect to although none has died, nodes are left out until all that stay
//! reach each other, first those that most others do not reach. A network that is cut between nodes must not end a job all of
//! whose ranks are alive.
//!
//! Once ranks train, such reports tell less: in a ring, a rank may wait for one that itself waits. So they count only with
//! nodes that have joined since the last step, if there are any: the others have trained together.
//!
//! A job or a node that must leave does not wait that long. During a drain, the ranks that hold the state soon save it
//! without the others. A rank that should hold it and does not answer is replaced after half of the time that is left.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{
    Engine, JobEventKind, elastic::Departure, lifecycle::Phase, nodes::Node, nodes::Nodes,
    opening::NodeChangeCause,
};
use crate::{
    exit::{Failure, Outcome, bad_input},
    first_names,
    ids::{LocalRank, NodeId},
    message::Directive,
    plan::Placement,
    time::Time,
};

/// How long ranks may connect during a drain.
const DRAIN_CONNECT: Duration = Duration::from_secs(5);
/// How long a node that joined and did not connect gets no ranks.
const UNCONNECTED_QUARANTINE: Duration = Duration::from_secs(60);
/// Least time between two tries to connect before a node or the job leaves.
const LEAST_CONNECT: Duration = Duration::from_secs(1);
/// Number of ranks that a text names.
const NAMED_RANKS: usize = 3;

/// How a generation that still connects ends early.
enum BreakOff {
    /// The ranks that hold the state save it without the others.
    SaveAlone,
    /// Ranks that should hold the state and do not answer are replaced.
    ReplaceSilent,
    /// All ranks hold the state, and do not connect: those of one node save it.
    SaveOnOneNode,
    /// The job saves and stops, since a leaving node alone holds the state: its name, why and when it leaves.
    Drain(NodeId, Departure),
}

impl Engine {
    /// When the current generation is broken off, unless its ranks have connected by then.
    pub(super) fn breaks_off_at(&self) -> Option<Time> {
        self.next_break_off().map(|(at, _)| at)
    }

    pub(super) fn break_off_if_due(&mut self, now: Time) {
        let due = |engine: &Self| engine.next_break_off().filter(|(at, _)| *at <= now);
        let mut found = due(self);
        if let Some((_, BreakOff::Drain(node, departure))) = found {
            self.drain(now, format!("node {node}: {}", departure.reason), departure.end);
            found = due(self);
        }
        match found {
            Some((_, BreakOff::SaveAlone)) => {
                let text =
                    "ranks that hold the state save it without the others, which do not connect";
                let cause = NodeChangeCause { text: text.to_owned(), joins: false };
                self.open_for_change(now, cause);
            }
            Some((_, BreakOff::ReplaceSilent)) => {
                let waited = now.since(self.lifecycle.since).as_secs_f64().round();
                let failure = self.give_up_late(waited);
                // So that the others save without them.
                self.forget_state_of_hanging();
                self.fail(now, now, failure);
            }
            Some((_, BreakOff::SaveOnOneNode)) => self.save_on_one_node(now),
            Some((_, BreakOff::Drain(..))) | None => {}
        }
    }

    fn next_break_off(&self) -> Option<(Time, BreakOff)> {
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
        let since = self.lifecycle.since;
        let is_silent = |placement: &&Placement| {
            self.nodes.may_hold_state(placement) && !world.holds_state_at(placement.rank)
        };
        let silent = world.late().into_iter().filter(is_silent).count();
        // Otherwise nobody else has the state.
        let others =
            self.nodes.holders(|_| true).saturating_sub(silent.try_into().unwrap_or(u32::MAX));
        let is_any_silent = silent > 0 && others > 0;
        if let Some(drain) = &self.drain {
            let holds = |placement: &Placement| self.nodes.may_hold_state(placement);
            return match world.placements().iter().all(holds) {
                false => Some((since.after(DRAIN_CONNECT), BreakOff::SaveAlone)),
                true => {
                    let how = match is_any_silent {
                        true => BreakOff::ReplaceSilent,
                        false if world.is_connected() || world.nodes().nth(1).is_none() => {
                            return None;
                        }
                        false => BreakOff::SaveOnOneNode,
                    };
                    half_time(since.max(drain.since), drain.until).map(|at| (at, how))
                }
            };
        }
        if let Some((node, departure)) = self.nodes.leaving_holder() {
            let at = half_time(since.max(departure.since), departure.until)?;
            return Some((at, BreakOff::Drain(node, departure)));
        }
        let leaving = self.nodes.values().filter(|node| !node.holders.is_empty());
        let leaving = leaving.filter_map(|node| node.departure.as_ref());
        let at =
            leaving.filter_map(|departure| half_time(since.max(departure.since), departure.until));
        is_any_silent.then(|| at.min()).flatten().map(|at| (at, BreakOff::ReplaceSilent))
    }

    /// Opens a generation of the node with the newest state, and of these the one with most ranks.
    fn save_on_one_node(&mut self, now: Time) {
        let (Some(world), Some(drain)) = (self.lifecycle.world(), &self.drain) else { return };
        let (until, nodes) = (drain.until, world.nodes().cloned().collect::<Vec<_>>());
        let value = |node: &&NodeId| (world.step_at(node), world.ranks_of(node).len());
        let Some(saves) = nodes.iter().rev().max_by_key(value) else { return };
        for node in nodes.iter().filter(|node| *node != saves) {
            self.nodes.leave_out_until(node, until);
        }
        let text = format!(
            "the ranks of node {saves} save the state without the others, to which they do not connect"
        );
        self.open_for_change(now, NodeChangeCause { text, joins: false });
    }

    /// Records that the processes which the next generation replaces hold no state.
    pub(super) fn forget_state_of_hanging(&mut self) {
        for (node, local_rank) in &self.lifecycle.hanging {
            self.nodes.forget_state(node, *local_rank);
        }
    }

    /// Keeps the processes that have answered after all, while the store was slow.
    pub(super) fn keep_those_that_answered(&mut self) {
        let Some(world) = self.lifecycle.world() else { return };
        let late = world.late().into_iter();
        let silent: BTreeSet<(NodeId, LocalRank)> = late
            .filter(|placement| !world.holds_state_at(placement.rank))
            .map(|placement| (placement.node.clone(), placement.local_rank))
            .collect();
        self.lifecycle.hanging.retain(|process| silent.contains(process));
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

    /// Spares the others a further wait for nodes that joined, if a generation with them has ended before any rank trained
    /// although no process has died and all ranks that hold the state respond.
    pub(super) fn leave_out_unconnected(&mut self, now: Time, failure: &Failure) {
        let Some(world) = self.lifecycle.world() else { return };
        let late = world.late();
        let is_silent = |placement: &&Placement| self.nodes.may_hold_state(placement);
        if self.lifecycle.began_at.is_some() || world.has_gone() || late.iter().any(is_silent) {
            return;
        }
        let are_connected = world.is_connected();
        // Without late ranks all have answered, and any of them may be the one that is not reached.
        let is_suspect =
            |node: &NodeId| late.is_empty() || late.iter().any(|placement| placement.node == *node);
        let mut newcomers: Vec<NodeId> = world.nodes().cloned().collect();
        newcomers.retain(|node| is_suspect(node) && self.nodes.is_newcomer(node));
        for node in newcomers {
            if !self.nodes.is_enough_without(&node, &self.policy) {
                continue;
            }
            let problem = match are_connected {
                true => {
                    format!("its ranks did not get the state of the others: {}", failure.message)
                }
                false => format!(
                    "its ranks did not connect to the others: {}; give with --host an address of this machine that the \
                     other nodes reach",
                    failure.message
                ),
            };
            let until = now.after(UNCONNECTED_QUARANTINE);
            if self.nodes.leave_out(&node, until) {
                let seconds = UNCONNECTED_QUARANTINE.as_secs();
                let text = format!("node {node} is quarantined for {seconds} s: {problem}");
                self.publish(JobEventKind::NodeQuarantined, text);
            } else {
                self.send_away(&node, bad_input(problem));
            }
        }
    }

    /// Leaves out nodes whose ranks do not reach those of other nodes, until no such pair is left: they did not connect, or
    /// they waited for each other until the time was over, as where large packets vanish. Once they train, that must happen
    /// twice in a row without a step between: one step may be slow.
    pub(super) fn leave_out_unreached(&mut self, now: Time) {
        let Some(world) = self.lifecycle.world() else { return };
        let began_at = self.lifecycle.began_at;
        let has_stepped = began_at.is_some_and(|step| self.results.reached > step);
        let may_be_slow = began_at.is_some() && self.lifecycle.failures == 0;
        if has_stepped || may_be_slow || world.has_gone() {
            return;
        }
        let mut unreached = UnreachedNodes::new();
        for pair in world.unreached_nodes() {
            // Others were left out already.
            if pair.iter().all(|node| self.nodes.can_take_part(node)) {
                add_pair(&mut unreached, pair);
            }
        }
        let joined = self.joined_since_step();
        let mut unreached = blame_joined(&joined, unreached);
        while let Some(node) = self.most_unreached(&unreached, &joined) {
            let others = unreached.remove(&node).unwrap_or_default();
            for other in &others {
                unreached.entry(other.clone()).or_default().remove(&node);
            }
            unreached.retain(|_, others| !others.is_empty());
            let Some(time) = self.nodes.quarantine_unreached(now, &node) else { return };
            let text = format!(
                "node {node} is quarantined for {} s: its ranks and those of {} do not reach each other; check the \
                 network between them, also with large packets (MTU), and the addresses of --host",
                time.as_secs(),
                first_names(others.iter().map(NodeId::to_string), NAMED_RANKS)
            );
            self.publish(JobEventKind::NodeQuarantined, text);
        }
    }

    /// The nodes that have joined since the last step, while ranks train with others that made it. After a restart of the
    /// coordinator it is not known.
    fn joined_since_step(&self) -> BTreeSet<NodeId> {
        let (Some(world), Some((_, stepped))) = (self.lifecycle.world(), &self.lifecycle.stepped)
        else {
            return BTreeSet::new();
        };
        let trains_with_others = world.nodes().any(|node| stepped.contains(node));
        if self.lifecycle.began_at.is_none() || !trains_with_others {
            return BTreeSet::new();
        }
        let joined = world.nodes().filter(|node| !stepped.contains(*node));
        joined.filter(|node| self.nodes.can_take_part(node)).cloned().collect()
    }

    /// The node that can be spared and that most others do not reach: of two, the one that has joined, else without state,
    /// else with fewer ranks, else the later one.
    fn most_unreached(
        &self,
        unreached: &UnreachedNodes,
        joined: &BTreeSet<NodeId>,
    ) -> Option<NodeId> {
        let world = self.lifecycle.world()?;
        let mut nodes: Vec<(&NodeId, &BTreeSet<NodeId>)> = unreached.iter().collect();
        nodes.sort_by_cached_key(|(node, others)| {
            let keeps = (!self.nodes.brings_no_state(node), world.ranks_of(node).len());
            (Reverse(others.len()), !joined.contains(*node), keeps, Reverse(*node))
        });
        nodes.into_iter().map(|(node, _)| node).find(|node| self.can_spare(node)).cloned()
    }

    /// Whether the others are enough without this node. To save, one that holds the state is.
    fn can_spare(&self, node: &NodeId) -> bool {
        match self.drain {
            None => self.nodes.is_enough_without(node, &self.policy),
            Some(_) => self.nodes.others_hold_state(node),
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

/// For each node those that it does not reach, in both directions.
type UnreachedNodes = BTreeMap<NodeId, BTreeSet<NodeId>>;

fn add_pair(unreached: &mut UnreachedNodes, [one, other]: [&NodeId; 2]) {
    unreached.entry(one.clone()).or_default().insert(other.clone());
    unreached.entry(other.clone()).or_default().insert(one.clone());
}

/// Of the pairs those with a node that has joined. If the reports name none, all that waited may have waited for each of
/// these; if none has joined, all pairs.
fn blame_joined(joined: &BTreeSet<NodeId>, unreached: UnreachedNodes) -> UnreachedNodes {
    if joined.is_empty() {
        return unreached;
    }
    let is_any_named = joined.iter().any(|node| unreached.contains_key(node));
    let mut blamed = UnreachedNodes::new();
    for (node, others) in &unreached {
        for other in if is_any_named { others } else { joined } {
            if joined.contains(node) || joined.contains(other) {
                add_pair(&mut blamed, [node, other]);
            }
        }
    }
    blamed
}

/// The middle of the time that is left; `None` if none is.
fn half_time(from: Time, until: Time) -> Option<Time> {
    let left = until.since(from);
    (!left.is_zero()).then(|| from.after((left / 2).max(LEAST_CONNECT)))
}

/// Ranks with their nodes, as text.
pub(super) fn ranks_on_nodes(placements: &[&Placement]) -> String {
    let names =
        placements.iter().map(|Placement { rank, node, .. }| format!("rank {rank} on node {node}"));
    first_names(names, NAMED_RANKS)
}

impl Nodes {
    pub(super) fn may_hold_state(&self, placement: &Placement) -> bool {
        let node = self.get(&placement.node);
        node.is_some_and(|node| node.holders.contains(&placement.local_rank))
    }

    /// Whether another node that can take part holds state.
    fn others_hold_state(&self, node: &NodeId) -> bool {
        self.offers(|_| true).iter().any(|offer| offer.node != *node && !offer.holders.is_empty())
    }

    /// Whether the node is there, and not in quarantine.
    fn can_take_part(&self, node: &NodeId) -> bool {
        self.get(node).is_some_and(Node::can_take_part)
    }

    /// Whether this node holds no state, and another one does.
    pub(super) fn brings_no_state(&self, node: &NodeId) -> bool {
        self.get(node).is_some_and(|state| state.holders.is_empty())
            && self.values().any(|state| !state.holders.is_empty())
    }

    /// Whether this node has never held state, and another one does.
    fn is_newcomer(&self, node: &NodeId) -> bool {
        self.get(node).is_some_and(|state| !state.has_held_state) && self.brings_no_state(node)
    }

    /// Gives a node no ranks until then.
    fn leave_out_until(&mut self, node: &NodeId, until: Time) {
        if let Some(state) = self.get_mut(node) {
            state.quarantined_until = Some(until);
        }
    }

    /// Gives a node that did not connect no ranks until then; false if that has happened before.
    fn leave_out(&mut self, node: &NodeId, until: Time) -> bool {
        let Some(state) = self.get_mut(node) else { return false };
        let is_first = !state.was_left_out;
        state.was_left_out = true;
        state.quarantined_until = Some(until);
        is_first
    }

    /// A leaving node that must hand its state over, since no node that stays has any.
    fn leaving_holder(&self) -> Option<(NodeId, Departure)> {
        let node = self.last_holder()?.node;
        let departure = self.get(&node)?.departure.clone()?;
        Some((node, departure))
    }
}
