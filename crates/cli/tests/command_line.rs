//! The built program, from outside.

#![allow(clippy::unwrap_used, reason = "a test's helpers may fail as loudly as the test")]

#[path = "../../recipe/tests/kit/mod.rs"]
mod kit;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use kit::RECIPE;
use tempfile::TempDir;

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
    let show = |more: &[&str]| stdout(&place.baton(&[&["recipe", "show"], more].concat()));
    let text = show(&["good.toml", "--set", "train.epochs=3", "--toml"]);
    assert!(text.contains("epochs = 3") && text.contains("virtual_ranks = 8"), "{text}");
    place.write("resolved.toml", &text);
    assert_eq!(show(&["resolved.toml", "--toml"]), text);
    let json = show(&["good.toml", "--json"]);
    assert!(json.contains(r#""virtual_ranks": 8"#), "{json}");
    let whole = show(&["good.toml", "--set", "train.epochs=3", "--samples", "640"]);
    assert!(whole.contains("3 epochs, 30 updates"), "{whole}");
    let without_origins: String = whole
        .lines()
        .map(|line| line.split('#').next().unwrap().trim_end().to_owned() + "\n")
        .collect();
    assert!(without_origins.starts_with(&text), "{whole}");
    place.write("heir.toml", "name = \"heir\"\nbase = \"good.toml\"\ntrain.epochs = 4\n");
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
            "against a rule",
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
        let place = Place::new();
        place.write("bad.toml", &text);
        let error = place.refused(2, &["recipe", "show", "bad.toml"]);
        assert!(error.contains(word), "{name}: {error}");
        // `up` says the same, before it starts anything.
        assert_eq!(place.refused(2, &["up", "bad.toml"]), error, "{name}");
        assert!(!place.0.path().join("runs").exists(), "{name}");
    }
}

#[test]
fn a_missing_recipe_and_a_malformed_change_are_named() {
    let place = Place::new();
    assert!(place.refused(2, &["recipe", "show", "no.toml"]).contains("no.toml"));
    let error = place.refused(2, &["recipe", "show", "good.toml", "--set", "epochs"]);
    assert!(error.contains("`epochs`"), "{error}");
}

#[test]
fn a_recipe_is_found_by_its_name_in_recipes() {
    let place = Place::new();
    fs::create_dir(place.0.path().join("recipes")).unwrap();
    place.write("recipes/mine.toml", RECIPE);
    let text = stdout(&place.baton(&["recipe", "check", "mine", "--samples", "6400"]));
    assert_eq!(text, "recipes/mine.toml: ok: 2 epochs, 200 updates over 6,400 samples\n");
}

#[test]
fn a_check_counts_the_samples_of_local_files_and_says_so_where_there_are_none() {
    let place = Place::new();
    let checked = |train: &str| {
        let train = format!("data.train={train}");
        stdout(&place.baton(&["recipe", "check", "good.toml", "--set", &train]))
    };
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-train.beton");
    assert_eq!(checked(digits), "good.toml: ok: 2 epochs, 44 updates over 1,437 samples\n");
    for (train, why) in [("no.beton", "is not here"), ("s3://bucket/x.beton", "is not asked")] {
        let expected = format!(
            "good.toml: ok, but not walked over: {train} {why}; --samples N tells its size\n"
        );
        assert_eq!(checked(train), expected);
    }
}

