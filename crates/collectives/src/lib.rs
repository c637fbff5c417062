//! Communication between ranks: summing gradients and sending state.
//!
//! Start with [`Collective`], the only trait, and [`tree`], the fixed summation order that makes
//! training independent of the number of ranks. Two implementations:
//!
//! | module | ranks | memory | order of summation |
//! |---|---|---|---|
//! | [`tcp`] | processes anywhere; those of one machine share memory | host; device buffers are copied to the host | the fixed tree |
//! | [`nccl`] | processes, one per GPU | device | the fixed tree, or NCCL's own |
//!
//! Tests have a third one, whose ranks are threads of one process: `tests/kit/local.rs`.
//!
//! Every operation ends: with the result, at its deadline, or immediately when a peer leaves or another thread calls
//! [`AbortHandle::abort`]. Only `cuda` and `nccl` call foreign code, and only `tcp::shared_memory` touches memory of another
//! process; [`DeviceSliceMut::from_raw`] is the only unsafe function for callers.

mod abort;
pub mod buffer;
mod cuda;
mod error;
pub mod nccl;
mod schedule;
pub mod tcp;
pub mod tree;

pub use abort::AbortHandle;
pub use buffer::{BufferMut, DeviceSliceMut};
pub use error::{Error, Membership};
pub use schedule::Machines;
pub use tree::{Part, TreeNode};

use baton_job::Rank;

/// Communication among the ranks of one generation. Every rank must call the same operations in the same order. After
/// an error the group cannot be used any more; a new generation is needed.
///
/// Dropping it means leaving the group: peers that wait for it get [`Error::LostPeer`].
pub trait Collective: Send {
    /// This process's rank.
    fn rank(&self) -> Rank;

    /// Number of ranks.
    fn world_size(&self) -> u32;

    /// Adds the leaves of all virtual ranks in the order of the fixed tree. `parts` are this rank's partial sums, as
    /// [`tree::Fold`] returns them for its block. The total is written to `parts[0].buffer`, bit-identical on every
    /// rank and for every number of ranks. The other parts have no defined values afterwards.
    ///
    /// # Errors
    /// A lost or late peer, an abort, parts that are not the maximal subtrees of this rank.
    fn all_reduce(&mut self, virtual_ranks: u32, parts: &mut [Part<'_>]) -> Result<(), Error>;

    /// Copies `buffer` of `root` into `buffer` of all other ranks; the lengths must be equal. The root may return
    /// before the others have received everything.
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

    /// A handle with which another thread can abort the current operation and all later ones.
    fn abort_handle(&self) -> AbortHandle;
}

/// Maximum number of bytes that one rank may pass to [`Collective::all_gather_bytes`]. It limits how much memory a
/// peer's message can make this process allocate.
pub const MAX_GATHERED_BYTES: usize = 16 << 20;

/// Names of operations in errors.
mod operation {
    pub(crate) const CONNECT: &str = "connect";
    pub(crate) const ALL_REDUCE: &str = "all_reduce";
    pub(crate) const BROADCAST: &str = "broadcast";
    pub(crate) const ALL_GATHER_BYTES: &str = "all_gather_bytes";
    pub(crate) const SHARE_MEMORY: &str = "share_memory";
}

/// Returns an error for a contribution above [`MAX_GATHERED_BYTES`]; for implementations of [`Collective`].
///
/// # Errors
/// It is above the limit.
pub fn check_gathered(rank: Rank, bytes: u64) -> Result<(), Error> {
    if bytes <= MAX_GATHERED_BYTES as u64 {
        return Ok(());
    }
    Err(Error::Protocol {
        operation: operation::ALL_GATHER_BYTES,
        detail: format!("rank {rank} offers {bytes} bytes, the limit is {MAX_GATHERED_BYTES}"),
    })
}

/// Returns an error for a root outside the group; for implementations of [`Collective`].
///
/// # Errors
/// It is outside the group.
pub fn check_root(root: Rank, world_size: u32) -> Result<(), Error> {
    if root.0 < world_size {
        return Ok(());
    }
    Err(Error::Protocol {
        operation: operation::BROADCAST,
        detail: format!("root is rank {root}, but there are {world_size} ranks"),
    })
}
