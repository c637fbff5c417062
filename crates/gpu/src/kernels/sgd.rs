//! One update by SGD in a single pass over memory: clip, unscale, momentum, weight decay, moving average,
//! and the copy in the format that the network computes with.
#![allow(unsafe_code)]

use super::{Element, Kernels};
use crate::Error;
use crate::module::Grid;

/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks at most: more than any GPU runs at once.
const BLOCKS: u32 = 4096;

/// An update of `len` weights that lie one behind the other, as `torch.optim.SGD` does it (dampening 0),
/// with `g = gradient * factor + weight_decay * weight`:
///
/// | | velocity | weight |
/// |---|---|---|
/// | no velocity | | `w -= lr g` |
/// | plain | `v = momentum v + g` | `w -= lr v` |
/// | nesterov | `v = momentum v + g` | `w -= lr (g + momentum v)` |
///
/// `factor` is `min(1, clip / (norm + 1e-6)) / loss_scale`, as `torch.nn.utils.clip_grad_norm_` and
/// `torch.amp.GradScaler` have it. Where the norm is not finite, weights and velocity stay.
/// The average then moves by `share` of its distance from the weight. Addresses are bytes; 0 is absent.
#[derive(Clone, Copy, Debug)]
pub struct Sgd {
    /// Of f32 weights, which change.
    pub weights: u64,
    /// Of f32.
    pub gradient: u64,
    /// Of f32, or absent; changes.
    pub velocity: u64,
    /// Of f32, or absent; changes.
    pub average: u64,
    /// Of `cast` values in `element`'s format, or absent; written, rounded to the nearest.
    pub working: u64,
    /// See `working`.
    pub element: Element,
    /// Of one f32: the L2 norm of the gradient without the loss's factor.
    pub norm: u64,
    /// Of one f32, or absent: the loss's factor.
    pub loss_scale: u64,
    /// Number of weights.
    pub len: usize,
    /// So many weights, the first ones, decay.
    pub decayed: usize,
    /// So many weights, the first ones, have a working copy.
    pub cast: usize,
    /// The norm to clip to.
    pub clip: Option<f64>,
    /// Learning rate.
    pub lr: f32,
    /// Of the velocity.
    pub momentum: f32,
    /// Look ahead by the velocity.
    pub nesterov: bool,
    /// L2 penalty's factor.
    pub weight_decay: f32,
    /// Of the new weights in their average; 1 replaces it.
    pub share: f32,
}

/// What the kernel is told: `Sgd` in sgd.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    weights: u64,
    gradient: u64,
    velocity: u64,
    average: u64,
    working: u64,
    norm: u64,
    loss_scale: u64,
    len: i64,
    decayed: i64,
    cast: i64,
    clip: f64,
    lr: f32,
    momentum: f32,
    weight_decay: f32,
    share: f32,
    nesterov: i32,
}

impl Sgd {
    /// Runs or queues the update.
    ///
    /// # Errors
    /// The device refused.
    ///
    /// # Safety
    /// The addresses are of so many values as said in the memory of `kernels`' place, aligned to their
    /// type; they do not overlap, and nobody else uses them until the update is done.
    pub unsafe fn run(&self, kernels: &Kernels) -> Result<(), Error> {
        let quads = u32::try_from(self.len.div_ceil(4)).unwrap_or(u32::MAX);
        let blocks = quads.div_ceil(THREADS).min(BLOCKS);
        if blocks == 0 {
            return Ok(());
        }
        let grid = Grid { blocks: [blocks, 1, 1], threads: [THREADS, 1, 1] };
        let arguments = Arguments {
            weights: self.weights,
            gradient: self.gradient,
            velocity: self.velocity,
            average: self.average,
            working: self.working,
            norm: self.norm,
            loss_scale: self.loss_scale,
            len: self.len as i64,
            decayed: self.decayed as i64,
            cast: self.cast as i64,
            clip: self.clip.unwrap_or(0.0),
            lr: self.lr,
            momentum: self.momentum,
            weight_decay: self.weight_decay,
            share: self.share,
            nesterov: i32::from(self.nesterov),
        };
        let name = format!("sgd_{}", self.element.suffix());
        // SAFETY: laid out as the kernel's; the caller's promise.
        unsafe { kernels.launch(&name, grid, &arguments) }
    }
}
