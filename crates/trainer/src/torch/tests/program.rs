//! Programs: what random operators draw, evaluation, tied weights, and formats of numbers. The stories of
//! tests/tests/programs.rs train one with real processes.

use std::collections::BTreeMap;

use baton_data::Inputs;

use super::*;
use crate::{
    learner::{DeferredScalar, Error},
    torch::BatchNormMode,
};

fn fixture(name: &str) -> String {
    format!("{}/../program/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn program(changes: &[&str]) -> TorchLearner {
    device::set_threads(1);
    let path = format!("model.program={}", fixture("small.pt2"));
    let mut all = vec!["model.arch=program", path.as_str(), "model.channels_last=false"];
    all.extend(["model.zero_init_gamma=false", "train.resolution=8"]);
    all.extend(changes);
    TorchLearner::new(&recipe(&all), &InputType::Image, Device::Cpu).unwrap()
}

/// Images from the position of their samples.
fn images(first: u64) -> Batch {
    let pixels: Vec<u8> = (0..6 * 8 * 8 * 3).map(|i| (i * 31 % 251) as u8).collect();
    Batch::of_images(&pixels, 8, (0..6).collect(), (first..first + 6).collect())
}

fn gradient(learner: &mut TorchLearner, batch: &Batch) -> Vec<(String, Vec<f32>)> {
    let mut leaf = learner.new_leaf().unwrap();
    learner.gradient(batch, 1.0, &mut leaf).unwrap();
    let gradients = learner.gradients(&leaf).unwrap().into_iter();
    gradients.map(|(name, gradient)| (name, values(&gradient.reshape([-1])))).collect()
}

#[test]
fn masks_depend_on_the_micro_batch_alone() {
    let (mut a, mut b) = (program(&[]), program(&[]));
    let first = gradient(&mut a, &images(0));
    let other_samples = gradient(&mut a, &images(100));
    assert_ne!(first, other_samples, "the same pixels, with other masks");
    // Another learner, after another history.
    gradient(&mut b, &images(7));
    assert_eq!(gradient(&mut b, &images(0)), first);
    let epoch = Batch { epoch: 1, ..images(0) };
    assert_ne!(gradient(&mut b, &epoch), first);
    assert_ne!(gradient(&mut program(&["seed=8"]), &images(0)), first);
}

#[test]
fn recomputed_modules_give_the_same_bits() {
    let results = |changes: &[&str]| {
        let mut learner = program(changes);
        let mut leaf = learner.new_leaf().unwrap();
        let loss = learner.gradient(&images(0), 1.0, &mut leaf).unwrap().value().unwrap();
        let mut all = vec![vec![loss as f32], values(&leaf.statistics)];
        all.extend(gradient(&mut learner, &images(0)).into_iter().map(|(_, gradient)| gradient));
        all
    };
    // The weight of `second` is also that of `first`: in bf16 their gradients are summed before or after a cast.
    let (all, without_shared) = (["conv", "norm", "drop", "second"], ["conv", "norm", "drop"]);
    for (format, modules) in [
        ("precision.compute=fp32", &["norm"][..]),
        ("precision.compute=fp32", &all),
        ("precision.compute=bf16", &without_shared),
    ] {
        let kept = results(&[format]);
        assert!(kept.iter().flatten().all(|value| value.is_finite()));
        let recompute = format!("train.recompute={modules:?}");
        assert!(results(&[format, &recompute]) == kept, "{format} {modules:?}");
    }
}

/// An operator after the module changes the module's input too.
#[test]
fn a_module_that_returns_a_view_of_its_input_is_not_recomputed() {
    let path = format!("model.program={}", fixture("views.pt2"));
    let mut learner = program(&[&path, "train.recompute=['flat']"]);
    let mut leaf = learner.new_leaf().unwrap();
    let error = learner.gradient(&images(0), 1.0, &mut leaf).unwrap_err();
    assert!(matches!(error, Error::Recipe(_)), "{error:?}");
    let error = error.to_string();
    assert!(error.contains("flat"), "{error}");
    assert!(error.contains("train.recompute: this part returns a view of its input"), "{error}");
}

#[test]
fn evaluation_draws_nothing_and_uses_the_running_statistics() {
    let mut learner = program(&[]);
    let mut outputs = |samples, mode| {
        let logits = learner.logits(&images(samples), mode).unwrap();
        values(&logits.reshape([-1]))
    };
    let evaluated = outputs(0, BatchNormMode::Evaluation);
    assert_eq!(outputs(50, BatchNormMode::Evaluation), evaluated);
    assert_ne!(outputs(0, BatchNormMode::Training), evaluated);
    assert!(evaluated.iter().all(|value| value.is_finite()));
}

#[test]
fn a_shared_weight_is_one_tensor_with_two_names() {
    let mut learner = program(&[]);
    let gradients = gradient(&mut learner, &images(0));
    let names: Vec<&str> = gradients.iter().map(|(name, _)| name.as_str()).collect();
    assert!(names.contains(&"first.weight") && !names.contains(&"second.weight"), "{names:?}");
    let places = learner.tensors();
    let place = |name: &str| places.iter().find(|tensor| tensor.name == name).unwrap();
    assert_eq!(place("first.weight").offset, place("second.weight").offset);
    // Buffers of the state dict are kept too, as f32.
    let order = learner.state_dict().unwrap().into_iter().find(|(name, _)| name == "order");
    assert_eq!(values(&order.unwrap().1), [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]);
    assert!(places.iter().any(|tensor| tensor.name == "order"));
}

#[test]
fn an_update_moves_the_statistics_by_the_modules_momentum() {
    let mut learner = program(&[]);
    let mut leaf = learner.new_leaf().unwrap();
    learner.gradient(&images(0), 1.0, &mut leaf).unwrap();
    let batch = values(&leaf.statistics_views[0].copy());
    learner.measure(&mut leaf).unwrap();
    learner.update(&mut leaf, &Update { step: Step(0), lr: 0.0, micro_batches: 1 }).unwrap();
    let running = learner.state_dict().unwrap();
    let (_, mean) = running.iter().find(|(name, _)| name == "norm.running_mean").unwrap();
    for (running, batch) in values(mean).into_iter().zip(batch) {
        assert!((running - 0.3 * batch).abs() < 1e-6, "{running} {batch}");
    }
}

#[test]
fn bf16_is_near_f32_by_autocast() {
    let losses = ["fp32", "bf16"].map(|compute| {
        let mut learner = program(&[&format!("precision.compute={compute}")]);
        let mut leaf = learner.new_leaf().unwrap();
        learner.gradient(&images(0), 1.0, &mut leaf).unwrap().value().unwrap()
    });
    let difference = (losses[0] - losses[1]).abs();
    assert!(difference > 0.0 && difference < 0.05 * losses[0], "{losses:?}");
}

#[test]
fn a_batch_of_one_sample_is_evaluated() {
    let mut learner = program(&[]);
    let one = Batch::of_images(&[9; 8 * 8 * 3], 8, vec![3], vec![0]);
    let evaluated = learner.evaluate(&one, EvaluatedWeights::Raw, &mut || false).unwrap().unwrap();
    assert_eq!(evaluated.sums.count, 1);
    let stopped = learner.evaluate(&one, EvaluatedWeights::Raw, &mut || true).unwrap();
    assert!(stopped.is_none());
}

#[test]
fn a_change_that_only_the_run_shows_is_refused() {
    let path = format!("model.program={}", fixture("changed_reshaped.pt2"));
    let changes = ["model.arch=program", &path, "model.channels_last=false", "train.resolution=8"];
    let changes: Vec<&str> = changes.into_iter().chain(["model.zero_init_gamma=false"]).collect();
    device::set_threads(1);
    let mut learner = TorchLearner::new(&recipe(&changes), &InputType::Image, Device::Cpu).unwrap();
    let mut leaf = learner.new_leaf().unwrap();
    let error = learner.gradient(&images(0), 1.0, &mut leaf).unwrap_err().to_string();
    assert!(error.contains("changes a parameter in a step"), "{error}");
}

/// A comparison has no gradient, which the file does not show.
#[test]
fn a_program_without_a_gradient_is_refused_with_what_to_do() {
    let path = format!("model.program={}", fixture("no_gradient_at_run_time.pt2"));
    let mut learner = program(&[&path]);
    let mut leaf = learner.new_leaf().unwrap();
    let error = learner.gradient(&images(0), 1.0, &mut leaf).unwrap_err();
    assert!(
        error.to_string().contains("no_gradient_at_run_time.pt2 returns nothing that depends"),
        "{error}"
    );
    assert!(matches!(error, Error::Recipe(_)), "{error:?}");
}

/// The file tells the shape of its output for several samples.
#[test]
fn a_program_that_drops_the_axis_of_a_single_sample_is_refused_with_what_to_do() {
    let path = format!("model.program={}", fixture("squeezed.pt2"));
    let mut learner = program(&[&path]);
    let evaluate = |learner: &mut TorchLearner, images: &Batch| {
        learner.evaluate(images, EvaluatedWeights::Raw, &mut || false)
    };
    assert!(evaluate(&mut learner, &images(0)).is_ok());
    let pixels = vec![7; 8 * 8 * 3];
    let one = Batch::of_images(&pixels, 8, vec![0], vec![0]);
    let mut leaf = learner.new_leaf().unwrap();
    let errors = [learner.gradient(&one, 1.0, &mut leaf).err(), evaluate(&mut learner, &one).err()];
    for error in errors.map(Option::unwrap) {
        let text = "squeezed.pt2 returns the shape [10] for a batch of 1, in place of [1, 10]: ";
        assert!(error.to_string().contains(text), "{error}");
        assert!(matches!(error, Error::Recipe(_)), "{error:?}");
    }
}

#[test]
fn arrays_arrive_in_the_shape_that_they_have_in_the_data() {
    let mut learner = program(&["data.mean=[0.0, 0.0, 0.0]", "data.std=[1.0, 1.0, 1.0]"]);
    let mut images = images(0);
    let as_images = learner.evaluate(&images, EvaluatedWeights::Raw, &mut || false).unwrap();
    let Inputs::Images { pixels, .. } = &images.inputs else { panic!("no images") };
    // From (side, side, 3) to (3, side, side).
    let side = 8 * 8;
    let value = |index: usize| {
        f32::from(pixels[(index / (3 * side)) * 3 * side + index % side * 3 + index / side % 3])
    };
    let values = (0..pixels.len()).map(value).collect();
    images.inputs = Inputs::Arrays { values, shape: vec![3, 8, 8] };
    let as_arrays = learner.evaluate(&images, EvaluatedWeights::Raw, &mut || false).unwrap();
    assert_eq!(as_arrays.unwrap().sums, as_images.unwrap().sums);
}

/// Layers of width 0 have the offsets of their neighbours.
#[test]
fn parameters_without_values_take_nothing_from_their_neighbours() {
    let path = format!("model.program={}", fixture("without_values.pt2"));
    for optimizer in ["sgd", "adamw", "lars", "lamb", "muon"] {
        let kind = format!("optimizer={{ kind = '{optimizer}' }}");
        let mut learner = program(&[&path, &kind]);
        let mut leaf = learner.new_leaf().unwrap();
        learner.gradient(&images(0), 1.0, &mut leaf).unwrap();
        let gradients: BTreeMap<String, Vec<f32>> = learner
            .gradients(&leaf)
            .unwrap()
            .into_iter()
            .map(|(name, gradient)| (name, values(&gradient.reshape([-1]))))
            .collect();
        // What is added to the same sum has the same gradient.
        let expected = &gradients["first.bias"];
        assert!(expected.iter().any(|value| *value != 0.0));
        assert_eq!((&gradients["nothing.bias"], &gradients["none.bias"]), (expected, expected));
        assert!(gradients["nothing.weight"].is_empty() && gradients["none.weight"].is_empty());

        let weights = |learner: &TorchLearner, name: &str| {
            let state = learner.state_dict().unwrap();
            values(&state.into_iter().find(|(found, _)| found == name).unwrap().1.reshape([-1]))
        };
        let names = ["first.weight", "first.bias", "nothing.bias", "none.bias", "last.weight"];
        let before = names.map(|name| weights(&learner, name));
        learner.measure(&mut leaf).unwrap();
        let update = Update { step: Step(0), lr: 0.1, micro_batches: 1 };
        learner.update(&mut leaf, &update).unwrap();
        for (name, before) in names.iter().zip(before) {
            assert_ne!(weights(&learner, name), before, "{optimizer} changes no {name}");
        }
        assert_eq!(weights(&learner, "bounds"), [0.0; 0]);
    }
}
