//! The nodes that are attached, or were a moment ago.

use std::{
    collections::{BTreeMap, btree_map},
    ops::Deref,
    sync::Arc,
    time::Duration,
};

use super::{drain::Leaving, elastic::Warming};
use crate::{
    ids::{Attachment, NodeId},
    message::Vitals,
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
    /// What it was told to start, if others train and it does not.
    pub(super) warming: Option<Warming>,
    /// Generations that its ranks ended one after the other.
    pub(super) blamed: u32,
    /// Until when nobody counts on it, after that.
    pub(super) rests_until: Option<Time>,
    /// What its agent told last, and when.
    pub(super) beat: Option<Heartbeat>,
}

/// What an agent told last of itself and its machine.
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
            warming: None,
            blamed: 0,
            rests_until: None,
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
        self.is_attached() && self.rests_until.is_none()
    }

    /// When time alone changes something about it.
    fn wakes_at(&self) -> Option<Time> {
        let warming = self.warming.as_ref().map(|warming| warming.until);
        self.given_up_at.into_iter().chain(self.rests_until).chain(warming).min()
    }
}

/// All of them, by name. Who is away is counted: that is asked for with every event, and almost always nobody is.
#[derive(Clone, Debug, Default)]
pub(super) struct Nodes {
    all: BTreeMap<NodeId, Node>,
    away: usize,
}

impl Nodes {
    /// Whether any of them is away.
    pub(super) fn has_away(&self) -> bool {
        self.away > 0
    }

    /// It came; the node of that name before it.
    pub(super) fn insert(&mut self, id: NodeId, node: Node) -> Option<Node> {
        let before = self.all.insert(id, node);
        self.away -= usize::from(before.as_ref().is_some_and(|node| !node.is_attached()));
        before
    }

    /// It is gone for good.
    pub(super) fn remove(&mut self, id: &NodeId) {
        let before = self.all.remove(id);
        self.away -= usize::from(before.is_some_and(|node| !node.is_attached()));
    }

    /// It is away, and its ranks are given up if it stays so.
    pub(super) fn lose(&mut self, id: &NodeId, given_up_at: Time) {
        if let Some(node) = self.all.get_mut(id)
            && node.given_up_at.replace(given_up_at).is_none()
        {
            self.away += 1;
        }
    }

    pub(super) fn get_mut(&mut self, id: &NodeId) -> Option<&mut Node> {
        self.all.get_mut(id)
    }

    pub(super) fn iter_mut(&mut self) -> btree_map::IterMut<'_, NodeId, Node> {
        self.all.iter_mut()
    }

    pub(super) fn values_mut(&mut self) -> btree_map::ValuesMut<'_, NodeId, Node> {
        self.all.values_mut()
    }

    /// When time alone changes something about one of them.
    pub(super) fn wake_at(&self) -> Option<Time> {
        self.all.values().filter_map(Node::wakes_at).min()
    }
}

impl Deref for Nodes {
    type Target = BTreeMap<NodeId, Node>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}
