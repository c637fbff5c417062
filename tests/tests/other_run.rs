//! Tests that a command for one run never acts on another one, which serves at the address of the first.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use baton_job::exit;
use baton_proto::v1::get_status_response::Phase;
use baton_tests::{Cluster, binary};

fn baton(arguments: &[&str], run_dir: &Path) -> Output {
    let mut command = Command::new(binary("baton"));
    command.args(arguments).arg("--run-dir").arg(run_dir);
    command.env_remove("BATON_COORDINATOR").output().unwrap()
}

/// Runs a command that must fail with this code and one line, which it returns.
fn refused(code: u8, arguments: &[&str], run_dir: &Path) -> String {
    let output = baton(arguments, run_dir);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(i32::from(code)), "{arguments:?}: {stderr}");
    assert!(output.stdout.is_empty() && stderr.lines().count() == 1, "{arguments:?}: {stderr}");
    stderr
}

/// A job that trains and has saved.
async fn start(cluster: &mut Cluster, flags: &[&str]) {
    cluster.start_coordinator(flags).await;
    cluster.start_agent("node", 1);
    cluster.events().await.saved_at(1).await;
}

async fn assert_trains(cluster: &Cluster) {
    let mut events = cluster.new_events().await;
    events.saved_at(1).await;
    assert_eq!(cluster.status().await.phase(), Phase::Training);
}

#[tokio::test]
async fn a_killed_run_never_stands_for_the_run_that_took_its_port() {
    let mut killed = Cluster::endless();
    killed.start_coordinator(&[]).await;
    killed.kill_coordinator().await;
    let mut other = Cluster::endless().set("checkpoint.keep_every_epochs=1");
    let same_address = killed.same_address();
    start(&mut other, &same_address.each_ref().map(String::as_str)).await;
    let newest = other.checkpoint_names().pop().unwrap();

    let run_dir = killed.run_dir();
    for command in [
        &["status"][..],
        &["watch"],
        &["events"],
        &["metrics"],
        &["logs"],
        &["checkpoint", "ls"],
        &["checkpoint", "rm", "--yes", "--force", &newest],
        &["checkpoint", "now"],
        &["pause"],
        &["resume"],
        &["drain"],
        &["stop"],
    ] {
        let error = refused(exit::BAD_INPUT, command, &run_dir);
        assert!(error.contains(&other.url()) && error.contains("another run"), "{error}");
        assert!(error.contains(&run_dir.display().to_string()), "{error}");
    }
    assert!(other.checkpoint_names().contains(&newest));
    assert_trains(&other).await;

    // The port is taken, but not by a job of this run folder.
    let recipe = killed.recipe().display().to_string();
    let up = [&["up", &recipe, "--listen"], &[same_address[1].as_str()][..]].concat();
    let error = String::from_utf8(baton(&up, &run_dir).stderr).unwrap();
    assert!(error.contains("cannot listen on") && !error.contains("already running"), "{error}");

    let removed = baton(&["checkpoint", "rm", "--yes", "--force", &newest], &other.run_dir());
    let shown = String::from_utf8(removed.stdout).unwrap();
    let place = format!("from {}", other.run_dir().join("checkpoints").display());
    assert!(shown.contains(&place), "{shown}");
    let stopped = baton(&["stop"], &other.run_dir());
    assert!(stopped.status.success(), "{stopped:?}");
    assert_eq!(other.finish().await.0.code(), Some(i32::from(exit::STOPPED)));
}

#[tokio::test]
async fn a_copied_run_folder_does_not_stand_for_the_original() {
    let mut original = Cluster::endless();
    start(&mut original, &[]).await;
    let parent = tempfile::tempdir().unwrap();
    let copy = parent.path().join("copy");
    fs::create_dir(&copy).unwrap();
    fs::copy(original.run_dir().join("coordinator.json"), copy.join("coordinator.json")).unwrap();

    for command in ["status", "pause", "drain", "stop"] {
        let error = refused(exit::FAILED, &[command], &copy);
        assert!(error.contains("is a copy of the run folder"), "{error}");
    }
    let recipe = original.recipe().display().to_string();
    let [_, address] = original.same_address();
    let error = baton(&["up", &recipe, "--listen", &address], &copy).stderr;
    let error = String::from_utf8(error).unwrap();
    assert!(error.contains("cannot listen on") && !error.contains("already running"), "{error}");
    assert_trains(&original).await;

    // Another path to the same folder is the original.
    let link = parent.path().join("link");
    std::os::unix::fs::symlink(original.run_dir(), &link).unwrap();
    assert!(baton(&["stop"], &link).status.success());
    original.finish().await;
}

#[tokio::test]
async fn a_restarted_coordinator_is_that_of_the_same_run() {
    let mut cluster = Cluster::endless();
    let run_id = |cluster: &Cluster| {
        let text = fs::read_to_string(cluster.run_dir().join("coordinator.json")).unwrap();
        let (_, id) = text.split_once(r#""run_id":""#).unwrap();
        id.split_once('"').unwrap().0.to_owned()
    };
    cluster.start_coordinator(&[]).await;
    let first = run_id(&cluster);
    cluster.kill_coordinator().await;
    let same_address = cluster.same_address();
    cluster.start_coordinator(&same_address.each_ref().map(String::as_str)).await;
    assert_eq!(run_id(&cluster), first);
    assert!(baton(&["status"], &cluster.run_dir()).status.success());
}
