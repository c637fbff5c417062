//! Tests that bad input gives one clear error line and exit code 2, and loses no data.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::{
    ffi::OsStr,
    fs,
    net::TcpListener,
    os::unix::{ffi::OsStrExt, fs::PermissionsExt},
    path::Path,
    process::Command,
};

use baton_job::{
    NodeId, exit,
    message::{AgentReport, Hello},
};
use baton_proto::v1::{
    self, Frame, node_service_client::NodeServiceClient, watch_events_response::Kind,
};
use baton_tests::{Cluster, binary, in_time};
use tonic::{Code, Status};
use tonic_types::StatusExt;

/// Runs a coordinator that must refuse to start; returns its error line.
fn refused(cluster: &Cluster, flags: &[&str]) -> String {
    let mut command = Command::new(binary("baton-coordinator"));
    command.arg("serve").arg("--recipe").arg(cluster.recipe());
    command.arg("--run-dir").arg(cluster.run_dir()).args(flags);
    if !flags.contains(&"--listen") {
        command.args(["--listen", "127.0.0.1:0"]);
    }
    let output = command.output().expect("the coordinator runs");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(i32::from(exit::BAD_INPUT)), "{stderr}");
    one_error_line(&stderr)
}

fn one_error_line(text: &str) -> String {
    assert!(!text.contains("panicked") && !text.contains("backtrace"), "{text}");
    let mut errors = text.lines().filter(|line| line.starts_with("error: "));
    let error = errors.next().unwrap_or_else(|| panic!("no error line in:\n{text}")).to_owned();
    assert_eq!(errors.next(), None, "more than one error line in:\n{text}");
    error
}

/// Runs a job that must fail because of its input; returns the coordinator's log.
async fn failed(cluster: &mut Cluster) -> String {
    failed_with(cluster, &[]).await
}

/// The same with flags of the coordinator.
async fn failed_with(cluster: &mut Cluster, flags: &[&str]) -> String {
    cluster.start_coordinator(flags).await;
    cluster.start_agent("node", 2);
    let (coordinator, agents) = cluster.finish().await;
    let log = cluster.log("coordinator");
    assert_eq!(coordinator.code(), Some(i32::from(exit::BAD_INPUT)), "{log}");
    assert_eq!(agents[0].code(), Some(i32::from(exit::BAD_INPUT)), "{}", cluster.log("agent"));
    assert!(!log.contains("panicked") && !cluster.log("rank-0").contains("panicked"));
    log
}

#[test]
fn error_names_an_unknown_recipe_key_and_its_line() {
    let cluster = Cluster::new();
    let text = fs::read_to_string(cluster.recipe()).unwrap();
    fs::write(cluster.recipe(), text.replace("seed = 7", "sead = 7")).unwrap();
    let error = refused(&cluster, &[]);
    assert!(error.contains("sead") && error.contains("line 3"), "{error}");
}

#[test]
fn an_error_on_a_full_disk_keeps_its_exit_code() {
    let cluster = Cluster::new();
    fs::remove_file(cluster.recipe()).unwrap();
    // Every write to this device fails, as the disk is full.
    let full = || fs::File::options().write(true).open("/dev/full").unwrap();
    let run_dir = cluster.run_dir();
    let mut coordinator = Command::new(binary("baton-coordinator"));
    coordinator.arg("serve").arg("--recipe").arg(cluster.recipe()).arg("--run-dir").arg(&run_dir);
    let mut agent = Command::new(binary("baton-worker"));
    agent.args(["agent", "--coordinator", "http://127.0.0.1:1", "--connect-seconds", "0.2"]);
    agent.args(["--ranks", "1", "--run-dir"]).arg(&run_dir);
    for (mut command, code) in [(coordinator, exit::BAD_INPUT), (agent, exit::FAILED)] {
        let status = command.stdout(full()).stderr(full()).status().unwrap();
        assert_eq!(status.code(), Some(i32::from(code)), "{command:?}");
    }
}

