//! The ranks of one generation: on which node each runs, and its state.

use std::{
    collections::{BTreeSet, HashMap},
    mem::discriminant,
    ops::Range,
    sync::Arc,
};

use crate::{
    exit::{Class, Failure, Outcome},
    ids::{LocalRank, NodeId, Rank},
    message::{LoaderReport, MAX_UNREACHED, RankPhase, RankReport},
    plan::Placement,
    time::Time,
};
use baton_recipe::Step;

use super::rank_heartbeats::RankHeartbeats;

/// State of one rank.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Member {
    /// Its agent was asked to run it.
    Launched,
    /// It listens, since `since`; `step` is present if it holds state.
    Ready { address: String, step: Option<Step>, since: Time },
    /// It is connected to the other ranks and has the state.
    Started,
    /// It lost its connection to the other ranks, and waits.
    Lost,
    /// Its process has ended.
    Gone,
    /// It finished.
    Done { outcome: Outcome, digest: String },
    /// The coordinator restarted and has not received a report about it yet.
    Unknown,
}

/// The state of a [`Member`] without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberKind {
    Launched,
    Ready,
    Started,
    Lost,
    Gone,
    Done,
    Unknown,
}

impl Member {
    fn kind(&self) -> MemberKind {
        match self {
            Self::Launched => MemberKind::Launched,
            Self::Ready { .. } => MemberKind::Ready,
            Self::Started => MemberKind::Started,
            Self::Lost => MemberKind::Lost,
            Self::Gone => MemberKind::Gone,
            Self::Done { .. } => MemberKind::Done,
            Self::Unknown => MemberKind::Unknown,
        }
    }
}

/// All ranks of one generation.
#[derive(Clone, Debug)]
pub(super) struct World {
    /// Placements, indexed by rank.
    placements: Arc<[Placement]>,
    /// The range of ranks of each node; they are contiguous.
    by_node: Arc<HashMap<NodeId, Range<usize>>>,
    members: Vec<Member>,
    /// Number of members of each kind. Each report about a rank checks whether all ranks are in some state; with
    /// these counts the check does not have to visit every rank.
    counts: [usize; MemberKind::Unknown as usize + 1],
    /// Latest loader report, indexed by rank.
    loaders: Vec<Option<LoaderReport>>,
    pub(super) rank_heartbeats: RankHeartbeats,
    /// Addresses, indexed by rank; empty until all ranks are ready.
    peers: Arc<[String]>,
    /// Ranks that reported that they are connected to the others.
    connected: BTreeSet<Rank>,
    /// Pairs of nodes, by their first ranks in ascending order, that could not connect to each other.
    unreached: BTreeSet<(usize, usize)>,
}

impl World {
    pub(super) fn new(placements: Vec<Placement>) -> Self {
        Self::of(placements, Member::Launched)
    }

    /// The ranks of a generation that was open when the previous coordinator died.
    pub(super) fn unknown(placements: Vec<Placement>) -> Self {
        Self::of(placements, Member::Unknown)
    }

    fn of(placements: Vec<Placement>, each: Member) -> Self {
        let mut counts = [0; MemberKind::Unknown as usize + 1];
        counts[each.kind() as usize] = placements.len();
        let members = vec![each; placements.len()];
        let loaders = vec![None; placements.len()];
        let rank_heartbeats = RankHeartbeats::new(placements.len());
        let mut by_node: HashMap<NodeId, Range<usize>> = HashMap::new();
        for (rank, placement) in placements.iter().enumerate() {
            by_node.entry(placement.node.clone()).or_insert(rank..rank).end = rank + 1;
        }
        Self {
            placements: placements.into(),
            by_node: Arc::new(by_node),
            members,
            counts,
            loaders,
            rank_heartbeats,
            peers: Arc::new([]),
            connected: BTreeSet::new(),
            unreached: BTreeSet::new(),
        }
    }

    pub(super) fn placements(&self) -> &[Placement] {
        &self.placements
    }

    pub(super) fn members(&self) -> impl Iterator<Item = (&Placement, &Member)> {
        self.placements.iter().zip(&self.members)
    }

    /// The latest loader report of each rank, in order of rank.
    pub(super) fn loaders(&self) -> impl Iterator<Item = Option<&LoaderReport>> {
        self.loaders.iter().map(Option::as_ref)
    }

    pub(super) fn placement_of(&self, rank: Rank) -> Option<&Placement> {
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

    /// The nodes, each once.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &NodeId> {
        let starts_node =
            |i: &usize| *i == 0 || self.placements[*i].node != self.placements[*i - 1].node;
        (0..self.placements.len()).filter(starts_node).map(|i| &self.placements[i].node)
    }

    pub(super) fn set(&mut self, rank: Rank, member: Member) {
        if matches!(member, Member::Gone | Member::Launched) {
            self.set_loader(rank, None);
            self.rank_heartbeats.remove(rank);
        }
        if let Some(current) = self.members.get_mut(rank.0 as usize) {
            self.counts[current.kind() as usize] -= 1;
            self.counts[member.kind() as usize] += 1;
            *current = member;
        }
    }

