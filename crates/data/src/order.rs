//! The order of the samples in an epoch, without a list of them in memory.
//!
//! A keyed permutation of `0..samples` computes the sample at any position independently: a job resumes in the
//! middle of an epoch at no cost, every rank computes only its share, and the order depends on (seed, epoch) only.
//!
//! The permutation is a generalised Feistel network over Z_a × Z_b with a·b ≥ samples, with cycle
//! walking for the few results that are not below `samples`: Black & Rogaway, "Ciphers with arbitrary finite
//! domains", CT-RSA 2002, §4–5. Each round adds to one half a random function of the other half. This can be
//! inverted by subtraction, so the result is a permutation for any function.
//!
//! Quasi-random order is for data that does not fit into memory. Blocks of samples that are stored together are
//! visited in a new order every epoch, and the samples of a *window* of consecutive blocks are shuffled with each
//! other. While a window is visited only its blocks are read, so a node with memory for two windows reads every block
//! once per epoch: the read amplification is 1. In random order it would be the number of samples per block.
//!
//! A saved run resumes at a position of this order, so no change may alter it: the tests pin permutations.

use std::sync::Arc;

use baton_recipe::spec::Order;

use crate::{
    random::{Draws, RandomPurpose},
    sample_blocks::SampleBlocks,
};

/// Number of rounds. Four suffice on large domains (Luby & Rackoff 1988); small domains need more.
const ROUNDS: u64 = 8;

/// The order of all epochs of one data set.
#[derive(Clone, Debug)]
pub struct SampleOrder {
    kind: Order,
    seed: u64,
    window: u64,
    sample_blocks: Arc<SampleBlocks>,
}

impl SampleOrder {
    /// The order of the samples in `sample_blocks`. [`Order::Sequential`] ignores `seed`. `window`, the minimum
    /// number of samples shuffled with each other, is used by [`Order::QuasiRandom`] only.
    #[must_use]
    pub fn new(kind: Order, seed: u64, window: u64, sample_blocks: SampleBlocks) -> Self {
        Self { kind, seed, window, sample_blocks: Arc::new(sample_blocks) }
    }

    /// The order of one epoch. It costs nothing, except for [`Order::QuasiRandom`]: 20 bytes and a few hundred
    /// nanoseconds per block.
    #[must_use]
    pub fn epoch(&self, epoch: u32) -> EpochOrder {
        let samples = self.sample_blocks.samples();
        let kind = match self.kind {
            Order::Sequential => OrderKind::Sequential,
            Order::Random => OrderKind::Random(Permutation::new(samples, self.seed)),
            Order::QuasiRandom => {
                let windows = Windows::new(&self.sample_blocks, self.seed, epoch, self.window);
                OrderKind::Quasi(Arc::new(windows), self.sample_blocks.clone())
            }
        };
        EpochOrder { kind, epoch, samples }
    }
}

/// The order of one epoch.
#[derive(Clone, Debug)]
pub struct EpochOrder {
    kind: OrderKind,
    epoch: u32,
    samples: u64,
}

#[derive(Clone, Debug)]
enum OrderKind {
    Sequential,
    Random(Permutation),
    Quasi(Arc<Windows>, Arc<SampleBlocks>),
}

impl EpochOrder {
    /// Number of the epoch.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The sample at a position. Takes much less than a microsecond.
    ///
    /// # Panics
    /// `position` is not below the number of samples: a bug in the caller.
    #[must_use]
    pub fn at(&self, position: u64) -> u64 {
        assert!(position < self.samples, "position {position} of {} samples", self.samples);
        match &self.kind {
            OrderKind::Sequential => position,
            OrderKind::Random(permutation) => permutation.at(self.epoch, position),
            OrderKind::Quasi(windows, sample_blocks) => {
                let (block, number) = windows.at(self.epoch, position);
                sample_blocks.sample(block, number)
            }
        }
    }

    /// The blocks with the samples from `position` on, in the order of their first use. `None` unless
    /// the order is quasi-random.
    #[must_use]
    pub fn blocks_from(&self, position: u64) -> Option<Vec<u32>> {
        match &self.kind {
            OrderKind::Quasi(windows, _) => Some(windows.blocks_from(position)),
            OrderKind::Sequential | OrderKind::Random(_) => None,
        }
    }
}

