//! What a job is, and where its training stands: pure functions of one file.
//!
//! Start with [`spec::JobSpec`] (what a researcher writes), then [`progress`] (what is due next). No clock,
//! socket, file, thread or tensor inside.
//!
//! | module | what it decides or names |
//! |---|---|
//! | [`spec`] | the recipe file, validated |
//! | [`progress`] | where training stands, and what is due next |
//! | [`schedule`] | the learning rate at a position |
//! | [`task`] | what evaluations measure |
//! | [`fit`] | how well a regression's outputs fit |
//! | [`dry_run`] | what a recipe comes to, without training |
//! | [`guard`] | training that goes wrong |

#![forbid(unsafe_code)]

mod count;
pub mod dry_run;
pub mod fit;
pub mod guard;
mod median;
pub mod progress;
pub mod schedule;
pub mod spec;
pub mod task;

#[cfg(test)]
extern crate self as baton_recipe;
#[cfg(test)]
#[path = "../tests/kit/mod.rs"]
mod kit;

pub use baton_model::Sees;
pub use count::{Epoch, Step};
pub use median::median;
pub use spec::JobSpec;
