//! Synthetic signals with a known target, for a regression to try out: `baton data synth signals`.
//!
//! Every signal is a damped oscillation with drift and noise; its target is the frequency:
//!
//! ```text
//! x(c, t) = a · exp(-d · s) · sin(2π · f · s + p) + o + b · (s - 1/2) + noise · n(t)      s = t / window
//! f = 2 + 10 · target                                                        cycles per window
//!
//! target   uniform in [0, 1)
//! d        uniform in [0, 3)              damping, one value for all channels of a sample
//! a        uniform in [0.5, 2)            amplitude; this and the following have one value per channel
//! p        uniform in [0, 2π)             phase
//! o        uniform in [-1, 1)             offset
//! b        uniform in [-2, 2)             drift
//! n(t)     normal, variance 1             noise
//! ```
//!
//! Reachable accuracy: phase, offset and drift are symmetric around zero and independent of the target, so every x(c,
//! t) is uncorrelated with it, and **no linear model is better than the constant 1/2** (mean absolute error 1/4,
//! standard deviation 1/√12 = 0.29, correlation 0). An estimator that uses the formula and fits the frequency has a
//! mean absolute error of 0.005 and a rank correlation above 0.999 (default options; both are tested below).

use std::{f64::consts::TAU, path::Path};

use crate::{
    random::{Draws, RandomPurpose},
    write::{Array, Error, FFCV_MIN_PAGE_BYTES, Field, FieldKind, FinishedFile, Value, Writer},
};

/// Name of the field with the signals: f32, shape (channels, window).
pub const INPUT_FIELD: &str = "signal";
/// Name of the field with the targets: Float.
pub const TARGET_FIELD: &str = "target";

/// Cycles per window at target 0, and the number of additional cycles at target 1.
const CYCLES: [f64; 2] = [2.0, 10.0];
const DAMPING: [f64; 2] = [0.0, 3.0];
const AMPLITUDE: [f64; 2] = [0.5, 2.0];
const OFFSET: [f64; 2] = [-1.0, 1.0];
const DRIFT: [f64; 2] = [-2.0, 2.0];

/// Minimum window, in positions: then the fastest oscillation has more than two positions per cycle.
const MIN_WINDOW: u32 = 25;

/// Parameters of the signals. The same values give identical bits on every machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Signals {
    /// Number of positions in time.
    pub window: u32,
    /// Number of signals per sample, each with another amplitude, phase, offset, drift and noise.
    pub channels: u32,
    /// Standard deviation of the noise.
    pub noise: f64,
    /// Seed of all random numbers.
    pub seed: u64,
}

impl Default for Signals {
    fn default() -> Self {
        Self { window: 100, channels: 1, noise: 0.3, seed: 0 }
    }
}

/// A part of the samples; the parts are disjoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Samples for training.
    Train = 0,
    /// Samples for evaluation.
    Val = 1,
}

impl Signals {
    /// Checks that the parameters are valid and that the signals can be stored.
    ///
    /// # Errors
    /// The window is too short for the fastest oscillation, a sample does not fit into a page, there are
    /// no channels, or the noise is negative or not finite.
    pub fn check(&self) -> Result<(), Error> {
        let Self { window, channels, noise, .. } = *self;
        let refused = |reason: String| Err(Error::Option(reason));
        if window < MIN_WINDOW {
            return refused(format!(
                "a window of {window} is too short for 12 cycles: take at least {MIN_WINDOW}"
            ));
        }
        if channels == 0 {
            return refused("signals with 0 channels: take at least one".to_owned());
        }
        let bytes = 4 * u64::from(channels) * u64::from(window);
        if bytes > u64::from(FFCV_MIN_PAGE_BYTES) {
            return refused(format!(
                "{channels} channels of {window} positions take {bytes} bytes, above the \
                 {FFCV_MIN_PAGE_BYTES} of a page: take fewer"
            ));
        }
        if !(noise.is_finite() && noise >= 0.0) {
            return refused(format!("noise of {noise}: take 0 or more"));
        }
        Ok(())
    }

