//! Random changes to signals: noise, scale, shift and masks.
//!
//! The last axis is time; the axis before it holds channels, or the frequencies of a spectrogram. Sums are in f64 and in a
//! fixed order, so that a sample has the same bits on every rank.

use std::ops::Range;

use baton_recipe::spec::AugmentSignal;

use crate::random::{Draws, RandomPurpose};

/// Changes a sample: f32, of this shape. `draws` gives the random numbers of the sample.
pub(crate) fn change(
    signal: &AugmentSignal,
    draws: impl Fn(RandomPurpose) -> Draws,
    shape: &[u64],
    values: &mut [f32],
) {
    let length = shape.last().map_or(0, |length| *length as usize);
    if length == 0 || values.is_empty() {
        return;
    }
    let channels = shape.iter().rev().nth(1).map_or(1, |channels| *channels as usize);
    let mut change = draws(RandomPurpose::Change);
    // All are drawn, so that none depends on which others are in use.
    let factor = change.between(1.0 - signal.scale, 1.0 + signal.scale);
    let shift = change.between(-signal.shift, signal.shift) * length as f64;
    let hidden_time = part(signal.time_mask, length, &mut change);
    let hidden_channels = part(signal.channel_mask, channels, &mut change);
    let mut noise = draws(RandomPurpose::Noise);
    for (row, values) in values.chunks_exact_mut(length).enumerate() {
        let (mean, deviation) = mean_and_deviation(values);
        if signal.shift > 0.0 {
            move_by(values, shift.round_ties_even() as isize);
        }
        if signal.noise > 0.0 {
            let size = signal.noise * deviation;
            for value in &mut *values {
                *value += (size * noise.normal()) as f32;
            }
        }
        let masked = if hidden_channels.contains(&(row % channels)) {
            0..length
        } else {
            hidden_time.clone()
        };
        values[masked].fill(mean as f32);
        if signal.scale > 0.0 {
            for value in values {
                *value *= factor as f32;
            }
        }
    }
}

/// A part of `0..length`: its share is uniform between 0 and `largest`, as is its position.
fn part(largest: f64, length: usize, draws: &mut Draws) -> Range<usize> {
    let size = (draws.between(0.0, largest) * length as f64).round_ties_even() as usize;
    let start = draws.below((length - size.min(length)) as u64 + 1) as usize;
    start..start + size.min(length)
}

/// Mean and standard deviation of the values.
fn mean_and_deviation(values: &[f32]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().map(|value| f64::from(*value)).sum::<f64>() / count;
    let variance =
        values.iter().map(|value| (f64::from(*value) - mean).powi(2)).sum::<f64>() / count;
    (mean, variance.sqrt())
}

