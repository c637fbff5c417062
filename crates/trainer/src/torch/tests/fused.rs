//! Our own kernels compared with libtorch's, on the host.

use tch::Kind;

use super::*;
use crate::torch::fused::{Epilogue, Fused, NormLayer};

const FUSED: &str = "precision.fused=true";
const EPSILON: f64 = 1e-5;

/// Operations after a normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EpilogueKind {
    Nothing,
    Relu,
    AddRelu,
}

/// Inputs of one layer, each with a gradient; all f32.
struct Inputs {
    x: Tensor,
    residual: Tensor,
    scale: Tensor,
    shift: Tensor,
    /// Gradient of the output.
    gradient: Tensor,
}

/// Output, batch mean, batch variance, gradients of x, scale, shift and, if it was added, residual.
type Outcome = Vec<Tensor>;

impl Inputs {
    fn new(size: [i64; 4]) -> Self {
        tch::manual_seed(7);
        let options = (Kind::Float, Device::Cpu);
        let channels_last = |tensor: Tensor| tensor.permute([0, 3, 1, 2]);
        let [n, c, h, w] = size;
        let random = || channels_last(Tensor::randn([n, h, w, c], options));
        Self {
            x: random() * 2.0 + 1.0,
            residual: random(),
            scale: Tensor::randn([c], options) + 1.0,
            shift: Tensor::randn([c], options),
            gradient: random(),
        }
    }

    /// Runs `layer(x, residual, scale, shift, mean, variance)` with activations rounded to `kind` and computed in
    /// `work`.
    fn run(
        &self,
        kind: Kind,
        work: Kind,
        epilogue: EpilogueKind,
        layer: impl Fn([&Tensor; 6]) -> Tensor,
    ) -> Outcome {
        let activations = [&self.x, &self.residual].map(|t| t.to_kind(kind).to_kind(work));
        let [x, residual] = activations.map(|t| t.detach().set_requires_grad(true));
        let [scale, shift] =
            [&self.scale, &self.shift].map(|t| t.detach().copy().set_requires_grad(true));
        let (mean, variance) = (scale.zeros_like(), scale.zeros_like());
        let y = layer([&x, &residual, &scale, &shift, &mean.detach(), &variance.detach()]);
        let gradient = self.gradient.to_kind(kind).to_kind(work);
        let objective = (&y * gradient).sum(Kind::Float);
        let mut with_respect_to = vec![&x, &scale, &shift];
        if epilogue == EpilogueKind::AddRelu {
            with_respect_to.push(&residual);
        }
        let gradients = Tensor::run_backward(&[&objective], &with_respect_to, false, false);
        let mut outcome = vec![y.detach(), mean.detach(), variance.detach()];
        outcome.extend(gradients);
        outcome.into_iter().map(|tensor| tensor.to_kind(Kind::Float)).collect()
    }

    fn fused(&self, kind: Kind, epilogue: EpilogueKind) -> Outcome {
        let fused = Fused::on(Device::Cpu).unwrap();
        self.run(kind, kind, epilogue, |[x, residual, scale, shift, mean, variance]| {
            let layer = NormLayer {
                scale,
                shift,
                batch_mean: mean,
                batch_variance: variance,
                epsilon: EPSILON,
            };
            let epilogue = match epilogue {
                EpilogueKind::Nothing => Epilogue::None,
                EpilogueKind::Relu => Epilogue::Relu,
                EpilogueKind::AddRelu => Epilogue::AddRelu(residual),
            };
            let y = fused.batch_norm(x, layer, epilogue).unwrap();
            assert_eq!((y.kind(), y.stride()), (x.kind(), x.stride()));
            y
        })
    }

    /// libtorch's operations in f32.
    fn plain(&self, kind: Kind, epilogue: EpilogueKind) -> Outcome {
        self.run(kind, Kind::Float, epilogue, |[x, residual, scale, shift, mean, variance]| {
            let running = (Some(mean), Some(variance));
            let y = x.batch_norm(
                Some(scale),
                Some(shift),
                running.0,
                running.1,
                true,
                1.0,
                EPSILON,
                true,
            );
            match epilogue {
                EpilogueKind::Nothing => y,
                EpilogueKind::Relu => y.relu(),
                EpilogueKind::AddRelu => (y + residual).relu(),
            }
        })
    }
}