#[test]
fn error_names_a_missing_recipe() {
    let cluster = Cluster::new();
    fs::remove_file(cluster.recipe()).unwrap();
    assert!(refused(&cluster, &[]).contains("recipe.toml"));
}

#[test]
fn error_names_an_unwritable_checkpoint_folder() {
    let cluster = Cluster::new();
    let file = cluster.recipe().display().to_string();
    // A folder below a file cannot be created, not even by root.
    let error = refused(&cluster, &["--set", &format!("checkpoint.dir={file}/below")]);
    assert!(error.contains(&file) && error.contains("below"), "{error}");
    assert!(
        error.ends_with("a part of this path is a file: set checkpoint.dir to a folder"),
        "{error}"
    );
}

#[tokio::test]
async fn a_second_coordinator_of_a_run_folder_is_refused_with_and_without_a_recipe() {
    let mut cluster = Cluster::new();
    cluster.start_coordinator(&[]).await;
    let endpoint = fs::read(cluster.run_dir().join("coordinator.json")).unwrap();
    let mut idle = Command::new(binary("baton-coordinator"));
    idle.args(["serve", "--listen", "127.0.0.1:0", "--run-dir"]).arg(cluster.run_dir());
    let idle = idle.output().unwrap();
    assert_eq!(idle.status.code(), Some(i32::from(exit::BAD_INPUT)));
    let idle = one_error_line(&String::from_utf8_lossy(&idle.stderr));
    for error in [idle, refused(&cluster, &[])] {
        assert!(
            error.ends_with(
                "another coordinator is running on it; stop it, or give another --run-dir"
            ),
            "{error}"
        );
    }
    assert_eq!(fs::read(cluster.run_dir().join("coordinator.json")).unwrap(), endpoint);
}

#[test]
fn what_stands_in_the_place_of_the_metrics_is_named_once() {
    let cluster = Cluster::new();
    fs::create_dir_all(cluster.run_dir()).unwrap();
    fs::write(cluster.run_dir().join("tensorboard"), "").unwrap();
    let error = refused(&cluster, &[]);
    assert_eq!(error.matches("File exists").count(), 1, "{error}");
    assert!(error.ends_with("; move it away, or make the run folder writable"), "{error}");
}

#[test]
fn a_resume_from_what_is_no_checkpoint_is_refused_before_the_run_folder_is_changed() {
    let cluster = Cluster::new();
    let name = "step-0000000440-gen-000003";
    for (typed, problem) in [
        ("nosuch", "--resume: \"nosuch\" is not a checkpoint: give a name such as"),
        ("", "--resume: \"\" is not a checkpoint"),
        (name, "--resume: there is no checkpoint step-0000000440-gen-000003 in "),
    ] {
        let error = refused(&cluster, &["--resume", typed]);
        assert!(error.contains(problem), "{error}");
        assert!(!cluster.run_dir().join("journal.redb").exists(), "{error}");
    }
}

#[test]
fn error_names_a_port_in_use_and_a_remedy() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let cluster = Cluster::new();
    let error = refused(&cluster, &["--listen", &address]);
    assert!(error.contains(&address) && error.contains("--listen"), "{error}");
}

#[test]
fn too_few_open_files_are_refused_with_a_remedy() {
    let cluster = Cluster::new();
    let program = binary("baton-coordinator");
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 50 && exec \"$0\" serve --listen 127.0.0.1:0 --run-dir \"$1\""]);
    let output = limited.arg(program).arg(cluster.run_dir()).output().unwrap();
    assert_eq!(output.status.code(), Some(i32::from(exit::BAD_INPUT)));
    let error = one_error_line(&String::from_utf8_lossy(&output.stderr));
    assert!(error.contains("may open only 50 files") && error.contains("ulimit"), "{error}");
}

