//! Tests of each route, with requests like those of a browser or a script.

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    http::{Method, Request, Response, StatusCode},
};
use baton_access::role::{RequiredAccess, required_access};
use baton_dashboard::{refusal, router, router_without_tokens};
use baton_proto::v1::{
    self, job_service_client::JobServiceClient, job_service_server::JobServiceServer,
};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tonic::{Code, Status, service::Routes, transport::Server};
use tower::ServiceExt;

use crate::support::{Fake, event, line, step_point};

const OWN: [(&str, &str); 2] = [("x-baton-request", "1"), ("content-type", "application/json")];

async fn call(jobs: &Arc<Fake>, request: Request<Body>) -> Response<Body> {
    router(Arc::clone(jobs)).oneshot(request).await.unwrap()
}

async fn get(jobs: &Arc<Fake>, path: &str) -> Response<Body> {
    call(jobs, Request::get(path).body(Body::empty()).unwrap()).await
}

async fn text(response: Response<Body>) -> String {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

async fn get_json(jobs: &Arc<Fake>, path: &str) -> (StatusCode, Value) {
    let response = get(jobs, path).await;
    (response.status(), serde_json::from_str(&text(response).await).unwrap())
}

async fn post(
    jobs: &Arc<Fake>,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Body>,
) -> (StatusCode, Value) {
    let mut request = Request::post(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = call(jobs, request.body(body.into()).unwrap()).await;
    (response.status(), serde_json::from_str(&text(response).await).unwrap())
}

#[tokio::test]
async fn the_page_and_all_its_files_are_served_with_a_strict_policy() {
    let jobs = Arc::new(Fake::new());
    let mut paths = vec!["/".to_owned()];
    let mut checked = 0;
    while let Some(path) = paths.get(checked).cloned() {
        checked += 1;
        let response = get(&jobs, &path).await;
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        let header = |name: &str| response.headers()[name].to_str().unwrap().to_owned();
        let policy = header("content-security-policy");
        for part in ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"] {
            assert!(policy.contains(part), "{path}: {policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(header("x-content-type-options"), "nosniff");
        assert_eq!(header("referrer-policy"), "no-referrer");
        assert_eq!(header("cache-control"), "no-cache");
        assert_eq!(required_access(&path), RequiredAccess::Nothing, "{path}");
        for word in text(response).await.split(['"', '\'']) {
            let found = match word.strip_prefix("./") {
                Some(module) => format!("/assets/{module}"),
                None => word.to_owned(),
            };
            let is_file = found.starts_with("/assets/") || found == "/favicon.svg";
            if is_file && !paths.contains(&found) {
                paths.push(found);
            }
        }
    }
    assert!(checked >= 9, "{paths:?}");
}

#[tokio::test]
async fn a_browser_with_a_current_copy_of_the_page_gets_not_modified() {
    let jobs = Arc::new(Fake::new());
    let tag = get(&jobs, "/").await.headers()["etag"].clone();
    let again =
        |tag: &str| Request::get("/").header("if-none-match", tag).body(Body::empty()).unwrap();

    let known = call(&jobs, again(&format!("\"other\", W/{}", tag.to_str().unwrap()))).await;
    assert_eq!(known.status(), StatusCode::NOT_MODIFIED);
    assert_eq!(known.headers()["etag"], tag);
    assert_eq!(call(&jobs, again("\"other\"")).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn the_status_has_the_json_of_the_command_line() {
    let jobs = Arc::new(Fake::new());
    jobs.job().status.name = "digits".into();
    jobs.job().status.set_phase(v1::get_status_response::Phase::Paused);
    let response = get(&jobs, "/api/status").await;
    assert_eq!(response.headers()["cache-control"], "no-store");
    assert_eq!(response.headers()["content-type"], "application/json");
    let status: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!((&status["name"], &status["phase"]), (&json!("digits"), &json!("paused")));
    assert_eq!(status["latest"], Value::Null);
}

#[tokio::test]
async fn points_events_and_lines_are_listed_from_the_requested_start() {
    let jobs = Arc::new(Fake::new());
    for number in 1..=3 {
        jobs.job().points.add(step_point(number * 100, number));
        jobs.job().events.add(event(number, "something"));
        jobs.job().lines.add(line(u32::try_from(number).unwrap() % 2, &format!("line {number}")));
    }
    let of = |listed: &Value, pointer: &str| -> Vec<Value> {
        listed.as_array().unwrap().iter().map(|one| one.pointer(pointer).unwrap().clone()).collect()
    };

    assert_eq!(of(&get_json(&jobs, "/api/metrics").await.1, "/step/step"), [1, 2, 3]);
    assert_eq!(of(&get_json(&jobs, "/api/metrics?after=200").await.1, "/step/step"), [3]);
    assert_eq!(of(&get_json(&jobs, "/api/events").await.1, "/id"), [1, 2, 3]);
    assert_eq!(of(&get_json(&jobs, "/api/events?after=1").await.1, "/id"), [2, 3]);
    assert_eq!(of(&get_json(&jobs, "/api/logs?tail=2").await.1, "/line"), ["line 2", "line 3"]);
    assert_eq!(of(&get_json(&jobs, "/api/logs?rank=1").await.1, "/line"), ["line 1", "line 3"]);
}

#[tokio::test]
async fn checkpoints_and_recipe_are_returned() {
    let jobs = Arc::new(Fake::new());
    jobs.job().checkpoints = vec![
        v1::CheckpointEntry {
            name: "step-2".into(),
            damage: "a file is gone".into(),
            ..Default::default()
        },
        v1::CheckpointEntry {
            name: "step-1".into(),
            complete: true,
            checkpoint: Some(v1::Checkpoint { step: 1, bytes: 9, ..Default::default() }),
            ..Default::default()
        },
    ];
    let (_, listed) = get_json(&jobs, "/api/checkpoints").await;
    assert_eq!(listed[0]["damage"], "a file is gone");
    assert_eq!(listed[0]["checkpoint"], Value::Null);
    assert_eq!(
        (&listed[1]["damage"], &listed[1]["checkpoint"]["bytes"]),
        (&Value::Null, &json!(9))
    );

    let (_, recipe) = get_json(&jobs, "/api/recipe").await;
    assert_eq!(recipe["recipe"]["train"]["epochs"], 16);
    assert_eq!(recipe["hash"], "c0ffee");
}

#[tokio::test]
async fn the_report_so_far_is_one_page_and_names_the_id_from_which_the_stream_goes_on() {
    let jobs = Arc::new(Fake::new());
    jobs.job().status.name = "digits".into();
    for number in 1..=3 {
        jobs.job().points.add(step_point(100, number));
        jobs.job().events.add(event(number, "something"));
    }

    let response = get(&jobs, "/api/report").await;

    assert_eq!(response.headers()["baton-cursor"], "3.100.3");
    assert_eq!(response.headers()["content-type"], "text/html; charset=utf-8");
    let policy = response.headers()["content-security-policy"].to_str().unwrap();
    assert!(
        policy.starts_with("default-src 'none';") && policy.ends_with("frame-ancestors 'none'")
    );
    let page = text(response).await;
    let (_, data) = page.split_once("id=\"report\">").unwrap();
    let data: Value = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    assert_eq!(data["status"]["name"], "digits");
    assert_eq!(data["points"][2]["step"]["step"], 3);
    assert_eq!(data["events"][2]["id"], 3);
}

#[tokio::test]
async fn an_error_of_the_job_has_its_code_and_its_message() {
    let jobs = Arc::new(Fake::new());
    for (code, expected) in [
        (Code::InvalidArgument, 400),
        (Code::OutOfRange, 400),
        (Code::Unauthenticated, 401),
        (Code::PermissionDenied, 403),
        (Code::FailedPrecondition, 409),
        (Code::ResourceExhausted, 429),
        (Code::Internal, 500),
        (Code::Unimplemented, 501),
        (Code::Unavailable, 503),
    ] {
        jobs.job().failure = Some(Status::new(code, "the problem"));
        let paths = ["status", "metrics", "checkpoints", "recipe", "events", "logs", "stream"];
        for path in paths.map(|path| format!("/api/{path}")) {
            let (status, body) = get_json(&jobs, &path).await;
            assert_eq!(
                (status.as_u16(), body),
                (expected, json!({"error": "the problem"})),
                "{path}"
            );
        }
        let (status, body) = post(&jobs, "/api/control/stop", &OWN, "").await;
        assert_eq!((status.as_u16(), body), (expected, json!({"error": "the problem"})));
    }
    let unknown = refusal(Status::unauthenticated("no token"));
    assert_eq!(unknown.headers()["www-authenticate"], "Bearer");
}

#[tokio::test]
async fn a_bad_query_gets_an_error_of_one_line() {
    let jobs = Arc::new(Fake::new());
    for path in [
        "/api/metrics?after=soon",
        "/api/events?after=-1",
        "/api/events?before=1",
        "/api/logs?tail=all",
        "/api/logs?rank=",
        "/api/stream?logs=yes",
    ] {
        let (status, body) = get_json(&jobs, path).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}");
        assert!(!body["error"].as_str().unwrap().contains('\n'), "{body}");
    }
}

#[tokio::test]
async fn an_operator_controls_the_job() {
    let jobs = Arc::new(Fake::new());
    for (path, body) in [
        ("checkpoint", ""),
        ("pause", r#"{"reason": "lunch"}"#),
        ("resume", "{}"),
        ("drain", r#"{"reason": "the end"}"#),
        ("stop", ""),
    ] {
        let answer = post(&jobs, &format!("/api/control/{path}"), &OWN, body).await;
        assert_eq!(answer, (StatusCode::ACCEPTED, json!({})), "{path}");
    }
    let requests = ["checkpoint", "pause lunch", "resume", "drain the end", "stop"];
    assert_eq!(jobs.job().requests, requests);
}

#[tokio::test]
async fn requests_from_another_site_change_nothing() {
    let jobs = Arc::new(Fake::new());
    let form = ("content-type", "application/x-www-form-urlencoded");
    let foreign =
        [&OWN[..], &[("host", "10.0.0.7:29600"), ("origin", "http://evil.example")]].concat();
    for action in ["checkpoint", "drain", "pause", "resume", "stop"] {
        let path = format!("/api/control/{action}");
        for headers in [&[][..], &[form], &[OWN[0], form], &OWN[1..], &foreign] {
            let (status, body) = post(&jobs, &path, headers, "{}").await;
            assert_eq!(status, StatusCode::FORBIDDEN, "{action} {headers:?}");
            assert!(body["error"].as_str().unwrap().contains("control"), "{body}");
        }
        let response = get(&jobs, &path).await;
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
    }
    assert_eq!(jobs.job().requests, [""; 0]);
}

#[tokio::test]
async fn a_bad_body_changes_nothing() {
    let jobs = Arc::new(Fake::new());
    for (body, expected) in [
        ("drain".to_owned(), StatusCode::BAD_REQUEST),
        (r#"{"reasons": "two"}"#.to_owned(), StatusCode::BAD_REQUEST),
        (r#"{"reason": 7}"#.to_owned(), StatusCode::BAD_REQUEST),
        (format!(r#"{{"reason": "{}"}}"#, "x".repeat(5000)), StatusCode::PAYLOAD_TOO_LARGE),
    ] {
        let (status, _) = post(&jobs, "/api/control/drain", &OWN, body).await;
        assert_eq!(status, expected);
    }
    assert_eq!(jobs.job().requests, [""; 0]);
}

#[tokio::test]
async fn without_tokens_requests_about_the_job_need_an_address_as_host() {
    let ask = async |host: &str, path: &str| {
        let request = Request::get(path).header("host", host).body(Body::empty()).unwrap();
        let router: Router = router_without_tokens(Arc::new(Fake::new()));
        router.oneshot(request).await.unwrap().status()
    };
    assert_eq!(ask("127.0.0.1:29600", "/api/status").await, StatusCode::OK);
    assert_eq!(ask("localhost:29600", "/api/status").await, StatusCode::OK);
    assert_eq!(ask("evil.example:29600", "/api/status").await, StatusCode::FORBIDDEN);
    assert_eq!(ask("evil.example:29600", "/api/control/stop").await, StatusCode::FORBIDDEN);
    assert_eq!(ask("127.0.0.1:29600", "/metrics").await, StatusCode::OK);
    assert_eq!(ask("evil.example:29600", "/metrics").await, StatusCode::FORBIDDEN);
    assert_eq!(ask("gpu.example:29600", "/").await, StatusCode::OK);
}

#[tokio::test]
async fn with_tokens_metrics_are_read_under_any_host_name() {
    let request = Request::get("/metrics").header("host", "gpu.example:29600");
    let response = call(&Arc::new(Fake::new()), request.body(Body::empty()).unwrap()).await;
    assert_eq!(response.status(), StatusCode::OK);
}

#[tokio::test]
async fn no_other_spelling_of_a_path_avoids_the_token_check() {
    let jobs = Arc::new(Fake::new());
    for path in
        ["/api/%63ontrol/stop", "/api//control/stop", "/api/./control/stop", "//api/control/stop"]
    {
        let request = Request::builder().method(Method::POST).uri(path);
        let request = request.header(OWN[0].0, OWN[0].1).header(OWN[1].0, OWN[1].1);
        let response = call(&jobs, request.body(Body::empty()).unwrap()).await;
        assert_eq!(response.status(), StatusCode::NOT_FOUND, "{path}");
    }
    assert_eq!(jobs.job().requests, [""; 0]);
}

#[tokio::test]
async fn one_port_serves_grpc_and_the_page() {
    let jobs = Arc::new(Fake::new());
    jobs.job().status.name = "digits".into();
    let mut routes = Routes::new(JobServiceServer::from_arc(Arc::clone(&jobs)));
    let merged = std::mem::take(routes.axum_router_mut()).merge(router(jobs));
    *routes.axum_router_mut() = merged;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = Server::builder().accept_http1(true).add_routes(routes);
    let server = tokio::spawn(
        server.serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)),
    );

    let mut client = JobServiceClient::connect(format!("http://{address}")).await.unwrap();
    let status = client.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.name, "digits");

    let mut browser = TcpStream::connect(address).await.unwrap();
    let request = format!("GET / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    browser.write_all(request.as_bytes()).await.unwrap();
    let mut page = String::new();
    browser.read_to_string(&mut page).await.unwrap();
    assert!(page.starts_with("HTTP/1.1 200 OK"), "{page}");
    assert!(page.ends_with("</html>\n"), "{page}");
    server.abort();
}
