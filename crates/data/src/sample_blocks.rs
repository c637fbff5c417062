//! Blocks of samples that are stored together, for quasi-random order.
//!
//! Saved runs resume at a position of the order that is made from these blocks, so their boundaries may not change.
//! Blocks are in the order of the files, their first samples strictly increase, and none is empty.

use crate::{Beton, Error};

/// The blocks of a data set and the samples in each.
///
/// Memory: 8 bytes per block, plus 4 bytes per sample if a file does not store its samples in order, as is the
/// case for files of ffcv's parallel writer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SampleBlocks {
    /// Storage position of the first sample of each block, followed by the number of samples.
    starts: Vec<u64>,
    /// The sample at each storage position; empty if the samples are stored in order.
    samples: Vec<u32>,
}

impl SampleBlocks {
    /// One block for each file, given the number of samples in each.
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

    /// One block for each data page of a file. Samples without values in the pages form a block at the end.
    ///
    /// # Errors
    /// The allocation table cannot be read.
    pub fn of_pages(beton: &Beton) -> Result<Self, Error> {
        let page_bytes = u64::from(beton.page_bytes());
        let mut first = vec![u64::MAX; beton.len() as usize];
        for allocation in beton.allocations()?.iter() {
            // Invalid pointers are reported when the sample is read.
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
        let page = |position: usize| first[samples[position] as usize] / page_bytes;
        let begins_page = |position: &usize| page(*position) != page(position - 1);
        starts.extend((1..samples.len()).filter(begins_page).map(|position| position as u64));
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

    /// The sample with a given number in a block.
    #[must_use]
    pub fn sample(&self, block: u32, number: u64) -> u64 {
        let position = self.starts[block as usize] + number;
        self.samples.get(position as usize).map_or(position, |sample| u64::from(*sample))
    }
}