#[test]
fn a_run_folder_whose_path_is_not_text_is_refused() {
    let cluster = Cluster::new();
    let run_dir = cluster.run_dir().join(OsStr::from_bytes(b"\xff"));
    let mut coordinator = Command::new(binary("baton-coordinator"));
    coordinator.args(["serve", "--listen", "127.0.0.1:0"]);
    let mut agent = Command::new(binary("baton-worker"));
    agent.args(["agent", "--coordinator", "http://127.0.0.1:1", "--ranks", "1"]);
    for mut command in [coordinator, agent] {
        let output = command.arg("--run-dir").arg(&run_dir).output().unwrap();
        assert_eq!(output.status.code(), Some(i32::from(exit::BAD_INPUT)), "{output:?}");
        let error = one_error_line(&String::from_utf8_lossy(&output.stderr));
        assert!(error.contains("UTF-8"), "{error}");
    }
}

#[test]
fn address_reachable_from_other_machines_needs_a_flag() {
    let error = refused(&Cluster::new(), &["--listen", "0.0.0.0:0"]);
    assert!(error.contains("--insecure"), "{error}");
}

#[tokio::test]
async fn error_names_a_missing_data_file() {
    let mut cluster = Cluster::new().set("data.train=/nowhere/train.beton");
    assert!(failed(&mut cluster).await.contains("/nowhere/train.beton"));
}

#[tokio::test]
async fn error_names_a_truncated_data_file() {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/digits/digits-train.beton");
    let folder = tempfile::tempdir().unwrap();
    let truncated = folder.path().join("truncated.beton");
    fs::write(&truncated, &fs::read(whole).unwrap()[..40_000]).unwrap();
    let mut cluster = Cluster::new().set(&format!("data.train={}", truncated.display()));
    let log = failed(&mut cluster).await;
    assert!(log.contains("truncated.beton"), "{log}");
}

#[tokio::test]
async fn error_names_a_label_out_of_range_and_a_remedy() {
    let mut cluster = Cluster::new().set("model.num_classes=9");
    let log = failed(&mut cluster).await;
    assert!(log.contains("num_classes") && log.contains("label 9"), "{log}");
}

#[tokio::test]
async fn changed_recipe_does_not_continue_an_old_run() {
    let mut cluster = Cluster::new().set("train.epochs=1");
    let before = cluster.run_to_the_end(1).await;
    let error = refused(&cluster, &["--set", "train.epochs=1", "--set", "seed=8"]);
    assert!(error.contains("(seed: 7 → 8)") && error.contains("--no-auto-resume"), "{error}");
    assert!(cluster.newest_state() == before);
}

/// Starts a job with a store of its own; another job must not use that store without a flag, and the first goes on.
async fn store_of_another_job(mut healthy: Cluster, awaited: Kind, expected: &str) {
    let store = healthy.run_dir().with_file_name("store").display().to_string();
    healthy = healthy.set(&format!("checkpoint.dir={store}"));
    healthy.start_coordinator(&[]).await;
    healthy.start_agent("node", 1);
    let mut events = healthy.events().await;
    events.next_of(awaited).await;

    let intruder = Cluster::new();
    let dir = format!("checkpoint.dir={store}");
    let change = ["--set", &dir, "--set", "name=other", "--set", "seed=8"];
    let error = refused(&intruder, &change);
    for part in [expected, "seed: 7 → 8", "checkpoint.dir", "--no-auto-resume"] {
        assert!(error.contains(part), "{part} is missing in {error}");
    }
    let (coordinator, agents) = healthy.finish().await;
    let log = healthy.log("coordinator");
    assert!(coordinator.success() && agents[0].success(), "{log}");
    assert!(!log.contains("taken over"), "{log}");
}

#[tokio::test]
async fn the_store_of_a_job_of_another_recipe_is_refused_and_that_job_goes_on() {
    store_of_another_job(Cluster::new(), Kind::Saved, "is used by job `story` (run folder ").await;
}

#[tokio::test]
async fn a_store_without_a_checkpoint_yet_belongs_to_the_job_that_opened_it() {
    let never = Cluster::new().set("checkpoint={ every_epochs=0, every_steps=0 }");
    store_of_another_job(never, Kind::TrainingStarted, "is used by job `story`").await;
}

