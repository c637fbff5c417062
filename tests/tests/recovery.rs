//! Tests that a job ends with the bits of an undisturbed run, whatever processes are killed.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::fs;

use baton_fake_s3::{Fault, Server};
use baton_job::exit;
use baton_proto::v1::{
    GetStatusResponse, PauseRequest, ResumeRequest, watch_events_response::Kind,
};
use baton_tests::{Cluster, binary, in_time, kill, stop, terminate};

/// Pseudo-random but repeatable steps below `limit`, in increasing order.
fn moments(seed: u64, count: usize, limit: u64) -> Vec<u64> {
    let mut state = seed;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    };
    let mut moments: Vec<u64> = (0..count).map(|_| next()).collect();
    moments.sort_unstable();
    moments
}

/// An endless run that also saves within epochs.
fn endless() -> Cluster {
    Cluster::endless().set("checkpoint.every_steps=50")
}

/// One whose checkpoints are outside of the run folder.
fn endless_in(store: &tempfile::TempDir) -> Cluster {
    endless().set(&format!("checkpoint.dir={}", store.path().display()))
}

/// One with local checkpoints on this disk, and none in the store.
fn saves_only_on(disk: &tempfile::TempDir) -> Cluster {
    Cluster::endless()
        .set("checkpoint.every_epochs=0")
        .set(&format!("checkpoint.local_dir={}", disk.path().display()))
        .set("checkpoint.local_every_steps=10")
}

#[tokio::test]
async fn every_number_of_ranks_ends_with_the_same_bits() {
    let one = Cluster::new().run_to_the_end(1).await;
    assert!(one.iter().any(|(_, values)| values.iter().any(|value| *value != 0.0)));
    for ranks in [2, 3, 4] {
        assert!(Cluster::new().run_to_the_end(ranks).await == one, "{ranks} ranks differ from one");
    }
}

