//! Tests of pausing, of submitting a job to a coordinator that has none, and of reading metrics, logs and status.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::fs;

use baton_job::exit;
use baton_proto::v1::{
    self, DrainRequest, GetRecipeRequest, PauseRequest, ResumeRequest, StopRequest,
    StreamLogsRequest, StreamMetricsRequest, SubmitJobRequest, TriggerCheckpointRequest,
    WatchEventsRequest, get_status_response::Phase, stream_metrics_response::Metrics,
    watch_events_response::Kind,
};
use baton_tests::{Cluster, WAIT_TIMEOUT, kill};
use tokio_stream::StreamExt;
use tonic::Code;
use tonic_types::StatusExt;

/// Waits until all ranks report that they are paused after the same step; returns this step.
async fn paused_step(cluster: &Cluster) -> u64 {
    let look = async || {
        let status = cluster.status().await;
        let paused = |rank: &v1::RankStatus| {
            let heartbeat =
                rank.heartbeat.filter(|heartbeat| heartbeat.activity() == v1::Activity::Paused);
            heartbeat.map(|heartbeat| heartbeat.step)
        };
        let steps: Option<Vec<u64>> = status.ranks.iter().map(paused).collect();
        match steps.as_deref() {
            Some([first, rest @ ..]) => rest.iter().all(|step| step == first).then_some(*first),
            Some([]) | None => None,
        }
    };
    cluster.until("all ranks pause at one step", look).await
}

