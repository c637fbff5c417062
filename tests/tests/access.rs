//! Who may do what: TLS, tokens and roles.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failed test may say so loudly"
)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    str::FromStr,
};

use baton_access::{
    Credentials, Role, TlsFiles, Token,
    role::{Need, need_of},
};
use baton_job::exit;
use baton_proto::DESCRIPTORS;
use baton_tests::{Cluster, binary};
use prost::Message;
use prost_types::FileDescriptorSet;
use tonic::{Code, Request, client::Grpc, codegen::http::uri::PathAndQuery, transport::Endpoint};
use tonic_prost::ProstCodec;

/// What `baton cert` makes.
fn certs(folder: &Path) -> PathBuf {
    let certs = folder.join("certs");
    let made = Command::new(binary("baton")).arg("cert").arg("--out").arg(&certs).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    certs
}

fn credentials(certs: &Path, token: Option<&Token>) -> Credentials {
    let tls_ca = Some(certs.join("ca.pem"));
    TlsFiles { tls_ca, ..TlsFiles::default() }.credentials(token).unwrap()
}

fn token_of(certs: &Path, role: Role) -> Token {
    Token::read(&certs.join(format!("{role}.token"))).unwrap()
}

/// Flags for a coordinator with TLS and tokens.
fn secured(certs: &Path) -> Vec<String> {
    let file = |name: &str| certs.join(name).display().to_string();
    [
        ("--tls-cert", file("coordinator.pem")),
        ("--tls-key", file("coordinator-key.pem")),
        ("--tokens", file("tokens")),
    ]
    .into_iter()
    .flat_map(|(flag, file)| [flag.to_owned(), file])
    .collect()
}

/// All calls of a coordinator, by their paths; the one that ends it comes last.
fn calls() -> Vec<String> {
    let files = [DESCRIPTORS, tonic_health::pb::FILE_DESCRIPTOR_SET];
    let files = files.map(|set| FileDescriptorSet::decode(set).unwrap().file).concat();
    let mut calls: Vec<String> = Vec::new();
    for file in &files {
        for service in &file.service {
            for method in &service.method {
                let call = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                // It answers when the client has said all, and this one says nothing.
                if !call.ends_with("Health/Watch") {
                    calls.push(call);
                }
            }
        }
    }
    calls.sort_by_key(|call| call.ends_with("/Drain"));
    assert!(calls.len() >= 8, "{calls:?}");
    calls
}

/// How an empty message is answered.
async fn call(url: &str, path: &str, credentials: &Credentials) -> Code {
    let endpoint = credentials.secure(Endpoint::from_str(url).unwrap()).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let service =
        tonic::service::interceptor::InterceptedService::new(channel, credentials.bearer());
    let mut client = Grpc::new(service);
    client.ready().await.unwrap();
    let path = PathAndQuery::from_str(path).unwrap();
    let codec = ProstCodec::<(), ()>::default();
    match client.server_streaming(Request::new(()), path, codec).await {
        Ok(_) => Code::Ok,
        Err(status) => status.code(),
    }
}

#[tokio::test]
async fn every_call_is_refused_without_a_token_with_a_wrong_one_and_with_a_lesser_one() {
    let folder = tempfile::tempdir().unwrap();
    let certs = certs(folder.path());
    let mut cluster = Cluster::new();
    // So guarded it may serve everywhere.
    let mut flags = secured(&certs);
    flags.extend(["--listen".to_owned(), "0.0.0.0:0".to_owned()]);
    cluster.start_coordinator(&flags.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let url = cluster.url().replace("http://0.0.0.0", "https://127.0.0.1");

    let wrong = Token::new("somebody-elses-token").unwrap();
    for path in calls() {
        let Need::Role(needed) = need_of(&path) else {
            assert_eq!(call(&url, &path, &credentials(&certs, None)).await, Code::Ok, "{path}");
            continue;
        };
        for token in [None, Some(&wrong)] {
            let code = call(&url, &path, &credentials(&certs, token)).await;
            assert_eq!(code, Code::Unauthenticated, "{path} with {token:?}");
        }
        for role in Role::ALL.into_iter().filter(|role| !role.covers(needed)) {
            let code = call(&url, &path, &credentials(&certs, Some(&token_of(&certs, role)))).await;
            assert_eq!(code, Code::PermissionDenied, "{path} as {role}");
        }
        if path.ends_with("/Stop") {
            // One end is enough.
            continue;
        }
        let code = call(&url, &path, &credentials(&certs, Some(&token_of(&certs, needed)))).await;
        let refused = [Code::Unauthenticated, Code::PermissionDenied];
        assert!(!refused.contains(&code), "{path} as {needed}: {code:?}");
    }
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(i32::from(exit::DRAINED)), "the last call was a drain");
}

