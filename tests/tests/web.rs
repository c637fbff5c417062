//! Tests of the web dashboard and metrics on the port of gRPC, and of malicious clients.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::fs;

use baton_job::exit;
use baton_proto::v1::{
    DrainRequest, GetStatusRequest, SubmitJobRequest, watch_events_response::Kind,
};
use baton_tests::{Cluster, in_time, skipped};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tonic::Code;

/// A response over HTTP/1.1: status, head and body.
struct HttpResponse {
    status: u16,
    head: String,
    body: String,
}

async fn connect(url: &str) -> TcpStream {
    TcpStream::connect(url.trim_start_matches("http://")).await.unwrap()
}

/// Sends a request like a browser, with these additional headers.
async fn ask(url: &str, method: &str, path: &str, headers: &[(&str, &str)]) -> HttpResponse {
    let mut stream = connect(url).await;
    let has_host = headers.iter().any(|(name, _)| *name == "host");
    let host = format!("host: {}\r\n", url.trim_start_matches("http://"));
    let mut request = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
    request.push_str(if has_host { "" } else { &host });
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    let body = if method == "POST" { "content-length: 2\r\n\r\n{}" } else { "\r\n" };
    stream.write_all((request + body).as_bytes()).await.unwrap();
    let mut text = Vec::new();
    in_time("an answer", stream.read_to_end(&mut text)).await.unwrap();
    let text = String::from_utf8_lossy(&text).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    HttpResponse { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

const CONTROL_HEADERS: [(&str, &str); 2] =
    [("x-baton-request", "1"), ("content-type", "application/json")];

#[tokio::test]
async fn a_browser_can_view_and_control_the_job_on_the_port_of_grpc() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.events().await.next_of(Kind::Saved).await;
    let url = cluster.url();

    let page = ask(&url, "GET", "/", &[]).await;
    assert_eq!(page.status, 200, "{}", page.head);
    assert!(page.body.contains("<html") && page.head.contains("content-security-policy"));
    let status = ask(&url, "GET", "/api/status", &[]).await;
    assert!(status.body.contains("\"name\":\"story\""), "{}", status.body);
    let metrics = ask(&url, "GET", "/metrics", &[]).await;
    assert!(metrics.body.contains("baton_phase{phase=\"training\"} 1"), "{}", metrics.body);

    let missing = ask(&url, "GET", "/nothing", &[]).await;
    assert!(
        missing.status == 404 && missing.body.contains("dashboard is at /"),
        "{}",
        missing.head
    );
    let grpc = [("content-type", "application/grpc")];
    let missing = ask(&url, "POST", "/baton.v1.Nothing/Call", &grpc).await;
    assert!(missing.head.contains("grpc-status: 12"), "{}", missing.head);

    // A page of another site cannot, whatever it makes a browser send.
    let crossed = ask(&url, "POST", "/api/control/drain", &CONTROL_HEADERS[1..]).await;
    assert_eq!(crossed.status, 403, "{}", crossed.body);
    let borrowed = ask(&url, "GET", "/api/status", &[("host", "evil.example")]).await;
    assert_eq!(borrowed.status, 403, "{}", borrowed.body);
    let headers = [("origin", "http://evil.example"), ("content-type", "application/grpc")];
    let grpc = ask(&url, "POST", "/baton.v1.JobService/Stop", &headers).await;
    assert!(grpc.head.contains("grpc-status: 7"), "{}", grpc.head);

    let drained = ask(&url, "POST", "/api/control/drain", &CONTROL_HEADERS).await;
    assert_eq!(drained.status, 202, "{}", drained.body);
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(i32::from(exit::DRAINED)));
}

