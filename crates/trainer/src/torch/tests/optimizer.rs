//! Update rules against scalar versions in f64.

use baton_job::spec;
use tch::Kind;

use super::*;
use crate::torch::optimizer::Optimizer;

const PARAMETERS: usize = 6;
const DECAYED: usize = 4;
const UPDATES: u64 = 25;

fn gradient_at(step: u64) -> Vec<f32> {
    (0..PARAMETERS).map(|i| ((step as f32 + 1.3) * (i as f32 + 0.7)).sin()).collect()
}

fn rate_at(step: u64) -> f64 {
    0.1 / (1.0 + step as f64)
}

/// Runs `optimizer` and `scalar(weight, gradient, step, decays)` side by side, one `scalar` per
/// parameter.
fn compare<S: FnMut(f64, f64, u64, bool) -> f64>(
    optimizer: &spec::Optimizer,
    mut scalar: impl FnMut() -> S,
    decay_all: bool,
) {
    let (len, decayed) = (PARAMETERS as i64, DECAYED as i64);
    let mut rule = Optimizer::new(optimizer, len, decayed, Device::Cpu).unwrap();
    let start = [1.0_f32, -2.0, 0.5, 3.0, -0.1, 0.0];
    let mut weights = Tensor::from_slice(&start);
    let mut expected = start.map(f64::from);
    let mut scalars: Vec<S> = (0..PARAMETERS).map(|_| scalar()).collect();
    for step in 0..UPDATES {
        let gradient = gradient_at(step);
        let tensor = Tensor::from_slice(&gradient);
        rule.update(&mut weights, &tensor, Step(step), rate_at(step)).unwrap();
        for (i, scalar) in scalars.iter_mut().enumerate() {
            let decays = decay_all || i < DECAYED;
            expected[i] = scalar(expected[i], f64::from(gradient[i]), step, decays);
        }
        for (found, expected) in values(&weights).into_iter().zip(expected) {
            assert!((f64::from(found) - expected).abs() < 2e-6, "{optimizer:?} step {step}");
        }
    }
}

#[test]
fn sgd_follows_torchs_formula() {
    for (momentum, nesterov, decay_all) in
        [(0.0, false, false), (0.9, false, false), (0.9, true, false), (0.9, true, true)]
    {
        let weight_decay = 0.01;
        let rule = spec::Optimizer::Sgd {
            momentum,
            nesterov,
            weight_decay,
            decay_norm_and_bias: decay_all,
        };
        let scalar = || {
            let mut buffer = None;
            move |weight: f64, gradient: f64, step, decays| {
                let gradient = gradient + if decays { weight_decay * weight } else { 0.0 };
                let velocity = buffer.map_or(gradient, |buffer: f64| momentum * buffer + gradient);
                buffer = Some(velocity);
                let direction = if nesterov { gradient + momentum * velocity } else { velocity };
                weight - rate_at(step) * direction
            }
        };
        compare(&rule, scalar, decay_all);
    }
}

#[test]
fn adamw_follows_torchs_formula() {
    for (betas, decay_all) in [([0.9, 0.999], false), ([0.8, 0.4], true)] {
        let [beta1, beta2] = betas;
        let (eps, weight_decay) = (1e-3, 0.05);
        let rule =
            spec::Optimizer::AdamW { betas, eps, weight_decay, decay_norm_and_bias: decay_all };
        let scalar = || {
            let (mut mean, mut square) = (0.0, 0.0);
            move |weight: f64, gradient: f64, step, decays| {
                let lr = rate_at(step);
                let weight = if decays { weight * (1.0 - lr * weight_decay) } else { weight };
                mean = beta1 * mean + (1.0 - beta1) * gradient;
                square = beta2 * square + (1.0 - beta2) * gradient * gradient;
                let unbiased =
                    |moment: f64, beta: f64| moment / (1.0 - beta.powf(step as f64 + 1.0));
                weight - lr * unbiased(mean, beta1) / (unbiased(square, beta2).sqrt() + eps)
            }
        };
        compare(&rule, scalar, decay_all);
    }
}

#[test]
fn rate_zero_leaves_weights_alone() {
    let adamw = spec::Optimizer::AdamW {
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.1,
        decay_norm_and_bias: true,
    };
    let mut rule = Optimizer::new(&adamw, 2, 2, Device::Cpu).unwrap();
    let mut weights = Tensor::from_slice(&[1.0_f32, 2.0]);
    let gradient = Tensor::zeros([2], (Kind::Float, Device::Cpu));
    rule.update(&mut weights, &gradient, Step(0), 0.0).unwrap();
    assert_eq!(values(&weights), [1.0, 2.0]);
}

#[test]
fn every_value_of_a_buffer_of_many_blocks_is_updated_once() {
    let rule = spec::Optimizer::Sgd {
        momentum: 0.5,
        nesterov: false,
        weight_decay: 0.0,
        decay_norm_and_bias: false,
    };
    let len = 300_001;
    let mut rule = Optimizer::new(&rule, len, 200_000, Device::Cpu).unwrap();
    let mut weights = Tensor::zeros([len], (Kind::Float, Device::Cpu));
    let gradient = Tensor::ones([len], (Kind::Float, Device::Cpu));
    for step in 0..2 {
        rule.update(&mut weights, &gradient, Step(step), 1.0).unwrap();
    }
    assert!(weights.eq(-2.5).all().int64_value(&[]) == 1);
}
