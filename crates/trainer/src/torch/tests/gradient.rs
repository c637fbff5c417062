//! Gradients and batch statistics.

use baton_recipe::spec::Pointwise;

use super::*;
use crate::learner::{DeferredScalar, Error, VOTE};

#[test]
fn same_batch_gives_the_same_bits() {
    let mut learner = learner(&[]);
    let (mut first, sums) = gradient_of(&mut learner, &batch(4));
    let (mut again, sums_again) = gradient_of(&mut learner, &batch(4));
    assert_eq!(sums, sums_again);
    assert_eq!(bits(&mut first), bits(&mut again));
}

#[test]
fn gradient_and_vote_overwrite_the_whole_leaf() {
    let mut learner = learner(&[]);
    let (mut clean, sums) = gradient_of(&mut learner, &batch(4));
    clean.set_vote([0.0, 1.0, 0.0, 1.0]).unwrap();

    let mut used = learner.new_leaf().unwrap();
    host(used.buffer()).fill(f32::NAN);
    let loss = learner.gradient(&batch(4), 0.25, &mut used).unwrap();
    used.set_vote([0.0, 1.0, 0.0, 1.0]).unwrap();

    assert_eq!(bits(&mut used), bits(&mut clean));
    assert_eq!(loss.value().unwrap(), sums.loss);
    let [_, _, count, rest @ ..] = used.tail().unwrap();
    assert_eq!((count, rest), (4.0, [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]));
}

#[test]
fn loss_along_the_gradient_falls_at_the_rate_of_the_gradient() {
    let mut learner = learner(&[]);
    let batch = batch(16);
    let (leaf, _) = gradient_of(&mut learner, &batch);
    let norm = leaf.gradient.norm().double_value(&[]);
    let start = learner.weights.copy();
    let mut loss_at = |distance: f64| {
        learner.weights.copy_(&(&start + &leaf.gradient * (distance / norm)));
        learner.working.cast.invalidate();
        gradient_of(&mut learner, &batch).1.loss / 16.0
    };
    let h = 1e-4;
    let slope = (loss_at(h) - loss_at(-h)) / (2.0 * h);
    assert!((slope / norm - 1.0).abs() < 0.01, "slope {slope}, norm {norm}");
}

#[test]
fn what_was_measured_decides_how_1x1_convolutions_are_computed_unless_the_recipe_does() {
    let gradient = |overrides: &[&str], measured: Option<Pointwise>| {
        let mut learner = learner(&[&["model.arch=resnet50"], overrides].concat());
        learner.set_pointwise(measured);
        bits(&mut gradient_of(&mut learner, &batch(2)).0)
    };
    let product = gradient(&["model.pointwise=product"], None);
    let convolution = gradient(&["model.pointwise=convolution"], None);
    assert_ne!(product, convolution);
    assert_eq!(gradient(&[], None), product);
    assert_eq!(gradient(&[], Some(Pointwise::Product)), product);
    assert_eq!(gradient(&[], Some(Pointwise::Convolution)), convolution);
    assert_eq!(gradient(&["model.pointwise=product"], Some(Pointwise::Convolution)), product);
    let measures = |overrides: &[&str]| {
        let measured = learner(&[&["model.arch=resnet50"], overrides].concat()).measure_pointwise();
        measured.unwrap().is_some()
    };
    assert!(measures(&[]));
    assert!(!measures(&["model.pointwise=product"]));
    assert!(!measures(&["model.channels_last=false"]));
}

#[test]
fn memory_format_changes_no_gradient() {
    let mut nhwc = learner(&["model.channels_last=true"]);
    let mut nchw = learner(&["model.channels_last=false"]);
    let (leaf, sums) = gradient_of(&mut nhwc, &batch(4));
    let (other_leaf, other_sums) = gradient_of(&mut nchw, &batch(4));
    assert!((sums.loss - other_sums.loss).abs() < 1e-4);
    let gradients = nhwc.gradients(&leaf).unwrap();
    for ((name, a), (_, b)) in gradients.iter().zip(nchw.gradients(&other_leaf).unwrap()) {
        let error = relative_error(a, &b);
        assert!(error < 1e-3, "{name}: {error}");
    }
}

#[test]
fn convolution_weights_of_a_channels_last_network_are_stored_channels_last() {
    let learner = learner(&[]);
    let kernel = &learner.working.parameters[learner.layout.parameters.len() - 5];
    assert_eq!(kernel.size(), [512, 512, 3, 3]);
    assert_eq!(kernel.stride(), [3 * 3 * 512, 1, 3 * 512, 512]);
}

#[test]
fn scale_multiplies_the_gradient_but_not_the_sums() {
    let mut learner = learner(&[]);
    let mut one = learner.new_leaf().unwrap();
    let mut half = learner.new_leaf().unwrap();
    learner.gradient(&batch(4), 1.0, &mut one).unwrap();
    learner.gradient(&batch(4), 0.5, &mut half).unwrap();
    assert_eq!(sums_of(&mut one), sums_of(&mut half));
    assert!((&one.gradient * 0.5).equal(&half.gradient));
    assert!(one.statistics.equal(&half.statistics));
}

