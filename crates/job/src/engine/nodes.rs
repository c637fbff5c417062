//! The nodes that are attached, or were a moment ago.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map},
    ops::Deref,
    sync::Arc,
    time::Duration,
};

use super::{
    elastic::{Leaving, WarmUp},
    membership::World,
    policy::Policy,
};
use crate::{
    ids::{Attachment, NodeId},
    message::{Beat, Vitals},
    plan::{Offer, place_ranks},
    time::Time,
};

/// An attached or lately lost node.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) attachment: Attachment,
    pub(super) slots: u32,
    /// Set while it is away: when its ranks are given up.
    given_up_at: Option<Time>,
    /// Set if its machine is taken away: no new generation counts on it once the others hold the state.
    pub(super) leaving: Option<Leaving>,
    /// What it is starting, if others train and it does not.
    pub(super) warm_up: Option<WarmUp>,
    /// Generations that its ranks ended one after the other.
    pub(super) failures: u32,
    /// End of its quarantine: until then nobody counts on it.
    pub(super) quarantined_until: Option<Time>,
    pub(super) beat: Option<Heartbeat>,
}

/// What an agent last reported of itself and its machine.
#[derive(Clone, Debug)]
pub(super) struct Heartbeat {
    pub(super) at: Time,
    pub(super) round_trip: Option<Duration>,
    pub(super) vitals: Option<Arc<Vitals>>,
}

impl Node {
    pub(super) fn new(attachment: Attachment, slots: u32) -> Self {
        Self {
            attachment,
            slots,
            given_up_at: None,
            leaving: None,
            warm_up: None,
            failures: 0,
            quarantined_until: None,
            beat: None,
        }
    }

    pub(super) fn is_attached(&self) -> bool {
        self.given_up_at.is_none()
    }

    pub(super) fn is_given_up(&self, now: Time) -> bool {
        self.given_up_at.is_some_and(|at| at <= now)
    }

    pub(super) fn can_take_part(&self) -> bool {
        self.is_attached() && self.quarantined_until.is_none()
    }

    /// When time alone changes something about it.
    fn wakes_at(&self) -> Option<Time> {
        let warm_up = self.warm_up.as_ref().map(|warm_up| warm_up.until);
        self.given_up_at.into_iter().chain(self.quarantined_until).chain(warm_up).min()
    }
}

/// All of them, by name. With every event it is asked who is away and when time changes something, and almost always
/// nobody is and nothing has changed.
#[derive(Clone, Debug, Default)]
pub(super) struct Nodes {
    all: BTreeMap<NodeId, Node>,
    away: BTreeSet<NodeId>,
    /// When time alone changes something about one of them; unknown once one may have changed.
    wakes_at: Option<Option<Time>>,
}

impl Nodes {
    /// A node of `world` that is away and not yet given up.
    pub(super) fn away_from(&self, world: &World) -> Option<&NodeId> {
        self.away.iter().find(|node| world.includes(node))
    }

    pub(super) fn any_attached(&self) -> bool {
        self.all.values().any(Node::is_attached)
    }

    /// The nodes that can take part and are wanted.
    fn present(&self, wanted: impl Fn(&Node) -> bool) -> impl Iterator<Item = (&NodeId, &Node)> {
        self.all.iter().filter(move |(_, node)| node.can_take_part() && wanted(node))
    }

    /// How many ranks they can run.
    pub(super) fn slots(&self, wanted: impl Fn(&Node) -> bool) -> u32 {
        self.present(wanted).map(|(_, node)| node.slots).fold(0, u32::saturating_add)
    }

    pub(super) fn offers(&self, wanted: impl Fn(&Node) -> bool) -> Vec<Offer> {
        let offer = |(id, node): (&NodeId, &Node)| Offer { node: id.clone(), slots: node.slots };
        self.present(wanted).map(offer).collect()
    }

