//! Divergence of training: how it is detected, and its diagnosis for people.
//!
//! All ranks get the same sums, so all detect a divergence at the same update, before the update changes the weights.
//! The coordinator's `engine` (in `crates/job`) decides what follows (to which checkpoint to go back, how often).
//!
//! The types here that serde writes are in journals and checkpoints: a new field needs `#[serde(default)]`.

use serde::{Deserialize, Serialize};

use crate::{
    Epoch, Step,
    progress::{Accuracy, Progress, better},
    spec::{Compute, Guard, GuardRemedy, JobSpec},
    task::{self, Metric, MetricDirection, Reduction, number},
};

/// A batch, identified by the cursor at which it begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchMark {
    /// Epoch of the batch.
    pub epoch: Epoch,
    /// Samples of the epoch before the batch.
    pub cursor: u64,
}

/// Statistics of the training loss so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossWatch {
    /// Number of updates observed.
    pub updates: u64,
    /// Mean loss over the last window: a plain mean at first, then an exponential one.
    pub mean: f64,
    /// Mean loss of the first window.
    pub first: f64,
    /// Lowest mean since the first window.
    pub lowest: f64,
    /// Consecutive updates skipped because fp16 overflowed.
    pub overflows: u32,
}

/// Maximum number of consecutive halvings of the loss scale (from 2¹⁶ to 2⁻⁸); healthy training never needs as
/// many.
const MAX_CONSECUTIVE_OVERFLOWS: u32 = 24;

/// Kind of a divergence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Divergence {
    /// The loss is infinite or NaN.
    LossNotFinite,
    /// The loss is finite, but its gradient is not.
    GradientNotFinite,
    /// The mean loss rose above its bound.
    LossRose {
        /// Mean loss over the last updates.
        mean: f64,
        /// Highest mean loss allowed.
        bound: f64,
    },
    /// An evaluation is far worse than the best one.
    AccuracyCollapsed {
        /// Score of the evaluation.
        score: f64,
        /// Best score so far.
        best: f64,
    },
}

/// The update at which training diverged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// Kind of the divergence.
    pub divergence: Divergence,
    /// Updates made before the diverged one.
    pub step: Step,
    /// Batch of the update.
    pub batch: BatchMark,
    /// Learning rate of the update.
    pub lr: f64,
    /// Mean loss of the batch; `None` if it is not finite.
    pub loss: Option<f64>,
    /// L2 norm of the whole gradient; `None` if it is not finite or was not measured.
    pub gradient_norm: Option<f64>,
    /// Positions in the data set: samples of the micro-batches whose loss is not finite, else the first samples of the
    /// batch.
    pub samples: Vec<u64>,
    /// After a collapse: step of the evaluation before it, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluated: Option<Step>,
}

/// Maximum number of samples named in a diagnosis.
pub const MAX_NAMED_SAMPLES: usize = 32;

impl LossWatch {
    /// Checks and adds the loss and the gradient norm of the next update, before it is made.
    ///
    /// With fp16, a gradient may overflow occasionally: then the update is skipped and the loss scale halved.
    ///
    /// # Errors
    /// The divergence; `self` is then unchanged.
    pub fn observe(&mut self, loss: f64, norm: f64, spec: &JobSpec) -> Result<(), Divergence> {
        let guard = &spec.guard;
        if !loss.is_finite() {
            return Err(Divergence::LossNotFinite);
        }
        let overflows = if norm.is_finite() { 0 } else { self.overflows + 1 };
        let limit =
            if spec.precision.compute == Compute::Fp16 { MAX_CONSECUTIVE_OVERFLOWS } else { 0 };
        if overflows > limit {
            return Err(Divergence::GradientNotFinite);
        }
        let mut next = *self;
        next.overflows = overflows;
        next.updates += 1;
        let window = u64::from(guard.window);
        next.mean += (loss - next.mean) / next.updates.min(window) as f64;
        if next.updates <= window {
            next.first = next.mean;
            next.lowest = next.mean;
        } else {
            let bound = next.lowest + guard.loss_rise * next.first.abs();
            if guard.enabled && next.mean > bound {
                return Err(Divergence::LossRose { mean: next.mean, bound });
            }
            next.lowest = next.lowest.min(next.mean);
        }
        *self = next;
        Ok(())
    }
}

