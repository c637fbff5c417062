//! Parameters for mixing the samples of a micro-batch: MixUp (Zhang et al. 2018) and CutMix (Yun et al. 2019). This
//! module does not access pixels.
//!
//! A micro-batch is mixed with itself, shifted by one: the partner of sample `i` is sample `i - 1`, and the partner
//! of the first is the last (`torch.roll(1)` along the batch, as in torchvision's `transforms.v2`). The order of
//! samples is random already, so no permutation is needed. A sample's target is `lambda` times its own target plus
//! `1 - lambda` times its partner's.

use std::ops::Range;

use baton_recipe::spec::Augment;

use crate::{
    Batch, Inputs,
    random::{Draws, RandomPurpose},
};

/// How a micro-batch is mixed.
#[derive(Clone, Debug, PartialEq)]
pub enum Mix {
    /// The samples are not changed.
    None,
    /// Every sample becomes `lambda` times itself plus `1 - lambda` times its partner.
    MixUp {
        /// Share of the sample itself, 0..=1.
        lambda: f64,
    },
    /// A window of every sample is replaced by that of its partner.
    CutMix {
        /// Share of the sample itself, 0..=1, computed from the rounded and clipped window.
        lambda: f64,
        /// The replaced window; may be empty.
        window: Window,
    },
}

/// A rectangle of an image or a time range of a signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Rows of an image; for a signal always `0..1`.
    pub rows: Range<u32>,
    /// Columns of an image, or positions in time of a signal.
    pub columns: Range<u32>,
}

/// Size of the mixed inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Canvas {
    /// Images, in pixels. Neither side is 0.
    Image {
        /// Rows.
        height: u32,
        /// Columns.
        width: u32,
    },
    /// Signals with any number of channels.
    Signal {
        /// Positions in time, at least one.
        length: u32,
    },
}

impl Canvas {
    /// The size of a batch's inputs. The last axis of an array is time.
    #[must_use]
    pub fn of(inputs: &Inputs) -> Self {
        match inputs {
            Inputs::Images { resolution, .. } => {
                Self::Image { height: *resolution, width: *resolution }
            }
            Inputs::Arrays { shape, .. } => {
                let length =
                    shape.last().map_or(0, |length| u32::try_from(*length).unwrap_or(u32::MAX));
                Self::Signal { length }
            }
            // Texts are never mixed.
            Inputs::Tokens { .. } => Self::Signal { length: 1 },
        }
    }
}

impl Mix {
    /// Draws how a micro-batch is mixed: with probability `augment.cutmix_probability` by CutMix with `lambda`
    /// from Beta(`cutmix_alpha`, `cutmix_alpha`), else, if `augment.mixup_alpha` is above 0, by MixUp with
    /// `lambda` from Beta(`mixup_alpha`, `mixup_alpha`).
    ///
    /// The result is a function of (seed, epoch, first sample of the micro-batch), so it does not depend on which
    /// rank computes the micro-batch or when.
    #[must_use]
    pub fn of(seed: u64, epoch: u32, first_sample: u64, augment: &Augment, canvas: Canvas) -> Self {
        let mut draws = Draws::new(seed, epoch, first_sample, RandomPurpose::Mix);
        if draws.uniform() < augment.cutmix_probability {
            return Self::cut(symmetric_beta(augment.cutmix_alpha, &mut draws), canvas, &mut draws);
        }
        if augment.mixup_alpha > 0.0 {
            return Self::MixUp { lambda: symmetric_beta(augment.mixup_alpha, &mut draws) };
        }
        Self::None
    }

    /// Like [`of`](Self::of), for a batch of a loader. An empty batch is not mixed.
    #[must_use]
    pub fn of_batch(seed: u64, batch: &Batch, augment: &Augment) -> Self {
        match batch.samples.first() {
            Some(first) => Self::of(seed, batch.epoch, *first, augment, Canvas::of(&batch.inputs)),
            None => Self::None,
        }
    }

