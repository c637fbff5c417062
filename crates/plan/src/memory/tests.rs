use proptest::prelude::*;

use super::*;
use crate::{gpu, kit::recipe, network::InputShape};

fn spec(changes: &[&str]) -> JobSpec {
    recipe(
        &[
            "model={ arch='resnet50', num_classes=1000 }",
            "train={ epochs=1, global_batch=2048, resolution=224 }",
            "precision={ compute='bf16', determinism='fast' }",
        ],
        changes,
    )
}

fn network(spec: &JobSpec, resolution: u64) -> Network {
    Network::new(&spec.model, InputShape::Image { resolution }).unwrap()
}

fn need(changes: &[&str], resolution: u64, batch: u64) -> Memory {
    let spec = spec(changes);
    Memory::new(&spec, &network(&spec, resolution), 8, batch)
}

fn part(memory: &Memory, name: &str) -> u64 {
    memory.parts.iter().find(|part| part.name == name).map_or(0, |part| part.bytes)
}

#[test]
fn the_state_has_the_expected_size() {
    let memory = need(&["ema={ decay = 0.999 }"], 224, 256);
    let (parameters, statistics) = (25_557_032, 53_120);
    // All but BatchNorm's scales and shifts, one each per statistic, and the last bias.
    let kernels = parameters - statistics - 1_000;
    assert_eq!(part(&memory, "weights"), 4 * parameters);
    assert_eq!(part(&memory, "working copy"), 2 * kernels);
    assert_eq!(part(&memory, "optimizer"), 4 * parameters);
    assert_eq!(part(&memory, "averaged weights"), 4 * (parameters + statistics) + 2 * kernels);
    assert_eq!(part(&memory, "BatchNorm statistics"), 8 * statistics);
    assert_eq!(
        part(&memory, "gradient sums"),
        2 * 4 * (parameters + statistics + GRADIENT_TAIL_LEN)
    );
    let state = 3 * parameters + 2 * statistics;
    assert_eq!(part(&memory, "copy for a checkpoint"), 4 * state.div_ceil(8));
    assert_eq!(part(&memory, "copy for a local checkpoint"), 0);
    let local = need(&["ema={ decay = 0.999 }", "checkpoint.local_dir=/disk"], 224, 256);
    assert_eq!(part(&local, "copy for a local checkpoint"), 4 * state.div_ceil(8));
    assert_eq!(memory.total_bytes, memory.parts.iter().map(|part| part.bytes).sum::<u64>());
}

#[test]
fn the_fixed_tree_receives_the_other_ranks_slices() {
    let strict = ["precision.determinism=strict"];
    let slice = (25_557_032_u64 + 53_120 + GRADIENT_TAIL_LEN).div_ceil(8);
    assert_eq!(part(&need(&strict, 224, 1), "received sums"), 7 * slice * 4);
    assert_eq!(part(&need(&[], 224, 1), "received sums"), 0);
    // With eight virtual ranks on three ranks, 0..3 and 3..6 have two subtrees each, and 6..8 has one.
    assert_eq!(subtrees(8, 3), 4);
}

#[test]
fn adamw_keeps_two_moments_and_fp32_no_copy() {
    let memory = need(&["optimizer={ kind = 'adamw' }", "precision.compute=fp32"], 224, 1);
    assert_eq!(part(&memory, "optimizer"), 8 * 25_557_032);
    assert_eq!(part(&memory, "working copy"), 0);
    assert_eq!(part(&need(&["optimizer={ kind = 'sgd' }"], 224, 1), "optimizer"), 0);
}

#[test]
fn resnet50_keeps_twice_its_convolution_outputs() {
    let memory = need(&[], 224, 1);
    // Values before and after BatchNorm, 2 bytes each, except four shortcuts that are added immediately.
    let shortcuts = 256 * 56 * 56 + 512 * 28 * 28 + 1_024 * 14 * 14 + 2_048 * 7 * 7;
    let norms = 2 * (2 * 11_113_984 - shortcuts);
    // The image, and the output of max pooling with its indices.
    let rest = 2 * 3 * 224 * 224 + (2 + 8) * 64 * 56 * 56;
    // The peak is after the backward pass of the head, with gradients of the last block's output.
    let gradients = 3 * 2 * 2_048 * 7 * 7;
    assert_eq!(part(&memory, "activations"), norms + rest + gradients);
}

