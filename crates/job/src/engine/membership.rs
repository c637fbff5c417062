//! One generation's ranks: where each runs and how far it has come.

use std::{
    collections::{BTreeSet, HashMap},
    mem::discriminant,
    ops::Range,
    sync::Arc,
};

use crate::{
    exit::{Class, Failure, Outcome},
    ids::{LocalRank, NodeId, Rank},
    message::{LoaderNews, RankNews, RankPhase},
    plan::Placement,
    time::Time,
};
use baton_recipe::Step;

use super::pulses::Pulses;

/// How far one rank has come.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Member {
    /// Its agent was told to run it.
    Launched,
    /// It listens, since then; `step` if it holds state.
    Ready { address: String, step: Option<Step>, since: Time },
    /// It met the others and has the state.
    Started,
    /// It lost touch with the others and waits.
    Lost,
    /// Its process is gone.
    Gone,
    /// It finished.
    Done { outcome: Outcome, digest: String },
    /// The coordinator restarted and has not heard of it yet.
    Unheard,
}

/// A [`Member`] without what it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Launched,
    Ready,
    Started,
    Lost,
    Gone,
    Done,
    Unheard,
}

impl Member {
    fn kind(&self) -> Kind {
        match self {
            Self::Launched => Kind::Launched,
            Self::Ready { .. } => Kind::Ready,
            Self::Started => Kind::Started,
            Self::Lost => Kind::Lost,
            Self::Gone => Kind::Gone,
            Self::Done { .. } => Kind::Done,
            Self::Unheard => Kind::Unheard,
        }
    }
}

/// All ranks of one generation.
#[derive(Clone, Debug)]
pub(super) struct World {
    /// By rank.
    placements: Arc<[Placement]>,
    /// The ranks of each node: they stand side by side.
    by_node: Arc<HashMap<NodeId, Range<usize>>>,
    members: Vec<Member>,
    /// Members of each kind. With every word of a rank it is asked whether all are so, and there are as many words as
    /// ranks.
    counts: [usize; Kind::Unheard as usize + 1],
    /// By rank, of those that have told.
    loaders: Vec<Option<LoaderNews>>,
    pub(super) pulses: Pulses,
    /// Addresses by rank, once all were ready.
    peers: Arc<[String]>,
    /// Those that told that they met the others.
    met: BTreeSet<Rank>,
}

impl World {
    pub(super) fn new(placements: Vec<Placement>) -> Self {
        Self::of(placements, Member::Launched)
    }

    /// The world of a generation that was open when the coordinator died.
    pub(super) fn unheard(placements: Vec<Placement>) -> Self {
        Self::of(placements, Member::Unheard)
    }

    fn of(placements: Vec<Placement>, each: Member) -> Self {
        let mut counts = [0; Kind::Unheard as usize + 1];
        counts[each.kind() as usize] = placements.len();
        let members = vec![each; placements.len()];
        let loaders = vec![None; placements.len()];
        let pulses = Pulses::new(placements.len());
        let mut by_node: HashMap<NodeId, Range<usize>> = HashMap::new();
        for (rank, place) in placements.iter().enumerate() {
            by_node.entry(place.node.clone()).or_insert(rank..rank).end = rank + 1;
        }
        Self {
            placements: placements.into(),
            by_node: Arc::new(by_node),
            members,
            counts,
            loaders,
            pulses,
            peers: Arc::new([]),
            met: BTreeSet::new(),
        }
    }

    pub(super) fn placements(&self) -> &[Placement] {
        &self.placements
    }

    pub(super) fn members(&self) -> impl Iterator<Item = (&Placement, &Member)> {
        self.placements.iter().zip(&self.members)
    }

    /// What each rank told last of its loader, in order of rank.
    pub(super) fn loaders(&self) -> impl Iterator<Item = Option<&LoaderNews>> {
        self.loaders.iter().map(Option::as_ref)
    }

    pub(super) fn place_of(&self, rank: Rank) -> Option<&Placement> {
        self.placements.get(rank.0 as usize)
    }

