//! Update rules compared with scalar versions in f64, on a CPU and with the GPU implementations.

use baton_model::{Builder, Init, TensorRole};
use tch::Kind;

use super::*;
use crate::torch::{
    flat::FlatLayout,
    fused::Fused,
    optimizer::{Optimizer, Rates},
};

/// The kernel ends at the next alignment border, so that there is no padding after it.
const PARAMETERS: usize = KERNEL + 2;
const KERNEL: usize = 16;
const UPDATES: u64 = 25;

/// A layout of tensors with name, shape and role; those with two dimensions have weight decay.
fn layout_of(tensors: &[(&str, &[u64], TensorRole)]) -> FlatLayout {
    let mut network = Builder::images().finish();
    for (position, (name, shape, role)) in tensors.iter().enumerate() {
        network.parameters.push(baton_model::Tensor {
            aliases: Vec::new(),
            name: (*name).to_owned(),
            shape: shape.to_vec(),
            init: Init::Constant(0.0),
            decays: shape.len() > 1,
            is_cast: shape.len() > 1,
            is_hidden: shape.len() > 1,
            role: *role,
            position,
        });
    }
    FlatLayout::new(&network, false)
}

/// A kernel and a bias.
fn layout() -> FlatLayout {
    layout_of(&[
        ("fc.weight", &[2, 8], TensorRole::Trained),
        ("fc.bias", &[2], TensorRole::Trained),
    ])
}

/// Initial weights.
fn start() -> [f32; PARAMETERS] {
    std::array::from_fn(|i| [1.0, -2.0, 0.5, 3.0, -0.1, 0.0][i % 6])
}

fn gradient_at(step: u64) -> Vec<f32> {
    (0..PARAMETERS).map(|i| ((step as f32 + 1.3) * (i as f32 + 0.7)).sin()).collect()
}

fn rate_at(step: u64) -> f64 {
    0.1 / (1.0 + step as f64)
}

/// Implementation of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Implementation {
    Host,
    Device,
    Fused,
}

/// One optimizer with its weights.
struct Side {
    optimizer: Optimizer,
    weights: Tensor,
    implementation: Implementation,
}

impl Side {
    /// The same optimizer with every implementation.
    fn all(spec: &JobSpec, layout: &FlatLayout, start: &[f32]) -> Vec<Self> {
        let side = |implementation| Self {
            optimizer: Optimizer::new(spec, layout, Device::Cpu).unwrap(),
            weights: Tensor::from_slice(start),
            implementation,
        };
        let all = [Implementation::Host, Implementation::Device, Implementation::Fused];
        let has_it =
            |side: &Self| side.implementation != Implementation::Fused || side.optimizer.is_sgd();
        all.map(side).into_iter().filter(has_it).collect()
    }

    fn update(&mut self, gradient: &[f32], step: u64, lr: f64) {
        let gradient = Tensor::from_slice(gradient);
        let mut norm = Tensor::zeros([1], (Kind::Float, Device::Cpu));
        self.optimizer.measure(&gradient, &mut norm).unwrap();
        let (weights, rates) = (&mut self.weights, Rates { step: Step(step), lr });
        let optimizer = &mut self.optimizer;
        match self.implementation {
            Implementation::Host => optimizer.update_on_host(weights, &gradient, &norm, rates),
            Implementation::Device => optimizer.update_on_device(weights, &gradient, &norm, rates),
            Implementation::Fused => {
                let fused = Fused::on(Device::Cpu).unwrap();
                optimizer.update_fused(fused, (weights, None), &gradient, &norm, rates)
            }
        }
        .unwrap();
    }

    fn state(&mut self, name: &str) -> Vec<f32> {
        let mut state = self.optimizer.state();
        values(state.iter_mut().find(|(found, _)| *found == name).unwrap().1)
    }
}

/// Compares a recipe's optimizer with `scalar(weights, gradient, step)`, which updates in f64.
fn compare(overrides: &[&str], mut scalar: impl FnMut(&mut [f64; PARAMETERS], &[f64], u64)) {
    let start = start();
    let mut sides = Side::all(&recipe(overrides), &layout(), &start);
    let mut expected = start.map(f64::from);
    for step in 0..UPDATES {
        let gradient = gradient_at(step);
        let exact: Vec<f64> = gradient.iter().map(|value| f64::from(*value)).collect();
        scalar(&mut expected, &exact, step);
        for side in &mut sides {
            side.update(&gradient, step, rate_at(step));
            for (found, expected) in values(&side.weights).into_iter().zip(expected) {
                let error = (f64::from(found) - expected).abs();
                assert!(error < 4e-6, "{overrides:?} step {step}, {:?}", side.implementation);
            }
        }
    }
}

