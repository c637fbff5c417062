//! bf16 and fp16 compared with fp32.

use super::*;
use crate::learner::VOTE;

#[test]
fn half_formats_give_nearly_the_gradient_of_fp32() {
    // The same error as torch's autocast has on such a network: 0.4 with bf16.
    let mut fp32 = learner(&[]);
    let (exact, exact_sums) = gradient_of(&mut fp32, &batch(8));
    for (compute, scale, tolerance) in [("bf16", 1.0, 0.5), ("fp16", 1024.0, 0.25)] {
        let compute = format!("precision.compute={compute}");
        let mut half = learner(&[&compute, "precision.loss_scale.initial=1024.0"]);
        let (leaf, sums) = gradient_of(&mut half, &batch(8));
        let error = relative_error(&(&leaf.gradient / scale), &exact.gradient);
        assert!(error < tolerance && error > 0.0, "{compute}: {error}");
        assert!((sums.loss / exact_sums.loss - 1.0).abs() < 0.01, "{compute}");
        let error = relative_error(&leaf.statistics, &exact.statistics);
        assert!(error < 0.01, "{compute}: {error}");
    }
}

#[test]
fn half_formats_learn_and_keep_f32_weights() {
    for compute in ["bf16", "fp16"] {
        let compute = format!("precision.compute={compute}");
        let mut learner = learner(&[&compute, "ema.decay=0.5"]);
        let batch = batch(8);
        let losses: Vec<f64> =
            (0..6).map(|step| train_at(0.01, &mut learner, &batch, step)).collect();
        assert!(losses[5] < 0.75 * losses[0], "{compute}: {losses:?}");
        // bf16 and fp16 have fewer digits.
        let fine = values(&learner.weights).iter().filter(|w| w.to_bits() & 0xfff != 0).count();
        assert!(fine > learner.layout.cast_len as usize / 2, "{compute}: {fine}");
        let raw = evaluated(&mut learner, &batch);
        let averaged = learner
            .evaluate(&batch, EvaluatedWeights::Averaged, &mut || false)
            .unwrap()
            .unwrap()
            .sums;
        assert!(raw.loss.is_finite() && averaged.loss.is_finite() && raw != averaged);
    }
}

#[test]
fn an_overflow_halves_the_scale_and_keeps_the_weights() {
    let fp16 = ["precision.compute=fp16", "precision.loss_scale.initial=1e30"];
    let mut learner = learner(&fp16);
    let before = values(&learner.weights);
    let scale = |leaf: &mut TorchLeaf| leaf.tail().unwrap()[VOTE.end + 1];
    let (mut leaf, _) = gradient_of(&mut learner, &batch(4));
    update(&mut learner, &mut leaf, 0, 0.05);
    assert_eq!((values(&learner.weights), scale(&mut leaf)), (before, 1e30));
    let (mut leaf, _) = gradient_of(&mut learner, &batch(4));
    update(&mut learner, &mut leaf, 1, 0.05);
    assert_eq!(scale(&mut leaf), 5e29);
}

#[test]
fn averaged_weights_are_evaluated_with_averaged_statistics() {
    let mut averaging = learner(&["ema.decay=0.5"]);
    let mut plain = learner(&[]);
    for step in 0..2 {
        train(&mut averaging, &batch(8), step);
    }
    // Copies the averaged state into a learner without an average.
    let regions: Vec<(&str, Vec<f32>)> =
        averaging.regions().into_iter().map(|r| (r.name, host(r.buffer).to_vec())).collect();
    let region = |name: &str| regions.iter().find(|(found, _)| *found == name).unwrap().1.clone();
    for to in plain.regions() {
        match to.name {
            "weights" => host(to.buffer).copy_from_slice(&region("ema")),
            "bn_running" => host(to.buffer).copy_from_slice(&region("bn_running_ema")),
            _ => {}
        }
    }
    let found =
        averaging.evaluate(&batch(8), EvaluatedWeights::Averaged, &mut || false).unwrap().unwrap();
    assert_eq!(found.sums, evaluated(&mut plain, &batch(8)));
    assert_ne!(found.sums, evaluated(&mut averaging, &batch(8)));
}

#[test]
fn weights_without_a_gradient_are_evaluated_the_same() {
    let frozen = "model.freeze=['stem', 'layer1', 'layer2', 'layer3', 'layer4']";
    for arch in ["model.arch=resnet18", "model.arch=resnet50"] {
        let sums = evaluated(&mut learner(&[arch]), &batch(8));
        // The recipe requires a file; it is not read here.
        let mut frozen = learner(&[arch, frozen, "model.pretrained=none.safetensors"]);
        assert_eq!(evaluated(&mut frozen, &batch(8)), sums, "{arch}");
    }
}
