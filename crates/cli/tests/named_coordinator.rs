//! Tests that a coordinator or run folder named by the user is never replaced by another.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

#[allow(dead_code, reason = "each file uses a part of it")]
mod fake;
#[allow(dead_code, reason = "each file uses a part of it")]
#[path = "../src/commands/checkpoint/samples.rs"]
mod samples;

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
};

use baton_checkpoint::{CoordinatorLease, Store};
use baton_proto::v1::GetStatusResponse;
use fake::{FakeCoordinator, FakeState};
use samples::Sample;
use tempfile::TempDir;

/// A working folder with the run of a job that has one checkpoint.
struct OtherJob {
    folder: TempDir,
    name: String,
}

impl OtherJob {
    /// The job's coordinator is said to serve at this address.
    fn new(coordinator: SocketAddr) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("runs/other_job");
        let store = Store::open(run.join("checkpoints").to_str().unwrap()).unwrap();
        let name = Sample::default().save(&store).name();
        write_endpoint(&run, coordinator);
        Self { folder, name }
    }

    fn checkpoint(&self) -> PathBuf {
        self.folder.path().join("runs/other_job/checkpoints").join(&self.name)
    }

    /// The arguments of every command that reads or removes checkpoints.
    fn commands(&self) -> [Vec<&str>; 5] {
        let name = self.name.as_str();
        [
            vec!["ls"],
            vec!["verify"],
            vec!["rm", "--yes", "--force", name],
            vec!["export", "--out", "w.safetensors"],
            vec!["diff", name, name],
        ]
    }

    /// Runs a command with the variable `BATON_COORDINATOR`: its exit code, standard output and standard error.
    fn baton(&self, arguments: &[&str], variable: &str) -> (i32, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(arguments).current_dir(self.folder.path()).env("BATON_COORDINATOR", variable);
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    /// Runs every command, each of which must fail with this problem and leave everything as it is.
    fn assert_refused(&self, flags: &[&str], variable: &str, problem: &str) {
        for command in self.commands() {
            let arguments = [&["checkpoint"], &command[..], flags].concat();
            let (code, output, error) = self.baton(&arguments, variable);
            assert!(code != 0 && output.is_empty(), "{arguments:?}: {output}{error}");
            assert!(error.contains(problem) && error.lines().count() == 1, "{error}");
            assert!(self.checkpoint().is_dir(), "{arguments:?}");
            assert!(!self.folder.path().join("w.safetensors").exists());
        }
    }
}

/// Writes the file by which a run folder names its coordinator.
fn write_endpoint(run_dir: &Path, address: SocketAddr) {
    fs::create_dir_all(run_dir).unwrap();
    let text = format!(r#"{{"address":"{address}","pid":7}}"#);
    fs::write(run_dir.join("coordinator.json"), text).unwrap();
}

/// No program uses port 1.
fn nobody() -> SocketAddr {
    "127.0.0.1:1".parse().unwrap()
}

/// A coordinator that refuses this client.
fn refusing() -> FakeCoordinator {
    let refusal = tonic::Status::permission_denied("this needs a token of role viewer");
    FakeCoordinator::start(FakeState { status_refusal: Some(refusal), ..FakeState::default() })
}

fn named(name: &str) -> FakeCoordinator {
    let status = GetStatusResponse { name: name.to_owned(), ..GetStatusResponse::default() };
    FakeCoordinator::start(FakeState { status, ..FakeState::default() })
}

#[test]
fn checkpoints_of_another_job_are_never_used_in_place_of_those_of_a_named_coordinator() {
    let other = OtherJob::new(nobody());
    let (refusing, without_job) = (refusing(), named(""));
    for (address, problem) in [
        (nobody(), "no coordinator answers at http://127.0.0.1:1"),
        (refusing.address(), "this needs a token of role viewer"),
        (without_job.address(), "has no job"),
    ] {
        let url = format!("http://{address}");
        other.assert_refused(&["--coordinator", &url], "", problem);
        other.assert_refused(&[], &url, problem);
    }
    other.assert_refused(&[], "no url", "is not an address");
}

#[test]
fn a_coordinator_that_refuses_is_not_replaced_by_a_folder_even_if_it_is_not_named() {
    let refusing = refusing();
    let other = OtherJob::new(refusing.address());
    other.assert_refused(&[], "", "this needs a token of role viewer");
    let (code, output, error) =
        other.baton(&["checkpoint", "ls", "--dir", "runs/other_job/checkpoints"], "");
    assert!(code == 0 && output.contains(&other.name), "{error}");
}

#[test]
fn a_store_whose_job_has_ended_promises_no_other_coordinator() {
    let other = OtherJob::new(nobody());
    let store = Store::open(other.checkpoint().parent().unwrap().to_str().unwrap()).unwrap();
    let lease = CoordinatorLease {
        number: 1,
        host: "alpha".to_owned(),
        run_dir: "/runs/a".to_owned(),
        address: Some(format!("http://{}", nobody())),
        ..CoordinatorLease::default()
    };
    store.take_lease(&lease).unwrap();
    let status = || other.baton(&["status", "--store", "runs/other_job/checkpoints"], "").2;
    assert!(status().contains("a node of the job may be taking over"), "{}", status());
    store.renew_lease(&CoordinatorLease { over: true, ..lease }).unwrap();
    let error = status();
    assert!(error.contains("whose job has ended; its history is in /runs/a"), "{error}");
    assert!(error.contains("`baton checkpoint ls --dir`") && !error.contains("take"), "{error}");
}

#[test]
fn without_a_named_coordinator_the_newest_runs_checkpoints_are_used() {
    let other = OtherJob::new(nobody());
    let (code, output, error) = other.baton(&["checkpoint", "ls"], "");
    assert!(code == 0 && output.contains(&other.name), "{error}");
    // Without its report, one that was rolled back would be the newest.
    let report = other.folder.path().join("runs/other_job/report.json");
    fs::write(&report, "{").unwrap();
    other.assert_refused(&[], "", "report.json: is damaged (EOF");
    fs::remove_file(report).unwrap();
    let run_dir = ["checkpoint", "rm", "--yes", "--force", &other.name, "--run-dir"];
    let (code, _, error) = other.baton(&[&run_dir[..], &["runs/other_job"]].concat(), "");
    assert!(code == 0 && !other.checkpoint().exists(), "{error}");
}

#[test]
fn a_given_run_folder_overrides_the_coordinator_of_the_environment() {
    let (of_variable, of_folder) = (named("of_variable"), named("of_folder"));
    let other = OtherJob::new(of_folder.address());
    let variable = format!("http://{}", of_variable.address());
    let (code, output, error) = other.baton(&["pause", "--run-dir", "runs/other_job"], &variable);
    assert!(code == 0 && output.starts_with("of_folder at "), "{output}{error}");
    assert_eq!((of_variable.requests().len(), of_folder.requests().len()), (0, 1));
    let (_, output, error) = other.baton(&["pause"], &variable);
    assert!(output.starts_with("of_variable at "), "{output}{error}");
}
