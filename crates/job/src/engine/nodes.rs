//! Nodes that are attached, or were until recently.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map},
    ops::Deref,
    sync::Arc,
    time::Duration,
};

use super::{
    elastic::{Departure, WarmUp},
    membership::World,
    policy::Policy,
};
use crate::{
    ids::{Attachment, LocalRank, NodeId},
    message::{AgentHeartbeat, MachineStats},
    plan::{Offer, Placement, place_ranks},
    time::Time,
};

/// An agent that has sent nothing for this long may be gone. It sends a heartbeat every second.
const MAX_SILENCE: Duration = Duration::from_secs(5);

/// A node that is attached, or was until recently.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) attachment: Attachment,
    pub(super) attached_at: Time,
    pub(super) slots: u32,
    /// While it is disconnected: when its ranks are given up.
    given_up_at: Option<Time>,
    /// Set if the node is leaving: no new generation includes it once the other ranks hold the state.
    pub(super) departure: Option<Departure>,
    /// Processes that it starts before it takes part, while others train.
    pub(super) warm_up: Option<WarmUp>,
    /// Consecutive failures: generations that its ranks ended, and warm-ups that were late.
    pub(super) failures: u32,
    /// End of its quarantine; until then it gets no ranks.
    pub(super) quarantined_until: Option<Time>,
    pub(super) heartbeat: Option<LastAgentHeartbeat>,
    /// Local ranks whose processes may hold state, as far as their reports tell.
    pub(super) holders: BTreeSet<LocalRank>,
    /// Whether one of its processes has held state.
    pub(super) has_held_state: bool,
    /// Whether it was quarantined because its ranks did not connect.
    pub(super) was_left_out: bool,
}

/// Data of an agent's last heartbeat.
#[derive(Clone, Debug)]
pub(super) struct LastAgentHeartbeat {
    pub(super) at: Time,
    pub(super) round_trip: Option<Duration>,
    pub(super) stats: Option<Arc<MachineStats>>,
}

impl Node {
    fn offer(&self, id: &NodeId, slots: u32) -> Offer {
        Offer { node: id.clone(), slots, holders: self.holders.clone() }
    }

    pub(super) fn new(attachment: Attachment, attached_at: Time, slots: u32) -> Self {
        Self {
            attachment,
            attached_at,
            slots,
            given_up_at: None,
            departure: None,
            warm_up: None,
            failures: 0,
            quarantined_until: None,
            heartbeat: None,
            holders: BTreeSet::new(),
            has_held_state: false,
            was_left_out: false,
        }
    }

    pub(super) fn is_attached(&self) -> bool {
        self.given_up_at.is_none()
    }

    /// Whether its agent has sent something a short time ago. A stream that broke may stay attached for some seconds
    /// after its agent has gone.
    pub(super) fn is_alive(&self, now: Time) -> bool {
        let heartbeat_at = self.heartbeat.as_ref().map(|last| last.at);
        let last_sign = heartbeat_at.map_or(self.attached_at, |at| at.max(self.attached_at));
        self.is_attached() && now.since(last_sign) < MAX_SILENCE
    }

    pub(super) fn is_given_up(&self, now: Time) -> bool {
        self.given_up_at.is_some_and(|at| at <= now)
    }

    pub(super) fn can_take_part(&self) -> bool {
        self.is_attached() && self.quarantined_until.is_none()
    }

    /// The next timeout of this node.
    fn wakes_at(&self) -> Option<Time> {
        let warm_up = self.warm_up.as_ref().and_then(WarmUp::wakes_at);
        self.given_up_at.into_iter().chain(self.quarantined_until).chain(warm_up).min()
    }
}

/// All nodes, by name. Every event asks which nodes are disconnected and when the next timeout is. The answers rarely
/// change, so both are cached.
#[derive(Clone, Debug, Default)]
pub(super) struct Nodes {
    all: BTreeMap<NodeId, Node>,
    /// Names of the nodes that are disconnected.
    disconnected: BTreeSet<NodeId>,
    /// Names of the nodes that are leaving.
    leaving: BTreeSet<NodeId>,
    /// Cached next timeout of all nodes; `None` once a node may have changed.
    wakes_at: Option<Option<Time>>,
}

impl Nodes {
    /// A node of `world` that is disconnected and not yet given up.
    pub(super) fn disconnected_in(&self, world: &World) -> Option<&NodeId> {
        self.all_disconnected_in(world).next()
    }

    /// The nodes of `world` that are disconnected and not yet given up.
    pub(super) fn all_disconnected_in(&self, world: &World) -> impl Iterator<Item = &NodeId> {
        self.disconnected.iter().filter(|node| world.includes(node))
    }

