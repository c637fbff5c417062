//! What each rank sends, receives and adds in one all-reduce: the fixed tree on two levels.
//!
//! Links between machines are slower than those within one, so a machine sends one sum instead of one for each of its
//! ranks. Its ranks have consecutive numbers, and so consecutive virtual ranks: their sums make few whole subtrees of
//! the fixed tree, one if all machines have the same number of virtual ranks and it is a power of two.
//!
//! | stage | messages | afterwards |
//! |---|---|---|
//! | 1, within a machine | to each other rank its slice of all partial sums | each rank has its slice of the machine's sums |
//! | 2, between machines | of the own slice, to the rank that has the same values there: the part that its machine completes | each machine has its parts of the total |
//! | 3, between machines | the completed parts, to the same ranks | each rank has its slice of the total |
//! | 4, within a machine | the own slice of the total | each rank has the total |
//!
//! Stages 1 and 4 are left out if no machine has several ranks, 2 and 3 on a single machine. Of S bytes of values,
//! 2 · (N − 1) / N · S leave each of N machines if its sums make one subtree: no algorithm needs less (Patarasuk & Yuan
//! 2009). The additions are those of the fixed tree in every case, so the grouping changes no bit.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::iter;
use std::ops::Range;

use baton_job::Rank;
use baton_job::plan::{TreeNode, maximal_subtrees, virtual_block};

use crate::tree::{Fold, slice_of};

/// Alignment of received values, in values: 256 bytes, which is efficient for messages and for kernels.
const RECEIVE_ALIGNMENT: usize = 64;

/// Which ranks share a machine. All ranks of a group must have the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machines {
    /// The ranks of each machine, ascending, without gaps.
    ranks: Vec<Range<u32>>,
}

impl Machines {
    /// Consecutive ranks whose addresses (`host:port`) name the same host share a machine.
    #[must_use]
    pub fn of_addresses(addresses: &[String]) -> Self {
        let mut first = 0;
        let machines = addresses.chunk_by(|left, right| host_of(left) == host_of(right));
        let ranks = machines.map(|machine| {
            let start = first;
            first += machine.len() as u32;
            start..first
        });
        Self { ranks: ranks.collect() }
    }

    /// All ranks share one.
    #[must_use]
    pub fn one(world_size: u32) -> Self {
        Self { ranks: iter::once(0..world_size).collect() }
    }

    /// Number of ranks.
    pub(crate) fn world_size(&self) -> u32 {
        self.ranks.last().map_or(0, |ranks| ranks.end)
    }

    /// The ranks of this rank's machine.
    pub(crate) fn with(&self, rank: Rank) -> Range<u32> {
        self.ranks.iter().find(|ranks| ranks.contains(&rank.0)).cloned().unwrap_or_default()
    }

    /// Whether every rank exchanges values with every other one in each stage.
    pub(crate) fn are_flat(&self) -> bool {
        self.ranks.len() == 1 || !self.have_several_ranks()
    }

    fn have_several_ranks(&self) -> bool {
        self.ranks.iter().any(|ranks| ranks.len() > 1)
    }
}

fn host_of(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

/// Where values are in a rank's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SumRegion {
    pub(crate) memory: RankMemory,
    pub(crate) range: Range<usize>,
}

/// A rank's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RankMemory {
    /// One of this rank's partial sums. The first receives the total.
    Sum(usize),
    /// Memory for [`SumSchedule::received`] values.
    Received,
}

impl SumRegion {
    /// Its values `range`.
    fn narrow(&self, range: Range<usize>) -> Self {
        let start = self.range.start;
        Self { memory: self.memory, range: start + range.start..start + range.end }
    }
}

/// The sum of a subtree, and where it is.
type Partial = (TreeNode, SumRegion);

/// One message in each direction between this rank and a peer, each of several pieces.
#[derive(Debug, Default)]
pub(crate) struct PeerTransfer {
    pub(crate) send: Vec<SumRegion>,
    pub(crate) receive: Vec<SumRegion>,
}

/// Additions of values of one length.
#[derive(Debug)]
pub(crate) struct Additions {
    /// The values. They do not overlap.
    pub(crate) terms: Vec<SumRegion>,
    /// In this order: the second term is added to the first.
    pub(crate) pairs: Vec<(usize, usize)>,
    /// Where the first term is copied in the end: to this one.
    pub(crate) copy_first_to: Option<usize>,
}

