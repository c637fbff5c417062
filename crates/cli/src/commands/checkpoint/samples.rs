//! Checkpoints for tests.

use baton_checkpoint::{
    Manifest, RegionInfo, SaveId, Snapshot, Store, TensorInfo, VERSION, slice_of,
};
use baton_job::{Generation, JobId, Rank};
use baton_recipe::{
    Epoch, Step,
    progress::{Accuracy, Progress},
};
use tempfile::TempDir;

/// A store in a temporary folder.
pub(super) struct TestStore {
    pub(super) store: Store,
    pub(super) folder: TempDir,
}

impl TestStore {
    pub(super) fn location(&self) -> String {
        self.folder.path().display().to_string()
    }
}

/// An empty store.
pub(super) fn store() -> TestStore {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&folder.path().display().to_string()).unwrap();
    TestStore { store, folder }
}

/// Properties of a checkpoint to write.
pub(super) struct Sample {
    pub(super) generation: u64,
    pub(super) step: u64,
    pub(super) epoch: u32,
    pub(super) cursor: u64,
    /// Top-1 of the raw and of the averaged weights.
    pub(super) top1: Option<(f64, Option<f64>)>,
    pub(super) job: u128,
    pub(super) ranks: u32,
    pub(super) recipe: &'static str,
    pub(super) weights: Vec<f32>,
}

impl Default for Sample {
    fn default() -> Self {
        Self {
            generation: 2,
            step: 88,
            epoch: 4,
            cursor: 0,
            top1: None,
            job: 7,
            ranks: 2,
            recipe: r#"{"checkpoint":{"keep_last":2,"keep_best":true,"keep_every_epochs":4}}"#,
            weights: (0..6).map(|i| i as f32).collect(),
        }
    }
}

impl Sample {
    /// Writes its files and commits it.
    pub(super) fn save(&self, store: &Store) -> Manifest {
        let manifest = self.write(store);
        store.commit(&manifest).unwrap();
        manifest
    }

    /// Writes its files.
    pub(super) fn write(&self, store: &Store) -> Manifest {
        let id = SaveId { generation: Generation(self.generation), step: Step(self.step) };
        let regions = [("weights", self.weights.clone()), ("momentum", vec![0.5; 6])];
        let shards = (0..self.ranks).map(Rank).map(|rank| {
            let slices = regions
                .iter()
                .map(|(name, values)| (*name, &values[slice_of(values.len(), rank, self.ranks)]));
            let snapshot: Snapshot = slices.collect();
            store.write_shard(&id, rank, self.ranks, &snapshot).unwrap()
        });
        let tensor = |name: &str, offset, len| TensorInfo {
            name: name.to_owned(),
            shape: vec![len],
            region: "weights".to_owned(),
            offset,
            channels_last: false,
            integers: None,
        };
        let accuracy = |top1| Accuracy::from_legacy_fields(360, 0.25, (top1, 0.997), None);
        let region = |(name, values): &(&str, Vec<f32>)| RegionInfo {
            name: (*name).to_owned(),
            len: values.len(),
        };
        Manifest {
            version: VERSION,
            job: JobId(uuid::Uuid::from_u128(self.job)),
            arch: "resnet18".to_owned(),
            recipe: self.recipe.to_owned(),
            generation: id.generation,
            step: id.step,
            progress: Progress {
                step: id.step,
                epoch: Epoch(self.epoch),
                cursor: self.cursor,
                evaluated: self.top1.map(|_| Epoch(self.epoch)),
                last_evaluation: self.top1.map(|(raw, _)| accuracy(raw)),
                last_ema: self.top1.and_then(|(_, ema)| ema).map(accuracy),
                ..Progress::default()
            },
            train_samples: None,
            data: None,
            program: None,
            seed: 1,
            virtual_ranks: 8,
            world_size: self.ranks,
            shards: shards.collect(),
            layout: 1,
            regions: regions.iter().map(region).collect(),
            frozen: Vec::new(),
            tensors: vec![tensor("fc.weight", 0, 4), tensor("fc.bias", 4, 2)],
            created_unix_seconds: 1_795_252_508 + 60 * self.step,
        }
    }
}

/// A store whose newest checkpoint looks as if a newer Baton had written it.
pub(super) fn of_a_newer_baton() -> TestStore {
    let test_store = store();
    Sample { step: 66, ..Sample::default() }.save(&test_store.store);
    let manifest = Sample::default().save(&test_store.store);
    let path = test_store.folder.path().join(manifest.name()).join("manifest.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let text = text.replace(&format!("\"version\": {VERSION},"), "\"version\": 99,");
    let (text, _) = text.rsplit_once(",\n  \"blake3\"").unwrap();
    std::fs::write(path, Manifest::seal(text)).unwrap();
    test_store
}

/// The checkpoints of a run: one for every reason to keep or to remove a checkpoint.
pub(super) fn run() -> TestStore {
    let test_store = store();
    let store = &test_store.store;
    let sample = Sample::default;
    Sample { generation: 1, step: 200, job: 6, ..sample() }.save(store);
    store.raise_fence(Generation(2)).unwrap();
    let broken = Sample { step: 22, epoch: 1, ..sample() }.save(store);
    let shard = test_store.folder.path().join(broken.name()).join(&broken.shards[1].file);
    std::fs::remove_file(shard).unwrap();
    Sample { step: 44, epoch: 2, top1: Some((0.912, Some(0.95))), ..sample() }.save(store);
    Sample { step: 55, epoch: 2, cursor: 704, ..sample() }.write(store);
    Sample { step: 66, epoch: 3, top1: Some((0.925, Some(0.9))), ..sample() }.save(store);
    Sample { step: 88, epoch: 4, top1: Some((0.93, None)), ranks: 3, ..sample() }.save(store);
    Sample { step: 100, epoch: 4, cursor: 768, ..sample() }.save(store);
    Sample { step: 110, epoch: 5, ..sample() }.save(store);
    Sample { step: 121, epoch: 5, cursor: 704, ..sample() }.write(store);
    test_store
}
