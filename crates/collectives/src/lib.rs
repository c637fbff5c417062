//! How ranks add up gradients and pass state to each other.
//!
//! Start with [`Collective`], the one trait, and [`tree`], the fixed summation order that makes
//! training independent of the number of ranks. Two implementations:
//!
//! | module | ranks are | memory | order of summation |
//! |---|---|---|---|
//! | [`tcp`] | processes anywhere | host; devices are staged | the fixed tree |
//! | [`nccl`] | processes, one per GPU | device | the fixed tree, or NCCL's own |
//!
//! Tests have a third, whose ranks are threads of one process: `tests/kit/local.rs`.
//!
//! Every operation ends: with the result, with its deadline, or at once when a peer leaves or
//! another thread calls [`AbortHandle::abort`]. Calls to foreign code are fenced in `cuda` and
//! `nccl`; [`DeviceSliceMut::from_raw`] is the one promise that callers must make.

mod abort;
pub mod buffer;
mod cuda;
mod error;
pub mod nccl;
pub mod tcp;
pub mod tree;

pub use abort::AbortHandle;
pub use buffer::{BufferMut, DeviceSliceMut};
pub use error::{Error, Membership};
pub use tree::{Part, TreeNode};

use baton_job::Rank;

/// Communication among the ranks of one generation. Every rank calls the same operations in the
/// same order; after an error the group is of no use any more and a new generation is needed.
///
/// Dropping a member is leaving: peers that still wait for it get [`Error::LostPeer`].
pub trait Collective: Send {
    /// This process's number.
    fn rank(&self) -> Rank;

    /// Number of ranks.
    fn world_size(&self) -> u32;

    /// Adds the leaves of all virtual ranks in the order of the fixed tree. `parts` are this rank's
    /// partial sums, as [`tree::Fold`] yields them for its block; the total ends up in
    /// `parts[0].buffer`, bit-identical on every rank and for every number of ranks. The other
    /// parts are left with no particular values.
    ///
    /// # Errors
    /// A lost or late peer, an abort, parts that are not this rank's maximal subtrees.
    fn all_reduce(&mut self, virtual_ranks: u32, parts: &mut [Part<'_>]) -> Result<(), Error>;

    /// Copies `buffer` of `root` into `buffer` of all others; equal lengths everywhere. The root
    /// may return before the others have it all.
    ///
    /// # Errors
    /// A lost or late peer, an abort.
    fn broadcast(&mut self, root: Rank, buffer: BufferMut<'_>) -> Result<(), Error>;

    /// Gives every rank the bytes of every rank, indexed by rank; lengths may differ, up to
    /// [`MAX_GATHERED_BYTES`] each.
    ///
    /// # Errors
    /// A lost or late peer, an abort.
    fn all_gather_bytes(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error>;

    /// A handle by which another thread can break the operation in progress and all later ones.
    fn abort_handle(&self) -> AbortHandle;
}

/// The most that one rank may contribute to [`Collective::all_gather_bytes`], so that a peer's word
/// alone never decides how much memory is allocated.
pub const MAX_GATHERED_BYTES: usize = 16 << 20;

/// Names of operations as errors tell them.
mod operation {
    pub(crate) const CONNECT: &str = "connect";
    pub(crate) const ALL_REDUCE: &str = "all_reduce";
    pub(crate) const BROADCAST: &str = "broadcast";
    pub(crate) const ALL_GATHER_BYTES: &str = "all_gather_bytes";
}

/// Refuses a contribution above [`MAX_GATHERED_BYTES`], for implementations.
///
/// # Errors
/// It is above.
pub fn check_gathered(rank: Rank, bytes: u64) -> Result<(), Error> {
    if bytes <= MAX_GATHERED_BYTES as u64 {
        return Ok(());
    }
    Err(Error::Protocol {
        operation: operation::ALL_GATHER_BYTES,
        detail: format!("rank {rank} offers {bytes} bytes, the limit is {MAX_GATHERED_BYTES}"),
    })
}

/// Refuses a root outside the group, for implementations.
///
/// # Errors
/// It is outside.
pub fn check_root(root: Rank, world_size: u32) -> Result<(), Error> {
    if root.0 < world_size {
        return Ok(());
    }
    Err(Error::Protocol {
        operation: operation::BROADCAST,
        detail: format!("root is rank {root}, but there are {world_size} ranks"),
    })
}
