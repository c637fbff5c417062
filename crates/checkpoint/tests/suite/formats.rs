//! Checkpoints of every format version stay readable: `fixtures/vN` was written when format N was new.

use std::{num::NonZeroUsize, path::PathBuf};

use baton_checkpoint::{
    EntryState, Float, FrozenEntry, Manifest, ShardEntry, Store, TensorInfo, VERSION,
};
use baton_recipe::{
    Epoch,
    progress::{Accuracy, Progress},
};

use crate::kit::{assert_holds, draft, id, snapshot};

fn fixture(version: u32) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/v{version}"))
}

/// Values of the frozen region.
const FROZEN: [f32; 8] = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0];

/// The manifest in the fixture of a version, with every field of that version set.
fn fixture_manifest(version: u32, shards: Vec<ShardEntry>, frozen: Vec<FrozenEntry>) -> Manifest {
    let is_first = version == 1;
    let tensor = |name: &str, shape: &[usize], region: &str, offset| TensorInfo {
        name: name.into(),
        shape: shape.into(),
        region: region.into(),
        offset,
        channels_last: shape.len() == 4,
        integers: None,
    };
    let trained = tensor("conv1.weight", &[2, 3, 7, 7], "weights", if is_first { 5 } else { 16 });
    let frozen_tensor = tensor("layer1.0.bn1.weight", &[8], "frozen", 0);
    let id = id(3, 440);
    let accuracy = Accuracy::from_legacy_fields(0, 0.1, (0.75, 0.0), None);
    Manifest {
        version,
        layout: if is_first { 1 } else { 2 },
        frozen,
        arch: "resnet50".into(),
        progress: Progress {
            step: id.step,
            epoch: Epoch(2),
            evaluated: Some(Epoch(2)),
            last_evaluation: Some(accuracy),
            ..Progress::default()
        },
        tensors: if is_first { vec![trained] } else { vec![trained, frozen_tensor] },
        seed: u64::MAX,
        created_unix_seconds: 1_790_000_000,
        ..draft(id, 2, shards)
    }
}

/// Without it `shard` cannot begin, and `manifest` tries nothing but what is refused.
#[test]
fn the_seed_of_the_fuzz_targets_is_a_valid_manifest() {
    let seed = include_str!("../../../../fuzz/seeds/manifest/two_ranks");
    let manifest = Manifest::parse(id(2, 88), Manifest::seal(seed).as_bytes()).unwrap();
    assert_eq!((manifest.shards.len(), manifest.tensors.len()), (2, 3));
}

#[test]
fn every_version_is_read_with_equal_values() {
    for version in 1..=VERSION {
        let store = Store::open_existing(fixture(version).to_str().unwrap()).unwrap();
        let entries = store.list().unwrap();
        let [only] = entries.as_slice() else { panic!("{entries:?}") };
        let EntryState::Complete(manifest) = &only.state else { panic!("{only:?}") };

        let (shards, frozen) = (manifest.shards.clone(), manifest.frozen.clone());
        assert_eq!(frozen.len(), usize::from(version > 1));
        assert_eq!(**manifest, fixture_manifest(version, shards, frozen));
        store.verify(&[manifest], NonZeroUsize::MIN, &|_| {}).pop().unwrap().unwrap();
        assert_holds(&store, manifest);
        store.load_frozen(manifest, &mut |_, _, values| assert_eq!(values, FROZEN)).unwrap();
        assert_eq!(store.fence().unwrap(), manifest.generation);
    }
}

#[test]
fn the_current_version_has_a_fixture() {
    let folder = fixture(VERSION);
    assert!(
        folder.is_dir(),
        "{} is missing: write it with `cargo test -p baton-checkpoint --test suite formats -- --ignored`",
        folder.display()
    );
}

#[test]
#[ignore = "writes the fixture of a new version"]
fn write_the_fixture_of_this_version() {
    let folder = fixture(VERSION);
    assert!(!folder.exists(), "{} exists and must never change", folder.display());
    let store = Store::open(folder.to_str().unwrap()).unwrap();
    let id = id(3, 440);
    store.raise_fence(id.generation).unwrap();
    let write = |rank| {
        let snapshot = snapshot(id.step.0, rank, 2);
        store.write_shard(&id, baton_job::Rank(rank), 2, &snapshot).unwrap()
    };
    let shards = (0..2).map(write).collect();
    let frozen = store.write_frozen(&id, "frozen", Float::F32, FROZEN.to_vec()).unwrap();
    store.commit(&fixture_manifest(VERSION, shards, vec![frozen])).unwrap();
}