#[test]
fn a_check_lists_all_faults_of_all_recipes() {
    let place = Place::new();
    let changed =
        RECIPE.replace("lr = 0.1", "lr = -1.0").replace("global_batch = 64", "global_batch = 60");
    place.write("bad.toml", &changed);
    place.write("damaged.beton", "no beton file");
    let checked = |arguments: &[&str]| {
        let output = place.baton(&[&["recipe", "check"], arguments].concat());
        let told = String::from_utf8(output.stdout).unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        (told, error, output.status.code())
    };
    let (told, error, code) = checked(&["good.toml", "bad.toml", "no.toml", "--samples", "6400"]);
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(
        lines[..3],
        [
            "good.toml: ok: 2 epochs, 200 updates over 6,400 samples",
            "bad.toml: train.global_batch = 60: must be a multiple of train.virtual_ranks = 8",
            "bad.toml: schedule.lr = -1: must be at least 0",
        ]
    );
    assert!(lines[3].starts_with("no.toml: No such file"), "{told}");
    assert_eq!((error.as_str(), code), ("error: 2 of 3 recipes cannot be run\n", Some(2)));

    // What only a walk over the data shows.
    let (told, _, code) = checked(&["good.toml", "--samples", "63"]);
    assert_eq!(code, Some(2));
    assert!(told.contains("is more than the 63 samples of data.train"), "{told}");
    let (told, _, code) = checked(&["good.toml", "--set", "data.train=damaged.beton"]);
    assert_eq!(code, Some(2));
    assert!(told.contains("damaged.beton"), "{told}");
    let (told, _, code) = checked(&["good.toml", "--samples", "640", "--set", "ema.decay=0.999"]);
    assert_eq!(code, Some(0));
    assert!(told.contains("good.toml: doubtful: ema.decay = 0.999: averages over 1000"), "{told}");
}

#[test]
fn a_check_tells_scripts_the_same() {
    let place = Place::new();
    let arguments = ["recipe", "check", "good.toml", "no.toml", "--samples", "640", "--json"];
    let told = String::from_utf8(place.baton(&arguments).stdout).unwrap();
    let told: Vec<serde_json::Value> =
        told.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&told[0]["ok"], &told[0]["run"]["steps"]), (&true.into(), &20.into()));
    assert_eq!((&told[1]["ok"], &told[1]["recipe"]), (&false.into(), &"no.toml".into()));
    let bad = ["recipe", "check", "good.toml", "--set", "train.epochs=0", "--json"];
    let told: serde_json::Value = serde_json::from_slice(&place.baton(&bad).stdout).unwrap();
    assert_eq!(told["faults"][0]["field"], "train.epochs");
}

#[test]
fn a_difference_of_recipes_names_fields_and_says_whether_weights_can_differ() {
    let place = Place::new();
    place.write("other.toml", &RECIPE.replace("lr = 0.1", "lr = 0.2"));
    let diff = |arguments: &[&str]| {
        let output = place.baton(&[&["recipe", "diff"], arguments].concat());
        (String::from_utf8(output.stdout).unwrap(), output.status.code())
    };
    assert_eq!(diff(&["good.toml", "good.toml"]), ("the same\n".to_owned(), Some(0)));

    let (told, code) = diff(&["good.toml", "other.toml", "--set", "train.clip_grad_norm=1.0"]);
    let rows: Vec<Vec<&str>> = told.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[1..3], [["schedule.lr", "0.1", "0.2"], ["train.clip_grad_norm", "-", "1.0"]]);
    assert!(told.ends_with("the resulting weights can differ\n"), "{told}");
    assert_eq!(code, Some(1));

    let (told, code) = diff(&["good.toml", "good.toml", "--set", "cluster.max_ranks=1", "--json"]);
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let field = serde_json::json!({ "field": "cluster.max_ranks", "a": 0, "b": 1 });
    assert_eq!(told, serde_json::json!({ "fields": [field], "weights_can_differ": false }));
    assert_eq!(code, Some(1));
    place.refused(2, &["recipe", "diff", "good.toml", "no.toml"]);
}

#[test]
fn commands_without_a_coordinator_fail_with_one_line_and_a_remedy() {
    let place = Place::new();
    // Port 1 is nobody's.
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
        let error = place.refused(1, &[command, &at].concat());
        assert!(error.contains("127.0.0.1:1") && error.contains("baton up"), "{error}");
    }
}

#[test]
fn a_dashboard_needs_a_terminal_and_names_what_does_not() {
    let error = Place::new().refused(2, &["top"]);
    assert!(error.contains("needs a terminal") && error.contains("baton watch"), "{error}");
}

#[test]
fn help_names_the_commands_in_the_order_of_a_jobs_life() {
    let help = stdout(&Place::new().baton(&["--help"]));
    let names = ["up", "submit", "status", "top", "logs", "pause", "drain", "checkpoint", "recipe"];
    let places = names.map(|name| help.find(&format!("\n  {name} ")));
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?}: {help}");
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