#[test]
fn leaves_add_up_value_by_value() {
    let mut learner = learner(&[]);
    let (mut sum, _) = gradient_of(&mut learner, &batch(4));
    let (mut other, _) = gradient_of(&mut learner, &batch(2));
    sum.set_vote([1.0; 4]).unwrap();
    other.set_vote([2.0; 4]).unwrap();
    let expected: Vec<f32> =
        host(sum.buffer()).iter().zip(host(other.buffer())).map(|(a, b)| *a + *b).collect();
    sum.add(&other).unwrap();
    assert_eq!(host(sum.buffer()), expected);
    assert_eq!(sum.tail().unwrap()[VOTE], [3.0; 4]);
    assert_eq!(sums_of(&mut sum).count, 6);
}

#[test]
fn leaf_holds_the_batchs_mean_and_unbiased_variance() {
    let mut learner = learner(&["data.mean=[10.0, 20.0, 30.0]", "data.std=[50.0, 60.0, 70.0]"]);
    let batch = batch(3);
    let (leaf, _) = gradient_of(&mut learner, &batch);

    // The first layer's statistics from its definition, in f64.
    let images = Tensor::from_slice(batch.images().unwrap().0).to_kind(tch::Kind::Double);
    let mean = Tensor::from_slice(&[10.0, 20.0, 30.0]);
    let std = Tensor::from_slice(&[50.0, 60.0, 70.0]);
    let images = ((images.view([3, 32, 32, 3]) - mean) / std).permute([0, 3, 1, 2]);
    let kernel = learner.working.parameters[0].detach().to_kind(tch::Kind::Double);
    let y = images.conv2d(&kernel, None::<&Tensor>, [2, 2], [3, 3], [1, 1], 1);
    let expected_mean = y.mean_dim([0, 2, 3].as_slice(), false, None);
    let expected_variance = y.var_dim([0, 2, 3].as_slice(), true, false);

    assert!(relative_error(&leaf.statistics_views[0], &expected_mean) < 1e-5);
    assert!(relative_error(&leaf.statistics_views[1], &expected_variance) < 1e-5);
}

#[test]
fn update_moves_running_statistics_by_a_tenth_of_the_mean_over_micro_batches() {
    let mut learner = learner(&[]);
    let (mut sum, _) = gradient_of(&mut learner, &batch(4));
    let (other, _) = gradient_of(&mut learner, &batch(2));
    sum.add(&other).unwrap();
    let before = values(&learner.running);
    let batch_sums = values(&sum.statistics);
    learner.measure(&mut sum).unwrap();
    learner.update(&mut sum, &Update { step: Step(0), lr: 0.0, micro_batches: 2 }).unwrap();
    let after = values(&learner.running);
    for ((before, sum), after) in before.iter().zip(batch_sums).zip(after) {
        let expected = 0.9 * before + 0.1 * (sum / 2.0);
        assert!((after - expected).abs() <= 1e-6 * expected.abs().max(1.0));
    }
}

#[test]
fn empty_batch_contributes_nothing() {
    let mut learner = learner(&[]);
    let mut leaf = learner.new_leaf().unwrap();
    let empty = Batch::of_images(&[], 32, Vec::new(), Vec::new());
    host(leaf.buffer()).fill(f32::NAN);
    let loss = learner.gradient(&empty, 1.0, &mut leaf).unwrap();
    assert_eq!(
        (loss.value().unwrap(), sums_of(&mut leaf)),
        (0.0, Sums { others: vec![0.0], ..Sums::default() })
    );
    assert_eq!(evaluated(&mut learner, &empty), Sums::default());
    assert_eq!(leaf.gradient.abs().max().double_value(&[]), 0.0);
    let running = values(&learner.running);
    update(&mut learner, &mut leaf, 0, 0.1);
    assert_eq!(values(&learner.running), running);
}

#[test]
fn one_tiny_image_is_refused_as_it_has_no_variance() {
    let mut learner = learner(&[]);
    let mut leaf = learner.new_leaf().unwrap();
    let error = learner.gradient(&batch(1), 1.0, &mut leaf).unwrap_err().to_string();
    assert!(error.contains("side 32") && error.contains("train.virtual_ranks"), "{error}");
}

#[test]
fn label_out_of_range_is_refused_by_sample() {
    let mut learner = learner(&[]);
    let mut leaf = learner.new_leaf().unwrap();
    for label in [-100, -1, 10] {
        let mut batch = batch(4);
        batch.labels[2] = label;
        let evaluated = learner.evaluate(&batch, EvaluatedWeights::Raw, &mut || false).map(drop);
        for result in [learner.gradient(&batch, 1.0, &mut leaf).map(drop), evaluated] {
            let named = matches!(
                result,
                Err(Error::Label { sample: 102, label: found, num_classes: 10 }) if found == label
            );
            assert!(named, "{result:?}");
        }
    }
}

#[test]
fn images_of_the_wrong_length_are_refused() {
    let batch = batch(4);
    let (pixels, _) = batch.images().unwrap();
    let batch = Batch::of_images(&pixels[1..], 32, batch.labels.clone(), batch.samples.clone());
    let error = learner(&[])
        .evaluate(&batch, EvaluatedWeights::Raw, &mut || false)
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("copy inputs: ") && !error.contains('\n'), "{error}");
}