#[test]
fn sgd_follows_torchs_formula() {
    for (momentum, nesterov, decay_all) in
        [(0.0, false, false), (0.9, false, false), (0.9, true, false), (0.9, true, true)]
    {
        let decay = 0.01;
        let optimizer = format!(
            "optimizer={{kind='sgd', momentum={momentum:.1}, nesterov={nesterov}, \
             weight_decay={decay}, decay_norm_and_bias={decay_all}}}"
        );
        let mut velocities = [None; PARAMETERS];
        compare(&[&optimizer], |weights, gradient, step| {
            for (i, weight) in weights.iter_mut().enumerate() {
                let decay = if decay_all || i < KERNEL { decay } else { 0.0 };
                let gradient = gradient[i] + decay * *weight;
                let velocity = velocities[i].map_or(gradient, |v: f64| momentum * v + gradient);
                velocities[i] = Some(velocity);
                let direction = if nesterov { gradient + momentum * velocity } else { velocity };
                *weight -= rate_at(step) * direction;
            }
        });
    }
}

#[test]
fn adamw_follows_torchs_formula() {
    for (beta1, beta2, decay_all) in [(0.9, 0.999, false), (0.8, 0.4, true)] {
        let (eps, decay) = (1e-3, 0.05);
        let optimizer = format!(
            "optimizer={{kind='adamw', betas=[{beta1}, {beta2}], eps={eps}, weight_decay={decay}, \
             decay_norm_and_bias={decay_all}}}"
        );
        let (mut means, mut squares) = ([0.0; PARAMETERS], [0.0; PARAMETERS]);
        compare(&[&optimizer], |weights, gradient, step| {
            let lr = rate_at(step);
            for (i, weight) in weights.iter_mut().enumerate() {
                if decay_all || i < KERNEL {
                    *weight *= 1.0 - lr * decay;
                }
                let unbiased =
                    |moment: f64, beta: f64| moment / (1.0 - beta.powf(step as f64 + 1.0));
                means[i] = beta1 * means[i] + (1.0 - beta1) * gradient[i];
                squares[i] = beta2 * squares[i] + (1.0 - beta2) * gradient[i] * gradient[i];
                *weight -=
                    lr * unbiased(means[i], beta1) / (unbiased(squares[i], beta2).sqrt() + eps);
            }
        });
    }
}

/// You et al. 2017, algorithm 1; the rate is applied when the weights change, as in SGD here.
#[test]
fn lars_follows_its_paper() {
    let (trust, decay) = (0.02, 0.01);
    let norm = |values: &[f64]| values.iter().map(|v| v * v).sum::<f64>().sqrt();
    let optimizer =
        "optimizer={kind='lars', momentum=0.9, weight_decay=0.01, trust_coefficient=0.02}";
    let mut velocities = [0.0; PARAMETERS];
    compare(&[optimizer], |weights, gradient, step| {
        let size = norm(&weights[..KERNEL]);
        let layer_rate = trust * size / (norm(&gradient[..KERNEL]) + decay * size);
        for (i, weight) in weights.iter_mut().enumerate() {
            let change = match i < KERNEL {
                true => layer_rate * (gradient[i] + decay * *weight),
                false => gradient[i],
            };
            velocities[i] = 0.9 * velocities[i] + change;
            *weight -= rate_at(step) * velocities[i];
        }
    });
}

/// You et al. 2020, algorithm 2, with φ the identity.
#[test]
fn lamb_follows_its_paper() {
    let (decay, eps) = (0.05, 1e-3);
    let norm = |values: &[f64]| values.iter().map(|v| v * v).sum::<f64>().sqrt();
    let optimizer = "optimizer={kind='lamb', betas=[0.8, 0.9], eps=1e-3, weight_decay=0.05}";
    let (mut means, mut squares) = ([0.0; PARAMETERS], [0.0; PARAMETERS]);
    compare(&[optimizer], |weights, gradient, step| {
        let unbiased = |moment: f64, beta: f64| moment / (1.0 - beta.powf(step as f64 + 1.0));
        let steps: Vec<f64> = (0..PARAMETERS)
            .map(|i| {
                means[i] = 0.8 * means[i] + 0.2 * gradient[i];
                squares[i] = 0.9 * squares[i] + 0.1 * gradient[i] * gradient[i];
                let decay = if i < KERNEL { decay * weights[i] } else { 0.0 };
                unbiased(means[i], 0.8) / (unbiased(squares[i], 0.9).sqrt() + eps) + decay
            })
            .collect();
        let layer_rate = norm(&weights[..KERNEL]) / norm(&steps[..KERNEL]);
        for (i, weight) in weights.iter_mut().enumerate() {
            *weight -= rate_at(step) * if i < KERNEL { layer_rate } else { 1.0 } * steps[i];
        }
    });
}

