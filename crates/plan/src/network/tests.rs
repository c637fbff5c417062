use super::*;
use crate::kit::recipe;

fn network(arch: &str, classes: u32, changes: &[&str], input: InputShape) -> Network {
    let model = format!("model={{ arch='{arch}', num_classes={classes} }}");
    let spec = recipe(&[&model], changes);
    Network::new(&spec.model, input).unwrap()
}

fn at(resolution: u64, arch: &str) -> Network {
    network(arch, 1_000, &[], InputShape::Image { resolution })
}

fn signals(outputs: u32) -> Network {
    let input = InputShape::Signal { channels: 1, length: 100 };
    network("resnet34_1d", outputs, &["loss.kind=mse"], input)
}

#[test]
fn parameters_are_torchvisions() {
    // torchvision 0.26: sum(p.numel() for p in models.resnetN().parameters()), and BatchNorm layers.
    for (arch, parameters, norms) in [
        ("resnet18", 11_689_512, 20),
        ("resnet34", 21_797_672, 36),
        ("resnet50", 25_557_032, 53),
        ("resnet101", 44_549_160, 104),
        ("resnet152", 60_192_808, 155),
    ] {
        let network = at(224, arch);
        assert_eq!(network.parameters(), parameters, "{arch}");
        let found = network.layers.iter().filter(|layer| layer.kind == OperationKind::Norm).count();
        assert_eq!(found, norms, "{arch}");
    }
    // The trainer's own test has the same number.
    assert_eq!(signals(2).parameters(), 21_277_250);
}

#[test]
fn muon_multiplies_the_matrices_that_adamw_does_not_get() {
    let muon = |optimizer: &str| {
        let spec = recipe(&["model={ arch='resnet18', num_classes=10 }"], &[optimizer]);
        let input = InputShape::Image { resolution: 32 };
        Network::new(&spec.model, input).unwrap().muon(&spec)
    };
    assert_eq!(muon("optimizer={ kind='adamw' }"), (0, 0));
    // All 20 convolutions, not the last layer.
    assert_eq!(muon("optimizer={ kind='muon' }").0, 20);
    // Five times 64² (2 · 147 + 64), and 256² (2 · 512 + 256) of a matrix of 512 x 256.
    let wide = "optimizer={ kind='muon', adamw=['layer*'] }";
    assert_eq!(muon(wide), (1, 7_331_840));
    let tall = "optimizer={ kind='muon', adamw=['conv1.*', 'layer[1-3].*', 'layer4.?.conv*'] }";
    assert_eq!(muon(tall), (1, 419_430_400));
}

#[test]
fn multiplications_are_torchvisions() {
    // torchvision 0.26: `_ops` of the weights' metadata, in 10⁹ multiply-add operations at 224 px.
    for (arch, giga) in [
        ("resnet18", 1.814),
        ("resnet34", 3.664),
        ("resnet50", 4.089),
        ("resnet101", 7.801),
        ("resnet152", 11.514),
    ] {
        let found = at(224, arch).macs() as f64 / 1e9;
        assert!((found - giga).abs() < 0.002, "{arch}: {found}");
    }
}

#[test]
fn convolutions_of_resnet50_have_eleven_million_outputs() {
    let outputs = |resolution| -> u64 {
        let layers = at(resolution, "resnet50").layers;
        let convolutions = layers.iter().filter(|layer| layer.kind == OperationKind::Convolution);
        convolutions.map(|layer| layer.outputs).sum()
    };
    // By hand, at 224 px: stem 64·112²; layer1 3·(64+64+256)·56² + 256·56²; layer2 128·56² +
    // (128+512)·28² + 3·(128+128+512)·28² + 512·28²; and so on.
    assert_eq!(outputs(224), 11_113_984);
    // The figure in recipes/resnet50_t4.toml.
    let smaller = outputs(192) as f64 / 1e6;
    assert!((smaller - 8.2).abs() < 0.05, "{smaller}");
}

#[test]
fn shapes_are_halved_five_times() {
    let network = at(224, "resnet50");
    let outputs = |name: &str| {
        network.layers.iter().find(|layer| layer.name == name).map(|layer| layer.outputs)
    };
    assert_eq!(outputs("conv1.weight"), Some(64 * 112 * 112));
    assert_eq!(outputs("maxpool"), Some(64 * 56 * 56));
    assert_eq!(outputs("layer1.2.relu"), Some(256 * 56 * 56));
    assert_eq!(outputs("layer2.0.bn1"), Some(128 * 56 * 56));
    assert_eq!(outputs("layer4.0.downsample.1"), Some(2_048 * 7 * 7));
    assert_eq!(outputs("fc"), Some(1_000));
}

#[test]
fn odd_sides_are_rounded_up_and_signals_stay_flat() {
    let outputs = |network: &Network| -> Vec<u64> {
        let layers = network.layers.iter().filter(|layer| layer.name.ends_with(".relu"));
        layers.map(|layer| layer.outputs).collect()
    };
    assert_eq!(outputs(&at(33, "resnet18")).last(), Some(&(512 * 2 * 2)));
    // 100, 50, 25; then 13, 7, 4.
    assert_eq!(outputs(&signals(1)).first(), Some(&(64 * 25)));
    assert_eq!(outputs(&signals(1)).last(), Some(&(512 * 4)));
}

#[test]
fn a_blur_precedes_strided_convolutions_but_the_first() {
    let input = InputShape::Image { resolution: 224 };
    let blurred = network("resnet50", 1_000, &["model.blur_pool=true"], input);
    let blurs: Vec<&str> = blurred
        .layers
        .iter()
        .filter(|layer| layer.kind == OperationKind::Blur)
        .map(|layer| layer.name.as_str())
        .collect();
    let expected = ["layer2.0", "layer3.0", "layer4.0"]
        .map(|block| [format!("{block}.conv2.blur"), format!("{block}.downsample.0.blur")])
        .concat();
    assert_eq!(blurs, expected);
    let plain = at(224, "resnet50");
    assert_eq!((blurred.parameters(), blurred.macs()), (plain.parameters(), plain.macs()));
}

#[test]
fn backward_passes_need_twice_the_multiplications_but_for_the_images() {
    let network = at(224, "resnet50");
    let backward: u64 = network.layers.iter().map(|layer| layer.backward.macs).sum();
    let stem = network.layers.iter().find(|layer| layer.name == "conv1.weight").unwrap();
    assert_eq!(backward, 2 * network.macs() - stem.forward.macs);
}