    /// Whether the nodes that stay offer enough ranks if this one goes.
    pub(super) fn is_enough_without(&self, node: &NodeId, policy: &Policy) -> bool {
        let mut offers = self.offers(|state| state.leaving.is_none());
        offers.retain(|offer| offer.node != *node);
        place_ranks(&offers, policy.min_ranks, policy.max_ranks).is_some()
    }

    /// Who has been away for too long.
    pub(super) fn given_up(&self, now: Time) -> Vec<NodeId> {
        let is_given_up =
            |id: &&NodeId| self.all.get(*id).is_some_and(|node| node.is_given_up(now));
        self.away.iter().filter(is_given_up).cloned().collect()
    }

    /// It came; the node of that name before it.
    pub(super) fn insert(&mut self, id: NodeId, node: Node) -> Option<Node> {
        self.wakes_at = None;
        self.away.remove(&id);
        self.all.insert(id, node)
    }

    /// It is gone for good.
    pub(super) fn remove(&mut self, id: &NodeId) {
        self.wakes_at = None;
        self.away.remove(id);
        self.all.remove(id);
    }

    /// It is away, and its ranks are given up if it stays so.
    pub(super) fn lose(&mut self, id: &NodeId, given_up_at: Time) {
        if let Some(node) = self.get_mut(id) {
            node.given_up_at = Some(given_up_at);
            self.away.insert(id.clone());
        }
    }

    /// Keeps what its agent reported, which changes no time.
    pub(super) fn hear(&mut self, id: &NodeId, at: Time, beat: Beat) {
        let Some(node) = self.all.get_mut(id) else { return };
        let Beat { round_trip, vitals, .. } = beat;
        let before = node.beat.take().and_then(|beat| beat.vitals);
        node.beat = Some(Heartbeat { at, round_trip, vitals: vitals.map(Arc::new).or(before) });
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

    /// When time alone changes something about one of them.
    pub(super) fn wake_at(&mut self) -> Option<Time> {
        match self.wakes_at {
            Some(known) => known,
            None => *self.wakes_at.insert(self.recount_wake_at()),
        }
    }

    /// The same, by a look at each.
    pub(super) fn recount_wake_at(&self) -> Option<Time> {
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
    fn the_time_to_wake_follows_whatever_changes() {
        let mut nodes = Nodes::default();
        nodes.insert(id("a"), Node::new(Attachment(1), 1));
        nodes.insert(id("b"), Node::new(Attachment(2), 1));
        assert_eq!(nodes.wake_at(), None);

        nodes.lose(&id("a"), Time(50));
        assert_eq!(nodes.wake_at(), Some(Time(50)));
        if let Some(node) = nodes.get_mut(&id("b")) {
            node.quarantined_until = Some(Time(30));
        }
        assert_eq!(nodes.wake_at(), Some(Time(30)));
        nodes.hear(&id("b"), Time(7), Beat::default());
        assert_eq!(nodes.wake_at(), Some(Time(30)));
        nodes.values_mut().for_each(|node| node.quarantined_until = None);
        assert_eq!(nodes.wake_at(), Some(Time(50)));
        nodes.insert(id("a"), Node::new(Attachment(3), 1));
        assert_eq!(nodes.wake_at(), None);
        nodes.lose(&id("a"), Time(60));
        nodes.remove(&id("a"));
        assert_eq!(nodes.wake_at(), None);
    }

    #[test]
    fn who_came_back_or_is_gone_for_good_is_not_away() {
        let mut nodes = Nodes::default();
        for name in ["a", "b", "c"] {
            nodes.insert(id(name), Node::new(Attachment(1), 1));
            nodes.lose(&id(name), Time(50));
        }
        nodes.lose(&id("nobody"), Time(50));
        nodes.insert(id("a"), Node::new(Attachment(2), 1));
        nodes.remove(&id("b"));
        assert!(nodes.away.iter().eq([&id("c")]));
        assert_eq!(nodes.given_up(Time(49)), []);
        assert_eq!(nodes.given_up(Time(50)), [id("c")]);
    }
}
