//! Helpers of the tests: small states, saves of them, and checks afterwards.

pub(crate) mod hook;

use std::num::NonZeroUsize;

use baton_checkpoint::{
    Error, Manifest, RegionInfo, ResumePoint, Retention, SaveId, ShardEntry, Snapshot, Store,
    slice_of,
};
use baton_job::{Generation, JobId, Rank, message::Restore};
use baton_recipe::{Step, progress::Progress};
use tempfile::TempDir;

pub(crate) const LENS: [(&str, usize); 3] =
    [("weights", 1003), ("momentum", 1003), ("statistics", 5)];

/// A store in a folder of its own.
pub(crate) struct Fixture {
    pub(crate) folder: TempDir,
    pub(crate) store: Store,
}

pub(crate) fn fixture() -> Fixture {
    let folder = TempDir::new().unwrap();
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    Fixture { folder, store }
}

pub(crate) fn id(generation: u64, step: u64) -> SaveId {
    SaveId { generation: Generation(generation), step: Step(step) }
}

pub(crate) fn values(region: usize, len: usize, seed: u64) -> Vec<f32> {
    (0..len).map(|i| (i + 7 * region) as f32 + seed as f32 / 64.0).collect()
}

/// A rank's part of the state at a step.
pub(crate) fn snapshot(step: u64, rank: u32, world_size: u32) -> Snapshot {
    let state: Vec<Vec<f32>> =
        LENS.iter().enumerate().map(|(r, (_, len))| values(r, *len, step)).collect();
    let slices = LENS.iter().zip(&state);
    slices
        .map(|((name, len), values)| (*name, &values[slice_of(*len, Rank(rank), world_size)]))
        .collect()
}

/// Writes all shards of a save without committing it.
pub(crate) fn written(store: &Store, id: SaveId, world_size: u32) -> Manifest {
    let write = |rank| {
        let snapshot = snapshot(id.step.0, rank, world_size);
        store.write_shard(&id, Rank(rank), world_size, &snapshot).unwrap()
    };
    draft(id, world_size, (0..world_size).map(write).collect())
}

/// The manifest of a save with these shards.
pub(crate) fn draft(id: SaveId, world_size: u32, shards: Vec<ShardEntry>) -> Manifest {
    Manifest {
        version: baton_checkpoint::VERSION,
        job: JobId(uuid::Uuid::nil()),
        arch: "linear".into(),
        recipe: "{}".into(),
        generation: id.generation,
        step: id.step,
        progress: Progress { step: id.step, ..Progress::default() },
        train_samples: None,
        data: None,
        program: None,
        seed: 1,
        virtual_ranks: 8,
        world_size,
        regions: LENS
            .iter()
            .map(|(name, len)| RegionInfo { name: (*name).into(), len: *len })
            .collect(),
        layout: 1,
        frozen: Vec::new(),
        tensors: Vec::new(),
        shards,
        created_unix_seconds: 1,
    }
}

pub(crate) fn saved(store: &Store, id: SaveId, world_size: u32) -> Manifest {
    let manifest = written(store, id, world_size);
    store.commit(&manifest).unwrap();
    manifest
}

pub(crate) fn find(
    store: &Store,
    not_before: u64,
    path: Option<&str>,
) -> Result<Option<ResumePoint>, Error> {
    let path = path.map(str::to_owned);
    find_by(store, &Restore { not_before: Generation(not_before), path, ..Restore::default() })
}

pub(crate) fn find_by(store: &Store, restore: &Restore) -> Result<Option<ResumePoint>, Error> {
    store.find(restore, &mut |store, manifest| {
        store.verify(&[manifest], NonZeroUsize::MIN, &|_| {}).into_iter().collect()
    })
}

pub(crate) fn newest(store: &Store) -> ResumePoint {
    find(store, 0, None).unwrap().expect("a checkpoint")
}

pub(crate) fn names(store: &Store) -> Vec<String> {
    store.list().unwrap().into_iter().map(|entry| entry.name).collect()
}

pub(crate) fn assert_holds(store: &Store, manifest: &Manifest) {
    let mut state: Vec<Vec<f32>> = LENS.iter().map(|(_, len)| vec![f32::NAN; *len]).collect();
    let shards: Vec<_> = manifest.shards.iter().collect();
    let jobs = NonZeroUsize::new(2).unwrap();
    store
        .load(manifest, &shards, jobs, &mut |name, offset, values| {
            let region = LENS.iter().position(|(known, _)| *known == name).unwrap();
            for (i, value) in values.iter().enumerate() {
                assert!(state[region][offset + i].is_nan(), "value given twice");
                state[region][offset + i] = *value;
            }
        })
        .unwrap();
    for (r, (_, len)) in LENS.iter().enumerate() {
        assert_eq!(state[r], values(r, *len, manifest.step.0));
    }
}

pub(crate) fn keep(keep_last: u32, keep_best: bool, not_before: u64, generation: u64) -> Retention {
    Retention {
        keep_last,
        keep_best,
        keep_every_epochs: 0,
        guard: None,
        restore: Restore { not_before: Generation(not_before), ..Restore::default() },
        generation: Generation(generation),
    }
}

/// A manifest's text with the correct digest.
pub(crate) fn sealed(mut json: serde_json::Value) -> String {
    json.as_object_mut().unwrap().remove("blake3");
    Manifest::seal(&serde_json::to_string_pretty(&json).unwrap())
}