    /// A window like that of torchvision's `transforms.v2.CutMix`: `1 - lambda` of the area, with the image's aspect
    /// ratio and a random centre, clipped at the border. For a signal the same applies to its length.
    fn cut(lambda: f64, canvas: Canvas, draws: &mut Draws) -> Self {
        let (height, width, side_share) = match canvas {
            Canvas::Image { height, width } => (height, width, (1.0 - lambda).sqrt()),
            Canvas::Signal { length } => (1, length, 1.0 - lambda),
        };
        let columns = segment(side_share, width, draws);
        let rows = match canvas {
            Canvas::Image { .. } => segment(side_share, height, draws),
            Canvas::Signal { .. } => 0..1,
        };
        let cut = rows.len() as f64 * columns.len() as f64;
        let lambda = 1.0 - cut / (f64::from(height) * f64::from(width));
        Self::CutMix { lambda, window: Window { rows, columns } }
    }
}

/// A part of `0..length` around a random centre, with half of `share` on each side, rounded down and clipped.
fn segment(share: f64, length: u32, draws: &mut Draws) -> Range<u32> {
    let centre = draws.below(length.into()) as u32;
    let half = (0.5 * share * f64::from(length)) as u32;
    centre.saturating_sub(half)..centre.saturating_add(half).min(length)
}

