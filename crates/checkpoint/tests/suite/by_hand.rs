//! Operations that a user starts: verifying, comparing, copying and removing checkpoints.

use std::{fs, num::NonZeroUsize, path::PathBuf, sync::atomic::AtomicU64};

use baton_checkpoint::{
    Comparison, CopyResult, Difference, Error, Manifest, RegionInfo, SaveId, Snapshot, Store,
    TensorInfo, slice_of,
};
use baton_job::{Generation, Rank};

use crate::kit::{Fixture, draft, fixture, id};

impl Fixture {
    /// A file of a checkpoint.
    fn file(&self, manifest: &Manifest, name: &str) -> PathBuf {
        self.folder.path().join(manifest.name()).join(name)
    }

    fn flip_last_bit(&self, manifest: &Manifest, shard: usize) {
        let path = self.file(manifest, &manifest.shards[shard].file);
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(path, bytes).unwrap();
    }
}

fn saved(store: &Store, id: SaveId, world_size: u32, regions: &[(&str, Vec<f32>)]) -> Manifest {
    let shards = (0..world_size).map(Rank).map(|rank| {
        let snapshot: Snapshot = regions
            .iter()
            .map(|(name, values)| (*name, &values[slice_of(values.len(), rank, world_size)]))
            .collect();
        store.write_shard(&id, rank, world_size, &snapshot).unwrap()
    });
    let shards = shards.collect();
    let region =
        |(name, values): &(&str, Vec<f32>)| RegionInfo { name: (*name).into(), len: values.len() };
    let tensor = |name: &str, offset, shape: &[usize], channels_last| TensorInfo {
        name: name.into(),
        shape: shape.to_vec(),
        region: "weights".into(),
        offset,
        channels_last,
        integers: None,
    };
    let manifest = Manifest {
        regions: regions.iter().map(region).collect(),
        tensors: vec![tensor("conv", 0, &[1, 2, 2], true), tensor("fc", 4, &[2], false)],
        ..draft(id, world_size, shards)
    };
    store.commit(&manifest).unwrap();
    manifest
}

/// A state that depends on a number.
fn state(seed: f32) -> Vec<(&'static str, Vec<f32>)> {
    vec![("weights", (0..7).map(|i| i as f32 + seed).collect()), ("momentum", vec![seed; 3])]
}

fn jobs(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap()
}

#[test]
fn many_checkpoints_are_verified_together_with_a_result_for_each() {
    let f = fixture();
    let manifests: Vec<Manifest> =
        (1..=4).map(|step| saved(&f.store, id(1, step), 3, &state(step as f32))).collect();
    f.flip_last_bit(&manifests[1], 2);
    fs::remove_file(f.file(&manifests[3], &manifests[3].shards[0].file)).unwrap();
    for number in [1, 2, 8] {
        let read = AtomicU64::new(0);
        let all: Vec<&Manifest> = manifests.iter().collect();
        let outcomes = f.store.verify(&all, jobs(number), &|bytes| {
            read.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
        });
        let errors: Vec<Option<String>> =
            outcomes.into_iter().map(|outcome| outcome.err().map(|e| e.to_string())).collect();
        assert!(errors[0].is_none() && errors[2].is_none(), "{errors:?}");
        let flipped = errors[1].as_deref().unwrap();
        assert!(flipped.contains("shard-00002-of-00003.safetensors does not match"), "{flipped}");
        let missing = errors[3].as_deref().unwrap();
        assert!(missing.contains("shard-00000-of-00003.safetensors is missing"), "{missing}");
        let there: u64 = manifests.iter().map(Manifest::bytes).sum();
        assert_eq!(read.into_inner(), there - manifests[3].shards[0].bytes);
    }
    assert!(f.store.verify(&[], jobs(2), &|_| {}).is_empty());
}

#[test]
fn a_region_is_read_from_any_number_of_shards_and_a_missing_one_is_an_error() {
    let f = fixture();
    for world_size in [1, 2, 5] {
        let manifest = saved(&f.store, id(1, world_size.into()), world_size, &state(0.5));
        for (name, values) in state(0.5) {
            assert_eq!(f.store.read_region(&manifest, name).unwrap(), values);
        }
        let error = f.store.read_region(&manifest, "ema").unwrap_err();
        assert!(error.to_string().contains("no region ema"), "{error}");
    }
}

#[test]
fn a_damaged_header_is_reported_as_damage_without_a_panic() {
    let f = fixture();
    let manifest = saved(&f.store, id(1, 1), 1, &state(0.5));
    let path = f.file(&manifest, &manifest.shards[0].file);
    let whole = fs::read(&path).unwrap();
    for (at, bit) in [(0, 1), (1, 1), (3, 1), (7, 0x80), (9, 2), (30, 4)] {
        let mut bytes = whole.clone();
        bytes[at] ^= bit;
        fs::write(&path, bytes).unwrap();
        let error = f.store.read_region(&manifest, "weights").unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{at}: {error}");
    }
}

