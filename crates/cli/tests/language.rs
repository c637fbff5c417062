//! Runs the commands that write folders of language models.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

#[path = "../../language/tests/kit/mod.rs"]
mod models;
#[allow(dead_code, reason = "others use the rest")]
#[path = "../src/commands/checkpoint/samples.rs"]
mod samples;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use baton_checkpoint::TensorInfo;
use baton_language::LanguageModel;
use baton_recipe::JobSpec;
use models::{
    config_of,
    gguf::{GgufWriter, small_model},
    write_model,
};
use samples::{Sample, TestStore};
use serde_json::Value;

const ADAPTER: &str = "[adapter]\nrank = 2\nalpha = 8\n";

/// Exit code, standard output, standard error.
fn baton(folder: &Path, arguments: &[&str]) -> (i32, String, String) {
    let result = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(arguments)
        .current_dir(folder)
        .env_remove("BATON_COORDINATOR")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (result.status.code().unwrap(), text(result.stdout), text(result.stderr))
}

fn json(folder: &Path, arguments: &[&str]) -> Value {
    let (code, output, error) = baton(folder, &[arguments, &["--json"]].concat());
    assert_eq!((code, error.as_str()), (0, ""), "{output}");
    serde_json::from_str(&output).unwrap()
}

/// Runs a command that must fail with code 2 and one line of error, and returns this line.
fn rejected(folder: &Path, arguments: &[&str]) -> String {
    let (code, output, error) = baton(folder, arguments);
    assert_eq!(code, 2, "{output}{error}");
    assert!(error.lines().count() == 1 && error.starts_with("error: "), "{error}");
    error
}

fn recipe(base: &Path, adapter: &str) -> String {
    format!(
        "name = 'tune'\n[model]\narch = 'causal_lm'\npath = {base:?}\n{adapter}[data]\ntrain = 'x'\nval = 'x'\n\
         sequence = 64\n[train]\nepochs = 1\nglobal_batch = 8\n[optimizer]\nkind = 'adamw'\n[schedule]\n\
         kind = 'constant'\nlr = 1e-3\n[loss]\nkind = 'next_token'\n"
    )
}

/// A store beside the model `base`, with a checkpoint of it.
fn trained(adapter: &str) -> TestStore {
    let test = samples::store();
    let base = test.folder.path().join("base");
    write_model(&base, &config_of("llama"), 3);
    fs::write(base.join("tokenizer.json"), "{}").unwrap();
    let recipe = recipe(&base, adapter);
    let spec = JobSpec::from_toml(&recipe, &[]).unwrap();
    let model = LanguageModel::of_recipe(&spec).unwrap();
    let mut offset = 0;
    let tensors = model.describe().parameters.into_iter().map(|parameter| {
        let shape: Vec<usize> = parameter.shape.iter().map(|size| *size as usize).collect();
        let start = offset;
        offset += shape.iter().product::<usize>();
        let (region, name) = ("weights".to_owned(), parameter.name);
        TensorInfo { name, shape, region, offset: start, channels_last: false, integers: None }
    });
    let tensors: Vec<TensorInfo> = tensors.collect();
    let weights = (0..offset).map(|index| (index % 13) as f32 / 64.0).collect();
    let recipe = Box::leak(spec.to_json().into_boxed_str());
    let mut manifest = Sample { weights, recipe, ..Sample::default() }.write(&test.store);
    "causal_lm".clone_into(&mut manifest.arch);
    manifest.program = Some(model.digest().unwrap());
    manifest.tensors = tensors;
    test.store.commit(&manifest).unwrap();
    test
}

#[test]
fn a_recipe_that_does_not_fit_its_model_is_found_before_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let (base, file) = (folder.path().join("base"), folder.path().join("tune.toml"));
    write_model(&base, &config_of("llama"), 3);
    fs::write(base.join("tokenizer.json"), "{}").unwrap();
    fs::write(&file, recipe(&base, ADAPTER)).unwrap();
    let check = |changes: &[&str]| {
        baton(folder.path(), &[&["recipe", "check", "tune.toml"], changes].concat())
    };
    let (code, output, error) = check(&[]);
    assert_eq!(code, 0, "{output}{error}");
    for (change, expected) in [
        ("train.recompute=['layers.1', 'layers.2']", "layers.2 is not a layer of this model"),
        ("evaluation.generate={}", "tokenizer.json: cannot be read as a tokenizer"),
    ] {
        let (code, output, _) = check(&["--set", change]);
        assert!(code == 2 && output.contains(expected), "{output}");
    }
}

fn names(folder: PathBuf) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

