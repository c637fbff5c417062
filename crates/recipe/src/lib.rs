//! The definition of a job (its recipe) and the progress of its training, as pure functions.
//!
//! Start with [`spec::JobSpec`] (what a researcher writes), then [`progress`] (what is due next). The crate uses no
//! clocks, sockets, files, threads or tensors.
//!
//! | module | content |
//! |---|---|
//! | [`spec`] | the recipe file, validated |
//! | [`progress`] | the progress of training, and what is due next |
//! | [`schedule`] | the learning rate at a position |
//! | [`task`] | the metrics of evaluations |
//! | [`fit`] | the fit of a regression |
//! | [`dry_run`] | the steps, rates and saves of a whole run, without training |
//! | [`guard`] | divergence of training |
//! | [`data_summary`] | what tells the data of two runs apart |

#![forbid(unsafe_code)]

mod count;
pub mod data_summary;
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

pub use baton_model::InputKind;
pub use count::{Epoch, Step};
pub use median::median;
pub use spec::JobSpec;
