//! Runs `baton checkpoint` commands and checks their output and exit codes.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

#[path = "../src/commands/checkpoint/samples.rs"]
mod samples;

use std::{
    fs,
    process::{Command, Stdio},
};

use samples::{Sample, TestStore};

/// `baton checkpoint` with these arguments, in the folder of `store`: exit code, standard output, standard error.
fn baton(test: &TestStore, arguments: &[&str]) -> (i32, String, String) {
    let result = Command::new(env!("CARGO_BIN_EXE_baton"))
        .arg("checkpoint")
        .args(arguments)
        .current_dir(test.folder.path())
        .env_remove("BATON_COORDINATOR")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (result.status.code().unwrap(), text(result.stdout), text(result.stderr))
}

/// Runs a command that must fail with `code` and one line of error, and returns this line.
fn rejected(test: &TestStore, code: i32, arguments: &[&str]) -> String {
    let (ended, output, error) = baton(test, arguments);
    assert_eq!(ended, code, "{output}{error}");
    assert!(error.lines().count() == 1 && error.starts_with("error: "), "{error}");
    error
}

#[test]
fn a_list_shows_why_each_is_kept() {
    let test = samples::run();
    let (code, output, error) = baton(&test, &["ls", "--dir", &test.location()]);
    assert_eq!((code, error.as_str()), (0, ""));
    let rows: Vec<&str> = output.lines().collect();
    assert!(rows[0].contains("METRIC") && rows[0].ends_with("KEPT BECAUSE"), "{output}");
    assert!(rows[2].contains(" complete ") && rows[2].ends_with("newest"), "{output}");
    assert_eq!(rows.len(), 10);
}

