//! The fit of a regression: how well its outputs match the targets.

use serde::{Deserialize, Serialize};

/// Fit of a regression; means over the outputs if there are several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// Mean absolute error.
    pub mae: f64,
    /// Pearson's correlation, -1..1; 0 if predictions or targets are constant.
    pub pearson: f64,
    /// Spearman's rank correlation, -1..1: Pearson's correlation of the ranks, where equal values get the mean of
    /// their ranks.
    pub spearman: f64,
}

impl Fit {
    /// The fit of all predictions to their targets, both of shape (samples, `outputs`); the mean over several
    /// outputs. Without samples, all values are 0.
    ///
    /// Sums are computed in f64 and in the given order, so the same order of samples gives the same bits, for every
    /// number of ranks. Takes O(n log n) time, for the ranks of values.
    #[must_use]
    pub fn of(predictions: &[f32], targets: &[f32], outputs: usize) -> Self {
        let each = Self::of_each(predictions, targets, outputs);
        let count = each.len().max(1) as f64;
        let mean = |part: fn(&Self) -> f64| each.iter().map(part).sum::<f64>() / count;
        Self {
            mae: mean(|fit| fit.mae),
            pearson: mean(|fit| fit.pearson),
            spearman: mean(|fit| fit.spearman),
        }
    }

    /// Like [`of`](Self::of), but separately for each output.
    #[must_use]
    pub fn of_each(predictions: &[f32], targets: &[f32], outputs: usize) -> Vec<Self> {
        let column = |values: &[f32], output: usize| -> Vec<f64> {
            values.iter().skip(output).step_by(outputs).map(|value| f64::from(*value)).collect()
        };
        let of_one = |output| Self::of_one(&column(predictions, output), &column(targets, output));
        (0..outputs).map(of_one).collect()
    }

    fn of_one(predictions: &[f64], targets: &[f64]) -> Self {
        let pairs = || predictions.iter().zip(targets);
        let error: f64 = pairs().map(|(prediction, target)| (prediction - target).abs()).sum();
        Self {
            mae: error / pairs().len().max(1) as f64,
            pearson: correlation(predictions, targets),
            spearman: correlation(&ranks(predictions), &ranks(targets)),
        }
    }
}

/// Pearson's correlation in two passes; 0 if one side is constant or not finite.
fn correlation(x: &[f64], y: &[f64]) -> f64 {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let (mean_x, mean_y) = (mean(x), mean(y));
    let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
    for (x, y) in x.iter().zip(y) {
        let (x, y) = (x - mean_x, y - mean_y);
        xx += x * x;
        yy += y * y;
        xy += x * y;
    }
    // Two square roots, because the product of two tiny sums may be 0.
    let correlation = xy / (xx.sqrt() * yy.sqrt());
    // Because of rounding, the value may be slightly larger than 1.
    if correlation.is_finite() { correlation.clamp(-1.0, 1.0) } else { 0.0 }
}

