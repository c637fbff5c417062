use baton_recipe::JobSpec;

use self::program_kit::{GRAPH, changed, fixture};
use super::*;
use crate::{Error, Machine, PlanRequest, RecipePlan, kit::recipe, memory::Memory};

#[path = "../../../program/tests/kit/mod.rs"]
mod program_kit;

/// The network `Small` of `scripts/parity/fixtures.py`; `crates/program/tests/costs.rs` has its costs by hand.
fn program() -> Program {
    Program::read(&fixture("small.pt2")).unwrap()
}

fn spec(changes: &[&str]) -> JobSpec {
    let base = [
        "model={ arch='program', program='small.pt2', num_classes=10 }",
        "train={ epochs=1, global_batch=128, resolution=8, virtual_ranks=1 }",
        "optimizer={ kind='adamw' }",
    ];
    recipe(&base, changes)
}

fn need(compute: Compute, batch: u64) -> Memory {
    let network = Network::of_program(&program(), compute, 8).unwrap();
    let mut spec = spec(&[]);
    spec.precision.compute = compute;
    Memory::new(&spec, &network, 1, batch)
}

fn part(memory: &Memory, name: &str) -> Option<u64> {
    memory.parts.iter().find(|part| part.name == name).map(|part| part.bytes)
}

fn plan(spec: &JobSpec, program: Option<&Program>) -> Result<RecipePlan, Error> {
    let request = PlanRequest {
        spec,
        samples: 1 << 24,
        val_samples: 1_000,
        signal: [1, 100],
        program,
        language: None,
        dollars_per_hour: None,
        calibration: None,
    };
    request.plan(Machine::named("t4").unwrap())
}

#[test]
fn tensors_are_counted_once() {
    let network = Network::of_program(&program(), Compute::Fp32, 8).unwrap();
    // The convolution, BatchNorm, the tied layer, the last layer.
    assert_eq!(network.parameters(), (216 + 8) + 16 + 64 + 90);
    assert_eq!(network.statistics(), 2 * 8);
    // A buffer of 8 integers of the state dict as float32, and one of 8 numbers that is not saved.
    assert_eq!(network.frozen(), [8 + 8, 0]);
    assert_eq!(network.macs(), 3_664);
}

#[test]
fn activations_have_a_part_per_sample_and_one_per_pass() {
    let memory = need(Compute::Fp32, 100);
    // At the peak the images, BatchNorm's input, ReLU's result and a number of stochastic depth are kept, and there are
    // three gradients of 8 x 4² values.
    let per_sample = 4 * (3 * 64 + 128 + 128 + 1) + 3 * 4 * 128;
    assert_eq!(part(&memory, "activations"), Some(100 * per_sample + 64));
    assert_eq!(part(&memory, "optimizer"), Some(2 * 4 * 394));
    assert_eq!(part(&memory, "frozen weights"), Some(4 * 16));
}

/// Unlike Baton's own networks, which keep a copy of their weights from step to step.
#[test]
fn autocast_copies_weights_in_every_pass() {
    let memory = need(Compute::Bf16, 0);
    assert_eq!(part(&memory, "activations"), Some(64 + 2 * (8 * 27 + 8 * 8 + 10 * 8)));
    assert_eq!(part(&memory, "working copy"), None);
    assert_eq!(part(&memory, "gradients of a pass"), Some(4 * 394));
}

#[test]
fn a_program_has_a_plan() {
    let program = program();
    let plan = plan(&spec(&[]), Some(&program)).unwrap();
    assert!(plan.fits && plan.seconds > 0.0 && plan.seconds.is_finite(), "{plan:?}");
    assert!(plan.loader.is_some());
    assert!(!plan.notes.iter().any(|note| note.contains("operators")), "{:?}", plan.notes);
    let rows = &plan.segments[0].step.pass;
    let flop = |kind| rows.iter().find(|row| row.kind == kind).map(|row| row.flop);
    // Forward, and two gradients; the images have none.
    assert_eq!(flop(OperationKind::Linear), Some(2.0 * 128.0 * 3.0 * 208.0));
    assert_eq!(flop(OperationKind::Convolution), Some(2.0 * 128.0 * 2.0 * 3_456.0));
}

#[test]
fn operators_whose_costs_are_not_known_are_noted() {
    let (tanh, other) = ("torch.ops.aten.tanh.default", "torch.ops.aten.digamma.default");
    let program = changed("small.pt2", GRAPH, tanh, other).unwrap();
    let notes = plan(&spec(&[]), Some(&program)).unwrap().notes;
    assert!(notes.iter().any(|note| note.contains("1 of 18 operators have no rule")), "{notes:?}");
}

#[test]
fn a_program_is_planned_for_the_images_that_it_takes() {
    let program = program();
    let other = plan(&spec(&["train.resolution=16"]), Some(&program)).unwrap_err().to_string();
    assert!(other.contains("but the recipe has images of 16 px"), "{other}");
    assert!(matches!(plan(&spec(&[]), None), Err(Error::ProgramNotRead)));
}

#[test]
fn the_advice_for_a_program_that_does_not_fit_says_what_is_not_counted() {
    let program = program();
    let plan = plan(&spec(&["train.global_batch=8388608"]), Some(&program)).unwrap();
    assert!(!plan.fits);
    let note = plan.notes.iter().find(|note| note.contains("do not fit")).unwrap();
    assert!(note.contains("train.grad_accumulation=") && note.contains("does not count"), "{note}");
}