#[test]
fn the_same_state_in_a_different_number_of_shards_has_no_difference() {
    let f = fixture();
    let a = saved(&f.store, id(1, 1), 1, &state(0.5));
    let b = saved(&f.store, id(1, 2), 3, &state(0.5));
    let difference = Difference::between((&f.store, &a), (&f.store, &b)).unwrap();
    assert!(difference.is_none(), "{difference:?}");
    assert_eq!((difference.regions.len(), difference.tensors.len()), (2, 2));
}

#[test]
fn tensors_without_values_are_compared_although_their_region_is_not_stored() {
    let f = fixture();
    let [a, b, other] = [(1, [2, 0]), (2, [2, 0]), (3, [0, 7])].map(|(step, shape)| {
        let mut manifest = saved(&f.store, id(1, step), 1, &state(0.5));
        manifest.tensors.push(TensorInfo {
            name: "bounds".to_owned(),
            shape: shape.to_vec(),
            region: "frozen".to_owned(),
            offset: 0,
            channels_last: false,
            integers: None,
        });
        manifest
    });
    let between = |a, b| Difference::between((&f.store, a), (&f.store, b)).unwrap();
    let same = between(&a, &b);
    assert!(same.is_none(), "{same:?}");
    assert!(same.tensors.iter().any(|tensor| tensor.name == "bounds"), "{same:?}");
    let found = between(&a, &other);
    let first = &found.tensors[0];
    assert_eq!((first.name.as_str(), &first.finding), ("bounds", &Comparison::OtherShape));
}

#[test]
fn differences_name_regions_and_tensors_the_largest_first() {
    let f = fixture();
    let a = saved(&f.store, id(1, 1), 1, &state(1.0));
    let mut other = state(1.0);
    other[0].1[5] *= 2.0;
    other[0].1[0] += 0.25;
    other[1].0 = "exp_avg";
    let b = saved(&f.store, id(1, 2), 2, &other);
    let found = Difference::between((&f.store, &a), (&f.store, &b)).unwrap();
    let items: Vec<(&str, &Comparison)> = found
        .regions
        .iter()
        .chain(&found.tensors)
        .map(|part| (part.name.as_str(), &part.finding))
        .collect();
    let Comparison::Different(weights) = items[0].1 else { panic!("{items:?}") };
    assert_eq!((weights.different, weights.values, weights.largest_absolute), (2, 7, 6.0));
    assert_eq!(items[1], ("momentum", &Comparison::OnlyInFirst));
    assert_eq!(items[2], ("exp_avg", &Comparison::OnlyInSecond));
    assert_eq!((items[3].0, items[4].0), ("fc", "conv"));
    let Comparison::Different(conv) = items[4].1 else { panic!("{items:?}") };
    assert_eq!((conv.different, conv.values, conv.largest_relative), (1, 4, 0.2));
    assert!(!found.is_none());
}

#[test]
fn a_copy_is_the_same_checkpoint_and_a_second_copy_changes_nothing() {
    let (from, to) = (fixture(), fixture());
    let manifest = saved(&from.store, id(3, 9), 2, &state(0.5));
    let progress = AtomicU64::new(0);
    let add_progress = |bytes| {
        progress.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
    };
    let copied = from.store.copy_to(&manifest, &to.store, &add_progress).unwrap();
    let written_bytes = manifest.bytes();
    assert_eq!(copied, CopyResult { written: 2, written_bytes, ..CopyResult::default() });
    assert_eq!(progress.into_inner(), written_bytes);
    assert_eq!(to.store.manifest(&manifest.name()).unwrap(), manifest);
    assert!(to.store.verify(&[&manifest], jobs(1), &|_| {})[0].is_ok());
    for name in ["manifest.json", &manifest.shards[0].file, &manifest.shards[1].file] {
        let read = |f: &Fixture| fs::read(f.file(&manifest, name)).unwrap();
        assert_eq!(read(&from), read(&to), "{name}");
    }
    assert_eq!(to.store.fence().unwrap(), Generation(3), "a job that resumes there is newer");

    let again = from.store.copy_to(&manifest, &to.store, &|_| {}).unwrap();
    assert_eq!(again, CopyResult { kept: 2, was_there: true, ..CopyResult::default() });
}

