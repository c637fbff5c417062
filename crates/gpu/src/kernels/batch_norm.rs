//! BatchNorm over channels-last activations, fused with the residual sum and the ReLU behind it.
//!
//! Activations are a matrix of `rows` (samples × height × width) by `channels`, f32, bf16 or f16;
//! statistics and parameters are f32. Sums over rows are taken in a fixed order: the same inputs give the
//! same bits, on one kind of machine.
#![allow(unsafe_code)]

use super::{Element, Kernels};
use crate::Error;
use crate::module::Grid;

/// Threads of a block; so in batch_norm.cu.
const THREADS: u32 = 256;
/// Threads of a block that lie side by side, each with its own channels, at most.
const COLUMNS: u32 = 32;
/// Blocks that sum up, about: enough for every GPU, and not one's own number, so that all sum up alike.
const SUMMING_BLOCKS: u32 = 1024;
/// Blocks that go over all values, about.
const SWEEPING_BLOCKS: u32 = 4096;
/// Most that a grid takes along y.
const MOST_ALONG_Y: u32 = 65_535;

/// The matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Samples × height × width.
    pub rows: usize,
    /// Values of a row.
    pub channels: usize,
    /// Format of all activations and their gradients.
    pub element: Element,
}

/// `y = relu(scale (x - mean) / sqrt(variance + epsilon) + shift + residual)` with the mean and the biased
/// variance of each channel of `x`: Ioffe and Szegedy 2015 (arXiv 1502.03167), algorithm 1. Addresses
/// are bytes; 0 is absent.
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// Of everything that has rows.
    pub shape: Shape,
    /// Of (rows, channels).
    pub x: u64,
    /// Of (rows, channels), or absent: what is added before the ReLU.
    pub residual: u64,
    /// Of (rows, channels); written.
    pub y: u64,
    /// Of f32 (channels): torch's `weight`.
    pub scale: u64,
    /// Of f32 (channels): torch's `bias`.
    pub shift: u64,
    /// Of f32 (channels); written, for [`Backward`].
    pub mean: u64,
    /// Of f32 (channels); written, for [`Backward`].
    pub inverse_deviation: u64,
    /// Of f32 (channels); written: torch's running mean with momentum 1.
    pub batch_mean: u64,
    /// Of f32 (channels); written: torch's running variance with momentum 1, which is unbiased. That of a
    /// single row is no number.
    pub batch_variance: u64,
    /// Of f32 ([`Shape::workspace`]), for use in between.
    pub workspace: u64,
    /// Added to the variance.
    pub epsilon: f32,
    /// Whether negative values become 0.
    pub relu: bool,
}

/// The gradients of [`Forward`].
#[derive(Clone, Copy, Debug)]
pub struct Backward {
    /// As forward.
    pub shape: Shape,
    /// As forward.
    pub x: u64,
    /// As forward; read only with a ReLU, and may be absent where nothing was added before it.
    pub y: u64,
    /// As forward.
    pub scale: u64,
    /// As forward.
    pub shift: u64,
    /// What forward wrote.
    pub mean: u64,
    /// What forward wrote.
    pub inverse_deviation: u64,
    /// Of (rows, channels): the gradient of y.
    pub y_gradient: u64,
    /// Of (rows, channels); written.
    pub x_gradient: u64,
    /// Of (rows, channels); written. Absent where nothing was added or nobody asks.
    pub residual_gradient: u64,
    /// Of f32 (channels); written.
    pub scale_gradient: u64,
    /// Of f32 (channels); written.
    pub shift_gradient: u64,
    /// Of f32 ([`Shape::workspace`]), for use in between.
    pub workspace: u64,
    /// As forward.
    pub relu: bool,
}

/// What a kernel is told: `BatchNorm` in batch_norm.cu.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Arguments {
    x: u64,
    residual: u64,
    y: u64,
    y_gradient: u64,
    x_gradient: u64,
    residual_gradient: u64,
    scale: u64,
    shift: u64,
    mean: u64,
    inverse_deviation: u64,
    batch_mean: u64,
    batch_variance: u64,
    scale_gradient: u64,
    shift_gradient: u64,
    partial: u64,
    rows: i64,
    channels: i64,
    chunks: i64,
    chunk_rows: i64,
    epsilon: f32,
    relu: i32,
}

impl Shape {
    /// f32 values that forward and backward need in between.
    #[must_use]
    pub fn workspace(self) -> usize {
        // Threads with one channel each make the most chunks.
        let chunks = [1, self.wide()].map(|width| Tiling::new(self, width).chunks);
        2 * self.channels * chunks[0].max(chunks[1]) as usize
    }

    /// Values in 16 bytes.
    fn wide(self) -> usize {
        16 / self.element.bytes()
    }

    /// Channels that each thread has, with activations at these addresses.
    fn width(self, activations: &[u64]) -> usize {
        let aligned = activations.iter().all(|address| address.is_multiple_of(16));
        if aligned && self.channels.is_multiple_of(self.wide()) { self.wide() } else { 1 }
    }
}

/// How the matrix is shared out.
struct Tiling {
    /// Threads along the channels and along the rows.
    threads: [u32; 3],
    /// Blocks along the channels.
    tiles: u32,
    /// Blocks along the rows where they are summed up.
    chunks: u32,
    /// Rows of each but the last.
    chunk_rows: usize,
    /// Blocks along the rows where they are not.
    sweeps: u32,
}