/// Five steps of the iteration in f64, on a matrix of 2 rows.
fn orthogonal(matrix: &[f64]) -> Vec<f64> {
    let norm = matrix.iter().map(|v| v * v).sum::<f64>().sqrt();
    let mut rows: Vec<Vec<f64>> =
        matrix.chunks(KERNEL / 2).map(|row| row.iter().map(|v| v / norm).collect()).collect();
    for _ in 0..5 {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (p, q, r) = (dot(&rows[0], &rows[0]), dot(&rows[0], &rows[1]), dot(&rows[1], &rows[1]));
        let polynomial = |linear: f64, square: f64| -4.7750 * linear + 2.0315 * square;
        let (a, b, c) = (
            polynomial(p, p * p + q * q),
            polynomial(q, p * q + q * r),
            polynomial(r, q * q + r * r),
        );
        let column = |i: usize| (rows[0][i], rows[1][i]);
        let row = |of: &dyn Fn((f64, f64)) -> f64| (0..KERNEL / 2).map(|i| of(column(i))).collect();
        rows = vec![
            row(&|(x, y)| 3.4445 * x + a * x + b * y),
            row(&|(x, y)| 3.4445 * y + b * x + c * y),
        ];
    }
    rows.concat()
}

/// `torch.optim.Muon` for the kernel, AdamW for the bias.
#[test]
fn muon_follows_torchs_formula() {
    let unbiased =
        |moment: f64, beta: f64, step: u64| moment / (1.0 - beta.powf(step as f64 + 1.0));
    for (momentum, nesterov) in [(0.95, true), (0.5, false)] {
        let optimizer = format!(
            "optimizer={{kind='muon', momentum={momentum}, nesterov={nesterov}, betas=[0.8, 0.9], eps=1e-3, \
             weight_decay=0.05}}"
        );
        let (mut means, mut squares) = ([0.0; PARAMETERS], [0.0; PARAMETERS]);
        compare(&[&optimizer], |weights, gradient, step| {
            let lr = rate_at(step);
            let mut ahead = [0.0; KERNEL];
            for i in 0..KERNEL {
                means[i] = momentum * means[i] + (1.0 - momentum) * gradient[i];
                ahead[i] = match nesterov {
                    true => momentum * means[i] + (1.0 - momentum) * gradient[i],
                    false => means[i],
                };
            }
            for (weight, step) in weights.iter_mut().zip(orthogonal(&ahead)) {
                *weight = *weight * (1.0 - lr * 0.05) - lr * 0.2 * 8_f64.sqrt() * step;
            }
            for i in KERNEL..PARAMETERS {
                means[i] = 0.8 * means[i] + 0.2 * gradient[i];
                squares[i] = 0.9 * squares[i] + 0.1 * gradient[i] * gradient[i];
                weights[i] -= lr * unbiased(means[i], 0.8, step)
                    / (unbiased(squares[i], 0.9, step).sqrt() + 1e-3);
            }
        });
    }
}

#[test]
fn weights_that_muon_leaves_to_adamw_change_as_with_adamw() {
    let start = start();
    let muon = "optimizer={kind='muon', weight_decay=0.05, adamw=['fc.*']}";
    let adamw = "optimizer={kind='adamw', weight_decay=0.05}";
    let sides = |optimizer| Side::all(&recipe(&[optimizer]), &layout(), &start);
    for (mut muon, mut adamw) in sides(muon).into_iter().zip(sides(adamw)) {
        for step in 0..UPDATES {
            muon.update(&gradient_at(step), step, rate_at(step));
            adamw.update(&gradient_at(step), step, rate_at(step));
        }
        let error = relative_error(&muon.weights, &adamw.weights);
        assert!(error < 1e-6, "{:?}: {error}", muon.implementation);
    }
}