impl Additions {
    /// Adds up `terms`, which are in the order of their virtual ranks, as far as they are parts of one subtree; returns
    /// the sums too.
    fn of(terms: Vec<Partial>) -> (Self, Vec<Partial>) {
        let mut pairs = Vec::new();
        let mut fold = Fold::new(0);
        for (index, (node, _)) in terms.iter().enumerate() {
            let Ok(()) = fold.push_node(*node, index, |left, right| {
                pairs.push((*left, *right));
                Ok::<_, Infallible>(())
            });
        }
        let sums = fold.finish().into_iter().map(|(node, index)| (node, terms[index].1.clone()));
        let sums = sums.collect();
        let terms = terms.into_iter().map(|(_, region)| region).collect();
        (Self { terms, pairs, copy_first_to: None }, sums)
    }

    /// Ends with a copy of the first term at `to`.
    fn copy_first(&mut self, to: SumRegion) {
        let index = self.terms.iter().position(|term| *term == to).unwrap_or_else(|| {
            self.terms.push(to);
            self.terms.len() - 1
        });
        self.copy_first_to = (index > 0).then_some(index);
    }
}

/// What happens together: first all transfers, then all additions. What is sent is not received in the same stage.
#[derive(Debug, Default)]
pub(crate) struct SumStage {
    pub(crate) transfers: BTreeMap<Rank, PeerTransfer>,
    pub(crate) additions: Vec<Additions>,
}

/// One rank's part in an all-reduce. All ranks have the same number of stages.
#[derive(Debug, Default)]
pub(crate) struct SumSchedule {
    pub(crate) stages: Vec<SumStage>,
    /// Number of values of [`RankMemory::Received`].
    pub(crate) received: usize,
}

impl SumSchedule {
    /// That of rank `me`, for partial sums of `len` values.
    pub(crate) fn new(machines: &Machines, me: Rank, virtual_ranks: u32, len: usize) -> Self {
        let world_size = machines.world_size();
        let planner = SumPlanner { machines: &machines.ranks, world_size, me, virtual_ranks, len };
        let Some(own) = machines.ranks.iter().position(|ranks| ranks.contains(&me.0)) else {
            return Self::default();
        };
        planner.plan(own, machines.have_several_ranks())
    }
}

/// What all stages of a schedule are computed from.
struct SumPlanner<'a> {
    machines: &'a [Range<u32>],
    world_size: u32,
    me: Rank,
    virtual_ranks: u32,
    len: usize,
}

