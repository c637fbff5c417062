//! Loss and counts of right guesses.

use baton_recipe::spec::{Loss, LossKind};

use super::*;
use crate::torch::objective::Objective;

fn objective(label_smoothing: f64, outputs: u32) -> Objective {
    Objective { loss: Loss { label_smoothing, ..Loss::default() }, outputs }
}

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
        let loss = objective(smoothing, 3).loss(&tensor, &labels).unwrap().double_value(&[]);
        assert!((loss - expected).abs() < 1e-12, "{loss} {expected}");
    }
}

#[test]
fn guesses_count_up_to_the_fifth() {
    // Class c is guess number c + 1.
    let logits = Tensor::from_slice(&[6.0_f32, 5.0, 4.0, 3.0, 2.0, 1.0]).repeat([4, 1]);
    let labels = Tensor::from_slice(&[0_i64, 1, 4, 5]);
    let sums = objective(0.0, 6).sums(&Tensor::from(1.5), &logits, &labels).unwrap();
    assert_eq!(sums, Sums { loss: 1.5, top1: 1, top5: 3, count: 4 });
}

#[test]
fn with_fewer_than_five_classes_every_sample_is_among_the_first_five() {
    let logits = Tensor::from_slice(&[2.0_f32, 1.0, 0.0]).repeat([3, 1]);
    let labels = Tensor::from_slice(&[0_i64, 1, 2]);
    let sums = objective(0.0, 3).sums(&Tensor::from(0.0), &logits, &labels).unwrap();
    assert_eq!((sums.top1, sums.top5), (1, 3));
}

#[test]
fn regression_losses_are_torchs_means_over_the_outputs() {
    let outputs = Tensor::from_slice(&[1.0_f32, 5.0, -1.0, 0.5]).view([2, 2]);
    let targets = Tensor::from_slice(&[0.0_f32, 2.0, -1.0, 0.0]).view([2, 2]);
    let loss = |kind| {
        let loss = Loss { kind, huber_delta: 2.0, ..Loss::default() };
        let objective = Objective { loss, outputs: 2 };
        let loss = objective.loss(&outputs, &targets).unwrap();
        let sums = objective.sums(&loss, &outputs, &targets).unwrap();
        assert_eq!((sums.top1, sums.top5, sums.count), (0, 0, 2));
        sums.loss
    };
    assert_eq!(loss(LossKind::Mse), (1.0 + 9.0 + 0.0 + 0.25) / 2.0);
    // Beyond 2 the line 2 (|x| - 1).
    assert_eq!(loss(LossKind::Huber), (0.5 + 4.0 + 0.0 + 0.125) / 2.0);
}