    pub(super) fn size(&self) -> u32 {
        u32::try_from(self.placements.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn includes(&self, node: &NodeId) -> bool {
        self.by_node.contains_key(node)
    }

    pub(super) fn runs(&self, node: &NodeId, rank: Rank) -> bool {
        self.by_node.get(node).is_some_and(|ranks| ranks.contains(&(rank.0 as usize)))
    }

    pub(super) fn ranks_of(&self, node: &NodeId) -> Vec<(Rank, LocalRank)> {
        let here = self.by_node.get(node).and_then(|ranks| self.placements.get(ranks.clone()));
        here.into_iter().flatten().map(|placement| (placement.rank, placement.local_rank)).collect()
    }

    /// Each node once.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &NodeId> {
        let starts_node =
            |i: &usize| *i == 0 || self.placements[*i].node != self.placements[*i - 1].node;
        (0..self.placements.len()).filter(starts_node).map(|i| &self.placements[i].node)
    }

    pub(super) fn set(&mut self, rank: Rank, member: Member) {
        if matches!(member, Member::Gone | Member::Launched) {
            self.set_loader(rank, None);
            self.pulses.forget(rank);
        }
        if let Some(place) = self.members.get_mut(rank.0 as usize) {
            self.counts[place.kind() as usize] -= 1;
            self.counts[member.kind() as usize] += 1;
            *place = member;
        }
    }

    /// None of them goes on; those that are gone or done stay so.
    pub(super) fn all_lose_touch(&mut self) {
        for member in &mut self.members {
            if !matches!(member, Member::Gone | Member::Done { .. } | Member::Unheard) {
                self.counts[member.kind() as usize] -= 1;
                self.counts[Kind::Lost as usize] += 1;
                *member = Member::Lost;
            }
        }
    }

    pub(super) fn set_loader(&mut self, rank: Rank, news: Option<LoaderNews>) {
        if let Some(loader) = self.loaders.get_mut(rank.0 as usize) {
            *loader = news;
        }
    }

    pub(super) fn has(&self, kind: Kind) -> bool {
        self.counts[kind as usize] > 0
    }

    /// Whether each is of one of these kinds.
    pub(super) fn all_are(&self, kinds: &[Kind]) -> bool {
        let so: usize = kinds.iter().map(|kind| self.counts[*kind as usize]).sum();
        so == self.members.len()
    }

    /// Whether each has met the others and got the state, and perhaps finished since.
    pub(super) fn all_have_started(&self) -> bool {
        self.all_are(&[Kind::Started, Kind::Done])
    }

    pub(super) fn is_gone(&self, rank: Rank) -> bool {
        self.members.get(rank.0 as usize) == Some(&Member::Gone)
    }

    pub(super) fn is_done(&self, rank: Rank) -> bool {
        matches!(self.members.get(rank.0 as usize), Some(Member::Done { .. }))
    }

    /// Whether some rank has told that it holds state.
    pub(super) fn holds_state(&self) -> bool {
        self.placements.iter().any(|place| self.holds_state_at(place.rank))
    }

    pub(super) fn holds_state_at(&self, rank: Rank) -> bool {
        let member = self.members.get(rank.0 as usize);
        matches!(member, Some(Member::Ready { step: Some(_), .. }))
    }

    /// It listens. What is told again on a reconnect makes it ready no later.
    pub(super) fn set_ready(&mut self, now: Time, rank: Rank, address: String, step: Option<Step>) {
        let since = match self.members.get(rank.0 as usize) {
            Some(Member::Ready { since, .. }) => *since,
            _ => now,
        };
        self.set(rank, Member::Ready { address, step, since });
    }

    /// When the last of the ready ranks that hold state was so.
    pub(super) fn holders_ready_at(&self) -> Option<Time> {
        let ready_at = |member: &Member| match member {
            Member::Ready { step: Some(_), since, .. } => Some(*since),
            _ => None,
        };
        self.members.iter().filter_map(ready_at).max()
    }

    /// It met the others; whether all have told so.
    pub(super) fn set_met(&mut self, rank: Rank) -> bool {
        self.met.insert(rank);
        self.met.len() == self.placements.len()
    }

    /// Fixes and returns every rank's address, if all are ready.
    pub(super) fn begin(&mut self) -> Option<Arc<[String]>> {
        let address = |member: &Member| match member {
            Member::Ready { address, .. } => Some(address.clone()),
            _ => None,
        };
        // Looked at before: this is asked each time a rank gets ready, and nothing is to be copied in vain.
        if !self.all_are(&[Kind::Ready]) {
            return None;
        }
        self.peers = self.members.iter().filter_map(address).collect();
        Some(self.peers())
    }

    pub(super) fn peers(&self) -> Arc<[String]> {
        self.peers.clone()
    }

    /// Those that keep the others waiting: not ready before the meeting, not started in it.
    pub(super) fn late(&self) -> Vec<&Placement> {
        let met = !self.peers.is_empty();
        let is_late = |member: &Member| match member {
            Member::Launched | Member::Unheard => true,
            Member::Ready { .. } => met,
            Member::Started | Member::Lost | Member::Gone | Member::Done { .. } => false,
        };
        self.members().filter(|(_, member)| is_late(member)).map(|(place, _)| place).collect()
    }

    /// Its agent starts over with this node's ranks.
    pub(super) fn reset(&mut self, node: &NodeId) {
        for (rank, _) in self.ranks_of(node) {
            self.set(rank, Member::Launched);
        }
    }

    /// Takes in what an agent holds on reconnect: news that were missed, and ranks that are gone.
    pub(super) fn reconcile(
        &mut self,
        node: &NodeId,
        held: Vec<(Rank, RankPhase)>,
    ) -> (Vec<(Rank, RankNews)>, Vec<Rank>) {
        let mut missing: Vec<Rank> =
            self.ranks_of(node).into_iter().map(|(rank, _)| rank).collect();
        let is_over = |rank: &Rank| {
            matches!(self.members.get(rank.0 as usize), Some(Member::Done { .. } | Member::Gone))
        };
        missing.retain(|rank| !is_over(rank));
        let mut news = Vec::new();
        for (rank, phase) in held {
            if !self.runs(node, rank) {
                continue;
            }
            let starts_over =
                matches!(phase, RankPhase::Joining | RankPhase::Ready { .. } | RankPhase::Meeting);
            if starts_over && self.members.get(rank.0 as usize) == Some(&Member::Started) {
                // Another process sits in its place: the one that had started is gone.
                continue;
            }
            missing.retain(|other| *other != rank);
            match phase {
                RankPhase::Training => self.set(rank, Member::Started),
                // On its way; what it has still to say comes by itself.
                RankPhase::Joining | RankPhase::Meeting => self.heard_of(rank),
                RankPhase::Ready { .. }
                | RankPhase::Waiting
                | RankPhase::Diverged(_)
                | RankPhase::Done { .. } => {
                    self.heard_of(rank);
                    news.extend(news_of(phase).map(|news| (rank, news)));
                }
            }
        }
        (news, missing)
    }

    fn heard_of(&mut self, rank: Rank) {
        if self.members.get(rank.0 as usize) == Some(&Member::Unheard) {
            self.set(rank, Member::Launched);
        }
    }

    /// The job's outcome once every rank is done.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        if !self.all_are(&[Kind::Done]) {
            return None;
        }
        let mut ends = self.members.iter().map(|member| match member {
            Member::Done { outcome, digest } => Some((outcome, digest)),
            _ => None,
        });
        let (first, digest) = ends.next()??;
        for end in ends {
            let (other, other_digest) = end?;
            if other_digest != digest || discriminant(other) != discriminant(first) {
                let message = "ranks ended with different states; set cluster.threads_per_rank \
                               equal on all nodes and report this"
                    .to_owned();
                return Some(Outcome::Failed {
                    failure: Failure { class: Class::Device, message },
                });
            }
        }
        Some(first.clone())
    }
}

