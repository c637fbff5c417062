//! Regression, signals, blurred and mirrored images, pretrained weights.

use baton_data::Inputs;
use tch::Kind;

use super::{super::layers::blur_filters, *};

/// Signals with one channel; the target is their mean.
fn signals(count: usize, length: usize) -> Batch {
    let value = |i: usize| ((i * 37 % 101) as f32 / 50.0 - 1.0) + (i / length % 5) as f32 * 0.3;
    let values: Vec<f32> = (0..count * length).map(value).collect();
    let mean = |signal: &[f32]| signal.iter().sum::<f32>() / length as f32;
    Batch {
        targets: values.chunks(length).map(mean).collect(),
        inputs: Inputs::Arrays { values, shape: vec![length as u64] },
        samples: (0..count as u64).collect(),
        ..Batch::default()
    }
}

fn signal_learner() -> TorchLearner {
    device::set_threads(1);
    let spec = recipe(&[
        "model.arch=resnet34_1d",
        "model.num_classes=1",
        "loss.kind=huber",
        "loss.label_smoothing=0.0",
    ]);
    TorchLearner::new(&spec, &InputType::Array(vec![100]), Device::Cpu).unwrap()
}

#[test]
fn a_one_dimensional_network_learns_a_regression() {
    let mut learner = signal_learner();
    let batch = signals(8, 100);
    let losses: Vec<f64> = (0..8).map(|step| train_at(0.001, &mut learner, &batch, step)).collect();
    assert!(losses[7] < 0.5 * losses[0], "{losses:?}");
}

#[test]
fn a_regression_is_evaluated_by_its_predictions() {
    let mut learner = signal_learner();
    let batch = signals(3, 100);
    let evaluation =
        learner.evaluate(&batch, EvaluatedWeights::Raw, &mut || false).unwrap().unwrap();
    assert_eq!(evaluation.targets, batch.targets);
    assert_eq!(evaluation.predictions.len(), 3);
    let logits = values(&learner.logits(&batch, crate::torch::BatchNormMode::Evaluation).unwrap());
    assert_eq!(evaluation.predictions, logits);
}

/// `BlurPoolConv2d` of ffcv-imagenet, computed by hand.
#[test]
fn blur_pool_blurs_before_all_strided_convolutions_except_the_first() {
    let mut plain = learner(&[]);
    let mut blurred = learner(&["model.blur_pool=true"]);
    assert_eq!(plain.tensors(), blurred.tensors());
    let of = |learner: &mut TorchLearner| gradient_of(learner, &batch(4)).0;
    let (a, b) = (of(&mut plain), of(&mut blurred));
    let statistics = |leaf: &TorchLeaf, name: &str| {
        let entries = &plain.layout.statistics;
        let at = entries.iter().position(|entry| entry.name == name).unwrap();
        leaf.statistics_views[at].copy()
    };
    for (name, same) in [
        ("bn1.running_mean", true),
        ("layer1.1.bn2.running_mean", true),
        ("layer2.0.bn1.running_mean", false),
        ("layer2.0.downsample.1.running_mean", false),
    ] {
        assert_eq!(statistics(&a, name).equal(&statistics(&b, name)), same, "{name}");
    }

    let filters = blur_filters(blurred.network(), Kind::Float, Device::Cpu)
        .unwrap()
        .expect("a blurred layer");
    let x = Tensor::rand([1, 16, 4, 4], (Kind::Float, Device::Cpu));
    let padded = x.constant_pad_nd([1, 1, 1, 1]);
    let found = x.conv2d(&filters.narrow(0, 0, 16), None::<&Tensor>, [1, 1], [1, 1], [1, 1], 16);
    let weights = [[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]];
    let at = |row: i64, column: i64| {
        let mut sum = 0.0;
        for (i, line) in weights.iter().enumerate() {
            for (j, weight) in line.iter().enumerate() {
                sum +=
                    weight / 16.0 * padded.double_value(&[0, 3, row + i as i64, column + j as i64]);
            }
        }
        sum
    };
    for (row, column) in [(0, 0), (1, 2), (3, 3)] {
        assert!((found.double_value(&[0, 3, row, column]) - at(row, column)).abs() < 1e-6);
    }
}

#[test]
fn with_flip_the_outputs_of_mirrored_images_are_averaged() {
    let mut plain = learner(&[]);
    let mut both = learner(&["evaluation.flip=true"]);
    train(&mut plain, &batch(8), 0);
    train(&mut both, &batch(8), 0);
    let images = batch(2);
    let mirrored = {
        let (pixels, _) = images.images().unwrap();
        let tensor = Tensor::from_slice(pixels).view([2, 32, 32, 3]).flip([2]).contiguous();
        let pixels: Vec<u8> = Vec::try_from(&tensor.view([-1])).unwrap();
        Batch::of_images(&pixels, 32, images.labels.clone(), images.samples.clone())
    };
    let averaged =
        both.evaluate(&images, EvaluatedWeights::Raw, &mut || false).unwrap().unwrap().sums.loss;
    assert_eq!(
        both.evaluate(&mirrored, EvaluatedWeights::Raw, &mut || false)
            .unwrap()
            .unwrap()
            .sums
            .loss
            .to_bits(),
        averaged.to_bits()
    );
    let plain = evaluated(&mut plain, &images).loss;
    assert!((plain - averaged).abs() > 1e-6, "{plain} {averaged}");
}