impl SumPlanner<'_> {
    fn plan(&self, own: usize, within: bool) -> SumSchedule {
        let machine = &self.machines[own];
        let slice = self.slice(machine, self.me.0);
        let mut received = Received(0);
        let mut stages = Vec::new();

        let (mut stage, sums) = self.sum_within(machine, &slice, &mut received);
        if let [_] = self.machines {
            stage.additions.iter_mut().for_each(|sum| sum.copy_first(total(slice.clone())));
        }
        if within {
            stages.push(stage);
        }
        if self.machines.len() > 1 {
            stages.extend(self.sum_across(own, &slice, &sums, &mut received));
        }
        if within {
            stages.push(self.gather_within(machine, &slice));
        }
        SumSchedule { stages, received: received.0 }
    }

    /// The slice of the values that `rank` adds up for its machine.
    fn slice(&self, machine: &Range<u32>, rank: u32) -> Range<usize> {
        slice_of(rank - machine.start, machine.len() as u32, self.len)
    }

    /// The subtrees whose sums these ranks together have.
    fn subtrees(&self, ranks: Range<u32>) -> Vec<TreeNode> {
        let block = |rank| virtual_block(self.virtual_ranks, Rank(rank), self.world_size);
        maximal_subtrees(block(ranks.start).start..block(ranks.end - 1).end)
    }

    /// The first stage, and the sums of this rank's machine afterwards.
    fn sum_within(
        &self,
        machine: &Range<u32>,
        slice: &Range<usize>,
        received: &mut Received,
    ) -> (SumStage, Vec<Partial>) {
        let own = self.subtrees(self.me.0..self.me.0 + 1);
        let own_at = |index, range| SumRegion { memory: RankMemory::Sum(index), range };
        let mut transfers = BTreeMap::new();
        let mut terms = Vec::new();
        for rank in machine.clone() {
            if rank == self.me.0 {
                let here = |(index, &node)| (node, own_at(index, slice.clone()));
                terms.extend(own.iter().enumerate().map(here));
                continue;
            }
            let theirs = self.slice(machine, rank);
            let send = (0..own.len()).map(|index| own_at(index, theirs.clone())).collect();
            let sums = received.sums(self.subtrees(rank..rank + 1), slice.len());
            let receive = sums.iter().map(|(_, region)| region.clone()).collect();
            transfers.insert(Rank(rank), PeerTransfer { send, receive });
            terms.extend(sums);
        }
        let (additions, sums) = Additions::of(terms);
        (SumStage { transfers, additions: vec![additions] }, sums)
    }

    /// The second and the third stage; `sums` are those of this rank's machine.
    fn sum_across(
        &self,
        own: usize,
        slice: &Range<usize>,
        sums: &[Partial],
        received: &mut Received,
    ) -> [SumStage; 2] {
        let (mut add, mut gather) = (SumStage::default(), SumStage::default());
        let at = |(node, region): &Partial, part: &Range<usize>| {
            (*node, region.narrow(part.start - slice.start..part.end - slice.start))
        };
        for range in self.ranges_of_one_rank(slice) {
            let part = |machine: usize| {
                let part = slice_of(machine as u32, self.machines.len() as u32, range.len());
                range.start + part.start..range.start + part.end
            };
            let mine = part(own);
            let mut terms = Vec::new();
            for (index, machine) in self.machines.iter().enumerate() {
                if index == own {
                    terms.extend(sums.iter().map(|sum| at(sum, &mine)));
                    continue;
                }
                let peer = self.rank_with(machine, range.start);
                let theirs = part(index);
                let from_them = received.sums(self.subtrees(machine.clone()), mine.len());

                let transfer = add.transfers.entry(peer).or_default();
                transfer.send.extend(sums.iter().map(|sum| at(sum, &theirs).1));
                transfer.receive.extend(from_them.iter().map(|(_, region)| region.clone()));
                terms.extend(from_them);

                let transfer = gather.transfers.entry(peer).or_default();
                transfer.send.push(total(mine.clone()));
                transfer.receive.push(total(theirs));
            }
            let (mut additions, _) = Additions::of(terms);
            additions.copy_first(total(mine));
            add.additions.push(additions);
        }
        [add, gather]
    }

    /// The rank of a machine whose slice has this value.
    fn rank_with(&self, machine: &Range<u32>, value: usize) -> Rank {
        let index = ((value as u128 + 1) * machine.len() as u128 - 1) / self.len.max(1) as u128;
        Rank(machine.start + index as u32)
    }

    /// The ranges of `slice` that are in one rank's slice on every machine, as machines may have different numbers of
    /// ranks.
    fn ranges_of_one_rank(&self, slice: &Range<usize>) -> Vec<Range<usize>> {
        let mut ends = vec![slice.start, slice.end];
        for machine in self.machines {
            ends.extend(machine.clone().map(|rank| self.slice(machine, rank).end));
        }
        ends.retain(|end| (slice.start..=slice.end).contains(end));
        ends.sort_unstable();
        ends.dedup();
        ends.windows(2).map(|pair| pair[0]..pair[1]).collect()
    }

    /// The last stage.
    fn gather_within(&self, machine: &Range<u32>, slice: &Range<usize>) -> SumStage {
        let others = machine.clone().filter(|rank| *rank != self.me.0);
        let transfer = |rank| {
            let receive = vec![total(self.slice(machine, rank))];
            (Rank(rank), PeerTransfer { send: vec![total(slice.clone())], receive })
        };
        SumStage { transfers: others.map(transfer).collect(), additions: Vec::new() }
    }
}

/// Where these values of the total are in the end.
fn total(range: Range<usize>) -> SumRegion {
    SumRegion { memory: RankMemory::Sum(0), range }
}

/// Number of values in [`RankMemory::Received`] so far.
struct Received(usize);

