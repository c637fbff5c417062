//! Models that are written: merged ones.
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

mod kit;

use std::{collections::BTreeMap, fs, path::Path};

use baton_language::{
    LanguageModel, NewFolder, WeightSource, merge::Merge, output::MAX_FILE_BYTES,
    peft::adapter_config,
};
use baton_model::Float;
use baton_recipe::JobSpec;
use kit::{config_of, write_model};
use serde_json::{Value, json};

fn recipe(folder: &Path, adapter: &str) -> JobSpec {
    let text = format!(
        "name = 'tune'\n[model]\narch = 'causal_lm'\npath = {folder:?}\n{adapter}\n\
         [data]\ntrain = 'x'\nval = 'x'\nsequence = 64\n[train]\nepochs = 1\nglobal_batch = 8\n\
         [optimizer]\nkind = 'adamw'\n[schedule]\nkind = 'constant'\nlr = 1e-3\n[loss]\nkind = 'next_token'\n"
    );
    JobSpec::from_toml(&text, &[]).unwrap()
}

const ADAPTER: &str =
    "[adapter]\nrank = 2\nalpha = 6\ntargets = ['q_proj', 'layers.1.mlp.down_proj']";

/// A tensor for each name of the trained ones: 0.5, 1.5, 2.5 ….
fn trained(model: &LanguageModel) -> BTreeMap<String, Vec<f32>> {
    let parameters = model.describe().parameters.into_iter();
    parameters
        .map(|tensor| {
            let len = tensor.shape.iter().product::<u64>();
            (tensor.name, (0..len).map(|index| index as f32 + 0.5).collect())
        })
        .collect()
}

fn values(source: &WeightSource, name: &str) -> Vec<f32> {
    let (kind, bytes) = source.read(name).unwrap();
    kind.decode(&bytes)
}

#[test]
fn a_merged_model_has_the_product_in_adapted_layers_and_all_else_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let (base, to) = (folder.path().join("base"), folder.path().join("merged"));
    write_model(&base, &config_of("llama"), 3);
    fs::write(base.join("tokenizer.json"), "{}").unwrap();
    let model = LanguageModel::of_recipe(&recipe(&base, ADAPTER)).unwrap();
    let trained = trained(&model);
    let merge = Merge::new(&model, None);
    let new = NewFolder::create(&to).unwrap();
    let mut last = 0;
    merge
        .write(&new, MAX_FILE_BYTES, &mut |name| trained.get(name).cloned(), &mut |bytes| {
            last = bytes
        })
        .unwrap();
    assert!(!to.exists(), "before it is complete");
    new.finish().unwrap();
    assert_eq!(last, merge.bytes());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "no temporary folder is left");
    for name in ["config.json", "tokenizer.json"] {
        assert_eq!(fs::read(to.join(name)).unwrap(), fs::read(base.join(name)).unwrap());
    }
    let merged = LanguageModel::of_recipe(&recipe(&to, ADAPTER)).unwrap();
    for tensor in model.decoder.tensors() {
        let (before, after) =
            (values(&model.source, &tensor.name), values(&merged.source, &tensor.name));
        let is_adapted =
            tensor.name.contains("q_proj") || tensor.name == "model.layers.1.mlp.down_proj.weight";
        assert_eq!(before != after, is_adapted, "{}", tensor.name);
    }
    let name = "model.layers.1.self_attn.q_proj";
    let of = |matrix: &str| &trained[&format!("base_model.model.{name}.{matrix}.weight")];
    let (a, b) = (of("lora_A"), of("lora_B"));
    let name = format!("{name}.weight");
    // Row 5, column 7 of (24, 24); scale 3.
    let expected =
        values(&model.source, &name)[5 * 24 + 7] + 3.0 * (b[10] * a[7] + b[11] * a[24 + 7]);
    assert_eq!(values(&merged.source, &name)[5 * 24 + 7], expected);
}

