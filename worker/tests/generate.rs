//! `baton-worker generate` as a process.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../crates/language/tests/kit/mod.rs"]
mod models;
#[path = "../../crates/text/tests/kit/mod.rs"]
mod tokenizers;

use std::{path::Path, process::Command};

use models::{config_of, write_model};
use serde_json::{Value, json};
use tokenizers::Model;

const RECIPE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes/smollm2_lora_cpu.toml");

/// A small model with random weights, and the tokenizer of the same folder.
fn model() -> Model {
    let model = Model::chatml();
    let mut config = config_of("llama");
    let size = json!({"vocab_size": model.vocab_size(), "eos_token_id": model.id("<|im_end|>")});
    config.as_object_mut().unwrap().extend(size.as_object().unwrap().clone());
    write_model(model.folder(), &config, 5);
    model
}

/// Exit code, standard output, standard error.
fn generate(folder: &Path, recipe: &str, flags: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton-worker"));
    command.args(["generate", "--recipe", recipe, "--threads", "1", "--set"]);
    command.arg(format!("model.path={}", folder.display()));
    let done = command.args(["--set", "data.sequence=64"]).args(flags).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (done.status.code().unwrap(), text(done.stdout), text(done.stderr))
}

fn written(folder: &Path, flags: &[&str]) -> Vec<Value> {
    let (code, output, error) = generate(folder, RECIPE, &[flags, &["--json"]].concat());
    assert_eq!(code, 0, "{error}");
    let answer: Value = serde_json::from_str(&output).unwrap();
    answer["texts"].as_array().unwrap().clone()
}

#[test]
fn prompts_are_continued_together_as_alone_and_draws_depend_on_the_seed() {
    let model = model();
    let folder = model.folder();
    let two = ["--prompt", "hi you", "--prompt", "a user", "--max-tokens", "9"];
    let texts = written(folder, &two);
    assert_eq!(texts.len(), 2);
    for (text, prompt) in texts.iter().zip(["hi you", "a user"]) {
        assert_eq!(text["prompt"], prompt);
        assert!(text["tokens"] == 9 || text["complete"] == true, "{text}");
        let alone = written(folder, &["--prompt", prompt, "--max-tokens", "9"]);
        assert_eq!(alone, std::slice::from_ref(text));
    }
    let plain = written(folder, &[&two[..], &["--plain"]].concat());
    assert_ne!(plain, texts, "without the chat template");
    let drawn =
        |seed| written(folder, &[&two[..], &["--temperature", "2", "--seed", seed]].concat());
    assert_eq!(drawn("1"), drawn("1"));
    assert_ne!(drawn("1"), drawn("2"));

    let (_, shown, _) = generate(folder, RECIPE, &["--prompt", "hi you", "--max-tokens", "9"]);
    let is_shown = |c: &char| c.is_ascii_graphic();
    let visible = |text: &str| text.chars().filter(is_shown).collect::<String>();
    assert_eq!(visible(&shown), visible(texts[0]["text"].as_str().unwrap()));
}

#[test]
fn the_adapter_that_the_recipe_names_is_used_without_a_flag() {
    let model = model();
    let folder = model.folder();
    let prompt = ["--prompt", "hi you", "--max-tokens", "9"];
    let file = |name: &str| format!("model.pretrained={}", folder.join(name).display());
    let (code, _, error) =
        generate(folder, RECIPE, &[&prompt[..], &["--set", &file("none.safetensors")]].concat());
    assert_eq!(code, 2, "{error}");
    assert!(error.contains("model.pretrained") && error.contains("none.safetensors"), "{error}");
}

#[test]
fn what_cannot_be_continued_is_refused_in_one_line() {
    let model = model();
    let long = "hi ".repeat(200);
    for (flags, expected) in [
        (["--prompt", "", "--plain"].as_slice(), "--prompt is empty"),
        (&["--prompt", &long], "but the model has 128 positions: shorten it"),
        (&["--prompt", "hi", "--weights", "none.safetensors"], "none.safetensors"),
    ] {
        let (code, output, error) = generate(model.folder(), RECIPE, flags);
        assert_eq!((code, output.as_str()), (2, ""), "{error}");
        assert!(error.contains(expected) && error.lines().count() == 1, "{error}");
    }
    for share in ["0", "1.5"] {
        let flags = ["--prompt", "hi", "--top-p", share];
        let (code, _, error) = generate(model.folder(), RECIPE, &flags);
        assert_eq!(code, 2);
        assert!(error.contains("it must be above 0 and at most 1"), "{error}");
    }

    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes/digits_cpu.toml");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton-worker"));
    let done = command.args(["generate", "--recipe", digits, "--prompt", "hi"]).output().unwrap();
    let error = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(2), "{error}");
    assert!(error.contains("model.arch = resnet50, but only a causal_lm writes text"), "{error}");

    let other = Model::chatml();
    write_model(other.folder(), &config_of("llama"), 5);
    let (code, _, error) = generate(other.folder(), RECIPE, &["--prompt", "hi"]);
    assert_eq!(code, 2);
    assert!(error.contains("they belong to different models"), "{error}");
}
