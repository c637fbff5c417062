//! Assignment of ranks to nodes and of virtual ranks to ranks, and the subtrees that each rank sums locally.

use std::{collections::BTreeSet, ops::Range};

use serde::{Deserialize, Serialize};

use crate::ids::{LocalRank, NodeId, Rank};

/// Length of a leaf's tail: the f32 values appended to every gradient and reduced in the same all-reduce (sums, votes,
/// norm). `crates/trainer/src/learner.rs` defines their order.
pub const GRADIENT_TAIL_LEN: u64 = 9;

/// Most ranks of a node.
pub const MAX_LOCAL_RANKS: u32 = 1024;

/// A node that can take ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The node.
    pub node: NodeId,
    /// Number of ranks that it can run.
    pub slots: u32,
    /// Local ranks whose processes hold state.
    pub holders: BTreeSet<LocalRank>,
}

/// Position of one rank: its node, and its slot there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The rank.
    pub rank: Rank,
    /// The node that runs it.
    pub node: NodeId,
    /// Its number on that node.
    pub local_rank: LocalRank,
}

/// Assigns as many ranks to nodes as fit, at most `max_ranks`; `None` if fewer than `min_ranks` fit.
///
/// If there are too many, processes that hold state come first, so that no step is lost, then other slots of their
/// nodes. Ranks are contiguous on each node, so that neighbours in a collective share a machine. Nodes are sorted by
/// name, so that the same nodes always get the same ranks.
#[must_use]
pub fn place_ranks(offers: &[Offer], min_ranks: u32, max_ranks: u32) -> Option<Vec<Placement>> {
    let slots = offers
        .iter()
        .flat_map(|offer| (0..offer.slots).map(move |local| (offer, LocalRank(local))));
    let mut slots: Vec<(&Offer, LocalRank)> = slots.collect();
    slots.sort_by_key(|(offer, local)| {
        (!offer.holders.contains(local), offer.holders.is_empty(), &offer.node, *local)
    });
    slots.truncate(max_ranks as usize);
    slots.sort_by_key(|(offer, local)| (&offer.node, *local));
    let place = |(rank, (offer, local_rank)): (u32, (&Offer, LocalRank))| Placement {
        rank: Rank(rank),
        node: offer.node.clone(),
        local_rank,
    };
    let is_enough = slots.len() >= min_ranks as usize;
    is_enough.then(|| (0..).zip(slots).map(place).collect())
}

/// The virtual ranks that `rank` of `world_size` runs: one contiguous block per rank. If the numbers do not
/// divide evenly, the first blocks are larger by one.
///
/// A virtual rank is a fixed part of every global batch. The number of virtual ranks is constant, so the result
/// of training does not depend on `world_size`.
///
/// ```
/// use baton_job::{plan::virtual_block, Rank};
/// assert_eq!(virtual_block(8, Rank(0), 3), 0..3);
/// assert_eq!(virtual_block(8, Rank(2), 3), 6..8);
/// ```
#[must_use]
pub fn virtual_block(virtual_ranks: u32, rank: Rank, world_size: u32) -> Range<u32> {
    let share = virtual_ranks / world_size.max(1);
    let larger = virtual_ranks % world_size.max(1);
    let start = rank.0 * share + rank.0.min(larger);
    start..start + share + u32::from(rank.0 < larger)
}

/// The subtree of the fixed tree (`baton_collectives::tree`) over virtual ranks `start..start + leaves`; `leaves` is a
/// power of two and divides `start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TreeNode {
    /// First virtual rank.
    pub start: u32,
    /// Number of virtual ranks, a power of two.
    pub leaves: u32,
}

impl TreeNode {
    /// The subtree of one virtual rank.
    #[must_use]
    pub fn leaf(virtual_rank: u32) -> Self {
        Self { start: virtual_rank, leaves: 1 }
    }

    /// The parent of `self` and `right`, if they are its left and right child.
    #[must_use]
    pub fn join(self, right: Self) -> Option<Self> {
        let siblings = self.leaves == right.leaves
            && self.start.is_multiple_of(2 * self.leaves)
            && self.start + self.leaves == right.start;
        siblings.then_some(Self { start: self.start, leaves: 2 * self.leaves })
    }
}