/// The news that a phase reported on reconnect stands for.
fn news_of(phase: RankPhase) -> Option<RankNews> {
    match phase {
        RankPhase::Ready { address, step } => Some(RankNews::Ready { address, step }),
        RankPhase::Waiting => {
            Some(RankNews::Lost { detail: "it lost touch while its agent was away".to_owned() })
        }
        RankPhase::Diverged(diagnosis) => Some(RankNews::Diverged(diagnosis)),
        RankPhase::Done { outcome, digest } => Some(RankNews::Done { outcome, digest }),
        RankPhase::Joining | RankPhase::Meeting | RankPhase::Training => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn member(kind: u8) -> Member {
        match kind {
            0 => Member::Launched,
            1 => Member::Ready { address: "node0:1".to_owned(), step: None, since: Time(0) },
            2 => Member::Started,
            3 => Member::Lost,
            4 => Member::Gone,
            5 => Member::Done { outcome: Outcome::Completed, digest: "same".to_owned() },
            _ => Member::Unheard,
        }
    }

    proptest! {
        #[test]
        fn members_of_each_kind_are_counted_whatever_becomes_of_them(
            size in 0u32..6, changes in prop::collection::vec((0u32..8, 0u8..8), 0..20),
        ) {
            let place = |rank| Placement {
                rank: Rank(rank), node: NodeId("node0".to_owned()), local_rank: LocalRank(rank),
            };
            let mut world = World::new((0..size).map(place).collect());
            for (rank, kind) in changes {
                match kind {
                    7 => world.all_lose_touch(),
                    kind => world.set(Rank(rank), member(kind)),
                }
            }
            let mut counts = [0; Kind::Unheard as usize + 1];
            world.members.iter().for_each(|member| counts[member.kind() as usize] += 1);
            prop_assert_eq!(world.counts, counts);
        }
    }
}