impl Received {
    /// Memory for the sums of these subtrees, of `len` values each.
    fn sums(&mut self, nodes: Vec<TreeNode>, len: usize) -> Vec<Partial> {
        let mut next = |node| {
            let start = self.0;
            self.0 += len.next_multiple_of(RECEIVE_ALIGNMENT);
            (node, SumRegion { memory: RankMemory::Received, range: start..start + len })
        };
        nodes.into_iter().map(&mut next).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Machines with these numbers of ranks.
    fn machines(ranks: &[u32]) -> Machines {
        let name = |(machine, ranks): (usize, &u32)| {
            (0..*ranks).map(move |_| format!("10.0.0.{machine}:1024"))
        };
        Machines::of_addresses(&ranks.iter().enumerate().flat_map(name).collect::<Vec<_>>())
    }

    /// The schedules of all ranks.
    fn schedules(machines: &Machines, virtual_ranks: u32, len: usize) -> Vec<SumSchedule> {
        let ranks = machines.ranks.iter().flat_map(Range::clone);
        ranks.map(|rank| SumSchedule::new(machines, Rank(rank), virtual_ranks, len)).collect()
    }

    /// The largest number of values that leave a machine for another one.
    fn values_out_of_a_machine(machines: &Machines, virtual_ranks: u32, len: usize) -> usize {
        let all = schedules(machines, virtual_ranks, len);
        let leaving = |machine: &Range<u32>| {
            let stages = machine.clone().flat_map(|rank| &all[rank as usize].stages);
            let transfers = stages.flat_map(|stage| &stage.transfers);
            transfers
                .filter(|(peer, _)| !machine.contains(&peer.0))
                .flat_map(|(_, transfer)| &transfer.send)
                .map(|region| region.range.len())
                .sum::<usize>()
        };
        machines.ranks.iter().map(leaving).max().unwrap()
    }

    /// What a ring sends out of a machine, with consecutive ranks on each.
    fn values_of_a_ring(world_size: usize, len: usize) -> usize {
        2 * (world_size - 1) * len / world_size
    }

    #[test]
    fn addresses_of_one_host_are_one_machine() {
        let addresses = ["10.0.0.1:1", "10.0.0.1:2", "[fe80::1]:1", "[fe80::1]:7", "10.0.0.1:3"];
        let machines = Machines::of_addresses(&addresses.map(str::to_owned));
        assert_eq!(machines.ranks, [0..2, 2..4, 4..5]);
        assert_eq!(Machines::of_addresses(&["a:1", "a:2"].map(str::to_owned)), Machines::one(2));
    }

    #[test]
    fn no_more_leaves_a_machine_than_with_a_ring() {
        const LEN: usize = 3 << 18;
        for (count, ranks, virtual_ranks) in
            [(2, 8, 16), (2, 8, 64), (8, 8, 64), (3, 1, 8), (128, 8, 1024)]
        {
            let machines = machines(&vec![ranks; count]);
            let most = values_out_of_a_machine(&machines, virtual_ranks, LEN);
            let ring = values_of_a_ring(count * ranks as usize, LEN);
            // Three machines share eight virtual ranks as 3, 3 and 2: two subtrees on the first two.
            let subtrees = if count == 3 { 2 } else { 1 };
            assert_eq!(most, (subtrees + 1) * (count - 1) * LEN / count, "{count} × {ranks}");
            if subtrees == 1 {
                assert!(most as f64 <= 1.05 * ring as f64, "{count} × {ranks}: {most}, {ring}");
            }
        }
        // What each rank would send to each rank of the other machine without the first and the last stage.
        let without = 8 * 8 * 2 * LEN / 16;
        assert_eq!(values_out_of_a_machine(&machines(&[8, 8]), 16, LEN), without / 8);
    }

    #[test]
    fn a_machine_alone_and_ranks_alone_need_two_stages() {
        let stages = |ranks: &[u32]| -> Vec<usize> {
            schedules(&machines(ranks), 8, 100).iter().map(|each| each.stages.len()).collect()
        };
        assert_eq!(stages(&[1]), [0]);
        assert_eq!(stages(&[3]), [2; 3]);
        assert_eq!(stages(&[1, 1, 1]), [2; 3]);
        assert_eq!(stages(&[1, 2]), [4; 3]);
    }

    /// A rank's memory, whose values are sums written as text.
    struct TextMemory {
        sums: Vec<Vec<String>>,
        received: Vec<String>,
    }

    impl TextMemory {
        fn values(&mut self, region: &SumRegion) -> &mut [String] {
            let memory = match region.memory {
                RankMemory::Sum(index) => &mut self.sums[index],
                RankMemory::Received => &mut self.received,
            };
            &mut memory[region.range.clone()]
        }

        fn add(&mut self, additions: &Additions) {
            let mut terms: Vec<Vec<String>> =
                additions.terms.iter().map(|term| self.values(term).to_vec()).collect();
            for &(left, right) in &additions.pairs {
                let right = terms[right].clone();
                for (left, right) in terms[left].iter_mut().zip(right) {
                    *left = format!("({left}+{right})");
                }
            }
            if let Some(to) = additions.copy_first_to {
                terms[to] = terms[0].clone();
            }
            for (region, values) in additions.terms.iter().zip(terms) {
                self.values(region).clone_from_slice(&values);
            }
        }
    }

    /// The text of a subtree's sum.
    fn sum_of(node: TreeNode) -> String {
        if node.leaves == 1 {
            return node.start.to_string();
        }
        let half = node.leaves / 2;
        let child = |start| sum_of(TreeNode { start, leaves: half });
        format!("({}+{})", child(node.start), child(node.start + half))
    }

    /// No value is received twice in a stage, or sent and received; terms of additions do not overlap.
    fn assert_disjoint(stage: &SumStage) {
        let overlap = |a: &SumRegion, b: &SumRegion| {
            a.memory == b.memory && a.range.start < b.range.end && b.range.start < a.range.end
        };
        let received: Vec<_> = stage.transfers.values().flat_map(|at| &at.receive).collect();
        for (index, region) in received.iter().enumerate() {
            assert!(received[..index].iter().all(|other| !overlap(region, other)));
            let mut sent = stage.transfers.values().flat_map(|at| &at.send);
            assert!(sent.all(|other| !overlap(region, other)));
        }
        let terms: Vec<_> = stage.additions.iter().flat_map(|sum| &sum.terms).collect();
        for (index, region) in terms.iter().enumerate() {
            assert!(terms[..index].iter().all(|other| !overlap(region, other)));
        }
    }

    /// Runs all ranks' schedules together; returns the totals.
    fn play(machines: &Machines, virtual_ranks: u32, len: usize) -> Vec<Vec<String>> {
        let schedules = schedules(machines, virtual_ranks, len);
        let world_size = schedules.len() as u32;
        let mut ranks: Vec<TextMemory> = (0..world_size)
            .zip(&schedules)
            .map(|(rank, schedule)| {
                let nodes = maximal_subtrees(virtual_block(virtual_ranks, Rank(rank), world_size));
                let sums = nodes.into_iter().map(|node| vec![sum_of(node); len]).collect();
                TextMemory { sums, received: vec![String::new(); schedule.received] }
            })
            .collect();
        for stage in 0..schedules[0].stages.len() {
            schedules.iter().for_each(|schedule| assert_disjoint(&schedule.stages[stage]));
            let mut sent = BTreeMap::new();
            for (from, schedule) in schedules.iter().enumerate() {
                for (peer, transfer) in &schedule.stages[stage].transfers {
                    let pieces =
                        transfer.send.iter().map(|region| ranks[from].values(region).to_vec());
                    sent.insert((from as u32, peer.0), pieces.collect::<Vec<_>>());
                }
            }
            for (to, schedule) in schedules.iter().enumerate() {
                for (peer, transfer) in &schedule.stages[stage].transfers {
                    let pieces = sent.remove(&(peer.0, to as u32)).unwrap();
                    assert_eq!(pieces.len(), transfer.receive.len());
                    for (piece, region) in pieces.iter().zip(&transfer.receive) {
                        ranks[to].values(region).clone_from_slice(piece);
                    }
                }
                for additions in &schedule.stages[stage].additions {
                    ranks[to].add(additions);
                }
            }
            assert!(sent.is_empty(), "sent and not received");
        }
        ranks.into_iter().map(|mut rank| rank.sums.swap_remove(0)).collect()
    }

    proptest! {
        #[test]
        fn every_rank_gets_the_sum_of_the_tree_whatever_the_machines(
            ranks in prop::collection::vec(1u32..5, 1..5), spread in 0u32..3, len in 0usize..40,
        ) {
            let machines = machines(&ranks);
            let virtual_ranks = ranks.iter().sum::<u32>().next_power_of_two() << spread;
            let total = sum_of(TreeNode { start: 0, leaves: virtual_ranks });
            for values in play(&machines, virtual_ranks, len) {
                prop_assert_eq!(values, vec![total.clone(); len]);
            }
        }
    }
}
