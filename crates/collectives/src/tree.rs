//! The fixed tree: the only order in which contributions of virtual ranks are added.
//!
//! Floating-point addition is not associative, so a sum depends on its order. Here the order is the perfect binary tree
//! over the virtual ranks, independent of which rank has them: `sum([s, s+2k)) = sum([s, s+k)) + sum([s+k, s+2k))`. A
//! rank adds up the largest complete subtrees of its block ([`Fold`]); the collective adds the rest.

use std::ops::Range;

pub use baton_job::plan::{TreeNode, maximal_subtrees};
use baton_job::{Rank, plan::virtual_block};

use crate::{BufferMut, Error, operation};

/// A partial sum.
#[derive(Debug)]
pub struct Part<'a> {
    /// The subtree that it is the sum of.
    pub node: TreeNode,
    /// The values.
    pub buffer: BufferMut<'a>,
}

/// Adds up consecutive virtual ranks in the order of the fixed tree, like a binary counter whose digits are subtrees.
/// It keeps buffers that were added to others for reuse, so that a rank needs about log2 (virtual ranks) of them. It
/// can be used again for the next update.
///
/// ```
/// # use baton_collectives::tree::{Fold, TreeNode};
/// let mut fold = Fold::new(0);
/// for gradient in [0.5, 0.25, 4.0] {
///     let mut leaf = fold.take_buffer().unwrap_or_else(|| vec![0.0]);
///     leaf[0] = gradient;
///     fold.push(leaf, |sum, leaf| Ok::<_, std::io::Error>(sum[0] += leaf[0]))?;
/// }
/// let sums = fold.finish();
/// assert_eq!(sums[0], (TreeNode { start: 0, leaves: 2 }, vec![0.75]));
/// assert_eq!(sums[1], (TreeNode { start: 2, leaves: 1 }, vec![4.0]));
/// # Ok::<_, std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Fold<T> {
    first: u32,
    next: u32,
    sums: Vec<(TreeNode, T)>,
    free: Vec<T>,
}

impl<T> Fold<T> {
    /// A fold whose first virtual rank is `first`.
    #[must_use]
    pub fn new(first: u32) -> Self {
        Self { first, next: first, sums: Vec::new(), free: Vec::new() }
    }

    /// A used buffer, to be overwritten with the next leaf; `None` if a new one is needed.
    pub fn take_buffer(&mut self) -> Option<T> {
        self.free.pop()
    }

    /// Returns a buffer for reuse, such as a sum that is no longer needed.
    pub fn recycle(&mut self, buffer: T) {
        self.free.push(buffer);
    }

    /// Adds the next virtual rank's contribution and completes the subtrees that end with it.
    /// `add(left, right)` must do `left += right`.
    ///
    /// # Errors
    /// The first error of `add`. The sums are incomplete then: call [`finish`](Self::finish) and start again.
    pub fn push<E>(
        &mut self,
        leaf: T,
        add: impl FnMut(&mut T, &T) -> Result<(), E>,
    ) -> Result<(), E> {
        let node = TreeNode::leaf(self.next);
        self.next += 1;
        self.push_node(node, leaf, add)
    }

    /// The sums so far, as [`finish`](Self::finish) would return them.
    #[must_use]
    pub fn sums(&self) -> &[(TreeNode, T)] {
        &self.sums
    }

    /// The sums so far: exactly the maximal subtrees of what was pushed, ascending. Afterwards the fold can be used
    /// again from its first virtual rank, with its free buffers.
    pub fn finish(&mut self) -> Vec<(TreeNode, T)> {
        self.next = self.first;
        std::mem::take(&mut self.sums)
    }