/// Draws from Beta(`alpha`, `alpha`); `alpha` must be above 0.
///
/// Uses Student's t with 2·alpha degrees of freedom by Bailey's polar method ("Polar generation of random
/// variates with the t-distribution", Mathematics of Computation 62, 1994), and computes the symmetric beta from
/// it: x = (1 + t / √(2·alpha + t²)) / 2 (Devroye, "Random variate generation in one line of code", 1996).
/// Exact for any alpha, with two uniform numbers and no rejection. Uses `libm`, because the functions of C libraries
/// differ in their last bits.
fn symmetric_beta(alpha: f64, draws: &mut Draws) -> f64 {
    // In (0, 1], so that the logarithm is finite.
    let radius = 1.0 - draws.uniform();
    let direction = libm::cos(2.0 * std::f64::consts::PI * draws.uniform());
    // t² / (2·alpha). Its first factor is u^(-1/alpha) - 1, computed without loss of precision near 0. It is infinite
    // for a small alpha, which gives 0 or 1 below.
    let ratio = libm::expm1(-libm::log(radius) / alpha) * direction * direction;
    let distance = 1.0 / (1.0 + 1.0 / ratio).sqrt();
    0.5 + 0.5 * distance.copysign(direction)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: Canvas = Canvas::Image { height: 48, width: 64 };
    const SIGNAL: Canvas = Canvas::Signal { length: 100 };

    fn augment(mixup_alpha: f64, cutmix_probability: f64, cutmix_alpha: f64) -> Augment {
        Augment { mixup_alpha, cutmix_probability, cutmix_alpha, ..Augment::default() }
    }

    fn betas(alpha: f64, count: u64) -> Vec<f64> {
        let draws = |sample| Draws::new(3, 1, sample, RandomPurpose::Mix);
        (0..count).map(|sample| symmetric_beta(alpha, &mut draws(sample))).collect()
    }

    /// The distribution function of Beta(a, a), by the power series of the incomplete beta function
    /// (Abramowitz & Stegun 26.5.4 in the form x^a Σ (1-a)_n xⁿ / (n! (a+n))) and its symmetry.
    fn beta_cdf(alpha: f64, x: f64) -> f64 {
        if x > 0.5 {
            return 1.0 - beta_cdf(alpha, 1.0 - x);
        }
        let (mut term, mut sum) = (1.0, 0.0);
        for n in (0..200).map(f64::from) {
            sum += term / (alpha + n);
            term *= (n + 1.0 - alpha) / (n + 1.0) * x;
        }
        let beta = libm::tgamma(alpha).powi(2) / libm::tgamma(2.0 * alpha);
        x.powf(alpha) * sum / beta
    }

    /// Expected: `scipy.stats.beta.cdf`, scipy 1.17.1.
    #[test]
    fn the_distribution_function_of_these_tests_equals_that_of_scipy() {
        let expected = [
            (0.2, 0.01, 0.209_777_690_067_752_32),
            (0.2, 0.3, 0.433_204_184_375_964_53),
            (0.2, 0.9, 0.663_310_221_569_943),
            (1.0, 0.3, 0.3),
            (2.0, 0.01, 0.000_298),
            (2.0, 0.9, 0.972),
        ];
        for (alpha, x, expected) in expected {
            assert!((beta_cdf(alpha, x) - expected).abs() < 1e-13, "{alpha} {x}");
        }
    }

    #[test]
    fn shares_follow_the_beta_distribution() {
        const COUNT: u64 = 50_000;
        for alpha in [0.2, 1.0, 2.0] {
            let mut values = betas(alpha, COUNT);
            let count = COUNT as f64;
            let mean = values.iter().sum::<f64>() / count;
            let variance = values.iter().map(|x| (x - 0.5).powi(2)).sum::<f64>() / count;
            let expected = 0.25 / (2.0 * alpha + 1.0);
            // Limits are about four standard deviations.
            assert!((mean - 0.5).abs() < 4.0 * (expected / count).sqrt(), "{alpha}: mean {mean}");
            assert!((variance / expected - 1.0).abs() < 0.025, "{alpha}: variance {variance}");

            values.sort_by(f64::total_cmp);
            let distance = (0..).zip(&values).map(|(below, x)| {
                let expected = beta_cdf(alpha, *x);
                let (low, high) = (f64::from(below) / count, f64::from(below + 1) / count);
                (expected - low).abs().max((high - expected).abs())
            });
            let distance = distance.fold(0.0, f64::max);
            // Kolmogorov and Smirnov: above 2.23 / √n in 1 of 10,000 cases.
            assert!(distance < 2.23 / count.sqrt(), "{alpha}: distance {distance}");
        }
    }

    #[test]
    fn extreme_parameters_give_valid_shares() {
        for alpha in [1e-300, 1e-3, 1e3, 1e300] {
            let values = betas(alpha, 1_000);
            assert!(values.iter().all(|x| (0.0..=1.0).contains(x)), "alpha {alpha}");
        }
        assert!(betas(1e-3, 1_000).iter().filter(|x| **x < 0.01 || **x > 0.99).count() > 950);
        assert!(betas(1e6, 1_000).iter().all(|x| (x - 0.5).abs() < 0.01));
    }

    #[test]
    fn a_mix_is_a_function_of_seed_epoch_and_first_sample() {
        let of = |seed, epoch, sample| Mix::of(seed, epoch, sample, &augment(0.2, 0.5, 1.0), IMAGE);
        assert_eq!(of(1, 2, 3), of(1, 2, 3));
        assert_ne!(of(1, 2, 3), of(1, 2, 4));
        assert_ne!(of(1, 2, 3), of(1, 3, 3));
        assert_ne!(of(1, 2, 3), of(2, 2, 3));
    }

    /// Resumed runs depend on these exact bits.
    #[test]
    fn the_draws_of_a_seed_never_change() {
        let mixup = Mix::of(1, 2, 3, &augment(0.2, 0.0, 1.0), IMAGE);
        assert_eq!(mixup, Mix::MixUp { lambda: 0.999_991_422_775_959_2 });
        let window = Window { rows: 31..39, columns: 10..20 };
        let cutmix = Mix::of(1, 2, 3, &augment(0.0, 1.0, 1.0), IMAGE);
        assert_eq!(cutmix, Mix::CutMix { lambda: 0.973_958_333_333_333_4, window });
    }

    #[test]
    fn cutmix_has_the_configured_probability_and_mixup_is_used_otherwise() {
        let counts = |augment: &Augment| {
            let mut counts = [0_u32; 3];
            for sample in 0..10_000 {
                counts[match Mix::of(1, 0, sample, augment, IMAGE) {
                    Mix::None => 0,
                    Mix::MixUp { .. } => 1,
                    Mix::CutMix { .. } => 2,
                }] += 1;
            }
            counts
        };
        assert_eq!(counts(&augment(0.0, 0.0, 1.0)), [10_000, 0, 0]);
        assert_eq!(counts(&augment(0.2, 0.0, 1.0)), [0, 10_000, 0]);
        assert_eq!(counts(&augment(0.2, 1.0, 1.0)), [0, 0, 10_000]);
        let [none, mixup, cutmix] = counts(&augment(0.2, 0.3, 1.0));
        assert!(none == 0 && mixup + cutmix == 10_000 && cutmix.abs_diff(3_000) < 200, "{cutmix}");
        let [none, mixup, _] = counts(&augment(0.0, 0.3, 1.0));
        assert!(mixup == 0 && none.abs_diff(7_000) < 200, "{none}");
    }

    /// Expected: torchvision 0.26's `CutMix.make_params`, with the same random numbers.
    #[test]
    fn a_window_equals_that_of_torchvision() {
        let torchvision = |lambda: f64, r_x: i64, r_y: i64, height: i64, width: i64| {
            let r = 0.5 * (1.0 - lambda).sqrt();
            let r_w_half = (r * width as f64) as i64;
            let r_h_half = (r * height as f64) as i64;
            let (x1, y1) = ((r_x - r_w_half).max(0), (r_y - r_h_half).max(0));
            let (x2, y2) = ((r_x + r_w_half).min(width), (r_y + r_h_half).min(height));
            let adjusted = 1.0 - ((x2 - x1) * (y2 - y1)) as f64 / (width * height) as f64;
            (adjusted, [x1, x2, y1, y2].map(|edge| edge as u32))
        };
        for sample in 0..500 {
            let mut draws = Draws::new(1, 0, sample, RandomPurpose::Mix);
            let lambda = draws.uniform();
            let mut same = draws.clone();
            let (r_x, r_y) = (same.below(64) as i64, same.below(48) as i64);
            let (adjusted, [x1, x2, y1, y2]) = torchvision(lambda, r_x, r_y, 48, 64);
            let window = Window { rows: y1..y2, columns: x1..x2 };
            assert_eq!(
                Mix::cut(lambda, IMAGE, &mut draws),
                Mix::CutMix { lambda: adjusted, window }
            );
        }
    }

    #[test]
    fn a_signals_window_is_a_segment_and_lambda_is_the_share_of_the_rest() {
        let mut kept = 0.0;
        for sample in 0..2_000 {
            let mix = Mix::of(1, 0, sample, &augment(0.0, 1.0, 1.0), SIGNAL);
            let Mix::CutMix { lambda, window } = mix else { panic!("{mix:?}") };
            assert_eq!(window.rows, 0..1);
            assert!(window.columns.start <= window.columns.end && window.columns.end <= 100);
            assert!((lambda - (1.0 - window.columns.len() as f64 / 100.0)).abs() < 1e-15);
            kept += lambda / 2_000.0;
        }
        // A segment of share s loses s / 4 at each border on average: E[s] - E[s²] / 4 = 5/12 for a
        // uniform s, and half a position each for rounding.
        assert!((kept - 7.0 / 12.0).abs() < 0.03, "mean share {kept}");
    }

    #[test]
    fn a_batch_is_mixed_by_its_first_sample_epoch_and_size() {
        let augment = augment(0.0, 1.0, 1.0);
        let mut batch = Batch::of_images(&[0; 2 * 12], 2, vec![0, 1], vec![7, 9]);
        batch.epoch = 5;
        let expected = Mix::of(1, 5, 7, &augment, Canvas::Image { height: 2, width: 2 });
        assert_eq!(Mix::of_batch(1, &batch, &augment), expected);
        batch.inputs = Inputs::Arrays { values: vec![0.0; 200], shape: vec![1, 100] };
        assert_eq!(Mix::of_batch(1, &batch, &augment), Mix::of(1, 5, 7, &augment, SIGNAL));
        assert_eq!(Mix::of_batch(1, &Batch::default(), &augment), Mix::None);
    }
}