/// A folder of two classes with `count` images in a format that needs no encoder.
fn images(place: &Place, count: u8) -> PathBuf {
    let folder = place.0.path().join("images");
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
    let place = Place::new();
    images(&place, 6);
    let write = ["data", "write", "--from", "images", "--to", "set.beton", "--jpeg-fraction", "0"];
    let text = stdout(&place.baton(&write));
    assert!(text.contains("set.beton: 6 samples (0 JPEG, 0 of them untouched; 6 raw), "), "{text}");
    assert!(text.ends_with("classes: set.beton.classes.txt\n"), "{text}");
    let classes = fs::read_to_string(place.0.path().join("set.beton.classes.txt")).unwrap();
    assert_eq!(classes, "cat\ndog\n");

    let text = stdout(&place.baton(&[&write[..], &["--json", "--shards", "2"]].concat()));
    let told: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&told["samples"], &told["raw"]), (&6.into(), &6.into()));
    assert_eq!(told["files"][1]["path"], "set-00001-of-00002.beton");
    assert_eq!(told["files"][1]["kept"], false);

    let again = place.baton(&[&write[..], &["--shards", "2", "--resume"]].concat());
    let told = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(told.contains("kept set-00000-of-00002.beton: 3 samples of an earlier run"), "{told}");
    assert!(stdout(&again).contains("set.beton in 2 shards: 6 samples"));
}

#[test]
fn bad_images_are_named_and_then_bad_input_or_left_out() {
    let place = Place::new();
    fs::write(images(&place, 4).join("cat/bad.jpg"), "no image").unwrap();
    let write = ["data", "write", "--from", "images", "--to", "set.beton"];
    let output = place.baton(&write);
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{told}");
    let (named, error) = told.trim_end().split_once('\n').unwrap();
    assert_eq!(named, "bad image: images/cat/bad.jpg is no image of a known format");
    assert!(
        error.starts_with("error: 1 image of images cannot be stored, the first is "),
        "{error}"
    );
    assert!(!place.0.path().join("set.beton").exists());

    let text = stdout(&place.baton(&[&write[..], &["--on-bad-image", "skip"]].concat()));
    assert!(text.contains("4 samples") && text.contains("skipped 1 bad image\n"), "{text}");
}

#[test]
fn a_write_with_bad_input_is_refused_with_exit_code_2_and_one_line() {
    let place = Place::new();
    images(&place, 2);
    place.write("list.csv", "images/cat/0.ppm,zero\n");
    let refused = |from: &str, more: &[&str]| {
        place.refused(2, &[&["data", "write", "--from", from, "--to", "set.beton"], more].concat())
    };
    assert!(refused("nowhere", &[]).contains("cannot open nowhere"));
    assert!(
        refused("list.csv", &[]).contains("list.csv, line 1: label \"zero\" is no whole number")
    );
    assert!(refused("images", &["--page-size", "1048576"]).contains("--page-size 1048576"));
    assert!(refused("images", &["--shards", "3"]).contains("take 1 to 2 shards"));
    assert!(refused("images", &["--image-field", "seventeen_letters"]).contains("1 to 16"));
}