    /// Writes a sample into `signal`, shape (channels, window), and returns its target.
    pub fn make(&self, split: Split, sample: u64, signal: &mut Vec<f32>) -> f64 {
        let mut draws = Draws::new(self.seed, split as u32, sample, RandomPurpose::Signal);
        let target = draws.uniform();
        let damping = draws.between(DAMPING[0], DAMPING[1]);
        signal.clear();
        for _ in 0..self.channels {
            let mut within = |[low, high]: [f64; 2]| draws.between(low, high);
            let channel = Channel {
                frequency: CYCLES[0] + CYCLES[1] * target,
                damping,
                amplitude: within(AMPLITUDE),
                phase: within([0.0, TAU]),
                offset: within(OFFSET),
                drift: within(DRIFT),
            };
            for t in 0..self.window {
                let value = channel.at(f64::from(t) / f64::from(self.window));
                signal.push((value + self.noise * draws.normal()) as f32);
            }
        }
        target
    }

    /// Writes a file with samples `0..samples`, atomically replacing an older one. `progress` is called for each
    /// sample.
    ///
    /// # Errors
    /// As [`check`](Self::check) and [`Writer`].
    pub fn write(
        &self,
        split: Split,
        samples: u64,
        target: &Path,
        mut progress: impl FnMut(),
    ) -> Result<FinishedFile, Error> {
        self.check()?;
        let shape = vec![self.channels.into(), self.window.into()];
        let fields = vec![
            Field::new(INPUT_FIELD, FieldKind::NdArray(Array { shape, dtype: "<f4".to_owned() })),
            Field::new(TARGET_FIELD, FieldKind::Float),
        ];
        let mut writer = Writer::create(target, fields, samples, FFCV_MIN_PAGE_BYTES)?;
        let (mut signal, mut bytes) = (Vec::new(), Vec::new());
        for sample in 0..samples {
            let target = self.make(split, sample, &mut signal);
            bytes.clear();
            bytes.extend(signal.iter().flat_map(|value| value.to_le_bytes()));
            writer.push(&[Value::Array(&bytes), Value::Float(target)])?;
            progress();
        }
        writer.finish()
    }
}

/// One channel of one sample, without noise.
struct Channel {
    /// Cycles per window.
    frequency: f64,
    /// Per window.
    damping: f64,
    amplitude: f64,
    /// In radians.
    phase: f64,
    offset: f64,
    /// Per window.
    drift: f64,
}

impl Channel {
    /// The value at a time in windows. Uses `libm`, because the functions of C libraries differ in their last bits.
    fn at(&self, s: f64) -> f64 {
        let oscillation = libm::sin(TAU * self.frequency * s + self.phase);
        let envelope = self.amplitude * libm::exp(-self.damping * s);
        envelope * oscillation + self.offset + self.drift * (s - 0.5)
    }
}

#[cfg(test)]
mod tests {
    use baton_recipe::fit::Fit;

    use super::*;

    /// Signals of one channel, shape (samples, window), and their targets.
    fn made(signals: Signals, split: Split, samples: u64) -> (Vec<Vec<f32>>, Vec<f32>) {
        let one = |sample| {
            let mut signal = Vec::new();
            let target = signals.make(split, sample, &mut signal);
            (signal, target as f32)
        };
        (0..samples).map(one).unzip()
    }

    #[test]
    fn a_sample_is_reproducible_and_differs_from_every_other() {
        let of = |seed, split, sample| {
            let mut signal = vec![9.0; 3];
            let target = Signals { seed, ..Signals::default() }.make(split, sample, &mut signal);
            (signal, target)
        };
        assert_eq!(of(1, Split::Train, 2), of(1, Split::Train, 2));
        assert_eq!(of(1, Split::Train, 2).0.len(), 100);
        for other in [of(1, Split::Train, 3), of(1, Split::Val, 2), of(2, Split::Train, 2)] {
            assert_ne!(of(1, Split::Train, 2), other);
        }
    }

    /// Existing files contain these bits.
    #[test]
    fn the_signals_of_a_seed_never_change() {
        let mut signal = Vec::new();
        let target = Signals::default().make(Split::Train, 0, &mut signal);
        let digest = blake3::hash(bytemuck::cast_slice(&signal)).to_hex();
        assert_eq!((target.to_bits(), &digest[..16]), (0x3FD2_D2A2_CAE2_B9C6, "00d2c58555cd5324"));
    }

    #[test]
    fn channels_share_only_their_target() {
        let signals = Signals { channels: 2, noise: 0.0, ..Signals::default() };
        let mut signal = Vec::new();
        signals.make(Split::Train, 0, &mut signal);
        let (first, second) = signal.split_at(100);
        let found = [first, second].map(estimate);
        assert_ne!(first, second);
        assert!((found[0] - found[1]).abs() < 0.05, "{found:?}");
    }