/// Lowest best correlation of which a collapse is possible. Before a model has learned anything, a lower one may be chance.
const LEAST_CORRELATION: f64 = 0.2;

/// The divergence, if the next evaluation, of the raw weights and of the averaged ones, has collapsed relative to those in
/// `progress`. As for the best result, the better of the two counts.
#[must_use]
pub fn collapse(
    progress: &Progress,
    raw: &Accuracy,
    ema: Option<&Accuracy>,
    spec: &JobSpec,
) -> Option<Divergence> {
    let (name, score) = better(raw, ema).score()?;
    let best = progress.best.as_ref()?.1.get(name)?;
    let metric = task::metrics(spec).into_iter().find(|metric| metric.name == name)?;
    collapse_of(&metric, (progress.first_score, best), score, &spec.guard)
}

/// The divergence, if a score has collapsed relative to the first and the best one before it. Shares of negative numbers,
/// such as log-likelihoods, mean nothing, and a metric of a few texts may fall without a cause.
fn collapse_of(
    metric: &Metric,
    (first, best): (Option<f64>, f64),
    score: f64,
    guard: &Guard,
) -> Option<Divergence> {
    let is_correlation = matches!(&*metric.name, "spearman" | "pearson");
    let may_collapse = match metric.direction {
        MetricDirection::Higher => best > 0.0 && (!is_correlation || best >= LEAST_CORRELATION),
        // Any score is infinitely worse than 0: only one that is worse than the first says something.
        MetricDirection::Lower => best > 0.0 || best == 0.0 && first.is_some(),
    };
    let is_far_worse = match metric.direction {
        MetricDirection::Higher => score < best * guard.accuracy_collapse,
        // Close to 0, a few samples multiply the score. It is then still better than at the beginning.
        MetricDirection::Lower => {
            best < score * guard.accuracy_collapse && first.is_none_or(|first| score > first)
        }
    };
    let collapsed = may_collapse && is_far_worse;
    let is_steady = metric.reduction != Reduction::Texts;
    (guard.enabled && is_steady && collapsed)
        .then_some(Divergence::AccuracyCollapsed { score, best })
}

impl std::fmt::Display for Divergence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::LossNotFinite => f.write_str("the loss is not a finite number"),
            Self::GradientNotFinite => f.write_str("the gradient is not finite"),
            Self::LossRose { mean, bound } => {
                write!(f, "the mean loss rose to {mean:.4}, above its bound of {bound:.4}")
            }
            // For metrics such as a loss, where lower values are better.
            Self::AccuracyCollapsed { score, best } if score > best => {
                write!(
                    f,
                    "the metric of evaluations rose to {} from {}",
                    number(*score),
                    number(*best)
                )
            }
            Self::AccuracyCollapsed { score, best } if *best > 1.0 || *score < 0.0 => {
                write!(
                    f,
                    "the metric of evaluations fell to {} from {}",
                    number(*score),
                    number(*best)
                )
            }
            Self::AccuracyCollapsed { score, best } => {
                write!(f, "accuracy fell to {:.2} % from {:.2} %", score * 100.0, best * 100.0)
            }
        }
    }
}

impl std::fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { divergence, step, batch, lr, loss, gradient_norm, samples, evaluated: _ } = self;
        let BatchMark { epoch, cursor } = batch;
        write!(
            f,
            "{divergence} at step {step} (epoch {epoch}, sample {cursor} of it), lr {lr:.3e}"
        )?;
        if let Some(loss) = loss {
            write!(f, ", loss {loss:.4}")?;
        }
        if let Some(norm) = gradient_norm {
            write!(f, ", gradient norm {norm:.3e}")?;
        }
        let named: Vec<String> = samples.iter().take(8).map(u64::to_string).collect();
        if !named.is_empty() {
            let more = if samples.len() > named.len() { ", ..." } else { "" };
            write!(f, ", samples {}{more}", named.join(", "))?;
        }
        Ok(())
    }
}

