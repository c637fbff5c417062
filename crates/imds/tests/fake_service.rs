//! The tests' metadata service answers like EC2's and like AWS's mock.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test's helpers may fail as loudly as the test"
)]

mod service;

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
};

use service::{INTERRUPTION, LIFECYCLE, REBALANCE, Service, Tokens};

const TOKEN: &str = "/latest/api/token";
const TTL_HEADER: &str = "X-aws-ec2-metadata-token-ttl-seconds: 60";

/// Sends one request; returns status and body of the response.
fn send(service: &Service, method: &str, path: &str, headers: &[&str]) -> (u16, String) {
    let mut socket = TcpStream::connect(service.address()).unwrap();
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    write!(socket, "{method} {path} HTTP/1.1\r\nHost: it\r\n{headers}\r\n").unwrap();
    socket.shutdown(Shutdown::Write).unwrap();
    let mut response = String::new();
    socket.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn token_header(service: &Service) -> String {
    let (status, token) = send(service, "PUT", TOKEN, &[TTL_HEADER]);
    assert_eq!(status, 200);
    format!("X-aws-ec2-metadata-token: {token}")
}

#[test]
fn token_lives_up_to_six_hours() {
    let service = Service::start();
    let status = |headers: &[&str]| send(&service, "PUT", TOKEN, headers).0;
    assert_eq!(status(&[]), 400);
    for (ttl, expected) in [("0", 400), ("1", 200), ("21600", 200), ("21601", 400), ("x", 400)] {
        let header = format!("X-AWS-EC2-metadata-token-TTL-seconds: {ttl}");
        assert_eq!(status(&[&header]), expected, "{ttl}");
    }
    assert_eq!(status(&[TTL_HEADER, "X-Forwarded-For: 10.0.0.1"]), 403);
    assert_eq!(send(&service, "GET", TOKEN, &[TTL_HEADER]).0, 405);
}

#[test]
fn documents_require_a_valid_token() {
    let service = Service::start();
    service.lifecycle("InService");
    assert_eq!(send(&service, "GET", LIFECYCLE, &[]).0, 401);
    assert_eq!(send(&service, "GET", LIFECYCLE, &["X-aws-ec2-metadata-token: other"]).0, 401);
    let token = token_header(&service);
    assert_eq!(send(&service, "GET", LIFECYCLE, &[&token]), (200, "InService".into()));
    service.forget_tokens();
    assert_eq!(send(&service, "GET", LIFECYCLE, &[&token]).0, 401);
}

#[test]
fn missing_document_is_a_404_page() {
    let service = Service::start();
    let token = token_header(&service);
    for path in [INTERRUPTION, REBALANCE, LIFECYCLE] {
        let (status, page) = send(&service, "GET", path, &[&token]);
        assert!(status == 404 && page.contains("<h1>404 - Not Found</h1>"), "{page}");
    }
}

#[test]
fn mock_requires_tokens_only_if_configured() {
    for (tokens, without, wrong) in [(Tokens::Required, 401, 401), (Tokens::Optional, 200, 401)] {
        let service = Service::start_as_mock(tokens);
        service.lifecycle("Terminated");
        assert_eq!(send(&service, "GET", LIFECYCLE, &[]).0, without);
        assert_eq!(send(&service, "GET", LIFECYCLE, &["X-aws-ec2-metadata-token: 1"]).0, wrong);
    }
}
