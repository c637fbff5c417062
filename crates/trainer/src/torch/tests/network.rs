//! Names, shapes, locations and initial values of tensors.

use baton_model::{Builder, Init, TensorRole};
use baton_plan::network;
use proptest::{collection::vec, prelude::*};

use super::*;
use crate::torch::{
    flat::{BN_RUNNING, FROZEN_REGION, FlatLayout, FlatTensor, TENSOR_ALIGNMENT},
    optimizer::Segment,
};

fn layout(arch: &str, classes: u32) -> FlatLayout {
    let arch = format!("model.arch={arch}");
    let classes = format!("model.num_classes={classes}");
    let channels = if arch.ends_with("1d") { 1 } else { 3 };
    layout_by(&[&arch, &classes], channels)
}

fn layout_by(changes: &[&str], channels: u64) -> FlatLayout {
    let model = recipe(changes).model;
    FlatLayout::new(&model.describe(channels).unwrap(), model.channels_last)
}

#[test]
fn parameter_counts_are_torchvisions() {
    // torchvision 0.26: sum(p.numel() for p in models.resnetN().parameters())
    for (arch, parameters, tensors, norms) in [
        ("resnet18", 11_689_512, 62, 20),
        ("resnet34", 21_797_672, 110, 36),
        ("resnet50", 25_557_032, 161, 53),
        ("resnet101", 44_549_160, 314, 104),
        ("resnet152", 60_192_808, 467, 155),
    ] {
        let layout = layout(arch, 1000);
        assert_eq!(layout.parameters_len(), parameters, "{arch}");
        assert_eq!(layout.parameters.len(), tensors, "{arch}");
        assert_eq!(layout.statistics.len(), 2 * norms, "{arch}");
    }
}

/// `baton plan` counts the values of a description; training assigns their offsets.
#[test]
fn planned_and_trained_sizes_are_equal() {
    let image = network::InputShape::Image { resolution: 32 };
    let signal = network::InputShape::Signal { channels: 1, length: 100 };
    for (arch, input) in [("resnet18", image), ("resnet50", image), ("resnet34_1d", signal)] {
        let layout = layout(arch, 37);
        let arch_change = format!("model.arch={arch}");
        let model = recipe(&[&arch_change, "model.num_classes=37"]).model;
        let planned = network::Network::new(&model, input).unwrap();
        let trained = [layout.parameters_len(), layout.cast_len, layout.statistics_len()];
        let counted = [planned.parameters(), planned.kernels(), planned.statistics()];
        assert_eq!(counted.map(|values| values as i64), trained, "{arch}");
    }
}

