//! The machine is taken away: spot notices, advice, a drain file.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failed test may say so loudly"
)]

#[path = "../../crates/imds/tests/service/mod.rs"]
mod service;

use baton_job::exit;
use baton_proto::v1::watch_events_response::Kind;
use baton_tests::Cluster;
use service::{Service, Tokens};

/// What leads an agent to the service.
fn environment(service: &Service) -> Vec<(String, String)> {
    let mut variables = service.environment();
    variables.push(("AWS_EC2_METADATA_DISABLED".to_owned(), "false".to_owned()));
    variables
}

#[tokio::test]
async fn a_spot_notice_saves_and_stops_in_stages_before_the_machine_ends() {
    let undisturbed = Cluster::new().run_to_the_end(2).await;
    let service = Service::start_as_mock(Tokens::Optional);

    let mut cluster = Cluster::new();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent_with("node", 2, &[], &environment(&service));
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

    assert!(cluster.run_to_the_end(3).await == undisturbed);
}

#[tokio::test]
async fn a_notice_to_one_of_two_nodes_costs_its_ranks_and_no_step() {
    let undisturbed = Cluster::new().run_to_the_end(2).await;
    let service = Service::start();

    let mut cluster = Cluster::new();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent_with("goes", 2, &[], &environment(&service));
    cluster.start_agent("stays", 1);
    let mut events = cluster.events().await;
    events.saved_at(30).await;
    service.interrupt("stop", 120);
    let leaves = events.next_of(Kind::NodeLeaves).await;
    assert!(leaves.message.contains("node goes must go"), "{leaves:?}");
    let recovered = events.next_of(Kind::Recovered).await;
    assert!(recovered.message.contains("node goes"), "{recovered:?}");
    let recovery = cluster.status().await.recoveries.last().cloned().unwrap();
    assert_eq!(recovery.lost_steps, 0, "{recovery:?}");
    let (coordinator, agents) = cluster.finish().await;

    assert!(coordinator.success(), "{}", cluster.log("coordinator"));
    assert_eq!(agents[0].code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("agent"));
    assert!(cluster.newest_state() == undisturbed);
}

#[tokio::test]
async fn a_rebalance_recommendation_is_answered_with_a_checkpoint() {
    let service = Service::start();
    let sparse = ["checkpoint.every_epochs=0", "checkpoint.every_steps=0", "train.epochs=100000"];
    let mut cluster = sparse.into_iter().fold(Cluster::new(), Cluster::set);
    cluster.start_coordinator(&[]).await;
    cluster.start_agent_with("node", 2, &[], &environment(&service));
    let mut events = cluster.events().await;
    events.next_of(Kind::TrainingStarted).await;

    service.rebalance();

    let advised = events.next_of(Kind::Advised).await;
    assert!(advised.message.contains("rebalance"), "{advised:?}");
    events.next_of(Kind::Saved).await;
    assert!(cluster.status().await.drain.is_none(), "training goes on");
}

#[tokio::test]
async fn a_drain_file_saves_and_stops_and_is_gone_afterwards() {
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
