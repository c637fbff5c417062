//! Training: the step loop, generic over the model, a [`Learner`].
//!
//! Start with [`Trainer::run`] in `step_loop.rs`: it runs one generation from beginning to end. A single step is in
//! [`step`].
//!
//! | module | what it is |
//! |---|---|
//! | [`learner`] | the interface between the step loop and a model |
//! | [`torch`] | networks built from a description, on libtorch; the only module that uses `tch` |
//! | [`linear`] | softmax regression in plain Rust, for fast tests of everything around training |
//! | `agree`, `restoring` | how the ranks of a new generation get the same state |
//! | `checkpointing`, `saving` with `state_copy`, `evaluation` | work that all ranks do together |
//! | `local_saves` | checkpoints on each machine's own disk |
//! | `inputs` | data sets, cut into micro-batches |
//! | `activity`, `step_metrics`, `throughput`, `loader_watch` | what a rank reports while it trains |
//! | [`sampling`] | how the next token of a generated text is chosen |
//! | `digest` | the digest of the whole training state |
//! | [`profile`] | what threads and device did during some steps |
//! | `suspects` | the micro-batches that may have caused a divergence |
//! | `bits` | floating-point numbers in JSON, with every bit |
//! | [`Controls`] | requests from other threads; the ranks vote on them at the next step |

mod activity;
mod agree;
mod bits;
mod checkpointing;
mod controls;
mod digest;
mod error;
mod evaluation;
mod exchange;
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
mod local_saves;
pub mod profile;
mod restoring;
pub mod sampling;
mod saving;
mod state_copy;
pub mod step;
mod step_loop;
mod step_metrics;
mod suspects;
mod throughput;
pub mod torch;

pub use activity::SharedActivity;
pub use controls::Controls;
pub use error::Error;
pub use evaluation::combine_evaluations;
pub use inputs::{BatchFeed, JobInputs, vocabulary};
pub use learner::{BatchEvaluation, EvaluatedWeights, Leaf, Learner, Sums, Update};
pub use local_saves::LocalFolder;
pub use saving::write_initial_checkpoint;
pub use state_copy::StateCopy;
pub use step_loop::{BuildLearner, GenerationContext, Trainer, TrainingJob};
