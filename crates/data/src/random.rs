//! Random numbers as a function of their purpose: the value does not depend on earlier draws or on the thread. So any
//! thread of any rank gets the same augmentation for a sample, and a resumed job gets the same values as one that was
//! never interrupted.
//!
//! Philox4x32-10: Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3",
//! SC 2011, §3.3 and table 2.

use std::f64::consts::TAU;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Fractional parts of the golden ratio and of √3.
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// 128 random bits for each counter; each key gives another sequence.
fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let [a, b, c, d] = counter;
        let (low0, high0) = widening_product(MULTIPLIERS[0], a);
        let (low1, high1) = widening_product(MULTIPLIERS[1], c);
        counter = [high1 ^ b ^ key[0], low1, high0 ^ d ^ key[1], low0];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

fn widening_product(x: u32, y: u32) -> (u32, u32) {
    let product = u64::from(x) * u64::from(y);
    (product as u32, (product >> 32) as u32)
}

/// Purpose of random numbers: each purpose has its own sequences.
///
/// Resuming from a checkpoint depends on these numbers: never reuse or change one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RandomPurpose {
    /// The random crop.
    Crop = 0,
    /// The horizontal flip.
    Flip = 1,
    /// The order of samples.
    Order = 2,
    /// The order of the samples within a window of blocks.
    Window = 3,
    /// How the samples of a micro-batch are mixed.
    Mix = 4,
    /// Random numbers of layers, such as dropout.
    Layer = 5,
    /// Which texts share a sequence.
    Pack = 6,
    /// Tokens of a generated text.
    Generate = 7,
    /// The shift of an image.
    Shift = 8,
    /// Operations on an image.
    Operation = 9,
    /// Brightness, contrast and saturation of an image.
    Colour = 10,
    /// The erased rectangle of an image.
    Erase = 11,
    /// Scale, shift and masks of a signal.
    Change = 12,
    /// The noise of a signal.
    Noise = 13,
    /// Whether the writer stores an image as JPEG. Numbers from 16 on are for writing data.
    Store = 16,
    /// A synthetic signal.
    Signal = 17,
    /// The settings of a trial of a sweep.
    Trial = 18,
    /// Into which part of a shuffle a window comes.
    Bucket = 19,
    /// The order within such a part.
    BucketOrder = 20,
}

/// The sequence of one (seed, epoch, sample, purpose).
#[derive(Clone, Debug)]
pub struct Draws {
    key: [u32; 2],
    /// Purpose (8 bits) and position in the sequence (24 bits), epoch, sample (64 bits).
    counter: [u32; 4],
    /// The second half of the last block, if it has not been used yet.
    left: Option<u64>,
}

impl Draws {
    /// Starts a sequence of 2²⁵ numbers.
    #[must_use]
    pub fn new(seed: u64, epoch: u32, sample: u64, purpose: RandomPurpose) -> Self {
        let [sample_low, sample_high] = halves(sample);
        let counter = [(purpose as u32) << 24, epoch, sample_low, sample_high];
        Self { key: halves(seed), counter, left: None }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        if let Some(bits) = self.left.take() {
            return bits;
        }
        let [a, b, c, d] = philox4x32(self.counter, self.key);
        self.counter[0] = self.counter[0].wrapping_add(1);
        self.left = Some(u64::from(d) << 32 | u64::from(c));
        u64::from(b) << 32 | u64::from(a)
    }

    /// Uniform in [0, 1), a multiple of 2⁻⁵³.
    pub fn uniform(&mut self) -> f64 {
        const STEP: f64 = 1.0 / (1_u64 << 53) as f64;
        (self.bits() >> 11) as f64 * STEP
    }

