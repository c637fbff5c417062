//! Tests of machines that are taken away: interruption notices, rebalance recommendations, a drain file.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

#[path = "../../crates/imds/tests/service/mod.rs"]
mod service;

use baton_checkpoint::Store;
use baton_job::{Generation, exit};
use baton_proto::v1::watch_events_response::Kind;
use baton_tests::{Cluster, announce_end, in_time, terminate};
use service::{Service, Tokens};

#[tokio::test]
async fn a_spot_notice_saves_and_stops_in_stages_before_the_machine_ends() {
    let service = Service::start_as_mock(Tokens::Optional);
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent_with("node", 2, &[], &service.environment());
    let mut events = cluster.events().await;
    events.saved_at(30).await;
    service.interrupt("terminate", 60);
    let begins = events.next_of(Kind::Draining).await;
    assert!(begins.message.contains("spot") && begins.message.contains("s are left"), "{begins:?}");
    for stage in ["all ranks stop after step", "is copied", "is durable"] {
        let event = events.next_of(Kind::Draining).await;
        assert!(event.message.contains(stage), "{stage}: {event:?}");
        assert!(event.message.ends_with("s are left"), "{event:?}");
    }
    let (coordinator, agents) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(i32::from(exit::DRAINED)));
    assert_eq!(agents[0].code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("agent"));

    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 3);
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_signal_to_all_processes_saves_like_a_signal_to_the_agent() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    events.saved_at(30).await;
    // Slurm ends a step in this way, and some terminals a job.
    cluster.rank_pids(0).into_iter().for_each(announce_end);
    cluster.rank_pids(0).into_iter().chain([cluster.agent_pid(0)]).for_each(terminate);
    for stage in ["all ranks stop after step", "is copied", "is durable"] {
        let event = in_time(stage, async {
            loop {
                let event = events.next_of(Kind::Draining).await;
                if event.message.contains(stage) {
                    return event;
                }
            }
        });
        event.await;
    }
    let (coordinator, agents) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(i32::from(exit::DRAINED)));
    assert_eq!(agents[0].code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("agent"));

    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_notice_to_one_of_two_nodes_costs_its_ranks_and_no_step() {
    let service = Service::start();
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent_with("goes", 2, &[], &service.environment());
    cluster.start_agent("stays", 1);
    let mut events = cluster.events().await;
    events.saved_at(30).await;
    service.interrupt("stop", 120);
    let leaves = events.next_of(Kind::NodeLeaves).await;
    assert!(leaves.message.contains("node goes is leaving"), "{leaves:?}");
    let recovered = events.next_of(Kind::Recovered).await;
    assert!(recovered.message.contains("node goes"), "{recovered:?}");
    let recovery = cluster.status().await.recoveries.last().cloned().unwrap();
    assert_eq!(recovery.lost_steps, 0, "{recovery:?}");
    let left = cluster.agent_ends(0).await;
    assert_eq!(left.code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("agent"));
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_notice_during_a_long_evaluation_is_obeyed_at_once_and_the_evaluation_is_made_after_the_resume()
 {
    // At this resolution the evaluation takes much longer than everything else.
    let settings = [
        "model.arch=resnet18",
        "train={ epochs=1, global_batch=720, resolution=32, virtual_ranks=2 }",
        "schedule={ kind='constant', lr=0.1 }",
        "checkpoint={ every_epochs=1 }",
        "evaluation={ every_epochs=1, resolution=384 }",
    ];
    let mut cluster = settings.into_iter().fold(Cluster::new(), Cluster::set);
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    let saved = events.next_of(Kind::Saved).await;
    let evaluating = in_time("the evaluation", async {
        loop {
            if let Some(progress) = cluster.status().await.evaluating {
                return progress;
            }
        }
    });
    assert_eq!(evaluating.await.total, 360);
    terminate(cluster.agent_pid(0));
    let mut durable = events.next_of(Kind::Draining).await;
    while !durable.message.contains("is durable") {
        durable = events.next_of(Kind::Draining).await;
    }
    assert_eq!(durable.step, saved.step, "nothing remained to be saved");
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(i32::from(exit::DRAINED)));
    let saved_before = cluster.checkpoint_names();

    let mut cluster = cluster.set("evaluation.resolution=32");
    cluster.start_coordinator(&["--allow-recipe-change"]).await;
    let mut events = cluster.events().await;
    cluster.start_agent("node", 1);
    let evaluated = events.next_of(Kind::Evaluated).await;
    assert_eq!(evaluated.step, saved.step);
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(i32::from(exit::OK)));
    assert_eq!(cluster.checkpoint_names(), saved_before, "the evaluation was added to it");
}

#[tokio::test]
async fn a_rebalance_recommendation_is_answered_with_a_checkpoint() {
    let service = Service::start();
    let sparse = ["checkpoint.every_epochs=0", "checkpoint.every_steps=0", "train.epochs=100000"];
    let mut cluster = sparse.into_iter().fold(Cluster::new(), Cluster::set);
    cluster.start_coordinator(&[]).await;
    cluster.start_agent_with("node", 2, &[], &service.environment());
    let mut events = cluster.events().await;
    events.next_of(Kind::TrainingStarted).await;

    service.rebalance();

    let advised = events.next_of(Kind::CheckpointAdvised).await;
    assert!(advised.message.contains("rebalance"), "{advised:?}");
    events.next_of(Kind::Saved).await;
    assert!(cluster.status().await.drain.is_none(), "training continues");
}