    pub(super) fn any_attached(&self) -> bool {
        self.all.values().any(Node::is_attached)
    }

    pub(super) fn several_are_attached(&self) -> bool {
        self.all.values().filter(|node| node.is_attached()).nth(1).is_some()
    }

    /// The nodes that can take part and match `filter`.
    fn available(&self, filter: impl Fn(&Node) -> bool) -> impl Iterator<Item = (&NodeId, &Node)> {
        self.all.iter().filter(move |(_, node)| node.can_take_part() && filter(node))
    }

    /// Number of ranks that the available nodes that match `filter` can run.
    pub(super) fn slots(&self, filter: impl Fn(&Node) -> bool) -> u32 {
        self.available(filter).map(|(_, node)| node.slots).fold(0, u32::saturating_add)
    }

    /// Number of processes that may hold state on the available nodes that match `filter`.
    pub(super) fn holders(&self, filter: impl Fn(&Node) -> bool) -> u32 {
        let holders = self.available(filter).map(|(_, node)| node.holders.len()).sum::<usize>();
        u32::try_from(holders).unwrap_or(u32::MAX)
    }

    pub(super) fn offers(&self, filter: impl Fn(&Node) -> bool) -> Vec<Offer> {
        self.available(filter).map(|(id, node)| node.offer(id, node.slots)).collect()
    }

    /// A leaving node that must run a rank until others have its state, because none that stays has any: that rank.
    pub(super) fn last_holder(&self) -> Option<Offer> {
        let state_stays = |(_, node): (&NodeId, &Node)| !node.holders.is_empty();
        if self.available(|node| node.departure.is_none()).any(state_stays) {
            return None;
        }
        let mut leaving = self.available(|node| node.departure.is_some());
        leaving.find_map(|(id, node)| Some(node.offer(id, node.holders.first()?.0 + 1)))
    }

    /// Whether the other nodes can run enough ranks without this one. If it alone holds state, it must be able to hand it
    /// over: for that, it and another node run ranks of one generation.
    pub(super) fn is_enough_without(&self, node: &NodeId, policy: &Policy) -> bool {
        let mut offers = self.offers(|state| state.departure.is_none());
        offers.retain(|offer| offer.node != *node);
        let holds_state = self.get(node).is_some_and(|state| !state.holders.is_empty());
        let must_hand_over = holds_state && offers.iter().all(|offer| offer.holders.is_empty());
        let can_hand_over = policy.max_ranks > 1;
        (can_hand_over || !must_hand_over)
            && place_ranks(&offers, policy.min_ranks, policy.max_ranks).is_some()
    }

    /// Nodes whose time to reconnect is over.
    pub(super) fn past_grace_time(&self, now: Time) -> Vec<NodeId> {
        let is_given_up =
            |id: &&NodeId| self.all.get(*id).is_some_and(|node| node.is_given_up(now));
        self.disconnected.iter().filter(is_given_up).cloned().collect()
    }

    /// Adds a node that attached; returns the previous node of that name.
    pub(super) fn insert(&mut self, id: NodeId, node: Node) -> Option<Node> {
        self.wakes_at = None;
        self.disconnected.remove(&id);
        self.leaving.remove(&id);
        self.all.insert(id, node)
    }

    /// Removes a node that will not come back.
    pub(super) fn remove(&mut self, id: &NodeId) {
        self.wakes_at = None;
        self.disconnected.remove(id);
        self.leaving.remove(id);
        self.all.remove(id);
    }

    /// Marks a node as disconnected; its ranks are given up at `given_up_at` unless it reconnects.
    pub(super) fn mark_disconnected(&mut self, id: &NodeId, given_up_at: Time) {
        if let Some(node) = self.get_mut(id) {
            node.given_up_at = Some(given_up_at);
            self.disconnected.insert(id.clone());
        }
    }

    /// Marks a node as leaving; returns whether it was not before.
    pub(super) fn mark_leaving(&mut self, id: &NodeId, departure: Departure) -> bool {
        let Some(node) = self.all.get_mut(id) else { return false };
        self.leaving.insert(id.clone());
        node.departure.replace(departure).is_none()
    }

    pub(super) fn is_any_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Stores a heartbeat of the node's agent, which changes no timeout.
    pub(super) fn record_heartbeat(&mut self, id: &NodeId, at: Time, heartbeat: AgentHeartbeat) {
        let Some(node) = self.all.get_mut(id) else { return };
        let AgentHeartbeat { round_trip, stats, .. } = heartbeat;
        let before = node.heartbeat.take().and_then(|last| last.stats);
        node.heartbeat =
            Some(LastAgentHeartbeat { at, round_trip, stats: stats.map(Arc::new).or(before) });
    }

