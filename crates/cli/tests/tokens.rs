//! Runs `baton data tokenize` and shows what it wrote.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

#[path = "../../text/tests/kit/mod.rs"]
mod kit;

use std::process::{Command, Output};

use kit::Model;
use serde_json::Value;

const CHAT: &str =
    r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]}"#;

/// Runs the program in the model's folder.
fn baton(model: &Model, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(arguments).current_dir(model.folder()).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Tokenizes `train.jsonl` with the model in the same folder.
fn tokenize(model: &Model, more: &[&str]) -> Output {
    let command =
        ["data", "tokenize", "--from", "train.jsonl", "--tokenizer", ".", "--to", "train.beton"];
    baton(model, &[&command[..], more].concat())
}

/// The line of an error with exit code 2.
fn rejected(output: &Output) -> String {
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let lines: Vec<&str> = stderr.lines().collect();
    assert!(lines.len() == 1 && lines[0].starts_with("error: "), "{stderr}");
    lines[0].to_owned()
}

#[test]
fn conversations_become_tokens_and_are_shown_with_the_part_without_loss_in_brackets() {
    let model = Model::chatml();
    model.write("train.jsonl", &format!("{CHAT}\n{CHAT}\n"));
    let text = stdout(&tokenize(&model, &[]));
    for line in [
        "train.beton: 2 samples, ",
        "\n  tokens                  40\n",
        "\n  predicted                6  15.0 %\n",
        "\n  truncated                0  0.0 % of the samples; 0 tokens cut off\n",
        "\n  longest                 20  before it was cut\n",
        "\n  up to     32 tokens:         2 ########################################\n",
        "\nchat template ./tokenizer_config.json; the vocabulary has 276 tokens; ",
    ] {
        assert!(text.contains(line), "{line:?} in {text}");
    }

    let inspect = ["data", "inspect", "train.beton"];
    let text = stdout(&baton(&model, &inspect));
    assert!(
        text.contains("tokens  BytesField\n  160 B in total; 80 B to 80 B, mean 80 B\n"),
        "{text}"
    );
    let text =
        stdout(&baton(&model, &[&inspect[..], &["--tokenizer", ".", "--show", "5"]].concat()));
    let expected = "\nsample 1: 20 tokens, 3 predicted\n⟦<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟧\
                    you<|im_end|>\n";
    assert!(text.contains(expected) && !text.contains("sample 2"), "{text}");
    let text = stdout(&baton(&model, &[&inspect[..], &["--tokenizer", ".", "--json"]].concat()));
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&json["samples"], json["texts"].as_array().unwrap().len()), (&2.into(), 1));
    assert_eq!(
        json["texts"][0]["parts"][1],
        serde_json::json!({"text": "you<|im_end|>\n", "loss": true})
    );
    let text = stdout(&baton(&model, &[&inspect[..], &["--json"]].concat()));
    assert!(!text.contains("texts"), "{text}");
}

#[test]
fn a_share_of_the_samples_is_for_validation() {
    let model = Model::chatml();
    let lines: String = (0..200)
        .map(|number| format!("{{\"text\": \"hi {number}\", \"module\": {}}}\n", number / 4))
        .collect();
    model.write("train.jsonl", &lines);
    let split = ["--val", "val.beton", "--val-share", "0.2", "--by", "module"];
    let text = stdout(&tokenize(&model, &[&split[..], &["--json"]].concat()));
    let json: Value = serde_json::from_str(&text).unwrap();
    let samples = |set: &str| json[set]["samples"].as_u64().unwrap();
    assert_eq!(samples("train") + samples("val"), 200);
    assert!(samples("val") > 0 && samples("val") % 4 == 0, "{text}");
    assert_eq!((&json["val"]["path"], &json["vocab_size"]), (&"val.beton".into(), &276.into()));
    assert!(
        stdout(&tokenize(&model, &split))
            .contains(&format!("\nval.beton: {} samples, ", samples("val")))
    );
}

#[test]
fn bad_lines_end_the_run_or_are_skipped_and_listed() {
    let model = Model::chatml();
    model.write("train.jsonl", &format!("{CHAT}\n{{\"messages\": []}}\n{{\"messages\": 3}}\n"));
    let error = rejected(&tokenize(&model, &[]));
    let expected = "error: train.jsonl, line 2: the conversation has no message of the assistant, so there is nothing to \
                    learn";
    assert_eq!(error, expected);
    assert!(!model.folder().join("train.beton").exists());

    let output = tokenize(&model, &["--on-bad", "skip"]);
    let text = stdout(&output);
    assert!(
        text.contains("train.beton: 1 sample, ") && text.contains("\nskipped 2 bad lines\n"),
        "{text}"
    );
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(
        notes.contains("skipped: train.jsonl, line 3, column 14: invalid type: integer `3`"),
        "{notes}"
    );
    let text = stdout(&tokenize(&model, &["--on-bad", "skip", "--json"]));
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&json["skipped"], json["first_skipped"].as_array().unwrap().len()), (&2.into(), 2));
}

#[test]
fn bad_input_is_refused_with_one_line_that_has_a_remedy() {
    let model = Model::new();
    model.write("train.jsonl", CHAT);
    let refused = |more: &[&str]| rejected(&tokenize(&model, more));
    assert!(refused(&[]).ends_with("which conversations need: give one with --template FILE"));
    assert!(refused(&["--template", "no.jinja"]).contains("cannot read no.jinja: No such file"));
    model.write("bad.jinja", "{% for %}");
    assert!(
        refused(&["--template", "bad.jinja"])
            .contains("chat template bad.jinja, line 1: syntax error")
    );
    assert!(refused(&["--from", "book.txt"]).contains("book.txt: is plain text"));
    assert!(refused(&["--from", "no.jsonl"]).contains("cannot open no.jsonl"));
    assert!(refused(&["--format", "text"]).ends_with("set eos_token in tokenizer_config.json"));
    assert!(
        refused(&["--val", "train.beton", "--val-share", "0.5"])
            .contains("both training and validation")
    );
    assert!(
        refused(&["--val", "val.beton", "--val-share", "0"])
            .contains("--val-share 0: must be above 0")
    );
    let nowhere =
        ["data", "tokenize", "--from", "train.jsonl", "--tokenizer", "nowhere", "--to", "a.beton"];
    let error = rejected(&baton(&model, &nowhere));
    assert!(
        error.starts_with("error: nowhere: is not a folder: give the folder of a model"),
        "{error}"
    );
    for (flags, part) in [
        (&["--sequence", "1"][..], "2..=262144"),
        (&["--val", "val.beton"], "--val-share"),
        (&["--by", "x"], "--val"),
    ] {
        let output = tokenize(&model, flags);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(part), "{error}");
    }
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
    let error = rejected(&baton(&model, &["data", "inspect", digits, "--tokenizer", "."]));
    assert!(error.contains("\"tokens\""), "{error}");
}

#[test]
fn texts_do_not_control_the_terminal() {
    let model = Model::chatml();
    model.write("train.jsonl", r#"{"text": "a\u001b]0;title\u0007b\u001b[2J"}"#);
    stdout(&tokenize(&model, &[]));
    let inspect = ["data", "inspect", "train.beton", "--tokenizer", "."];
    let text = stdout(&baton(&model, &inspect));
    assert!(text.contains("]0;title") && !text.contains(['\x1b', '\x07']), "{text:?}");
    let text = stdout(&baton(&model, &[&inspect[..], &["--json"]].concat()));
    assert!(!text.contains('\x1b'), "{text:?}");
}
