//! How well each class is recognized, from the outputs for every sample. Pure functions.

use serde::Serialize;

use crate::predictions::{Prediction, prediction};

/// Number of intervals of the probability in the calibration error.
const BINS: usize = 15;

/// Counts and scores that need all samples of a classification.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct ByClass {
    /// The classes, in order.
    pub(super) classes: Vec<ClassScores>,
    /// `confusion[label][prediction]`: number of samples.
    pub(super) confusion: Vec<Vec<u64>>,
    /// Mean of the classes' F1 scores, without those that have neither samples nor predictions.
    pub(super) macro_f1: f64,
    /// Expected calibration error: the mean difference between probability and share of right predictions, over 15 equal
    /// intervals of the probability, weighted by their samples (Guo et al. 2017, arXiv 1706.04599, equation 3).
    pub(super) calibration_error: f64,
    /// Area under the ROC curve of class 1, with two classes: the probability that it is more probable for a sample of class 1
    /// than for one of class 0, where equal ones count half. `null` if a class has no sample.
    pub(super) roc_auc: Option<f64>,
}

/// Scores of a class, 0 where the divisor would be 0.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct ClassScores {
    /// Samples of this class.
    pub(super) samples: u64,
    /// Share of the predictions of this class that are right.
    pub(super) precision: f64,
    /// Share of its samples that are predicted as it.
    pub(super) recall: f64,
    /// Harmonic mean of both.
    pub(super) f1: f64,
}

/// Collects the predictions of a classification.
#[derive(Debug)]
pub(super) struct ClassCounter {
    confusion: Vec<Vec<u64>>,
    /// Samples, sum of the probabilities and right predictions in each interval of the probability.
    bins: [(u64, f64, u64); BINS],
    /// Probability of class 1 and whether that is the label, with two classes.
    binary: Vec<(f32, bool)>,
}

/// Most classes whose confusion is shown as a table.
const MAX_TABLE_CLASSES: usize = 20;

impl ByClass {
    /// For people.
    pub(super) fn text(&self) -> String {
        let mut lines = vec!["CLASS  SAMPLES  PRECISION  RECALL      F1".to_owned()];
        for (class, scores) in self.classes.iter().enumerate() {
            let ClassScores { samples, precision, recall, f1 } = scores;
            lines.push(format!("{class:>5}  {samples:>7}  {precision:>9.4}  {recall:.4}  {f1:.4}"));
        }
        let auc = self.roc_auc.map(|auc| format!(", ROC-AUC {auc:.4}")).unwrap_or_default();
        lines.push(String::new());
        lines.push(format!(
            "macro F1 {:.4}, calibration error {:.4}{auc}",
            self.macro_f1, self.calibration_error
        ));
        if self.classes.len() <= MAX_TABLE_CLASSES {
            lines.push(String::new());
            lines.push("samples by label (rows) and prediction (columns):".to_owned());
            let row = |name: &str, cells: &mut dyn Iterator<Item = String>| {
                cells.fold(format!("{name:>5}"), |line, cell| line + &format!(" {cell:>6}"))
            };
            lines.push(row("", &mut (0..self.classes.len()).map(|class| class.to_string())));
            for (class, counts) in self.confusion.iter().enumerate() {
                lines.push(row(&class.to_string(), &mut counts.iter().map(u64::to_string)));
            }
        }
        lines.join("\n")
    }
}

impl ClassCounter {
    pub(super) fn new(classes: usize) -> Self {
        Self {
            confusion: vec![vec![0; classes]; classes],
            bins: [(0, 0.0, 0); BINS],
            binary: Vec::new(),
        }
    }

    /// Adds a sample.
    pub(super) fn add(&mut self, label: usize, probabilities: &[f32]) {
        let Prediction { class, probability } = prediction(probabilities);
        self.confusion[label][class] += 1;
        // The cast saturates, so a probability that is not a number is in the first interval.
        let bin = ((probability * BINS as f32) as usize).min(BINS - 1);
        let (samples, sum, right) = &mut self.bins[bin];
        *samples += 1;
        *sum += f64::from(probability);
        *right += u64::from(label == class);
        if let [_, one] = probabilities {
            self.binary.push((*one, label == 1));
        }
    }

