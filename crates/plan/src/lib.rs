//! What a recipe needs and costs on a machine, by arithmetic alone: no GPU, file, network or clock.
//!
//! Start with [`Question::plan`].
//!
//! | module | what it knows |
//! |---|---|
//! | [`layer`], [`network`] | the networks, operation by operation, counted per sample |
//! | [`gpu`], [`machine`], [`price`] | data sheets, instances, prices, each with its source |
//! | [`memory`] | bytes on a GPU, and the micro-batch that fits |
//! | [`roofline`] | how long a pass takes |
//! | [`update`] | how long an update takes: passes, all-reduce, optimizer; the loader beside it |
//! | [`plan`] | the whole recipe: minutes and money |
//! | [`remedy`] | what to do when a GPU's memory was too small |
//! | [`calibration`] | what somebody has measured instead |
//!
//! The formulas in words, and how far they may be off: docs/plan.md.

#![forbid(unsafe_code)]

pub mod calibration;
pub mod gpu;
#[cfg(test)]
#[path = "../../recipe/tests/kit/mod.rs"]
mod kit;
pub mod layer;
pub mod machine;
pub mod memory;
pub mod network;
pub mod plan;
pub mod price;
pub mod remedy;
pub mod roofline;
pub mod update;

use baton_recipe::spec::Violation;

pub use self::{
    calibration::Calibration,
    machine::{MACHINES, Machine},
    plan::{Plan, Question},
};

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `--on` names nothing that is known.
    #[error("no machine `{name}` is known; there are {known}")]
    UnknownMachine {
        /// What was asked for.
        name: String,
        /// All there are.
        known: String,
    },
    /// The network runs on CPUs.
    #[error("model.arch = linear trains on a CPU within seconds; there is nothing to plan")]
    Linear,
    /// The recipe cannot be run on so many samples.
    #[error("recipe: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Recipe(Vec<Violation>),
    /// The bench's output does not fit.
    #[error("the calibration {0}")]
    Calibration(String),
}