#[test]
fn an_interrupted_copy_continues_where_it_stopped() {
    let (from, to) = (fixture(), fixture());
    let manifest = saved(&from.store, id(3, 9), 3, &state(0.5));
    let folder = to.folder.path().join(manifest.name());
    fs::create_dir(&folder).unwrap();
    // One file is complete, one is half written, one is missing.
    let [first, second, _] = [0, 1, 2].map(|rank: usize| manifest.shards[rank].file.clone());
    fs::copy(from.file(&manifest, &first), folder.join(first)).unwrap();
    let whole = fs::read(from.file(&manifest, &second)).unwrap();
    fs::write(folder.join(second), &whole[..whole.len() / 2]).unwrap();

    let copied = from.store.copy_to(&manifest, &to.store, &|_| {}).unwrap();

    assert_eq!((copied.written, copied.kept, copied.was_there), (2, 1, false));
    assert!(to.store.verify(&[&manifest], jobs(1), &|_| {})[0].is_ok());
}

#[test]
fn an_interrupted_copy_continues_after_a_newer_generation_has_begun() {
    let (from, to) = (fixture(), fixture());
    let manifest = saved(&from.store, id(3, 9), 2, &state(0.5));
    let folder = to.folder.path().join(manifest.name());
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join(&manifest.shards[0].file), "half").unwrap();
    to.store.raise_fence(Generation(4)).unwrap();
    assert!(folder.join("manifest.json").exists(), "the save is marked as abandoned");

    let copied = from.store.copy_to(&manifest, &to.store, &|_| {}).unwrap();

    assert_eq!((copied.written, copied.was_there), (2, false));
    assert_eq!(to.store.manifest(&manifest.name()).unwrap(), manifest);
    let again = from.store.copy_to(&manifest, &to.store, &|_| {}).unwrap();
    assert!(again.was_there);
}

#[test]
fn a_checkpoint_that_is_removed_while_it_is_read_is_not_damaged() {
    let (from, to) = (fixture(), fixture());
    let manifest = saved(&from.store, id(3, 9), 2, &state(0.5));
    let verified = || from.store.verify(&[&manifest], jobs(1), &|_| {}).remove(0).unwrap_err();
    fs::remove_file(from.file(&manifest, &manifest.shards[1].file)).unwrap();
    assert!(matches!(verified(), Error::Damaged { .. }));
    let mut is_removed = false;
    let remove = |_: u64| {
        if !std::mem::replace(&mut is_removed, true) {
            fs::remove_file(from.file(&manifest, "manifest.json")).unwrap();
        }
    };
    let remove = std::cell::RefCell::new(remove);
    let copied = from.store.copy_to(&manifest, &to.store, &|bytes| remove.borrow_mut()(bytes));
    assert!(matches!(copied, Err(Error::Missing { .. })), "{copied:?}");
    assert!(matches!(verified(), Error::Missing { .. }));
}

#[test]
fn a_damaged_checkpoint_is_not_copied_and_a_different_one_is_not_overwritten() {
    let (from, to) = (fixture(), fixture());
    let manifest = saved(&from.store, id(3, 9), 2, &state(0.5));
    from.flip_last_bit(&manifest, 1);
    let error = from.store.copy_to(&manifest, &to.store, &|_| {}).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
    assert!(to.store.manifest(&manifest.name()).is_err(), "no manifest was written");

    let (other, mine) = (fixture(), fixture());
    let manifest = saved(&mine.store, id(3, 9), 2, &state(0.5));
    saved(&other.store, id(3, 9), 1, &state(1.5));
    let error = mine.store.copy_to(&manifest, &other.store, &|_| {}).unwrap_err();
    assert!(matches!(error, Error::Exists(_)), "{error}");
}

#[test]
fn discarding_removes_a_checkpoint_and_returns_its_size() {
    let f = fixture();
    let manifest = saved(&f.store, id(1, 1), 2, &state(0.5));
    let json = fs::metadata(f.file(&manifest, "manifest.json")).unwrap().len();
    assert_eq!(f.store.discard(manifest.id()).unwrap(), manifest.bytes() + json);
    assert!(f.store.list().unwrap().is_empty());
    let error = f.store.discard(manifest.id()).unwrap_err();
    assert!(matches!(error, Error::Missing { .. }), "{error}");
}

#[test]
fn removing_a_link_leaves_the_checkpoint_of_another_job_to_which_it_leads() {
    let (other, mine) = (fixture(), fixture());
    let theirs = saved(&other.store, id(1, 1), 2, &state(0.5));
    let path = |fixture: &Fixture| {
        fixture.file(&theirs, "manifest.json").parent().map(std::path::Path::to_owned).unwrap()
    };
    std::os::unix::fs::symlink(path(&other), path(&mine)).unwrap();
    assert_eq!(mine.store.list().unwrap().len(), 1);
    mine.store.discard(theirs.id()).unwrap();
    assert!(mine.store.list().unwrap().is_empty() && !path(&mine).is_symlink());
    assert_eq!(other.store.manifest(&theirs.name()).unwrap(), theirs);
    let whole = other.store.verify(&[&theirs], std::num::NonZeroUsize::MIN, &|_| {});
    assert!(whole[0].is_ok(), "{whole:?}");
}
