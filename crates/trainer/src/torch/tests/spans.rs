//! Gradients of which parts are complete before the others.

use super::*;
use crate::learner::TAIL;

/// The bits of each span when it was complete, and of the leaf at the end.
fn in_spans(learner: &mut TorchLearner, leaf: &mut TorchLeaf) -> Vec<Vec<u32>> {
    let batch = batch(4);
    let spans = learner.spans().to_vec();
    let mut seen = Vec::new();
    let mut completed = |leaf: &TorchLeaf| {
        let mut span = leaf.span(spans[seen.len()].clone())?;
        seen.push(host(span.buffer()).iter().map(|value| value.to_bits()).collect());
        Ok(())
    };
    learner.gradient_in_spans(&batch, 0.25, leaf, &mut completed).unwrap();
    seen
}

#[test]
fn spans_are_complete_before_the_rest_and_have_the_bits_of_a_gradient_without_them() {
    for overrides in [
        &[][..],
        &["train.recompute=['layer3', 'layer4']"],
        &["train.recompute=['stem', 'layer1', 'layer2', 'layer3', 'layer4']"],
        &["model.pretrained=unused.safetensors", "model.freeze=['stem', 'layer1']"],
        &["model.channels_last=false"],
        &["precision.compute=bf16"],
        &["precision.compute=fp16"],
    ] {
        let mut learner = learner(overrides);
        let (mut whole, _) = gradient_of(&mut learner, &batch(4));
        let whole = bits(&mut whole);
        let values = whole.len() - TAIL;
        let spans = learner.spans().to_vec();
        let layer = |name: &str| {
            let found = learner.tensors().into_iter().find(|tensor| tensor.name == name).unwrap();
            learner.layout.gradient_start() as usize + found.offset
        };
        // ResNet-18 has 11.2 million weights: 8.4 of them in layer4, 2.1 in layer3.
        assert_eq!(spans.len(), 2, "{overrides:?}");
        assert_eq!(spans[0].start, layer("layer4.0.conv1.weight"), "{overrides:?}");
        assert!(spans[0].contains(&layer("fc.weight")), "{overrides:?}");
        assert_eq!(spans[1], layer("layer3.0.conv1.weight")..spans[0].start, "{overrides:?}");

        // What was in the leaf before does not matter.
        let mut leaf = learner.new_leaf().unwrap();
        host(leaf.buffer())[..values].fill(7.0);
        let seen = in_spans(&mut learner, &mut leaf);
        assert_eq!(seen.len(), 2, "{overrides:?}");
        for (span, seen) in spans.iter().zip(seen) {
            assert!(seen == whole[span.clone()], "{overrides:?} {span:?}");
        }
        assert!(bits(&mut leaf)[..values] == whole[..values], "{overrides:?}");
        assert_eq!(sums_of(&mut leaf).count, 4);
    }
}

#[test]
fn a_span_that_is_changed_and_put_back_is_in_its_leaf() {
    let mut learner = learner(&[]);
    let (mut leaf, mut other) = (learner.new_leaf().unwrap(), learner.new_leaf().unwrap());
    let mut span = leaf.span(16..32).unwrap();
    host(span.buffer()).fill(3.0);
    leaf.put_back(16, span).unwrap();
    other.put_back(0, leaf.span(16..32).unwrap()).unwrap();
    assert_eq!(host(leaf.buffer())[15..33], [&[0.0][..], &[3.0; 16], &[0.0]].concat());
    assert_eq!(host(other.buffer())[..17], [&[3.0; 16][..], &[0.0]].concat());
}

#[test]
fn an_empty_batch_completes_no_span_early() {
    let mut learner = learner(&[]);
    let mut leaf = learner.new_leaf().unwrap();
    let mut calls = 0;
    let mut completed = |_: &TorchLeaf| {
        calls += 1;
        Ok(())
    };
    learner.gradient_in_spans(&batch(0), 1.0, &mut leaf, &mut completed).unwrap();
    assert_eq!(calls, 0);
    assert_eq!(sums_of(&mut leaf).count, 0);
}
