//! Tests of `baton sweep` with real processes.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use baton_job::exit;
use baton_tests::{Cluster, binary, interrupt};
use serde_json::Value;

/// A recipe, and a folder for sweeps of it.
struct Study {
    cluster: Cluster,
    folder: tempfile::TempDir,
}

impl Study {
    fn new() -> Self {
        Self { cluster: Cluster::new(), folder: tempfile::tempdir().unwrap() }
    }

    fn dir(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `baton sweep` in the folder `name`; trials have three epochs, each with an evaluation.
    fn command(&self, name: &str, flags: &[&str]) -> Command {
        let mut command = Command::new(binary("baton"));
        command.arg("sweep").arg(self.cluster.recipe()).arg("--dir").arg(self.dir(name));
        command.args(["--set", "train.epochs=3", "--set", "evaluation.every_epochs=1"]).args(flags);
        command.env("AWS_EC2_METADATA_DISABLED", "true");
        command
    }

    fn run(&self, name: &str, flags: &[&str]) -> Output {
        self.command(name, flags).output().unwrap()
    }

    /// The table of a sweep that has ended well.
    fn table(&self, name: &str, flags: &[&str]) -> String {
        let output = self.run(name, flags);
        assert!(output.status.success(), "{}", text(&output.stderr));
        fs::read_to_string(self.dir(name).join("results.csv")).unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Waits until a trial has begun to train.
async fn begun(study: &Study, run_dir: &Path) {
    let began = async || {
        let metrics = fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap_or_default();
        metrics.contains("\"step\"").then_some(())
    };
    study.cluster.until("the trial trains", began).await;
}

#[tokio::test]
async fn a_sweep_that_is_killed_in_every_trial_ends_with_the_same_table() {
    let study = Study::new();
    let flags = ["--set", "schedule.peak_lr=0.5,1e-4", "--set", "seed=0,1", "--halving", "1"];
    let quiet = study.table("quiet", &flags);
    for (line, expected) in [
        "trial,schedule.peak_lr,seed,state,step,",
        "000,0.5,0,completed,",
        "001,0.5,1,completed,",
        "002,1e-4,0,dropped after 1 evaluation,",
        "003,1e-4,1,dropped after 1 evaluation,",
    ]
    .into_iter()
    .enumerate()
    {
        assert!(quiet.lines().nth(line).unwrap().starts_with(expected), "{quiet}");
    }

    for trial in ["000", "001", "002", "003", "000"] {
        let mut sweep = study.command("killed", &flags).stderr(Stdio::null()).spawn().unwrap();
        begun(&study, &study.dir("killed").join(trial)).await;
        sweep.kill().unwrap();
        sweep.wait().unwrap();
    }
    assert_eq!(study.table("killed", &flags), quiet);
}

#[tokio::test]
async fn ctrl_c_saves_the_trial_and_the_same_command_continues_and_adds_others() {
    let study = Study::new();
    let flags = ["--set", "seed=0,1", "--json"];
    let mut command = study.command("sweep", &flags);
    let sweep = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    begun(&study, &study.dir("sweep").join("000")).await;
    interrupt(sweep.id());
    let stopped = sweep.wait_with_output().unwrap();
    let notes = text(&stopped.stderr);
    assert_eq!(stopped.status.code(), Some(i32::from(exit::DRAINED)), "{notes}");
    assert!(notes.contains("saved and stopped (Ctrl-C); the same command continues"), "{notes}");

    let ended = study.run("sweep", &["--set", "seed=0..2", "--json"]);
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    let results: Value = serde_json::from_slice(&ended.stdout).unwrap();
    let trials = results["trials"].as_array().unwrap();
    assert_eq!(trials.len(), 3, "{results}");
    let value = |trial: &Value| {
        assert_eq!(trial["state"], "completed", "{results}");
        trial["metrics"][0]["value"].as_f64().unwrap()
    };
    let mean = trials.iter().map(value).sum::<f64>() / 3.0;
    let configuration = &results["configurations"][0];
    assert!((configuration["mean"].as_f64().unwrap() - mean).abs() < 1e-9, "{results}");
    assert!(configuration["standard_deviation"].as_f64().is_some(), "{results}");
    assert_eq!(configuration["trials"].as_array().unwrap().len(), 3, "{results}");

    let page = fs::read_to_string(study.dir("sweep").join("results.html")).unwrap();
    assert!(page.contains("002/report.html") && page.contains("<polyline"), "{page}");
    assert!(study.dir("sweep/002/report.html").exists());

    // What is done is not done again, and not mixed with another recipe.
    let again = study.run("sweep", &["--set", "seed=0..2", "--json"]);
    assert_eq!(text(&again.stdout), text(&ended.stdout));
    let mut other = study.command("sweep", &["--set", "seed=0..2", "--json"]);
    fs::write(
        study.cluster.recipe(),
        fs::read_to_string(study.cluster.recipe())
            .unwrap()
            .replace("warmup_epochs = 0.5", "warmup_epochs = 1.0"),
    )
    .unwrap();
    let refused = other.output().unwrap();
    assert_eq!(refused.status.code(), Some(i32::from(exit::BAD_INPUT)));
    let error = text(&refused.stderr);
    assert!(
        error.contains("was trained with another recipe (schedule.warmup_epochs: 0.5 → 1.0)"),
        "{error}"
    );
}

#[test]
fn a_trial_that_diverges_is_a_result_and_one_without_data_ends_the_sweep() {
    let study = Study::new();
    let settings = "guard={ window=2, max_rollbacks=0 }";
    let flags = ["--set", settings, "--set", "schedule.peak_lr=1e30,0.5", "--at-once", "2"];
    let table = study.table("diverges", &flags);
    assert!(table.contains("000,1e30,diverged,"), "{table}");
    assert!(table.contains("001,0.5,completed,"), "{table}");

    // Without its evaluations, the best trial would seem the worst.
    fs::remove_file(study.dir("diverges/001/metrics.jsonl")).unwrap();
    let lacking = study.run("diverges", &flags);
    let error = text(&lacking.stderr);
    assert_eq!(lacking.status.code(), Some(1), "{error}");
    assert!(error.contains("its evaluations are missing"), "{error}");
    let table = fs::read_to_string(study.dir("diverges/results.csv")).unwrap();
    assert!(table.contains("001,0.5,\"failed: it has completed, and its"), "{table}");

    // Results of other data are no results of the same configuration.
    let own = study.folder.path().join("train.beton");
    fs::copy("../assets/digits/digits-train.beton", &own).unwrap();
    let data = format!("data.train={}", own.display());
    let flags = ["--set", &data, "--set", "seed=0"];
    study.table("data", &flags);
    fs::copy("../assets/digits/digits-val.beton", &own).unwrap();
    let other = study.run("data", &["--set", &data, "--set", "seed=0,1"]);
    let error = text(&other.stderr);
    assert_eq!(other.status.code(), Some(i32::from(exit::BAD_INPUT)), "{error}");
    assert!(error.contains("train.beton has 360 samples instead of 1437"), "{error}");
    fs::copy("../assets/digits/digits-train.beton", &own).unwrap();

    let missing = study.run("missing", &["--set", "data.train=\"/nowhere.beton\""]);
    let error = text(&missing.stderr);
    assert_eq!(missing.status.code(), Some(i32::from(exit::BAD_INPUT)), "{error}");
    assert!(
        error.contains("error: trial 000 (train.epochs=3") && error.contains("/nowhere.beton"),
        "{error}"
    );

    for (wrong, named) in [
        (["--set", "train.epoch=1,2"], "train.epoch"),
        (["--set", "schedule.peak_lr=0.5,fast"], "trial 001 (train.epochs=3"),
        (["--halving", "3"], "--halving 3: a trial makes 3 evaluations"),
    ] {
        let unknown = study.run("unknown", &wrong);
        let error = text(&unknown.stderr);
        assert_eq!(unknown.status.code(), Some(i32::from(exit::BAD_INPUT)), "{error}");
        assert!(error.contains(named), "{error}");
        assert!(!study.dir("unknown/sweep.json").exists(), "the folder can be used again");
    }
}
