//! The file with a model's quantised weights.
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

mod kit;
#[path = "kit/recipe.rs"]
mod recipe;

use std::{
    fs,
    path::{Path, PathBuf},
};

use baton_language::{
    LanguageModel,
    nf4::{Nf4, Nf4Source},
};
use baton_recipe::JobSpec;
use kit::{config_of, write_model, write_tensors};
use recipe::recipe;

/// What [`Nf4Source::open`] notes, and all weights that it gives.
fn opened(spec: &JobSpec) -> (Vec<String>, Vec<Nf4>) {
    let model = LanguageModel::of_recipe(spec).unwrap();
    let mut notes = Vec::new();
    let digest = model.digest().unwrap();
    let source = Nf4Source::open(&model, &digest, &mut |note| notes.push(note)).unwrap();
    let linears = model.decoder.linear_weights();
    (notes, linears.iter().map(|tensor| source.read(tensor).unwrap()).collect())
}

/// The file with quantised weights.
fn cached(folder: &Path) -> PathBuf {
    let mut files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_cache = |path: &PathBuf| path.to_str().unwrap().contains("baton-nf4-v1-");
    files.find(is_cache).unwrap()
}

#[test]
fn a_model_is_quantised_once_and_again_if_the_file_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let decoder = write_model(folder, &config_of("llama"), 1);
    let spec = recipe(folder, &["adapter.base='nf4'"]);
    let (notes, weights) = opened(&spec);
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].starts_with("quantising "), "{notes:?}");
    let model = LanguageModel::of_recipe(&spec).unwrap();
    for (tensor, weight) in decoder.linear_weights().iter().zip(&weights) {
        let (float, bytes) = model.source.read(&tensor.name).unwrap();
        assert_eq!(*weight, Nf4::quantize(&float.decode(&bytes)), "{}", tensor.name);
    }
    assert!(opened(&spec) == (Vec::new(), weights.clone()), "from the file");

    let path = cached(folder);
    let whole = fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damaged in [&flipped[..], &whole[..whole.len() - 1], &[]] {
        fs::write(&path, damaged).unwrap();
        fs::write(path.with_extension("partial"), "of a killed process").unwrap();
        let (notes, again) = opened(&spec);
        assert!(notes.len() == 1 && again == weights, "{notes:?}");
        assert!(fs::read(&path).unwrap() == whole);
    }
    assert_eq!(fs::read_dir(folder).unwrap().count(), 3, "no other file is left");

    // A whole file with the same names and shapes, but of another model.
    let other = tempfile::tempdir().unwrap();
    write_model(other.path(), &config_of("gemma2"), 1);
    opened(&recipe(other.path(), &["adapter.base='nf4'"]));
    fs::copy(cached(other.path()), &path).unwrap();
    let (notes, again) = opened(&spec);
    assert!(notes.len() == 1 && again == weights, "{notes:?}");
}

#[test]
fn other_weights_are_quantised_into_another_file() {
    let folder = tempfile::tempdir().unwrap();
    let spec = recipe(folder.path(), &["adapter.base='nf4'"]);
    write_model(folder.path(), &config_of("llama"), 1);
    let (_, first) = opened(&spec);
    write_model(folder.path(), &config_of("llama"), 2);
    let (notes, second) = opened(&spec);
    assert_eq!(notes.len(), 1);
    assert_ne!(first, second);
}

#[test]
fn a_folder_that_cannot_be_written_is_no_obstacle() {
    let folder = tempfile::tempdir().unwrap();
    let spec = recipe(folder.path(), &["adapter.base='nf4'"]);
    write_model(folder.path(), &config_of("llama"), 1);
    let (_, weights) = opened(&spec);
    let path = cached(folder.path());
    fs::remove_file(&path).unwrap();
    // Also root cannot replace a folder by a file.
    fs::create_dir(&path).unwrap();
    let (notes, again) = opened(&spec);
    assert_eq!(again, weights);
    assert!(notes[1].contains("every process quantises the model at its start"), "{notes:?}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "no other file is left");
}

#[test]
fn weights_that_are_not_finite_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let decoder = write_model(folder, &config_of("llama"), 1);
    let values = decoder.tensors().into_iter().map(|tensor| {
        let mut values = vec![0.5; tensor.values() as usize];
        if tensor.name == "model.layers.1.mlp.up_proj.weight" {
            values[7] = f32::NAN;
        }
        (tensor, values)
    });
    write_tensors(&folder.join("model.safetensors"), &values.collect::<Vec<_>>());
    let model = LanguageModel::of_recipe(&recipe(folder, &["adapter.base='nf4'"])).unwrap();
    let error = Nf4Source::open(&model, "0123", &mut |_| ()).unwrap_err().to_string();
    let expected = "has a value in model.layers.1.mlp.up_proj.weight that is not finite";
    assert!(error.contains(expected), "{error}");
}
