//! Checkpoints: written in shards, committed atomically.
//!
//! A store is a folder, on disk or in an S3 bucket, that holds one folder per checkpoint:
//!
//! ```text
//! fences/000003                           the newest generation; older ones can no longer commit
//! journal/JOB/000002-0000….json           the coordinator's journal, in parts
//! leases/000002.json                      which coordinator serves the job, and where
//! frozen/0d5c….safetensors                frozen state, written once and shared by checkpoints
//! latest                                  name of the newest commit, for people; no code reads it
//! step-0000000440-gen-000003/
//!   shard-00000-of-00002.safetensors      slice of every region that rank 0 wrote
//!   shard-00001-of-00002.safetensors
//!   manifest.json                         written last, create-only: this write is the commit
//!   evaluation.json                       results of an evaluation that followed the commit, if one did
//!   part-00000-of-00002.json              only of a local checkpoint: this rank's part is complete
//! ```
//!
//! Start with [`Store`]; [`Manifest`] describes the content of a checkpoint. Every call blocks: do not call
//! from async code. Newer means greater (generation, step): a fresh run or a rollback has a higher generation
//! than what it replaces.

#![forbid(unsafe_code)]

mod access;
mod blocks;
mod copy;
mod difference;
mod digest;
mod direct;
mod error;
mod evaluation;
pub mod export;
mod fence;
mod file;
mod folder;
mod frozen;
mod journal;
mod layout;
mod lease;
mod local;
mod manifest;
mod name;
pub mod profile;
mod prune_decision;
mod removal;
mod restore;
mod retention;
mod shard;
mod snapshot;
mod store;
mod transfer;
mod values;
mod verify;
mod weights_file;

pub use baton_model::Float;

pub use access::BucketAccess;
pub use copy::CopyResult;
pub use difference::{ComparedItem, Comparison, Difference, ValueDifference};
pub use digest::StateDigest;
pub use error::{Error, NewerVersion, WRITTEN_BY_NEWER, is_full_disk};
pub use fence::Claimant;
pub use frozen::FrozenEntry;
pub use journal::JournalPart;
pub use layout::{ALIGNMENT, FlatRegion, LayoutMapping, MovedRange, StateLayout};
pub use lease::CoordinatorLease;
pub use local::NewestLocal;
pub use manifest::{Manifest, RegionInfo, ShardEntry, TensorInfo, VERSION};
pub use name::{CheckpointReference, MANIFEST, SaveId};
pub use prune_decision::{KeepReason, PruneDecision, RemovalReason, prune_decisions};
pub use restore::{ResumePoint, gone};
pub use retention::{GuardedSteps, Pruned, Retention};
pub use shard::{ShardHeader, slice_of};
pub use snapshot::Snapshot;
pub use store::{Entry, EntryState, Store, UNFINISHED};
pub use weights_file::check_weights_file;
