//! BatchNorm over channels-last activations, fused with the residual addition and the ReLU after it.
//!
//! Activations are a matrix of `rows` (samples × height × width) by `channels`, f32, bf16 or f16; statistics and
//! parameters are f32. Sums over rows are computed in a fixed order: on one kind of machine the same inputs give the
//! same bits.
#![allow(unsafe_code)]

use super::{Element, Kernels};
use crate::Error;
use crate::module::Grid;

/// Threads of a block; the same number is in batch_norm.cu.
const THREADS: u32 = 256;
/// Maximum number of threads of a block along the channels.
const MAX_COLUMN_THREADS: u32 = 32;
/// Approximate number of blocks that compute sums: enough for every GPU, and fixed, so that the order of additions is
/// the same on all GPUs.
const SUMMING_BLOCKS: u32 = 1024;
/// Approximate number of blocks that process all values.
const SWEEPING_BLOCKS: u32 = 4096;
/// Maximum size of a grid along y.
const MAX_BLOCKS_Y: u32 = 65_535;

/// Shape of the matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Shape {
    /// Samples × height × width.
    pub rows: usize,
    /// Number of values in a row.
    pub channels: usize,
    /// Number format of all activations and their gradients.
    pub element: Element,
}

/// `y = relu(scale (x - mean) / sqrt(variance + epsilon) + shift + residual)` with the mean and the biased variance of
/// each channel of `x`: Ioffe and Szegedy 2015 (arXiv 1502.03167), algorithm 1; and its gradients. Fields of type u64
/// are byte addresses; 0 means absent. The kernels' declaration is in batch_norm.h.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct BatchNorm {
    /// Input (rows, channels).
    pub x: u64,
    /// (rows, channels), or absent: added before the ReLU. For forward.
    pub residual: u64,
    /// Output (rows, channels); written by forward. Backward reads it only with a ReLU; it may be absent there if there
    /// was no residual.
    pub y: u64,
    /// Gradient of y (rows, channels). All gradients are for backward.
    pub y_gradient: u64,
    /// (rows, channels); written.
    pub x_gradient: u64,
    /// (rows, channels); written. Absent if there is no residual or its gradient is not needed.
    pub residual_gradient: u64,
    /// f32 (channels): torch's `weight`.
    pub scale: u64,
    /// f32 (channels): torch's `bias`.
    pub shift: u64,
    /// f32 (channels); written by forward, read by backward.
    pub mean: u64,
    /// f32 (channels); written by forward, read by backward.
    pub inverse_deviation: u64,
    /// f32 (channels); written by forward: torch's running mean with momentum 1.
    pub batch_mean: u64,
    /// f32 (channels); written by forward: torch's running variance with momentum 1, which is unbiased. NaN for a
    /// single row.
    pub batch_variance: u64,
    /// f32 (channels); written.
    pub scale_gradient: u64,
    /// f32 (channels); written.
    pub shift_gradient: u64,
    /// Temporary memory, f32 ([`Shape::workspace`] values).
    pub workspace: u64,
    /// Shape of all matrices with rows.
    pub shape: Shape,
    /// The division of the rows by [`Tiling`]; set by `run`.
    pub(super) chunks: usize,
    pub(super) chunk_rows: usize,
    /// Added to the variance.
    pub epsilon: f32,
    /// Whether negative values become 0.
    pub relu: bool,
}

impl Shape {
    /// Number of temporary f32 values that forward and backward need.
    #[must_use]
    pub fn workspace(self) -> usize {
        // Threads with one channel each result in the most chunks.
        let chunks = [1, self.wide()].map(|width| Tiling::new(self, width).chunks);
        2 * self.channels * chunks[0].max(chunks[1]) as usize
    }

    /// Number of values in 16 bytes.
    fn wide(self) -> usize {
        16 / self.element.bytes()
    }

    /// Number of channels per thread, for activations at these addresses.
    fn width(self, activations: &[u64]) -> usize {
        let aligned = activations.iter().all(|address| address.is_multiple_of(16));
        if aligned && self.channels.is_multiple_of(self.wide()) { self.wide() } else { 1 }
    }
}

