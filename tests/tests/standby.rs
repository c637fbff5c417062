//! Another node serves the job when its coordinator is lost for good; real processes.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::process::{Command, Stdio};

use baton_job::exit;
use baton_proto::v1::{get_status_response::Phase, watch_events_response::Kind};
use baton_tests::{Cluster, binary, children, in_time, interrupt, kill, stop, wake};
use tokio::io::{AsyncBufReadExt, BufReader};

/// A run whose checkpoints are outside of the run folder, with a coordinator and a rank on each of three nodes.
async fn three_nodes(store: &tempfile::TempDir) -> Cluster {
    let mut cluster = Cluster::endless()
        .set("checkpoint.every_steps=50")
        .set(&format!("checkpoint.dir={}", store.path().display()));
    cluster.start_coordinator(&["--host", "127.0.0.1"]).await;
    for node in ["a", "b", "c"] {
        cluster.start_agent(node, 1);
    }
    cluster
}

/// Waits until so many ranks train, and the coordinator renews its lease; returns the generation and the step.
async fn train(cluster: &Cluster, ranks: usize) -> (u64, u64) {
    let look = async || {
        let status = cluster.status().await;
        let all_train = status.phase() == Phase::Training && status.ranks.len() == ranks;
        let is_renewed = cluster.lease().is_some_and(|lease| lease.renews && lease.renewals > 1);
        let step = status.latest?.step;
        (all_train && is_renewed).then_some((status.generation, step))
    };
    cluster.until("all train", look).await
}

