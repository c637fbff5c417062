//! Networks on libtorch.
//!
//! The whole state is a few flat f32 buffers (`flat` says how they are cut), so that an
//! all-reduce, an optimizer update, a checkpoint or bringing a peer up to date is one operation on
//! one buffer.
//!
//! | module | what it holds |
//! |---|---|
//! | [`device`] | opening CPU or GPU, threads, libtorch's version |
//! | [`learner`] | [`TorchLearner`]: the [`Learner`](crate::Learner) contract over the parts below |
//! | [`weights`] | reading exported weights |
//! | [`peaks`] | what a device can do at best |
//! | `flat` | where each tensor lies in its buffer |
//! | `network` | what libtorch does for each layer of a network |
//! | `fused` | kernels of our own in place of libtorch's |
//! | `working` | weights in the recipe's number format |
//! | `backward` | one forward and backward pass |
//! | `buffer` | lending those buffers to collectives and checkpoints |
//! | `init` | initial values from the seed alone |
//! | `input`, `mixing` | bytes to normalised pixels; MixUp and CutMix |
//! | `task` | what a target is, the loss, the metrics |
//! | `optimizer` | clipping, SGD, AdamW, LARS, moving average, loss scale on flat buffers |
//!
//! tch's plain methods panic; everything here uses the fallible `f_` forms. Inner modules return
//! [`tch::TchError`]; the learner adds what was being done.

mod backward;
mod buffer;
pub mod device;
mod failure;
mod flat;
mod fused;
mod init;
mod input;
pub mod learner;
mod mixing;
mod network;
mod optimizer;
pub mod peaks;
mod task;
#[cfg(test)]
mod tests;
pub mod weights;
mod working;

pub use tch::Device;

pub use self::{
    device::gpu_count,
    learner::{Mode, TorchLeaf, TorchLearner},
};