#[test]
fn whole_weights_are_divided_into_files_and_rounded_as_asked() {
    let folder = tempfile::tempdir().unwrap();
    let (base, to) = (folder.path().join("base"), folder.path().join("merged"));
    write_model(&base, &config_of("qwen2"), 3);
    let model = LanguageModel::of_recipe(&recipe(&base, "")).unwrap();
    let trained = trained(&model);
    let new = NewFolder::create(&to).unwrap();
    let merge = Merge::new(&model, Some(Float::Bf16));
    merge.write(&new, 4_000, &mut |name| trained.get(name).cloned(), &mut |_| {}).unwrap();
    new.finish().unwrap();
    let index = fs::read_to_string(to.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], json!(merge.bytes()));
    let sizes: Vec<u64> = fs::read_dir(&to)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().extension().is_some_and(|end| end == "safetensors"))
        .map(|entry| entry.metadata().unwrap().len())
        .collect();
    assert!(sizes.len() > 3 && sizes.iter().all(|size| *size < 5_000), "{sizes:?}");
    let merged = LanguageModel::of_recipe(&recipe(&to, "")).unwrap();
    assert_eq!(merged.source.float("model.norm.weight"), Some(Float::Bf16));
    assert_eq!(values(&merged.source, "model.norm.weight"), trained["model.norm.weight"]);
    let config = fs::read_to_string(to.join("config.json")).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&config).unwrap()["torch_dtype"], "bfloat16");
}

#[test]
fn what_cannot_be_merged_leaves_no_folder_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (base, to) = (folder.path().join("base"), folder.path().join("merged"));
    write_model(&base, &config_of("llama"), 3);
    let model = LanguageModel::of_recipe(&recipe(&base, ADAPTER)).unwrap();
    let merge = |kind, trained: &mut dyn FnMut(&str) -> Option<Vec<f32>>| {
        let new = NewFolder::create(&to).unwrap();
        Merge::new(&model, kind)
            .write(&new, MAX_FILE_BYTES, trained, &mut |_| {})
            .unwrap_err()
            .to_string()
    };
    let error = merge(None, &mut |_| None);
    assert!(
        error.contains(
            "needs base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight with 48 values"
        ),
        "{error}"
    );
    let values = trained(&model);
    let mut huge = |name: &str| Some(values[name].iter().map(|value| value * 1e3).collect());
    let error = merge(Some(Float::F16), &mut huge);
    assert!(error.contains("is too large for F16: choose --dtype bf16 or f32"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn what_a_killed_process_left_is_overwritten_and_a_running_one_is_not_disturbed() {
    let folder = tempfile::tempdir().unwrap();
    let (to, left) = (folder.path().join("merged"), folder.path().join(".merged.partial"));
    fs::create_dir(&left).unwrap();
    fs::write(left.join("model.safetensors"), b"half").unwrap();
    let new = NewFolder::create(&to).unwrap();
    new.write("config.json", b"{}").unwrap();
    let error = NewFolder::create(&to).unwrap_err().to_string();
    assert!(error.contains("merged is being written by another process"), "{error}");
    new.finish().unwrap();
    let written: Vec<_> =
        fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(written, ["config.json"]);
    assert!(!left.exists());
}

#[test]
fn a_folder_with_files_is_never_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let error = |target: &Path| NewFolder::create(target).unwrap_err().to_string();
    fs::create_dir(path.join("empty")).unwrap();
    let new = NewFolder::create(&path.join("empty")).unwrap();
    new.write("a", b"a").unwrap();
    new.finish().unwrap();
    assert_eq!(fs::read(path.join("empty/a")).unwrap(), b"a");
    assert!(
        error(&path.join("empty"))
            .ends_with("exists and is not empty: remove it or give another folder")
    );
    assert!(
        error(&path.join("empty/a")).ends_with("exists and is not a folder: give another path")
    );
    assert!(
        error(&path.join("no/folder")).contains("create the folder"),
        "{}",
        error(&path.join("no/folder"))
    );
    let late = NewFolder::create(&path.join("late")).unwrap();
    fs::create_dir_all(path.join("late/other")).unwrap();
    assert!(late.finish().unwrap_err().to_string().contains("is not empty"));
}

#[test]
fn the_description_of_an_adapter_has_the_values_of_its_recipe() {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), &config_of("llama"), 3);
    let spec = recipe(folder.path(), ADAPTER);
    let model = LanguageModel::of_recipe(&spec).unwrap();
    let tensors = model.describe().parameters;
    let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    let config: Value = serde_json::from_str(&adapter_config(&spec, &names).unwrap()).unwrap();
    assert_eq!(config["target_modules"], json!(["model.layers.1.mlp.down_proj", "q_proj"]));
    assert_eq!((&config["r"], &config["lora_alpha"]), (&json!(2), &json!(6)));
    assert_eq!(config["base_model_name_or_path"], json!(folder.path()));
    assert_eq!((&config["peft_type"], &config["use_rslora"]), (&json!("LORA"), &json!(false)));
    let error = adapter_config(&recipe(folder.path(), ""), &names).unwrap_err();
    assert!(error.starts_with("has no adapter, because its recipe has no [adapter]"), "{error}");
}
