//! Loss and counts of correct predictions.

use tch::Kind;

use super::*;
use crate::torch::task::{Classification, Regression, Task, ValueLoss};

#[test]
fn smoothed_loss_is_the_cross_entropy_with_the_smoothed_target() {
    let logits = [[0.5_f64, -1.0, 2.0], [3.0, 0.0, -2.0]];
    let labels = [0_usize, 2];
    for smoothing in [0.0, 0.1, 0.9] {
        let mut expected = 0.0;
        for (logits, label) in logits.iter().zip(labels) {
            let log_sum = logits.iter().map(|x| x.exp()).sum::<f64>().ln();
            for (class, logit) in logits.iter().enumerate() {
                let hit = f64::from(u8::from(class == label));
                let target = (1.0 - smoothing) * hit + smoothing / 3.0;
                expected -= target * (logit - log_sum);
            }
        }
        let tensor = Tensor::from_slice(&logits.concat()).view([2, 3]);
        let labels = Tensor::from_slice(&labels.map(|label| label as i64));
        let loss = classification(3, smoothing).loss(&tensor, &labels).unwrap().double_value(&[]);
        assert!((loss - expected).abs() < 1e-12, "{loss} {expected}");
    }
}

/// Number of samples whose label is the top prediction, and among the top five; and the number of samples.
fn hits(classes: u32, logits: &Tensor, labels: &Tensor) -> (Vec<f64>, u64) {
    let task = classification(classes, 0.0);
    let sums = task.evaluate(&Batch::default(), logits, labels).unwrap().sums;
    (sums.others, sums.count)
}

#[test]
fn correct_predictions_are_counted_up_to_the_fifth() {
    // Class c is prediction number c + 1.
    let logits = Tensor::from_slice(&[6.0_f32, 5.0, 4.0, 3.0, 2.0, 1.0]).repeat([4, 1]);
    let labels = Tensor::from_slice(&[0_i64, 1, 4, 5]);
    let sums = hits(6, &logits, &labels);
    assert_eq!(sums, ([1.0, 3.0].to_vec(), 4));
}

#[test]
fn with_fewer_than_five_classes_every_sample_is_among_the_top_five() {
    let logits = Tensor::from_slice(&[2.0_f32, 1.0, 0.0]).repeat([3, 1]);
    let labels = Tensor::from_slice(&[0_i64, 1, 2]);
    let sums = hits(3, &logits, &labels);
    assert_eq!(sums, ([1.0, 3.0].to_vec(), 3));
}

#[test]
fn regression_losses_are_torchs_means_over_the_outputs() {
    let outputs = Tensor::from_slice(&[1.0_f32, 5.0, -1.0, 0.5]).view([2, 2]);
    let targets = Tensor::from_slice(&[0.0_f32, 2.0, -1.0, 0.0]).view([2, 2]);
    let loss = |loss| {
        let task = Regression { outputs: 2, loss };
        let evaluation = task.evaluate(&Batch::default(), &outputs, &targets).unwrap();
        assert_eq!((evaluation.sums.others.len(), evaluation.sums.count), (0, 2));
        assert_eq!(evaluation.predictions, values(&outputs));
        evaluation.sums.loss
    };
    assert_eq!(loss(ValueLoss::Squared), (1.0 + 9.0 + 0.0 + 0.25) / 2.0);
    // Beyond 2 the loss is the line 2 (|x| - 1).
    assert_eq!(loss(ValueLoss::Huber(2.0)), (0.5 + 4.0 + 0.0 + 0.125) / 2.0);
    // All predictions are too high, or right.
    assert_eq!(loss(ValueLoss::Quantile(0.75)), 0.25 * (1.0 + 3.0 + 0.0 + 0.5) / 2.0);
}

#[test]
fn the_best_constant_for_a_quantile_is_that_quantile_of_the_targets() {
    let targets = Tensor::arange(10, (Kind::Float, Device::Cpu)).view([10, 1]);
    let task = Regression { outputs: 1, loss: ValueLoss::Quantile(0.75) };
    let loss = |guess: f64| {
        let outputs = Tensor::full([10, 1], guess, (Kind::Float, Device::Cpu));
        task.loss(&outputs, &targets).unwrap().double_value(&[])
    };
    let best =
        (0..=90).min_by(|a, b| loss(f64::from(*a) / 10.0).total_cmp(&loss(f64::from(*b) / 10.0)));
    assert_eq!(best, Some(70));
}

#[test]
fn class_weights_multiply_the_losses_of_their_samples() {
    let logits = Tensor::from_slice(&[0.5_f64, -1.0, 2.0, 3.0, 0.0, -2.0]).view([2, 3]);
    let one = |sample: i64, label: i64| {
        let labels = Tensor::from_slice(&[label]);
        classification(3, 0.0)
            .loss(&logits.narrow(0, sample, 1), &labels)
            .unwrap()
            .double_value(&[])
    };
    let weights = Some(Tensor::from_slice(&[2.0_f32, 1.0, 0.5]));
    let weighted = Classification { weights, ..classification(3, 0.0) };
    let labels = Tensor::from_slice(&[0_i64, 2]);
    let found = weighted.loss(&logits, &labels).unwrap().double_value(&[]);
    assert!((found - (2.0 * one(0, 0) + 0.5 * one(1, 2))).abs() < 1e-12);
}

#[test]
fn the_binary_loss_compares_every_class_with_its_smoothed_target() {
    let logits = [[0.5_f64, -1.0, 2.0], [3.0, 0.0, -2.0]];
    let labels = [0_usize, 2];
    for smoothing in [0.0, 0.1] {
        let mut expected = 0.0;
        for (logits, label) in logits.iter().zip(labels) {
            for (class, logit) in logits.iter().enumerate() {
                let hit = f64::from(u8::from(class == label));
                let target = (1.0 - smoothing) * hit + smoothing / 3.0;
                let probability = 1.0 / (1.0 + (-logit).exp());
                let right = target * probability.ln() + (1.0 - target) * (1.0 - probability).ln();
                expected -= right / 3.0;
            }
        }
        let tensor = Tensor::from_slice(&logits.concat()).view([2, 3]);
        let labels = Tensor::from_slice(&labels.map(|label| label as i64));
        let binary = Classification { is_binary: true, ..classification(3, smoothing) };
        let loss = binary.loss(&tensor, &labels).unwrap().double_value(&[]);
        assert!((loss - expected).abs() < 1e-12, "{loss} {expected}");
    }
}