#[tokio::test]
async fn with_tokens_the_page_is_public_its_data_is_for_viewers_and_control_is_for_operators() {
    let mut cluster = Cluster::endless();
    let tokens = cluster.recipe().with_file_name("tokens");
    fs::write(&tokens, "viewer viewers-token-0123456789\noperator operators-token-0123456789\n")
        .unwrap();
    fs::set_permissions(&tokens, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    cluster.start_coordinator(&["--tokens", tokens.to_str().unwrap()]).await;
    let url = cluster.url();
    let viewer = ("authorization", "Bearer viewers-token-0123456789");
    let operator = ("authorization", "Bearer operators-token-0123456789");

    assert_eq!(ask(&url, "GET", "/", &[]).await.status, 200);
    for path in ["/api/status", "/metrics"] {
        let unknown = ask(&url, "GET", path, &[]).await;
        assert_eq!(unknown.status, 401, "{path}: {}", unknown.body);
        assert!(unknown.head.contains("www-authenticate: bearer"), "{}", unknown.head);
        assert_eq!(ask(&url, "GET", path, &[viewer]).await.status, 200, "{path}");
    }
    let [own, kind] = CONTROL_HEADERS;
    let as_viewer = ask(&url, "POST", "/api/control/stop", &[viewer, own, kind]).await;
    assert_eq!(as_viewer.status, 403, "{}", as_viewer.body);
    assert!(as_viewer.body.contains("operator"), "{}", as_viewer.body);
    let stopped = ask(&url, "POST", "/api/control/stop", &[operator, own, kind]).await;
    assert_eq!(stopped.status, 202, "{}", stopped.body);
    cluster.finish().await;
}

/// Connects like a malicious client: sends nothing, the beginning of a request, or invalid bytes.
async fn connect_malicious(url: &str, number: usize) -> TcpStream {
    let mut stream = connect(url).await;
    let sent: &[u8] = match number % 3 {
        0 => b"",
        1 => b"POST /baton.v1.JobService/GetStatus HTTP/1.1\r\nhos",
        _ => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\xff\xff",
    };
    stream.write_all(sent).await.unwrap();
    stream
}

/// More than the limit of open files that systems set at first.
const CLIENTS: usize = 5_000;

/// Raises this process's limit of open files to what it may be.
fn raise_open_files() -> u64 {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    maximum.unwrap_or(u64::MAX)
}

#[tokio::test]
async fn idle_slow_and_oversized_clients_do_not_block_others() {
    let limit = raise_open_files();
    if limit < CLIENTS as u64 + 200 {
        return skipped(&format!(
            "too few open files: {limit} for {CLIENTS} clients; see ulimit -Hn"
        ));
    }
    // A limit of open files below the number of clients, like the default limit of a system.
    let mut cluster = Cluster::endless().with_open_files("-Sn 256");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.events().await.next_of(Kind::Saved).await;
    let url = cluster.url();

    let mut others = Vec::new();
    for number in 0..CLIENTS {
        others.push(connect_malicious(&url, number).await);
    }
    let oversized = SubmitJobRequest { recipe: "#".repeat(8 << 20), overrides: Vec::new() };
    let refused = cluster.client().await.submit_job(oversized).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");

    let step = |status: baton_proto::v1::GetStatusResponse| status.latest.map(|latest| latest.step);
    let before = step(cluster.status().await);
    let mut client = cluster.client().await;
    let continues = async || {
        let status = client.get_status(GetStatusRequest {}).await.unwrap().into_inner();
        (step(status) != before).then_some(())
    };
    cluster.until("training continues", continues).await;
    // The first client has sent nothing, so its connection is closed.
    let mut buffer = [0];
    let read = in_time("the idle connection is closed", others[0].read(&mut buffer)).await;
    assert_eq!(read.unwrap_or(0), 0);
    drop(others);
    cluster.client().await.drain(DrainRequest::default()).await.unwrap();
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(i32::from(exit::DRAINED)));
}

#[tokio::test]
async fn a_coordinator_at_its_connection_limit_logs_it_and_accepts_again_when_clients_disconnect() {
    let mut cluster = Cluster::endless().with_open_files("-n 100");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let mut events = cluster.events().await;
    events.next_of(Kind::Saved).await;
    let mut others = Vec::new();
    for number in 0..60 {
        others.push(connect_malicious(&cluster.url(), number).await);
    }
    let logged = async || cluster.log("coordinator").contains("new connections wait").then_some(());
    cluster.until("the coordinator logs it", logged).await;

    // Connected clients are not affected.
    events.next_of(Kind::Saved).await;
    drop(others);
    cluster.client().await.drain(DrainRequest::default()).await.unwrap();
    let (coordinator, _) = cluster.finish().await;

    assert_eq!(coordinator.code(), Some(i32::from(exit::DRAINED)));
    assert_eq!(cluster.log("coordinator").matches("new connections wait").count(), 1);
}