/// Moves the values to later positions, or to earlier ones if `by` is negative. Free positions repeat the value at that
/// end.
fn move_by(values: &mut [f32], by: isize) {
    let size = by.unsigned_abs().min(values.len() - 1);
    let kept = values.len() - size;
    if by >= 0 {
        values.copy_within(..kept, size);
        let first = values[size];
        values[..size].fill(first);
    } else {
        values.copy_within(size.., 0);
        let last = values[kept - 1];
        values[kept..].fill(last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(signal: &AugmentSignal, sample: u64, shape: &[u64], values: &[f32]) -> Vec<f32> {
        let mut values = values.to_vec();
        change(signal, |purpose| Draws::new(1, 2, sample, purpose), shape, &mut values);
        values
    }

    fn ramp(length: u16) -> Vec<f32> {
        (0..length).map(f32::from).collect()
    }

    #[test]
    fn without_an_option_a_signal_keeps_its_bits() {
        let values = ramp(60);
        for sample in 0..100 {
            assert_eq!(changed(&AugmentSignal::default(), sample, &[3, 20], &values), values);
        }
    }

    #[test]
    fn a_change_is_a_function_of_its_sample() {
        let signal =
            AugmentSignal { noise: 0.1, scale: 0.2, shift: 0.1, time_mask: 0.2, channel_mask: 0.5 };
        let of = |sample| changed(&signal, sample, &[2, 30], &ramp(60));
        assert_eq!(of(3), of(3));
        assert_ne!(of(3), of(4));
    }

    #[test]
    fn noise_is_relative_to_the_deviation_of_its_channel() {
        let signal = AugmentSignal { noise: 0.1, ..AugmentSignal::default() };
        let small: Vec<f32> = (0..1_000).map(|t| [-1.0, 1.0][t % 2]).collect();
        let values: Vec<f32> =
            small.iter().copied().chain(small.iter().map(|x| x * 100.0)).collect();
        let noisy = changed(&signal, 0, &[2, 1_000], &values);
        for (channel, size) in [(0, 0.1), (1, 10.0)] {
            let range = channel * 1_000..(channel + 1) * 1_000;
            let noise: Vec<f32> =
                range.map(|position| noisy[position] - values[position]).collect();
            let (mean, deviation) = mean_and_deviation(&noise);
            // 1,000 draws: four standard deviations of the mean and of the deviation.
            assert!(mean.abs() < 0.13 * size, "channel {channel}: mean {mean}");
            assert!((deviation / size - 1.0).abs() < 0.09, "channel {channel}: {deviation}");
        }
    }

    #[test]
    fn a_constant_channel_gets_no_noise() {
        let signal = AugmentSignal { noise: 1.0, ..AugmentSignal::default() };
        assert_eq!(changed(&signal, 0, &[5], &[7.0; 5]), [7.0; 5]);
    }

    #[test]
    fn one_factor_scales_the_whole_sample() {
        let signal = AugmentSignal { scale: 0.5, ..AugmentSignal::default() };
        let mut factors = Vec::new();
        for sample in 0..1_000 {
            let scaled = changed(&signal, sample, &[2, 3], &[1.0, 2.0, -4.0, 1.0, 8.0, 1.0]);
            let factor = scaled[0];
            let expected = [1.0, 2.0, -4.0, 1.0, 8.0, 1.0].map(|value| value * factor);
            assert_eq!(scaled, expected);
            factors.push(factor);
        }
        assert!(factors.iter().all(|factor| (0.5..=1.5).contains(factor)));
        assert!(factors.iter().any(|factor| *factor < 0.55));
        assert!(factors.iter().any(|factor| *factor > 1.45));
    }

    #[test]
    fn a_shift_repeats_the_value_at_the_end() {
        let mut values = [1.0, 2.0, 3.0, 4.0];
        move_by(&mut values, 1);
        assert_eq!(values, [1.0, 1.0, 2.0, 3.0]);
        move_by(&mut values, -2);
        assert_eq!(values, [2.0, 3.0, 3.0, 3.0]);
        move_by(&mut values, 9);
        assert_eq!(values, [2.0; 4]);
        move_by(&mut values, 0);
        assert_eq!(values, [2.0; 4]);
    }

    #[test]
    fn shifts_reach_both_directions_up_to_the_limit() {
        let signal = AugmentSignal { shift: 0.2, ..AugmentSignal::default() };
        let shifts: Vec<i64> = (0..1_000)
            .map(|sample| 10 - changed(&signal, sample, &[21], &ramp(21))[10] as i64)
            .collect();
        assert_eq!((shifts.iter().min(), shifts.iter().max()), (Some(&-4), Some(&4)));
    }

    #[test]
    fn masks_hide_one_piece_of_time_and_neighbouring_channels() {
        let signal =
            AugmentSignal { time_mask: 0.5, channel_mask: 0.5, ..AugmentSignal::default() };
        let (channels, length) = (8, 10);
        // No value equals the mean of its channel.
        let values: Vec<f32> = (0..channels * length).map(|at| f32::from(at % 10 == 0)).collect();
        let (mut longest, mut most) = (0, 0);
        for sample in 0..1_000 {
            let masked = changed(&signal, sample, &[8, 10], &values);
            let hidden = |at: usize| masked[at] == 0.1;
            let whole: Vec<usize> =
                (0..8).filter(|c| (0..10).all(|t| hidden(c * 10 + t))).collect();
            assert!(whole.windows(2).all(|pair| pair[1] == pair[0] + 1), "{whole:?}");
            let shown = (0..8).find(|channel| !whole.contains(channel)).unwrap();
            let times: Vec<usize> = (0..10).filter(|t| hidden(shown * 10 + t)).collect();
            assert!(times.windows(2).all(|pair| pair[1] == pair[0] + 1), "{times:?}");
            (longest, most) = (longest.max(times.len()), most.max(whole.len()));
        }
        assert_eq!((longest, most), (5, 4));
    }

    /// Resumed runs depend on these exact bits.
    #[test]
    fn the_changes_of_a_seed_never_change() {
        let signal =
            AugmentSignal { noise: 0.1, scale: 0.2, shift: 0.3, time_mask: 0.4, channel_mask: 0.0 };
        let found: Vec<u32> =
            changed(&signal, 3, &[6], &ramp(6)).into_iter().map(f32::to_bits).collect();
        let expected =
            [0x3E5A_AAC6, 0x3F53_756A, 0x3FBE_7B45, 0x400A_550E, 0x400A_550E, 0x4087_8B69];
        assert_eq!(found, expected);
    }
}
