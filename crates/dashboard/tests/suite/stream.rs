//! Tests of the stream, on virtual time.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{Request, Response, StatusCode},
};
use baton_dashboard::router;
use baton_proto::v1;
use http_body_util::BodyExt;
use serde_json::Value;
use tokio::time::{Instant, timeout};
use tonic::Status;
use tower::ServiceExt;

use crate::support::{Fake, event, line, step_point};

/// A client that reads the stream.
struct Client {
    body: Body,
    rest: String,
}

#[derive(Debug, Default)]
struct Message {
    name: String,
    id: Option<String>,
    data: Value,
    comment: bool,
}

async fn ask(router: &Router, path: &str, last: Option<&str>) -> Response<Body> {
    let mut request = Request::get(path);
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
}

async fn open(router: &Router, path: &str, last: Option<&str>) -> Client {
    let response = ask(router, path, last).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    Client { body: response.into_body(), rest: String::new() }
}

impl Client {
    /// The next message; `None` at the end.
    async fn next(&mut self) -> Option<Message> {
        loop {
            if let Some((block, rest)) = self.rest.split_once("\n\n") {
                let mut message = Message::default();
                for line in block.lines() {
                    match line.split_once(": ") {
                        Some(("event", name)) => message.name = name.into(),
                        Some(("id", id)) => message.id = Some(id.into()),
                        Some(("data", data)) => message.data = serde_json::from_str(data).unwrap(),
                        _ => message.comment = line.starts_with(':'),
                    }
                }
                self.rest = rest.to_owned();
                return Some(message);
            }
            let frame = self.body.frame().await?.unwrap().into_data().unwrap();
            self.rest += std::str::from_utf8(&frame).unwrap();
        }
    }

    /// The next message with this name.
    async fn next_of(&mut self, name: &str) -> Message {
        loop {
            let message = self.next().await.expect("the stream ended");
            if message.name == name {
                return message;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_gets_the_status_past_events_and_new_events() {
    let jobs = Arc::new(Fake::new());
    jobs.job().status.name = "digits".into();
    jobs.job().events.add(event(1, "began"));
    jobs.job().points.add(step_point(100, 1));
    let mut client = open(&router(Arc::clone(&jobs)), "/api/stream", None).await;

    assert_eq!(client.next().await.unwrap().data["name"], "digits");
    assert_eq!(client.next_of("event").await.data["message"], "began");
    assert_eq!(client.next_of("point").await.data["step"]["step"], 1);
    jobs.job().events.add(event(2, "line\nbreak"));
    assert_eq!(client.next_of("event").await.data["message"], "line\nbreak");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reconnects_gets_nothing_twice_and_misses_nothing() {
    let jobs = Arc::new(Fake::new());
    for number in 1..=4 {
        jobs.job().events.add(event(number, "event"));
    }
    // An evaluation may have the same time as its step.
    for (millis, step) in [(100, 1), (100, 2), (100, 3), (200, 4)] {
        jobs.job().points.add(step_point(millis, step));
    }
    let router = router(jobs);

    // Cut the connection after each message.
    for cut in 1..8 {
        let mut client = open(&router, "/api/stream", None).await;
        let (mut got, mut last, mut is_cut) = (Vec::new(), None, false);
        while got.len() < 8 {
            if got.len() == cut && !is_cut {
                is_cut = true;
                client = open(&router, "/api/stream", last.as_deref()).await;
            }
            let message = client.next().await.unwrap();
            match message.name.as_str() {
                "event" => got.push(("event", message.data["id"].as_u64().unwrap())),
                "point" => got.push(("point", message.data["step"]["step"].as_u64().unwrap())),
                _ => continue,
            }
            last = message.id;
        }
        got.sort_unstable();
        let expected = ["event", "point"].map(|name| (1..=4).map(move |number| (name, number)));
        assert_eq!(got, expected.into_iter().flatten().collect::<Vec<_>>(), "cut after {cut}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_query_gives_the_start() {
    let jobs = Arc::new(Fake::new());
    for number in 1..=3 {
        jobs.job().events.add(event(number, "event"));
        jobs.job().points.add(step_point(number * 100, number));
    }
    let mut client = open(&router(jobs), "/api/stream?after_event=2&after_metric=200", None).await;
    assert_eq!(client.next_of("event").await.data["id"], 3);
    assert_eq!(client.next_of("point").await.data["step"]["step"], 3);
}

#[tokio::test(start_paused = true)]
async fn the_status_is_sent_when_it_changes_and_not_because_time_passes() {
    let jobs = Arc::new(Fake::new());
    jobs.job().status.ranks = vec![v1::RankStatus::default()];
    let mut client = open(&router(Arc::clone(&jobs)), "/api/stream", None).await;
    client.next_of("status").await;

    let start = Instant::now();
    jobs.job().status.phase_seconds = 9.0;
    jobs.job().status.ranks[0].heartbeat_age_seconds = Some(9.0);
    let next = timeout(Duration::from_millis(8500), client.next()).await;
    assert!(next.is_err(), "{next:?}");
    assert!(client.next().await.unwrap().comment);
    assert_eq!(start.elapsed().as_secs(), 10);

    jobs.job().status.reason = "something else".into();
    assert_eq!(client.next_of("status").await.data["reason"], "something else");
    assert!(start.elapsed().as_secs() <= 11);
    // Sums change with time, and are sent every 30 s.
    client.next_of("status").await;
    assert!((39..=42).contains(&start.elapsed().as_secs()), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn lines_are_limited_to_a_hundred_per_second_and_dropped_ones_are_counted() {
    let jobs = Arc::new(Fake::new());
    let mut client = open(&router(Arc::clone(&jobs)), "/api/stream?logs=1", None).await;
    client.next_of("status").await;
    (0..1000).for_each(|number| jobs.job().lines.add(line(0, &number.to_string())));

    let first = client.next_of("log").await.data;
    assert_eq!((&first["line"], &first["left_out"]), (&"900".into(), &900.into()));
    for number in 901..1000 {
        assert_eq!(client.next_of("log").await.data["line"], number.to_string());
    }
}

#[tokio::test(start_paused = true)]
async fn lines_are_sent_only_on_request() {
    let jobs = Arc::new(Fake::new());
    jobs.job().lines.add(line(0, "private"));
    let mut client = open(&router(Arc::clone(&jobs)), "/api/stream", None).await;
    client.next_of("status").await;
    assert!(client.next().await.unwrap().comment);
}

#[tokio::test(start_paused = true)]
async fn the_stream_ends_with_the_coordinator() {
    let jobs = Arc::new(Fake::new());
    let mut client = open(&router(Arc::clone(&jobs)), "/api/stream?logs=1", None).await;
    client.next_of("status").await;
    jobs.job().disconnect();
    assert!(client.next().await.is_none());

    let jobs = Arc::new(Fake::new());
    let mut client = open(&router(Arc::clone(&jobs)), "/api/stream", None).await;
    client.next_of("status").await;
    jobs.job().failure = Some(Status::unavailable("shutting down"));
    assert!(client.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn an_invalid_cursor_or_one_of_another_job_is_refused() {
    let router = router(Arc::new(Fake::new()));
    for last in ["yesterday", "7.0.0"] {
        let response = ask(&router, "/api/stream", Some(last)).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{last}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_number_of_streams_is_limited() {
    let router = router(Arc::new(Fake::new()));
    let mut clients = Vec::new();
    for _ in 0..64 {
        clients.push(open(&router, "/api/stream", None).await);
    }
    let refused = ask(&router, "/api/stream", None).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    clients.pop();
    open(&router, "/api/stream", None).await;
}
