//! The tests' own metadata service answers as EC2's and AWS's mock do.
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
const LIFE: &str = "X-aws-ec2-metadata-token-ttl-seconds: 60";

/// The status and the body of the answer to one request.
fn ask(service: &Service, method: &str, path: &str, headers: &[&str]) -> (u16, String) {
    let mut socket = TcpStream::connect(service.address()).unwrap();
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    write!(socket, "{method} {path} HTTP/1.1\r\nHost: it\r\n{headers}\r\n").unwrap();
    socket.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn token_header(service: &Service) -> String {
    let (status, token) = ask(service, "PUT", TOKEN, &[LIFE]);
    assert_eq!(status, 200);
    format!("X-aws-ec2-metadata-token: {token}")
}

#[test]
fn token_is_given_for_a_life_of_up_to_six_hours() {
    let service = Service::start();
    let status = |headers: &[&str]| ask(&service, "PUT", TOKEN, headers).0;
    assert_eq!(status(&[]), 400);
    for (life, expected) in [("0", 400), ("1", 200), ("21600", 200), ("21601", 400), ("x", 400)] {
        let header = format!("X-AWS-EC2-metadata-token-TTL-seconds: {life}");
        assert_eq!(status(&[&header]), expected, "{life}");
    }
    assert_eq!(status(&[LIFE, "X-Forwarded-For: 10.0.0.1"]), 403);
    assert_eq!(ask(&service, "GET", TOKEN, &[LIFE]).0, 405);
}

#[test]
fn documents_need_a_token_that_is_known() {
    let service = Service::start();
    service.lifecycle("InService");
    assert_eq!(ask(&service, "GET", LIFECYCLE, &[]).0, 401);
    assert_eq!(ask(&service, "GET", LIFECYCLE, &["X-aws-ec2-metadata-token: other"]).0, 401);
    let token = token_header(&service);
    assert_eq!(ask(&service, "GET", LIFECYCLE, &[&token]), (200, "InService".into()));
    service.forget_tokens();
    assert_eq!(ask(&service, "GET", LIFECYCLE, &[&token]).0, 401);
}

#[test]
fn document_that_is_not_there_is_a_page() {
    let service = Service::start();
    let token = token_header(&service);
    for path in [INTERRUPTION, REBALANCE, LIFECYCLE] {
        let (status, page) = ask(&service, "GET", path, &[&token]);
        assert!(status == 404 && page.contains("<h1>404 - Not Found</h1>"), "{page}");
    }
}

#[test]
fn mock_asks_for_tokens_only_if_they_are_required() {
    for (tokens, without, wrong) in [(Tokens::Required, 401, 401), (Tokens::Optional, 200, 401)] {
        let service = Service::start_as_mock(tokens);
        service.lifecycle("Terminated");
        assert_eq!(ask(&service, "GET", LIFECYCLE, &[]).0, without);
        assert_eq!(ask(&service, "GET", LIFECYCLE, &["X-aws-ec2-metadata-token: 1"]).0, wrong);
    }
}
