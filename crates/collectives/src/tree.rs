//! The fixed tree.

use crate::BufferMut;

/// The subtree over virtual ranks `start..start + leaves`; `leaves` is a power of two and divides
/// `start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TreeNode {
    /// First virtual rank.
    pub start: u32,
    /// Number of virtual ranks, a power of two.
    pub leaves: u32,
}

/// A partial sum.
#[derive(Debug)]
pub struct Part<'a> {
    /// What it is the sum of.
    pub node: TreeNode,
    /// The values.
    pub buffer: BufferMut<'a>,
}
