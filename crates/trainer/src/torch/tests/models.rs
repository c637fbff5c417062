//! A network other than ResNet: the example of docs/models.md.

use baton_model::NetworkOptions;
use baton_plan::network::{InputShape, Network};

use super::*;
use crate::torch::weights::{self, Head};

const DOCS: &str = include_str!("../../../../../docs/models.md");
const EXAMPLE: &str = include_str!("tiny_vgg.rs");

fn tiny_vgg(freeze: &[&str], changes: &[&str]) -> TorchLearner {
    let options =
        NetworkOptions { channels: 3, outputs: 10, zero_init_gamma: false, blur_pool: false };
    let freeze: Vec<String> = freeze.iter().map(|&name| name.to_owned()).collect();
    let network = tiny_vgg::describe(&options).frozen(&freeze);
    device::set_threads(1);
    let mut learner = TorchLearner::with_network(&recipe(changes), network, Device::Cpu).unwrap();
    learner.initialise().unwrap();
    learner
}

#[test]
fn the_documented_network_is_the_tested_one() {
    assert!(DOCS.contains(EXAMPLE));
}

#[test]
fn the_documented_network_learns_with_every_computation_option() {
    for changes in [
        &[][..],
        &["precision.compute=bf16", "ema.decay=0.5"],
        &["precision.fused=true"],
        &["model.channels_last=false", "optimizer={kind='adamw', weight_decay=0.01}"],
        &["optimizer={kind='lars', momentum=0.9, trust_coefficient=0.1}"],
    ] {
        let mut learner = tiny_vgg(&[], changes);
        let batch = batch(8);
        let losses: Vec<f64> =
            (0..6).map(|step| train_at(0.02, &mut learner, &batch, step)).collect();
        assert!(losses[5] < losses[0], "{changes:?}: {losses:?}");
        assert!(evaluated(&mut learner, &batch).loss.is_finite());
    }
}

#[test]
fn blocks_of_any_network_can_be_frozen_and_its_head_replaced() {
    let mut learner = tiny_vgg(&["stage1"], &["ema.decay=0.5"]);
    let before = learner.state_dict().unwrap();
    train(&mut learner, &batch(8), 0);
    for ((name, before), (_, after)) in before.iter().zip(learner.state_dict().unwrap()) {
        assert_eq!(before.equal(&after), name.starts_with("stage1"), "{name}");
    }
    assert_eq!(learner.head().collect::<Vec<_>>(), ["fc.weight", "fc.bias"]);
    let error = weights::load(&mut learner, "/nowhere".as_ref(), Head::New).unwrap_err();
    assert!(matches!(error, weights::Error::Read { .. }));
}

#[test]
fn the_plan_counts_the_values_of_the_documented_network() {
    let learner = tiny_vgg(&[], &[]);
    let planned = Network::of(learner.network(), InputShape::Image { resolution: 32 });
    let counted = [planned.parameters(), planned.kernels(), planned.statistics()];
    let layout = &learner.layout;
    let trained = [layout.parameters_len(), layout.cast_len, layout.statistics_len()];
    assert_eq!(counted.map(|values| values as i64), trained);
    // 9 kernel positions x channels in x channels out x pixels, then the linear layer.
    let by_hand = 9 * (3 * 16 * 1_024 + 16 * 32 * 256 + 32 * 64 * 64) + 640;
    assert_eq!(planned.macs(), by_hand);
}
