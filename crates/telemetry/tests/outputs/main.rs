//! The metrics of a sample job in every format.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prometheus;
mod report;
mod sample;
mod tensorboard;
