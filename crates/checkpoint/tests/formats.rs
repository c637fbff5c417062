//! Checkpoints that were ever written are read for ever: `fixtures/vN` was written when format N was new.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod kit;

use std::{num::NonZeroUsize, path::PathBuf};

use baton_checkpoint::{EntryState, Manifest, Store, TensorInfo, VERSION};
use baton_recipe::{
    Epoch,
    progress::{Accuracy, Progress},
};
use kit::{assert_holds, draft, id, snapshot};

fn fixture(version: u32) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/v{version}"))
}

/// What the fixtures hold: one manifest with every field filled, and its state.
fn fixture_manifest(shards: Vec<baton_checkpoint::ShardEntry>) -> Manifest {
    let id = id(3, 440);
    let accuracy = Accuracy { top1: 0.75, loss: 0.1, ..Accuracy::default() };
    Manifest {
        arch: "resnet50".into(),
        progress: Progress {
            step: id.step,
            epoch: Epoch(2),
            evaluated: Some(Epoch(2)),
            last_evaluation: Some(accuracy),
            ..Progress::default()
        },
        tensors: vec![TensorInfo {
            name: "conv1.weight".into(),
            shape: vec![2, 3, 7, 7],
            region: "weights".into(),
            offset: 5,
            channels_last: true,
        }],
        seed: u64::MAX,
        created_unix_seconds: 1_790_000_000,
        ..draft(id, 2, shards)
    }
}

#[test]
fn version_1_is_read_with_equal_values() {
    let store = Store::open_existing(fixture(1).to_str().unwrap()).unwrap();
    let entries = store.list().unwrap();
    let [only] = entries.as_slice() else { panic!("{entries:?}") };
    let EntryState::Whole(manifest) = &only.state else { panic!("{only:?}") };

    assert_eq!(**manifest, fixture_manifest(manifest.shards.clone()));
    store.prove(&[manifest], NonZeroUsize::MIN, &|_| {}).pop().unwrap().unwrap();
    assert_holds(&store, manifest);
    assert_eq!(store.fence().unwrap(), manifest.generation);
}

#[test]
fn the_version_that_is_written_has_a_fixture() {
    let folder = fixture(VERSION);
    assert!(
        folder.is_dir(),
        "{} is missing: write it with `cargo test -p baton-checkpoint --test formats -- --ignored`",
        folder.display()
    );
}

#[test]
#[ignore = "writes the fixture of a new version"]
fn write_the_fixture_of_this_version() {
    let folder = fixture(VERSION);
    assert!(!folder.exists(), "{} is there, and stays as it is for ever", folder.display());
    let store = Store::open(folder.to_str().unwrap()).unwrap();
    let id = id(3, 440);
    store.raise_fence(id.generation).unwrap();
    let write = |rank| {
        let snapshot = snapshot(id.step.0, rank, 2);
        store.write_shard(&id, baton_job::Rank(rank), 2, &snapshot).unwrap()
    };
    store.commit(&fixture_manifest((0..2).map(write).collect())).unwrap();
}
