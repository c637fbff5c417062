//! MixUp and CutMix on tensors.

use baton_data::mix::{Mix, Window};
use tch::Kind;

use super::*;
use crate::torch::mixing;

fn numbered(samples: i64, side: i64) -> Tensor {
    let count = samples * 2 * side * side;
    Tensor::arange(count, (Kind::Float, Device::Cpu)).view([samples, 2, side, side])
}

#[test]
fn mixup_weighs_each_sample_with_the_one_before() {
    let x = numbered(3, 4);
    let mixed = mixing::inputs(&x, &Mix::MixUp { lambda: 0.75 }).unwrap();
    for (sample, other) in [(0, 2), (1, 0), (2, 1)] {
        let expected = x.get(sample) * 0.75 + x.get(other) * 0.25;
        assert!(relative_error(&mixed.get(sample), &expected) < 1e-6);
    }
}

#[test]
fn cutmix_takes_the_window_from_the_sample_before_and_keeps_the_rest() {
    let x = numbered(2, 5).permute([0, 1, 3, 2]);
    let window = Window { rows: 1..3, columns: 2..5 };
    let mixed = mixing::inputs(&x, &Mix::CutMix { lambda: 0.76, window }).unwrap();
    for row in 0..5 {
        for column in 0..5 {
            let cut = (1..3).contains(&row) && (2..5).contains(&column);
            let from = if cut { 1 } else { 0 };
            let at = [0, 1, row, column];
            assert_eq!(mixed.double_value(&at), x.double_value(&[from, 1, row, column]));
        }
    }
}

#[test]
fn cutmix_of_signals_takes_a_segment() {
    let x = Tensor::arange(20, (Kind::Float, Device::Cpu)).view([2, 1, 10]);
    let window = Window { rows: 0..1, columns: 7..9 };
    let mixed = mixing::inputs(&x, &Mix::CutMix { lambda: 0.8, window }).unwrap();
    assert_eq!(values(&mixed.get(0)), [0., 1., 2., 3., 4., 5., 6., 17., 18., 9.]);
}

#[test]
fn mixed_loss_is_the_cross_entropy_with_the_mixed_target() {
    let task = classification(3, 0.1);
    let outputs = Tensor::from_slice(&[0.5_f64, -1.0, 2.0, 3.0, 0.0, -2.0]).view([2, 3]);
    let labels = Tensor::from_slice(&[0_i64, 2]);
    let found = mixing::loss(&task, &outputs, &labels, &Mix::MixUp { lambda: 0.7 }).unwrap();

    let one_hot = labels.one_hot(3).to_kind(Kind::Double);
    let target = (&one_hot * 0.7 + one_hot.roll([1], [0]) * 0.3) * 0.9 + 0.1 / 3.0;
    let expected = -(target * outputs.log_softmax(1, Kind::Double)).sum(Kind::Double);
    assert!((found.double_value(&[]) - expected.double_value(&[])).abs() < 1e-12);
}

#[test]
fn the_mix_of_a_batch_depends_only_on_its_epoch_and_first_sample() {
    let loss_of = |epoch, first| {
        let mut learner = learner(&["augment.mixup_alpha=1.0", "augment.cutmix_probability=0.5"]);
        let mut batch = batch(4);
        batch.epoch = epoch;
        batch.samples[0] = first;
        gradient_of(&mut learner, &batch).1.loss
    };
    let base = loss_of(0, 100);
    assert_eq!(loss_of(0, 100).to_bits(), base.to_bits());
    assert_ne!(loss_of(1, 100).to_bits(), base.to_bits());
    assert_ne!(loss_of(0, 101).to_bits(), base.to_bits());
}
