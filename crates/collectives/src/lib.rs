//! How ranks add up gradients and pass state to each other.
//!
//! Start with [`Collective`], the one trait; [`tree`] defines the fixed summation order that makes
//! training independent of the number of ranks.

pub mod buffer;
pub mod tree;

pub use buffer::BufferMut;
pub use tree::{Part, TreeNode};

use baton_job::Rank;

/// Communication among the ranks of one generation. Every rank calls the same operations in the
/// same order; after an error the group is of no use any more and a new generation is needed.
pub trait Collective: Send {
    /// This process's number.
    fn rank(&self) -> Rank;

    /// Number of ranks.
    fn world_size(&self) -> u32;

    /// Adds the leaves of all virtual ranks in the order of the fixed tree. `parts` are this rank's
    /// partial sums, as [`tree::Fold`] yields them for its block; the total ends up in
    /// `parts[0].buffer`, bit-identical on every rank and for every number of ranks.
    ///
    /// # Errors
    /// A lost or late peer, an abort, parts that are not this rank's maximal subtrees.
    fn all_reduce(&mut self, virtual_ranks: u32, parts: &mut [Part<'_>]) -> Result<(), Error>;

    /// Copies `buffer` of `root` into `buffer` of all others; equal lengths everywhere.
    ///
    /// # Errors
    /// A lost or late peer, an abort.
    fn broadcast(&mut self, root: Rank, buffer: BufferMut<'_>) -> Result<(), Error>;

    /// Gives every rank the bytes of every rank, indexed by rank; lengths may differ.
    ///
    /// # Errors
    /// A lost or late peer, an abort.
    fn all_gather_bytes(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error>;

    /// A handle by which another thread can break the operation in progress and all later ones.
    fn abort_handle(&self) -> AbortHandle;
}
/// placeholder
pub struct AbortHandle;
/// placeholder
#[derive(Debug)]
pub struct Error;