#[test]
fn made_up_signals_become_a_data_set_that_inspect_verify_and_bench_know() {
    let place = Place::new();
    let synth = ["data", "synth", "signals", "--out", "sets/made", "--samples", "30"];
    let synth = [&synth[..], &["--val-samples", "10", "--channels", "2"]].concat();
    let text = stdout(&place.baton(&synth));
    assert!(text.starts_with("sets/made/signals-train.beton: 30 samples of shape [2, 100], "));
    assert!(text.contains("\nsets/made/signals-val.beton: 10 samples "), "{text}");
    assert!(
        text.contains("data.input_field = \"signal\", data.label_field = \"target\""),
        "{text}"
    );

    let train = place.0.path().join("sets/made/signals-train.beton");
    let bytes = fs::read(&train).unwrap();
    let refused = place.refused(2, &synth);
    let expected = "sets/made/signals-train.beton is there already: --force replaces it";
    assert!(refused.ends_with(expected), "{refused}");
    let text = stdout(&place.baton(&[&synth[..], &["--force", "--json"]].concat()));
    let told: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(told["files"][1]["samples"], 10);
    assert_eq!(told["shape"], serde_json::json!([2, 100]));
    assert_eq!(fs::read(&train).unwrap(), bytes, "the same command writes the same bytes");
    place.baton(&[&synth[..], &["--force", "--seed", "1"]].concat());
    assert_ne!(fs::read(&train).unwrap(), bytes);

    let train = "sets/made/signals-train.beton";
    let text = stdout(&place.baton(&["data", "inspect", train]));
    assert!(text.contains("signal  NDArrayField\n  shape [2, 100], dtype <f4\n"), "{text}");
    assert!(text.contains("target  FloatField\n  0.0") && text.contains(", mean 0."), "{text}");
    let text = stdout(&place.baton(&["data", "verify", train]));
    assert_eq!(text, format!("{train}: 30 samples, all well\n"));
    let fields = ["--input-field", "signal", "--label-field", "target"];
    let bench = [&["data", "bench", train, "--batch", "8", "--json"], &fields[..]].concat();
    let refused = place.refused(2, &bench);
    assert!(refused.contains("field \"target\" is a FloatField"), "{refused}");
    let text = stdout(&place.baton(&[&bench[..], &["--outputs", "1"]].concat()));
    let told: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(told["median_images_per_second"].as_f64().unwrap() > 0.0, "{text}");
}

#[test]
fn signals_that_cannot_be_made_up_are_refused_before_anything_is_written() {
    let place = Place::new();
    let refused = |more: &[&str]| {
        place.refused(2, &[&["data", "synth", "signals", "--out", "sets"], more].concat())
    };
    assert!(refused(&["--window", "10"]).contains("a window of 10 is too short for 12 cycles"));
    assert!(refused(&["--noise=-1"]).contains("noise of -1: take 0 or more"));
    assert!(!place.0.path().join("sets").exists());
}

#[test]
fn a_plan_needs_no_data_of_imagenet_and_asks_for_the_size_of_any_other() {
    let place = Place::new();
    let imagenet = ["plan", "good.toml", "--set", "model.num_classes=1000", "--on", "t4,l4"];
    let text = stdout(&place.baton(&imagenet));
    assert!(text.contains("1,281,167") && text.contains("taken to be ImageNet's"), "{text}");
    let error = place.refused(2, &["plan", "good.toml"]);
    assert!(error.contains("train.beton is not here; --samples N"), "{error}");

    let sized = ["plan", "good.toml", "--samples", "640", "--val-samples", "64", "--on", "h200"];
    let told = stdout(&place.baton(&[&sized[..], &["--json"]].concat()));
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["plans"][0]["machine"], "h200");
    assert_eq!(told["plans"][0]["phases"][0]["samples"], 2 * 640);
    let explained = stdout(&place.baton(&[&sized[..], &["--explain"]].concat()));
    assert!(explained.contains("memory bandwidth"), "{explained}");
}

#[test]
fn a_plan_that_cannot_be_made_is_one_line() {
    let place = Place::new();
    let sized = ["plan", "good.toml", "--samples", "640", "--val-samples", "64"];
    let refused = |more: &[&str]| place.refused(2, &[&sized[..], more].concat());
    let error = refused(&["--on", "dgx"]);
    assert!(error.contains("`dgx`") && error.contains("p4d.24xlarge, p3.8xlarge"), "{error}");
    assert!(refused(&["--set", "epochs"]).contains("`epochs`"));
    assert!(refused(&["--set", "model.arch=linear"]).contains("trains on a CPU"));
    let bench = place.write("bench.json", "{}").display().to_string();
    let error = refused(&["--on", "t4", "--calibration", &bench]);
    assert!(error.contains("bench.json") && error.contains("baton-worker bench"), "{error}");
    let error = refused(&["--on", "t4,l4", "--calibration", &bench]);
    assert!(error.contains("is of one GPU"), "{error}");
    assert!(refused(&["--on", "t4", "--calibration", "no.json"]).contains("no.json"));
}
