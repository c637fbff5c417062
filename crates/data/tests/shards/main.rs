//! Integration tests of shards in a bucket: an S3 server on loopback, a proxy that injects faults, real processes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod caching;
mod dataset;
mod faults;
mod kit;
mod listing;
mod processes;
mod proxy;