/// Runs a command of the CLI against a coordinator.
fn baton(arguments: &[&str], variables: &[(&str, &Path)]) -> Output {
    let mut command = Command::new(binary("baton"));
    command.args(arguments).envs(variables.iter().copied()).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A job with everything that keeps strangers out, started by one command.
#[tokio::test]
async fn a_job_of_one_command_is_seen_and_steered_only_by_who_may() {
    let folder = tempfile::tempdir().unwrap();
    let certs = certs(folder.path());
    let cluster = Cluster::endless();
    let mut flags = secured(&certs);
    flags.extend(["--tls-client-ca".to_owned(), certs.join("ca.pem").display().to_string()]);
    let [ca, cert, key] = ["ca.pem", "client.pem", "client-key.pem"].map(|name| certs.join(name));
    let ours = [
        ("BATON_TLS_CA", ca.as_path()),
        ("BATON_TLS_CERT", cert.as_path()),
        ("BATON_TLS_KEY", key.as_path()),
    ];
    let mut up = cluster.up(&flags, &ours);
    let run_dir = cluster.run_dir().display().to_string();
    let ask = |arguments: &[&str], with: &[(&str, &Path)]| {
        baton(&[arguments, &["--run-dir", &run_dir]].concat(), with)
    };
    let [viewer, operator] =
        [Role::Viewer, Role::Operator].map(|role| certs.join(format!("{role}.token")));
    let as_viewer = [&ours[..], &[("BATON_TOKEN_FILE", viewer.as_path())]].concat();
    let as_operator = [&ours[..], &[("BATON_TOKEN_FILE", operator.as_path())]].concat();
    baton_tests::in_time("it trains", async {
        while !String::from_utf8_lossy(&ask(&["status"], &as_viewer).stdout).contains("ranks train")
        {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    })
    .await;

    let without_token = ask(&["status"], &ours);
    assert_eq!(without_token.status.code(), Some(i32::from(exit::BAD_INPUT)));
    assert!(stderr(&without_token).contains("BATON_TOKEN_FILE"), "{}", stderr(&without_token));
    let without_trust = ask(&["status"], &as_viewer[3..]);
    assert!(stderr(&without_trust).contains("--tls-ca"), "{}", stderr(&without_trust));
    let lesser = ask(&["drain"], &as_viewer);
    assert_eq!(lesser.status.code(), Some(i32::from(exit::BAD_INPUT)));
    assert!(stderr(&lesser).contains("operator"), "{}", stderr(&lesser));

    // Nobody who looks at processes, logs or the status finds a secret.
    let secrets = Role::ALL.map(|role| token_of(&certs, role).reveal().to_owned());
    let told = |text: &str| secrets.iter().any(|secret| text.contains(secret));
    for process in baton_tests::descendants(up.id().unwrap()) {
        let line = fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        assert!(!told(&line), "{line}");
        if line.contains("\0rank\0") {
            let environment = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
            assert!(!told(&String::from_utf8_lossy(&environment)), "a rank needs no token");
        }
    }
    let status = ask(&["status", "--json"], &as_viewer);
    assert!(!told(&String::from_utf8_lossy(&status.stdout)));

    let drained = ask(&["drain"], &as_operator);
    assert!(drained.status.success(), "{}", stderr(&drained));
    let ended = baton_tests::in_time("it ends", up.wait()).await.unwrap();
    assert_eq!(ended.code(), Some(i32::from(exit::DRAINED)));
    for log in fs::read_dir(cluster.run_dir().join("logs")).unwrap() {
        let text = fs::read_to_string(log.unwrap().path()).unwrap();
        assert!(!told(&text), "a token is in the logs");
    }
}

#[test]
fn a_peer_that_never_finishes_a_tls_handshake_is_given_up() {
    // The kernel takes the connection; nobody answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", silent.local_addr().unwrap());
    let ended = baton(&["status", "--coordinator", &url], &[]);
    assert_eq!(ended.status.code(), Some(i32::from(exit::FAILED)), "{ended:?}");
    assert!(stderr(&ended).contains(&url), "{}", stderr(&ended));
}