#[tokio::test]
async fn a_drain_file_saves_and_stops_and_is_deleted_afterwards() {
    let mut cluster = Cluster::new().set("train.epochs=100000");
    let file = cluster.run_dir().join("please-stop");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent_with("node", 2, &["--drain-file", file.to_str().unwrap()], &[]);
    cluster.events().await.saved_at(20).await;

    std::fs::write(&file, "").unwrap();

    let (coordinator, _) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(i32::from(exit::DRAINED)));
    assert!(cluster.log("coordinator").contains("please-stop"), "{}", cluster.log("coordinator"));
    assert!(!file.exists());
}

/// Uses the job's store, whose calls block.
fn in_store<T: Send>(cluster: &Cluster, work: impl FnOnce(Store) -> T + Send) -> T {
    let folder = cluster.run_dir().join("checkpoints");
    let opened = || work(Store::open_existing(folder.to_str().unwrap()).unwrap());
    std::thread::scope(|scope| scope.spawn(opened).join().unwrap())
}

/// A job that evaluates and does not save.
fn unsaved() -> Cluster {
    Cluster::endless().set("checkpoint.every_epochs=0").set("evaluation.every_epochs=3")
}

/// Ends the only node that has the state, with a notice, while there is no coordinator; then continues the job.
async fn leaves_and_continues(mut cluster: Cluster, step: u64) {
    baton_tests::terminate(cluster.agent_pid(0));
    let ended = cluster.agent_ends(0).await;
    assert_eq!(ended.code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("agent"));
    let saved = in_store(&cluster, |store| store.list().unwrap().remove(0));
    assert!(saved.state.manifest().is_some(), "{saved:?}");
    assert!(saved.id.step.0 >= step && saved.id.generation.0 == 2, "{saved:?}");

    let mut cluster = cluster.set("checkpoint.every_epochs=1");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_notice_saves_although_the_coordinator_was_lost_when_it_had_claimed_the_next_generation()
{
    let mut cluster = unsaved().set("cluster.min_ranks=1");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let mut events = cluster.events().await;
    let evaluated = events.next_of(Kind::Evaluated).await;
    // The claim of the generation with a second node lasts until the coordinator is lost.
    let fences = cluster.run_dir().join("checkpoints/fences");
    let aside = cluster.run_dir().join("fences");
    std::fs::rename(&fences, &aside).unwrap();
    std::fs::write(&fences, "in the way").unwrap();
    cluster.start_agent("late", 1);
    events.next_of(Kind::StoreUnavailable).await;
    cluster.kill_coordinator().await;
    cluster.kill_agent(1).await;
    std::fs::remove_file(&fences).unwrap();
    std::fs::rename(&aside, &fences).unwrap();
    in_store(&cluster, |store| {
        let claimant = store.claimant(Generation(1)).unwrap().unwrap();
        store.claim(Generation(2), &claimant).unwrap();
    });

    leaves_and_continues(cluster, evaluated.step.unwrap()).await;
}

#[tokio::test]
async fn a_notice_saves_although_the_coordinator_is_lost_and_the_other_rank_does_not_answer() {
    let mut cluster = unsaved().set("cluster={ min_ranks=1, standby=false, drain_seconds=8 }");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.start_agent("silent", 1);
    let mut events = cluster.events().await;
    let evaluated = loop {
        let evaluated = events.next_of(Kind::Evaluated).await;
        if cluster.status().await.ranks.len() == 2 {
            break evaluated;
        }
    };
    cluster.kill_coordinator().await;
    let silent = cluster.rank_pids(1);
    silent.iter().for_each(|rank| baton_tests::stop(*rank));

    baton_tests::terminate(cluster.agent_pid(0));
    let ended = cluster.agent_ends(0).await;
    assert_eq!(ended.code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("agent"));
    silent.iter().for_each(|rank| baton_tests::wake(*rank));
    cluster.kill_agent(0).await;
    let saved = in_store(&cluster, |store| store.list().unwrap().remove(0));
    assert!(saved.state.manifest().is_some(), "{saved:?}");
    assert!(saved.id.step.0 >= evaluated.step.unwrap(), "{saved:?}");

    let mut cluster = cluster.set("checkpoint.every_epochs=1");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_notice_saves_although_the_coordinator_was_lost_before_all_ranks_of_a_generation_were_ready()
 {
    let mut cluster = unsaved().set("cluster.min_ranks=1");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let mut events = cluster.events().await;
    let evaluated = events.next_of(Kind::Evaluated).await;
    cluster.start_agent("late", 1);
    events.next_of(Kind::GenerationOpened).await;
    baton_tests::stop(cluster.agent_pid(1));
    cluster.kill_coordinator().await;
    cluster.kill_agent(1).await;

    leaves_and_continues(cluster, evaluated.step.unwrap()).await;
}