#[tokio::test]
async fn a_job_stays_paused_through_failures_and_restarts_saves_on_request_and_ends_with_the_same_bits()
 {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    events.next_of(Kind::Saved).await;
    let mut client = cluster.client().await;
    assert_eq!(client.resume(ResumeRequest {}).await.unwrap_err().code(), Code::FailedPrecondition);
    let reason = "lunch".to_owned();
    client.pause(PauseRequest { reason: reason.clone() }).await.unwrap();
    let again = client.pause(PauseRequest { reason }).await.unwrap_err();
    assert!(again.message().contains("lunch"), "{again}");
    events.next_of(Kind::Paused).await;
    let past = WatchEventsRequest { after_id: 0, past_only: true };
    let past = client.watch_events(past).await.unwrap().into_inner();
    let past: Vec<_> = past.map(|event| event.unwrap().kind()).collect().await;
    assert!(past.contains(&Kind::Paused), "{past:?}");
    let at = paused_step(&cluster).await;
    let status = cluster.status().await;
    assert_eq!(status.phase(), Phase::Paused);
    assert_eq!(status.pause.unwrap().reason, "lunch");

    // A paused job can save a checkpoint.
    client.trigger_checkpoint(TriggerCheckpointRequest {}).await.unwrap();
    assert_eq!(events.saved_at(at).await.step, Some(at));

    // It stays paused after the death of a rank or of the coordinator.
    kill(cluster.rank_pids(0)[0]);
    events.next_of(Kind::TrainingStarted).await;
    assert_eq!(paused_step(&cluster).await, at);
    let address = cluster.same_address();
    cluster.kill_coordinator().await;
    cluster.start_coordinator(&address.each_ref().map(String::as_str)).await;
    let mut events = cluster.events().await;
    let is_paused = async || (cluster.status().await.phase() == Phase::Paused).then_some(());
    cluster.until("the job is paused", is_paused).await;
    assert_eq!(paused_step(&cluster).await, at);

    cluster.client().await.resume(ResumeRequest {}).await.unwrap();
    events.next_of(Kind::Resumed).await;
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_paused_job_that_is_drained_saves_at_once_and_continues_after_a_restart() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let mut events = cluster.events().await;
    events.next_of(Kind::Saved).await;
    let mut client = cluster.client().await;
    client.pause(PauseRequest { reason: String::new() }).await.unwrap();
    paused_step(&cluster).await;
    client.drain(DrainRequest { reason: "spot".to_owned() }).await.unwrap();
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(
        coordinator.code(),
        Some(i32::from(exit::DRAINED)),
        "{}",
        cluster.log("coordinator")
    );

    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn a_coordinator_without_a_job_lets_agents_wait_and_a_submitted_job_survives_a_restart() {
    let mut cluster = Cluster::endless();
    cluster.start_idle_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let status = cluster.status().await;
    assert_eq!(status.phase(), Phase::Idle);
    assert!(status.reason.contains("baton submit"), "{}", status.reason);
    let mut client = cluster.client().await;
    let refused = client.stop(StopRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);

    let recipe = fs::read_to_string(cluster.recipe()).unwrap();
    let submit = |changes: &[&str]| SubmitJobRequest {
        recipe: recipe.clone(),
        overrides: changes.iter().map(|&change| change.to_owned()).collect(),
    };
    let invalid = submit(&["train.epochs=0", "train.global_batch=0"]);
    let refused = client.submit_job(invalid).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let details = refused.get_details_bad_request().unwrap().field_violations;
    let fields: Vec<&str> = details.iter().map(|violation| violation.field.as_str()).collect();
    assert_eq!(fields[..2], ["train.epochs", "train.global_batch"]);
    for violation in &details {
        assert!(refused.message().contains(&violation.field), "{refused}");
    }
    assert!(details[0].description.starts_with("is 0: "), "{details:?}");
    let unwritable = submit(&["checkpoint.dir='/proc/nowhere'"]);
    let refused = client.submit_job(unwritable).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");

    let changes = cluster.overrides();
    let request = SubmitJobRequest { recipe: recipe.clone(), overrides: changes };
    let submitted = client.submit_job(request.clone()).await.unwrap().into_inner();
    assert_eq!(submitted.name, "story");
    cluster.events().await.next_of(Kind::Saved).await;
    let second = client.submit_job(request).await.unwrap_err();
    assert_eq!(second.code(), Code::FailedPrecondition);
    assert!(second.message().contains("story"), "{second}");
    let recipe = client.get_recipe(GetRecipeRequest {}).await.unwrap().into_inner();
    assert!(recipe.toml.contains("name = \"story\"") && recipe.json.contains("\"story\""));
    assert_eq!(recipe.hash.len(), 64);

    // Restart it without a recipe.
    let address = cluster.same_address();
    cluster.kill_coordinator().await;
    cluster.start_idle_coordinator(&address.each_ref().map(String::as_str)).await;
    assert_eq!(cluster.status().await.job_id, submitted.job_id);
    cluster.client().await.stop(StopRequest {}).await.unwrap();
    cluster.finish().await;
}

#[tokio::test]
async fn with_log_every_all_multiples_of_it_are_in_the_metrics_and_no_other_step() {
    let mut cluster = Cluster::of_epochs(2).set("train.log_every=7");
    cluster.run_to_the_end(2).await;
    let metrics = fs::read_to_string(cluster.run_dir().join("metrics.jsonl")).unwrap();
    let points =
        metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let steps: Vec<u64> = points.filter_map(|point| point["step"]["step"].as_u64()).collect();
    assert_eq!(steps, [7, 14, 21, 28, 35, 42], "two epochs of 22 steps");
}

#[tokio::test]
async fn the_last_evaluation_of_a_job_that_completes_without_a_coordinator_is_in_its_metrics() {
    let mut cluster = Cluster::of_epochs(60).set("train.log_every=1");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.events().await.next_of(Kind::Saved).await;
    let address = cluster.same_address();
    cluster.kill_coordinator().await;
    let ranks_end = async || cluster.rank_pids(0).is_empty().then_some(());
    cluster.until("the ranks have ended", ranks_end).await;
    cluster.start_coordinator(&address.each_ref().map(String::as_str)).await;
    let (coordinator, agents) = cluster.finish().await;
    assert!(coordinator.success() && agents[0].success(), "{}", cluster.log("coordinator"));

    let metrics = fs::read_to_string(cluster.run_dir().join("metrics.jsonl")).unwrap();
    let points =
        metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let last = |kind: &str| {
        let steps = points.clone().filter_map(|point| point[kind]["step"].as_u64());
        steps.max()
    };
    let all_steps = Some(60 * 22);
    assert_eq!((last("step"), last("evaluation")), (all_steps, all_steps), "{metrics}");
}

#[tokio::test]
async fn metrics_survive_a_restart_and_are_written_for_tensorboard_and_the_report() {
    let mut cluster = Cluster::endless().set("train.log_every=20");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let mut events = cluster.events().await;
    events.next_of(Kind::Saved).await;
    let follow = StreamMetricsRequest { after_unix_millis: 0, follow: true };
    let mut client = cluster.client().await;
    let mut points = client.stream_metrics(follow).await.unwrap().into_inner();
    let first = points.next().await.unwrap().unwrap();
    assert_eq!((first.generation, first.metrics), (1, Some(Metrics::BeganAt(0))));
    while !matches!(points.next().await.unwrap().unwrap().metrics, Some(Metrics::Step(_))) {}
    let address = cluster.same_address();
    cluster.kill_coordinator().await;
    cluster.start_coordinator(&address.each_ref().map(String::as_str)).await;
    let mut points = cluster.client().await.stream_metrics(follow).await.unwrap().into_inner();
    for _ in 0..2 {
        while !matches!(points.next().await.unwrap().unwrap().metrics, Some(Metrics::Step(_))) {}
    }

    let all = StreamMetricsRequest::default();
    let past = cluster.client().await.stream_metrics(all).await.unwrap().into_inner();
    let past: Vec<_> = past.map(Result::unwrap).collect().await;
    assert_eq!(past[0].metrics, Some(Metrics::BeganAt(0)));
    let steps: Vec<u64> = past
        .iter()
        .filter_map(|point| match &point.metrics {
            Some(Metrics::Step(step)) => Some(step.step),
            _ => None,
        })
        .collect();
    let without_a_gap: Vec<u64> = (1..).map(|count| 20 * count).take(steps.len()).collect();
    assert_eq!(steps, without_a_gap, "training went on while there was no coordinator");

    cluster.client().await.drain(DrainRequest::default()).await.unwrap();
    cluster.finish().await;
    let file = |name: &str| fs::read_to_string(cluster.run_dir().join(name)).unwrap();
    let lines = file("metrics.jsonl");
    assert!(lines.lines().all(|line| line.starts_with('{') && line.ends_with('}')));
    let written = fs::read_dir(cluster.run_dir().join("tensorboard")).unwrap().count();
    assert_eq!(written, 2, "one file for each coordinator");
    let report = file("report.html");
    assert!(report.contains("story") && report.contains("<script type=\"module\">"), "{report}");
    assert!(report.contains(env!("CARGO_PKG_VERSION")), "{report}");
    assert!(file("report.json").contains("drained"));
}

#[tokio::test]
async fn one_call_streams_the_logs_of_ranks_agents_and_coordinator() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.events().await.next_of(Kind::Saved).await;
    let request =
        StreamLogsRequest { all_sources: true, follow: true, ..StreamLogsRequest::default() };
    let mut client = cluster.client().await;
    let mut lines = client.stream_logs(request).await.unwrap().into_inner();
    let (mut ranks, mut agent, mut coordinator) = (Vec::new(), false, false);
    while ranks.len() < 2 || !agent || !coordinator {
        let line = tokio::time::timeout(WAIT_TIMEOUT, lines.next()).await.expect("more lines");
        let line = line.unwrap().unwrap();
        match (line.rank, line.node_id.as_str()) {
            (Some(rank), "node") if line.line.contains("joining") && !ranks.contains(&rank) => {
                ranks.push(rank);
            }
            (None, "node") => agent |= line.line.contains("agent started"),
            (None, "") => coordinator |= line.line.contains("serving"),
            _ => {}
        }
    }
    let request = StreamLogsRequest { ranks: vec![1], tail: 1, ..StreamLogsRequest::default() };
    let one = client.stream_logs(request).await.unwrap().into_inner();
    let one: Vec<_> = one.map(Result::unwrap).collect().await;
    assert_eq!(one.iter().map(|line| line.rank).collect::<Vec<_>>(), [Some(1)]);

    // A restarted coordinator gets them again.
    let address = cluster.same_address();
    cluster.kill_coordinator().await;
    cluster.start_coordinator(&address.each_ref().map(String::as_str)).await;
    let request =
        StreamLogsRequest { ranks: vec![0], follow: true, ..StreamLogsRequest::default() };
    let mut lines = cluster.client().await.stream_logs(request).await.unwrap().into_inner();
    while !lines.next().await.unwrap().unwrap().line.contains("joining") {}
    cluster.client().await.stop(StopRequest {}).await.unwrap();
    cluster.finish().await;
}

#[tokio::test]
async fn the_status_has_machine_statistics_and_round_trip_times() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let look = async || {
        let node = cluster.status().await.nodes.into_iter().next()?;
        Some((node.host?, node.round_trip_seconds?, node.heartbeat_age_seconds?))
    };
    let (host, round_trip, heartbeat_age) = cluster.until("the statistics", look).await;
    assert!(host.cpus > 0 && host.memory_total > 0 && host.disk_total > 0, "{host:?}");
    assert!(round_trip < 5.0 && heartbeat_age < 60.0);
    cluster.client().await.stop(StopRequest {}).await.unwrap();
    cluster.finish().await;
}

#[tokio::test]
async fn an_event_id_after_the_newest_is_out_of_range_with_a_remedy() {
    let mut cluster = Cluster::new();
    cluster.start_coordinator(&[]).await;
    let mut client = cluster.client().await;
    let request = WatchEventsRequest { after_id: 99, past_only: false };
    let refused = client.watch_events(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange);
    assert!(refused.message().contains("begin with 0"), "{refused}");
    let details = refused.get_details_bad_request().unwrap().field_violations;
    assert_eq!(details[0].field, "after_id");
    client.watch_events(WatchEventsRequest::default()).await.unwrap();
}