#[test]
fn the_rate_falls_from_each_layer_to_the_one_below_it() {
    use TensorRole::Trained;
    let layout = layout_of(&[
        ("body.0.weight", &[4, 8], Trained),
        ("body.0.bias", &[4], Trained),
        ("body.1.weight", &[4, 8], Trained),
        ("body.1.bias", &[4], Trained),
        ("head.weight", &[2, 4], Trained),
    ]);
    let len = layout.parameters_len() as usize;
    let start: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin()).collect();
    let gradient = |step: u64| -> Vec<f32> {
        (0..len).map(|i| ((step as f32 + 1.3) * (i as f32 + 0.7)).sin()).collect()
    };
    for optimizer in [
        "optimizer={kind='sgd', weight_decay=0.1}",
        "optimizer={kind='sgd', momentum=0.9, weight_decay=0.1}",
        "optimizer={kind='sgd', momentum=0.9, nesterov=true, weight_decay=0.1}",
        "optimizer={kind='adamw', weight_decay=0.1}",
        "optimizer={kind='lars', momentum=0.9, weight_decay=0.1}",
        "optimizer={kind='lamb', weight_decay=0.1}",
        "optimizer={kind='muon', weight_decay=0.1}",
    ] {
        let decayed = recipe(&[optimizer, "train.layer_decay=0.5"]);
        let trained = |spec: &JobSpec, rate: f64| {
            let mut sides = Side::all(spec, &layout, &start);
            for side in &mut sides {
                (0..4).for_each(|step| side.update(&gradient(step), step, 0.1 * rate));
            }
            sides
        };
        let found = trained(&decayed, 1.0);
        for (factor, names) in [(0.25, "body.0"), (0.5, "body.1"), (1.0, "head")] {
            let expected = trained(&recipe(&[optimizer]), factor);
            for (found, expected) in found.iter().zip(&expected) {
                let mut entries = layout.parameters.iter();
                assert!(entries.any(|entry| entry.name.starts_with(names)));
                for entry in &layout.parameters {
                    let error = relative_error(
                        &entry.view(&found.weights).unwrap(),
                        &entry.view(&expected.weights).unwrap(),
                    );
                    let is_same = error < 1e-6;
                    assert_eq!(
                        is_same,
                        entry.name.starts_with(names),
                        "{optimizer}, {}, {factor}, {:?}: {error}",
                        entry.name,
                        found.implementation
                    );
                }
            }
        }
    }
}

/// `torch.nn.utils.clip_grad_norm_`.
#[test]
fn a_gradient_above_the_norm_is_scaled_down_to_it() {
    let norm = |values: &[f64]| values.iter().map(|v| v * v).sum::<f64>().sqrt();
    let mut clipped = 0;
    compare(&["train.clip_grad_norm=3.0", "optimizer={kind='sgd'}"], |weights, gradient, step| {
        let norm = norm(gradient);
        clipped += usize::from(norm > 3.0);
        let factor = (3.0 / (norm + 1e-6)).min(1.0);
        for (weight, gradient) in weights.iter_mut().zip(gradient) {
            *weight -= rate_at(step) * factor * gradient;
        }
    });
    assert!((1..UPDATES as usize).contains(&clipped), "{clipped}");
}

#[test]
fn average_begins_with_the_first_weights_and_follows_every_few_updates() {
    let spec = recipe(&["ema={decay=0.75, every_steps=2}", "optimizer={kind='sgd'}"]);
    for mut side in Side::all(&spec, &layout(), &[1.0; PARAMETERS]) {
        let mut averages = Vec::new();
        for step in 0..5 {
            side.update(&[1.0; PARAMETERS], step, 1.0);
            averages.push(side.state("ema")[5]);
        }
        // Weights 0, -1, -2, -3, -4; at -1 a copy, at -3 a quarter of the way from there.
        assert_eq!(averages, [0.0, -1.0, -1.0, -1.5, -1.5], "{:?}", side.implementation);
    }
}

