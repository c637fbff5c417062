//! Training: the step loop, generic over what learns.
//!
//! Start with [`Trainer::run`] in `step_loop.rs`; it reads as the story of one generation. A single step is in
//! [`step`].
//!
//! | module | what it is |
//! |---|---|
//! | [`learner`] | the contract between loop and model |
//! | [`torch`] | described networks on libtorch, the only place that uses `tch` |
//! | [`linear`] | softmax regression in plain Rust, for trying out everything around the training |
//! | `agree` | how a new generation's ranks come to hold the same state |
//! | `checkpointing`, `saving` with `state_copy`, `evaluation` | done by all ranks together |
//! | `inputs` | data sets cut into micro-batches |
//! | [`Controls`] | wishes from outside, voted on at the next step |

mod agree;
mod bits;
mod checkpointing;
mod controls;
mod digest;
mod error;
mod evaluation;
mod inputs;
#[cfg(test)]
#[path = "../../recipe/tests/kit/mod.rs"]
mod kit;
pub mod learner;
pub mod linear;
mod loader_watch;
#[cfg(test)]
#[path = "../../collectives/tests/kit/local.rs"]
mod local;
mod restoring;
mod saving;
mod state_copy;
pub mod step;
mod step_loop;
mod step_metrics;
mod suspects;
mod throughput;
pub mod torch;
mod vitals;

pub use controls::Controls;
pub use error::Error;
pub use evaluation::summed_up;
pub use inputs::{Feed, Inputs};
pub use learner::{Judged, Leaf, Learner, Sums, Update, Weights};
pub use saving::write_first;
pub use state_copy::StateCopy;
pub use step_loop::{Build, GenerationContext, Job, Trainer};
pub use vitals::Vitals;
