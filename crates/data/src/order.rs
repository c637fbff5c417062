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

use baton_job::spec::Order;

use crate::{
    Error,
    random::{Draws, Operation},
};

/// Four rounds suffice on large domains (Luby & Rackoff 1988); more of them mix small ones.
const ROUNDS: u64 = 8;

/// The order of all epochs of one data set.
#[derive(Clone, Debug)]
pub struct SampleOrder {
    kind: Kind,
    samples: u64,
}

#[derive(Clone, Debug)]
enum Kind {
    Sequential,
    Random(Permutation),
}

impl SampleOrder {
    /// The order of `samples` samples. The seed does not matter to [`Order::Sequential`].
    ///
    /// # Errors
    /// [`Order::QuasiRandom`] is not implemented.
    pub fn new(kind: Order, samples: u64, seed: u64) -> Result<Self, Error> {
        let kind = match kind {
            Order::Sequential => Kind::Sequential,
            Order::Random => Kind::Random(Permutation::new(samples, seed)),
            Order::QuasiRandom => return Err(Error::QuasiRandom),
        };
        Ok(Self { kind, samples })
    }

    /// The sample at a position of an epoch. Takes well under a microsecond.
    ///
    /// # Panics
    /// `position` is not below the number of samples: a bug of the caller.
    #[must_use]
    pub fn at(&self, epoch: u32, position: u64) -> u64 {
        assert!(position < self.samples, "position {position} of {} samples", self.samples);
        match &self.kind {
            Kind::Sequential => position,
            Kind::Random(permutation) => permutation.at(epoch, position),
        }
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn random(samples: u64, seed: u64) -> SampleOrder {
        SampleOrder::new(Order::Random, samples, seed).unwrap()
    }

    fn epoch(order: &SampleOrder, epoch: u32) -> Vec<u64> {
        (0..order.samples).map(|position| order.at(epoch, position)).collect()
    }

    fn is_permutation(values: &[u64]) -> bool {
        let mut seen = vec![false; values.len()];
        values.iter().all(|value| {
            seen.get_mut(*value as usize).is_some_and(|seen| !std::mem::replace(seen, true))
        })
    }

    #[test]
    fn every_small_number_of_samples_gives_a_permutation() {
        for samples in 1..=600 {
            assert!(is_permutation(&epoch(&random(samples, 5), 2)), "{samples} samples");
        }
    }

    #[test]
    fn imagenet_gives_a_permutation() {
        assert!(is_permutation(&epoch(&random(1_281_167, 42), 17)));
    }

    #[test]
    fn the_largest_number_of_samples_stays_in_range() {
        for samples in [1 << 40, (1 << 62) + 12_345, u64::MAX - 1, u64::MAX] {
            let order = random(samples, 1);
            let positions = [0, 1, samples / 3, samples - 1];
            let visited = positions.map(|position| order.at(0, position));
            assert!(visited.iter().all(|sample| *sample < samples));
            for (i, sample) in visited.iter().enumerate() {
                assert!(!visited[..i].contains(sample), "{samples} samples: {sample} twice");
            }
        }
    }

    #[test]
    fn sequential_is_the_order_of_the_file_in_every_epoch() {
        let order = SampleOrder::new(Order::Sequential, 5, 9).unwrap();
        assert_eq!(epoch(&order, 0), [0, 1, 2, 3, 4]);
        assert_eq!(epoch(&order, 7), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn quasi_random_is_refused() {
        let refused = SampleOrder::new(Order::QuasiRandom, 5, 9);
        assert!(matches!(refused, Err(Error::QuasiRandom)));
    }

    #[test]
    #[should_panic(expected = "position 5 of 5 samples")]
    fn a_position_beyond_the_end_is_a_bug() {
        let _ = random(5, 0).at(0, 5);
    }

    /// Checkpoints hold a position, not a list: a changed order would repeat and skip samples.
    /// The numbers were computed by another implementation, in Python.
    #[test]
    fn the_order_never_changes_between_versions() {
        assert_eq!(epoch(&random(10, 1), 0), [7, 5, 4, 0, 3, 2, 6, 9, 8, 1]);
    }

    /// Over many epochs every sample comes equally often to every position.
    #[test]
    fn every_position_gets_every_sample_equally_often() {
        for samples in [2_u64, 3, 4, 5, 7, 12, 30] {
            let cells = (samples * samples) as usize;
            let expected = 2_000.0;
            let mut counts = vec![0_u32; cells];
            let order = random(samples, 3);
            for number in 0..(samples as u32 * expected as u32) {
                for (position, sample) in epoch(&order, number).into_iter().enumerate() {
                    counts[position * samples as usize + sample as usize] += 1;
                }
            }
            let square = |count: u32| (f64::from(count) - expected).powi(2) / expected;
            let chi_square: f64 = counts.into_iter().map(square).sum();
            let freedom = ((samples - 1) * (samples - 1)) as f64;
            // Mean `freedom`, variance `2 freedom`; five deviations and a little for the skew.
            let limit = freedom + 5.0 * (2.0 * freedom).sqrt() + 10.0;
            assert!(chi_square < limit, "{samples} samples: {chi_square} above {limit}");
        }
    }

    /// Sample p + 1 does not follow sample p more often than any other does.
    #[test]
    fn neighbours_are_separated() {
        let order = random(10_000, 8);
        let together = (0..20)
            .map(|number| {
                let visited = epoch(&order, number);
                visited.windows(2).filter(|pair| pair[1] == pair[0] + 1).count()
            })
            .sum::<usize>();
        // One per epoch is expected; 20 epochs give 20, with a standard deviation of 4.5.
        assert!((2..=45).contains(&together), "{together} neighbours stayed together");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_seed_and_epoch_give_a_permutation(
            samples in 1_u64..5_000, seed: u64, number: u32,
        ) {
            prop_assert!(is_permutation(&epoch(&random(samples, seed), number)));
        }

        #[test]
        fn epochs_and_seeds_differ(samples in 50_u64..5_000, seed: u64, number in 0..u32::MAX) {
            let order = epoch(&random(samples, seed), number);
            prop_assert_ne!(&order, &epoch(&random(samples, seed), number + 1));
            prop_assert_ne!(&order, &epoch(&random(samples, seed.wrapping_add(1)), number));
        }
    }
}