#[test]
fn an_overflow_changes_the_loss_scale_and_nothing_else() {
    for optimizer in [
        "optimizer={kind='sgd', momentum=0.9, weight_decay=0.1}",
        "optimizer={kind='sgd', momentum=0.9, nesterov=true}",
        "optimizer={kind='adamw', weight_decay=0.1}",
        "optimizer={kind='lars', momentum=0.9}",
        "optimizer={kind='lamb', weight_decay=0.1}",
        "optimizer={kind='muon', weight_decay=0.1}",
    ] {
        let scale =
            "precision.loss_scale={initial=8.0, growth=4.0, backoff=0.5, growth_interval=2}";
        let spec = recipe(&["precision.compute=fp16", scale, optimizer]);
        // With the same number format of Muon's iteration.
        let plain = recipe(&["precision.compute=bf16", optimizer]);
        for (mut side, mut other) in Side::all(&spec, &layout(), &[1.0; PARAMETERS])
            .into_iter()
            .zip(Side::all(&plain, &layout(), &[1.0; PARAMETERS]))
        {
            let gradient = gradient_at(3);
            let scaled = |by: f32| gradient.iter().map(|value| value * by).collect::<Vec<_>>();
            let mut bad = scaled(8.0);
            bad[2] = f32::INFINITY;
            side.update(&scaled(8.0), 0, 0.1);
            side.update(&bad, 1, 0.1);
            assert_eq!(side.state("loss_scale"), [4.0, 0.0, 1.0], "{optimizer}");
            bad[2] = f32::NAN;
            side.update(&bad, 2, 0.1);
            side.update(&scaled(2.0), 3, 0.1);
            side.update(&scaled(2.0), 4, 0.1);
            assert_eq!(side.state("loss_scale"), [8.0, 0.0, 2.0], "{optimizer}");
            // The same as without the bad gradients.
            for step in 0..3 {
                other.update(&gradient, step, 0.1);
            }
            let error = relative_error(&side.weights, &other.weights);
            assert!(error < 1e-6, "{optimizer}, {:?}: {error}", side.implementation);
        }
    }
}

#[test]
fn rate_zero_does_not_change_the_weights() {
    let adamw = "optimizer={kind='adamw', weight_decay=0.1, decay_norm_and_bias=true}";
    let start = start();
    for mut side in Side::all(&recipe(&[adamw]), &layout(), &start) {
        side.update(&[0.0; PARAMETERS], 0, 0.0);
        assert_eq!(values(&side.weights), start);
    }
}

#[test]
fn every_value_of_many_blocks_is_updated_once() {
    use TensorRole::{Frozen, Trained};
    let layout = layout_of(&[
        ("conv1.weight", &[1, 50_001], Frozen),
        ("fc.weight", &[1, 300_001], Trained),
        ("fc.bias", &[3], Trained),
        ("bn1.bias", &[2], Frozen),
    ]);
    let len = layout.parameters_len() as usize;
    assert_eq!(len, 300_016 + 3);
    let optimizer = "optimizer={kind='sgd', momentum=0.5}";
    for mut side in Side::all(&recipe(&[optimizer, "ema.decay=0.5"]), &layout, &vec![0.0; len]) {
        for step in 0..2 {
            side.update(&vec![1.0; len], step, 1.0);
        }
        let all = |values: &[f32], expected: f32| {
            let trained = layout.parameters.iter().filter(|entry| !entry.frozen);
            let mut all = trained.flat_map(|entry| {
                values[entry.offset as usize..(entry.offset + entry.len()) as usize].to_vec()
            });
            all.all(|value| value == expected)
        };
        assert!(all(&values(&side.weights), -2.5));
        // -1, then half of the way to -2.5.
        assert!(all(&side.state("ema"), -1.75));
    }
}

#[test]
fn frozen_parameters_change_no_bit_of_the_norm() {
    use TensorRole::{Frozen, Trained};
    let of = |role| {
        layout_of(&[
            ("conv1.weight", &[1, 50_001], role),
            ("conv2.weight", &[1, 40_000], Trained),
            ("bn1.bias", &[20], role),
            ("conv3.weight", &[1, 300], role),
            ("fc.weight", &[1, 30_001], Trained),
            ("fc.bias", &[33], Trained),
        ])
    };
    let (whole, frozen) = (of(Trained), of(Frozen));
    let value = |tensor: usize, i: i64| ((tensor as i64 * 7_919 + i) as f32 * 0.37).sin();
    let norm_of = |layout: &FlatLayout| {
        let mut gradient = vec![0.0; layout.parameters_len() as usize];
        for tensor in [1, 4, 5] {
            let entry = &layout.parameters[tensor];
            for i in 0..entry.len() {
                gradient[(entry.offset + i) as usize] = value(tensor, i);
            }
        }
        let optimizer = Optimizer::new(&recipe(&[]), layout, Device::Cpu).unwrap();
        let mut norm = Tensor::zeros([1], (Kind::Float, Device::Cpu));
        optimizer.measure(&Tensor::from_slice(&gradient), &mut norm).unwrap();
        values(&norm)[0].to_bits()
    };
    assert_eq!(norm_of(&frozen), norm_of(&whole));
}