    /// Records whether a process holds state, which changes no timeout.
    pub(super) fn record_state(&mut self, placement: &Placement, holds_state: bool) {
        let Some(node) = self.all.get_mut(&placement.node) else { return };
        node.has_held_state |= holds_state;
        match holds_state {
            true => node.holders.insert(placement.local_rank),
            false => node.holders.remove(&placement.local_rank),
        };
    }

    /// Records that a process is about to end.
    pub(super) fn forget_state(&mut self, id: &NodeId, local_rank: LocalRank) {
        if let Some(node) = self.all.get_mut(id) {
            node.holders.remove(&local_rank);
        }
    }

    /// Ends warm-ups, and forgets the state of processes that have no rank in `world`, on nodes that get its launch and
    /// so end them.
    pub(super) fn begin_generation(&mut self, launched: &BTreeSet<NodeId>, world: &World) {
        self.wakes_at = None;
        for (id, node) in &mut self.all {
            node.warm_up = None;
            if launched.contains(id) {
                let ranks = world.ranks_of(id);
                node.holders.retain(|local| ranks.iter().any(|(_, other)| other == local));
            }
        }
    }

    pub(super) fn get_mut(&mut self, id: &NodeId) -> Option<&mut Node> {
        self.wakes_at = None;
        self.all.get_mut(id)
    }

    pub(super) fn iter_mut(&mut self) -> btree_map::IterMut<'_, NodeId, Node> {
        self.wakes_at = None;
        self.all.iter_mut()
    }

    pub(super) fn values_mut(&mut self) -> btree_map::ValuesMut<'_, NodeId, Node> {
        self.wakes_at = None;
        self.all.values_mut()
    }

    /// The next timeout of all nodes.
    pub(super) fn next_wake_at(&mut self) -> Option<Time> {
        match self.wakes_at {
            Some(known) => known,
            None => *self.wakes_at.insert(self.recount_next_wake_at()),
        }
    }

    /// [`next_wake_at`](Self::next_wake_at), computed from every node instead of the cache.
    pub(super) fn recount_next_wake_at(&self) -> Option<Time> {
        self.all.values().filter_map(Node::wakes_at).min()
    }
}

impl Deref for Nodes {
    type Target = BTreeMap<NodeId, Node>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> NodeId {
        NodeId(name.to_owned())
    }

    #[test]
    fn the_next_timeout_follows_every_change() {
        let mut nodes = Nodes::default();
        nodes.insert(id("a"), Node::new(Attachment(1), Time(0), 1));
        nodes.insert(id("b"), Node::new(Attachment(2), Time(0), 1));
        assert_eq!(nodes.next_wake_at(), None);

        nodes.mark_disconnected(&id("a"), Time(50));
        assert_eq!(nodes.next_wake_at(), Some(Time(50)));
        if let Some(node) = nodes.get_mut(&id("b")) {
            node.quarantined_until = Some(Time(30));
        }
        assert_eq!(nodes.next_wake_at(), Some(Time(30)));
        nodes.record_heartbeat(&id("b"), Time(7), AgentHeartbeat::default());
        assert_eq!(nodes.next_wake_at(), Some(Time(30)));
        nodes.values_mut().for_each(|node| node.quarantined_until = None);
        assert_eq!(nodes.next_wake_at(), Some(Time(50)));
        nodes.insert(id("a"), Node::new(Attachment(3), Time(0), 1));
        assert_eq!(nodes.next_wake_at(), None);
        nodes.mark_disconnected(&id("a"), Time(60));
        nodes.remove(&id("a"));
        assert_eq!(nodes.next_wake_at(), None);
    }

    #[test]
    fn nodes_that_reconnected_or_were_removed_are_not_disconnected() {
        let mut nodes = Nodes::default();
        for name in ["a", "b", "c"] {
            nodes.insert(id(name), Node::new(Attachment(1), Time(0), 1));
            nodes.mark_disconnected(&id(name), Time(50));
        }
        nodes.mark_disconnected(&id("unknown"), Time(50));
        nodes.insert(id("a"), Node::new(Attachment(2), Time(0), 1));
        nodes.remove(&id("b"));
        assert!(nodes.disconnected.iter().eq([&id("c")]));
        assert_eq!(nodes.past_grace_time(Time(49)), []);
        assert_eq!(nodes.past_grace_time(Time(50)), [id("c")]);
    }
}
