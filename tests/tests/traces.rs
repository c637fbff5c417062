//! Tests of OpenTelemetry traces of a job, with a collector in the test.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::collections::{HashMap, HashSet};

use baton_proto::v1::{PauseRequest, ResumeRequest, watch_events_response::Kind};
use baton_tests::{Cluster, in_time, kill};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
    trace::v1::{Span, status::StatusCode},
};
use tokio::{net::TcpListener, sync::mpsc};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

/// A request to the collector, with its `authorization` header.
type ReceivedRequest = (ExportTraceServiceRequest, Option<String>);

struct Collector(mpsc::UnboundedSender<ReceivedRequest>);

#[async_trait::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let key = request.metadata().get("authorization");
        let key = key.map(|key| key.to_str().unwrap().to_owned());
        self.0.send((request.into_inner(), key)).unwrap();
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Starts a collector; returns its URL and the requests that it receives.
async fn collector() -> (String, mpsc::UnboundedReceiver<ReceivedRequest>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, sent) = mpsc::unbounded_channel();
    let service = TraceServiceServer::new(Collector(sender));
    let server = Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    (url, sent)
}

fn text(attributes: &[KeyValue], name: &str) -> String {
    let found = attributes.iter().find(|attribute| attribute.key == name);
    let value = found.and_then(|found| found.value.clone()).and_then(|value| value.value);
    match value {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => panic!("{name}: {other:?} in {attributes:?}"),
    }
}

#[tokio::test]
async fn a_job_with_failures_and_a_restart_gives_one_trace() {
    let (url, mut sent) = collector().await;
    let flags = ["--otlp-endpoint".to_owned(), url];
    let headers = ("OTEL_EXPORTER_OTLP_HEADERS".to_owned(), "authorization=sesame".to_owned());
    let mut cluster = Cluster::endless().with_environment(vec![headers]);
    cluster.start_coordinator(&flags.each_ref().map(String::as_str)).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    events.next_of(Kind::Saved).await;
    kill(cluster.rank_pids(0)[1]);
    events.next_of(Kind::Recovered).await;
    let reason = "lunch".to_owned();
    cluster.client().await.pause(PauseRequest { reason }).await.unwrap();
    events.next_of(Kind::Paused).await;
    let again = [flags.as_slice(), &cluster.same_address()].concat();
    cluster.kill_coordinator().await;
    cluster.start_coordinator(&again.iter().map(String::as_str).collect::<Vec<_>>()).await;
    cluster.client().await.resume(ResumeRequest {}).await.unwrap();
    let job = cluster.status().await.job_id;
    cluster.end().await;

    let mut spans: Vec<Span> = Vec::new();
    while let Ok((request, key)) = sent.try_recv() {
        assert_eq!(key.as_deref(), Some("sesame"));
        for of_resource in request.resource_spans {
            let resource = of_resource.resource.unwrap().attributes;
            assert_eq!(text(&resource, "service.name"), "baton");
            assert_eq!(text(&resource, "baton.job.id"), job);
            spans.extend(of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
    }
    let trace_id = u128::from_str_radix(&job.replace('-', ""), 16).unwrap().to_be_bytes();
    assert!(spans.iter().all(|span| span.trace_id == trace_id));
    let by_id: HashMap<&[u8], &Span> =
        spans.iter().map(|span| (span.span_id.as_slice(), span)).collect();
    assert_eq!(by_id.len(), spans.len(), "a span id was used twice");
    let named =
        |name: &str| -> Vec<&Span> { spans.iter().filter(|span| span.name == name).collect() };

    let [whole] = named("job")[..] else { panic!("{spans:?}") };
    assert_eq!(whole.parent_span_id, Vec::<u8>::new());
    assert_eq!(whole.status.clone().unwrap().code(), StatusCode::Ok);
    // Spans that the killed coordinator had not sent yet are lost, but the last coordinator sends the root spans.
    let generations = named("generation");
    let numbers: HashSet<String> =
        generations.iter().map(|span| text(&span.attributes, "baton.generation")).collect();
    assert!(numbers.contains("2"), "{numbers:?}");
    let [pause] = named("pause")[..] else { panic!("{spans:?}") };
    assert!(text(&pause.attributes, "baton.reason").contains("lunch"));
    assert!(!named("checkpoint").is_empty());
    for span in &spans {
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{span:?}");
        let (from, until) = (whole.start_time_unix_nano, whole.end_time_unix_nano);
        assert!(from <= span.start_time_unix_nano && span.end_time_unix_nano <= until, "{span:?}");
    }
    for checkpoint in named("checkpoint") {
        if let Some(parent) = by_id.get(checkpoint.parent_span_id.as_slice()) {
            let generation = text(&checkpoint.attributes, "baton.generation");
            assert_eq!(generation, text(&parent.attributes, "baton.generation"));
        }
    }
}

#[tokio::test]
async fn a_recovery_is_exported_within_seconds_while_the_job_continues() {
    let (url, mut sent) = collector().await;
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&["--otlp-endpoint", &url]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    events.next_of(Kind::Saved).await;
    kill(cluster.rank_pids(0)[1]);
    events.next_of(Kind::Recovered).await;

    let mut spans: Vec<Span> = Vec::new();
    while !spans.iter().any(|span| span.name == "recovery") {
        let (request, _) = in_time("spans", sent.recv()).await.unwrap();
        let scopes = request.resource_spans.into_iter().flat_map(|spans| spans.scope_spans);
        spans.extend(scopes.flat_map(|scope| scope.spans));
    }

    let recovery = spans.iter().find(|span| span.name == "recovery").unwrap();
    assert!(text(&recovery.attributes, "baton.cause").contains("rank 1"), "{recovery:?}");
    assert_eq!(text(&recovery.attributes, "baton.generation"), "2");
    let parts: Vec<&Span> =
        spans.iter().filter(|span| span.parent_span_id == recovery.span_id).collect();
    let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
    assert_eq!(names, ["detect", "tear down", "respawn", "rendezvous", "restore", "first step"]);
    assert_eq!(parts[0].start_time_unix_nano, recovery.start_time_unix_nano);
    assert_eq!(parts[5].end_time_unix_nano, recovery.end_time_unix_nano);
    for pair in parts.windows(2) {
        assert_eq!(pair[0].end_time_unix_nano, pair[1].start_time_unix_nano);
    }
    // The current generation has not ended yet, but the previous one has.
    let generations: Vec<&Span> = spans.iter().filter(|span| span.name == "generation").collect();
    let [first] = generations[..] else { panic!("{generations:?}") };
    let names: Vec<&str> = first.events.iter().map(|event| event.name.as_str()).collect();
    assert!(names.contains(&"training_started") && names.contains(&"rank_failed"), "{names:?}");
}

#[tokio::test]
async fn a_missing_collector_is_logged_once_and_delays_nothing() {
    let mut cluster = Cluster::new();
    // Nothing listens on this port, because its listener is dropped.
    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    cluster.start_coordinator(&["--otlp-endpoint", &format!("http://{unused}")]).await;
    cluster.start_agent("node", 1);
    let (ended, _) = cluster.finish().await;

    let log = cluster.log("coordinator");
    assert!(ended.success(), "{log}");
    assert_eq!(log.matches("traces are lost until it accepts them").count(), 1, "{log}");
}