impl Diagnosis {
    /// The first step whose state may be damaged, up to that in which training diverged. A mean loss rises over a window,
    /// and a collapse happens between two evaluations. While fp16 overflows, updates are skipped: all these states have the
    /// same weights.
    #[must_use]
    pub fn suspect_from(&self, spec: &JobSpec) -> Step {
        let guard = &spec.guard;
        match self.divergence {
            Divergence::AccuracyCollapsed { .. } => {
                self.evaluated.map_or(self.step, |good| self.step.min(good.next()))
            }
            // Only the two batches that are skipped are to blame.
            _ if guard.remedy == GuardRemedy::SkipBatch => self.step,
            Divergence::LossRose { .. } => {
                Step((self.step.0 + 1).saturating_sub(guard.window.into()))
            }
            Divergence::GradientNotFinite if spec.precision.compute == Compute::Fp16 => {
                Step(self.step.0.saturating_sub(MAX_CONSECUTIVE_OVERFLOWS.into()))
            }
            Divergence::LossNotFinite | Divergence::GradientNotFinite => self.step,
        }
    }

    /// Suggestions for the user, the most promising first.
    #[must_use]
    pub fn advice(&self, spec: &JobSpec) -> Vec<String> {
        let mut advice = Vec::new();
        let early = self.step.0 < 500;
        match self.divergence {
            Divergence::LossNotFinite if !self.samples.is_empty() => advice.push(format!(
                "inspect the samples named above with `baton data inspect {}`; if they are bad, set \
                 guard.remedy = \"skip_batch\"",
                spec.data.train
            )),
            Divergence::AccuracyCollapsed { .. } => advice.push(
                "compare training and validation data and data.mean and data.std of both".to_owned(),
            ),
            _ => {}
        }
        if spec.precision.compute == Compute::Fp16 {
            advice.push("set precision.compute = \"bf16\", which has the range of fp32".to_owned());
        }
        if spec.train.clip_grad_norm.is_none() {
            advice.push("set train.clip_grad_norm = 1.0".to_owned());
        }
        advice.push(if early {
            "lengthen the warm-up, or lower the learning rate in schedule".to_owned()
        } else {
            format!("lower the learning rate in schedule (it was {:.3e})", self.lr)
        });
        advice
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{kit, progress::Extent};

    fn recipe(compute: &str) -> JobSpec {
        kit::recipe(&["guard.window=4"], &[&format!("precision.compute={compute}")])
    }

    fn observed(losses: impl IntoIterator<Item = f64>) -> (LossWatch, Option<(usize, Divergence)>) {
        let spec = recipe("fp32");
        let mut watch = LossWatch::default();
        for (index, loss) in losses.into_iter().enumerate() {
            if let Err(divergence) = watch.observe(loss, 1.0, &spec) {
                return (watch, Some((index, divergence)));
            }
        }
        (watch, None)
    }

    #[test]
    fn a_falling_loss_with_noise_is_not_a_divergence() {
        let losses =
            (0..200).map(|i| 7.0 / (1.0 + i as f64 / 20.0) + if i % 7 == 0 { 1.5 } else { 0.0 });
        assert_eq!(observed(losses).1, None);
    }

    #[test]
    fn a_small_loss_may_double() {
        let losses =
            [2.3, 2.3, 2.3, 2.3].into_iter().chain((0..50).map(|_| 0.02)).chain([0.06; 20]);
        assert_eq!(observed(losses).1, None);
    }

    #[test]
    fn a_loss_that_returns_to_its_start_is_detected_within_a_window() {
        let losses = [4.0; 4].into_iter().chain([1.0; 40]).chain([4.5; 8]);
        let (_, found) = observed(losses);
        let Some((index, Divergence::LossRose { mean, bound })) = found else {
            panic!("{found:?}")
        };
        assert!((44..48).contains(&index) && mean > bound, "{found:?}");
        assert!((bound - 3.0).abs() < 0.01, "{bound}");
    }

    #[test]
    fn a_loss_that_is_not_finite_is_detected_at_once_and_not_added() {
        let (watch, found) = observed([1.0, f64::NAN]);
        assert_eq!(found, Some((1, Divergence::LossNotFinite)));
        assert_eq!((watch.updates, watch.mean), (1, 1.0));
    }

    #[test]
    fn an_overflow_is_tolerated_only_with_fp16_and_only_for_a_limited_time() {
        let overflow = Err(Divergence::GradientNotFinite);
        for compute in ["fp32", "bf16"] {
            let mut watch = LossWatch::default();
            assert_eq!(watch.observe(1.0, f64::INFINITY, &recipe(compute)), overflow);
        }
        let (mut watch, spec) = (LossWatch::default(), recipe("fp16"));
        for _ in 0..3 {
            for _ in 0..MAX_CONSECUTIVE_OVERFLOWS {
                assert_eq!(watch.observe(1.0, f64::INFINITY, &spec), Ok(()));
            }
            assert_eq!(watch.observe(1.0, 2.0, &spec), Ok(()));
        }
        for _ in 0..MAX_CONSECUTIVE_OVERFLOWS {
            watch.observe(1.0, f64::NAN, &spec).unwrap();
        }
        assert_eq!(watch.observe(1.0, f64::NAN, &spec), overflow);
    }

    #[test]
    fn only_a_score_far_worse_than_the_best_is_a_collapse() {
        let guard = Guard::default();
        let collapse =
            |name, best, score| collapse_of(&task::find(name), (None, best), score, &guard);
        let top1 = |best, score| collapse("top1", best, score);
        assert_eq!(top1(0.8, 0.3), None);
        assert!(top1(0.8, 0.1).is_some());

        let loss = |best, score| collapse("loss", best, score);
        assert_eq!(loss(0.5, 1.9), None);
        assert_eq!(loss(0.5, 0.1), None);
        let collapsed = loss(0.5, 2.1).unwrap();
        assert!(collapsed.to_string().contains("rose to 2.1000 from 0.5000"), "{collapsed}");

        let score = |best, score| collapse("score", best, score);
        assert!(score(9.0, 1.0).unwrap().to_string().contains("fell to 1.0000 from 9.0000"));
        // A log-likelihood and a negative log-likelihood that get better, and worse.
        assert_eq!((score(-4.0, -3.0), score(-4.0, -5.0)), (None, None));
        assert_eq!((loss(-4.0, -5.0), loss(-4.0, -3.0)), (None, None));
    }

    #[test]
    fn a_score_at_the_bound_is_not_a_collapse_and_a_guard_that_is_off_finds_none() {
        let guard = Guard::default();
        let top1 = |score, guard| collapse_of(&task::find("top1"), (None, 0.8), score, guard);
        let loss = |score, guard| collapse_of(&task::find("loss"), (None, 0.5), score, guard);
        assert_eq!((top1(0.2, &guard), loss(2.0, &guard)), (None, None), "the bound itself");
        let off = Guard { enabled: false, ..Guard::default() };
        assert_eq!((top1(0.0, &off), loss(9.0, &off)), (None, None));
        // Every score is at least a fraction of 0 of the best.
        let never = Guard { accuracy_collapse: 0.0, ..Guard::default() };
        assert_eq!(top1(0.0, &never), None);
        assert_eq!(collapse_of(&task::find(task::BLEU), (None, 20.0), 0.0, &guard), None);
    }

    #[test]
    fn a_low_error_that_a_few_samples_multiply_is_not_a_collapse() {
        let guard = Guard::default();
        let error = |first, best, score| {
            collapse_of(&task::find("top1_error"), (first, best), score, &guard)
        };
        assert_eq!(error(Some(0.2), 0.0, 1.0 / 360.0), None);
        assert!(error(Some(0.2), 0.0, 0.9).is_some());
        assert_eq!(error(Some(0.2), 1.0 / 360.0, 5.0 / 360.0), None);
        assert_eq!(error(Some(0.2), 1.0 / 360.0, 0.2), None, "as in the first evaluation");
        assert!(error(Some(0.2), 1.0 / 360.0, 0.9).is_some());
        // A run of an older version, whose first evaluation is not known.
        assert_eq!(error(None, 0.0, 0.9), None);
        assert!(error(None, 0.1, 0.9).is_some());
    }

    #[test]
    fn a_correlation_that_may_be_chance_cannot_collapse() {
        let guard = Guard::default();
        for name in ["spearman", "pearson"] {
            let collapse =
                |best, score| collapse_of(&task::find(name), (Some(0.02), best), score, &guard);
            assert_eq!((collapse(0.02, -0.01), collapse(0.19, -0.3)), (None, None), "{name}");
            assert!(collapse(0.2, -0.01).is_some() && collapse(0.9, 0.2).is_some(), "{name}");
        }
        // Other metrics have no such limit.
        assert!(collapse_of(&task::find("top1"), (None, 0.1), 0.01, &guard).is_some());
    }

    #[test]
    fn the_better_of_raw_and_averaged_weights_is_compared_with_the_best() {
        let spec = kit::recipe(&[], &[]);
        let top1 = |top1| Accuracy::new(360, [("top1", top1), ("loss", 1.0)]);
        let mut progress = Progress::default();
        let collapsed = |progress: &Progress, raw: &Accuracy, ema: Option<&Accuracy>| {
            collapse(progress, raw, ema, &spec)
        };
        assert_eq!(collapsed(&progress, &top1(0.0), None), None, "the first evaluation");
        // The best one is that of the averaged weights.
        progress.record_evaluation(top1(0.1), Some(top1(0.8)), Extent::Full);
        assert_eq!(collapsed(&progress, &top1(0.1), Some(&top1(0.7))), None);
        assert_eq!(collapsed(&progress, &top1(0.7), Some(&top1(0.1))), None);
        let expected = Divergence::AccuracyCollapsed { score: 0.1, best: 0.8 };
        assert_eq!(collapsed(&progress, &top1(0.0), Some(&top1(0.1))), Some(expected));
        assert_eq!(collapsed(&progress, &top1(0.1), None), Some(expected));
    }

    #[test]
    fn a_loss_that_stays_zero_is_not_a_divergence() {
        assert_eq!(observed([0.0; 20]).1, None);
    }

    #[test]
    fn without_the_guard_only_numbers_that_are_not_finite_are_detected() {
        let spec = kit::recipe(&["guard.window=4"], &["guard.enabled=false"]);
        let mut watch = LossWatch::default();
        for loss in [1.0, 1.0, 1.0, 1.0, 1e6, 1e9] {
            assert_eq!(watch.observe(loss, 1.0, &spec), Ok(()));
        }
        assert_eq!(watch.observe(f64::INFINITY, 1.0, &spec), Err(Divergence::LossNotFinite));
    }

    #[test]
    fn the_mean_is_plain_in_the_first_window_and_exponential_after_it() {
        let (watch, _) = observed([4.0, 2.0, 3.0, 3.0]);
        assert_eq!((watch.updates, watch.mean, watch.first, watch.lowest), (4, 3.0, 3.0, 3.0));
        let (watch, _) = observed([4.0, 2.0, 3.0, 3.0, 1.0, 4.0]);
        assert_eq!((watch.updates, watch.mean), (6, 2.875), "a quarter of each new loss");
        assert_eq!((watch.first, watch.lowest), (3.0, 2.5));
    }

    #[test]
    fn the_advice_fits_the_divergence_the_recipe_and_the_step() {
        let advice = |divergence, step, samples: &[u64], changes: &[&str]| {
            let diagnosis = Diagnosis {
                divergence,
                step: Step(step),
                batch: BatchMark::default(),
                lr: 0.1,
                loss: None,
                gradient_norm: None,
                samples: samples.to_vec(),
                evaluated: None,
            };
            diagnosis.advice(&kit::recipe(&[], changes))
        };
        let inspect = "inspect the samples named above with `baton data inspect train.beton`; if they are bad, set \
                       guard.remedy = \"skip_batch\"";
        let compare = "compare training and validation data and data.mean and data.std of both";
        let bf16 = "set precision.compute = \"bf16\", which has the range of fp32";
        let clip = "set train.clip_grad_norm = 1.0";
        let warm_up = "lengthen the warm-up, or lower the learning rate in schedule";
        let lower = "lower the learning rate in schedule (it was 1.000e-1)";

        let collapsed = Divergence::AccuracyCollapsed { score: 0.1, best: 0.8 };
        let clipped = "train.clip_grad_norm=0.5";
        assert_eq!(
            advice(Divergence::LossNotFinite, 499, &[7], &["precision.compute=fp16"]),
            [inspect, bf16, clip, warm_up]
        );
        assert_eq!(advice(Divergence::LossNotFinite, 500, &[], &[clipped]), [lower]);
        assert_eq!(advice(collapsed, 501, &[7], &[clipped]), [compare, lower]);
        assert_eq!(advice(Divergence::GradientNotFinite, 0, &[7], &[clipped]), [warm_up]);
    }
}