    /// Marks every rank as lost, except those that are gone, done or not yet reported.
    pub(super) fn mark_all_lost(&mut self) {
        for member in &mut self.members {
            if !matches!(member, Member::Gone | Member::Done { .. } | Member::Unknown) {
                self.counts[member.kind() as usize] -= 1;
                self.counts[MemberKind::Lost as usize] += 1;
                *member = Member::Lost;
            }
        }
    }

    pub(super) fn set_loader(&mut self, rank: Rank, report: Option<LoaderReport>) {
        if let Some(loader) = self.loaders.get_mut(rank.0 as usize) {
            *loader = report;
        }
    }

    pub(super) fn has(&self, kind: MemberKind) -> bool {
        self.counts[kind as usize] > 0
    }

    /// Whether a rank's process has ended.
    pub(super) fn has_gone(&self) -> bool {
        self.has(MemberKind::Gone)
    }

    /// Ranks whose processes have ended.
    pub(super) fn gone(&self) -> impl Iterator<Item = &Placement> {
        self.members()
            .filter(|(_, member)| **member == Member::Gone)
            .map(|(placement, _)| placement)
    }

    /// Whether every member is of one of these kinds.
    pub(super) fn all_are(&self, kinds: &[MemberKind]) -> bool {
        let count: usize = kinds.iter().map(|kind| self.counts[*kind as usize]).sum();
        count == self.members.len()
    }

    /// Whether every rank has the state and trains, or has finished.
    pub(super) fn all_have_started(&self) -> bool {
        self.all_are(&[MemberKind::Started, MemberKind::Done])
    }

    pub(super) fn is_gone(&self, rank: Rank) -> bool {
        self.members.get(rank.0 as usize) == Some(&Member::Gone)
    }

    pub(super) fn is_done(&self, rank: Rank) -> bool {
        matches!(self.members.get(rank.0 as usize), Some(Member::Done { .. }))
    }

    /// Whether some rank has reported that it holds state.
    pub(super) fn holds_state(&self) -> bool {
        self.placements.iter().any(|placement| self.holds_state_at(placement.rank))
    }

    pub(super) fn holds_state_at(&self, rank: Rank) -> bool {
        let member = self.members.get(rank.0 as usize);
        matches!(member, Some(Member::Ready { step: Some(_), .. }))
    }

    /// The newest step whose state a rank of this node has reported to hold.
    pub(super) fn step_at(&self, node: &NodeId) -> Option<Step> {
        let members = self.by_node.get(node).and_then(|ranks| self.members.get(ranks.clone()))?;
        let step = |member: &Member| match member {
            Member::Ready { step, .. } => *step,
            _ => None,
        };
        members.iter().filter_map(step).max()
    }

    /// The rank listens. A repeated report after a reconnect does not change the time at which it became ready.
    pub(super) fn set_ready(&mut self, now: Time, rank: Rank, address: String, step: Option<Step>) {
        let since = match self.members.get(rank.0 as usize) {
            Some(Member::Ready { since, .. }) => *since,
            _ => now,
        };
        self.set(rank, Member::Ready { address, step, since });
    }

    /// When the last of the ranks that hold state became ready.
    pub(super) fn holders_ready_at(&self) -> Option<Time> {
        let ready_at = |member: &Member| match member {
            Member::Ready { step: Some(_), since, .. } => Some(*since),
            _ => None,
        };
        self.members.iter().filter_map(ready_at).max()
    }

    /// The rank is connected to the others; returns whether all ranks are.
    pub(super) fn set_connected(&mut self, rank: Rank) -> bool {
        self.connected.insert(rank);
        self.is_connected()
    }

    /// Whether all ranks are connected to the others.
    pub(super) fn is_connected(&self) -> bool {
        self.connected.len() == self.placements.len()
    }

    /// `rank` could not connect to `others`, or waited for them until the time was over.
    pub(super) fn set_unreached(&mut self, rank: Rank, others: &[Rank]) {
        let first_rank = |rank: &Rank| {
            let node = &self.placements.get(rank.0 as usize)?.node;
            self.by_node.get(node).map(|ranks| ranks.start)
        };
        let Some(one) = first_rank(&rank) else { return };
        let others = others.iter().take(MAX_UNREACHED).filter_map(first_rank);
        let pairs = others.filter(|other| *other != one);
        self.unreached.extend(pairs.map(|other| (one.min(other), one.max(other))));
    }

    /// The pairs of nodes whose ranks do not reach each other, each once.
    pub(super) fn unreached_nodes(&self) -> impl Iterator<Item = [&NodeId; 2]> {
        let node = |first: usize| &self.placements[first].node;
        self.unreached.iter().map(move |(one, other)| [node(*one), node(*other)])
    }

