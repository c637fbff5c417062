//! Tests of access: TLS, tokens and roles.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    str::FromStr,
};

use baton_access::{
    AccessRole, ClientCredentials, TlsFiles, Token,
    role::{RequiredAccess, required_access},
};
use baton_job::exit;
use baton_proto::DESCRIPTORS;
use baton_tests::{Cluster, binary, children, interrupt, kill};
use prost::Message;
use prost_types::FileDescriptorSet;
use serde_json::Value;
use tonic::{Code, Request, client::Grpc, codegen::http::uri::PathAndQuery, transport::Endpoint};
use tonic_prost::ProstCodec;

/// The output of `baton cert`.
fn certs(folder: &Path) -> PathBuf {
    let certs = folder.join("certs");
    let output =
        Command::new(binary("baton")).arg("cert").arg("--out").arg(&certs).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    certs
}

fn credentials(certs: &Path, token: Option<&Token>) -> ClientCredentials {
    let tls_ca = Some(certs.join("ca.pem"));
    TlsFiles { tls_ca, ..TlsFiles::default() }.credentials(token).unwrap()
}

fn token_of(certs: &Path, role: AccessRole) -> Token {
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

/// The paths of all calls of a coordinator; the one that ends the job is the last.
fn calls() -> Vec<String> {
    let files = [DESCRIPTORS, tonic_health::pb::FILE_DESCRIPTOR_SET];
    let files = files.map(|set| FileDescriptorSet::decode(set).unwrap().file).concat();
    let mut calls: Vec<String> = Vec::new();
    for file in &files {
        for service in &file.service {
            for method in &service.method {
                let call = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                // Watch does not answer an empty message.
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

/// The code of the answer to an empty message.
async fn call(url: &str, path: &str, credentials: &ClientCredentials) -> Code {
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
async fn every_call_is_refused_without_a_token_with_a_wrong_one_and_with_one_of_a_lower_role() {
    let folder = tempfile::tempdir().unwrap();
    let certs = certs(folder.path());
    let mut cluster = Cluster::new();
    // With TLS and tokens it may listen on all addresses.
    let mut flags = secured(&certs);
    flags.extend(["--listen".to_owned(), "0.0.0.0:0".to_owned()]);
    cluster.start_coordinator(&flags.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let url = cluster.url().replace("0.0.0.0", "127.0.0.1");

    let wrong = Token::new("an-unknown-access-token").unwrap();
    for path in calls() {
        let RequiredAccess::Role(needed) = required_access(&path) else {
            assert_eq!(call(&url, &path, &credentials(&certs, None)).await, Code::Ok, "{path}");
            continue;
        };
        for token in [None, Some(&wrong)] {
            let code = call(&url, &path, &credentials(&certs, token)).await;
            assert_eq!(code, Code::Unauthenticated, "{path} with {token:?}");
        }
        for role in AccessRole::ALL.into_iter().filter(|role| !role.covers(needed)) {
            let code = call(&url, &path, &credentials(&certs, Some(&token_of(&certs, role)))).await;
            assert_eq!(code, Code::PermissionDenied, "{path} as {role}");
        }
        if path.ends_with("/Stop") {
            // The last call ends the job.
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

/// A job with TLS, client certificates and tokens, started by one command.
#[tokio::test]
async fn a_job_of_one_command_can_be_seen_and_controlled_only_with_the_right_role() {
    let folder = tempfile::tempdir().unwrap();
    let certs = certs(folder.path());
    let cluster = Cluster::endless();
    let mut flags = secured(&certs);
    flags.extend(["--tls-client-ca".to_owned(), certs.join("ca.pem").display().to_string()]);
    let [ca, cert, key] = ["ca.pem", "client.pem", "client-key.pem"].map(|name| certs.join(name));
    let client = [
        ("BATON_TLS_CA", ca.as_path()),
        ("BATON_TLS_CERT", cert.as_path()),
        ("BATON_TLS_KEY", key.as_path()),
    ];
    let mut up = cluster.up(&flags, &client);
    let run_dir = cluster.run_dir().display().to_string();
    let ask = |arguments: &[&str], with: &[(&str, &Path)]| {
        baton(&[arguments, &["--run-dir", &run_dir]].concat(), with)
    };
    let [viewer, operator] =
        [AccessRole::Viewer, AccessRole::Operator].map(|role| certs.join(format!("{role}.token")));
    let as_viewer = [&client[..], &[("BATON_TOKEN_FILE", viewer.as_path())]].concat();
    let as_operator = [&client[..], &[("BATON_TOKEN_FILE", operator.as_path())]].concat();
    let trains = async || {
        let status = ask(&["status"], &as_viewer).stdout;
        String::from_utf8_lossy(&status).contains("ranks train").then_some(())
    };
    cluster.until("the job trains", trains).await;

    let without_token = ask(&["status"], &client);
    assert_eq!(without_token.status.code(), Some(i32::from(exit::BAD_INPUT)));
    assert!(stderr(&without_token).contains("BATON_TOKEN_FILE"), "{}", stderr(&without_token));
    let without_trust = ask(&["status"], &as_viewer[3..]);
    assert!(stderr(&without_trust).contains("--tls-ca"), "{}", stderr(&without_trust));
    let with_lower_role = ask(&["drain"], &as_viewer);
    assert_eq!(with_lower_role.status.code(), Some(i32::from(exit::BAD_INPUT)));
    assert!(stderr(&with_lower_role).contains("operator"), "{}", stderr(&with_lower_role));

    // Neither processes nor logs nor the status show a secret.
    let secrets = AccessRole::ALL.map(|role| token_of(&certs, role).reveal().to_owned());
    let has_secret = |text: &str| secrets.iter().any(|secret| text.contains(secret));
    for process in baton_tests::descendants(up.id().unwrap()) {
        let line = fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        assert!(!has_secret(&line), "{line}");
        if line.contains("\0rank\0") {
            let environment = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
            assert!(!has_secret(&String::from_utf8_lossy(&environment)), "a rank needs no token");
        }
    }
    let status = ask(&["status", "--json"], &as_viewer);
    assert!(!has_secret(&String::from_utf8_lossy(&status.stdout)));

    let drained = ask(&["drain"], &as_operator);
    assert!(drained.status.success(), "{}", stderr(&drained));
    let ended = baton_tests::in_time("the job ends", up.wait()).await.unwrap();
    assert_eq!(ended.code(), Some(i32::from(exit::DRAINED)));
    for log in fs::read_dir(cluster.run_dir().join("logs")).unwrap() {
        let text = fs::read_to_string(log.unwrap().path()).unwrap();
        assert!(!has_secret(&text), "a token is in the logs");
    }
}

/// `baton up` with an endless job that saves only in its end, whose coordinator is killed once other files are in place of
/// some of its own.
struct ReplacedFiles {
    cluster: Cluster,
    up: tokio::process::Child,
    certs: PathBuf,
    others: PathBuf,
    url: String,
    _folders: [tempfile::TempDir; 2],
}

impl ReplacedFiles {
    async fn new(names: &[&str]) -> Self {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [certs, others] = folders.each_ref().map(|folder| certs(folder.path()));
        let cluster = Cluster::endless().set("checkpoint.every_epochs=1000000");
        let ca = certs.join("ca.pem");
        let up = cluster.up(&secured(&certs), &[("BATON_TLS_CA", ca.as_path())]);
        let trains =
            async || cluster.log("up").contains("training from fresh weights").then_some(());
        cluster.until("the job trains", trains).await;
        let endpoint = fs::read(cluster.run_dir().join("coordinator.json")).unwrap();
        let endpoint: Value = serde_json::from_slice(&endpoint).unwrap();
        let url = format!("https://{}", endpoint["address"].as_str().unwrap());

        for name in names {
            fs::copy(others.join(name), certs.join(name)).unwrap();
        }
        let command =
            |pid: &u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut coordinators = children(up.id().unwrap()).into_iter();
        kill(coordinators.find(|pid| command(pid).contains("baton-coordinator")).unwrap());
        Self { cluster, up, certs, others, url, _folders: folders }
    }

    /// `baton` with an authority and a token.
    fn baton(&self, command: &[&str], ca: &Path, token: &Path) -> std::process::Output {
        let ca = ca.display().to_string();
        let flags = [command, &["--coordinator", &self.url, "--tls-ca", &ca]].concat();
        baton(&flags, &[("BATON_TOKEN_FILE", token)])
    }

    /// Waits until the new coordinator serves the first generation in this phase.
    async fn is(&self, phase: &str, ca: &Path, token: &Path) {
        let is = async || {
            let status = self.baton(&["status", "--json"], ca, token).stdout;
            let status: Value = serde_json::from_slice(&status).unwrap_or_default();
            (status["phase"] == phase && status["generation"] == 1).then_some(())
        };
        self.cluster.until(&format!("the coordinator is {phase}"), is).await;
    }

    async fn says_that_it_is_cut_off(&self) {
        let says =
            async || self.cluster.log("up").contains("Ctrl-C saves their state").then_some(());
        self.cluster.until("`baton up` says that it is cut off", says).await;
    }

    /// `baton up` ends, and the state is saved.
    async fn ends_with_a_checkpoint(mut self) {
        let ended = baton_tests::in_time("`baton up` ends", self.up.wait()).await.unwrap();
        let log = self.cluster.log("up");
        assert_eq!(ended.code(), Some(i32::from(exit::DRAINED)), "{log}");
        assert_eq!(self.cluster.checkpoint_names().len(), 1, "{log}");
    }
}

#[tokio::test]
async fn a_job_whose_tokens_were_replaced_goes_on_with_the_new_ones() {
    let job = ReplacedFiles::new(&["tokens"]).await;
    let (ca, token) = (job.certs.join("ca.pem"), job.others.join("operator.token"));
    job.is("training", &ca, &token).await;
    let drained = job.baton(&["drain"], &ca, &token);
    assert!(drained.status.success(), "{}", stderr(&drained));
    job.ends_with_a_checkpoint().await;
}

#[tokio::test]
async fn a_drain_by_a_coordinator_whose_certificate_nobody_trusts_any_more_saves_the_state() {
    let job = ReplacedFiles::new(&["coordinator.pem", "coordinator-key.pem"]).await;
    job.says_that_it_is_cut_off().await;
    let (ca, token) = (job.others.join("ca.pem"), job.certs.join("operator.token"));
    // Before, it waits for the agent's return.
    job.is("gathering", &ca, &token).await;
    let drained = job.baton(&["drain"], &ca, &token);
    assert!(drained.status.success(), "{}", stderr(&drained));
    job.ends_with_a_checkpoint().await;
}

#[tokio::test]
async fn up_that_is_cut_off_from_its_coordinator_saves_without_it() {
    let job = ReplacedFiles::new(&["coordinator.pem", "coordinator-key.pem"]).await;
    job.says_that_it_is_cut_off().await;
    interrupt(job.up.id().unwrap());
    job.ends_with_a_checkpoint().await;
}

#[tokio::test]
async fn with_tls_another_node_takes_over_and_refuses_and_accepts_the_same_tokens() {
    let (folder, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let certs = certs(folder.path());
    let file = |name: &str| certs.join(name).display().to_string();
    let mut cluster = Cluster::endless()
        .set("checkpoint.every_steps=50")
        .set(&format!("checkpoint.dir={}", store.path().display()));
    let mut flags = secured(&certs);
    flags.extend(["--host", "127.0.0.1"].map(str::to_owned));
    cluster.start_coordinator(&flags.iter().map(String::as_str).collect::<Vec<_>>()).await;
    flags.extend(["--tls-ca".to_owned(), file("ca.pem")]);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let token = [("BATON_TOKEN_FILE".to_owned(), file("agent.token"))];
    for node in ["a", "b"] {
        cluster.start_agent_with(node, 1, &flags, &token);
    }
    let ask = |arguments: &[&str], role: Option<AccessRole>| {
        let store = store.path().display().to_string();
        let token = role.map(|role| certs.join(format!("{role}.token")));
        let token: Vec<_> = token.iter().map(|path| ("BATON_TOKEN_FILE", path.as_path())).collect();
        let trust = ["--store", &store, "--tls-ca", &file("ca.pem")];
        baton(&[arguments, &trust].concat(), &token)
    };
    let step = async |cluster: &Cluster| {
        let status = ask(&["status", "--json"], Some(AccessRole::Viewer)).stdout;
        let status: Value = serde_json::from_slice(&status).ok()?;
        let is_renewed = cluster.lease().is_some_and(|lease| lease.renewals > 1);
        let trains = status["phase"] == "training" && status["ranks"].as_array()?.len() == 2;
        if trains && is_renewed { status["latest"]["step"].as_u64() } else { None }
    };
    let before = cluster.until("all train", async || step(&cluster).await).await;
    let first = cluster.lease().unwrap().number;
    cluster.kill_coordinator().await;

    let other = async || cluster.lease().filter(|lease| lease.number > first);
    let lease = cluster.until("another coordinator takes over", other).await;
    assert!(lease.address.as_ref().unwrap().starts_with("https://"), "{lease:?}");
    let later = async || step(&cluster).await.filter(|step| *step > before);
    cluster.until("the ranks train on", later).await;
    for (role, problem) in [(None, "BATON_TOKEN_FILE"), (Some(AccessRole::Viewer), "operator")] {
        let refused = ask(&["drain"], role);
        assert_eq!(refused.status.code(), Some(i32::from(exit::BAD_INPUT)), "{refused:?}");
        assert!(stderr(&refused).contains(problem), "{}", stderr(&refused));
    }
    let drained = ask(&["drain"], Some(AccessRole::Operator));
    assert!(drained.status.success(), "{}", stderr(&drained));
    for _ in 0..2 {
        let ended = cluster.agent_ends(0).await;
        assert_eq!(ended.code(), Some(i32::from(exit::DRAINED)), "{}", cluster.log("agent"));
    }
}

/// A job that saves only in its end, whose coordinator was started again with tokens of which its agent has none.
struct Retokened {
    cluster: Cluster,
    certs: PathBuf,
    /// The new tokens.
    others: PathBuf,
    store: String,
    _folders: [tempfile::TempDir; 3],
}

impl Retokened {
    async fn new() -> Self {
        let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let [certs, others] = [0, 1].map(|number| certs(folders[number].path()));
        // Outside of the run folder, so that the coordinator has a lease.
        let store = folders[2].path().display().to_string();
        let mut cluster = Cluster::endless()
            .set("checkpoint.every_epochs=0")
            .set(&format!("checkpoint.dir={store}"));
        let mut flags = secured(&certs);
        cluster.start_coordinator(&flags.iter().map(String::as_str).collect::<Vec<_>>()).await;
        let ca = certs.join("ca.pem").display().to_string();
        let token = certs.join("agent.token").display().to_string();
        let environment = [("BATON_TOKEN_FILE".to_owned(), token)];
        cluster.start_agent_with("a", 1, &["--tls-ca", &ca], &environment);
        let found = Self { cluster, certs, others, store, _folders: folders };
        let trains = async || found.trains("viewer", &found.certs).then_some(());
        found.cluster.until("the job trains", trains).await;

        let Self { mut cluster, certs, others, store, _folders } = found;
        cluster.kill_coordinator().await;
        fs::copy(others.join("tokens"), certs.join("tokens")).unwrap();
        flags.extend(cluster.same_address());
        cluster.start_coordinator(&flags.iter().map(String::as_str).collect::<Vec<_>>()).await;
        let refused =
            async || cluster.log("agent").contains("does not know that token").then_some(());
        cluster.until("the agent is refused", refused).await;
        Self { cluster, certs, others, store, _folders }
    }

    fn ask(&self, arguments: &[&str], token: &Path) -> Output {
        let ca = self.certs.join("ca.pem").display().to_string();
        let url = self.cluster.url();
        let at = ["--coordinator", &url, "--tls-ca", &ca];
        baton(&[arguments, &at].concat(), &[("BATON_TOKEN_FILE", token)])
    }

    fn checkpoints(&self) -> usize {
        let names = fs::read_dir(&self.store).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with("step-")).count()
    }

    fn trains(&self, role: &str, tokens: &Path) -> bool {
        let status = self.ask(&["status", "--json"], &tokens.join(format!("{role}.token")));
        let status: Value = serde_json::from_slice(&status.stdout).unwrap_or_default();
        status["phase"] == "training" && status["latest"]["step"].as_u64() > Some(0)
    }
}

#[tokio::test]
async fn an_agent_whose_token_was_replaced_takes_part_again_with_the_state_of_its_ranks() {
    let job = Retokened::new().await;
    let ranks = job.cluster.rank_pids(0);
    fs::copy(job.others.join("agent.token"), job.certs.join("agent.token")).unwrap();
    let trains = async || job.trains("viewer", &job.others).then_some(());
    job.cluster.until("the coordinator has its rank again", trains).await;
    assert_eq!(job.cluster.rank_pids(0), ranks);
}

#[tokio::test]
async fn ranks_that_a_drain_cannot_reach_learn_from_the_store_that_the_job_has_ended_and_save() {
    let mut job = Retokened::new().await;
    let operator = job.others.join("operator.token");
    let waits = async || {
        let status = job.ask(&["status", "--json"], &operator).stdout;
        let status: Value = serde_json::from_slice(&status).unwrap_or_default();
        (status["phase"] == "gathering").then_some(())
    };
    job.cluster.until("the coordinator waits for agents", waits).await;
    assert_eq!(job.checkpoints(), 0);
    let drained = job.ask(&["drain"], &operator);
    assert!(drained.status.success(), "{}", stderr(&drained));
    let (code, log) = job.cluster.coordinator_ends().await;
    assert_eq!(code, Some(i32::from(exit::DRAINED)));
    assert!(log.contains("agents that still run and read the checkpoint store"), "{log}");
    let ended = job.cluster.agent_ends(0).await;
    assert_eq!(ended.code(), Some(i32::from(exit::DRAINED)), "{}", job.cluster.log("agent"));
    assert_eq!(job.checkpoints(), 1, "{}", job.cluster.log("agent"));
}

#[tokio::test]
async fn a_wrong_client_certificate_is_named_as_such() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [known, unknown] = folders.each_ref().map(|folder| certs(folder.path()));
    let file = |folder: &Path, name: &str| folder.join(name).display().to_string();
    let mut cluster = Cluster::new();
    let mut flags = secured(&known);
    flags.extend(["--tls-client-ca".to_owned(), file(&known, "ca.pem")]);
    cluster.start_coordinator(&flags.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let url = cluster.url();
    let (ca, token) = (file(&known, "ca.pem"), known.join("viewer.token"));
    let ask = |client: &[&str]| {
        let status = ["status", "--coordinator", &url, "--tls-ca", &ca];
        let ended =
            baton(&[&status[..], client].concat(), &[("BATON_TOKEN_FILE", token.as_path())]);
        assert_eq!(ended.status.code(), Some(i32::from(exit::BAD_INPUT)), "{ended:?}");
        stderr(&ended)
    };

    let (cert, key) = (file(&unknown, "client.pem"), file(&unknown, "client-key.pem"));
    let error = ask(&["--client-cert", &cert, "--client-key", &key]);
    assert!(error.contains("refuses the certificate of --client-cert"), "{error}");
    let error = ask(&[]);
    assert!(error.contains("your own certificate with --client-cert"), "{error}");
    let other_key = file(&known, "client-key.pem");
    let error = ask(&["--client-cert", &cert, "--client-key", &other_key]);
    assert!(error.contains(&cert) && error.contains(&other_key), "{error}");

    // An agent does not take it for a missing coordinator, and ends at once.
    let token = token_of(&known, AccessRole::Agent).reveal().to_owned();
    let mut agent = std::process::Command::new(baton_tests::binary("baton-worker"));
    agent.args(["agent", "--coordinator", &url, "--connect-seconds", "600", "--tls-ca", &ca]);
    agent.args(["--client-cert", &cert, "--client-key", &key, "--run-dir"]).arg(cluster.run_dir());
    let ended = agent.env("BATON_TOKEN", token).output().unwrap();
    assert_eq!(ended.status.code(), Some(i32::from(exit::BAD_INPUT)), "{ended:?}");
    assert!(stderr(&ended).contains("refuses the certificate of --client-cert"), "{ended:?}");
}

#[test]
fn a_tls_handshake_that_never_finishes_times_out() {
    // The kernel accepts the connection, but there is no answer.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", silent.local_addr().unwrap());
    let ended = baton(&["status", "--coordinator", &url], &[]);
    assert_eq!(ended.status.code(), Some(i32::from(exit::FAILED)), "{ended:?}");
    assert!(stderr(&ended).contains(&url), "{}", stderr(&ended));
}
