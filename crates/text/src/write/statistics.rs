//! Numbers of a set, for the summary.

use std::path::PathBuf;

use serde::Serialize;

use crate::EncodedSample;

/// End of the first bin of lengths, in tokens.
const FIRST_BIN: u32 = 16;

/// Size of a file of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenSetSize {
    /// The file.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// Number of samples.
    pub samples: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of labels that are predicted.
    pub predicted: u64,
    /// Number of samples that were cut to the maximal length.
    pub truncated: u64,
    /// Number of tokens that were cut off.
    pub tokens_cut: u64,
    /// Number of tokens of the longest sample, before it was cut.
    pub longest: u64,
    /// The largest token; a model's embedding must have more rows than this.
    pub largest: u32,
    /// Number of samples by length, after they were cut.
    pub lengths: Vec<LengthBin>,
}

/// Samples of similar lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LengthBin {
    /// The largest length in tokens; the smallest one is above that of the bin before.
    pub up_to: u32,
    /// Number of samples.
    pub samples: u64,
}

/// The numbers while samples are added.
pub(super) struct TokenStatistics(TokenSetSize);

impl TokenStatistics {
    pub(super) fn new(sequence: u32) -> Self {
        let mut ends = vec![FIRST_BIN.min(sequence)];
        while let Some(end) = ends.last().copied().filter(|end| *end < sequence) {
            ends.push(end.saturating_mul(2).min(sequence));
        }
        let lengths = ends.into_iter().map(|up_to| LengthBin { up_to, samples: 0 });
        Self(TokenSetSize {
            path: PathBuf::new(),
            bytes: 0,
            samples: 0,
            tokens: 0,
            predicted: 0,
            truncated: 0,
            tokens_cut: 0,
            longest: 0,
            largest: 0,
            lengths: lengths.collect(),
        })
    }

    pub(super) fn samples(&self) -> u64 {
        self.0.samples
    }

    pub(super) fn add(&mut self, sample: &EncodedSample) {
        let Self(size) = self;
        let (length, cut) = (sample.tokens.len(), sample.whole_tokens - sample.tokens.len());
        size.samples += 1;
        size.tokens += length as u64;
        size.predicted += sample.predicted() as u64;
        size.truncated += u64::from(cut > 0);
        size.tokens_cut += cut as u64;
        size.longest = size.longest.max(sample.whole_tokens as u64);
        size.largest = size.largest.max(sample.largest());
        if let Some(bin) = size.lengths.iter_mut().find(|bin| length <= bin.up_to as usize) {
            bin.samples += 1;
        }
    }

    pub(super) fn finished(self, path: PathBuf, bytes: u64) -> TokenSetSize {
        TokenSetSize { path, bytes, ..self.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_counted_up_to_powers_of_two_and_the_maximum() {
        let mut statistics = TokenStatistics::new(100);
        for (length, whole_tokens) in [(2, 2), (16, 16), (17, 17), (100, 100), (100, 250)] {
            statistics.add(&EncodedSample {
                tokens: vec![3; length],
                labels: vec![3; length],
                whole_tokens,
            });
        }
        let size = statistics.finished("a.beton".into(), 9);
        let bins: Vec<(u32, u64)> =
            size.lengths.iter().map(|bin| (bin.up_to, bin.samples)).collect();
        assert_eq!(bins, [(16, 2), (32, 1), (64, 0), (100, 2)]);
        assert_eq!((size.samples, size.tokens, size.predicted), (5, 235, 230));
        assert_eq!((size.truncated, size.tokens_cut, size.longest, size.largest), (1, 150, 250, 3));
    }
}
