//! Checkpoints: written in shards, whole or not there at all.
//!
//! A store is a folder, on disk or in an S3 bucket, that holds one folder per checkpoint:
//!
//! ```text
//! fences/000003                           the newest generation; older ones can commit no more
//! frozen/0d5c….safetensors                what training leaves as it is, written once for all checkpoints
//! latest                                  name of the newest commit, for people; nobody relies on it
//! step-0000000440-gen-000003/
//!   shard-00000-of-00002.safetensors      rank 0's slice of every region
//!   shard-00001-of-00002.safetensors
//!   manifest.json                         written last, create-only: this write is the commit
//! ```
//!
//! Start with [`Store`]; [`Manifest`] says what a checkpoint holds. Every call blocks; call it from a
//! thread that may. Newer means greater (generation, step): a fresh run or a rollback has a higher
//! generation than what it replaces.

#![forbid(unsafe_code)]

mod access;
mod blocking;
mod blocks;
mod copy;
mod difference;
mod digest;
mod direct;
mod error;
pub mod export;
mod fence;
mod file;
mod float;
mod folder;
mod frozen;
mod keeping;
mod layout;
mod manifest;
mod name;
mod proof;
mod removal;
mod restore;
mod retention;
mod shard;
mod snapshot;
mod store;
mod transfer;
mod values;

pub use access::Access;
pub use copy::Copied;
pub use difference::{Compared, Difference, Finding, Spread};
pub use digest::StateDigest;
pub use error::{Error, NewerVersion, WRITTEN_BY_NEWER};
pub use float::Float;
pub use frozen::FrozenEntry;
pub use keeping::{Kept, Removed, Verdict, judge};
pub use layout::{ALIGNMENT, Flat, Layout, Moves, Part};
pub use manifest::{Manifest, RegionInfo, ShardEntry, TensorInfo, VERSION};
pub use name::SaveId;
pub use restore::Found;
pub use retention::{Pruned, Retention};
pub use shard::{ShardHeader, slice_of};
pub use snapshot::Snapshot;
pub use store::{Entry, EntryState, Store, UNFINISHED};
