//! Which samples of a data set lie together: the blocks of quasi-random order.

use crate::{Beton, Error};

/// The blocks of a data set and the samples in each.
///
/// Memory: 8 bytes per block, and 4 bytes per sample where a file does not hold its samples in order,
/// as files of ffcv's parallel writer do not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// The first place of each block, and behind them the number of places; a place is the position of
    /// a sample in storage.
    starts: Vec<u64>,
    /// The sample at each place; empty where every sample is at its own.
    samples: Vec<u32>,
}

impl Layout {
    /// A block for each of many files, given the number of samples in each.
    #[must_use]
    pub fn of_files(samples: &[u64]) -> Self {
        let mut starts = vec![0];
        let mut end = 0_u64;
        for samples in samples.iter().filter(|samples| **samples > 0) {
            end = end.saturating_add(*samples);
            starts.push(end);
        }
        Self { starts, samples: Vec::new() }
    }

    /// A block for each data page of a file. Samples without any value in the pages lie in their own
    /// order, on pages that the rows would fill.
    ///
    /// # Errors
    /// The allocation table cannot be read.
    pub fn of_pages(beton: &Beton) -> Result<Self, Error> {
        let page_bytes = u64::from(beton.page_bytes());
        let mut first = vec![u64::MAX; beton.len() as usize];
        for allocation in beton.allocations()?.iter() {
            // What points elsewhere is told when the sample is read.
            if let Some(first) = first.get_mut(allocation.sample as usize)
                && allocation.size > 0
            {
                *first = allocation.pointer.min(*first);
            }
        }
        let mut samples: Vec<u32> = (0..).take(first.len()).collect();
        if !first.is_sorted() {
            samples.sort_by_key(|sample| first[*sample as usize]);
        }
        let mut starts = vec![0];
        let page = |place: usize| first[samples[place] as usize] / page_bytes;
        starts.extend(
            (1..samples.len()).filter(|place| page(*place) != page(place - 1)).map(|p| p as u64),
        );
        if !samples.is_empty() {
            starts.push(samples.len() as u64);
        }
        if samples.is_sorted() {
            samples = Vec::new();
        }
        Ok(Self { starts, samples })
    }

    /// Number of samples.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.starts.last().copied().unwrap_or_default()
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.starts.len().saturating_sub(1) as u64
    }

    /// Number of samples of a block.
    #[must_use]
    pub fn block_samples(&self, block: u32) -> u64 {
        self.starts[block as usize + 1] - self.starts[block as usize]
    }

    /// A sample of a block.
    #[must_use]
    pub fn sample(&self, block: u32, number: u64) -> u64 {
        let place = self.starts[block as usize] + number;
        self.samples.get(place as usize).map_or(place, |sample| u64::from(*sample))
    }
}
