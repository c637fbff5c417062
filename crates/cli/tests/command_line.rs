//! The built program, from outside.

#![allow(clippy::unwrap_used, reason = "a test's helpers may fail as loudly as the test")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use tempfile::TempDir;

const RECIPE: &str = r#"
name = "demo"
[model]
arch = "resnet18"
num_classes = 10
[data]
train = "train.beton"
val = "val.beton"
[train]
epochs = 2
global_batch = 64
resolution = 32
[optimizer]
kind = "sgd"
momentum = 0.9
[schedule]
kind = "constant"
lr = 0.1
"#;

/// A folder with the program, a recipe, and nothing else on the `PATH` but the system's tools.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // Never write to a file that is to be executed: a child that another thread forks at that
        // moment keeps it open for writing, and the system refuses to execute it ("text file busy").
        fs::hard_link(env!("CARGO_BIN_EXE_baton"), folder.path().join("baton")).unwrap();
        let place = Self(folder);
        place.write("good.toml", RECIPE);
        place
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// Puts a shell script beside the program, in place of another one of its kind. Written by a
    /// process of its own, for the same reason.
    fn fake(&self, name: &str, script: &str) {
        let text = self.write("script", &format!("#!/bin/sh\n{script}\n"));
        let mut install = Command::new("install");
        install.args(["-m", "755"]).arg(text).arg(self.0.path().join(name));
        assert!(install.status().unwrap().success());
    }

    fn baton(&self, arguments: &[&str]) -> Output {
        Command::new(self.0.path().join("baton"))
            .args(arguments)
            .current_dir(self.0.path())
            .env("PATH", "/usr/bin:/bin")
            .env_remove("BATON_COORDINATOR")
            .output()
            .unwrap()
    }

    /// Runs a command that must fail with `code` and one line; that line.
    fn refused(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.baton(arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        let lines: Vec<&str> = stderr.lines().collect();
        assert!(lines.len() == 1 && lines[0].starts_with("error: "), "{stderr}");
        lines[0].to_owned()
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.0.path().join("runs/demo/logs").join(name)).unwrap()
    }
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn a_good_recipe_is_printed_whole_and_reads_as_the_same_recipe() {
    let place = Place::new();
    let text = stdout(&place.baton(&["recipe", "check", "good.toml", "--set", "train.epochs=3"]));
    assert!(text.contains("epochs = 3") && text.contains("virtual_ranks = 8"), "{text}");
    place.write("resolved.toml", &text);
    assert_eq!(stdout(&place.baton(&["recipe", "check", "resolved.toml"])), text);
    let json = stdout(&place.baton(&["recipe", "check", "good.toml", "--json"]));
    assert!(json.contains(r#""virtual_ranks": 8"#), "{json}");
}

#[test]
fn bad_recipes_are_refused_with_exit_code_2_and_one_line() {
    let cases = [
        ("unknown key", RECIPE.replace("epochs = 2", "epoch_count = 2"), "epoch_count"),
        ("not TOML", "name = ".to_owned(), "bad.toml"),
        (
            "against a rule",
            RECIPE.replace("global_batch = 64", "global_batch = 60"),
            "global_batch",
        ),
        ("wrong type", RECIPE.replace("epochs = 2", "epochs = \"two\""), "line 10"),
        (
            "missing section",
            RECIPE.replace("[schedule]\nkind = \"constant\"\nlr = 0.1", ""),
            "schedule",
        ),
    ];
    for (name, text, word) in cases {
        let place = Place::new();
        place.write("bad.toml", &text);
        let error = place.refused(2, &["recipe", "check", "bad.toml"]);
        assert!(error.contains(word), "{name}: {error}");
        // `up` says the same, before it starts anything.
        assert_eq!(place.refused(2, &["up", "bad.toml"]), error, "{name}");
        assert!(!place.0.path().join("runs").exists(), "{name}");
    }
}

#[test]
fn a_missing_recipe_and_a_malformed_change_are_named() {
    let place = Place::new();
    assert!(place.refused(2, &["recipe", "check", "no.toml"]).contains("no.toml"));
    let error = place.refused(2, &["recipe", "check", "good.toml", "--set", "epochs"]);
    assert!(error.contains("`epochs`"), "{error}");
}

#[test]
fn commands_without_a_coordinator_fail_with_one_line_and_a_remedy() {
    let place = Place::new();
    // Port 1 is nobody's.
    let at = ["--coordinator", "http://127.0.0.1:1"];
    for command in [&["status"][..], &["watch"], &["drain"], &["stop"], &["checkpoint", "now"]] {
        let error = place.refused(1, &[command, &at].concat());
        assert!(error.contains("127.0.0.1:1") && error.contains("baton up"), "{error}");
    }
}

#[test]
fn up_without_its_programs_says_so() {
    let error = Place::new().refused(1, &["up", "good.toml"]);
    assert!(error.contains("baton-coordinator") && error.contains("make build"), "{error}");
}

#[test]
fn up_passes_on_why_the_coordinator_refused() {
    let place = Place::new();
    place.fake("baton-coordinator", "echo INFO hello >&2; echo 'error: port in use' >&2; exit 2");
    place.fake("baton-worker", "exit 0");
    assert_eq!(place.refused(2, &["up", "good.toml"]), "error: port in use");
    // And again: what the log holds from before is not taken for news.
    place.fake("baton-coordinator", "exit 3");
    let error = place.refused(1, &["up", "good.toml"]);
    assert!(error.contains("exit code 3") && error.contains("coordinator.log"), "{error}");
    assert!(place.log("coordinator.log").contains("INFO hello"));
}

#[test]
fn checkpoints_of_a_folder_that_is_not_there_are_an_error() {
    let place = Place::new();
    assert!(place.refused(1, &["checkpoint", "ls", "--dir", "nowhere"]).contains("nowhere"));
    assert!(place.refused(1, &["checkpoint", "verify", "--dir", "nowhere"]).contains("nowhere"));
    let export = ["checkpoint", "export", "--dir", "nowhere", "--out", "w.safetensors"];
    assert!(place.refused(1, &export).contains("nowhere"));
    assert!(!Path::new(&place.0.path().join("w.safetensors")).exists());
}

#[test]
fn an_empty_folder_holds_no_checkpoints() {
    let place = Place::new();
    fs::create_dir(place.0.path().join("empty")).unwrap();
    let text = stdout(&place.baton(&["checkpoint", "ls", "--dir", "empty"]));
    assert_eq!(text.trim(), "no checkpoints yet");
    assert!(place.refused(1, &["checkpoint", "verify", "--dir", "empty"]).contains("no whole"));
}

#[test]
fn completion_scripts_know_the_commands() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish"] {
        assert!(stdout(&place.baton(&["completion", shell])).contains("checkpoint"), "{shell}");
    }
}

#[test]
fn help_teaches_exit_codes_and_examples() {
    let help = stdout(&Place::new().baton(&["--help"]));
    for word in ["Exit codes:", "75", "130", "baton up recipes/digits_cpu.toml", "--coordinator"] {
        assert!(help.contains(word), "{word}: {help}");
    }
}
