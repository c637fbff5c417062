//! Loss and counts of correct predictions.

use super::*;
use crate::torch::task::{Classification, Regression, Task};

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
        let loss = Classification { classes: 3, smoothing }
            .loss(&tensor, &labels)
            .unwrap()
            .double_value(&[]);
        assert!((loss - expected).abs() < 1e-12, "{loss} {expected}");
    }
}

/// Number of samples whose label is the top prediction, and among the top five; and the number of samples.
fn hits(classes: u32, logits: &Tensor, labels: &Tensor) -> (Vec<f64>, u64) {
    let task = Classification { classes, smoothing: 0.0 };
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
    let loss = |huber_delta| {
        let task = Regression { outputs: 2, huber_delta };
        let evaluation = task.evaluate(&Batch::default(), &outputs, &targets).unwrap();
        assert_eq!((evaluation.sums.others.len(), evaluation.sums.count), (0, 2));
        assert_eq!(evaluation.predictions, values(&outputs));
        evaluation.sums.loss
    };
    assert_eq!(loss(None), (1.0 + 9.0 + 0.0 + 0.25) / 2.0);
    // Beyond 2 the loss is the line 2 (|x| - 1).
    assert_eq!(loss(Some(2.0)), (0.5 + 4.0 + 0.0 + 0.125) / 2.0);
}