/// The rank of each value, from 1; equal values get the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    // Adding 0 turns -0 into +0, so that both zeros are equal.
    order.sort_unstable_by(|a, b| (values[*a] + 0.0).total_cmp(&(values[*b] + 0.0)));
    let mut ranks = vec![0.0; values.len()];
    let mut before = 0;
    for equal in order.chunk_by(|a, b| values[*a] == values[*b]) {
        let rank = before as f64 + f64::midpoint(1.0, equal.len() as f64);
        equal.iter().for_each(|position| ranks[*position] = rank);
        before += equal.len();
    }
    ranks
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const PREDICTIONS: [[f32; 8]; 2] =
        [[2.5, 0.0, 2.1, 7.8, -1.2, 2.1, 4.4, 0.0], [0.1, 0.9, 0.4, 0.4, 0.7, 0.2, 0.2, 0.2]];
    const TARGETS: [[f32; 8]; 2] =
        [[3.0, -0.5, 2.0, 7.0, -1.0, 2.5, 2.5, 2.5], [9.0, 1.0, 5.0, 4.0, 2.0, 8.0, 7.0, 6.0]];
    /// `numpy.abs(p - t).mean()`, `scipy.stats.pearsonr` and `spearmanr` of those, with scipy 1.17.1.
    const EXPECTED: [[f64; 3]; 2] = [
        [0.862_500_041_723_251_3, 0.898_813_887_586_526_7, 0.827_223_537_194_031_3],
        [4.862_500_001_676_381, -0.955_847_717_456_638_3, -0.969_781_516_876_966_8],
    ];

    fn assert_close(fit: Fit, expected: [f64; 3]) {
        for (found, expected) in [fit.mae, fit.pearson, fit.spearman].into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-14, "{fit:?}, but {expected}");
        }
    }

    /// Shape (2, samples) to (samples, 2).
    fn interleaved(outputs: [[f32; 8]; 2]) -> Vec<f32> {
        (0..8).flat_map(|sample| [outputs[0][sample], outputs[1][sample]]).collect()
    }

    #[test]
    fn the_fit_equals_scipys_including_ties() {
        for ((predictions, targets), expected) in PREDICTIONS.iter().zip(&TARGETS).zip(EXPECTED) {
            assert_close(Fit::of(predictions, targets, 1), expected);
        }
    }

    #[test]
    fn several_outputs_give_one_fit_each_and_their_mean() {
        let (predictions, targets) = (interleaved(PREDICTIONS), interleaved(TARGETS));
        let each = Fit::of_each(&predictions, &targets, 2);
        assert_eq!(each.len(), 2);
        each.into_iter().zip(EXPECTED).for_each(|(fit, expected)| assert_close(fit, expected));
        let mean = std::array::from_fn(|i| f64::midpoint(EXPECTED[0][i], EXPECTED[1][i]));
        assert_close(Fit::of(&predictions, &targets, 2), mean);
    }

    #[test]
    fn a_constant_side_has_no_correlation() {
        let constant = Fit::of(&[0.1; 4], &[1.0, 2.0, 3.0, 4.0], 1);
        assert_eq!((constant.pearson, constant.spearman), (0.0, 0.0));
        let zeros = Fit::of(&[0.0, -0.0, 0.0], &[1.0, 2.0, 3.0], 1);
        assert_eq!(zeros.spearman, 0.0);
        assert_eq!(Fit::of(&[0.5], &[0.25], 1), Fit { mae: 0.25, ..Fit::default() });
    }

    #[test]
    fn no_samples_give_zeros() {
        assert_eq!(Fit::of(&[], &[], 1), Fit::default());
        assert_eq!(Fit::of(&[], &[], 0), Fit::default());
    }

    #[test]
    fn a_prediction_that_is_nan_affects_the_error_only() {
        let fit = Fit::of(&[1.0, f32::NAN, 3.0], &[1.0, 2.0, 3.0], 1);
        assert!(fit.mae.is_nan());
        assert_eq!(fit.pearson, 0.0);
        assert!(fit.spearman.is_finite());
    }

    proptest! {
        /// A rank is one more than the number of smaller values, plus half the number of equal others.
        #[test]
        fn ranks_count_smaller_values(values in vec((-5_i8..5).prop_map(f64::from), 0..40)) {
            let expected: Vec<f64> = values.iter().map(|value| {
                let smaller = values.iter().filter(|other| *other < value).count();
                let equal = values.iter().filter(|other| *other == value).count();
                smaller as f64 + f64::midpoint(1.0, equal as f64)
            }).collect();
            prop_assert_eq!(ranks(&values), expected);
        }

        #[test]
        fn correlations_stay_in_their_range(
            pairs in vec((any::<f32>(), any::<f32>()), 0..40), outputs in 1_usize..4,
        ) {
            let (predictions, targets): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            let fit = Fit::of(&predictions, &targets, outputs);
            for correlation in [fit.pearson, fit.spearman] {
                prop_assert!((-1.0..=1.0).contains(&correlation), "{:?}", fit);
            }
            for perfect in Fit::of_each(&targets, &targets, outputs) {
                let spearman = perfect.spearman;
                prop_assert!(spearman == 0.0 || spearman > 1.0 - 1e-12, "{}", spearman);
            }
        }
    }
}