#[tokio::test]
async fn checkpoints_of_a_job_that_used_the_store_later_are_not_taken_for_those_of_the_run() {
    let mut first = Cluster::new().set("train.epochs=1");
    first.run_to_the_end(1).await;
    let own = first.checkpoint_names().into_iter().max().unwrap();
    let store = first.run_dir().join("checkpoints");
    let mut other = Cluster::new().set("train.epochs=1").set("seed=8").set("name=other");
    other = other.set(&format!("checkpoint.dir={}", store.display()));
    other.start_coordinator(&["--no-auto-resume"]).await;
    other.start_agent("node", 1);
    let (coordinator, _) = other.finish().await;
    assert!(coordinator.success(), "{}", other.log("coordinator"));
    let newest =
        first.checkpoint_names().into_iter().max_by_key(|name| name.contains("gen-000002"));
    assert!(newest.unwrap() != own);

    for (run, expected) in [(&first, "gen-000001"), (&other, "gen-000002")] {
        let out = run.run_dir().join("weights.safetensors");
        let mut export = Command::new(binary("baton"));
        export.args(["checkpoint", "export", "--json", "--run-dir"]).arg(run.run_dir());
        let exported = export.arg("--out").arg(&out).output().unwrap();
        let text = String::from_utf8_lossy(&exported.stdout);
        assert!(exported.status.success() && text.contains(expected), "{text}");
    }
    first = first.set("train.epochs=2");
    let error = refused(&first, &["--allow-recipe-change"]);
    for part in ["generation 2 by job `other`", "checkpoint.dir", "--resume"] {
        assert!(error.contains(part), "{part} is missing in {error}");
    }
}

#[tokio::test]
async fn a_store_of_an_older_version_is_known_by_its_newest_checkpoint() {
    let mut cluster = Cluster::new().set("train.epochs=1");
    cluster.run_to_the_end(1).await;
    let store = cluster.run_dir().join("checkpoints");
    for fence in fs::read_dir(store.join("fences")).unwrap() {
        fs::write(fence.unwrap().path(), "0d6e2f6e-2ad5-4a52-8df5-7a6f5a3a7e1c\n").unwrap();
    }
    let dir = format!("checkpoint.dir={}", store.display());
    let error = refused(&Cluster::new(), &["--set", &dir, "--set", "seed=8"]);
    assert!(error.contains("of job `story`") && error.contains("has checkpoint step-"), "{error}");
}

#[tokio::test]
async fn a_job_whose_checkpoints_are_gone_or_damaged_is_not_begun_again() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.end().await;
    let store = cluster.run_dir().join("checkpoints");
    let away = cluster.run_dir().join("away");

    fs::rename(&store, &away).unwrap();
    let log = failed(&mut cluster).await;
    assert!(log.contains("has no checkpoint, but this job has saved step-"), "{log}");

    fs::remove_dir_all(&store).unwrap();
    fs::rename(&away, &store).unwrap();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;

    for name in cluster.checkpoint_names() {
        fs::write(store.join(name).join("manifest.json"), "damaged").unwrap();
    }
    let log = failed(&mut cluster).await;
    assert!(log.contains("are damaged") && log.contains("--no-auto-resume"), "{log}");

    fs::remove_dir_all(&store).unwrap();
    cluster = cluster.set("seed=8");
    let log = failed_with(&mut cluster, &["--allow-recipe-change"]).await;
    assert!(log.contains("mount its disk"), "{log}");
}

#[tokio::test]
async fn after_a_change_that_does_not_fit_the_recipe_from_before_goes_on() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.events().await.saved_at(1).await;
    cluster.end().await;

    cluster = cluster.set("train.resolution=16");
    let log = failed_with(&mut cluster, &["--allow-recipe-change"]).await;
    assert!(log.contains("step-"), "{log}");

    cluster = cluster.set("train.resolution=8");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let started = cluster.new_events().await.next_of(Kind::TrainingStarted).await;
    assert!(started.message.contains("from checkpoint step-"), "{}", started.message);
    cluster.end().await;
    cluster.assert_undisturbed_bits().await;
}

