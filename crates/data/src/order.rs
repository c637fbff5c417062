//! In which order an epoch visits the samples, without a list of them in memory.
//!
//! A keyed permutation of `0..samples` computes any position by itself: a job resumes in the
//! middle of an epoch at no cost, every rank computes only its share, and the order depends on
//! (seed, epoch) alone.
//!
//! The permutation is a generalised Feistel network over Z_a × Z_b with a·b ≥ samples, and cycle
//! walking for the few numbers from `samples` on: Black & Rogaway, "Ciphers with arbitrary finite
//! domains", CT-RSA 2002, §4–5. Each round adds to one half a random function of the other, which
//! is undone by subtracting it, so the whole is a permutation whatever the function.
//!
//! Quasi-random order is for data that does not fit into memory. Blocks of samples that lie together
//! come in a new order every epoch, and the samples of a *window* of consecutive blocks are shuffled
//! with each other. While a window is visited only its blocks are read, so a node that can hold two
//! windows reads every block once per epoch: read amplification 1, against samples per block where
//! samples are visited at random.

use std::sync::Arc;

use baton_recipe::spec::Order;

use crate::{
    layout::Layout,
    random::{Draws, Operation},
};

/// Four rounds suffice on large domains (Luby & Rackoff 1988); more of them mix small ones.
const ROUNDS: u64 = 8;

/// The order of all epochs of one data set.
#[derive(Clone, Debug)]
pub struct SampleOrder {
    kind: Order,
    seed: u64,
    window: u64,
    layout: Arc<Layout>,
}

impl SampleOrder {
    /// The order of the samples of `layout`. The seed does not matter to [`Order::Sequential`], and
    /// `window`, the least number of samples shuffled with each other, only to
    /// [`Order::QuasiRandom`].
    #[must_use]
    pub fn new(kind: Order, seed: u64, window: u64, layout: Layout) -> Self {
        Self { kind, seed, window, layout: Arc::new(layout) }
    }

    /// The order of one epoch. Costs nothing but for [`Order::QuasiRandom`]: 20 bytes and some hundred
    /// nanoseconds per block of the layout.
    #[must_use]
    pub fn epoch(&self, epoch: u32) -> EpochOrder {
        let samples = self.layout.samples();
        let kind = match self.kind {
            Order::Sequential => Kind::Sequential,
            Order::Random => Kind::Random(Permutation::new(samples, self.seed)),
            Order::QuasiRandom => {
                let windows = Windows::new(&self.layout, self.seed, epoch, self.window);
                Kind::Quasi(Arc::new(windows), self.layout.clone())
            }
        };
        EpochOrder { kind, epoch, samples }
    }
}

/// The order of one epoch.
#[derive(Clone, Debug)]
pub struct EpochOrder {
    kind: Kind,
    epoch: u32,
    samples: u64,
}

#[derive(Clone, Debug)]
enum Kind {
    Sequential,
    Random(Permutation),
    Quasi(Arc<Windows>, Arc<Layout>),
}

impl EpochOrder {
    /// Which pass over the data it is.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The sample at a position. Takes well under a microsecond.
    ///
    /// # Panics
    /// `position` is not below the number of samples: a bug of the caller.
    #[must_use]
    pub fn at(&self, position: u64) -> u64 {
        assert!(position < self.samples, "position {position} of {} samples", self.samples);
        match &self.kind {
            Kind::Sequential => position,
            Kind::Random(permutation) => permutation.at(self.epoch, position),
            Kind::Quasi(windows, layout) => {
                let (block, number) = windows.at(self.epoch, position);
                layout.sample(block, number)
            }
        }
    }

    /// The blocks of the layout that hold the samples from a position on, in the order in which they
    /// are first needed; for random order that is not computed, and all come in their own order.
    #[must_use]
    pub fn blocks_from(&self, position: u64) -> Option<Vec<u32>> {
        match &self.kind {
            Kind::Quasi(windows, _) => Some(windows.blocks_from(position)),
            Kind::Sequential | Kind::Random(_) => None,
        }
    }
}

/// The blocks of an epoch in their order, cut into windows.
#[derive(Debug)]
struct Windows {
    /// The blocks in the order of the epoch.
    blocks: Vec<u32>,
    /// Position of each one's first sample if there were no shuffling within windows, and behind them
    /// the number of samples.
    starts: Vec<u64>,
    windows: Vec<Span>,
}

/// A window: consecutive blocks.
#[derive(Debug)]
struct Span {
    /// Its first position.
    start: u64,
    /// Shuffles its samples.
    permutation: Permutation,
}

impl Windows {
    fn new(layout: &Layout, seed: u64, epoch: u32, least: u64) -> Self {
        let count = layout.blocks();
        let order = Permutation::new(count, seed);
        let blocks: Vec<u32> = (0..count).map(|number| order.at(epoch, number) as u32).collect();
        let mut starts = Vec::with_capacity(blocks.len() + 1);
        let (mut windows, mut end, mut window) = (Vec::new(), 0, 0);
        for (number, block) in blocks.iter().enumerate() {
            starts.push(end);
            end += layout.block_samples(*block);
            let is_last = number + 1 == blocks.len();
            if end - window >= least.max(1) || is_last {
                // A seed of its own, so that windows of one length are shuffled differently.
                let key = Draws::new(seed, epoch, window, Operation::Window).below(u64::MAX);
                windows
                    .push(Span { start: window, permutation: Permutation::new(end - window, key) });
                window = end;
            }
        }
        starts.push(end);
        Self { blocks, starts, windows }
    }

    /// The block of a position, and the number of the sample in it.
    fn at(&self, epoch: u32, position: u64) -> (u32, u64) {
        let window = self.windows.partition_point(|window| window.start <= position) - 1;
        let Span { start, permutation } = &self.windows[window];
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
struct Permutation {
    seed: u64,
    samples: u64,
    /// Moduli of the two halves, both about √samples. Less than one in √samples numbers below
    /// a·b is not below `samples`, so a walk longer than one step is rare.
    a: u64,
    b: u64,
}

impl Permutation {
    fn new(samples: u64, seed: u64) -> Self {
        let root = samples.isqrt();
        let a = if root * root == samples { root } else { root + 1 };
        Self { seed, samples, a, b: samples.div_ceil(a.max(1)) }
    }

    fn at(&self, epoch: u32, position: u64) -> u64 {
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
                left = (left + self.function(epoch, round, right, self.a)) % self.a;
            } else {
                right = (right + self.function(epoch, round, left, self.b)) % self.b;
            }
        }
        // No overflow, not even for 2⁶⁴ - 1 samples: the largest value is a·b - 1.
        right * self.a + left
    }

    /// Random in `0..bound` for each (epoch, round, half).
    fn function(&self, epoch: u32, round: u64, half: u64, bound: u64) -> u64 {
        // A half needs 33 bits at most, so the round has room above it.
        Draws::new(self.seed, epoch, round << 48 | half, Operation::Order).below(bound)
    }
}

#[cfg(test)]
mod tests;
