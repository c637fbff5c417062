//! Stores and checkpoints, through the public interface only.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod by_hand;
mod conformance;
mod crashes;
mod fence;
mod formats;
mod frozen;
mod kills;
mod kit;
mod layout;
mod lifecycle;
