//! Tests that every implementation must pass.

use std::convert::Infallible;

use baton_collectives::tree::Fold;
use baton_collectives::{BufferMut, Collective, MAX_GATHERED_BYTES, Part, TreeNode};
use baton_job::Rank;
use baton_job::plan::virtual_block;
use proptest::prelude::*;

use crate::{IMPLEMENTATIONS, Implementation, LONG, Member, on_every_rank};

/// SplitMix64: the seed is enough to repeat a failure.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Mostly values as gradients have them, and all special cases of floating point.
    fn value(&mut self) -> f32 {
        let bits = self.next();
        let sign = ((bits >> 63) as u32) << 31;
        let fraction = bits as u32 & 0x007f_ffff;
        match bits >> 32 & 0x3f {
            0 => f32::from_bits(sign),
            1 => f32::from_bits(sign | fraction), // subnormal
            2 => f32::from_bits(sign | 0x7f00_0000 | fraction), // close to the largest
            3 if fraction < 0x0010_0000 => f32::from_bits(sign | 0x7f80_0000), // infinite
            exponent => f32::from_bits(sign | (110 + exponent as u32 % 24) << 23 | fraction),
        }
    }

    pub(crate) fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }
}

/// The definition of the sum, in the simplest form.
pub(crate) fn tree_sum(leaves: &[Vec<f32>]) -> Vec<f32> {
    if let [leaf] = leaves {
        return leaf.clone();
    }
    let (left, right) = leaves.split_at(leaves.len() / 2);
    tree_sum(left).iter().zip(tree_sum(right)).map(|(left, right)| left + right).collect()
}

/// Whether the values are bit-identical; all NaNs count as equal.
pub(crate) fn same(a: &[f32], b: &[f32]) -> bool {
    let same_value = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    a.len() == b.len() && a.iter().zip(b).all(same_value)
}

/// The partial sums of `member`'s block of `leaves`.
pub(crate) fn partial_sums(
    member: &dyn Collective,
    leaves: &[Vec<f32>],
) -> Vec<(TreeNode, Vec<f32>)> {
    let block = virtual_block(leaves.len() as u32, member.rank(), member.world_size());
    let mut fold = Fold::new(block.start);
    for virtual_rank in block {
        let Ok(()) = fold.push(leaves[virtual_rank as usize].clone(), |left, right| {
            left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
            Ok::<_, Infallible>(())
        });
    }
    fold.finish()
}

fn all_reduce(member: &mut Member, leaves: &[Vec<f32>]) -> Vec<f32> {
    let mut sums = partial_sums(member.as_ref(), leaves);
    let mut parts: Vec<Part<'_>> = sums
        .iter_mut()
        .map(|(node, sum)| Part { node: *node, buffer: BufferMut::Host(sum) })
        .collect();
    member.all_reduce(leaves.len() as u32, &mut parts).unwrap();
    sums.swap_remove(0).1
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_world_gets_the_fixed_tree_sum_bit_for_bit(
        world_size in 1u32..=8,
        virtual_ranks in prop_oneof![3 => Just(8u32), 1 => Just(16u32)],
        len in prop_oneof![Just(0usize), Just(1), Just(7), Just(1000), Just(4099)],
        seed: u64,
    ) {
        let mut random = Random(seed);
        let leaves: Vec<_> = (0..virtual_ranks).map(|_| random.values(len)).collect();
        let expected = tree_sum(&leaves);
        for implementation in IMPLEMENTATIONS {
            let group = implementation.group(world_size, LONG);
            let totals = on_every_rank(group, |_, mut member| all_reduce(&mut member, &leaves));
            for total in totals {
                prop_assert!(same(&total, &expected), "{implementation:?}");
            }
        }
    }

    #[test]
    fn operations_follow_each_other_on_the_same_group(
        world_size in 1u32..=5, len in 0usize..300, root in 0u32..5, seed: u64,
    ) {
        let root = Rank(root % world_size);
        let mut random = Random(seed);
        let leaves: Vec<_> = (0..8).map(|_| random.values(len)).collect();
        let (expected, sent) = (tree_sum(&leaves), random.values(2 * len));
        for implementation in IMPLEMENTATIONS {
            let group = implementation.group(world_size, LONG);
            on_every_rank(group, |rank, mut member| {
                for _ in 0..2 {
                    assert!(same(&all_reduce(&mut member, &leaves), &expected));
                    let mut values = if rank == root { sent.clone() } else { vec![0.5; 2 * len] };
                    member.broadcast(root, BufferMut::Host(&mut values)).unwrap();
                    assert!(same(&values, &sent));
                    let bytes = member.all_gather_bytes(&vec![rank.0 as u8; rank.0 as usize]);
                    let all: Vec<_> = (0..world_size).map(|r| vec![r as u8; r as usize]).collect();
                    assert_eq!(bytes.unwrap(), all);
                }
            });
        }
    }
}

/// All ranks send at once, much more than sockets can buffer.
#[test]
fn buffers_larger_than_those_of_sockets_do_not_block() {
    let leaves: Vec<Vec<f32>> = (0..4).map(|v| vec![v as f32; 6 << 20]).collect();
    for machines in [&[3][..], &[2, 1]] {
        let group = Implementation::Tcp(machines).group(3, LONG);
        let totals = on_every_rank(group, |_, mut member| all_reduce(&mut member, &leaves));
        assert!(totals.iter().all(|total| total.iter().all(|&value| value == 6.0)));
    }
}

#[test]
fn gathering_more_than_the_limit_is_refused_before_anything_is_sent() {
    for implementation in IMPLEMENTATIONS {
        let mut group = implementation.group(2, LONG);
        let refused = group[0].all_gather_bytes(&vec![0; MAX_GATHERED_BYTES + 1]).unwrap_err();
        assert!(refused.to_string().starts_with("all_gather_bytes: rank 0 offers 16777217 bytes"));
    }
}
