//! Estimates the memory, time and cost of a recipe on a machine by arithmetic alone: it uses no GPU, file, network
//! connection or clock.
//!
//! Start with [`PlanRequest::plan`].
//!
//! | module | contents |
//! |---|---|
//! | [`layer`], [`network`], [`program`], [`language`] | the operations of a network, with their costs per sample |
//! | [`gpu`], [`machine`], [`price`] | data sheets, instances, prices, each with its source |
//! | [`memory`] | memory needed on a GPU, and the micro-batch that fits |
//! | [`roofline`] | time of a forward or backward pass |
//! | [`step`] | time of a step: passes, all-reduce, optimizer; the loader in parallel |
//! | [`plan`] | time and cost of the whole recipe |
//! | [`remedy`] | what to do if a GPU's memory is too small |
//! | [`notice`] | what takes longer than a machine's notice leaves |
//! | [`calibration`] | measured times in place of estimates |
//!
//! docs/plan.md explains the formulas and their accuracy.

#![forbid(unsafe_code)]

pub mod calibration;
pub mod gpu;
#[cfg(test)]
#[path = "../../recipe/tests/kit/mod.rs"]
mod kit;
pub mod language;
pub mod layer;
pub mod machine;
pub mod memory;
pub mod network;
pub mod notice;
pub mod plan;
pub mod price;
pub mod program;
pub mod remedy;
pub mod roofline;
pub mod step;

use baton_recipe::spec::Violation;

pub use self::{
    calibration::Calibration,
    language::LanguagePlan,
    machine::{MACHINES, Machine},
    notice::Notice,
    plan::{PlanRequest, RecipePlan},
};

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `--on` names an unknown machine.
    #[error("unknown machine `{name}`; known machines are {known}")]
    UnknownMachine {
        /// The name given.
        name: String,
        /// The names of all known machines.
        known: String,
    },
    /// The network runs on CPUs.
    #[error("model.arch = linear trains on a CPU within seconds; there is nothing to plan")]
    Linear,
    /// The model of `model.path` was not given.
    #[error("model.arch = causal_lm is planned from config.json in model.path, which was not read")]
    ModelNotRead,
    /// The program of `model.program` was not given.
    #[error("model.arch = program is planned from the file of model.program, which was not read")]
    ProgramNotRead,
    /// The program does not take the recipe's samples.
    #[error("model.program: {0}")]
    Program(#[from] baton_program::Error),
    /// The recipe cannot run with this number of samples.
    #[error("recipe: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Recipe(Vec<Violation>),
    /// The calibration cannot be used.
    #[error("the calibration {0}")]
    Calibration(String),
}
