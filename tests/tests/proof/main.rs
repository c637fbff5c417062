//! The proof of exactness as a whole: real processes on three hosts, faults of all kinds, and the end of a quiet run.
//!
//! Each history has every kind of fault once. Weights, moving average, evaluations, the samples of each step and the exit
//! code must be those of an undisturbed run. A fault counts only once its effect was seen.
//!
//! ```text
//! make proof                                                           1,000 faults
//! BATON_CHAOS_SEED=17 make proof FAULTS=200                            from this seed on
//! BATON_CHAOS_HISTORY="rank-killed:2@130 host-cut:1@20" make proof     these faults
//! ```
//! A history that fails there is reduced to the faults that are needed, and printed.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests may panic and print"
)]

mod fault;
mod history;
#[path = "../kit/namespaces.rs"]
mod namespaces;
mod world;

use std::{collections::BTreeMap, path::Path, time::Instant};

use baton_data::{
    Mode,
    write::{Field, FieldKind, Value, Writer},
};
use fault::{Fault, KINDS, from_text, history, reduce, to_text};
use namespaces::{Inside, assert_inside, try_inside};
use world::{Outcome, quiet};

/// ResNet-18 with moving average, MixUp, phases and evaluations, on the smallest images that it takes. The end of a run
/// decides how many epochs it has.
const RECIPE: &str = r#"
name = "proof"
seed = 11
model = { arch = "resnet18", num_classes = 10 }
optimizer = { kind = "sgd", momentum = 0.9, weight_decay = 5e-4 }
schedule = { kind = "constant", lr = 0.002 }
loss = { kind = "cross_entropy", label_smoothing = 0.1 }
ema = { decay = 0.9 }
augment = { mixup_alpha = 0.2 }
evaluation = { every_epochs = 4, crop_ratio = 1.0 }
checkpoint = { every_epochs = 0, every_steps = 20, keep_last = 2 }

[train]
epochs = 1000000
global_batch = 16
resolution = 32
virtual_ranks = 4
phases = [
    { from_epoch = 1, resolution = 64, global_batch = 24 },
    { from_epoch = 2, resolution = 32, global_batch = 32 },
]

[cluster]
device = "cpu"
hang_seconds = 4.0
node_grace_seconds = 1.0
collective_seconds = 5.0
rendezvous_seconds = 20.0
restart_limit = 20

[data]
train = "IMAGES/train.beton"
val = "IMAGES/val.beton"
"#;

/// Each phase is begun.
const LEAST_EPOCHS: u64 = 3;

/// Changes with which the undisturbed run is independent of how fast this machine is.
const QUIET: [&str; 4] = [
    "cluster.hang_seconds=0",
    "cluster.collective_seconds=300",
    "cluster.node_grace_seconds=30",
    "checkpoint.every_steps=0",
];

const HISTORY: &str = "BATON_CHAOS_HISTORY";
const FAULTS: &str = "BATON_CHAOS_FAULTS";
const SEED: &str = "BATON_CHAOS_SEED";

/// Histories in an ordinary test run.
const HISTORIES: u64 = 2;

#[test]
fn every_kind_of_fault_changes_nothing_of_the_result() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let given = std::env::var(HISTORY).ok().map(|text| from_text(&text).unwrap());
    let count = number(FAULTS).map(|faults| faults.div_ceil(KINDS.len() as u64));
    let is_chosen = given.is_some() || count.is_some();
    let first = number(SEED).unwrap_or(1);
    let histories: Vec<Vec<Fault>> = match given {
        Some(given) => vec![given],
        None => (first..first + count.unwrap_or(HISTORIES)).map(history).collect(),
    };
    let mut struck = 0;
    for faults in histories {
        println!("{HISTORY}=\"{}\"", to_text(&faults));
        let Some(Inside { has_passed, text }) = play(&faults) else { return };
        if !has_passed && is_chosen {
            println!("{text}\nThis history fails. It is reduced, one fault after the other.");
            let fails = |faults: &[Fault]| play(faults).is_some_and(|inside| !inside.has_passed);
            assert!(!faults.is_empty(), "it fails without any fault");
            panic!("{HISTORY}=\"{}\" make proof", to_text(&reduce(faults, fails)));
        }
        assert!(has_passed, "{text}\n{HISTORY}=\"{}\" make proof", to_text(&faults));
        struck += faults.len();
        println!("{text}\n{struck} faults struck, no bit is wrong");
    }
}

