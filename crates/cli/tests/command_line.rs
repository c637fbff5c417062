//! Runs the built program and checks its output and exit codes.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

#[path = "../../recipe/tests/kit/mod.rs"]
mod kit;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use kit::RECIPE;
use tempfile::TempDir;

/// A folder with the program and a recipe; only the system's tools are on the `PATH`.
struct TestFolder(TempDir);

impl TestFolder {
    fn new() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // An executable must not be written here: a child that another thread forks at this time keeps it open for
        // writing, and the system then refuses to execute it ("text file busy").
        fs::hard_link(env!("CARGO_BIN_EXE_baton"), folder.path().join("baton")).unwrap();
        let test = Self(folder);
        test.write("good.toml", RECIPE);
        test
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// Puts a shell script next to the program, in place of one of Baton's other programs. A separate process writes
    /// it, for the same reason.
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

    /// Runs a command that must fail with `code` and one line, and returns this line.
    fn rejected(&self, code: i32, arguments: &[&str]) -> String {
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
fn a_printed_recipe_is_complete_and_reads_as_the_same_recipe() {
    let folder = TestFolder::new();
    let show = |more: &[&str]| stdout(&folder.baton(&[&["recipe", "show"], more].concat()));
    let text = show(&["good.toml", "--set", "train.epochs=3", "--toml"]);
    assert!(text.contains("epochs = 3") && text.contains("virtual_ranks = 8"), "{text}");
    folder.write("resolved.toml", &text);
    assert_eq!(show(&["resolved.toml", "--toml"]), text);
    let json = show(&["good.toml", "--json"]);
    assert!(json.contains(r#""virtual_ranks": 8"#), "{json}");
    let whole = show(&["good.toml", "--set", "train.epochs=3", "--samples", "640"]);
    assert!(whole.contains("3 epochs, 30 steps"), "{whole}");
    let huge = show(&["good.toml", "--set", "schedule.lr=1e308", "--samples", "640"]);
    assert!(huge.contains("####"), "{huge}");
    let without_origins: String = whole
        .lines()
        .map(|line| line.split('#').next().unwrap().trim_end().to_owned() + "\n")
        .collect();
    assert!(without_origins.starts_with(&text), "{whole}");
    folder.write("heir.toml", "name = \"heir\"\nbase = \"good.toml\"\ntrain.epochs = 4\n");
    let whole = show(&["heir.toml", "--set", "seed=1"]);
    let line = |start: &str| whole.lines().find(|line| line.starts_with(start)).unwrap().to_owned();
    assert_eq!(line("epochs"), "epochs = 4");
    for (key, origin) in [
        ("seed", "--set"),
        ("global_batch", "good.toml"),
        ("momentum", "good.toml"),
        ("virtual_ranks", "default"),
    ] {
        assert!(line(key).ends_with(&format!(" # {origin}")), "{whole}");
    }
}

#[test]
fn bad_recipes_are_refused_with_exit_code_2_and_one_line() {
    let cases = [
        ("unknown key", RECIPE.replace("epochs = 2", "epoch_count = 2"), "epoch_count"),
        ("not TOML", "name = ".to_owned(), "bad.toml"),
        (
            "a value out of its range",
            RECIPE.replace("global_batch = 64", "global_batch = 60"),
            "global_batch",
        ),
        ("base that is not there", format!("base = \"no.toml\"\n{RECIPE}"), "no.toml"),
        ("wrong type", RECIPE.replace("epochs = 2", "epochs = \"two\""), "line 10"),
        (
            "missing section",
            RECIPE.replace("[schedule]\nkind = \"constant\"\nlr = 0.1", ""),
            "schedule",
        ),
    ];
    for (name, text, word) in cases {
        let folder = TestFolder::new();
        folder.write("bad.toml", &text);
        let error = folder.rejected(2, &["recipe", "show", "bad.toml"]);
        assert!(error.contains(word), "{name}: {error}");
        // `up` reports the same error before it starts anything.
        assert_eq!(folder.rejected(2, &["up", "bad.toml"]), error, "{name}");
        assert!(!folder.0.path().join("runs").exists(), "{name}");
    }
}

#[test]
fn a_missing_recipe_and_a_malformed_change_are_reported() {
    let folder = TestFolder::new();
    assert!(folder.rejected(2, &["recipe", "show", "no.toml"]).contains("no.toml"));
    let error = folder.rejected(2, &["recipe", "show", "good.toml", "--set", "epochs"]);
    assert!(error.contains("`epochs`"), "{error}");
}

#[test]
fn a_recipe_that_is_no_text_is_called_that() {
    let folder = TestFolder::new();
    fs::write(folder.0.path().join("binary.toml"), [0xff, 0xfe, 0]).unwrap();
    let problem = "binary.toml: is not a text file; is it the recipe?";
    let error = folder.rejected(2, &["recipe", "show", "binary.toml"]);
    assert_eq!(error, format!("error: {problem}"));
    let checked = folder.baton(&["recipe", "check", "binary.toml"]);
    assert_eq!(String::from_utf8(checked.stdout).unwrap(), format!("{problem}\n"));
}

#[test]
fn a_recipe_is_found_by_its_name_in_recipes() {
    let folder = TestFolder::new();
    fs::create_dir(folder.0.path().join("recipes")).unwrap();
    folder.write("recipes/mine.toml", RECIPE);
    let text = stdout(&folder.baton(&["recipe", "check", "mine", "--samples", "6400"]));
    assert_eq!(text, "recipes/mine.toml: ok: 2 epochs, 200 steps over 6,400 samples\n");
}

#[test]
fn a_recipe_and_its_data_are_found_where_the_programs_are_installed() {
    let test = TestFolder::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for folder in ["installed/bin", "installed/recipes", "installed/assets/digits", "elsewhere"] {
        fs::create_dir_all(test.0.path().join(folder)).unwrap();
    }
    let program = test.0.path().join("installed/bin/baton");
    fs::hard_link(env!("CARGO_BIN_EXE_baton"), &program).unwrap();
    for file in [
        "recipes/digits_cpu.toml",
        "assets/digits/digits-train.beton",
        "assets/digits/digits-val.beton",
    ] {
        fs::copy(root.join(file), test.0.path().join("installed").join(file)).unwrap();
    }
    let check = |recipe: &str| {
        let mut command = Command::new(&program);
        command.args(["recipe", "check", recipe]).current_dir(test.0.path().join("elsewhere"));
        command.output().unwrap()
    };
    let text = stdout(&check("digits_cpu"));
    assert!(text.contains("recipes/digits_cpu.toml: ok: 16 epochs"), "{text}");
    assert!(text.contains("over 1,437 samples"), "{text}");
    assert_eq!(check("digits_gpu").status.code(), Some(2));
}

#[test]
fn a_check_counts_the_samples_of_local_files_and_reports_missing_files() {
    let folder = TestFolder::new();
    let checked = |train: &str| {
        let train = format!("data.train={train}");
        stdout(&folder.baton(&["recipe", "check", "good.toml", "--set", &train]))
    };
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-train.beton");
    assert_eq!(checked(digits), "good.toml: ok: 2 epochs, 44 steps over 1,437 samples\n");
    for (train, why) in
        [("no.beton", "does not exist on this machine"), ("s3://bucket/x.beton", "is not read")]
    {
        let expected = format!(
            "good.toml: ok, but the run was not simulated: {train} {why}; give its size with --samples N\n"
        );
        assert_eq!(checked(train), expected);
    }
}

#[test]
fn a_check_warns_of_pretrained_weights_that_are_missing() {
    let folder = TestFolder::new();
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-train.beton");
    fs::write(folder.0.path().join("here.safetensors"), "").unwrap();
    for (set, file, is_warned) in [
        (digits, "here.safetensors", false),
        (digits, "gone.safetensors", true),
        ("elsewhere.beton", "gone.safetensors", true),
    ] {
        let sets = [format!("data.train={set}"), format!("model.pretrained={file}")];
        let check = ["recipe", "check", "good.toml", "--set", &sets[0], "--set", &sets[1]];
        let text = stdout(&folder.baton(&check));
        let warning = "model.pretrained = gone.safetensors: does not exist on this machine";
        assert_eq!(text.contains(&format!("warning: {warning}")), is_warned, "{text}");
    }
}

#[test]
fn a_check_refuses_data_that_can_never_be_read() {
    let folder = TestFolder::new();
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-train.beton");
    let whole = fs::read(digits).unwrap();
    fs::write(folder.0.path().join("cut.beton"), &whole[..whole.len() / 2]).unwrap();
    fs::create_dir(folder.0.path().join("folder")).unwrap();
    for (location, problem) in [
        ("http://host/train.beton", "only paths, file:// and s3:// are supported"),
        ("s3://", "the bucket must be named"),
        ("folder", "folder is a folder without .beton files"),
        ("cut.beton", "cut.beton: "),
    ] {
        for field in ["data.train", "data.val"] {
            let set = format!("{field}={location}");
            let checked = folder.baton(&["recipe", "check", "good.toml", "--set", &set]);
            let output = String::from_utf8(checked.stdout).unwrap();
            assert_eq!(checked.status.code(), Some(2), "{output}");
            assert!(output.contains(problem) && output.lines().count() == 1, "{output}");
            assert!(!output.contains("does not exist"), "{output}");
        }
    }
}

#[test]
fn numbers_that_no_machine_can_handle_are_refused_with_the_range() {
    let folder = TestFolder::new();
    let most = u64::MAX.to_string();
    let samples = "1..=1000000000000";
    let threads = "must be at most 1024";
    for (arguments, range) in [
        (&["recipe", "check", "good.toml", "--samples", &most][..], samples),
        (&["recipe", "show", "good.toml", "--samples", &most], samples),
        (&["plan", "good.toml", "--samples", &most, "--val-samples", "64"], samples),
        (&["plan", "good.toml", "--samples", "640", "--val-samples", &most], samples),
        (&["data", "bench", "train.beton", "--threads", "1000000"], threads),
        (&["data", "verify", "train.beton", "--threads", "1000000"], threads),
        (&["data", "write", "--from", "a", "--to", "b", "--threads", "1000000"], threads),
        (&["plan", "good.toml", "--samples", "640", "--price", "1e300"], "0 to 1000000"),
    ] {
        let output = folder.baton(arguments);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(range) && !error.contains("panicked"), "{error}");
    }
}

#[test]
fn a_check_lists_all_faults_of_all_recipes() {
    let folder = TestFolder::new();
    let changed =
        RECIPE.replace("lr = 0.1", "lr = -1.0").replace("global_batch = 64", "global_batch = 60");
    folder.write("bad.toml", &changed);
    folder.write("damaged.beton", "no beton file");
    let checked = |arguments: &[&str]| {
        let output = folder.baton(&[&["recipe", "check"], arguments].concat());
        let stdout = String::from_utf8(output.stdout).unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        (stdout, error, output.status.code())
    };
    let (output, error, code) = checked(&["good.toml", "bad.toml", "no.toml", "--samples", "6400"]);
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(
        lines[..3],
        [
            "good.toml: ok: 2 epochs, 200 steps over 6,400 samples",
            "bad.toml: train.global_batch = 60: must be a multiple of train.virtual_ranks = 8",
            "bad.toml: schedule.lr = -1: must be at least 0",
        ]
    );
    assert!(lines[3].starts_with("no.toml: No such file"), "{output}");
    assert_eq!((error.as_str(), code), ("error: 2 of 3 recipes cannot run\n", Some(2)));
    assert!(
        checked(&["quik"]).0.starts_with("quik: there is no such file, and no folder recipes/")
    );
    fs::create_dir(folder.0.path().join("recipes")).unwrap();
    folder.write("recipes/quick.toml", RECIPE);
    let (output, ..) = checked(&["quik"]);
    assert!(output.ends_with("recipes that have a name: quick\n"), "{output}");

    // Faults that only a simulation of the run finds.
    let (output, _, code) = checked(&["good.toml", "--samples", "63"]);
    assert_eq!(code, Some(2));
    assert!(output.contains("is more than the 63 samples of data.train"), "{output}");
    let (output, _, code) = checked(&["good.toml", "--set", "data.train=damaged.beton"]);
    assert_eq!(code, Some(2));
    assert!(output.contains("damaged.beton"), "{output}");
    let (output, _, code) = checked(&["good.toml", "--samples", "640", "--set", "ema.decay=0.999"]);
    assert_eq!(code, Some(0));
    assert!(
        output.contains("good.toml: warning: ema.decay = 0.999: averages over 1000"),
        "{output}"
    );
}

#[test]
fn a_check_marks_what_takes_longer_than_the_notice_of_a_machine() {
    let folder = TestFolder::new();
    let check = ["recipe", "check", "good.toml", "--samples", "640", "--val-samples", "50000000"];
    let check = [&check[..], &["--set", "guard.window=5"]].concat();
    let lines = |more: &[&str]| {
        let text = stdout(&folder.baton(&[&check[..], more].concat()));
        text.lines().map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    let on_ec2 = lines(&[]);
    assert_eq!(on_ec2.len(), 2, "{on_ec2:?}");
    assert!(on_ec2[1].starts_with("good.toml: warning: an evaluation of the whole validation set"));
    assert!(
        on_ec2[1].contains("the 120 s of an EC2 spot notice on ") && on_ec2[1].contains("t4 (")
    );
    assert_eq!(lines(&["--set", "cluster.device=cpu"]).len(), 1, "nothing is estimated for a CPU");
    let on_all = lines(&["--notice", "ec2,gce,kubernetes", "--set", "cluster.device=cpu"]);
    assert_eq!(on_all.len(), 3, "{on_all:?}");
    let expected = "good.toml: warning: cluster.drain_seconds = 100: a save may take longer than the 12 s of a \
                    Kubernetes eviction";
    assert!(on_all[2].starts_with(expected), "{on_all:?}");

    let json = lines(&["--notice", "kubernetes", "--json"]).join("\n");
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let missed = json["missed_deadlines"].as_array().unwrap();
    assert_eq!(
        missed.iter().map(|one| &one["subject"]).collect::<Vec<_>>(),
        ["save", "evaluation"]
    );
    assert_eq!(
        (&missed[0]["notice"], &missed[0]["seconds"]),
        (&"kubernetes".into(), &100.0.into())
    );
    let unknown = folder.baton(&[&check[..], &["--notice", "moon"]].concat());
    let error = String::from_utf8(unknown.stderr).unwrap();
    assert!(error.contains("must be one of ec2, gce, kubernetes"), "{error}");
}

#[test]
fn a_check_as_json() {
    let folder = TestFolder::new();
    let arguments = ["recipe", "check", "good.toml", "no.toml", "--samples", "640", "--json"];
    let output = String::from_utf8(folder.baton(&arguments).stdout).unwrap();
    let output: Vec<serde_json::Value> =
        output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&output[0]["ok"], &output[0]["run"]["steps"]), (&true.into(), &20.into()));
    assert_eq!((&output[1]["ok"], &output[1]["recipe"]), (&false.into(), &"no.toml".into()));
    let bad = ["recipe", "check", "good.toml", "--set", "train.epochs=0", "--json"];
    let output: serde_json::Value = serde_json::from_slice(&folder.baton(&bad).stdout).unwrap();
    assert_eq!(output["faults"][0]["field"], "train.epochs");
}

#[test]
fn a_difference_of_recipes_shows_fields_and_whether_weights_can_differ() {
    let folder = TestFolder::new();
    folder.write("other.toml", &RECIPE.replace("lr = 0.1", "lr = 0.2"));
    let diff = |arguments: &[&str]| {
        let output = folder.baton(&[&["recipe", "diff"], arguments].concat());
        (String::from_utf8(output.stdout).unwrap(), output.status.code())
    };
    assert_eq!(diff(&["good.toml", "good.toml"]), ("the same\n".to_owned(), Some(0)));

    let (output, code) = diff(&["good.toml", "other.toml", "--set", "train.clip_grad_norm=1.0"]);
    let rows: Vec<Vec<&str>> =
        output.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[1..3], [["schedule.lr", "0.1", "0.2"], ["train.clip_grad_norm", "-", "1.0"]]);
    assert!(output.ends_with("the resulting weights can differ\n"), "{output}");
    assert_eq!(code, Some(1));

    let (output, code) =
        diff(&["good.toml", "good.toml", "--set", "cluster.max_ranks=1", "--json"]);
    let output: serde_json::Value = serde_json::from_str(&output).unwrap();
    let field = serde_json::json!({ "field": "cluster.max_ranks", "a": 0, "b": 1 });
    assert_eq!(output, serde_json::json!({ "fields": [field], "weights_can_differ": false }));
    assert_eq!(code, Some(1));
    folder.rejected(2, &["recipe", "diff", "good.toml", "no.toml"]);
}

#[test]
fn commands_without_a_coordinator_fail_with_one_line_and_a_remedy() {
    let folder = TestFolder::new();
    // No program uses port 1.
    let at = ["--coordinator", "http://127.0.0.1:1"];
    for command in [
        &["status"][..],
        &["watch"],
        &["recoveries"],
        &["recoveries", "--json"],
        &["events"],
        &["metrics"],
        &["metrics", "--follow"],
        &["logs"],
        &["logs", "--follow"],
        &["pause"],
        &["resume"],
        &["recipe", "get"],
        &["submit", "good.toml"],
        &["drain"],
        &["stop"],
        &["checkpoint", "now"],
    ] {
        let error = folder.rejected(1, &[command, &at].concat());
        assert!(error.contains("127.0.0.1:1") && error.contains("baton up"), "{error}");
    }
}

#[test]
fn a_dashboard_needs_a_terminal_and_names_alternatives() {
    let error = TestFolder::new().rejected(2, &["top"]);
    assert!(error.contains("needs a terminal") && error.contains("baton watch"), "{error}");
}

/// A program of crates/program's tests.
fn program(name: &str) -> String {
    format!("{}/../program/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_doctor_names_a_program_that_does_not_start_and_one_that_is_missing() {
    let folder = TestFolder::new();
    folder.fake(
        "baton-worker",
        "echo 'libtorch_cpu.so: cannot open shared object file' >&2; exit 127",
    );
    let version = stdout(&folder.baton(&["--version"]));
    folder.fake(
        "baton-coordinator",
        &format!("echo '{}'", version.replace("baton", "baton-coordinator").trim()),
    );
    let output = folder.baton(&["doctor"]);
    assert_eq!(output.status.code(), Some(2));
    let lines = String::from_utf8(output.stdout).unwrap();
    let problems: Vec<&str> = lines.lines().filter(|line| line.starts_with("PROBLEM")).collect();
    assert_eq!(problems.len(), 1, "{lines}");
    assert!(
        problems[0].contains("libtorch_cpu.so: cannot open shared object file: install PyTorch")
    );
    assert!(lines.starts_with("ok       programs"), "{lines}");

    fs::remove_file(folder.0.path().join("baton-coordinator")).unwrap();
    let first = stdout_of_failure(&folder.baton(&["doctor", "--json"]));
    let check: serde_json::Value = serde_json::from_str(first.lines().next().unwrap()).unwrap();
    assert_eq!((&check["check"], &check["verdict"]), (&"programs".into(), &"problem".into()));
}

#[test]
fn what_needs_python_is_given_to_the_package_with_its_arguments_and_the_folder_of_the_programs() {
    let folder = TestFolder::new();
    folder.fake("python", "if [ $1 = -c ]; then exit $FOUND; fi; echo \"$BATON_BIN: $*\"; exit 3");
    let run = |found: &str, arguments: &[&str]| {
        Command::new(folder.0.path().join("baton"))
            .args(arguments)
            .env("BATON_PYTHON", folder.0.path().join("python"))
            .env("FOUND", found)
            .output()
            .unwrap()
    };
    for (arguments, expected) in [
        (&["track", "--wandb", "cats"][..], "-m baton track --wandb cats"),
        (&["alert", "runs/a b", "--help"], "-m baton alert runs/a b --help"),
    ] {
        let output = run("0", arguments);
        assert_eq!(output.status.code(), Some(3));
        let printed = String::from_utf8(output.stdout).unwrap();
        assert_eq!(printed, format!("{}: {expected}\n", folder.0.path().display()));
    }
    let output = run("1", &["track"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), error.lines().count()), (Some(2), 1), "{error}");
    assert!(error.contains("has no package baton: install Baton's wheel into it"), "{error}");
}

fn stdout_of_failure(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn a_program_is_inspected_and_one_that_cannot_be_trained_refused() {
    let folder = TestFolder::new();
    let text = stdout(&folder.baton(&["model", "inspect", &program("small.pt2")]));
    for line in [
        "input       x float32 (samples, 3, 8, 8), at most 256 samples",
        "output      (samples, 10)",
        "parameters  394 in 7 tensors, 394 trained",
        "394 trained, 0 frozen: 1.6 kB",
        "arithmetic  0.007 MFLOP per sample",
        "activations 1.9 kB per sample, 956 B with bf16 or fp16\n       768 B  aten::conv2d of conv\n",
        "     1  aten::batch_norm",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let json = stdout(&folder.baton(&["model", "inspect", "--json", &program("small.pt2")]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["operators"]["aten::linear"], 3);
    assert_eq!(json["inputs"][0]["shape"], serde_json::json!([null, 3, 8, 8]));
    assert!(json["metadata"].is_null());
    assert_eq!(json["flops_per_sample"], 2 * 3_664);
    assert_eq!(json["activation_bytes_per_sample"], 1_900);
    assert_eq!(json["half_activation_bytes_per_sample"], 956);
    assert_eq!(json["largest_activations"].as_array().map(Vec::len), Some(5));
    assert_eq!(json["not_counted"], serde_json::Value::Null);

    let line = folder.rejected(2, &["model", "inspect", &program("evaluation.pt2")]);
    assert!(line.ends_with("call model.train() before torch.export.export"), "{line}");
}

#[test]
fn inspect_shows_what_export_wrote_about_the_program() {
    let folder = TestFolder::new();
    let described = program("described.pt2");
    let text = stdout(&folder.baton(&["model", "inspect", &described]));
    for line in [
        "input       input float32 (samples, 3, 8, 8), at most 4096 samples",
        "task        classification",
        "classes     10: digit 0, digit 1, digit 2, digit 3, digit 4, …",
        "normalised  mean [77.9, 77.9, 77.9], std [95.9, 95.9, 95.9]",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let json = stdout(&folder.baton(&["model", "inspect", "--json", &described]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let metadata = &json["metadata"];
    assert_eq!(metadata["task"], "classification");
    assert_eq!(metadata["inputs"], serde_json::json!(["input"]));
    assert_eq!(metadata["class_names"][9], "digit 9");
    let std = metadata["std"].as_array().unwrap();
    assert!((std[2].as_f64().unwrap() - 95.9).abs() < 1e-4, "{std:?}");
}

#[test]
fn a_recipe_check_reads_the_program() {
    let folder = TestFolder::new();
    let check_with = |name: &str, overrides: &[&str]| {
        let program = format!("model.program={}", program(name));
        let mut arguments = vec!["recipe", "check", "good.toml"];
        let all = ["model.arch=program", "train.resolution=8", &program];
        for setting in all.iter().chain(overrides) {
            arguments.extend(["--set", setting]);
        }
        let output = folder.baton(&arguments);
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let check =
        |name: &str, classes: u32| check_with(name, &[&format!("model.num_classes={classes}")]);
    let (code, text) = check("small.pt2", 10);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = check("small.pt2", 11);
    assert_eq!(code, Some(2), "{text}");
    assert!(
        text.contains("returns (samples, 10), but the recipe has model.num_classes = 11"),
        "{text}"
    );
    let (code, text) = check("evaluation.pt2", 10);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("call model.train()"), "{text}");
    let (code, text) = check("absent.pt2", 10);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("absent.pt2 does not exist on this machine"), "{text}");

    let digits =
        ["model.num_classes=10", "data.mean=[77.9, 77.9, 77.9]", "data.std=[95.9, 95.9, 95.9]"];
    let (code, text) = check_with("described.pt2", &digits);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = check_with("described.pt2", &digits[..2]);
    assert_eq!(code, Some(2), "{text}");
    assert!(
        text.contains("and data.std = [95.9, 95.9, 95.9], but the recipe has data.mean"),
        "{text}"
    );
}

#[test]
fn a_program_is_planned_for_the_images_that_it_takes() {
    let folder = TestFolder::new();
    let program = format!("model.program={}", program("small.pt2"));
    let mut arguments = vec!["plan", "good.toml", "--samples", "640", "--val-samples", "64"];
    arguments.extend(["--on", "t4", "--explain", "--set", "model.arch=program"]);
    arguments.extend(["--set", "model.num_classes=10", "--set", &program, "--set"]);
    let text = stdout(&folder.baton(&[&arguments[..], &["train.resolution=8"]].concat()));
    for line in [": program for", " of 8 px", "  activations ", "  convolution ", "  other "] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let line = folder.rejected(2, &[&arguments[..], &["train.resolution=16"]].concat());
    assert!(line.contains("takes x of shape (samples, 3, 8, 8)"), "{line}");
}

#[test]
fn help_lists_the_commands_in_the_order_of_use() {
    let help = stdout(&TestFolder::new().baton(&["--help"]));
    let names = ["up", "submit", "status", "top", "logs", "pause", "drain", "checkpoint", "recipe"];
    let positions = names.map(|name| help.find(&format!("\n  {name} ")));
    assert!(
        positions.iter().all(Option::is_some) && positions.is_sorted(),
        "{positions:?}: {help}"
    );
}

#[test]
fn up_without_its_programs_reports_them() {
    let error = TestFolder::new().rejected(1, &["up", "good.toml"]);
    assert!(error.contains("baton-coordinator") && error.contains("make build"), "{error}");
}

#[test]
fn up_passes_on_why_the_coordinator_refused() {
    let folder = TestFolder::new();
    folder.fake("baton-coordinator", "echo INFO hello >&2; echo 'error: port in use' >&2; exit 2");
    folder.fake("baton-worker", "exit 0");
    assert_eq!(folder.rejected(2, &["up", "good.toml"]), "error: port in use");
    // Run again: an error of the earlier run in the log is ignored.
    folder.fake("baton-coordinator", "exit 3");
    let error = folder.rejected(1, &["up", "good.toml"]);
    assert!(error.contains("exit code 3") && error.contains("coordinator.log"), "{error}");
    assert!(folder.log("coordinator.log").contains("INFO hello"));
}

#[test]
fn a_signal_before_the_coordinator_serves_ends_up_so_that_a_supervisor_starts_it_again() {
    let folder = TestFolder::new();
    folder.fake("baton-coordinator", "kill -TERM $PPID; exec sleep 30");
    folder.fake("baton-worker", "exit 0");
    let ended = folder.baton(&["up", "good.toml"]);
    let text = String::from_utf8(ended.stdout).unwrap();
    assert_eq!(ended.status.code(), Some(75), "{text}");
    assert!(text.contains("stopped before the job was started"), "{text}");
}

#[test]
fn certificates_are_listed_as_text_or_as_json() {
    let folder = TestFolder::new();
    let text = stdout(&folder.baton(&["cert"]));
    assert!(text.starts_with("certs: ca.pem, ca-key.pem, ") && text.contains("90 days"), "{text}");
    let output = stdout(&folder.baton(&["cert", "--out", "more", "--days", "3", "--json"]));
    let output: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!((&output["folder"], &output["days"]), (&"more".into(), &3.into()));
    let files = output["files"].as_array().unwrap();
    assert_eq!((files.len(), &files[0]), (10, &"ca.pem".into()));
    for host in ["https://host", "host:1", "[::1]", "a..b", "a b", ""] {
        let output = folder.baton(&["cert", "--out", "refused", "--host", host]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("must be a host name or an address"), "{error}");
    }
    for host in ["10.0.0.1", "fe80::1", "*.cluster.example", "node_1"] {
        stdout(&folder.baton(&["cert", "--out", &format!("for-{host}"), "--host", host]));
    }
}

#[test]
fn an_error_with_json_is_the_same_line_on_standard_error() {
    let folder = TestFolder::new();
    let output = folder.baton(&["status", "--json", "--coordinator", "http://127.0.0.1:1"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{error}");
    assert!(error.starts_with("error: ") && error.lines().count() == 1, "{error}");
}

#[test]
fn a_resume_from_what_is_no_checkpoint_is_refused_before_anything_starts() {
    let folder = TestFolder::new();
    fs::create_dir(folder.0.path().join("empty")).unwrap();
    let name = "step-0000000440-gen-000003";
    let at = |location: &str| format!("{location}/{name}");
    for (checkpoint, problem) in [
        ("nosuch", "is not a checkpoint"),
        ("", "is not a checkpoint"),
        ("..", "is not a checkpoint"),
        ("s3://", "is not a checkpoint"),
        ("http://x", "is not a checkpoint"),
        ("s3://bucket/nosuch", "is not a checkpoint"),
        (name, "runs/demo/checkpoints does not exist"),
        (&at("empty"), "there is no checkpoint"),
        (&at("nowhere"), "nowhere does not exist"),
        (&at("http://x"), "http:// is not supported"),
    ] {
        let error = folder.rejected(2, &["up", "good.toml", "--resume", checkpoint]);
        assert!(error.contains("--resume") && error.contains(problem), "{error}");
        assert!(!folder.0.path().join("runs").exists(), "{error}");
    }
}

#[test]
fn a_run_folder_inside_a_checkpoint_is_refused_before_anything_is_written() {
    let folder = TestFolder::new();
    let run_dir = "runs/demo/checkpoints/step-0000000440-gen-000003/run";
    let error = folder.rejected(2, &["up", "good.toml", "--run-dir", run_dir]);
    assert!(error.contains("is inside checkpoint step-0000000440-gen-000003"), "{error}");
    assert!(!folder.0.path().join("runs").exists());
}

#[test]
fn weights_cannot_be_imported_for_a_model_without_layers() {
    let folder = TestFolder::new();
    folder.write("linear.toml", &RECIPE.replace("resnet18", "linear"));
    let import = ["checkpoint", "import", "w.safetensors", "--recipe", "linear.toml"];
    let error = folder.rejected(2, &[&import[..], &["--into", "new"]].concat());
    let expected = "linear.toml: model.arch = \"linear\" cannot be imported: use a ResNet";
    assert_eq!(error, format!("error: {expected}"));
}

#[test]
fn checkpoints_of_a_missing_folder_are_an_error() {
    let folder = TestFolder::new();
    let error = folder.rejected(2, &["checkpoint", "ls", "--dir", "nowhere"]);
    assert!(error.starts_with("error: nowhere does not exist: "), "{error}");
    let error = folder.rejected(2, &["checkpoint", "ls", "--dir", "good.toml"]);
    assert!(error.starts_with("error: good.toml is not a folder: "), "{error}");
    assert!(folder.rejected(2, &["checkpoint", "verify", "--dir", "nowhere"]).contains("nowhere"));
    for command in ["verify", "inspect"] {
        let error = folder.rejected(2, &["data", command, "s3://bucket/train.beton"]);
        assert!(error.contains("is in a bucket, which only training reads"), "{error}");
    }
    let export = ["checkpoint", "export", "--dir", "nowhere", "--out", "w.safetensors"];
    assert!(folder.rejected(2, &export).contains("nowhere"));
    let error = folder.rejected(2, &["checkpoint", "ls", "--dir", ""]);
    assert!(error.contains("the path is empty"), "{error}");
    assert!(!Path::new(&folder.0.path().join("w.safetensors")).exists());
}

#[test]
fn an_empty_folder_has_no_checkpoints() {
    let folder = TestFolder::new();
    fs::create_dir(folder.0.path().join("empty")).unwrap();
    let text = stdout(&folder.baton(&["checkpoint", "ls", "--dir", "empty"]));
    assert_eq!(text.trim(), "no checkpoints yet");
    assert!(
        folder
            .rejected(1, &["checkpoint", "verify", "--dir", "empty"])
            .contains("no complete checkpoint")
    );
}

#[test]
fn completion_scripts_contain_the_commands() {
    let folder = TestFolder::new();
    for shell in ["bash", "zsh", "fish"] {
        assert!(stdout(&folder.baton(&["completion", shell])).contains("checkpoint"), "{shell}");
    }
}

#[test]
fn help_shows_exit_codes_and_examples() {
    let help = stdout(&TestFolder::new().baton(&["--help"]));
    for word in ["Exit codes:", "75", "130", "baton up recipes/digits_cpu.toml", "--coordinator"] {
        assert!(help.contains(word), "{word}: {help}");
    }
}

/// A folder of two classes with `count` images in a format that needs no encoder.
fn images(folder: &TestFolder, count: u8) -> PathBuf {
    let folder = folder.0.path().join("images");
    for number in 0..count {
        let class = folder.join(["cat", "dog"][usize::from(number % 2)]);
        fs::create_dir_all(&class).unwrap();
        let header = format!("P6 4 {} 255\n", number + 1);
        let pixels = vec![number; 3 * 4 * (usize::from(number) + 1)];
        fs::write(class.join(format!("{number}.ppm")), [header.as_bytes(), &pixels].concat())
            .unwrap();
    }
    folder
}

#[test]
fn a_folder_of_images_becomes_a_data_set() {
    let folder = TestFolder::new();
    images(&folder, 6);
    let write = ["data", "write", "--from", "images", "--to", "set.beton", "--jpeg-fraction", "0"];
    let text = stdout(&folder.baton(&write));
    assert!(text.contains("set.beton: 6 samples (0 JPEG, 0 of them unchanged; 6 raw), "), "{text}");
    assert!(text.ends_with("classes: set.beton.classes.txt\n"), "{text}");
    let classes = fs::read_to_string(folder.0.path().join("set.beton.classes.txt")).unwrap();
    assert_eq!(classes, "cat\ndog\n");

    let text = stdout(&folder.baton(&[&write[..], &["--json", "--shards", "2"]].concat()));
    let output: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&output["samples"], &output["raw"]), (&6.into(), &6.into()));
    assert_eq!(output["files"][1]["path"], "set-00001-of-00002.beton");
    assert_eq!(output["files"][1]["kept"], false);

    let again = folder.baton(&[&write[..], &["--shards", "2", "--resume"]].concat());
    let output = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(
        output.contains("kept set-00000-of-00002.beton: 3 samples of an earlier run"),
        "{output}"
    );
    assert!(stdout(&again).contains("set.beton in 2 shards: 6 samples"));

    let divided = [&write[..], &["--val", "val.beton", "--val-share", "0.3"]].concat();
    let text = stdout(&folder.baton(&divided));
    assert!(text.starts_with("set.beton, val.beton: 6 samples (0 JPEG, "), "{text}");
    let text = stdout(&folder.baton(&[&divided[..], &["--json"]].concat()));
    let output: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!([0, 1].map(|file| output["files"][file]["samples"].as_u64()), [Some(4), Some(2)]);
    let refused = folder.baton(&[&divided[..], &["--shards", "2"]].concat());
    assert_eq!(refused.status.code(), Some(2), "shards of several files");
}

#[test]
fn the_settings_that_follow_from_the_values_of_a_file_are_shown() {
    let folder = TestFolder::new();
    images(&folder, 6);
    folder.write("list.csv", "images/cat/0.ppm,0\nimages/cat/2.ppm,0\nimages/dog/1.ppm,1\n");
    let write =
        ["data", "write", "--from", "list.csv", "--to", "set.beton", "--jpeg-fraction", "0"];
    stdout(&folder.baton(&write));
    let text = stdout(&folder.baton(&["data", "inspect", "set.beton", "--values"]));
    let setting = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name)).unwrap();
        line.trim_start_matches(" = ").to_owned()
    };
    assert_eq!(setting("loss.class_weights"), "[0.750000, 1.500000]");
    assert!(text.contains("classes of label:\n  0: 2 samples\n  1: 1 sample\n"), "{text}");
    // As a recipe takes them.
    for name in ["data.mean", "data.std", "loss.class_weights"] {
        let set = format!("{name}={}", setting(name));
        let check = ["recipe", "check", "good.toml", "--samples", "6400", "--set", &set];
        stdout(&folder.baton(&[&check[..], &["--set", "model.num_classes=2"]].concat()));
    }
    let json = stdout(&folder.baton(&["data", "inspect", "set.beton", "--values", "--json"]));
    let output: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(output["values"][1]["class_counts"], serde_json::json!([2, 1]));
    assert_eq!(output["values"][0]["mean"].as_array().unwrap().len(), 3);
}

#[test]
fn a_table_takes_images_from_the_files_that_it_names() {
    let folder = TestFolder::new();
    images(&folder, 6);
    let rows = (0..6).map(|row| {
        let class = ["cat", "dog"][row % 2];
        format!("images/{class}/{row}.ppm,{class},{}\n", row as f64 / 2.0)
    });
    folder.write("photos.csv", &format!("file,species,weight\n{}", rows.collect::<String>()));
    let table = ["data", "table", "--from", "photos.csv", "--to", "set.beton", "--field"];
    let table = [&table[..], &["image=image:file", "--field", "label=class:species"]].concat();
    let fields = [&table[..], &["--field", "weight=float"]].concat();
    let split = ["--val", "val.beton", "--val-share", "0.3", "--stratify", "label"];
    let text = stdout(&folder.baton(&[&fields[..], &split, &["--max-resolution", "2"]].concat()));
    assert!(
        text.contains("set.beton: 4 samples") && text.contains("val.beton: 2 samples"),
        "{text}"
    );
    let text = stdout(&folder.baton(&["data", "inspect", "val.beton"]));
    assert!(text.contains("2 JPEG, 0 raw") && text.contains(" to 2 high"), "{text}");

    fs::write(folder.0.path().join("images/dog/3.ppm"), "no image").unwrap();
    let error = folder.rejected(2, &[&fields[..], &split].concat());
    assert!(error.contains("photos.csv, line 5: column \"file\": images/dog/3.ppm is"), "{error}");
    let text = stdout(&folder.baton(&[&fields[..], &["--on-bad", "skip"]].concat()));
    assert!(text.contains("set.beton: 5 samples") && text.contains("skipped 1 bad row"), "{text}");
    let both = folder.baton(&[&fields[..], &split, &["--by", "species"]].concat());
    assert_eq!(both.status.code(), Some(2), "--stratify and --by");
}

#[test]
fn bad_images_are_reported_and_then_bad_input_or_left_out() {
    let folder = TestFolder::new();
    fs::write(images(&folder, 4).join("cat/bad.jpg"), "no image").unwrap();
    let write = ["data", "write", "--from", "images", "--to", "set.beton"];
    let output = folder.baton(&write);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let (named, error) = stderr.trim_end().split_once('\n').unwrap();
    assert_eq!(named, "bad image: images/cat/bad.jpg is not an image of a known format");
    assert!(
        error.starts_with("error: 1 image of images cannot be stored, the first is "),
        "{error}"
    );
    assert!(!folder.0.path().join("set.beton").exists());

    let text = stdout(&folder.baton(&[&write[..], &["--on-bad-image", "skip"]].concat()));
    assert!(text.contains("4 samples") && text.contains("skipped 1 bad image\n"), "{text}");
}

#[test]
fn names_of_images_do_not_control_the_terminal() {
    let folder = TestFolder::new();
    let bad = images(&folder, 2).join("cat/\x1b]0;title\x07\u{9b}2J.jpg");
    fs::write(bad, "no image").unwrap();
    let output = folder.baton(&["data", "write", "--from", "images", "--to", "set.beton"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert_eq!(error.matches("2J.jpg").count(), 2, "in its own line and in the error: {error}");
    assert!(!error.contains(['\x1b', '\x07', '\u{9b}']), "{error:?}");
}

#[test]
fn a_write_with_bad_input_is_refused_with_exit_code_2_and_one_line() {
    let folder = TestFolder::new();
    images(&folder, 2);
    folder.write("list.csv", "images/cat/0.ppm,zero\n");
    let rejected = |from: &str, more: &[&str]| {
        folder
            .rejected(2, &[&["data", "write", "--from", from, "--to", "set.beton"], more].concat())
    };
    assert!(rejected("nowhere", &[]).contains("cannot open nowhere"));
    assert!(
        rejected("list.csv", &[]).contains("list.csv, line 1: label \"zero\" is not an integer")
    );
    assert!(rejected("images", &["--page-size", "1048576"]).contains("--page-size 1048576"));
    assert!(rejected("images", &["--shards", "3"]).contains("take 1 to 2 shards"));
    assert!(rejected("images", &["--image-field", "seventeen_letters"]).contains("1 to 16"));
}

#[test]
fn synthetic_signals_become_a_data_set_for_inspect_verify_and_bench() {
    let folder = TestFolder::new();
    let synth = ["data", "synth", "signals", "--out", "sets/made", "--samples", "30"];
    let synth = [&synth[..], &["--val-samples", "10", "--channels", "2"]].concat();
    let text = stdout(&folder.baton(&synth));
    assert!(text.starts_with("sets/made/signals-train.beton: 30 samples of shape [2, 100], "));
    assert!(text.contains("\nsets/made/signals-val.beton: 10 samples "), "{text}");
    assert!(
        text.contains("data.input_field = \"signal\", data.label_field = \"target\""),
        "{text}"
    );

    let train = folder.0.path().join("sets/made/signals-train.beton");
    let bytes = fs::read(&train).unwrap();
    let rejected = folder.rejected(2, &synth);
    let expected = "sets/made/signals-train.beton already exists: --force replaces it";
    assert!(rejected.ends_with(expected), "{rejected}");
    let text = stdout(&folder.baton(&[&synth[..], &["--force", "--json"]].concat()));
    let output: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(output["files"][1]["samples"], 10);
    assert_eq!(output["shape"], serde_json::json!([2, 100]));
    assert_eq!(fs::read(&train).unwrap(), bytes, "the same command writes the same bytes");
    folder.baton(&[&synth[..], &["--force", "--seed", "1"]].concat());
    assert_ne!(fs::read(&train).unwrap(), bytes);

    let train = "sets/made/signals-train.beton";
    let text = stdout(&folder.baton(&["data", "inspect", train]));
    assert!(text.contains("signal  NDArrayField\n  shape [2, 100], dtype <f4\n"), "{text}");
    assert!(text.contains("target  FloatField\n  0.0") && text.contains(", mean 0."), "{text}");
    let text = stdout(&folder.baton(&["data", "verify", train]));
    assert_eq!(text, format!("{train}: 30 samples, no faults\n"));
    let cut = folder.0.path().join("sets/made/cut.beton");
    fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    let files = ["data", "verify", "--json", "sets/made/cut.beton", train];
    let output = folder.baton(&files);
    assert_eq!(output.status.code(), Some(2));
    let lines = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines[0]["error"].as_str().unwrap().contains("cut.beton"), "{lines:?}");
    assert_eq!((&lines[1]["samples"], &lines[1]["bad"]), (&30.into(), &0.into()));
    let rejected = folder.rejected(2, &files);
    assert!(rejected.contains("1 file cannot be read, the first: "), "{rejected}");
    let fields = ["--input-field", "signal", "--label-field", "target"];
    let bench = [&["data", "bench", train, "--batch", "8", "--json"], &fields[..]].concat();
    let rejected = folder.rejected(2, &bench);
    assert!(rejected.contains("field \"target\" is a FloatField"), "{rejected}");
    let text = stdout(&folder.baton(&[&bench[..], &["--outputs", "1"]].concat()));
    let output: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(output["median_images_per_second"].as_f64().unwrap() > 0.0, "{text}");
}

#[test]
fn impossible_signals_are_rejected_before_anything_is_written() {
    let folder = TestFolder::new();
    let rejected = |more: &[&str]| {
        folder.rejected(2, &[&["data", "synth", "signals", "--out", "sets"], more].concat())
    };
    assert!(rejected(&["--window", "10"]).contains("a window of 10 is too short for 12 cycles"));
    assert!(rejected(&["--noise=-1"]).contains("noise of -1: take 0 or more"));
    assert!(!folder.0.path().join("sets").exists());
}

#[test]
fn a_plan_needs_no_data_for_imagenet_but_the_size_of_any_other_data_set() {
    let folder = TestFolder::new();
    let imagenet = ["plan", "good.toml", "--set", "model.num_classes=1000", "--on", "t4,l4"];
    let text = stdout(&folder.baton(&imagenet));
    assert!(text.contains("1,281,167") && text.contains("assumed: ImageNet"), "{text}");
    let error = folder.rejected(2, &["plan", "good.toml"]);
    assert!(
        error
            .contains("train.beton does not exist on this machine; give its size with --samples N"),
        "{error}"
    );

    let sized = ["plan", "good.toml", "--samples", "640", "--val-samples", "64", "--on", "h200"];
    let output = stdout(&folder.baton(&[&sized[..], &["--json"]].concat()));
    let output: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!(output["plans"][0]["machine"], "h200");
    assert_eq!(output["plans"][0]["segments"][0]["samples"], 2 * 640);
    let explained = stdout(&folder.baton(&[&sized[..], &["--explain"]].concat()));
    assert!(explained.contains("memory bandwidth"), "{explained}");
}

#[test]
fn a_plan_that_cannot_be_made_is_one_line_of_error() {
    let folder = TestFolder::new();
    let sized = ["plan", "good.toml", "--samples", "640", "--val-samples", "64"];
    let rejected = |more: &[&str]| folder.rejected(2, &[&sized[..], more].concat());
    let error = rejected(&["--on", "dgx"]);
    assert!(error.contains("`dgx`") && error.contains("p4d.24xlarge, p3.8xlarge"), "{error}");
    assert!(rejected(&["--set", "epochs"]).contains("`epochs`"));
    assert!(rejected(&["--set", "model.arch=linear"]).contains("trains on a CPU"));
    let bench = folder.write("bench.json", "{}").display().to_string();
    let error = rejected(&["--on", "t4", "--calibration", &bench]);
    assert!(error.contains("bench.json") && error.contains("baton-worker bench"), "{error}");
    let error = rejected(&["--on", "t4,l4", "--calibration", &bench]);
    assert!(error.contains("was measured on one GPU type"), "{error}");
    assert!(rejected(&["--on", "t4", "--calibration", "no.json"]).contains("no.json"));
}

#[test]
fn a_file_without_an_end_is_refused() {
    let folder = TestFolder::new();
    let endless = folder.write("endless.toml", "base = \"/dev/zero\"\n").display().to_string();
    for arguments in [
        &["recipe", "check", "/dev/zero"][..],
        &["recipe", "check", &endless],
        &["up", "/dev/zero"],
        &["status", "--token-file", "/dev/zero"],
        &["status", "--tls-ca", "/dev/zero"],
    ] {
        let output = folder.baton(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        // `recipe check` prints what is wrong with each recipe, as a result.
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("/dev/zero") && text.contains("is larger than"), "{text}");
    }
    let show = "cat good.toml | ./baton recipe check /dev/stdin";
    let piped = Command::new("sh").args(["-c", show]).current_dir(folder.0.path()).output();
    assert!(stdout(&piped.unwrap()).contains("ok"));
}

#[test]
fn output_that_cannot_be_written_is_an_error_and_a_closed_pipe_is_none() {
    let folder = TestFolder::new();
    let run = |command: &str| {
        let mut shell = Command::new("bash");
        shell.args(["-c", command]).current_dir(folder.0.path()).output().unwrap()
    };
    for command in ["recipe show good.toml --toml", "recipe check good.toml", "completion bash"] {
        let output = run(&format!("./baton {command} > /dev/full"));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{command}: {stderr}");
        assert!(stderr.starts_with("error: the output cannot be written: "), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    // The reader has ended before the first line is written.
    let output =
        run("exec {ended}> >(:); wait $!; ./baton recipe show good.toml >&$ended; echo $? >&2");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "0\n");
}

#[test]
fn a_file_that_becomes_too_large_for_the_shells_limit_is_named() {
    let test = TestFolder::new();
    let output = Command::new("sh")
        .args(["-c", "ulimit -f 100 && exec ./baton data synth signals --out data"])
        .current_dir(test.0.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.starts_with("error: cannot write data/") && stderr.contains("File too large"),
        "{stderr}"
    );
}
