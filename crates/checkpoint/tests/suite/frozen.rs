//! Frozen state is stored once, and as long as a checkpoint refers to it.

use std::{fs, num::NonZeroUsize, path::PathBuf};

use baton_checkpoint::{
    Comparison, Difference, Error, Float, FrozenEntry, Manifest, SaveId, Store, TensorInfo,
    export::{self, Weights},
};
use baton_job::Generation;
use half::bf16;

use crate::kit::{Fixture, assert_holds, find, fixture, id, keep, names, newest, written};

impl Fixture {
    /// Names of the shared files.
    fn files(&self) -> Vec<String> {
        let Ok(files) = fs::read_dir(self.folder.path().join("frozen")) else { return Vec::new() };
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn path(&self, entry: &FrozenEntry) -> PathBuf {
        self.folder.path().join("frozen").join(format!("{}.safetensors", entry.blake3))
    }
}

/// Values of the frozen region.
fn words(seed: f32) -> Vec<f32> {
    (0..32).map(|i| i as f32 + seed).collect()
}

fn tensor(name: &str, region: &str, offset: usize, len: usize) -> TensorInfo {
    let (name, region) = (name.to_owned(), region.to_owned());
    TensorInfo { name, shape: vec![len], region, offset, channels_last: false, integers: None }
}

/// Writes all files of a save without committing it.
fn written_with(store: &Store, id: SaveId, seed: f32) -> Manifest {
    let manifest = written(store, id, 2);
    let entry = store.write_frozen(&id, "frozen", Float::F32, words(seed)).unwrap();
    let tensors = vec![tensor("backbone", "frozen", 16, 8), tensor("head", "weights", 0, 1000)];
    Manifest { layout: 2, frozen: vec![entry], tensors, ..manifest }
}

fn saved(store: &Store, id: SaveId, seed: f32) -> Manifest {
    let manifest = written_with(store, id, seed);
    store.commit(&manifest).unwrap();
    manifest
}

fn loaded(store: &Store, manifest: &Manifest) -> Result<Vec<f32>, Error> {
    let mut values = vec![f32::NAN; 32];
    store.load_frozen(manifest, &mut |region, offset, words| {
        assert_eq!(region, "frozen");
        values[offset..offset + words.len()].copy_from_slice(words);
    })?;
    Ok(values)
}

#[test]
fn frozen_state_is_written_once_and_restored_with_every_checkpoint() {
    let f = fixture();
    for step in 1..4 {
        let manifest = saved(&f.store, id(1, step), 0.5);
        assert_eq!(newest(&f.store).manifest, manifest);
        assert_eq!(loaded(&f.store, &manifest).unwrap(), words(0.5));
        assert_holds(&f.store, &manifest);
        assert_eq!(manifest.all_bytes(), manifest.bytes() + manifest.frozen[0].bytes);
    }
    assert_eq!(f.files().len(), 1);
}

#[test]
fn sixteen_bit_values_are_read_as_words_and_as_values() {
    let f = fixture();
    let halves = [1.5f32, -2.0, 0.25, 3.0].map(bf16::from_f32);
    let words: Vec<f32> = halves
        .chunks(2)
        .map(|two| f32::from_bits(u32::from(two[0].to_bits()) | u32::from(two[1].to_bits()) << 16))
        .collect();
    let manifest = written(&f.store, id(1, 1), 1);
    let entry = f.store.write_frozen(&id(1, 1), "frozen", Float::Bf16, words.clone()).unwrap();
    assert_eq!(entry.len, 4);
    let manifest = Manifest { layout: 2, frozen: vec![entry], ..manifest };
    f.store.commit(&manifest).unwrap();
    f.store
        .load_frozen(&manifest, &mut |_, offset, part| {
            let bits = |words: &[f32]| words.iter().map(|word| word.to_bits()).collect::<Vec<_>>();
            assert_eq!((offset, bits(part)), (0, bits(&words)));
        })
        .unwrap();
    assert_eq!(f.store.read_region(&manifest, "frozen").unwrap(), [1.5, -2.0, 0.25, 3.0]);
}

#[test]
fn frozen_state_is_removed_with_the_last_checkpoint_that_refers_to_it() {
    let f = fixture();
    saved(&f.store, id(1, 10), 1.0);
    saved(&f.store, id(1, 20), 1.0);
    let last = saved(&f.store, id(1, 30), 2.0);
    f.store.prune(&keep(2, false, 0, 1));
    assert_eq!((names(&f.store).len(), f.files().len()), (2, 2), "step 20 still needs it");
    f.store.prune(&keep(1, false, 0, 1));
    assert_eq!(f.files(), [format!("{}.safetensors", last.frozen[0].blake3)]);
    assert_eq!(loaded(&f.store, &newest(&f.store).manifest).unwrap(), words(2.0));

    let freed = f.store.discard(id(1, 30)).unwrap();
    assert!(freed > last.all_bytes(), "includes the manifest");
    assert_eq!(f.files(), [""; 0]);
}

#[test]
fn frozen_state_is_kept_while_an_unfinished_save_may_refer_to_it() {
    let f = fixture();
    saved(&f.store, id(1, 10), 1.0);
    let other = saved(&f.store, id(1, 20), 2.0);
    let begun = written_with(&f.store, id(1, 30), 1.0);
    f.store.discard(id(1, 10)).unwrap();
    f.store.commit(&begun).unwrap();
    assert_eq!(loaded(&f.store, &newest(&f.store).manifest).unwrap(), words(1.0));
    f.store.discard(other.id()).unwrap();
    assert_eq!(f.files().len(), 1);
}

#[test]
fn frozen_state_is_kept_while_a_manifest_cannot_be_read() {
    let f = fixture();
    saved(&f.store, id(1, 10), 1.0);
    saved(&f.store, id(1, 20), 2.0);
    fs::write(f.folder.path().join(id(1, 10).name()).join("manifest.json"), "x").unwrap();
    saved(&f.store, id(1, 30), 3.0);
    f.store.prune(&keep(1, false, 0, 1));
    assert_eq!(names(&f.store).len(), 2);
    assert_eq!(f.files().len(), 3);
}

#[test]
fn an_older_generation_cannot_write_frozen_state() {
    let f = fixture();
    saved(&f.store, id(1, 10), 1.0);
    f.store.raise_fence(Generation(2)).unwrap();
    let refused = f.store.write_frozen(&id(1, 20), "frozen", Float::F32, words(2.0));
    assert!(matches!(refused, Err(Error::Fenced { .. })));
    assert_eq!(f.files().len(), 1);
}

#[test]
fn damage_to_frozen_state_is_reported_and_repaired_by_the_next_save() {
    let f = fixture();
    let manifest = saved(&f.store, id(1, 10), 1.0);
    let path = f.path(&manifest.frozen[0]);
    let whole = fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    fs::write(&path, flipped).unwrap();
    let verified = f.store.verify(&[&manifest], NonZeroUsize::MIN, &|_| {}).pop().unwrap();
    let problem = verified.unwrap_err().to_string();
    let file = format!("frozen/{}.safetensors", manifest.frozen[0].blake3);
    assert!(problem.contains(&format!("{file} does not match its digest")), "{problem}");
    loaded(&f.store, &manifest).unwrap_err();
    assert!(find(&f.store, 0, None).is_err());

    fs::remove_file(&path).unwrap();
    let error = f.store.manifest(&manifest.name()).unwrap_err().to_string();
    assert!(error.contains(&format!("{file} is missing")), "{error}");
    let begun = written(&f.store, id(1, 20), 2);
    let begun = Manifest { layout: 2, frozen: manifest.frozen.clone(), ..begun };
    let refused = f.store.commit(&begun).unwrap_err().to_string();
    assert!(refused.contains("is missing"), "{refused}");

    saved(&f.store, id(1, 30), 1.0);
    assert_eq!(fs::read(&path).unwrap(), whole);
    assert_eq!(loaded(&f.store, &manifest).unwrap(), words(1.0));
}

#[test]
fn copies_and_exports_include_frozen_state() {
    let (f, to) = (fixture(), fixture());
    let manifest = saved(&f.store, id(1, 10), 1.0);
    let copied = f.store.copy_to(&manifest, &to.store, &|_| {}).unwrap();
    assert_eq!((copied.written, copied.written_bytes), (3, manifest.all_bytes()));
    assert_eq!(loaded(&to.store, &newest(&to.store).manifest).unwrap(), words(1.0));
    let again = f.store.copy_to(&manifest, &to.store, &|_| {}).unwrap();
    assert!(again.was_there && again.kept == 3);

    let out = f.folder.path().join("model.safetensors");
    export::safetensors_as(Float::F32, &to.store, &manifest, Weights::Raw, &out).unwrap();
    let file = fs::read(out).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let values: Vec<u8> = words(1.0)[16..24].iter().flat_map(|v| v.to_le_bytes()).collect();
    assert_eq!(tensors.tensor("backbone").unwrap().data(), values);
    assert_eq!(tensors.tensor("head").unwrap().shape(), [1000]);
}

#[test]
fn a_difference_in_frozen_state_is_found() {
    let f = fixture();
    let manifests = [(10, 1.0), (20, 2.0)].map(|(step, seed)| saved(&f.store, id(1, step), seed));
    let [a, b] = manifests.each_ref().map(|manifest| (&f.store, manifest));
    let same = Difference::between(a, a).unwrap();
    assert!(same.is_none(), "{same:?}");
    let difference = Difference::between(a, b).unwrap();
    let found = |name: &str| {
        let mut parts = difference.regions.iter().chain(&difference.tensors);
        parts.find(|part| part.name == name).unwrap().finding
    };
    for name in ["frozen", "backbone"] {
        assert!(matches!(found(name), Comparison::Different(_)), "{name}");
    }
}

#[test]
fn a_manifest_with_a_false_frozen_entry_is_refused() {
    type Change = fn(&mut FrozenEntry);
    let changes: [(&str, Change); 4] = [
        ("a path", |frozen| frozen.blake3 = "../x".into()),
        ("longer than its file", |frozen| frozen.len = 1000),
        ("a length that overflows", |frozen| frozen.len = usize::MAX),
        ("the name of another region", |frozen| frozen.region = "weights".into()),
    ];
    for (what, change) in changes {
        let f = fixture();
        let mut manifest = written_with(&f.store, id(1, 10), 1.0);
        change(&mut manifest.frozen[0]);
        f.store.commit(&manifest).expect_err(what);
    }
}