#[test]
fn an_adapter_is_exported_for_peft_and_merged_into_its_model() {
    let test = trained(ADAPTER);
    let folder = test.folder.path();
    let exported = json(folder, &["checkpoint", "export", "--dir", ".", "--peft", "adapter"]);
    assert_eq!((&exported["format"], &exported["path"]), (&"peft".into(), &"adapter".into()));
    assert_eq!(names(folder.join("adapter")), ["adapter_config.json", "adapter_model.safetensors"]);
    let config = fs::read_to_string(folder.join("adapter/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!((&config["r"], &config["target_modules"][0]), (&2.into(), &"down_proj".into()));

    let merge = ["checkpoint", "merge", "--dir", ".", "--to"];
    let merged = json(folder, &[&merge[..], &["merged"]].concat());
    assert_eq!((&merged["adapter"], &merged["dtype"]), (&true.into(), &"same".into()));
    assert_eq!(
        names(folder.join("merged")),
        ["config.json", "model.safetensors", "tokenizer.json"]
    );
    let (code, output, _) = baton(folder, &[&merge[..], &["half", "--dtype", "bf16"]].concat());
    assert_eq!(code, 0);
    assert!(output.starts_with("wrote half: the model of step 88 ("), "{output}");
    let size = |name: &str| fs::metadata(folder.join(name)).unwrap().len();
    assert!(size("half/model.safetensors") < size("merged/model.safetensors") * 6 / 10);

    let error = rejected(folder, &[&merge[..], &["merged"]].concat());
    assert!(error.contains("merged exists and is not empty: remove it"), "{error}");
    let error = rejected(folder, &["checkpoint", "export", "--dir", ".", "--peft", "merged"]);
    assert!(error.contains("merged exists and is not empty: remove it"), "{error}");
}

#[test]
fn only_the_model_that_was_trained_is_merged() {
    let test = trained(ADAPTER);
    let folder = test.folder.path();
    let merge = ["checkpoint", "merge", "--dir", ".", "--to", "merged"];
    write_model(&folder.join("other"), &config_of("llama"), 4);
    let error = rejected(folder, &[&merge[..], &["--model", "other"]].concat());
    assert!(error.contains("other is not the model that was trained: its digest is "), "{error}");
    assert!(error.contains("name the folder of that model with --model"), "{error}");
    fs::rename(folder.join("base"), folder.join("moved")).unwrap();
    let error = rejected(folder, &merge);
    assert!(error.contains("--model FOLDER names another folder"), "{error}");
    json(folder, &[&merge[..], &["--model", "moved"]].concat());
}

#[test]
fn whole_weights_are_merged_and_are_no_adapter() {
    let test = trained("");
    let folder = test.folder.path();
    let merged = json(folder, &["checkpoint", "merge", "--dir", ".", "--to", "merged"]);
    assert_eq!(merged["adapter"], false);
    let error = rejected(folder, &["checkpoint", "export", "--dir", ".", "--peft", "adapter"]);
    assert!(error.contains("has no adapter, because its recipe has no [adapter]"), "{error}");
    assert!(!folder.join("adapter").exists());
    let images = samples::run();
    for command in [&["export", "--peft"], &["merge", "--to"]] {
        let arguments = [&["checkpoint"], &command[..], &["new", "--dir", "."]].concat();
        let error = rejected(images.folder.path(), &arguments);
        assert!(error.contains("is of \"resnet18\", no language model"), "{error}");
    }
}

/// A file with a tokenizer of bytes.
fn gguf(pre: &str) -> GgufWriter {
    let is_visible = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut invisible = 256..;
    let bytes = (0..256_u32).map(|byte| {
        let code = if is_visible(byte) { byte } else { invisible.next().unwrap() };
        char::from_u32(code).unwrap().to_string()
    });
    let tokens: Vec<String> = ["<s>", "</s>"].map(str::to_owned).into_iter().chain(bytes).collect();
    let types: Vec<i32> = (0..tokens.len()).map(|id| if id < 2 { 3 } else { 1 }).collect();
    let mut writer = small_model("llama", |_, index| (index % 5) as f32);
    writer
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", pre)
        .texts("tokenizer.ggml.tokens", &tokens)
        .integers("tokenizer.ggml.token_type", &types)
        .texts("tokenizer.ggml.merges", &[])
        .integer("tokenizer.ggml.bos_token_id", 0)
        .integer("tokenizer.ggml.eos_token_id", 1)
        .text("tokenizer.chat_template", "{{ messages[0].content }}");
    writer
}

#[test]
fn an_imported_model_tokenizes_texts() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    gguf("smollm").write(&folder.join("small.gguf"));
    let imported =
        json(folder, &["model", "import", "small.gguf", "--to", "hf", "--dtype", "bf16"]);
    assert_eq!((&imported["family"], &imported["vocab_size"]), (&"llama".into(), &258.into()));
    assert_eq!((&imported["chat_template"], &imported["dtype"]), (&true.into(), &"bf16".into()));
    fs::write(folder.join("t.jsonl"), "{\"text\": \"hi\"}\n").unwrap();
    let tokenize =
        ["data", "tokenize", "--from", "t.jsonl", "--tokenizer", "hf", "--to", "t.beton"];
    assert_eq!(json(folder, &tokenize)["train"]["tokens"], 3, "two letters and the end");
}

#[test]
fn an_import_that_fails_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    gguf("viking").write(&folder.join("other.gguf"));
    let bytes = gguf("smollm").bytes();
    fs::write(folder.join("cut.gguf"), &bytes[..bytes.len() - 64]).unwrap();
    let import = |file: &str| ["model", "import", file, "--to", "hf"].map(str::to_owned);
    let error = |file: &str| {
        let arguments = import(file);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        rejected(folder, &arguments)
    };
    assert!(error("other.gguf").contains("by the rules \"viking\": only gpt-2, smollm"));
    assert!(error("cut.gguf").contains("ends before tensor "));
    assert!(error("none.gguf").contains("none.gguf does not exist: give the path of a GGUF file"));
    assert_eq!(names(folder.to_owned()), ["cut.gguf", "other.gguf"]);

    gguf("smollm").write(&folder.join("small.gguf"));
    assert_eq!(baton(folder, &["model", "import", "small.gguf", "--to", "first"]).0, 0);
    let (code, ..) =
        baton(folder, &["model", "import", "other.gguf", "--to", "hf", "--tokenizer", "first"]);
    assert_eq!(code, 0, "with the tokenizer of another folder");
    let expected = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(names(folder.join("hf")), expected);
}