#[test]
fn a_fused_layer_is_batch_norm_sum_and_relu() {
    let kinds = [(Kind::Float, 1e-6), (Kind::Half, 1e-3), (Kind::BFloat16, 6e-3)];
    for size in [[4, 64, 7, 5], [3, 10, 3, 3], [2, 256, 1, 1]] {
        let inputs = Inputs::new(size);
        for (kind, tolerance) in kinds {
            for epilogue in [EpilogueKind::Nothing, EpilogueKind::Relu, EpilogueKind::AddRelu] {
                let (found, expected) =
                    (inputs.fused(kind, epilogue), inputs.plain(kind, epilogue));
                assert_eq!(found.len(), expected.len());
                for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    // Two values always become 1 and -1 after the normalisation: no gradient.
                    let scale = if size[3] == 1 && index == 3 { 1e4 } else { 1.0 };
                    let error = relative_error(found, expected);
                    let limit = tolerance * scale;
                    assert!(error < limit, "{size:?}, {kind:?}, {epilogue:?}, {index}: {error}");
                }
            }
        }
    }
}

#[test]
fn inputs_that_do_not_fit_are_an_error() {
    let fused = Fused::on(Device::Cpu).unwrap();
    let of = |channels| Tensor::ones([channels], (Kind::Float, Device::Cpu));
    let refused = |x: &Tensor, channels, epilogue: Epilogue<'_>| {
        let (scale, statistics) = (of(channels), of(channels));
        let layer = NormLayer {
            scale: &scale,
            shift: &scale,
            batch_mean: &statistics,
            batch_variance: &statistics,
            epsilon: EPSILON,
        };
        fused.batch_norm(x, layer, epilogue).unwrap_err().to_string()
    };
    let x = Tensor::ones([2, 8, 4, 4], (Kind::Float, Device::Cpu));
    let flat = refused(&x.view([2, 8, 16]), 8, Epilogue::Relu);
    assert!(flat.contains("takes images, not 3 dimensions"), "{flat}");
    let double = refused(&x.to_kind(Kind::Double), 8, Epilogue::Relu);
    assert!(double.contains("does not take"), "{double}");
    let parameters = refused(&x, 4, Epilogue::None);
    assert!(parameters.contains("for each channel"), "{parameters}");
    let other = x.to_kind(Kind::Half);
    let residual = refused(&x, 8, Epilogue::AddRelu(&other));
    assert!(residual.contains("shape and type"), "{residual}");
}

/// Logits, statistics, sums, and gradients by name of one pass.
fn pass(overrides: &[&str], count: usize) -> (Tensor, Tensor, Sums, Vec<(String, Tensor)>) {
    let mut learner = learner(overrides);
    let logits = learner.logits(&batch(count), crate::torch::BatchNormMode::Training).unwrap();
    let (leaf, sums) = gradient_of(&mut learner, &batch(count));
    let gradients = learner.gradients(&leaf).unwrap();
    (logits, leaf.statistics, sums, gradients)
}

#[test]
fn a_fused_network_computes_the_same_as_the_plain_one() {
    // Zeros for the last scale of each block: otherwise the last bits decide which values a ReLU passes, and two
    // correct gradients differ (docs/decisions/0007-pointwise-products.md).
    let networks: [&[&str]; 3] = [
        &[],
        &["model.arch=resnet18", "model.blur_pool=true"],
        &["model.arch=resnet50", "model.zero_init_gamma=true"],
    ];
    for network in networks {
        let fused = [network, &[FUSED]].concat();
        let (logits, statistics, sums, gradients) = pass(&fused, 6);
        let (plain_logits, plain_statistics, plain_sums, plain_gradients) = pass(network, 6);
        let error = relative_error(&logits, &plain_logits);
        assert!(error < 1e-4, "{network:?}, logits: {error}");
        let of_statistics = relative_error(&statistics, &plain_statistics);
        println!(
            "{network:?}: difference of logits {error:.1e}, of statistics {of_statistics:.1e}"
        );
        assert!(of_statistics < 1e-5, "{network:?}, statistics: {of_statistics}");
        assert!((sums.loss / plain_sums.loss - 1.0).abs() < 1e-5, "{network:?}, loss");
        let mut worst = 0.0_f64;
        for ((name, found), (_, expected)) in gradients.iter().zip(&plain_gradients) {
            let size = expected.norm().double_value(&[]);
            let error = if size == 0.0 {
                found.norm().double_value(&[])
            } else {
                relative_error(found, expected)
            };
            worst = worst.max(error);
            assert!(error < 1e-3, "{network:?}, {name}: {error}");
        }
        println!("{network:?}: difference of gradients up to {worst:.1e}");
    }
}