    /// Adds the sum of a complete subtree, which must begin where the last one ended. `add` is that of
    /// [`push`](Self::push).
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn push_node<E>(
        &mut self,
        mut node: TreeNode,
        mut sum: T,
        mut add: impl FnMut(&mut T, &T) -> Result<(), E>,
    ) -> Result<(), E> {
        while let Some(parent) = self.sums.last().and_then(|(left, _)| left.join(node)) {
            let Some((_, mut left)) = self.sums.pop() else { break };
            add(&mut left, &sum)?;
            self.free.push(std::mem::replace(&mut sum, left));
            node = parent;
        }
        self.sums.push((node, sum));
        Ok(())
    }
}

/// The `index`-th of `count` slices of `len` values.
pub(crate) fn slice_of(index: u32, count: u32, len: usize) -> Range<usize> {
    let boundary = |index: u32| (len as u128 * u128::from(index) / u128::from(count)) as usize;
    boundary(index)..boundary(index + 1)
}

/// The number of values in each of `parts`, which must be the maximal subtrees of `rank`.
///
/// # Errors
/// They are not the maximal subtrees, their lengths differ, or such a group is impossible.
pub fn check_parts(
    rank: Rank,
    world_size: u32,
    virtual_ranks: u32,
    parts: &[Part<'_>],
) -> Result<usize, Error> {
    let refuse = |detail| Err(Error::Protocol { operation: operation::ALL_REDUCE, detail });
    if !virtual_ranks.is_power_of_two() || virtual_ranks < world_size {
        return refuse(format!(
            "{virtual_ranks} virtual ranks on {world_size} ranks: there must be a power of two, \
             and at least one for each rank"
        ));
    }
    let expected = maximal_subtrees(virtual_block(virtual_ranks, rank, world_size));
    if !parts.iter().map(|part| part.node).eq(expected.iter().copied()) {
        let given: Vec<TreeNode> = parts.iter().map(|part| part.node).collect();
        return refuse(format!("rank {rank} must pass the sums of {expected:?}, not {given:?}"));
    }
    let len = parts[0].buffer.len();
    match parts.iter().find(|part| part.buffer.len() != len) {
        None => Ok(len),
        Some(part) => refuse(format!(
            "the sum of {:?} has {} values, that of {:?} {len}",
            part.node,
            part.buffer.len(),
            parts[0].node
        )),
    }
}

/// `left += right`, element by element.
pub(crate) fn add(left: &mut [f32], right: &[f32]) {
    for (left, right) in left.iter_mut().zip(right) {
        *left += right;
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    /// A fold that builds the sum's parentheses as text.
    fn fold_of(block: Range<u32>) -> Fold<String> {
        let mut fold = Fold::new(block.start);
        for virtual_rank in block {
            let join = |left: &mut String, right: &String| {
                *left = format!("({left}+{right})");
                Ok::<_, Infallible>(())
            };
            fold.push(virtual_rank.to_string(), join).unwrap();
        }
        fold
    }

    #[test]
    fn eight_leaves_are_added_as_a_perfect_tree() {
        let sums = fold_of(0..8).finish();
        let root = TreeNode { start: 0, leaves: 8 };
        assert_eq!(sums, [(root, "(((0+1)+(2+3))+((4+5)+(6+7)))".to_owned())]);
    }

    #[test]
    fn a_block_that_cuts_subtrees_leaves_their_roots() {
        let sums = fold_of(3..6).finish();
        let roots = [(TreeNode::leaf(3), "3"), (TreeNode { start: 4, leaves: 2 }, "(4+5)")];
        assert_eq!(sums, roots.map(|(node, sum)| (node, sum.to_owned())));
    }

    #[test]
    fn a_fold_needs_few_buffers_and_can_be_used_again() {
        let mut fold = Fold::new(0);
        let mut made = 0;
        let mut make = || {
            made += 1;
            made
        };
        for _update in 0..3 {
            for _leaf in 0..64 {
                let buffer = fold.take_buffer().unwrap_or_else(&mut make);
                fold.push(buffer, |_, _| Ok::<_, Infallible>(())).unwrap();
            }
            for (node, buffer) in fold.finish() {
                assert_eq!(node, TreeNode { start: 0, leaves: 64 });
                fold.recycle(buffer);
            }
        }
        assert_eq!(made, 7);
    }

    #[test]
    fn a_failed_addition_is_reported_and_the_fold_can_start_again() {
        let mut fold = Fold::new(2);
        fold.push(1, |_, _| Err("not called")).unwrap();
        assert_eq!(fold.push(2, |_, _| Err("device lost")), Err("device lost"));

        fold.finish();
        fold.push(5, |_, _| Err("not called")).unwrap();
        assert_eq!(fold.finish(), [(TreeNode::leaf(2), 5)]);
    }

    #[test]
    fn foreign_or_uneven_parts_are_refused() {
        let (mut a, mut b) = ([0.0; 2], [0.0; 3]);
        fn part(node: TreeNode, values: &mut [f32]) -> Part<'_> {
            Part { node, buffer: BufferMut::Host(values) }
        }
        let refused = |parts: &[Part<'_>]| check_parts(Rank(1), 3, 4, parts).unwrap_err();

        let foreign = [part(TreeNode::leaf(0), &mut a[..])];
        assert!(refused(&foreign).to_string().contains("rank 1 must pass"));
        let pair = TreeNode { start: 4, leaves: 2 };
        let uneven = [part(TreeNode::leaf(3), &mut a[..]), part(pair, &mut b[..])];
        let error = check_parts(Rank(1), 3, 8, &uneven).unwrap_err();
        assert!(error.to_string().contains("has 3 values"), "{error}");
        for (world_size, virtual_ranks) in [(3, 6), (8, 4)] {
            let error = check_parts(Rank(0), world_size, virtual_ranks, &[]).unwrap_err();
            assert!(error.to_string().contains("there must be a power of two"), "{error}");
        }
    }

    #[test]
    fn the_right_parts_are_accepted_with_their_length() {
        let (mut a, mut b) = ([0.0; 3], [0.0; 3]);
        let pair = TreeNode { start: 4, leaves: 2 };
        let parts = [(TreeNode::leaf(3), &mut a), (pair, &mut b)]
            .map(|(node, values)| Part { node, buffer: BufferMut::Host(values) });
        assert_eq!(check_parts(Rank(1), 3, 8, &parts).unwrap(), 3);
        // As many virtual ranks as ranks.
        assert_eq!(check_parts(Rank(3), 8, 8, &parts[..1]).unwrap(), 3);
    }

    #[test]
    fn addition_is_element_by_element() {
        let mut left = [1.0, 2.0, 0.5];
        add(&mut left, &[10.0, -2.0, 0.25]);
        assert_eq!(left, [11.0, 0.0, 0.75]);
    }

    proptest! {
        #[test]
        fn slices_of_the_ranks_cover_all_values_once_and_evenly(world in 1u32..40, len in 0usize..500) {
            let mut next = 0;
            for rank in 0..world {
                let slice = slice_of(rank, world, len);
                prop_assert_eq!(slice.start, next);
                let even = len / world as usize;
                prop_assert!(slice.len() == even || slice.len() == even + 1);
                next = slice.end;
            }
            prop_assert_eq!(next, len);
        }

        #[test]
        fn a_fold_returns_exactly_the_maximal_subtrees(start in 0u32..70, len in 0u32..70) {
            let block = start..start + len;
            let nodes = maximal_subtrees(block.clone());
            let folded: Vec<TreeNode> =
                fold_of(block.clone()).finish().into_iter().map(|(node, _)| node).collect();
            prop_assert_eq!(&folded, &nodes);

            let mut next = block.start;
            for node in &nodes {
                prop_assert_eq!(node.start, next);
                prop_assert!(node.leaves.is_power_of_two() && node.start % node.leaves == 0);
                next += node.leaves;
            }
            prop_assert_eq!(next, block.end);
            prop_assert!(nodes.windows(2).all(|pair| pair[0].join(pair[1]).is_none()));
        }
    }
}
