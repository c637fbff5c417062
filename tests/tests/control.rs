//! Tests of observing and controlling a job.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::{collections::BTreeMap, fs, path::Path};

use baton_checkpoint::profile::{ALL_REDUCE_SPAN, RankProfile};
use baton_job::exit;
use baton_proto::v1::{
    DrainRequest, ListCheckpointsRequest, RecordProfileRequest, RecordProfileResponse, StopRequest,
    TriggerCheckpointRequest, get_status_response::Phase, watch_events_response::Kind,
};
use baton_tests::{Cluster, in_time};
use tokio_stream::StreamExt;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

#[tokio::test]
async fn drained_job_reports_its_reason_and_the_same_command_continues_it() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.events().await.saved_at(40).await;
    let reason = "requested by the test".to_owned();
    cluster.client().await.drain(DrainRequest { reason }).await.unwrap();
    let (coordinator, agents) = cluster.finish().await;
    assert_eq!(
        coordinator.code(),
        Some(i32::from(exit::DRAINED)),
        "{}",
        cluster.log("coordinator")
    );
    assert_eq!(agents[0].code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("agent"));

    assert!(cluster.log("coordinator").contains("requested by the test"));
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.end().await;

    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn sigterm_to_the_agent_drains_the_job() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.events().await.saved_at(1).await;
    baton_tests::terminate(cluster.agent_pid(0));
    let (coordinator, agents) = cluster.finish().await;
    assert_eq!(
        coordinator.code(),
        Some(i32::from(exit::DRAINED)),
        "{}",
        cluster.log("coordinator")
    );
    assert_eq!(agents[0].code(), Some(i32::from(exit::DRAINED)));
}

#[tokio::test]
async fn a_profile_has_the_same_steps_of_every_rank_and_changes_no_bit() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    let request = || RecordProfileRequest { steps: 5 };
    let refused = cluster.client().await.record_profile(request()).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    cluster.start_agent("node", 2);
    cluster.events().await.saved_at(1).await;
    let mut stream = cluster.client().await.record_profile(request()).await.unwrap().into_inner();
    let mut parts: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    while let Some(RecordProfileResponse { part, data }) = stream.message().await.unwrap() {
        parts.entry(part).or_default().extend(data);
    }
    assert_eq!(parts.len(), 2);
    for (rank, part) in parts {
        let profile: RankProfile = serde_json::from_slice(&part).unwrap();
        let info = &profile.baton;
        assert_eq!((info.rank.0, info.left_out, &info.problem), (rank, 0, &None));
        assert_eq!(info.node, "node");
        assert_eq!(info.last_step.0 - info.first_step.0, 4, "{info:?}");
        let shares = profile.shares().unwrap();
        assert_eq!(shares.steps, 5);
        for name in ["gradient", "update"] {
            assert!(shares.parts.iter().any(|part| part.name == name), "{name}: {shares:?}");
        }
        for name in [ALL_REDUCE_SPAN, "decode"] {
            assert!(profile.events.iter().any(|event| event.name == name), "{name}");
        }
    }
    let reason = String::new();
    cluster.client().await.drain(DrainRequest { reason }).await.unwrap();
    cluster.finish().await;
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.end().await;

    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn stopped_job_ends_at_once() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.events().await.saved_at(1).await;
    cluster.client().await.stop(StopRequest {}).await.unwrap();
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(i32::from(exit::STOPPED)));
    assert!(cluster.log("coordinator").contains("stopped on request"));
}