/// The blocks of an epoch in their order, divided into windows.
#[derive(Debug)]
struct Windows {
    /// The blocks in the order of the epoch.
    blocks: Vec<u32>,
    /// Position of each block's first sample before shuffling within windows, followed by the number of samples.
    starts: Vec<u64>,
    windows: Vec<Window>,
}

/// A window: consecutive blocks.
#[derive(Debug)]
struct Window {
    /// First position of the window.
    start: u64,
    /// Shuffles the samples of the window.
    permutation: Permutation,
}

impl Windows {
    fn new(sample_blocks: &SampleBlocks, seed: u64, epoch: u32, min_samples: u64) -> Self {
        let count = sample_blocks.blocks();
        let order = Permutation::new(count, seed);
        let blocks: Vec<u32> = (0..count).map(|number| order.at(epoch, number) as u32).collect();
        let mut starts = Vec::with_capacity(blocks.len() + 1);
        let (mut windows, mut end, mut start) = (Vec::new(), 0, 0);
        for (number, block) in blocks.iter().enumerate() {
            starts.push(end);
            end += sample_blocks.block_samples(*block);
            let is_last = number + 1 == blocks.len();
            if end - start >= min_samples.max(1) || is_last {
                // Each window has its own seed, so that windows of equal length are shuffled differently.
                let key = Draws::new(seed, epoch, start, RandomPurpose::Window).below(u64::MAX);
                windows.push(Window { start, permutation: Permutation::new(end - start, key) });
                start = end;
            }
        }
        starts.push(end);
        Self { blocks, starts, windows }
    }

    /// The block at a position, and the number of the sample in the block.
    fn at(&self, epoch: u32, position: u64) -> (u32, u64) {
        let window = self.windows.partition_point(|window| window.start <= position) - 1;
        let Window { start, permutation } = &self.windows[window];
        let shuffled = start + permutation.at(epoch, position - start);
        let number = self.starts.partition_point(|start| *start <= shuffled) - 1;
        (self.blocks[number], shuffled - self.starts[number])
    }

    fn blocks_from(&self, position: u64) -> Vec<u32> {
        let window = self.windows.partition_point(|window| window.start <= position);
        let start = self.windows.get(window.saturating_sub(1)).map_or(0, |window| window.start);
        let first = self.starts.partition_point(|block| *block < start);
        self.blocks.get(first..).unwrap_or_default().to_vec()
    }
}

/// A permutation of `0..samples` for each epoch.
#[derive(Clone, Debug)]
pub(crate) struct Permutation {
    seed: u64,
    samples: u64,
    /// Moduli of the two halves, both about √samples. a·b exceeds `samples` by less than `a`, so a walk of more than
    /// one step is rare.
    a: u64,
    b: u64,
}

impl Permutation {
    pub(crate) fn new(samples: u64, seed: u64) -> Self {
        let root = samples.isqrt();
        let a = if root * root == samples { root } else { root + 1 };
        Self { seed, samples, a, b: samples.div_ceil(a.max(1)) }
    }

    pub(crate) fn at(&self, epoch: u32, position: u64) -> u64 {
        let mut number = position;
        loop {
            number = self.mix(epoch, number);
            if number < self.samples {
                return number;
            }
        }
    }

    /// A permutation of `0..a * b`.
    fn mix(&self, epoch: u32, number: u64) -> u64 {
        let (mut left, mut right) = (number % self.a, number / self.a);
        for round in 0..ROUNDS {
            if round.is_multiple_of(2) {
                left = (left + self.round_function(epoch, round, right, self.a)) % self.a;
            } else {
                right = (right + self.round_function(epoch, round, left, self.b)) % self.b;
            }
        }
        // This cannot overflow, not even for 2⁶⁴ - 1 samples: the largest value is a·b - 1.
        right * self.a + left
    }

    /// The round function: a pseudo-random number in `0..bound` for each (epoch, round, half).
    fn round_function(&self, epoch: u32, round: u64, half: u64, bound: u64) -> u64 {
        // A half needs 33 bits at most, so the number of the round fits above it.
        Draws::new(self.seed, epoch, round << 48 | half, RandomPurpose::Order).below(bound)
    }
}

#[cfg(test)]
mod tests;
