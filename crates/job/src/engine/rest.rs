//! Nodes whose ranks fail again and again are left out for a while, and pauses are spread.

use std::time::Duration;

use super::{Engine, Node, NoticeKind, Phase, membership::Member};
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
    pub(super) fn is_bad(&self) -> bool {
        self.blamed >= TOLERATED
    }
}

impl Engine {
    /// Notes on which nodes ranks have died.
    pub(super) fn blame(&mut self, ranks: &[Rank]) {
        let Some(world) = self.world() else { return };
        let node_of = |rank: &Rank| Some(world.place_of(*rank)?.node.clone());
        let mut nodes: Vec<NodeId> = ranks.iter().filter_map(node_of).collect();
        nodes.dedup();
        for node in nodes {
            if let Some(state) = self.nodes.get_mut(&node) {
                state.blamed = state.blamed.saturating_add(1);
            }
        }
    }

    /// Those who take part in progress have made up for what was before.
    pub(super) fn forgive(&mut self) {
        // Almost always nobody has anything to make up for.
        if self.nodes.values().all(|state| state.blamed == 0) {
            return;
        }
        let Some(world) = self.world().cloned() else { return };
        for (node, state) in self.nodes.iter_mut() {
            if world.includes(node) {
                state.blamed = 0;
            }
        }
    }

    /// Leaves out those who failed too often, while the others are enough and lose nothing by it.
    pub(super) fn rest_those_to_blame(&mut self, now: Time) {
        let Phase::Settling { world, .. } = &self.phase else { return };
        let holds = |member: &Member| {
            matches!(member, Member::Lost | Member::Started | Member::Ready { step: Some(_), .. })
        };
        let holder_among = |wanted: &dyn Fn(&NodeId) -> bool| {
            world.members().any(|(place, member)| holds(member) && wanted(&place.node))
        };
        let bad: Vec<NodeId> = self
            .nodes
            .iter()
            .filter(|(_, state)| state.is_bad() && state.rests_until.is_none())
            .filter(|(node, _)| {
                !holder_among(&|other| other == *node) || holder_among(&|other| other != *node)
            })
            .map(|(node, _)| node.clone())
            .collect();
        for node in bad {
            if self.is_enough_without(&node) {
                self.rest(now, &node);
            }
        }
    }

    /// Leaves a node out for a while.
    pub(super) fn rest(&mut self, now: Time, node: &NodeId) {
        let Some(state) = self.nodes.get_mut(node) else { return };
        let blamed = state.blamed;
        let doubled = 1 << blamed.saturating_sub(TOLERATED).min(8);
        let rest = (SHORTEST * doubled).min(LONGEST);
        state.rests_until = Some(now.after(rest));
        let seconds = rest.as_secs();
        let text = format!(
            "node {node} is left out for {seconds} s: its ranks failed {blamed} times one after the other; look \
             at its logs, its memory and its GPUs"
        );
        self.announce(NoticeKind::NodeRests, text);
    }

    /// Takes back all that are left out; whether there are any.
    pub(super) fn wake_all(&mut self) -> bool {
        let rests = |node: &&mut Node| node.is_attached() && node.rests_until.is_some();
        let woken = self.nodes.values_mut().filter(rests);
        woken.map(|node| node.rests_until = None).count() > 0
    }

    /// Takes back those who have been left out long enough.
    pub(super) fn wake_the_rested(&mut self, now: Time) {
        let mut is_back = false;
        for state in self.nodes.values_mut() {
            if state.rests_until.is_some_and(|until| until <= now) {
                state.rests_until = None;
                is_back = true;
            }
        }
        if is_back {
            self.adapt(now);
            self.open_if_idle(now);
        }
    }

    /// Up to a quarter more or less, so that jobs that failed together do not try again together.
    pub(super) fn spread(&self, pause: Duration) -> Duration {
        let (job, _) = self.origin.job.0.as_u64_pair();
        let mixed = (job ^ self.generation.0).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
        pause.mul_f64(0.75 + 0.5 * mixed as f64 / 1_024.0)
    }
}
