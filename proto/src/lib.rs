//! The gRPC API: `baton.v1` messages and services, and their conversion from the types of `baton-job`.
//!
//! The `.proto` files under `baton/v1/` are the reference; [`v1`] is generated from them.

#![forbid(unsafe_code)]

mod convert;
mod frame;
mod json;
pub mod refusal;

/// Generated from `baton/v1/*.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod v1 {
    tonic::include_proto!("baton.v1");
}

pub use convert::{JobInfo, status};
pub use json::AveragedAccuracy;

/// Serialized descriptors of all services, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
