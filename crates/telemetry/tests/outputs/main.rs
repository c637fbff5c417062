//! What a made-up job looks like in every form.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prometheus;
mod report;
mod sample;
mod tensorboard;
