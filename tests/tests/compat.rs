//! Tests that run folders of older versions can be continued, and end with the same bits as with those versions.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
};

use baton_tests::binary;
use sha2::{Digest, Sha256};

/// A folder of `tests/compat`; the README there describes its content.
struct OldRun {
    folder: PathBuf,
    arguments: Vec<String>,
    resumes_at_step: i64,
    export_sha256: String,
}

fn old_runs() -> Vec<OldRun> {
    let all = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/compat")).unwrap();
    let folders = all.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    folders.map(OldRun::read).collect()
}

impl OldRun {
    fn read(folder: PathBuf) -> Self {
        let text = fs::read_to_string(folder.join("story.toml")).unwrap();
        let story: toml::Table = text.parse().unwrap();
        let arguments = story["arguments"].as_array().unwrap().iter();
        Self {
            arguments: arguments.map(|argument| argument.as_str().unwrap().to_owned()).collect(),
            resumes_at_step: story["resumes_at_step"].as_integer().unwrap(),
            export_sha256: story["export_sha256"].as_str().unwrap().to_owned(),
            folder,
        }
    }

    /// `baton up` on a copy of the run folder at `run`.
    fn up(&self, run: &Path, flags: &[&str]) -> Output {
        copy(&self.folder.join("run"), run);
        let arguments = self.arguments.iter().map(String::as_str);
        let arguments: Vec<&str> =
            ["up", "--listen", "127.0.0.1:0"].into_iter().chain(arguments).collect();
        baton(run, &[&arguments, flags].concat())
    }

    fn assert_continues(&self, ranks: u32) {
        let folder = tempfile::tempdir().unwrap();
        let (run, end) = (folder.path().join("run"), folder.path().join("end.safetensors"));
        let up = self.up(&run, &["--ranks", &ranks.to_string()]);
        let output = String::from_utf8_lossy(&up.stdout);
        let case = format!("{}, {ranks} ranks:\n{output}", self.folder.display());
        assert!(up.status.success(), "{case}{up:?}");
        assert!(output.contains(&format!(", step {}, sample ", self.resumes_at_step)), "{case}");

        let export = baton(&run, &["checkpoint", "export", "--out", end.to_str().unwrap()]);
        assert!(export.status.success(), "{case}{export:?}");
        let digest = format!("{:x}", Sha256::digest(fs::read(&end).unwrap()));
        assert_eq!(digest, self.export_sha256, "{case}");
    }
}

/// Runs `baton` in the root of the project.
fn baton(run: &Path, arguments: &[&str]) -> Output {
    let mut baton = Command::new(binary("baton"));
    baton.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).args(arguments);
    baton.arg("--run-dir").arg(run).env("AWS_EC2_METADATA_DISABLED", "true");
    baton.output().unwrap()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}

#[test]
fn runs_of_older_versions_continue_with_1_2_and_4_ranks_and_end_with_the_same_bits() {
    let runs = old_runs();
    assert!(!runs.is_empty());
    thread::scope(|scope| {
        for run in &runs {
            for ranks in [1, 2, 4] {
                scope.spawn(move || run.assert_continues(ranks));
            }
        }
    });
}

#[test]
fn runs_of_older_versions_do_not_continue_with_another_recipe() {
    for old_run in old_runs() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let up = old_run.up(&run, &["--ranks", "1", "--set", "seed=1"]);
        let errors = String::from_utf8_lossy(&up.stderr);
        assert_eq!(up.status.code(), Some(2), "{errors}");
        assert!(errors.contains("(seed: 0 → 1)"), "{errors}");
        let checkpoints = |run: &Path| fs::read_dir(run.join("checkpoints")).unwrap().count();
        assert_eq!(checkpoints(&run), checkpoints(&old_run.folder.join("run")));
    }
}