fn play(faults: &[Fault]) -> Option<Inside> {
    try_inside("a_history_inside_the_namespaces", &[(HISTORY, &to_text(faults))])
}

#[tokio::test]
#[ignore = "started by the tests above, inside namespaces"]
async fn a_history_inside_the_namespaces() {
    assert_inside();
    let faults = from_text(&std::env::var(HISTORY).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    write_images(&folder.path().join("train.beton"), 96);
    write_images(&folder.path().join("val.beton"), 24);
    let recipe = RECIPE.replace("IMAGES", &folder.path().display().to_string());
    let start = Instant::now();
    let disturbed = history::run(&recipe, &faults).await;
    let until_end = start.elapsed().as_secs_f64();
    assert_same(&disturbed, &quiet(&recipe, &QUIET, disturbed.epochs).await);
    let all = start.elapsed().as_secs_f64();
    println!("{until_end:.0} s with faults, {:.0} s without", all - until_end);
}

/// Noise of which each class has another brightness.
fn write_images(path: &Path, count: u64) {
    const SIDE: u32 = 40;
    let fields = [("image", FieldKind::RgbImage), ("label", FieldKind::Int)];
    let fields = fields.map(|(name, kind)| Field::new(name, kind)).to_vec();
    let mut writer = Writer::create(path, fields, count, 1 << 13).unwrap();
    let mut rng = fastrand::Rng::with_seed(count);
    for number in 0..count {
        let label = number % 10;
        let pixels = (0..3 * SIDE * SIDE).map(|_| rng.u8(0..100) + 15 * label as u8);
        let bytes: Vec<u8> = pixels.collect();
        let image = Value::Image { mode: Mode::Raw, width: SIDE, height: SIDE, bytes: &bytes };
        writer.push(&[image, Value::Int(label as i64)]).unwrap();
    }
    writer.finish().unwrap();
}

fn assert_same(disturbed: &Outcome, quiet: &Outcome) {
    assert_eq!(quiet.code, Some(0));
    assert_eq!(disturbed.code, quiet.code);
    for ((name, values), (same, expected)) in disturbed.state.iter().zip(&quiet.state) {
        assert!(name == same && values == expected, "{name} differs after {} epochs", quiet.epochs);
    }
    assert_eq!(disturbed.state.len(), quiet.state.len());
    // Steps after a loss of everything may have been made once before, also some after the end.
    let end = quiet.evaluations.keys().last().copied().unwrap();
    let until_end: BTreeMap<_, _> = disturbed.evaluations.range(..=end).collect();
    assert_eq!(until_end, quiet.evaluations.iter().collect());
    for (batch, samples) in disturbed.samples.range(..(quiet.epochs, 0, 0)) {
        assert_eq!(Some(samples), quiet.samples.get(batch), "{batch:?}");
    }
    // What a rank logs while its disk is full is lost.
    let (seen, all) =
        (disturbed.samples.range(..(quiet.epochs, 0, 0)).count(), quiet.samples.len());
    println!("{} epochs; the samples of {seen} of {all} micro-batches were seen", quiet.epochs);
    assert!(seen * 10 >= all * 9, "the samples of {seen} of {all} micro-batches were seen");
}

#[test]
fn a_history_has_every_kind_of_fault_once_and_can_be_repeated_from_its_text() {
    for seed in 0..20 {
        let faults = history(seed);
        assert_eq!(from_text(&to_text(&faults)).unwrap(), faults);
        for fault in &faults {
            assert_eq!(faults.iter().filter(|other| other.kind == fault.kind).count(), 1);
        }
        assert_ne!(faults, history(seed + 1));
    }
    assert_eq!(from_text("").unwrap(), []);
    for wrong in ["rank-killed", "rank-killed:4@1", "rank-killed:1@x", "ranks-killed:1@1"] {
        let error = from_text(wrong).unwrap_err();
        assert!(error.contains("is not KIND:HOST@MILLISECONDS"), "{error}");
    }
}

#[test]
fn a_history_is_reduced_to_the_faults_that_are_needed() {
    let faults = history(3);
    let needed = [faults[4], faults[11]];
    let fails = |some: &[Fault]| needed.iter().all(|fault| some.contains(fault));
    assert_eq!(reduce(faults.clone(), fails), needed);
}
