//! Properties of the learner, tested on the smallest network and images.

mod decoder;
mod fused;
mod gradient;
mod mixing;
mod models;
mod network;
mod objective;
mod optimizer;
mod precision;
mod program;
mod recompute;
mod spans;
mod state;
mod tasks;
mod tiny_vgg;

use baton_collectives::BufferMut;
use baton_data::{Batch, InputType};
use baton_recipe::{JobSpec, Step};
use tch::{Device, Tensor};

use super::{TorchLeaf, TorchLearner, device, task::Classification};
use crate::{
    kit,
    learner::{EvaluatedWeights, Leaf, Learner, Summand, Sums, Update},
};

fn recipe(overrides: &[&str]) -> JobSpec {
    let of_all = [
        "seed=5",
        "train={ epochs=1, global_batch=8, resolution=32, virtual_ranks=2 }",
        "optimizer={ kind='sgd', momentum=0.9, weight_decay=1e-4 }",
        "schedule.lr=0.05",
        "loss.label_smoothing=0.1",
    ];
    kit::recipe(&of_all, overrides)
}

/// The cross entropy of this many classes.
fn classification(classes: u32, smoothing: f64) -> Classification {
    Classification { classes, smoothing, weights: None, is_binary: false }
}

fn learner(overrides: &[&str]) -> TorchLearner {
    device::set_threads(1);
    TorchLearner::new(&recipe(overrides), &InputType::Image, Device::Cpu).unwrap()
}

/// `count` images of 32 × 32 pixels: bytes from a linear congruential generator, brighter for higher labels so that
/// there is something to learn.
fn batch(count: usize) -> Batch {
    let mut state = 1_u32;
    let mut images = Vec::new();
    for sample in 0..count {
        for _ in 0..32 * 32 * 3 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            images.push((state >> 25) as u8 + 12 * (sample % 10) as u8);
        }
    }
    let labels = (0..count).map(|sample| (sample % 10) as i64).collect();
    Batch::of_images(&images, 32, labels, (100..100 + count as u64).collect())
}

fn gradient_of(learner: &mut TorchLearner, batch: &Batch) -> (TorchLeaf, Sums) {
    let mut leaf = learner.new_leaf().unwrap();
    learner.gradient(batch, 1.0 / batch.len() as f32, &mut leaf).unwrap();
    let sums = sums_of(&mut leaf);
    (leaf, sums)
}

/// The sums in a leaf's tail.
fn sums_of(leaf: &mut TorchLeaf) -> Sums {
    let [loss, top1, count, ..] = leaf.tail().unwrap();
    Sums { loss: loss.into(), others: vec![top1.into()], count: count as u64 }
}

/// One update from one virtual rank; returns the mean loss before it.
fn train(learner: &mut TorchLearner, batch: &Batch, step: u64) -> f64 {
    train_at(0.05, learner, batch, step)
}

fn train_at(lr: f64, learner: &mut TorchLearner, batch: &Batch, step: u64) -> f64 {
    let (mut leaf, sums) = gradient_of(learner, batch);
    update(learner, &mut leaf, step, lr);
    sums.loss / sums.count as f64
}

/// One update from the leaf of one micro-batch.
fn update(learner: &mut TorchLearner, leaf: &mut TorchLeaf, step: u64, lr: f64) {
    learner.measure(leaf).unwrap();
    learner.update(leaf, &Update { step: Step(step), lr, micro_batches: 1 }).unwrap();
}

fn evaluated(learner: &mut TorchLearner, batch: &Batch) -> Sums {
    learner.evaluate(batch, EvaluatedWeights::Raw, &mut || false).unwrap().unwrap().sums
}

fn host(buffer: BufferMut<'_>) -> &mut [f32] {
    match buffer {
        BufferMut::Host(values) => values,
        BufferMut::Device(_) => panic!("not in host memory"),
    }
}

/// Bits of every region, so that NaN equals NaN and 0 differs from -0.
fn state(learner: &mut TorchLearner) -> Vec<(&'static str, Vec<u32>)> {
    let bits = |values: &mut [f32]| values.iter().map(|value| value.to_bits()).collect();
    let regions = learner.regions().into_iter();
    regions.map(|region| (region.name, bits(host(region.buffer)))).collect()
}

fn bits(leaf: &mut TorchLeaf) -> Vec<u32> {
    host(leaf.buffer()).iter().map(|value| value.to_bits()).collect()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    let flat = tensor.contiguous().view([-1]);
    Vec::try_from(&flat).unwrap()
}

/// Norm of the difference over the norm of `expected`.
pub(super) fn relative_error(found: &Tensor, expected: &Tensor) -> f64 {
    let difference = (found - expected).norm().double_value(&[]);
    difference / expected.norm().double_value(&[])
}