#[tokio::test]
async fn status_and_checkpoints_show_the_state_of_the_job() {
    let mut cluster =
        Cluster::endless().set("evaluation.every_epochs=3").set("checkpoint.every_epochs=0");
    cluster.start_coordinator(&[]).await;
    let refused = cluster.client().await.trigger_checkpoint(TriggerCheckpointRequest {}).await;
    assert_eq!(refused.unwrap_err().code(), tonic::Code::FailedPrecondition);
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    events.next_of(Kind::Evaluated).await;
    let status = cluster.status().await;
    assert_eq!(status.phase(), Phase::Training, "{}", status.reason);
    assert_eq!(status.ranks.len(), 2);
    assert_eq!(status.name, "story");
    assert!(status.latest.is_some_and(|latest| latest.samples_per_second > 0.0));
    let accuracy = status.evaluation.and_then(|e| e.accuracy);
    assert!(accuracy.as_ref().is_some_and(|accuracy| accuracy.samples == 360), "{accuracy:?}");
    assert!(status.eta_seconds.is_some());

    cluster.client().await.trigger_checkpoint(TriggerCheckpointRequest {}).await.unwrap();
    let saved = events.next_of(Kind::Saved).await;

    let list = cluster.client().await.list_checkpoints(ListCheckpointsRequest {}).await.unwrap();
    let newest = list.into_inner().checkpoints.into_iter().next().unwrap();
    assert!(newest.complete);
    assert_eq!(newest.checkpoint.map(|c| c.step), saved.step);
    cluster.client().await.stop(StopRequest {}).await.unwrap();
    cluster.finish().await;
}

#[tokio::test]
async fn health_and_reflection_answer_any_grpc_client() {
    let mut cluster = Cluster::new();
    cluster.start_coordinator(&[]).await;
    let mut health = HealthClient::new(cluster.channel().await);
    for service in ["", "baton.v1.JobService", "baton.v1.NodeService"] {
        let request = HealthCheckRequest { service: service.to_owned() };
        let response = health.check(request).await.unwrap().into_inner();
        assert_eq!(response.status(), ServingStatus::Serving, "{service}");
    }

    let mut reflection = ServerReflectionClient::new(cluster.channel().await);
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut responses =
        reflection.server_reflection_info(tokio_stream::once(request)).await.unwrap().into_inner();
    let response = responses.next().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(services) = response else { panic!("{response:?}") };
    let names: Vec<String> = services.service.into_iter().map(|service| service.name).collect();
    for name in ["baton.v1.JobService", "baton.v1.NodeService", "grpc.health.v1.Health"] {
        assert!(names.iter().any(|known| known == name), "{name} is not among {names:?}");
    }
}

/// Python's client uses version 1alpha of the reflection protocol. It lists the services and calls one.
#[tokio::test]
async fn pythons_reflection_client_finds_the_services_and_calls_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let packages = root.join(".tools/python");
    assert!(packages.is_dir(), "{} is missing: run `make tools` first", packages.display());
    let mut cluster = Cluster::new();
    cluster.start_coordinator(&[]).await;
    let client = tokio::process::Command::new("python3")
        .arg(root.join("tests/python/reflection.py"))
        .arg(cluster.url().trim_start_matches("http://"))
        .env("PYTHONPATH", packages)
        .output();
    let output = in_time("Python's client", client).await.unwrap();
    assert!(output.status.success(), "{output:?}");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        printed,
        "baton.v1.JobService\nbaton.v1.NodeService\ngrpc.health.v1.Health\n\
         grpc.reflection.v1alpha.ServerReflection\n\
         GetStatus: story\n"
    );
}

#[tokio::test]
async fn restart_of_a_completed_job_opens_no_generation() {
    let mut cluster = Cluster::new().set("train.epochs=1");
    cluster.run_to_the_end(1).await;
    assert_complete(cluster).await;
}

/// Starts the coordinator of a complete job again: it ends at once, and opens no generation.
async fn assert_complete(mut cluster: Cluster) {
    let generations = cluster.log("coordinator").matches("opened with").count();
    cluster.start_coordinator(&[]).await;
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(i32::from(exit::OK)));
    assert_eq!(cluster.log("coordinator").matches("opened with").count(), generations);
}