#[test]
fn the_reference_recipe_fits_into_an_a100_with_room_to_spare() {
    let gib = need(&[], 224, 256).total_bytes as f64 / f64::from(1 << 30);
    assert!((10.0..16.0).contains(&gib), "{gib}");
    let spec = spec(&[]);
    let gpu_memory_bytes = gpu::A100_40.memory_bytes;
    let largest = Memory::largest_micro_batch(&spec, &network(&spec, 224), 8, gpu_memory_bytes);
    assert!((512..1_024).contains(&largest), "{largest}");
}

#[test]
fn the_largest_batch_is_the_last_that_fits() {
    let spec = spec(&[]);
    let network = network(&spec, 224);
    let gpu_memory_bytes = gpu::T4.memory_bytes;
    let largest = Memory::largest_micro_batch(&spec, &network, 1, gpu_memory_bytes);
    assert!(Memory::new(&spec, &network, 1, largest).total_bytes <= gpu_memory_bytes);
    assert!(Memory::new(&spec, &network, 1, largest + 1).total_bytes > gpu_memory_bytes);
    assert_eq!(Memory::largest_micro_batch(&spec, &network, 1, 1 << 30), 0);
}

#[test]
fn leaves_are_counted_as_in_the_fold() {
    // The same numbers as in the tests of crates/collectives/src/tree.rs.
    assert_eq!(leaves(64, 1, 1), 7);
    assert_eq!(leaves(8, 8, 1), 1);
    assert_eq!(leaves(8, 4, 1), 2);
    assert_eq!(leaves(8, 1, 1), 4);
    // Rank 1 of 3 has the virtual ranks 3, 4 and 5: only the last two form a subtree.
    assert_eq!(leaves(8, 3, 1), 3);
    assert_eq!(leaves(1, 1, 2), 2);
}

#[test]
fn recomputing_the_first_stages_saves_most() {
    let activations = |changes: &[&str]| part(&need(changes, 224, 64), "activations");
    let (all, stem) = (activations(&[]), activations(&["train.recompute=['stem']"]));
    let both = activations(&["train.recompute=['stem', 'layer1']"]);
    assert!(both < stem && stem < all, "{both} {stem} {all}");
    assert!((both as f64) < 0.7 * all as f64, "{both} {all}");
}

#[test]
fn frozen_stages_keep_nothing() {
    let frozen = ["model.pretrained=a.safetensors", "model.freeze=['stem', 'layer1']"];
    let less = part(&need(&frozen, 224, 64), "activations");
    assert!((less as f64) < 0.65 * part(&need(&[], 224, 64), "activations") as f64);
}

#[test]
fn frozen_weights_have_no_gradient_moment_or_average() {
    let changes =
        ["model.pretrained=a.safetensors", "model.freeze=['stem', 'layer1']", "ema.decay=0.9"];
    let (frozen, all) = (need(&changes, 224, 64), need(&changes[2..], 224, 64));
    let values = part(&all, "weights") / 4 - part(&frozen, "weights") / 4;
    let statistics =
        (part(&all, "BatchNorm statistics") - part(&frozen, "BatchNorm statistics")) / 8;
    assert_eq!(part(&frozen, "optimizer"), part(&frozen, "weights"));
    assert!(part(&frozen, "averaged weights") < part(&all, "averaged weights"));
    // f32 values, and a bf16 copy of all but BatchNorm's scales and shifts.
    let expected = 4 * (values + statistics) + 2 * (values - statistics);
    assert_eq!(part(&frozen, "frozen weights"), expected);
}

proptest! {
    #[test]
    fn more_samples_pixels_or_virtual_ranks_never_need_less(
        batch in 1u64..600, more in 0u64..600, side in 1u64..16, wider in 0u64..8, log2 in 0u32..7,
    ) {
        let spec = spec(&["train.virtual_ranks=1"]);
        let of = |side, batch| Memory::new(&spec, &network(&spec, side), 1, batch).total_bytes;
        let here = of(32 * side, batch);
        prop_assert!(of(32 * side, batch + more) >= here);
        prop_assert!(of(32 * (side + wider), batch) >= here);
        prop_assert!(leaves(2 << log2, 1, 1) >= leaves(1 << log2, 1, 1));
    }
}
