//! Networks on libtorch.
//!
//! The whole state is stored in a few flat f32 buffers (`flat` defines their layout), so that an all-reduce, an
//! optimizer update, a checkpoint or a transfer to another rank is one operation on one buffer.
//!
//! | module | content |
//! |---|---|
//! | [`device`] | opening CPU or GPU, threads, version of libtorch |
//! | [`learner`] | [`TorchLearner`]: implements [`Learner`](crate::Learner) with the parts below |
//! | [`weights`] | reading exported weights |
//! | [`probe`] | what one step computes, to be compared with PyTorch |
//! | [`peaks`] | measured peak rates of a device |
//! | `flat` | position of each tensor in its buffer |
//! | `network` | what the learner needs of a network |
//! | `layers` | networks of `crates/model`: the libtorch operations for each kind of layer |
//! | `pointwise` | 1×1 convolutions on a CPU |
//! | `program` | networks written by `torch.export` |
//! | `decoder` | language models of `crates/language` |
//! | `error_text` | messages of our C++ code |
//! | `fused` | our own kernels in place of libtorch's |
//! | `profiler` | libtorch's operations, for a profile |
//! | `working` | weights in the recipe's number format |
//! | `backward` | one forward and backward pass |
//! | `buffer` | access to the buffers for collectives and checkpoints |
//! | `init` | initial values, from the seed alone |
//! | `input`, `mixing` | bytes to normalised pixels; MixUp and CutMix |
//! | `task` | targets, loss and metrics |
//! | `optimizer` | clipping, SGD, AdamW, LARS, LAMB, Muon, moving average, loss scale on flat buffers |
//!
//! The plain methods of tch panic; this code uses only the fallible `f_` forms. Inner modules return
//! [`tch::TchError`]; the learner adds the name of the operation that failed.

mod backward;
mod buffer;
mod completions;
mod decoder;
pub mod device;
mod error_text;
mod failure;
mod flat;
mod fused;
mod init;
mod input;
mod layers;
pub mod learner;
mod mixing;
mod network;
mod optimizer;
pub mod peaks;
mod pointwise;
pub mod probe;
mod profiler;
mod program;
mod task;
#[cfg(test)]
mod tests;
pub mod weights;
mod working;

pub use tch::Device;

pub use self::{
    decoder::LoadedModel,
    device::gpu_count,
    learner::{BatchNormMode, TorchLeaf, TorchLearner},
};
