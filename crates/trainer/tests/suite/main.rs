//! Whole generations of the training loop, with ranks as threads. One program, because each one that links the trainer
//! takes half a minute to compile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod ahead;
mod chaos;
#[path = "../../../data/tests/kit/digits.rs"]
mod digits;
mod interrupted_evaluation;
#[path = "../../../recipe/tests/kit/mod.rs"]
mod kit;
mod layouts;
#[path = "../../../collectives/tests/kit/local.rs"]
mod local;
mod local_checkpoints;
