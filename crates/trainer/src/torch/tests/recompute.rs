//! Recomputed activations.

use super::*;

#[test]
fn recomputed_stages_change_no_bit_of_the_gradient() {
    let leaf_of = |recompute: &str| {
        let recompute = format!("train.recompute={recompute}");
        let mut learner = learner(&[&recompute]);
        let (mut leaf, sums) = gradient_of(&mut learner, &batch(4));
        (bits(&mut leaf), sums)
    };
    let plain = leaf_of("[]");
    for recompute in [
        "['stem']",
        "['layer1', 'layer3']",
        "['layer4']",
        "['stem', 'layer1', 'layer2', 'layer3', 'layer4']",
    ] {
        assert!(leaf_of(recompute) == plain, "{recompute}");
    }
}

#[test]
fn frozen_stages_keep_weights_and_statistics_and_the_rest_learns() {
    let frozen = [
        "model.pretrained=unused.safetensors",
        "model.freeze=['stem', 'layer1']",
        "train.recompute=['layer3']",
        "optimizer={kind='adamw', weight_decay=0.1}",
    ];
    let mut learner = learner(&frozen);
    let before = learner.state_dict().unwrap();
    for step in 0..2 {
        train(&mut learner, &batch(4), step);
    }
    for ((name, before), (_, after)) in before.iter().zip(learner.state_dict().unwrap()) {
        let kept = ["conv1", "bn1", "layer1"].iter().any(|stage| name.starts_with(stage));
        assert_eq!(before.equal(&after), kept, "{name}");
    }
}