#[tokio::test]
async fn a_job_that_has_reached_its_target_goes_on_with_a_higher_one() {
    let mut cluster = Cluster::new().set("limits.target={ metric='top1', value=0.2 }");
    cluster.run_to_the_end(1).await;
    assert!(cluster.log("coordinator").contains("is reached"), "{}", cluster.log("coordinator"));
    let mut cluster = cluster.set("limits.target.value=1.0");
    let state = cluster.run_to_the_end(1).await;
    assert!(Cluster::new().run_to_the_end(1).await == state, "all epochs, as without a target");

    // The same recipe again.
    assert_complete(cluster).await;
}

#[tokio::test]
async fn a_target_of_a_resumed_job_ends_it_once() {
    let mut cluster = Cluster::endless().set("evaluation.every_epochs=1");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.events().await.saved_at(1).await;
    cluster.end().await;
    let mut cluster = cluster.set("limits.target={ metric='top1', value=0.2 }");
    cluster.run_to_the_end(1).await;
    assert_complete(cluster).await;
}

#[tokio::test]
async fn run_without_auto_resume_starts_again_and_keeps_the_old_checkpoints() {
    let mut cluster = Cluster::new().set("train.epochs=2");
    let first = cluster.run_to_the_end(1).await;
    let before = cluster.checkpoint_names();
    cluster.start_coordinator(&["--no-auto-resume"]).await;
    cluster.start_agent("node", 1);
    let mut events = cluster.events().await;
    let started = events.next_of(Kind::TrainingStarted).await;
    assert!(started.message.contains("fresh"), "{}", started.message);
    let (coordinator, _) = cluster.finish().await;
    assert!(coordinator.success());
    assert!(cluster.newest_state() == first);
    let after = cluster.checkpoint_names();
    assert!(before.iter().all(|name| after.contains(name)), "{before:?} became {after:?}");

    // The curves of both are in one file.
    let metrics = std::fs::read_to_string(cluster.run_dir().join("metrics.jsonl")).unwrap();
    let points =
        metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let jobs: Vec<_> =
        points.filter_map(|point| point["job_id"].as_str().map(str::to_owned)).collect();
    assert!(jobs.len() == 2 && jobs[0] != jobs[1], "{jobs:?}");
}

#[tokio::test]
async fn changed_recipe_continues_with_the_old_state_if_a_flag_allows_it() {
    let mut cluster = Cluster::new().set("train.epochs=2");
    cluster.run_to_the_end(1).await;
    let before = cluster.checkpoint_names();
    let mut cluster = cluster.set("loss.label_smoothing=0.1").set("train.epochs=3");
    cluster.start_coordinator(&["--allow-recipe-change"]).await;
    cluster.start_agent("node", 2);
    let started = cluster.events().await.next_of(Kind::TrainingStarted).await;
    let (coordinator, _) = cluster.finish().await;

    assert!(started.message.contains("epoch 2, step "), "{}", started.message);
    assert!(started.message.contains("written by 1 rank"), "{}", started.message);
    assert!(started.message.contains("loss.label_smoothing: 0.0 → 0.1"), "{}", started.message);
    assert!(started.message.contains("train.epochs: 2 → 3"), "{}", started.message);
    assert!(coordinator.success(), "{}", cluster.log("coordinator"));
    assert!(
        cluster.checkpoint_names().iter().max() > before.iter().max(),
        "the job has not trained"
    );
}

#[tokio::test]
async fn a_coordinator_that_restarts_with_allow_recipe_change_keeps_its_ranks() {
    let flag = "--allow-recipe-change";
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[flag]).await;
    cluster.start_agent("node", 1);
    cluster.events().await.saved_at(1).await;
    let before = cluster.status().await;
    cluster.kill_coordinator().await;

    let [listen, address] = cluster.same_address();
    cluster.start_coordinator(&[listen.as_str(), address.as_str(), flag]).await;

    let mut events = cluster.new_events().await;
    events.next_of(Kind::Saved).await;
    let after = cluster.status().await;
    assert_eq!((&after.job_id, after.generation), (&before.job_id, before.generation));
    cluster.end().await;
    // With nobody who runs, the flag allows what has changed since.
    cluster.start_coordinator(&[flag]).await;
    assert_ne!(cluster.status().await.job_id, after.job_id);
    cluster.kill_coordinator().await;
}