#[test]
fn verification_ends_with_2_if_any_is_damaged_and_with_0_if_none_is() {
    let test = samples::run();
    let error = rejected(&test, 2, &["verify", "--dir", "."]);
    assert!(error.contains("1 of 9 checkpoints damaged"), "{error}");
    let name = "step-0000000088-gen-000002";
    let (code, output, error) = baton(&test, &["verify", "--dir", ".", name, "--jobs", "1"]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert_eq!(output, format!("{name}: complete: 456 B in 3 files match their digests\n"));
}

#[test]
fn an_unknown_name_is_bad_input_everywhere_and_the_nearest_is_suggested() {
    let test = samples::run();
    let hint = "did you mean step-0000000088-gen-000002?";
    let typed = "step-0000000088-gen-000009";
    let commands: [&[&str]; 4] = [
        &["verify", typed],
        &["export", typed, "--out", "w.safetensors"],
        &["rm", typed, "--yes"],
        &["diff", typed, "step-0000000044-gen-000002"],
    ];
    for command in commands {
        let error = rejected(&test, 2, &[command, &["--dir", "."]].concat());
        assert!(error.contains(hint), "{error}");
    }
    let error = rejected(&test, 2, &["cp", &format!("{}/{typed}", test.location()), "copies"]);
    assert!(error.contains(hint), "{error}");
    assert!(!test.folder.path().join("copies").exists(), "no folder is created");
}

#[test]
fn a_damaged_checkpoint_is_reported_with_the_reason() {
    let test = samples::run();
    let damaged = "step-0000000022-gen-000002";
    let error = rejected(&test, 2, &["export", damaged, "--dir", ".", "--out", "w.safetensors"]);
    assert!(error.contains("shard-00001-of-00002.safetensors is missing"), "{error}");
    let error = rejected(&test, 2, &["diff", damaged, damaged, "--dir", "."]);
    assert!(error.contains("is damaged"), "{error}");
}

#[test]
fn a_damaged_checkpoint_is_named_if_another_or_none_is_used_instead() {
    let test = samples::store();
    let older = Sample { step: 66, ..Sample::default() }.save(&test.store).name();
    let newest = Sample::default().save(&test.store);
    let shard = |name: &str, file: &str| test.folder.path().join(name).join(file);
    fs::remove_file(shard(&newest.name(), &newest.shards[1].file)).unwrap();
    let damage = |name: &str| format!("{name} ({} is missing)", newest.shards[1].file);

    let (code, output, error) = baton(&test, &["cp", &test.location(), "copies"]);
    assert_eq!(code, 1, "{error}");
    assert!(output.starts_with(&format!("copied {older} to copies")), "{output}");
    let expected = format!("damaged and not copied: {}\n", damage(&newest.name()));
    let export = ["export", "--dir", ".", "--out", "w.safetensors"];
    let (code, output, exported) = baton(&test, &export);
    assert_eq!(code, 1, "{exported}");
    assert!(output.starts_with("wrote w.safetensors: "), "{output}");
    assert!(exported.ends_with(&expected.replace("copied", "exported")), "{exported}");
    assert!(error.ends_with(&expected), "{error}");

    fs::remove_file(shard(&older, &newest.shards[1].file)).unwrap();
    let error = rejected(&test, 2, &["export", "--dir", ".", "--out", "w.safetensors"]);
    let both = format!("damaged: {}, {}\n", damage(&newest.name()), damage(&older));
    assert!(error.contains("there is no complete checkpoint") && error.ends_with(&both), "{error}");
}

#[test]
fn a_newer_batons_checkpoint_is_neither_damaged_nor_skipped() {
    let test = samples::of_a_newer_baton();
    let newest = "step-0000000088-gen-000002";
    let version = "written by a newer Baton (format 99; this one reads up to ";
    let (code, listed, _) = baton(&test, &["ls", "--dir", "."]);
    assert!(code == 0 && listed.contains(version) && !listed.contains("damaged"), "{listed}");
    let (code, output, error) = baton(&test, &["verify", "--dir", "."]);
    assert!(code == 2 && output.contains(version) && !output.contains("damaged"), "{output}");
    assert_eq!(
        error,
        "error: 1 of 2 checkpoints written by a newer Baton: verify with that version\n"
    );
    let source = test.location();
    let commands: [&[&str]; 4] = [
        &["export", "--dir", ".", "--out", "w.safetensors"],
        &["export", "--dir", ".", newest, "--out", "w.safetensors"],
        &["diff", "--dir", ".", newest, "step-0000000066-gen-000002"],
        &["cp", &source, "copies"],
    ];
    for command in commands {
        let error = rejected(&test, 2, command);
        assert!(error.contains(&format!("checkpoint {newest} was {version}")), "{error}");
    }
    let error = rejected(&test, 2, &["rm", "--dir", ".", newest, "--yes"]);
    assert!(error.contains("--force"), "{error}");
    let older = ["export", "--dir", ".", "step-0000000066-gen-000002", "--out", "w.safetensors"];
    assert_eq!(baton(&test, &older).0, 0, "an older one can be named");
}

#[test]
fn an_export_in_half_precision_is_half_the_size() {
    let test = samples::store();
    let name = Sample::default().save(&test.store).name();
    let export = |dtype: &str| {
        let arguments = ["export", "--dir", ".", "--dtype", dtype, "--out", "w.safetensors"];
        let (code, output, error) = baton(&test, &[&arguments[..], &["--json"]].concat());
        assert_eq!((code, error.as_str()), (0, ""), "{output}");
        let output: serde_json::Value = serde_json::from_str(&output).unwrap();
        assert_eq!(
            (&output["dtype"], &output["checkpoint"]),
            (&dtype.into(), &name.as_str().into())
        );
        let file = fs::read(test.folder.path().join("w.safetensors")).unwrap();
        let header = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
        file[8 + header..].to_vec()
    };
    // fc.bias, then fc.weight.
    let values = [4.0_f32, 5.0, 0.0, 1.0, 2.0, 3.0];
    assert_eq!(export("f32"), values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>());
    let upper = |value: &f32| value.to_bits().to_be_bytes()[..2].to_vec();
    let upper = values.iter().flat_map(|v| upper(v).into_iter().rev().collect::<Vec<_>>());
    assert_eq!(export("bf16"), upper.collect::<Vec<_>>());
    assert_eq!(export("f16").len(), 12);
}

#[test]
fn a_comparison_ends_as_diff_does() {
    let test = samples::run();
    let diff = |a: &str, b: &str| baton(&test, &["diff", a, b, "--dir", "."]);
    let (code, output, _) = diff("step-0000000088-gen-000002", "step-0000000088-gen-000002");
    assert_eq!(code, 0, "{output}");
    let (code, output, _) = diff("step-0000000088-gen-000002", "step-0000000110-gen-000002");
    assert_eq!(code, 1, "{output}");
    assert!(output.contains("tensors: all 2 are the same in all bits"), "{output}");
    rejected(&test, 2, &["diff", "nowhere/a", "nowhere/b"]);
}

#[test]
fn nothing_is_removed_without_confirmation() {
    let test = samples::run();
    let name = "step-0000000088-gen-000002";
    let exists = || test.folder.path().join(name).exists();
    let error = rejected(&test, 2, &["rm", name, "--dir", "."]);
    assert!(error.contains("--yes") && exists(), "{error}");
    let (code, output, _) = baton(&test, &["rm", name, "--dir", ".", "--yes"]);
    assert_eq!(code, 0);
    assert!(output.starts_with("removed 1 checkpoint from ") && !exists(), "{output}");
    let newest = "step-0000000110-gen-000002";
    let error = rejected(&test, 2, &["rm", newest, "--dir", ".", "--yes"]);
    assert!(error.contains("--force"), "{error}");
    let (code, ..) = baton(&test, &["rm", newest, "--dir", ".", "--yes", "--force"]);
    assert_eq!(code, 0);
}

#[test]
fn an_export_never_replaces_a_pipe_or_a_device() {
    let test = samples::run();
    let pipe = test.folder.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    std::os::unix::fs::symlink("/dev/full", test.folder.path().join("link")).unwrap();
    for out in ["pipe", "link", "."] {
        let error = rejected(&test, 2, &["export", "--dir", ".", "--out", out]);
        assert_eq!(
            error,
            format!("error: {out} exists and is not a regular file: give another path\n")
        );
    }
    assert!(!fs::metadata(pipe).unwrap().is_file());
}

#[test]
fn an_export_replaces_only_exports() {
    let test = samples::run();
    let folder = test.folder.path();
    let export = |out: &str| baton(&test, &["export", "--dir", ".", "--out", out]).0;
    assert_eq!((export("out.safetensors"), export("out.safetensors")), (0, 0));
    fs::write(folder.join("journal.redb"), "redb").unwrap();
    fs::create_dir(folder.join("model")).unwrap();
    fs::write(folder.join("model/config.json"), "{}").unwrap();
    fs::copy(folder.join("out.safetensors"), folder.join("model/model.safetensors")).unwrap();
    for (out, expected) in [
        ("journal.redb", "exists and is not a file of weights"),
        ("model/model.safetensors", "has weights of the model in model: give another path"),
    ] {
        let before = fs::read(folder.join(out)).unwrap();
        let error = rejected(&test, 2, &["export", "--dir", ".", "--out", out]);
        assert!(error.contains(expected), "{error}");
        assert!(fs::read(folder.join(out)).unwrap() == before);
    }
    let adapter = "model/adapter.safetensors";
    assert_eq!((export(adapter), export(adapter)), (0, 0));
}

#[test]
fn an_export_never_replaces_a_file_of_a_checkpoint() {
    let test = samples::run();
    let out = "step-0000000110-gen-000002/manifest.json";
    let before = fs::read(test.folder.path().join(out)).unwrap();
    let error = rejected(&test, 2, &["export", "--dir", ".", "--out", out]);
    assert!(error.contains("is a checkpoint: give a path outside of it"), "{error}");
    assert_eq!(fs::read(test.folder.path().join(out)).unwrap(), before);
}

#[test]
fn names_in_a_forged_manifest_do_not_control_the_terminal() {
    let test = samples::store();
    let forge = |step| {
        let sample = Sample { step, weights: vec![step as f32; 6], ..Sample::default() };
        let mut manifest = sample.write(&test.store);
        "resnet18\x1b]0;title\x07".clone_into(&mut manifest.arch);
        "fc\x1b[2J\u{9b}.weight".clone_into(&mut manifest.tensors[0].name);
        test.store.commit(&manifest).unwrap();
        manifest.name()
    };
    let (a, b) = (forge(1), forge(2));
    let (code, output, error) = baton(&test, &["diff", &a, &b, "--dir", "."]);
    assert_eq!(code, 1, "{error}");
    assert!(output.contains("resnet18") && output.contains(".weight"), "{output}");
    assert!(!output.contains(['\x1b', '\x07', '\u{9b}']), "{output:?}");

    let (_, output, _) = baton(&test, &["diff", &a, &b, "--dir", ".", "--json"]);
    assert!(!output.contains(['\x1b', '\x07', '\u{9b}']), "{output:?}");
    let output: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!(output["a"]["arch"], "resnet18\x1b]0;title\x07", "the value is unchanged");
}

#[test]
fn a_number_of_jobs_out_of_range_is_refused_with_the_range() {
    let test = samples::run();
    for (jobs, problem) in [("0", "must be at least 1"), ("1025", "must be at most 1024")] {
        let (code, _, error) = baton(&test, &["verify", "--dir", ".", "--jobs", jobs]);
        assert!(code == 2 && error.contains(problem), "{error}");
    }
}

#[test]
fn a_copy_creates_its_folder() {
    let test = samples::run();
    let (code, output, error) = baton(&test, &["cp", &test.location(), "copies"]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert_eq!(output, "copied step-0000000110-gen-000002 to copies: 320 B in 2 files\n");
    let (code, ..) = baton(&test, &["diff", ".", "copies"]);
    assert_eq!(code, 2, "a word without a slash is a name");
    let (code, output, _) = baton(&test, &["diff", "./", "copies/"]);
    assert_eq!(code, 0, "{output}");
    let error = rejected(&test, 2, &["cp", "nowhere", "copies"]);
    assert!(error.contains("nowhere"), "{error}");
}