    /// Estimates the target: the frequency of the oscillation that, together with a straight line, fits the signal
    /// best. Ignores damping.
    fn estimate(signal: &[f32]) -> f32 {
        let steps = 400;
        let residual = |step: u32| {
            let frequency = CYCLES[0] + CYCLES[1] * f64::from(step) / f64::from(steps);
            let rows = (0..signal.len()).map(|t| {
                let s = t as f64 / signal.len() as f64;
                let angle = TAU * frequency * s;
                vec![1.0, s, angle.sin(), angle.cos()]
            });
            let rows: Vec<Vec<f64>> = rows.collect();
            let weights = least_squares(&rows, signal);
            let error = |(row, x): (&Vec<f64>, &f32)| (dot(row, &weights) - f64::from(*x)).powi(2);
            rows.iter().zip(signal).map(error).sum::<f64>()
        };
        let best = (0..=steps).min_by(|a, b| residual(*a).total_cmp(&residual(*b))).unwrap();
        best as f32 / steps as f32
    }

    fn dot(x: &[f64], y: &[f64]) -> f64 {
        x.iter().zip(y).map(|(x, y)| x * y).sum()
    }

    /// The weights of the best linear predictor of `targets`, by the normal equations and elimination.
    fn least_squares(rows: &[Vec<f64>], targets: &[f32]) -> Vec<f64> {
        let n = rows[0].len();
        let mut system = vec![vec![0.0; n + 1]; n];
        for (row, target) in rows.iter().zip(targets) {
            for i in 0..n {
                for j in 0..n {
                    system[i][j] += row[i] * row[j];
                }
                system[i][n] += row[i] * f64::from(*target);
            }
        }
        for pivot in 0..n {
            let row = system[pivot].clone();
            for (i, other) in system.iter_mut().enumerate() {
                let factor = other[pivot] / row[pivot];
                if i != pivot {
                    other.iter_mut().zip(&row).for_each(|(x, y)| *x -= factor * y);
                }
            }
        }
        (0..n).map(|i| system[i][n] / system[i][i]).collect()
    }

    /// The module's documentation states this.
    #[test]
    fn no_linear_model_learns_the_target() {
        let rows = |signals: &[Vec<f32>]| -> Vec<Vec<f64>> {
            let row = |signal: &Vec<f32>| {
                signal.iter().map(|x| f64::from(*x)).chain([1.0]).collect::<Vec<_>>()
            };
            signals.iter().map(row).collect()
        };
        let (train, train_targets) = made(Signals::default(), Split::Train, 8_192);
        let (val, val_targets) = made(Signals::default(), Split::Val, 2_048);
        let weights = least_squares(&rows(&train), &train_targets);
        let guesses: Vec<f32> = rows(&val).iter().map(|row| dot(row, &weights) as f32).collect();
        let fit = Fit::of(&guesses, &val_targets, 1);
        // Four standard deviations of the correlation of 2,048 independent pairs.
        assert!(fit.pearson.abs() < 0.09 && fit.mae > 0.24, "{fit:?}");
    }

    #[test]
    fn fitting_the_frequency_finds_the_target() {
        let (signals, targets) = made(Signals::default(), Split::Val, 256);
        let guesses: Vec<f32> = signals.iter().map(|signal| estimate(signal)).collect();
        let fit = Fit::of(&guesses, &targets, 1);
        assert!(fit.spearman > 0.999 && fit.mae < 0.006, "{fit:?}");
    }

    #[test]
    fn invalid_parameters_are_refused_with_a_remedy() {
        let good = Signals::default();
        good.check().unwrap();
        let cases = [
            (Signals { window: 24, ..good }, "take at least 25"),
            (Signals { channels: 0, ..good }, "take at least one"),
            (Signals { channels: 6_000, ..good }, "take 2400000 bytes, above the 2097152"),
            (Signals { noise: -0.1, ..good }, "noise of -0.1: take 0 or more"),
            (Signals { noise: f64::NAN, ..good }, "noise of NaN"),
        ];
        for (signals, part) in cases {
            let refused = signals.check().unwrap_err().to_string();
            assert!(refused.contains(part), "{refused}");
        }
    }
}