/// The largest subtrees that together cover `block`, in ascending order.
///
/// ```
/// use baton_job::plan::{TreeNode, maximal_subtrees};
/// let nodes = maximal_subtrees(3..6);
/// assert_eq!(nodes, [TreeNode { start: 3, leaves: 1 }, TreeNode { start: 4, leaves: 2 }]);
/// ```
#[must_use]
pub fn maximal_subtrees(block: Range<u32>) -> Vec<TreeNode> {
    let mut nodes = Vec::new();
    let mut start = block.start;
    while start < block.end {
        let fits = 1 << (block.end - start).ilog2();
        let aligned = if start == 0 { fits } else { 1 << start.trailing_zeros() };
        let leaves = fits.min(aligned);
        nodes.push(TreeNode { start, leaves });
        start += leaves;
    }
    nodes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn offers(slots: &[u32]) -> Vec<Offer> {
        let named = |(i, &slots): (usize, &u32)| Offer {
            node: NodeId(format!("node{i:02}")),
            slots,
            holders: BTreeSet::new(),
        };
        slots.iter().enumerate().map(named).collect()
    }

    #[test]
    fn too_few_slots_give_no_placement() {
        assert_eq!(place_ranks(&offers(&[2, 1]), 4, 8), None);
    }

    #[test]
    fn processes_that_hold_state_come_first_and_then_other_slots_of_their_nodes() {
        let mut given = offers(&[4, 4, 4]);
        given[1].holders = [LocalRank(3)].into();
        given[2].holders = [LocalRank(0), LocalRank(1)].into();
        let places = |max_ranks| -> Vec<String> {
            let placed = place_ranks(&given, 0, max_ranks).unwrap();
            placed.iter().map(|p| format!("{} {}/{}", p.rank, p.node, p.local_rank)).collect()
        };
        assert_eq!(places(3), ["0 node01/3", "1 node02/0", "2 node02/1"]);
        assert_eq!(
            places(5),
            ["0 node01/0", "1 node01/1", "2 node01/3", "3 node02/0", "4 node02/1"]
        );
        assert_eq!(places(9).last().unwrap(), "8 node02/3");
        assert_eq!(places(9)[0], "0 node00/0");
    }

    #[test]
    fn only_siblings_join_to_their_parent() {
        let node = |start, leaves| TreeNode { start, leaves };
        assert_eq!(node(8, 4).join(node(12, 4)), Some(node(8, 8)));
        for (left, right, why) in [
            (node(8, 4), node(12, 2), "of different size"),
            (node(8, 2), node(12, 2), "not adjacent"),
            (node(12, 4), node(8, 4), "in the wrong order"),
            (node(4, 4), node(8, 4), "neighbours with different parents"),
            (node(2, 2), node(4, 2), "neighbours with different parents"),
        ] {
            assert_eq!(left.join(right), None, "{why}: {left:?}, {right:?}");
        }
    }

    proptest! {
        #[test]
        fn a_block_is_covered_by_the_fewest_subtrees(start in 0u32..70, len in 0u32..70) {
            let nodes = maximal_subtrees(start..start + len);
            let mut next = start;
            for node in &nodes {
                prop_assert_eq!(node.start, next);
                prop_assert!(node.leaves.is_power_of_two() && node.start % node.leaves == 0);
                next += node.leaves;
            }
            prop_assert_eq!(next, start + len);
            prop_assert!(nodes.windows(2).all(|pair| pair[0].join(pair[1]).is_none()));
        }

        #[test]
        fn ranks_are_a_permutation_and_contiguous_on_each_node(
            slots in prop::collection::vec(0u32..9, 0..6), most in 1u32..40, rotate in 0usize..6,
        ) {
            let mut given = offers(&slots);
            let len = given.len().max(1);
            given.rotate_left(rotate % len);
            let placed = place_ranks(&given, 0, most).unwrap();
            let total: u32 = slots.iter().sum();
            prop_assert_eq!(placed.len() as u32, total.min(most));
            for (i, placement) in placed.iter().enumerate() {
                prop_assert_eq!(placement.rank, Rank(i as u32));
            }
            for pair in placed.windows(2) {
                let same = pair[0].node == pair[1].node;
                prop_assert!(pair[0].node <= pair[1].node);
                prop_assert!(!same || pair[0].local_rank.next() == pair[1].local_rank);
                prop_assert!(same || pair[1].local_rank == LocalRank(0));
            }
            prop_assert_eq!(place_ranks(&offers(&slots), 0, most).unwrap(), placed);
        }

        #[test]
        fn blocks_of_virtual_ranks_cover_each_once(log2 in 0u32..8, world in 1u32..130) {
            let virtual_ranks = 1 << log2;
            prop_assume!(world <= virtual_ranks);
            let mut next = 0;
            for rank in 0..world {
                let block = virtual_block(virtual_ranks, Rank(rank), world);
                prop_assert_eq!(block.start, next);
                prop_assert!(!block.is_empty());
                next = block.end;
            }
            prop_assert_eq!(next, virtual_ranks);
        }
    }
}