    /// Stores and returns the address of every rank, if all are ready.
    pub(super) fn begin(&mut self) -> Option<Arc<[String]>> {
        let address = |member: &Member| match member {
            Member::Ready { address, .. } => Some(address.clone()),
            _ => None,
        };
        // Checked first: this function runs each time a rank becomes ready, and copying the addresses is expensive.
        if !self.all_are(&[MemberKind::Ready]) {
            return None;
        }
        self.peers = self.members.iter().filter_map(address).collect();
        Some(self.peers())
    }

    pub(super) fn peers(&self) -> Arc<[String]> {
        self.peers.clone()
    }

    /// Ranks that the others wait for: those not ready in `Forming`, those not started in `Meeting`.
    pub(super) fn late(&self) -> Vec<&Placement> {
        let is_meeting = !self.peers.is_empty();
        let is_late = |member: &Member| match member {
            Member::Launched | Member::Unknown => true,
            Member::Ready { .. } => is_meeting,
            Member::Started | Member::Lost | Member::Gone | Member::Done { .. } => false,
        };
        self.members()
            .filter(|(_, member)| is_late(member))
            .map(|(placement, _)| placement)
            .collect()
    }

    /// The agent of this node starts its ranks again.
    pub(super) fn reset(&mut self, node: &NodeId) {
        for (rank, _) in self.ranks_of(node) {
            self.set(rank, Member::Launched);
        }
    }

    /// Updates the members from the ranks that an agent reports on reconnect; returns the reports that were missed,
    /// and the ranks that have ended.
    pub(super) fn reconcile(
        &mut self,
        node: &NodeId,
        held: Vec<(Rank, RankPhase)>,
    ) -> (Vec<(Rank, RankReport)>, Vec<Rank>) {
        let mut missing: Vec<Rank> =
            self.ranks_of(node).into_iter().map(|(rank, _)| rank).collect();
        let is_over = |rank: &Rank| {
            matches!(self.members.get(rank.0 as usize), Some(Member::Done { .. } | Member::Gone))
        };
        missing.retain(|rank| !is_over(rank));
        let mut reports = Vec::new();
        for (rank, phase) in held {
            if !self.runs(node, rank) {
                continue;
            }
            let starts_over =
                matches!(phase, RankPhase::Joining | RankPhase::Ready { .. } | RankPhase::Meeting);
            if starts_over && self.members.get(rank.0 as usize) == Some(&Member::Started) {
                // This is another process: the one that had started has ended.
                continue;
            }
            missing.retain(|other| *other != rank);
            match phase {
                RankPhase::Training => self.set(rank, Member::Started),
                // In progress: it will report the rest by itself.
                RankPhase::Joining | RankPhase::Meeting => self.mark_launched(rank),
                RankPhase::Ready { .. }
                | RankPhase::Waiting
                | RankPhase::Diverged(_)
                | RankPhase::Done { .. } => {
                    self.mark_launched(rank);
                    reports.extend(report_of_phase(phase).map(|report| (rank, report)));
                }
            }
        }
        (reports, missing)
    }

    fn mark_launched(&mut self, rank: Rank) {
        if self.members.get(rank.0 as usize) == Some(&Member::Unknown) {
            self.set(rank, Member::Launched);
        }
    }

    /// The job's outcome once every rank is done.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        if !self.all_are(&[MemberKind::Done]) {
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

/// The report that corresponds to a phase that was sent on reconnect.
fn report_of_phase(phase: RankPhase) -> Option<RankReport> {
    match phase {
        RankPhase::Ready { address, step } => Some(RankReport::Ready { address, step }),
        RankPhase::Waiting => Some(RankReport::Lost {
            unreached: Vec::new(),
            detail: "it lost its connection while its agent was disconnected".to_owned(),
        }),
        RankPhase::Diverged(diagnosis) => Some(RankReport::Diverged(diagnosis)),
        RankPhase::Done { outcome, digest } => Some(RankReport::Done { outcome, digest }),
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
            _ => Member::Unknown,
        }
    }

    proptest! {
        #[test]
        fn counts_of_each_kind_stay_correct_after_any_changes(
            size in 0u32..6, changes in prop::collection::vec((0u32..8, 0u8..8), 0..20),
        ) {
            let placement = |rank| Placement {
                rank: Rank(rank), node: NodeId("node0".to_owned()), local_rank: LocalRank(rank),
            };
            let mut world = World::new((0..size).map(placement).collect());
            for (rank, kind) in changes {
                match kind {
                    7 => {
                        world.mark_all_lost();
                        let runs = |member: &Member| {
                            matches!(member.kind(), MemberKind::Launched | MemberKind::Ready | MemberKind::Started)
                        };
                        prop_assert!(!world.members.iter().any(runs));
                    }
                    kind => world.set(Rank(rank), member(kind)),
                }
            }
            let mut counts = [0; MemberKind::Unknown as usize + 1];
            world.members.iter().for_each(|member| counts[member.kind() as usize] += 1);
            prop_assert_eq!(world.counts, counts);
        }
    }
}
