//! One SGD update in a single pass over memory: clip, unscale, momentum, weight decay, moving average, and the copy in
//! the format that the network computes with.
#![allow(unsafe_code)]

use super::{Element, Kernels};
use crate::Error;
use crate::module::Grid;

/// Threads of a block.
const THREADS: u32 = 256;
/// Maximum number of blocks: more than any GPU runs at once.
const MAX_BLOCKS: u32 = 4096;

/// An update of `len` contiguous weights as in `torch.optim.SGD` (dampening 0), with
/// `g = gradient * factor + weight_decay * weight`:
///
/// | | velocity | weight |
/// |---|---|---|
/// | no velocity | | `w -= lr g` |
/// | plain | `v = momentum v + g` | `w -= lr v` |
/// | nesterov | `v = momentum v + g` | `w -= lr (g + momentum v)` |
///
/// `factor` is `min(1, clip / (norm + 1e-6)) / loss_scale`, as in `torch.nn.utils.clip_grad_norm_` and
/// `torch.amp.GradScaler`. If the norm is not finite, weights and velocity do not change. The average then moves by
/// `share` of its distance to the weight. Fields of type u64 are byte addresses; 0 means absent. The kernel's
/// declaration is `Sgd` in sgd.cu.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Sgd {
    /// f32 weights; updated.
    pub weights: u64,
    /// f32 values.
    pub gradient: u64,
    /// f32 values, or absent; updated.
    pub velocity: u64,
    /// f32 values, or absent; updated.
    pub average: u64,
    /// `cast` values in `element`'s format, or absent; written, rounded to nearest.
    pub working: u64,
    /// One f32: the L2 norm of the gradient, with the loss scale divided out.
    pub norm: u64,
    /// One f32, or absent: the loss scale.
    pub loss_scale: u64,
    /// Number of weights.
    pub len: usize,
    /// Number of weights with weight decay, from the start.
    pub decayed: usize,
    /// Number of weights with a working copy, from the start.
    pub cast: usize,
    /// The norm to clip to; 0: no clipping.
    pub clip: f64,
    /// Learning rate.
    pub lr: f32,
    /// Momentum of the velocity.
    pub momentum: f32,
    /// Factor of the L2 penalty.
    pub weight_decay: f32,
    /// Weight of the new weights in their average; 1 replaces it.
    pub share: f32,
    /// Nesterov momentum.
    pub nesterov: bool,
    /// Number format of `working`.
    pub element: Element,
}

impl Sgd {
    /// Runs or queues the update.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// The addresses must be valid in the memory that `kernels` work on, for the number of values stated, and aligned
    /// to their type; the ranges must not overlap, and no other code may use them until the update is done.
    pub unsafe fn run(&self, kernels: &Kernels) -> Result<(), Error> {
        let quads = u32::try_from(self.len.div_ceil(4)).unwrap_or(u32::MAX);
        let blocks = quads.div_ceil(THREADS).min(MAX_BLOCKS);
        if blocks == 0 {
            return Ok(());
        }
        let grid = Grid { blocks: [blocks, 1, 1], threads: [THREADS, 1, 1] };
        let name = format!("sgd_{}", self.element.suffix());
        // SAFETY: the layout is that of the kernel; the rest is guaranteed by the caller.
        unsafe { kernels.launch(&name, grid, self) }
    }
}
