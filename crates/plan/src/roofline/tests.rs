use super::*;
use crate::{gpu, kit::recipe, network::InputShape};

fn spec(changes: &[&str]) -> JobSpec {
    recipe(
        &[
            "model={ arch='resnet50', num_classes=1000 }",
            "train={ epochs=1, global_batch=256, resolution=224, virtual_ranks=1 }",
        ],
        changes,
    )
}

fn images_per_second(gpu: &Gpu, changes: &[&str], batch: u64) -> f64 {
    let spec = spec(changes);
    let network = Network::new(&spec.model, InputShape::Image { resolution: 224 }).unwrap();
    let roofline = Roofline::new(gpu, spec.precision.compute);
    batch as f64 / total(&roofline.training(&spec, &network, batch)).total()
}

/// From the column next to [`gpu::A100_40`] of the data sheet; no machine of the list has it.
const A100_80: Gpu = Gpu { name: "A100-80", bandwidth: 2_039e9, ..gpu::A100_40 };

#[test]
fn published_rates_of_one_gpu_are_met_within_a_tenth() {
    for (gpu, compute, published) in
        [(gpu::V100, "fp16", 1_200.0), (gpu::V100, "fp32", 367.0), (A100_80, "fp16", 2_470.0)]
    {
        let found = images_per_second(&gpu, &[&format!("precision.compute={compute}")], 256);
        let off = found / published - 1.0;
        assert!(off.abs() < 0.1, "{} {compute}: {found:.0}, {published} published", gpu.name);
    }
}

/// A known error, explained in docs/plan.md.
#[test]
fn tf32_is_estimated_faster_than_published() {
    let found = images_per_second(&A100_80, &[], 256);
    assert!((1_250.0..1_400.0).contains(&found), "{found:.0}, 938 published");
}

#[test]
fn small_batches_are_limited_by_launches() {
    let (spec, gpu) = (spec(&["precision.compute=bf16"]), gpu::H100);
    let network = Network::new(&spec.model, InputShape::Image { resolution: 224 }).unwrap();
    let roofline = Roofline::new(&gpu, spec.precision.compute);
    let seconds = total(&roofline.training(&spec, &network, 1));
    assert!(seconds.launches > seconds.arithmetic + seconds.bandwidth, "{seconds:?}");
    let many = total(&roofline.training(&spec, &network, 512));
    assert!(many.launches < 0.05 * many.total(), "{many:?}");
}

#[test]
fn larger_batches_never_train_fewer_images_per_second() {
    let rates: Vec<f64> = [1, 8, 64, 512, 4_096]
        .map(|batch| images_per_second(&gpu::T4, &["precision.compute=fp16"], batch))
        .to_vec();
    assert!(rates.is_sorted(), "{rates:?}");
}

#[test]
fn recomputed_stages_need_another_forward_pass_and_frozen_stages_no_gradient() {
    let rate = |changes: &[&str]| images_per_second(&gpu::L4, changes, 128);
    let all = "train.recompute=['stem', 'layer1', 'layer2', 'layer3', 'layer4']";
    let slower = rate(&[]) / rate(&[all]);
    assert!((1.25..1.45).contains(&slower), "{slower}");
    let frozen = ["model.pretrained=a.safetensors", "model.freeze=['stem', 'layer1']"];
    assert!(rate(&frozen) > 1.2 * rate(&[]));
}

#[test]
fn a_multiplication_counts_as_two_operations() {
    let spec = spec(&[]);
    let network = Network::new(&spec.model, InputShape::Image { resolution: 224 }).unwrap();
    let rows = Roofline::new(&gpu::T4, spec.precision.compute).evaluation(&network, 10);
    let flop: f64 = rows.iter().map(|row| row.flop).sum();
    assert_eq!(flop, 2.0 * 10.0 * network.macs() as f64);
}

#[test]
fn the_time_at_measured_peaks_is_between_its_bounds() {
    let spec = spec(&["precision.compute=bf16"]);
    let network = Network::new(&spec.model, InputShape::Image { resolution: 224 }).unwrap();
    let (flop, bytes) = (500e12, 3e12);
    let rows = Roofline::of_peaks(flop, bytes, Compute::Bf16).training(&spec, &network, 256);
    let seconds = total(&rows);
    let arithmetic: f64 = rows.iter().map(|row| row.flop / flop).sum();
    let bandwidth: f64 = rows.iter().map(|row| row.bytes / bytes).sum();
    assert_eq!(seconds.launches, 0.0);
    assert!(seconds.total() >= arithmetic.max(bandwidth), "{seconds:?}");
    assert!(seconds.total() <= arithmetic + bandwidth, "{seconds:?}");
}