/// Division of the matrix among threads and blocks.
struct Tiling {
    /// Threads per block along the channels and along the rows.
    threads: [u32; 3],
    /// Blocks along the channels.
    tiles: u32,
    /// Blocks along the rows, in kernels that compute sums.
    chunks: u32,
    /// Rows of each chunk except the last.
    chunk_rows: usize,
    /// Blocks along the rows, in the other kernels.
    sweeps: u32,
}

impl Tiling {
    /// The division for `width` channels per thread.
    fn new(shape: Shape, width: usize) -> Self {
        // Threads that the channels need, each with `width` of them.
        let packs = to_u32(shape.channels.div_ceil(width)).max(1);
        let columns = packs.next_power_of_two().min(MAX_COLUMN_THREADS);
        // Threads of a block along the rows.
        let lanes = THREADS / columns;
        let tiles = packs.div_ceil(columns);
        // Every lane of a block should have at least a few rows.
        let max_blocks = to_u32(shape.rows.div_ceil(4 * lanes as usize)).clamp(1, MAX_BLOCKS_Y);
        let chunk_rows =
            shape.rows.div_ceil(SUMMING_BLOCKS.div_ceil(tiles).min(max_blocks) as usize).max(1);
        Self {
            threads: [columns, lanes, 1],
            tiles,
            chunks: to_u32(shape.rows.div_ceil(chunk_rows)),
            chunk_rows,
            sweeps: SWEEPING_BLOCKS.div_ceil(tiles).min(max_blocks),
        }
    }

    fn summing(&self) -> Grid {
        Grid { blocks: [self.tiles, self.chunks, 1], threads: self.threads }
    }

    fn sweeping(&self) -> Grid {
        Grid { blocks: [self.tiles, self.sweeps, 1], threads: self.threads }
    }
}

/// The grid of the second step: one thread per channel and lane.
fn finishing(shape: Shape) -> Grid {
    let tiles = to_u32(shape.channels).div_ceil(MAX_COLUMN_THREADS);
    Grid { blocks: [tiles, 1, 1], threads: [MAX_COLUMN_THREADS, THREADS / MAX_COLUMN_THREADS, 1] }
}

/// Saturating conversion; no GPU has memory for more.
fn to_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

impl BatchNorm {
    /// Normalises: runs or queues the kernels. Writes nothing if there are no rows or no channels.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// The addresses must be valid in the memory that `kernels` work on, for the number of values stated, and aligned
    /// to their type; written ranges must not overlap any other, and no other code may use them until this is done.
    pub unsafe fn forward(self, kernels: &Kernels) -> Result<(), Error> {
        let activations = [self.x, self.residual, self.y];
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.run(kernels, &activations, ["moments_of_chunks", "moments_of_all", "normalise"])
        }
    }

    /// The gradients: like [`forward`](Self::forward), with its results as inputs.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// As [`forward`](Self::forward).
    pub unsafe fn backward(self, kernels: &Kernels) -> Result<(), Error> {
        let activations =
            [self.x, self.y, self.y_gradient, self.x_gradient, self.residual_gradient];
        // SAFETY: guaranteed by the caller.
        unsafe { self.run(kernels, &activations, ["sums_of_chunks", "sums_of_all", "gradients"]) }
    }

    /// Runs three kernels: over chunks of rows, over the chunks, and over all values.
    ///
    /// # Safety
    /// As [`forward`](Self::forward).
    unsafe fn run(
        mut self,
        kernels: &Kernels,
        activations: &[u64],
        [of_chunks, of_all, of_values]: [&str; 3],
    ) -> Result<(), Error> {
        let shape = self.shape;
        if shape.rows == 0 || shape.channels == 0 {
            return Ok(());
        }
        let width = shape.width(activations);
        let tiling = Tiling::new(shape, width);
        (self.chunks, self.chunk_rows) = (tiling.chunks as usize, tiling.chunk_rows);
        let wide = if width > 1 { "_wide" } else { "" };
        let name = |kernel| format!("batch_norm_{kernel}_{}{wide}", shape.element.suffix());
        // SAFETY: the layout is that of the kernels; the rest is guaranteed by the caller.
        unsafe {
            kernels.launch(&name(of_chunks), tiling.summing(), &self)?;
            kernels.launch(&format!("batch_norm_{of_all}"), finishing(shape), &self)?;
            kernels.launch(&name(of_values), tiling.sweeping(), &self)
        }
    }
}