proptest! {
    #[test]
    fn tensors_of_any_shape_are_aligned_and_do_not_overlap(
        shapes in vec((vec(0_u64..40, 1..5), any::<bool>(), any::<bool>(), any::<bool>()), 1..12),
        channels_last: bool,
    ) {
        let mut network = Builder::images().finish();
        for (position, (shape, decays, is_cast, frozen)) in shapes.into_iter().enumerate() {
            let role = if frozen { TensorRole::Frozen } else { TensorRole::Trained };
            let (name, init) = (position.to_string(), Init::Constant(0.0));
            let tensor = baton_model::Tensor {
                name,
                aliases: Vec::new(),
                shape,
                init,
                decays,
                is_cast,
                is_hidden: decays,
                role,
                position,
            };
            network.parameters.push(tensor.clone());
            network.statistics.push(tensor);
        }
        let layout = FlatLayout::new(&network, channels_last);
        prop_assert_eq!(layout.gradient_start() % TENSOR_ALIGNMENT, 0);
        let is_frozen = |entry: &&FlatTensor| entry.frozen;
        let all = || layout.parameters.iter().chain(&layout.statistics);
        for entries in [
            layout.parameters.iter().filter(|entry| !entry.frozen).collect::<Vec<_>>(),
            layout.statistics.iter().filter(|entry| !entry.frozen).collect(),
            all().filter(is_frozen).collect(),
        ] {
            let mut ranges: Vec<_> =
                entries.iter().map(|entry| (entry.offset, entry.offset + entry.len())).collect();
            ranges.sort_unstable();
            prop_assert!(ranges.iter().all(|(start, _)| start % TENSOR_ALIGNMENT == 0));
            prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            prop_assert!(ranges.windows(2).all(|pair| pair[1].0 - pair[0].1 < TENSOR_ALIGNMENT));
        }
        for entry in &layout.parameters {
            let cast = if entry.frozen { layout.frozen_cast_len } else { layout.cast_len };
            // One without values has the offset of its neighbour.
            if entry.len() == 0 {
                continue;
            }
            prop_assert_eq!(entry.offset < cast, entry.is_cast);
            for per_tensor in [false, true] {
                let segments = layout.segments(1.0, |_| per_tensor);
                let in_order =
                    |pair: &[Segment]| pair[0].start + pair[0].len <= pair[1].start;
                prop_assert!(segments.windows(2).all(in_order));
                let end = entry.offset + entry.len();
                let covering: Vec<_> = segments
                    .iter()
                    .filter(|s| !entry.frozen && s.start < end && entry.offset < s.start + s.len)
                    .collect();
                prop_assert_eq!(covering.len(), usize::from(!entry.frozen));
                prop_assert!(covering.iter().all(|segment| segment.decays == entry.decays));
            }
        }
    }
}

#[test]
fn names_shapes_and_order_are_torchvisions() {
    let locations = layout("resnet50", 1000).tensor_locations();
    let named: Vec<_> = locations.iter().map(|tensor| (&*tensor.name, &*tensor.shape)).collect();
    assert_eq!(
        named[..6],
        [
            ("conv1.weight", &[64, 3, 7, 7][..]),
            ("bn1.weight", &[64]),
            ("bn1.bias", &[64]),
            ("bn1.running_mean", &[64]),
            ("bn1.running_var", &[64]),
            ("layer1.0.conv1.weight", &[64, 64, 1, 1]),
        ]
    );
    let at = |name: &str| named.iter().position(|(found, _)| *found == name).unwrap();
    assert_eq!(named[at("layer1.0.downsample.0.weight")].1, [256, 64, 1, 1]);
    assert_eq!(at("layer1.0.downsample.0.weight"), at("layer1.0.bn3.running_var") + 1);
    assert_eq!(named[at("layer2.0.conv2.weight")].1, [128, 128, 3, 3]);
    assert_eq!(named[named.len() - 2..], [("fc.weight", &[1000, 2048][..]), ("fc.bias", &[1000])]);
}

#[test]
fn in_one_dimension_resnet34_keeps_its_size() {
    let layout = layout("resnet34_1d", 2);
    assert_eq!(layout.parameters_len(), 21_277_250);
    let names: Vec<&str> = layout.parameters.iter().map(|entry| &*entry.name).collect();
    assert_eq!(names.len(), 110);
    assert_eq!(layout.parameters[0].shape, [64, 1, 15]);
    let at = |name: &str| names.iter().position(|found| *found == name).unwrap();
    assert_eq!(layout.parameters[at("layer4.2.conv2.weight")].shape, [512, 512, 9]);
    assert_eq!(layout.parameters[at("layer2.0.downsample.0.weight")].shape, [128, 64, 1]);
}