#[tokio::test]
async fn the_same_recipe_continues_in_a_new_run_folder() {
    let mut lost = Cluster::new().set("train.epochs=1");
    let state = lost.run_to_the_end(1).await;
    let dir = format!("checkpoint.dir={}", lost.run_dir().join("checkpoints").display());
    let mut cluster = Cluster::new().set("train.epochs=1").set(&dir);
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let (coordinator, _) = cluster.finish().await;
    assert!(coordinator.success(), "{}", cluster.log("coordinator"));
    assert!(lost.newest_state() == state);
}

#[test]
fn agent_without_a_coordinator_fails_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let output = Command::new(binary("baton-worker"))
        .args(["agent", "--coordinator", &format!("http://{free}"), "--connect-seconds", "0.2"])
        .args(["--ranks", "1", "--run-dir"])
        .arg(folder.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(i32::from(exit::FAILED)));
    let error = one_error_line(&String::from_utf8_lossy(&output.stderr));
    assert!(error.contains("--coordinator"), "{error}");
}

#[test]
fn errors_name_invalid_flags() {
    let folder = tempfile::tempdir().unwrap();
    let refuse = |program: &str, arguments: &[&str], expected: &str| {
        let mut command = Command::new(binary(program));
        let output = command.args(arguments).arg("--run-dir").arg(folder.path()).output().unwrap();
        let error = one_error_line(&String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(i32::from(exit::BAD_INPUT)), "{error}");
        assert!(error.contains(expected), "{error}");
    };
    let agent = ["agent", "--ranks", "1", "--coordinator"];
    for seconds in ["nan", "1e300"] {
        let flag = format!("--connect-seconds={seconds}");
        refuse("baton-worker", &[&agent[..], &["127.0.0.1:1", &flag]].concat(), "0..86400 seconds");
        let flag = format!("--linger-seconds={seconds}");
        refuse("baton-coordinator", &["serve", &flag], "0..86400 seconds");
    }
    refuse("baton-worker", &[&agent[..], &["ftp://host"]].concat(), "begin with http://");
}

#[test]
fn errors_name_invalid_certificates_and_tokens() {
    let cluster = Cluster::new();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.display().to_string()
    };
    let (none, empty) =
        (file("none.pem", "hello"), file("empty.pem", "-----BEGIN CERTIFICATE-----\n"));
    let tls = |file: &str| refused(&cluster, &["--tls-cert", file, "--tls-key", file]);
    assert!(tls(&none).contains("none.pem: is not a PEM file"), "{}", tls(&none));
    let unusable = tls(&empty);
    assert!(
        unusable.contains("empty.pem and --tls-key") && unusable.contains("cannot be used"),
        "{unusable}"
    );
    let open = refused(&cluster, &["--listen", "0.0.0.0:0"]);
    assert!(open.contains("baton cert") && open.contains("--insecure"), "{open}");
    let tokens = refused(&cluster, &["--tokens", &file("tokens", "viewer short\n")]);
    assert!(tokens.contains("tokens: line 1") && !tokens.contains("short"), "{tokens}");
}

/// Sends these frames as an agent, and then nothing more. Returns the coordinator's error, or the number of messages
/// that it sent before it closed the stream.
async fn send_frames(cluster: &Cluster, frames: &[Frame]) -> Result<usize, Status> {
    let mut client = NodeServiceClient::new(cluster.channel().await);
    let frames = tokio_stream::iter(frames.to_vec());
    // The stream stays open, like that of an agent.
    let frames = tokio_stream::StreamExt::chain(frames, tokio_stream::pending());
    let mut answers = client.attach(frames).await?.into_inner();
    let mut received = 0;
    while let Some(_directive) = in_time("an answer", answers.message()).await? {
        received += 1;
    }
    Ok(received)
}