impl Tiling {
    /// With `width` channels to a thread.
    fn new(shape: Shape, width: usize) -> Self {
        let packs = to_u32(shape.channels.div_ceil(width)).max(1);
        let columns = packs.next_power_of_two().min(COLUMNS);
        let lanes = THREADS / columns;
        let tiles = packs.div_ceil(columns);
        // Every lane of a block has a few rows at least.
        let most = to_u32(shape.rows.div_ceil(4 * lanes as usize)).clamp(1, MOST_ALONG_Y);
        let chunk_rows =
            shape.rows.div_ceil(SUMMING_BLOCKS.div_ceil(tiles).min(most) as usize).max(1);
        Self {
            threads: [columns, lanes, 1],
            tiles,
            chunks: to_u32(shape.rows.div_ceil(chunk_rows)),
            chunk_rows,
            sweeps: SWEEPING_BLOCKS.div_ceil(tiles).min(most),
        }
    }

    fn summing(&self) -> Grid {
        Grid { blocks: [self.tiles, self.chunks, 1], threads: self.threads }
    }

    fn sweeping(&self) -> Grid {
        Grid { blocks: [self.tiles, self.sweeps, 1], threads: self.threads }
    }
}

/// One thread to a channel and lane.
fn finishing(shape: Shape) -> Grid {
    let tiles = to_u32(shape.channels).div_ceil(COLUMNS);
    Grid { blocks: [tiles, 1, 1], threads: [COLUMNS, THREADS / COLUMNS, 1] }
}

/// Far more than any GPU has memory for.
fn to_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn name(kernel: &str, shape: Shape, width: usize) -> String {
    let wide = if width > 1 { "_wide" } else { "" };
    format!("batch_norm_{kernel}_{}{wide}", shape.element.suffix())
}

impl Forward {
    /// Runs or queues it. Of no rows or no channels nothing is written.
    ///
    /// # Errors
    /// The device refused.
    ///
    /// # Safety
    /// The addresses are of so many values as said in the memory of `kernels`' place, aligned to their
    /// type; what is written overlaps with nothing, and nobody else uses it until this is done.
    pub unsafe fn run(&self, kernels: &Kernels) -> Result<(), Error> {
        let Shape { rows, channels, .. } = self.shape;
        if rows == 0 || channels == 0 {
            return Ok(());
        }
        let width = self.shape.width(&[self.x, self.residual, self.y]);
        let tiling = Tiling::new(self.shape, width);
        let arguments = Arguments {
            x: self.x,
            residual: self.residual,
            y: self.y,
            scale: self.scale,
            shift: self.shift,
            mean: self.mean,
            inverse_deviation: self.inverse_deviation,
            batch_mean: self.batch_mean,
            batch_variance: self.batch_variance,
            partial: self.workspace,
            rows: rows as i64,
            channels: channels as i64,
            chunks: i64::from(tiling.chunks),
            chunk_rows: tiling.chunk_rows as i64,
            epsilon: self.epsilon,
            relu: i32::from(self.relu),
            ..Arguments::default()
        };
        let name = |kernel| name(kernel, self.shape, width);
        // SAFETY: laid out as the kernels'; the caller's promise.
        unsafe {
            kernels.launch(&name("moments_of_chunks"), tiling.summing(), &arguments)?;
            kernels.launch("batch_norm_moments_of_all", finishing(self.shape), &arguments)?;
            kernels.launch(&name("normalise"), tiling.sweeping(), &arguments)
        }
    }
}

impl Backward {
    /// Runs or queues it. Of no rows or no channels nothing is written.
    ///
    /// # Errors
    /// The device refused.
    ///
    /// # Safety
    /// As [`Forward::run`].
    pub unsafe fn run(&self, kernels: &Kernels) -> Result<(), Error> {
        let Shape { rows, channels, .. } = self.shape;
        if rows == 0 || channels == 0 {
            return Ok(());
        }
        let width = self.shape.width(&[
            self.x,
            self.y,
            self.y_gradient,
            self.x_gradient,
            self.residual_gradient,
        ]);
        let tiling = Tiling::new(self.shape, width);
        let arguments = Arguments {
            x: self.x,
            y: self.y,
            y_gradient: self.y_gradient,
            x_gradient: self.x_gradient,
            residual_gradient: self.residual_gradient,
            scale: self.scale,
            shift: self.shift,
            mean: self.mean,
            inverse_deviation: self.inverse_deviation,
            scale_gradient: self.scale_gradient,
            shift_gradient: self.shift_gradient,
            partial: self.workspace,
            rows: rows as i64,
            channels: channels as i64,
            chunks: i64::from(tiling.chunks),
            chunk_rows: tiling.chunk_rows as i64,
            relu: i32::from(self.relu),
            ..Arguments::default()
        };
        let name = |kernel| name(kernel, self.shape, width);
        // SAFETY: laid out as the kernels'; the caller's promise.
        unsafe {
            kernels.launch(&name("sums_of_chunks"), tiling.summing(), &arguments)?;
            kernels.launch("batch_norm_sums_of_all", finishing(self.shape), &arguments)?;
            kernels.launch(&name("gradients"), tiling.sweeping(), &arguments)
        }
    }
}