    pub(super) fn finish(mut self) -> ByClass {
        let number = |count: u64| count as f64;
        let share =
            |part: u64, whole: u64| if whole == 0 { 0.0 } else { number(part) / number(whole) };
        let scores = |class: usize| {
            let samples: u64 = self.confusion[class].iter().sum();
            let predicted: u64 = self.confusion.iter().map(|row| row[class]).sum();
            let right = self.confusion[class][class];
            let (precision, recall) = (share(right, predicted), share(right, samples));
            let f1 = share(2 * right, samples + predicted);
            (ClassScores { samples, precision, recall, f1 }, samples + predicted > 0)
        };
        let all: Vec<(ClassScores, bool)> = (0..self.confusion.len()).map(scores).collect();
        let seen: Vec<f64> =
            all.iter().filter(|(_, seen)| *seen).map(|(scores, _)| scores.f1).collect();
        let macro_f1 = seen.iter().sum::<f64>() / seen.len().max(1) as f64;
        let samples: u64 = self.bins.iter().map(|(samples, _, _)| samples).sum();
        let gaps = self.bins.iter().map(|(_, sum, right)| (sum - number(*right)).abs());
        let calibration_error = gaps.sum::<f64>() / samples.max(1) as f64;
        let roc_auc = area(&mut self.binary);
        let classes = all.into_iter().map(|(scores, _)| scores).collect();
        ByClass { classes, confusion: self.confusion, macro_f1, calibration_error, roc_auc }
    }
}

/// The area under the ROC curve, by ranks (Mann–Whitney).
fn area(scores: &mut [(f32, bool)]) -> Option<f64> {
    scores.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    let positives = scores.iter().filter(|(_, is_positive)| *is_positive).count() as f64;
    let negatives = scores.len() as f64 - positives;
    if positives == 0.0 || negatives == 0.0 {
        return None;
    }
    // The mean rank of equal scores, counted from 1.
    let (mut start, mut ranks) = (0, 0.0);
    for equal in scores.chunk_by(|(one, _), (other, _)| one == other) {
        let rank = start as f64 + (equal.len() + 1) as f64 / 2.0;
        ranks += rank * equal.iter().filter(|(_, is_positive)| *is_positive).count() as f64;
        start += equal.len();
    }
    Some((ranks - positives * (positives + 1.0) / 2.0) / (positives * negatives))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(classes: usize, samples: &[(usize, &[f32])]) -> ByClass {
        let mut counter = ClassCounter::new(classes);
        samples.iter().for_each(|(label, probabilities)| counter.add(*label, probabilities));
        counter.finish()
    }

    #[test]
    fn scores_follow_from_the_confusion_of_the_classes() {
        let samples: [(usize, &[f32]); 5] = [
            (0, &[0.8, 0.1, 0.1]),
            (0, &[0.2, 0.7, 0.1]),
            (1, &[0.1, 0.9, 0.0]),
            (1, &[0.3, 0.6, 0.1]),
            (1, &[0.6, 0.4, 0.0]),
        ];
        let found = counted(3, &samples);
        assert_eq!(found.confusion, [[1, 1, 0], [1, 2, 0], [0, 0, 0]]);
        let scores = |class: usize| {
            let ClassScores { samples, precision, recall, f1 } = found.classes[class];
            (samples, precision, recall, f1)
        };
        assert_eq!(scores(0), (2, 0.5, 0.5, 0.5));
        assert_eq!(scores(1), (3, 2.0 / 3.0, 2.0 / 3.0, 2.0 / 3.0));
        assert_eq!(scores(2), (0, 0.0, 0.0, 0.0));
        assert!((found.macro_f1 - (0.5 + 2.0 / 3.0) / 2.0).abs() < 1e-12, "class 2 does not count");
        assert_eq!(found.roc_auc, None);
    }

    #[test]
    fn calibration_is_the_gap_between_probability_and_share_of_right_predictions() {
        // Two samples at 0.9, of which one is right, and one right one at 0.5.
        let samples: [(usize, &[f32]); 3] = [(0, &[0.9, 0.1]), (1, &[0.9, 0.1]), (0, &[0.5, 0.5])];
        let expected = ((2.0 * 0.9 - 1.0) + (1.0 - 0.5)) / 3.0;
        assert!((counted(2, &samples).calibration_error - expected).abs() < 1e-6);
    }

    #[test]
    fn the_area_counts_pairs_in_the_right_order() {
        let scores = |ones: &[f32], zeros: &[f32]| {
            let both =
                ones.iter().map(|score| (1, *score)).chain(zeros.iter().map(|score| (0, *score)));
            let samples: Vec<(usize, [f32; 2])> =
                both.map(|(label, one)| (label, [1.0 - one, one])).collect();
            let samples: Vec<(usize, &[f32])> =
                samples.iter().map(|(label, both)| (*label, &both[..])).collect();
            counted(2, &samples).roc_auc
        };
        assert_eq!(scores(&[0.9, 0.8], &[0.1, 0.2]), Some(1.0));
        assert_eq!(scores(&[0.1], &[0.9, 0.5]), Some(0.0));
        // 0.5 against 0.5 is half a pair, against 0.1 a whole one; 0.3 is above 0.1 only.
        assert_eq!(scores(&[0.5, 0.3], &[0.5, 0.1]), Some(2.5 / 4.0));
        assert_eq!(scores(&[0.5], &[]), None);
    }
}