    /// Uniform in [low, high); `low` if they are equal.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.uniform()
    }

    /// From the normal distribution with mean 0 and variance 1, by Box & Muller 1958. Uses `libm`, because the functions
    /// of C libraries differ in their last bits.
    pub fn normal(&mut self) -> f64 {
        // In (0, 1], so that the logarithm is finite.
        let radius = 1.0 - self.uniform();
        (-2.0 * libm::log(radius)).sqrt() * libm::cos(TAU * self.uniform())
    }

    /// Uniform in `0..bound`; 0 for a bound of 0. Some values are likelier than others by at most `bound` / 2⁶⁴,
    /// which is negligible for training.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }
}

fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `kat_vectors` of Random123 1.14, the three lines for `philox4x32 10`.
    #[test]
    fn philox_gives_the_published_answers() {
        let zeros = philox4x32([0; 4], [0; 2]);
        assert_eq!(zeros, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);

        let ones = philox4x32([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);

        let pi = philox4x32(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
        );
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn every_part_of_the_key_changes_the_sequence() {
        let first = |seed, epoch, sample, purpose| Draws::new(seed, epoch, sample, purpose).bits();
        let values = [
            first(0, 0, 0, RandomPurpose::Crop),
            first(1, 0, 0, RandomPurpose::Crop),
            first(1 << 32, 0, 0, RandomPurpose::Crop),
            first(0, 1, 0, RandomPurpose::Crop),
            first(0, 0, 1, RandomPurpose::Crop),
            first(0, 0, 1 << 32, RandomPurpose::Crop),
            first(0, 0, 0, RandomPurpose::Flip),
            first(0, 0, 0, RandomPurpose::Order),
            first(0, 0, 0, RandomPurpose::Mix),
            first(0, 0, 0, RandomPurpose::Store),
            first(0, 0, 0, RandomPurpose::Signal),
        ];
        for (i, value) in values.iter().enumerate() {
            assert!(!values[..i].contains(value), "key {i} repeats an earlier sequence");
        }
    }

    #[test]
    fn normal_numbers_have_the_moments_of_the_normal_distribution() {
        const COUNT: usize = 100_000;
        let mut draws = Draws::new(1, 0, 0, RandomPurpose::Noise);
        let values: Vec<f64> = (0..COUNT).map(|_| draws.normal()).collect();
        let moment = |power| values.iter().map(|x: &f64| x.powi(power)).sum::<f64>() / COUNT as f64;
        // The moments of a normal variable are 0, 1, 0, 3; limits are about four standard deviations.
        let limits = [(1, 0.0, 0.013), (2, 1.0, 0.018), (3, 0.0, 0.05), (4, 3.0, 0.125)];
        for (power, expected, limit) in limits {
            assert!((moment(power) - expected).abs() < limit, "moment {power}: {}", moment(power));
        }
    }

    #[test]
    fn a_sequence_is_reproducible_and_does_not_repeat_itself() {
        let sequence = || {
            let mut draws = Draws::new(7, 3, 11, RandomPurpose::Crop);
            [(); 6].map(|()| draws.bits())
        };
        let values = sequence();
        assert_eq!(values, sequence());
        for (i, value) in values.iter().enumerate() {
            assert!(!values[..i].contains(value));
        }
    }

    #[test]
    fn draws_are_uniform() {
        const CELLS: usize = 64;
        const PER_CELL: usize = 1_000;
        let mut counts = [[0_usize; CELLS]; 2];
        let mut draws = Draws::new(1, 0, 0, RandomPurpose::Crop);
        for _ in 0..CELLS * PER_CELL {
            let uniform = draws.uniform();
            assert!((0.0..1.0).contains(&uniform));
            counts[0][(uniform * CELLS as f64) as usize] += 1;
            counts[1][draws.below(CELLS as u64) as usize] += 1;
        }
        for counts in counts {
            let deviation = |count: usize| (count as f64 - PER_CELL as f64).powi(2);
            let chi_square: f64 = counts.into_iter().map(deviation).sum::<f64>() / PER_CELL as f64;
            // 63 degrees of freedom: above 114 in 1 of 10,000 cases.
            assert!(chi_square < 114.0, "chi-square {chi_square}");
        }
    }
}