#[tokio::test]
async fn invalid_messages_of_agents_get_a_clear_error_and_do_not_affect_others() {
    let mut cluster = Cluster::new();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.events().await.next_of(Kind::Saved).await;
    let hello = Hello::new(NodeId("stranger".to_owned()), 1, None);
    let hello = Frame::report(&AgentReport::Hello(hello), "").unwrap();
    let frame = |json: &str| Frame { json: json.into(), ..hello.clone() };
    let wrong = [
        ("{", "EOF"),
        (r#"{"heartbeat":{"number":1}}"#, "must be the first message"),
        (r#"{"hello":{"node":"","slots":1}}"#, "names no node"),
        (r#"{"hello":{"node":"a"}}"#, "missing field `slots`"),
        (r#"{"hello":{"node":"a","slots":4294967295}}"#, "at most 1024 are allowed: lower --ranks"),
        (
            r#"{"hello":{"node":"a","slots":1,"running":{"generation":1,"ranks":[[0,"asleep"]]}}}"#,
            "unknown variant `asleep`",
        ),
    ];
    for (json, problem) in wrong {
        let refused = send_frames(&cluster, &[frame(json)]).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains(problem), "{refused}");
        let named = refused.get_details_bad_request().unwrap().field_violations;
        assert_eq!(named[0].field, "hello", "{refused}");
    }
    let old = v1::Hello { version: "0.0.9".to_owned(), ..v1::Hello::default() };
    for (hello, version) in [(Some(old), "baton-worker 0.0.9"), (None, "of an unknown version")] {
        let refused = send_frames(&cluster, &[Frame { hello, ..frame("") }]).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains(version), "{refused}");
        assert!(refused.message().contains("install the same version"), "{refused}");
    }

    let line = v1::LogLine { line: "x".to_owned(), number: 1, ..v1::LogLine::default() };
    let shipped = v1::ShipLogsRequest {
        node_id: "n".repeat(60_000),
        agent: "a".to_owned(),
        lines: vec![line],
    };
    let mut client = NodeServiceClient::new(cluster.channel().await);
    let refused = client.ship_logs(tokio_stream::iter([shipped])).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("at most 253 are allowed"), "{refused}");

    // A valid hello, and then an unknown report: the coordinator closes the stream.
    let report = r#"{"rank":{"generation":1,"rank":0,"report":{"kind":"unknown_report"}}}"#;
    let received = send_frames(&cluster, &[hello.clone(), frame(report)]).await.unwrap();
    assert!(received > 0);
    assert!(cluster.log("coordinator").contains("malformed message"));

    let (ended, agents) = cluster.finish().await;
    assert!(ended.success() && agents[0].success(), "{}", cluster.log("coordinator"));
}

#[test]
fn a_doctor_finds_no_problem_on_a_machine_that_trains_and_one_in_a_folder_without_files() {
    let folder = tempfile::tempdir().unwrap();
    let doctor = |run_dir: &Path| {
        let mut command = Command::new(binary("baton"));
        let output = command.args(["doctor", "--json", "--run-dir"]).arg(run_dir).output().unwrap();
        let lines = String::from_utf8(output.stdout).unwrap();
        let checks: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        (output.status.code(), checks)
    };
    let (code, checks) = doctor(&folder.path().join("runs"));
    let names: Vec<&str> = checks.iter().filter_map(|check| check["check"].as_str()).collect();
    // Machines with GPUs have NCCL too.
    for name in ["programs", "libtorch", "processor", "memory", "GPUs", "run folder", "clock"] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert!(checks.iter().all(|check| check["verdict"] != "problem"), "{checks:?}");
    assert_eq!((code, fs::read_dir(folder.path()).unwrap().count()), (Some(0), 0));

    let (code, checks) = doctor(Path::new("/proc"));
    let check = checks.iter().find(|check| check["check"] == "run folder").unwrap();
    assert_eq!((code, &check["verdict"]), (Some(2), &"problem".into()), "{check}");
}