#[test]
fn frozen_stages_have_a_separate_buffer() {
    let layout = |freeze: &str| {
        let freeze = format!("model.freeze={freeze}");
        layout_by(&["model.pretrained=a.safetensors", &freeze], 3)
    };
    let whole = layout("[]");
    assert_eq!(
        (whole.segments(1.0, |_| false).len(), whole.frozen_len(), &*whole.gaps),
        (2, 0, &[][..])
    );

    let frozen = layout("['stem', 'layer1']");
    let (kernels, norms) = (9_408 + 4 * 36_864, 5 * 128);
    assert_eq!(frozen.parameters_len(), whole.parameters_len() - kernels - norms);
    assert_eq!(frozen.statistics_len(), whole.statistics_len() - norms);
    assert_eq!((frozen.frozen_len(), frozen.frozen_cast_len), (kernels + 2 * norms, kernels));
    assert_eq!(frozen.gaps, [(0, kernels), (frozen.cast_len, norms)]);
    let values =
        |layout: &FlatLayout| layout.segments(1.0, |_| true).iter().map(|s| s.len).sum::<i64>();
    assert_eq!(values(&frozen), frozen.parameters_len());
    for tensor in frozen.tensor_locations() {
        let is_frozen =
            ["conv1", "bn1", "layer1"].iter().any(|stage| tensor.name.starts_with(stage));
        assert_eq!(tensor.region == FROZEN_REGION, is_frozen, "{}", tensor.name);
    }
}

#[test]
fn tensors_fill_their_regions_without_gaps_and_with_the_decaying_ones_first() {
    let layout = layout("resnet18", 7);
    let mut next = [0, 0];
    let mut locations = layout.tensor_locations();
    locations.sort_by_key(|tensor| (tensor.region, tensor.offset));
    for tensor in locations {
        let next = &mut next[usize::from(tensor.region == BN_RUNNING)];
        assert_eq!(tensor.offset, *next, "{}", tensor.name);
        *next += tensor.shape.iter().product::<usize>();
    }
    assert_eq!(next, [layout.parameters_len() as usize, layout.statistics_len() as usize]);
    for entry in &layout.parameters {
        let name = &entry.name;
        let norm = name.contains("bn") || name.contains("downsample.1");
        assert_eq!(entry.offset < layout.cast_len, !norm && name != "fc.bias", "{name}");
    }
}

#[test]
fn initial_values_depend_on_the_seed_alone() {
    let with = |overrides: &[&str]| learner(overrides).state_dict().unwrap();
    let first = with(&[]);
    for (other, same) in [
        (with(&["model.channels_last=false"]), true),
        (with(&["optimizer.momentum=0.0", "train.virtual_ranks=4"]), true),
        (with(&["seed=6"]), false),
    ] {
        let equal = first.iter().zip(&other).all(|(a, b)| a.0 == b.0 && a.1.equal(&b.1));
        assert_eq!(equal, same);
    }
}

#[test]
fn initial_values_have_torchvisions_distribution() {
    for (name, tensor) in learner(&[]).state_dict().unwrap() {
        let std = tensor.std(false).double_value(&[]);
        let expected = match *tensor.size() {
            [out, _, h, w] => (2.0 / (out * h * w) as f64).sqrt(),
            [_, inputs] => (1.0 / (3 * inputs) as f64).sqrt(), // uniform on ±1/sqrt(inputs)
            _ if name == "fc.bias" => {
                assert!(tensor.abs().max().double_value(&[]) <= 1.0 / 512_f64.sqrt());
                continue;
            }
            _ => 0.0,
        };
        assert!((std - expected).abs() <= 0.05 * expected, "{name}: {std} {expected}");
        if expected == 0.0 {
            let one = name.ends_with(".weight") || name.ends_with("_var");
            assert_eq!(tensor.double_value(&[0]), f64::from(u8::from(one)), "{name}");
        }
    }
}

#[test]
fn zero_init_gamma_makes_every_block_an_identity() {
    let state = learner(&["model.zero_init_gamma=true"]).state_dict().unwrap();
    for (name, tensor) in state {
        let last = name.starts_with("layer") && name.ends_with("bn2.weight");
        if last {
            assert_eq!(tensor.abs().max().double_value(&[]), 0.0, "{name}");
        } else if name.ends_with("bn1.weight") {
            assert_eq!(tensor.min().double_value(&[]), 1.0, "{name}");
        }
    }
}