#[tokio::test]
async fn after_a_resume_that_was_refused_the_run_before_goes_on() {
    let mut other = Cluster::of_epochs(2).set("seed=8");
    other.run_to_the_end(1).await;
    let name = other.checkpoint_names().into_iter().max().unwrap();
    let foreign = other.run_dir().join("checkpoints").join(name).display().to_string();

    let mut cluster = Cluster::endless().set("checkpoint.every_steps=50");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.events().await.saved_at(50).await;
    let before = cluster.status().await;
    cluster.end().await;
    // Twice, and each of them opens a generation.
    for _ in 0..2 {
        cluster.start_coordinator(&["--resume", &foreign]).await;
        cluster.start_agent("node", 1);
        let (ended, _) = cluster.finish().await;
        assert_eq!(ended.code(), Some(i32::from(exit::BAD_INPUT)));
        assert!(cluster.log("coordinator").contains("was written by another recipe (seed: 8"));
    }

    cluster.start_coordinator(&[]).await;
    let mut events = cluster.new_events().await;
    cluster.start_agent("node", 1);
    let started = events.next_of(Kind::TrainingStarted).await;
    assert!(started.message.contains("checkpoint step-"), "{}", started.message);
    let status = cluster.status().await;
    assert_eq!(status.job_id, before.job_id);
    assert!(status.generation > before.generation + 1, "{status:?}");
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_change_that_was_refused_in_another_run_folder_does_not_keep_the_job_from_going_on() {
    let store = tempfile::tempdir().unwrap();
    let of_job = || {
        let cluster = Cluster::endless().set("checkpoint.every_steps=50");
        cluster.set(&format!("checkpoint.dir={}", store.path().display()))
    };
    let mut first = of_job();
    first.start_coordinator(&[]).await;
    first.start_agent("node", 1);
    first.events().await.saved_at(50).await;
    let job = first.status().await.job_id;
    first.end().await;
    let names = fs::read_dir(store.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.filter_map(|name| name.into_string().ok());
    let name = names.filter(|name| name.starts_with("step-")).max().unwrap();
    let mut changed = of_job().set("model.num_classes=11");
    changed.start_coordinator(&["--resume", &name, "--allow-recipe-change"]).await;
    changed.start_agent("node", 1);
    let (ended, _) = changed.finish().await;
    let log = changed.log("coordinator");
    assert_eq!(ended.code(), Some(i32::from(exit::BAD_INPUT)), "{log}");

    let mut next = of_job();
    next.start_coordinator(&[]).await;
    let mut events = next.new_events().await;
    next.start_agent("node", 1);
    let started = events.next_of(Kind::TrainingStarted).await;
    assert!(started.message.contains("checkpoint step-"), "{}", started.message);
    assert_eq!(next.status().await.job_id, job);
    next.end().await;
    next.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn new_run_starts_from_the_given_checkpoint() {
    let mut cluster = Cluster::new().set("train.epochs=2");
    let first = cluster.run_to_the_end(2).await;
    let folder = cluster.run_dir().join("checkpoints");
    let oldest = cluster.checkpoint_names().into_iter().min().unwrap();

    // By its path, like a checkpoint of another store.
    let path = folder.join(&oldest).display().to_string();
    cluster.start_coordinator(&["--resume", &path]).await;
    cluster.start_agent("node", 1);
    let started = cluster.events().await.next_of(Kind::TrainingStarted).await;
    let (coordinator, _) = cluster.finish().await;

    assert!(started.message.contains(&oldest), "{}", started.message);
    assert!(coordinator.success(), "{}", cluster.log("coordinator"));
    assert!(cluster.newest_state() == first);
}
