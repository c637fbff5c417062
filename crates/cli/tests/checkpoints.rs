//! `baton checkpoint …` as it is typed: what it prints, and with which exit code it ends.

#![allow(clippy::unwrap_used, reason = "a test's helpers may fail as loudly as the test")]

#[path = "../src/commands/checkpoint/samples.rs"]
mod samples;

use std::{
    fs,
    process::{Command, Stdio},
};

use samples::{Place, Sample};

/// `baton checkpoint` with these arguments, in the folder of `place`: exit code, answer, complaint.
fn baton(place: &Place, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .arg("checkpoint")
        .args(arguments)
        .current_dir(place.folder.path())
        .env_remove("BATON_COORDINATOR")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// A command that must end with `code` and one line of complaint; that line.
fn refused(place: &Place, code: i32, arguments: &[&str]) -> String {
    let (ended, told, error) = baton(place, arguments);
    assert_eq!(ended, code, "{told}{error}");
    assert!(error.lines().count() == 1 && error.starts_with("error: "), "{error}");
    error
}

#[test]
fn a_list_tells_why_each_is_kept() {
    let place = samples::run();
    let (code, told, error) = baton(&place, &["ls", "--dir", &place.location()]);
    assert_eq!((code, error.as_str()), (0, ""));
    let rows: Vec<&str> = told.lines().collect();
    assert!(rows[0].contains("METRIC") && rows[0].ends_with("KEPT BECAUSE"), "{told}");
    assert!(rows[2].contains(" whole ") && rows[2].ends_with("newest"), "{told}");
    assert_eq!(rows.len(), 10);
}

#[test]
fn verification_ends_with_2_if_any_is_damaged_and_with_0_if_none_is() {
    let place = samples::run();
    let error = refused(&place, 2, &["verify", "--dir", "."]);
    assert!(error.contains("1 of 9 checkpoints damaged"), "{error}");
    let name = "step-0000000088-gen-000002";
    let (code, told, error) = baton(&place, &["verify", "--dir", ".", name, "--jobs", "1"]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert_eq!(told, format!("{name}: whole: 456 B in 3 files match their digests\n"));
}

#[test]
fn an_unknown_name_is_bad_input_everywhere_and_the_nearest_is_told() {
    let place = samples::run();
    let meant = "is step-0000000088-gen-000002 meant?";
    let typed = "step-0000000088-gen-000009";
    let commands: [&[&str]; 4] = [
        &["verify", typed],
        &["export", typed, "--out", "w.safetensors"],
        &["rm", typed, "--yes"],
        &["diff", typed, "step-0000000044-gen-000002"],
    ];
    for command in commands {
        let error = refused(&place, 2, &[command, &["--dir", "."]].concat());
        assert!(error.contains(meant), "{error}");
    }
    let error = refused(&place, 2, &["cp", &format!("{}/{typed}", place.location()), "copies"]);
    assert!(error.contains(meant), "{error}");
    assert!(!place.folder.path().join("copies").exists(), "nothing is made for nothing");
}

#[test]
fn a_damaged_checkpoint_is_named_with_what_is_wrong() {
    let place = samples::run();
    let damaged = "step-0000000022-gen-000002";
    let error = refused(&place, 2, &["export", damaged, "--dir", ".", "--out", "w.safetensors"]);
    assert!(error.contains("shard-00001-of-00002.safetensors is missing"), "{error}");
    let error = refused(&place, 2, &["diff", damaged, damaged, "--dir", "."]);
    assert!(error.contains("is damaged"), "{error}");
}

#[test]
fn one_of_a_newer_baton_is_said_to_be_that_and_neither_damaged_nor_passed_over() {
    let place = samples::of_a_newer_baton();
    let newest = "step-0000000088-gen-000002";
    let version = "written by a newer Baton (format 99; this one reads up to ";
    let (code, listed, _) = baton(&place, &["ls", "--dir", "."]);
    assert!(code == 0 && listed.contains(version) && !listed.contains("damaged"), "{listed}");
    let (code, told, error) = baton(&place, &["verify", "--dir", "."]);
    assert!(code == 2 && told.contains(version) && !told.contains("damaged"), "{told}");
    assert_eq!(
        error,
        "error: 1 of 2 checkpoints written by a newer Baton: verify with that version\n"
    );
    let source = place.location();
    let commands: [&[&str]; 4] = [
        &["export", "--dir", ".", "--out", "w.safetensors"],
        &["export", "--dir", ".", newest, "--out", "w.safetensors"],
        &["diff", "--dir", ".", newest, "step-0000000066-gen-000002"],
        &["cp", &source, "copies"],
    ];
    for command in commands {
        let error = refused(&place, 2, command);
        assert!(error.contains(&format!("checkpoint {newest} was {version}")), "{error}");
    }
    let error = refused(&place, 2, &["rm", "--dir", ".", newest, "--yes"]);
    assert!(error.contains("--force"), "{error}");
    let older = ["export", "--dir", ".", "step-0000000066-gen-000002", "--out", "w.safetensors"];
    assert_eq!(baton(&place, &older).0, 0, "an older one that is named is fine");
}

#[test]
fn an_export_in_half_precision_is_half_the_size() {
    let place = samples::store();
    let name = Sample::default().save(&place.store).name();
    let export = |dtype: &str| {
        let arguments = ["export", "--dir", ".", "--dtype", dtype, "--out", "w.safetensors"];
        let (code, told, error) = baton(&place, &[&arguments[..], &["--json"]].concat());
        assert_eq!((code, error.as_str()), (0, ""), "{told}");
        let told: serde_json::Value = serde_json::from_str(&told).unwrap();
        assert_eq!((&told["dtype"], &told["checkpoint"]), (&dtype.into(), &name.as_str().into()));
        let file = fs::read(place.folder.path().join("w.safetensors")).unwrap();
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
    let place = samples::run();
    let diff = |a: &str, b: &str| baton(&place, &["diff", a, b, "--dir", "."]);
    let (code, told, _) = diff("step-0000000088-gen-000002", "step-0000000088-gen-000002");
    assert_eq!(code, 0, "{told}");
    let (code, told, _) = diff("step-0000000088-gen-000002", "step-0000000110-gen-000002");
    assert_eq!(code, 1, "{told}");
    assert!(told.contains("tensors: all 2 are the same in all bits"), "{told}");
    refused(&place, 2, &["diff", "nowhere/a", "nowhere/b"]);
}

#[test]
fn nothing_is_removed_without_a_yes() {
    let place = samples::run();
    let name = "step-0000000088-gen-000002";
    let there = || place.folder.path().join(name).exists();
    let error = refused(&place, 2, &["rm", name, "--dir", "."]);
    assert!(error.contains("--yes") && there(), "{error}");
    let (code, told, _) = baton(&place, &["rm", name, "--dir", ".", "--yes"]);
    assert_eq!(code, 0);
    assert!(told.starts_with("removed 1 checkpoint, ") && !there(), "{told}");
    let newest = "step-0000000110-gen-000002";
    let error = refused(&place, 2, &["rm", newest, "--dir", ".", "--yes"]);
    assert!(error.contains("--force"), "{error}");
    let (code, ..) = baton(&place, &["rm", newest, "--dir", ".", "--yes", "--force"]);
    assert_eq!(code, 0);
}

#[test]
fn a_copy_goes_to_a_folder_that_is_made_for_it() {
    let place = samples::run();
    let (code, told, error) = baton(&place, &["cp", &place.location(), "copies"]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert_eq!(told, "copied step-0000000110-gen-000002 to copies: 320 B in 2 files\n");
    let (code, ..) = baton(&place, &["diff", ".", "copies"]);
    assert_eq!(code, 2, "a word without a slash is a name");
    let (code, told, _) = baton(&place, &["diff", "./", "copies/"]);
    assert_eq!(code, 0, "{told}");
    let error = refused(&place, 1, &["cp", "nowhere", "copies"]);
    assert!(error.contains("nowhere"), "{error}");
}