#[test]
fn in_bf16_a_fused_network_is_no_further_from_f32_than_the_plain_one() {
    let flat = |gradients: &[(String, Tensor)]| {
        let flat: Vec<Tensor> = gradients.iter().map(|(_, g)| g.reshape([-1])).collect();
        Tensor::cat(&flat, 0)
    };
    for network in ["model.arch=resnet18", "model.arch=resnet50"] {
        let exact = ["model.zero_init_gamma=true", network];
        let half = [exact[0], exact[1], "precision.compute=bf16"];
        let fused = [exact[0], exact[1], "precision.compute=bf16", FUSED];
        let [exact, half, fused] = [&exact[..], &half, &fused].map(|recipe| pass(recipe, 8));
        let error = |found: &Tensor, exact: &Tensor| relative_error(found, exact);
        let errors = [
            ("logits", error(&fused.0, &exact.0), error(&half.0, &exact.0)),
            ("statistics", error(&fused.1, &exact.1), error(&half.1, &exact.1)),
            (
                "gradient",
                error(&flat(&fused.3), &flat(&exact.3)),
                error(&flat(&half.3), &flat(&exact.3)),
            ),
        ];
        for (what, fused, plain) in errors {
            println!("{network}, {what}: {fused:.2e} fused, {plain:.2e} plain");
            assert!(fused < 1.25 * plain + 1e-4, "{network}, {what}: {fused} against {plain}");
        }
    }
}

#[test]
fn recomputed_stages_change_no_bit_of_a_fused_gradient() {
    let bits_of = |recompute: &str| {
        let recompute = format!("train.recompute={recompute}");
        let mut learner = learner(&[&recompute, FUSED]);
        let (mut leaf, sums) = gradient_of(&mut learner, &batch(4));
        (bits(&mut leaf), sums)
    };
    let plain = bits_of("[]");
    for recompute in ["['stem', 'layer4']", "['layer1', 'layer2', 'layer3']"] {
        assert!(bits_of(recompute) == plain, "{recompute}");
    }
}

#[test]
fn frozen_stages_of_a_fused_network_keep_weights_and_statistics() {
    let mut learner = learner(&[
        "model.pretrained=unused.safetensors",
        "model.freeze=['stem', 'layer1']",
        "train.recompute=['layer3']",
        "precision.compute=bf16",
        FUSED,
    ]);
    let before = learner.state_dict().unwrap();
    for step in 0..2 {
        train(&mut learner, &batch(4), step);
    }
    for ((name, before), (_, after)) in before.iter().zip(learner.state_dict().unwrap()) {
        let kept = ["conv1", "bn1", "layer1"].iter().any(|stage| name.starts_with(stage));
        assert_eq!(before.equal(&after), kept, "{name}");
    }
}

/// The state and the working copy after updates with fixed gradients.
fn updated(overrides: &[&str]) -> (Vec<(&'static str, Vec<u32>)>, Tensor) {
    let mut learner = learner(overrides);
    for step in 0..3 {
        let mut leaf = learner.new_leaf().unwrap();
        let gradient = leaf.gradient.numel();
        let values: Vec<f32> = (0..gradient).map(|i| ((i + 7 * step) as f32 * 0.1).sin()).collect();
        leaf.gradient.copy_(&Tensor::from_slice(&values));
        update(&mut learner, &mut leaf, step as u64, 0.1);
    }
    // Reads the working copy that the update wrote; no cast comes before.
    let _ = learner.logits(&batch(2), crate::torch::BatchNormMode::Evaluation).unwrap();
    let working: Vec<Tensor> = learner
        .working
        .parameters
        .iter()
        .map(|p| p.detach().reshape([-1]).to_kind(Kind::Float))
        .collect();
    let working = Tensor::cat(&working, 0);
    (state(&mut learner), working)
}

#[test]
fn a_fused_update_has_the_bits_of_the_update_on_a_cpu() {
    let recipes: [&[&str]; 4] = [
        &[],
        &["ema={decay=0.9, every_steps=2}", "precision.compute=bf16", "train.clip_grad_norm=3.0"],
        &["optimizer={kind='sgd', momentum=0.8, nesterov=true, weight_decay=0.01}"],
        &[
            "optimizer={kind='sgd', weight_decay=0.01, decay_norm_and_bias=true}",
            "precision.compute=fp16",
        ],
    ];
    for recipe in recipes {
        let (plain, plain_working) = updated(recipe);
        let (fused, fused_working) = updated(&[recipe, &[FUSED]].concat());
        for ((name, fused), (_, plain)) in fused.iter().zip(&plain) {
            assert!(fused == plain, "{recipe:?}, {name}");
        }
        assert!(fused_working.equal(&plain_working), "{recipe:?}, working copy");
    }
}

#[test]
fn other_optimizers_are_updated_without_the_fused_kernel() {
    let adamw = "optimizer={kind='adamw', weight_decay=0.1}";
    assert!(updated(&[adamw]).0 == updated(&[adamw, FUSED]).0);
}

#[test]
fn a_fused_network_learns() {
    for compute in ["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"] {
        let mut learner = learner(&[FUSED, compute]);
        let losses: Vec<f64> =
            (0..6).map(|step| train_at(0.01, &mut learner, &batch(8), step)).collect();
        assert!(losses[5] < 0.75 * losses[0], "{compute}: {losses:?}");
    }
}
