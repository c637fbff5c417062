//! `baton-worker import` as a process.
#![allow(clippy::unwrap_used, missing_docs)]

use std::{
    fs::OpenOptions,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use rustix::fs::{CWD, Mode, mkfifoat};

const WORKER: &str = env!("CARGO_BIN_EXE_baton-worker");
const RECIPE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes/digits_cpu.toml");
/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);

fn pipe(folder: &Path) -> PathBuf {
    let pipe = folder.join("pipe");
    mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
    pipe
}

#[test]
fn weights_that_are_a_named_pipe_are_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = pipe(folder.path());
    let mut import = Command::new(WORKER);
    import.arg("import").arg(&pipe).args(["--recipe", RECIPE, "--into"]).arg(folder.path());
    let refused = import.output().unwrap();
    let error = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(2), "{error}");
    assert!(error.contains("it is not a regular file"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn names_of_files_do_not_control_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let weights = folder.path().join("\x1b]0;title\x07\u{9b}2J.safetensors");
    let mut import = Command::new(WORKER);
    import.arg("import").arg(&weights).args(["--recipe", RECIPE, "--into"]).arg(folder.path());
    let refused = import.output().unwrap();
    let error = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(2), "{error}");
    assert!(error.contains("2J.safetensors") && error.lines().count() == 1, "{error:?}");
    assert!(!error.contains(['\x1b', '\x07', '\u{9b}']), "{error:?}");
}

#[test]
fn an_import_ends_with_the_process_that_started_it() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = pipe(folder.path());
    let script = r#""$0" import weights --recipe "$1" --into out & wait"#;
    let mut parent = Command::new("sh");
    parent.args(["-c", script, WORKER]).arg(&recipe).current_dir(folder.path());
    let mut parent = parent.stdout(Stdio::piped()).spawn().unwrap();
    // Returns when the import reads its recipe, and keeps it waiting for more of it.
    let _more = OpenOptions::new().write(true).open(&recipe).unwrap();

    parent.kill().unwrap();
    parent.wait().unwrap();

    // Both had this pipe, so it ends with the last of them.
    let mut output = parent.stdout.take().unwrap();
    let (ended, end) = mpsc::channel();
    thread::spawn(move || ended.send(output.read_to_end(&mut Vec::new())));
    end.recv_timeout(LONG).expect("the import continues").unwrap();
}