#[tokio::test]
async fn one_node_after_another_serves_the_job_and_no_step_is_made_again() {
    let store = tempfile::tempdir().unwrap();
    let mut cluster = three_nodes(&store).await;
    cluster.events().await.saved_at(1).await;
    let (generation, step) = train(&cluster, 3).await;
    // It follows the job from one coordinator to the next.
    let mut watch = tokio::process::Command::new(binary("baton"));
    watch.args(["watch", "--json", "--store"]).arg(store.path());
    let mut watch = watch.stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut watched = BufReader::new(watch.stdout.take().unwrap()).lines();
    in_time("`baton watch` prints an event", watched.next_line()).await.unwrap().unwrap();
    let [flag, first_address] = cluster.same_address();
    cluster.kill_coordinator().await;

    cluster.taken_over(2).await;
    let (same, later) = train(&cluster, 3).await;
    assert!(same == generation && later > step, "the ranks train on: {same} {later}");
    let mut events = cluster.events().await;
    events.next_of(Kind::Saved).await;
    let moved = events.next_of(Kind::CoordinatorMoved).await;
    assert!(moved.message.contains("does not answer"), "{}", moved.message);

    // A user finds it by the store.
    let mut status = Command::new(binary("baton"));
    let output = status.args(["status", "--json", "--store"]).arg(store.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("\"training\""), "{text} {output:?}");

    // It coordinates: a rank of another node dies.
    kill(cluster.rank_pids(2)[0]);
    events.next_of(Kind::RankFailed).await;
    events.next_of(Kind::Recovered).await;

    // The node that serves is lost too, with its rank. Meanwhile another job is served at the address of the agents' flag.
    train(&cluster, 3).await;
    let mut other = Cluster::endless();
    other.start_coordinator(&[&flag, &first_address]).await;
    cluster.kill_agent(0).await;
    cluster.taken_over(3).await;
    let (next, _) = train(&cluster, 2).await;
    assert!(other.status().await.nodes.is_empty(), "they are no nodes of the other job");
    other.kill_coordinator().await;
    assert!(next > generation + 1, "a generation without the lost node");
    let status = cluster.status().await;
    let recoveries: Vec<u64> = status.recoveries.iter().map(|one| one.lost_steps).collect();
    assert!(recoveries.len() >= 2 && recoveries.iter().all(|lost| *lost == 0), "{recoveries:?}");
    cluster.end().await;

    let mut seen = String::new();
    while let Some(line) = in_time("`baton watch` ends", watched.next_line()).await.unwrap() {
        seen += &line;
    }
    assert_eq!(seen.matches("\"coordinator_moved\"").count(), 2, "{seen}");
    assert!(seen.contains("\"ended\"") && watch.wait().await.unwrap().success(), "{seen}");

    // The same command in the first run folder continues the job, and knows what happened elsewhere.
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("a", 2);
    let mut events = cluster.events().await;
    events.next_of(Kind::CoordinatorMoved).await;
    cluster.new_events().await.next_of(Kind::TrainingStarted).await;
    let known = cluster.status().await.recoveries.len();
    assert!(known >= recoveries.len(), "{known} of {recoveries:?}");
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_coordinator_that_was_only_suspended_ends_when_it_has_been_replaced() {
    let store = tempfile::tempdir().unwrap();
    let mut cluster = three_nodes(&store).await;
    let (generation, _) = train(&cluster, 3).await;
    stop(cluster.coordinator_pid());
    cluster.taken_over(2).await;
    train(&cluster, 3).await;
    wake(cluster.coordinator_pid());
    let (code, log) = cluster.coordinator_ends().await;
    assert_eq!(code, Some(i32::from(exit::BAD_INPUT)), "{log}");
    assert!(log.contains("error: another coordinator has taken over the job in"), "{log}");
    let (same, _) = train(&cluster, 3).await;
    assert_eq!(same, generation, "the ranks train on");
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn after_a_loss_of_power_an_agent_takes_over_before_any_coordinator_has_answered_it() {
    let store = tempfile::tempdir().unwrap();
    let mut cluster = three_nodes(&store).await;
    cluster.events().await.saved_at(1).await;
    train(&cluster, 3).await;
    cluster.kill_coordinator().await;
    for _ in 0..3 {
        cluster.kill_agent(0).await;
    }
    let location = store.path().display().to_string();
    let flags = ["--host", "127.0.0.1", "--store", &location, "--standby-at-once"];
    cluster.start_agent_with("a", 2, &flags, &[]);
    cluster.taken_over(2).await;
    let trains = async || trains_with(2, &store);
    cluster.until("the agent trains alone", trains).await;
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

/// A job of `baton up` and another agent whose coordinator was suspended, so that another one has taken over.
async fn replaced_coordinator_of_up(
    store: &tempfile::TempDir,
    wakes: bool,
) -> (Cluster, tokio::process::Child) {
    let mut cluster = Cluster::endless()
        .set("checkpoint.every_steps=50")
        .set(&format!("checkpoint.dir={}", store.path().display()));
    let mut up = cluster.up(&["--host", "127.0.0.1"].map(str::to_owned), &[]);
    cluster.served_by(&up).await;
    cluster.start_agent_with("b", 1, &["--host", "127.0.0.1"], &[]);
    train(&cluster, 3).await;
    let mut coordinators = children(up.id().unwrap()).into_iter().filter(|pid| {
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        command.contains("baton-coordinator")
    });
    let coordinator = coordinators.next_back().expect("its coordinator");
    stop(coordinator);
    cluster.taken_over(2).await;
    if wakes {
        wake(coordinator);
    }
    let note = "another one has taken over: the job goes on at ";
    let look = async || cluster.log("up").contains(note).then_some(());
    cluster.until(note, look).await;
    train(&cluster, 3).await;
    assert_eq!(up.try_wait().unwrap(), None, "{}", cluster.log("up"));
    (cluster, up)
}

/// Whether so many ranks train, by the coordinator that the store names.
fn trains_with(ranks: usize, store: &tempfile::TempDir) -> Option<()> {
    let mut status = Command::new(binary("baton"));
    let output = status.args(["status", "--json", "--store"]).arg(store.path()).output().ok()?;
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    (status["phase"] == "training" && status["ranks"].as_array()?.len() == ranks).then_some(())
}

/// Runs a command for the coordinator that the store names.
fn call(command: &str, store: &tempfile::TempDir) {
    let ended = Command::new(binary("baton")).args([command, "--store"]).arg(store.path()).output();
    assert!(ended.as_ref().unwrap().status.success(), "{ended:?}");
}

#[tokio::test]
async fn up_goes_on_with_the_coordinator_that_has_taken_over_until_the_job_ends() {
    let store = tempfile::tempdir().unwrap();
    let (mut cluster, mut up) = replaced_coordinator_of_up(&store, true).await;
    call("stop", &store);
    let ended = in_time("`baton up` ends", up.wait()).await.unwrap();
    assert_eq!(ended.code(), Some(i32::from(exit::STOPPED)), "{}", cluster.log("up"));

    // The same command goes on at once, although the other coordinator may not have ended yet.
    let mut again = cluster.up(&["--host", "127.0.0.1"].map(str::to_owned), &[]);
    cluster.served_by(&again).await;
    let trains = async || trains_with(2, &store);
    cluster.until("the same command trains", trains).await;
    interrupt(again.id().unwrap());
    let ended = in_time("`baton up` ends", again.wait()).await.unwrap();
    assert_eq!(ended.code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("up"));
}

#[tokio::test]
async fn ctrl_c_of_up_leaves_a_job_that_another_coordinator_serves_while_its_own_hangs() {
    let store = tempfile::tempdir().unwrap();
    let (mut cluster, mut up) = replaced_coordinator_of_up(&store, false).await;
    assert!(!cluster.run_dir().join("coordinator.json").exists(), "nobody answers at that address");
    interrupt(up.id().unwrap());
    let ended = in_time("`baton up` ends", up.wait()).await.unwrap();
    assert_eq!(ended.code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("up"));
    assert!(cluster.log("up").contains("this machine has left the job"), "{}", cluster.log("up"));
    // If its agent served the job, that of the other node does now.
    let goes_on = async || trains_with(1, &store);
    cluster.until("the other node trains on", goes_on).await;
    call("drain", &store);
    let ended = cluster.agent_ends(0).await;
    assert_eq!(ended.code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("agent"));
}