#[tokio::test]
async fn ranks_killed_at_three_moments_change_no_bit() {
    let mut cluster = endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    for (victim, step) in moments(1, 3, 200).into_iter().enumerate() {
        events.saved_at(step).await;
        let ranks = cluster.rank_pids(0);
        let shares_memory = |rank: &u32| {
            let maps = fs::read_to_string(format!("/proc/{rank}/maps")).unwrap();
            maps.contains("/memfd:baton-ranks")
        };
        assert!(ranks.iter().all(shares_memory), "after a kill, the ranks share memory again");
        kill(ranks[victim % ranks.len()]);
        events.next_of(Kind::RankFailed).await;
        let started = events.next_of(Kind::TrainingStarted).await;
        assert!(started.message.contains("with the state of rank"), "{}", started.message);
    }
    cluster.end().await;

    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_stopped_rank_is_named_and_replaced_with_the_same_bits() {
    let mut cluster = endless().set("cluster.hang_seconds=3");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    events.saved_at(30).await;
    stop(cluster.rank_pids(0)[1]);
    let failed = events.next_of(Kind::RankFailed).await;
    assert!(failed.message.contains("did not answer for 3 s"), "{}", failed.message);
    cluster.end().await;

    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn ranks_keep_their_state_while_the_store_cannot_be_written() {
    let mut cluster = endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.events().await.saved_at(50).await;
    // With a file in its place, no fence can be raised. Permissions would not stop root.
    let fences = cluster.run_dir().join("checkpoints/fences");
    let aside = fences.with_extension("aside");
    std::fs::rename(&fences, &aside).unwrap();
    std::fs::write(&fences, "").unwrap();

    let mut events = cluster.new_events().await;
    kill(cluster.rank_pids(0)[0]);
    let refused = events.next_of(Kind::StoreUnavailable).await;
    assert!(refused.message.contains("ranks that run keep their state"), "{}", refused.message);
    let step = cluster.status().await.latest.expect("it trained").step;
    cluster.kill_coordinator().await;
    let address = cluster.same_address();
    cluster.start_coordinator(&address.each_ref().map(String::as_str)).await;
    let mut events = cluster.new_events().await;
    let waits = async || cluster.status().await.reason.contains("the next try is in").then_some(());
    cluster.until("the restarted coordinator waits for the store", waits).await;

    std::fs::remove_file(&fences).unwrap();
    std::fs::rename(&aside, &fences).unwrap();
    let started = events.next_of(Kind::TrainingStarted).await;
    assert!(started.message.contains("with the state of rank"), "{}", started.message);
    assert!(started.step >= Some(step), "{started:?}: step {step} had been reached");
    cluster.end().await;

    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_spare_replaces_a_dead_rank_with_the_same_bits() {
    let mut cluster = Cluster::endless().set("cluster.warm_spare=true");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    for spares in 1..=2 {
        let started = || cluster.log("agent").matches("spare started").count();
        cluster.until("a spare is ready", async || (started() >= spares).then_some(())).await;
        // Processes are in the order of their starts, so the spare is the last.
        let [_, killed, spare] = cluster.rank_pids(0)[..] else { panic!("not two and a spare") };
        kill(killed);
        events.next_of(Kind::Recovered).await;
        assert!(cluster.rank_pids(0).contains(&spare));
    }
    assert_eq!(cluster.log("agent").matches("is_warm=true").count(), 2);
    cluster.end().await;

    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn everything_killed_at_three_moments_resumes_from_the_newest_checkpoint() {
    let mut cluster = endless();
    for (run, step) in moments(2, 3, 200).into_iter().enumerate() {
        cluster.start_coordinator(&[]).await;
        // Use another number of ranks each time.
        cluster.start_agent("node", 1 + run as u32);
        let mut events = cluster.events().await;
        for _ in 0..run {
            // Events of earlier runs come first.
            events.next_of(Kind::TrainingStarted).await;
        }
        let started = events.next_of(Kind::TrainingStarted).await;
        assert_eq!(
            started.message.contains("from checkpoint step-"),
            run > 0,
            "{}",
            started.message
        );
        events.saved_at(step).await;
        cluster.kill_coordinator().await;
        cluster.kill_agent(0).await;
    }
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 4);
    cluster.end().await;

    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn everything_killed_continues_from_the_local_checkpoint_that_is_newer_than_the_store() {
    let disk = tempfile::tempdir().unwrap();
    let mut cluster = saves_only_on(&disk);
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let local = async || cluster.status().await.local_checkpoint.filter(|local| local.step >= 40);
    let local = cluster.until("local checkpoints", local).await;
    assert_eq!(local.nodes, ["node"]);
    cluster.kill_coordinator().await;
    cluster.kill_agent(0).await;

    let mut cluster = cluster.set("checkpoint.every_epochs=1");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 3);
    let mut events = cluster.new_events().await;
    let began = loop {
        let event = events.next_of(Kind::TrainingStarted).await;
        if event.message.contains("local checkpoint step-") {
            break event;
        }
    };
    assert!(began.message.contains("of node node, written by 2 ranks"), "{}", began.message);
    assert!(began.step >= Some(local.step), "{began:?}: {local:?}");
    assert_eq!(events.next_of(Kind::Saved).await.step, began.step, "the store has it at once");
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_changed_recipe_continues_from_the_local_checkpoint_of_the_run_before_if_a_flag_allows_it()
 {
    let disk = tempfile::tempdir().unwrap();
    let mut cluster = saves_only_on(&disk);
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let local = async || cluster.status().await.local_checkpoint.filter(|local| local.step >= 20);
    let local = cluster.until("local checkpoints", local).await;
    cluster.kill_coordinator().await;
    cluster.kill_agent(0).await;

    let mut cluster = cluster.set("loss.label_smoothing=0.2").set("checkpoint.every_epochs=1");
    cluster.start_coordinator(&["--allow-recipe-change"]).await;
    cluster.start_agent("node", 2);
    let began = cluster.events().await.next_of(Kind::TrainingStarted).await;
    assert!(began.message.contains("from local checkpoint step-"), "{}", began.message);
    assert!(began.message.contains("loss.label_smoothing"), "{}", began.message);
    assert!(began.step >= Some(local.step), "{began:?}: {local:?}");
    cluster.end().await;
}

#[tokio::test]
async fn a_notice_that_is_too_short_for_the_store_leaves_the_state_on_the_machine() {
    let (server, disk) = (Server::start(), tempfile::tempdir().unwrap());
    let mut cluster = endless()
        .with_environment(server.environment())
        .set(&format!("checkpoint.dir={}", server.location()))
        .set(&format!("checkpoint.local_dir={}", disk.path().display()))
        .set("cluster.drain_seconds=5");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.events().await.saved_at(50).await;
    server.faults(Fault::Delayed, 1);
    terminate(cluster.agent_pid(0));
    let end = "is not in the store, only in the local checkpoint of node";
    let look = async || cluster.log("coordinator").contains(end).then_some(());
    cluster.until("the end of the notice", look).await;
    server.recovers();
    let (coordinator, log) = cluster.coordinator_ends().await;
    assert_eq!(coordinator, Some(i32::from(exit::DRAINED)), "{log}");
    cluster.agent_ends(0).await;

    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.new_events().await;
    let local = async |events: &mut baton_tests::Events| {
        let message = events.next_of(Kind::TrainingStarted).await.message;
        message.contains("local checkpoint step-").then_some(())
    };
    while local(&mut events).await.is_none() {}
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_job_that_was_completed_without_its_coordinator_is_over_once_that_is_back() {
    let mut cluster = Cluster::of_epochs(200).set("cluster.node_grace_seconds=1");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.events().await.next_of(Kind::TrainingStarted).await;
    cluster.kill_coordinator().await;
    let is_evaluated = async || {
        let checkpoints = cluster.run_dir().join("checkpoints");
        let mut names = cluster.checkpoint_names().into_iter();
        names.find(|name| checkpoints.join(name).join("evaluation.json").exists())
    };
    let last = cluster.until("the end is evaluated", is_evaluated).await;
    cluster.kill_agent(0).await;

    cluster.start_coordinator(&[]).await;
    let mut events = cluster.events().await;
    let saved = loop {
        let saved = events.next_of(Kind::Saved).await;
        if saved.message.starts_with("training was completed while no agent") {
            break saved;
        }
    };
    assert!(saved.message.contains(&last), "{}", saved.message);
    assert_eq!(events.next_of(Kind::Evaluated).await.step, saved.step);
    assert_eq!(events.next_of(Kind::Ended).await.message, "job completed");
    let (code, log) = cluster.coordinator_ends().await;
    assert_eq!(code, Some(0), "{log}");
}

#[tokio::test]
async fn ranks_end_with_their_killed_agent_and_a_new_agent_continues() {
    let mut cluster = endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    events.saved_at(50).await;
    cluster.kill_agent(0).await;
    cluster.start_agent("node", 2);
    events.next_of(Kind::TrainingStarted).await;
    cluster.end().await;

    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn training_does_not_pause_while_a_killed_coordinator_restarts() {
    let mut cluster = endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.events().await.saved_at(20).await;
    let ranks = cluster.rank_pids(0);
    let before = cluster.status().await;
    let url = cluster.url();
    cluster.kill_coordinator().await;
    let port = url.rsplit(':').next().unwrap().to_owned();
    // The agent looks for the coordinator at the old address.
    cluster.start_coordinator(&["--listen", &format!("127.0.0.1:{port}")]).await;

    let mut events = cluster.events().await;
    events.next_of(Kind::NodeJoined).await;
    events.next_of(Kind::NodeJoined).await;
    events.next_of(Kind::Saved).await;
    let after = cluster.status().await;

    assert_eq!(after.generation, before.generation, "{}", after.reason);
    assert_eq!(cluster.rank_pids(0), ranks);
    assert_eq!(after.job_id, before.job_id);
    cluster.end().await;
}

#[tokio::test]
async fn the_other_nodes_continue_without_a_lost_node() {
    let mut cluster = endless().set("cluster.min_ranks=1").set("cluster.node_grace_seconds=0.3");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("a", 2);
    let mut events = cluster.events().await;
    events.saved_at(1).await;
    cluster.start_agent("b", 2);
    events.next_of(Kind::NodeJoined).await;
    cluster.kill_agent(0).await;
    let started = events.next_of(Kind::TrainingStarted).await;
    assert!(started.message.contains("from checkpoint"), "{}", started.message);
    cluster.end().await;

    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_node_with_an_address_that_is_not_its_own_is_sent_away_and_training_continues() {
    let mut cluster = endless().set("checkpoint.every_steps=20").set("cluster.max_ranks=4");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("a", 1);
    let mut events = cluster.events().await;
    events.saved_at(20).await;

    // An address for documentation, which no machine has (RFC 5737).
    cluster.start_agent_with("b", 1, &["--host", "192.0.2.1"], &[]);
    let sent_away = events.next_of(Kind::NodeLeaves).await.message;
    assert!(sent_away.starts_with("node b is sent away, and training continues"), "{sent_away}");
    assert!(sent_away.contains("has no address 192.0.2.1: give with --host"), "{sent_away}");
    assert_eq!(cluster.agent_ends(1).await.code(), Some(i32::from(exit::BAD_INPUT)));

    let reached = events.next_of(Kind::Saved).await.step();
    events.saved_at(reached + 20).await;
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn resnet_ends_with_the_same_bits_for_every_number_of_ranks_and_through_a_kill() {
    // A few steps of the smallest ResNet; the 360 validation digits are its training set.
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/digits/digits-val.beton");
    let resnet = || {
        Cluster::new()
            .set("model.arch=resnet18")
            .set("train.resolution=32")
            .set("train.epochs=2")
            .set("train.global_batch=72")
            .set(&format!("data.train={digits}"))
            .set("schedule.peak_lr=0.05")
            .set("evaluation.every_epochs=2")
            .set("checkpoint.every_steps=3")
    };
    let one = resnet().run_to_the_end(1).await;
    for ranks in [2, 4] {
        assert!(resnet().run_to_the_end(ranks).await == one, "{ranks} ranks differ from one");
    }

    let mut cluster = resnet();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    events.saved_at(3).await;
    kill(cluster.rank_pids(0)[1]);
    events.next_of(Kind::RankFailed).await;
    let (coordinator, _) = cluster.finish().await;

    assert!(coordinator.success(), "{}", cluster.log("coordinator"));
    assert!(cluster.newest_state() == one);
}

/// Starts a coordinator that ends by itself; returns its exit code and what it wrote.
async fn serve_to_the_end(cluster: &Cluster) -> (Option<i32>, String) {
    let mut serve = tokio::process::Command::new(binary("baton-coordinator"));
    serve.arg("serve").arg("--recipe").arg(cluster.recipe());
    serve.args(cluster.overrides().iter().flat_map(|entry| ["--set", entry]));
    serve.arg("--run-dir").arg(cluster.run_dir()).args(["--listen", "127.0.0.1:0"]);
    let ended = serve.kill_on_drop(true).output();
    let ended = in_time("the end of a coordinator", ended).await.unwrap();
    (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
}

#[tokio::test]
async fn of_two_coordinators_on_one_store_the_older_is_fenced_and_ends_permanently() {
    let store = tempfile::tempdir().unwrap();
    let dir = format!("checkpoint.dir={}", store.path().display());
    let job = || Cluster::endless().set(&dir);
    let mut older = job();
    older.start_coordinator(&[]).await;
    older.start_agent("node", 1);
    older.events().await.saved_at(1).await;

    let mut newer = job();
    newer.start_coordinator(&[]).await;
    let mut events = newer.new_events().await;
    newer.start_agent("node", 1);
    events.next_of(Kind::TrainingStarted).await;
    let (coordinator, agents) = older.finish().await;

    assert_eq!(
        coordinator.code(),
        Some(i32::from(exit::BAD_INPUT)),
        "{}",
        older.log("coordinator")
    );
    assert!(!agents[0].success());
    let (again, text) = serve_to_the_end(&older).await;
    assert_eq!(again, Some(i32::from(exit::BAD_INPUT)), "{text}");

    let status = newer.status().await;
    let began_with = status.began_with.unwrap();
    assert!(began_with.contains("step-"), "{began_with}");
    newer.end().await;
}

#[tokio::test]
async fn a_job_goes_on_with_its_history_when_its_run_folder_is_lost() {
    let store = tempfile::tempdir().unwrap();
    let mut first = endless_in(&store);
    first.start_coordinator(&[]).await;
    first.start_agent("node", 2);
    let mut events = first.events().await;
    events.saved_at(1).await;
    kill(first.rank_pids(0)[1]);
    events.next_of(Kind::RankFailed).await;
    events.next_of(Kind::TrainingStarted).await;
    events.next_of(Kind::Saved).await;
    let before = first.status().await;
    first.kill_coordinator().await;
    first.kill_agent(0).await;
    drop(first);

    let mut second = endless_in(&store);
    second.start_coordinator(&[]).await;
    second.start_agent("another", 1);
    let mut events = second.events().await;
    events.next_of(Kind::RankFailed).await;
    events.next_of(Kind::TrainingStarted).await;
    let again = events.next_of(Kind::TrainingStarted).await;
    assert!(again.message.contains("from checkpoint step-"), "{}", again.message);
    let after = second.status().await;
    assert_eq!(after.job_id, before.job_id);
    assert_eq!(after.recoveries_total, before.recoveries_total);
    assert_eq!(after.generation, before.generation + 1);
    // Summed from the recoveries in the journal.
    let interrupted = |status: &GetStatusResponse| status.spending.unwrap().interruption_hours;
    assert!(0.0 < interrupted(&before) && interrupted(&before) <= interrupted(&after), "{after:?}");
    second.end().await;

    second.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_coordinator_without_agents_does_not_disturb_the_copy_of_another_one_s_journal() {
    let store = tempfile::tempdir().unwrap();
    let mut first = endless_in(&store);
    first.start_coordinator(&[]).await;
    first.start_agent("node", 2);
    let mut events = first.events().await;
    events.saved_at(1).await;
    let mut idle = endless_in(&store);
    idle.start_coordinator(&[]).await;
    kill(first.rank_pids(0)[1]);
    events.next_of(Kind::Recovered).await;
    events.next_of(Kind::Saved).await;
    let before = first.status().await;
    assert_eq!(before.recoveries_total, 1);
    first.end().await;
    drop(first);

    let mut third = endless_in(&store);
    third.start_coordinator(&[]).await;
    third.start_agent("another", 1);
    third.new_events().await.next_of(Kind::TrainingStarted).await;
    let after = third.status().await;
    assert_eq!((after.job_id, after.recoveries_total), (before.job_id, before.recoveries_total));
    third.end().await;
    idle.kill_coordinator().await;
}

#[tokio::test]
async fn what_the_copy_of_a_journal_cannot_tell_is_refused_where_it_matters() {
    let store = tempfile::tempdir().unwrap();
    let job = || endless_in(&store);
    let refused = async |cluster: &Cluster, problem: &str| {
        let (code, text) = serve_to_the_end(cluster).await;
        assert_eq!(code, Some(i32::from(exit::BAD_INPUT)), "{text}");
        assert!(text.contains(problem), "{text}");
    };
    let mut first = job();
    first.start_coordinator(&[]).await;
    first.start_agent("node", 1);
    first.events().await.saved_at(1).await;
    first.end().await;
    let mut second = job();
    second.start_coordinator(&[]).await;
    let job_id = second.status().await.job_id;
    let mut events = second.new_events().await;
    second.start_agent("node", 1);
    events.next_of(Kind::Saved).await;
    refused(&first, "another coordinator has continued this job").await;
    second.end().await;

    // A lease names the job, too.
    let fence = std::fs::read_dir(store.path().join("fences")).unwrap();
    let newest = fence.map(|fence| fence.unwrap().path()).max().unwrap();
    std::fs::write(newest, "").unwrap();
    let mut third = job();
    third.start_coordinator(&[]).await;
    assert_eq!(third.status().await.job_id, job_id);
    third.kill_coordinator().await;

    let unknown = "the used part of the budget is unknown";
    let with_budget = || job().set("limits.max_hours=100");
    let journal = store.path().join("journal").join(&job_id);
    // The first, as the second coordinator's whole journal may be one part: nothing would follow the missing one.
    std::fs::remove_file(journal.join("000002-00000001-00000001.json")).unwrap();
    refused(&with_budget(), unknown).await;
    std::fs::remove_dir_all(&journal).unwrap();
    refused(&with_budget(), unknown).await;
    refused(&with_budget(), "give --resume step-").await;
    let mut without = job();
    without.start_coordinator(&[]).await;
    let lost = without.events().await.next_of(Kind::StoreUnavailable).await.message;
    assert!(lost.contains("the history of the job before is lost"), "{lost}");
    without.kill_coordinator().await;
    // As after a copy of the checkpoints alone into another store.
    let leases = store.path().join("leases");
    std::fs::rename(&leases, store.path().join("aside")).unwrap();
    std::fs::remove_dir_all(store.path().join("fences")).unwrap();
    refused(&with_budget(), unknown).await;
    std::fs::rename(store.path().join("aside"), &leases).unwrap();

    // The folder of the job has everything; in a new one, only the history is lost.
    second.start_coordinator(&[]).await;
    second.start_agent("node", 1);
    second.new_events().await.next_of(Kind::TrainingStarted).await;
    assert_eq!(second.status().await.job_id, job_id);
    second.end().await;
}

#[tokio::test]
async fn a_generation_that_another_coordinator_has_opened_is_not_opened_again() {
    let store = tempfile::tempdir().unwrap();
    let dir = format!("checkpoint.dir={}", store.path().display());
    // Nothing is saved, so the older coordinator detects the newer one only when it opens a generation.
    let job = || Cluster::endless().set("checkpoint.every_epochs=0").set(&dir);
    let mut older = job();
    older.start_coordinator(&[]).await;
    older.start_agent("node", 1);
    older.events().await.next_of(Kind::TrainingStarted).await;
    let mut newer = job();
    newer.start_coordinator(&[]).await;
    let mut events = newer.new_events().await;
    newer.start_agent("node", 1);
    events.next_of(Kind::TrainingStarted).await;

    kill(older.rank_pids(0)[0]);

    let (coordinator, _) = older.finish().await;
    let log = older.log("coordinator");
    assert_eq!(coordinator.code(), Some(i32::from(exit::BAD_INPUT)), "{log}");
    assert!(log.contains("another coordinator has taken over"), "{log}");
    assert_eq!(
        newer.status().await.generation,
        2,
        "the older one has not taken the store from the newer one"
    );
}

#[tokio::test]
async fn a_store_that_does_not_answer_stops_neither_status_nor_requests_nor_the_job_for_good() {
    let server = Server::start();
    let mut cluster = endless()
        .with_environment(server.environment())
        .set(&format!("checkpoint.dir={}", server.location()));
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    events.saved_at(50).await;
    server.faults(Fault::Stalled, 1);

    kill(cluster.rank_pids(0)[1]);
    let slow = events.next_of(Kind::StoreUnavailable).await.message;
    assert!(slow.contains("waits for the checkpoint store, which has not answered"), "{slow}");
    assert_eq!(cluster.status().await.reason, slow);
    let mut client = cluster.client().await;
    let pause = PauseRequest { reason: "a look".to_owned() };
    in_time("an answer", client.pause(pause)).await.unwrap();
    // Later than the recovery, a part that is being written would be copied with one more try, and nobody hears of it.
    let not_copied = "the journal cannot be copied into the checkpoint store";
    while !events.next_of(Kind::StoreUnavailable).await.message.contains(not_copied) {}

    server.recovers();
    events.next_of(Kind::GenerationOpened).await;
    client.resume(ResumeRequest {}).await.unwrap();
    events.next_of(Kind::Recovered).await;
    let recoveries = cluster.status().await.recoveries;
    assert_eq!((recoveries.len(), recoveries[0].lost_steps), (1, 0), "{recoveries:?}");
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}
