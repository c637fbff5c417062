//! Commands that call a coordinator, tested with a fake one.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod fake;
#[allow(dead_code, reason = "each file uses only some of the statuses")]
#[path = "../src/testing.rs"]
mod testing;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    process::{Child, ChildStdout, Command, Output, Stdio},
};

use baton_proto::v1::{
    GetRecipeResponse, RecordProfileResponse, StreamLogsResponse, WatchEventsResponse,
    watch_events_response::Kind,
};
use fake::{FakeCoordinator, FakeState};

fn training() -> FakeState {
    FakeState {
        status: testing::training(),
        events: testing::events(),
        points: testing::points(),
        lines: testing::lines(),
        ..FakeState::default()
    }
}

fn command(fake: &FakeCoordinator, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(arguments).args(["--coordinator", &fake.address().to_string()]);
    command
}

fn baton(fake: &FakeCoordinator, arguments: &[&str]) -> Output {
    command(fake, arguments).output().unwrap()
}

fn stdout(fake: &FakeCoordinator, arguments: &[&str]) -> String {
    let output = baton(fake, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Starts a command that keeps running, and returns its output.
fn follow(fake: &FakeCoordinator, arguments: &[&str]) -> (Child, BufReader<ChildStdout>) {
    let mut child = command(fake, arguments).stdout(Stdio::piped()).spawn().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    (child, output)
}

fn next_line(output: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

#[test]
fn pause_and_resume_show_the_job_and_send_the_reason() {
    let fake = FakeCoordinator::start(training());
    let output = stdout(&fake, &["pause", "--reason", "the GPUs are needed"]);
    let job = format!("digits_cpu at http://{} (--coordinator)", fake.address());
    let expected = format!("{job}: pausing after the current step; `baton resume` continues\n");
    assert_eq!(output, expected);
    assert_eq!(stdout(&fake, &["resume"]), format!("{job}: training resumes\n"));
    assert_eq!(fake.requests(), ["pause: the GPUs are needed", "resume"]);
}

/// A rank's part of a profile, in pieces.
fn part_of_profile(rank: u32) -> impl Iterator<Item = RecordProfileResponse> {
    let span = |name: &str, ts: u32, dur: u32| {
        format!(
            r#"{{"name":"{name}","ph":"X","cat":"baton","pid":{rank},"tid":1,"ts":{ts},"dur":{dur},"args":{{"step":7}}}}"#
        )
    };
    let spans = [span("gradient", 0, 60_000), span("step", 0, 100_000)].join(",");
    let info = format!(
        r#"{{"rank":{rank},"node":"a","began_unix_nanos":1,"first_step":7,"last_step":7,"left_out":{rank}}}"#
    );
    let json = format!(r#"{{"baton":{info},"traceEvents":[{spans}]}}"#).into_bytes();
    let pieces: Vec<Vec<u8>> = json.chunks(50).map(<[u8]>::to_vec).collect();
    pieces.into_iter().map(move |data| RecordProfileResponse { part: rank, data })
}

#[test]
fn a_profile_is_one_file_of_all_ranks_and_shows_where_the_time_of_a_step_goes() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("slow.json");
    let profile = (0..2).flat_map(part_of_profile).collect();
    let fake = FakeCoordinator::start(FakeState { profile, ..training() });
    let arguments = ["profile", "--steps", "3", "--out", out.to_str().unwrap()];
    let shown = stdout(&fake, &arguments);
    let expected = format!(
        "rank 0: 1 step of 100.0 ms: gradient 60.0 %, other 40.0 %\n\
         rank 1: 1 step of 100.0 ms: gradient 60.0 %, other 40.0 %\n\
         warning: rank 1: 1 span left out, as there were too many: record fewer steps\n\
         {}: open it on https://ui.perfetto.dev\n",
        out.display()
    );
    assert_eq!(shown, expected);
    assert_eq!(fake.requests(), ["profile of 3 steps"]);
    let written: serde_json::Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    let of_rank = |rank: u32| {
        let events = written["traceEvents"].as_array().unwrap().iter();
        events.filter(|event| event["pid"] == rank && event["ph"] == "X").count()
    };
    assert_eq!((of_rank(0), of_rank(1)), (2, 2));

    // A profile is replaced.
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&fake, &[&arguments[..], &["--json"]].concat())).unwrap();
    assert_eq!(json["ranks"][1]["parts"][0]["name"], "gradient");
    // Other files are not, and nothing is recorded for nothing.
    std::fs::write(&out, "{}").unwrap();
    let refused = baton(&fake, &arguments);
    assert_eq!(refused.status.code(), Some(2));
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(message.contains("is not a profile") && message.contains("--out"), "{message}");
    let missing = folder.path().join("missing/slow.json");
    let refused = baton(&fake, &["profile", "--out", missing.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(2));
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(message.contains("there is no folder") && message.contains("--out"), "{message}");
    assert_eq!(fake.requests().len(), 2);
}

#[test]
fn a_request_that_changes_the_job_answers_as_json_with_the_job() {
    let fake = FakeCoordinator::start(training());
    let job = format!("digits_cpu at http://{} (--coordinator)", fake.address());
    for (arguments, request) in [
        (&["pause"][..], "pause"),
        (&["resume"], "resume"),
        (&["checkpoint", "now"], "checkpoint"),
        (&["drain", "--reason", "noon"], "drain"),
        (&["stop"], "stop"),
    ] {
        let output = stdout(&fake, &[arguments, &["--json"]].concat());
        let output: serde_json::Value = serde_json::from_str(&output).unwrap();
        assert_eq!(output, serde_json::json!({ "request": request, "job": job }));
    }
    assert_eq!(
        fake.requests(),
        ["pause: `baton pause`", "resume", "checkpoint", "drain: noon", "stop"]
    );
}

#[test]
fn a_refusal_is_one_line() {
    let refusal = Some(tonic::Status::failed_precondition("the job is not paused"));
    let fake = FakeCoordinator::start(FakeState { refusal, ..training() });
    let output = baton(&fake, &["resume"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "error: the job is not paused\n");
}

#[test]
fn http_to_a_port_with_tls_is_answered_with_the_right_url() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let _ = client.read(&mut [0; 1_024]);
            // RFC 8446, 5.1 and 6: the record of a fatal alert, "protocol version".
            let _ = client.write_all(&[21, 3, 3, 0, 2, 2, 70]);
        }
    });
    let url = format!("http://{address}");
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["status", "--coordinator", &url])
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains(&format!("if this port speaks TLS, use https://{address}")), "{error}");
    assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1));
}

#[test]
fn events_prints_past_events() {
    let fake = FakeCoordinator::start(training());
    let output = stdout(&fake, &["events"]);
    assert_eq!(output.lines().count(), testing::events().len(), "{output}");
    let output = stdout(&fake, &["events", "--after", "4", "-n", "2", "--json"]);
    let ids: Vec<serde_json::Value> = output
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["id"].clone())
        .collect();
    assert_eq!(ids, [6, 7]);
}

#[test]
fn logs_prints_the_given_ranks_and_with_all_every_writer() {
    let fake = FakeCoordinator::start(training());
    let output = stdout(&fake, &["logs"]);
    let expected = "rank 0 │ took the state of rank 2\n\
                    rank 2 │ … 812 lines left out\nrank 2 │ slow disk\n\
                    rank 1 │ restored in 0.1 s\n";
    assert_eq!(output, expected);
    assert_eq!(stdout(&fake, &["logs", "0"]), "rank 0 │ took the state of rank 2\n");
    assert_eq!(stdout(&fake, &["logs", "-n", "1"]), "rank 1 │ restored in 0.1 s\n");
    let all = stdout(&fake, &["logs", "--all"]);
    assert!(all.starts_with("coordinator │ generation 2 is open\nagent a │ rank 1 was"), "{all}");
    let output = stdout(&fake, &["logs", "2", "--json"]);
    let output: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!((&output["rank"], &output["left_out"]), (&2.into(), &812.into()));
}

#[test]
fn followed_logs_continue_after_a_restart_and_end_with_the_job() {
    let line = |unix_millis| StreamLogsResponse {
        unix_millis,
        node_id: "a".to_owned(),
        local_rank: Some(0),
        rank: Some(0),
        line: format!("line {unix_millis}"),
        left_out: 0,
    };
    let lines = |count| (1..=count).map(line).collect::<Vec<_>>();
    let fake = FakeCoordinator::start(FakeState { lines: lines(3), ..training() });
    let (mut child, mut output) = follow(&fake, &["logs", "--follow", "--tail", "2"]);
    assert_eq!(next_line(&mut output), "rank 0 │ line 2");
    assert_eq!(next_line(&mut output), "rank 0 │ line 3");
    fake.update(|state| state.lines.push(line(4)));
    assert_eq!(next_line(&mut output), "rank 0 │ line 4");

    let address = fake.address();
    drop(fake);
    let fake = FakeCoordinator::start_at(address, FakeState { lines: lines(6), ..training() });
    assert_eq!(next_line(&mut output), "rank 0 │ line 5");
    assert_eq!(next_line(&mut output), "rank 0 │ line 6");
    fake.update(|state| {
        state.lines.push(line(7));
        state.status = testing::completed();
    });
    assert_eq!(next_line(&mut output), "rank 0 │ line 7");
    assert_eq!(next_line(&mut output), "");
    assert!(child.wait().unwrap().success());
}

/// An event after those of [`training`].
fn event(id: u64, kind: Kind, message: &str) -> WatchEventsResponse {
    let message = message.to_owned();
    WatchEventsResponse { id, kind: kind.into(), message, ..testing::events()[0].clone() }
}

/// Starts `baton watch` with flags, and reads the events of [`training`].
fn watch(fake: &FakeCoordinator, flags: &[&str]) -> (Child, BufReader<ChildStdout>) {
    let mut command = command(fake, &[&["watch"], flags].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    testing::events().iter().for_each(|event| {
        let line = next_line(&mut output);
        assert!(line.contains(&event.message), "{line}");
    });
    (child, output)
}

#[test]
fn a_watch_follows_a_coordinator_that_comes_back_until_the_job_ends() {
    let fake = FakeCoordinator::start(training());
    let (mut child, mut output) = watch(&fake, &[]);
    let mut notes = BufReader::new(child.stderr.take().unwrap());
    let mut note = || {
        let mut line = String::new();
        notes.read_line(&mut line).unwrap();
        line
    };
    let address = fake.address();
    drop(fake);
    let expected = format!(
        "http://{address} (--coordinator) is not reachable, retrying for 10 min 00 s; the job may still run\n"
    );
    assert_eq!(note(), expected);

    let mut state = training();
    state.events.push(event(8, Kind::TrainingStarted, "training continues"));
    let fake = FakeCoordinator::start_at(address, state);
    assert_eq!(note(), format!("http://{address} is reachable again\n"));
    assert!(next_line(&mut output).contains("training continues"));
    fake.update(|state| {
        state.events.push(event(9, Kind::Ended, "completed"));
        state.status = testing::completed();
    });
    assert!(next_line(&mut output).contains("completed"));
    assert_eq!(next_line(&mut output), "");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_coordinator_that_stays_away_is_not_the_end_of_the_job_even_after_the_end_of_an_earlier_run() {
    let mut state = training();
    state.events.push(event(8, Kind::Ended, "saved and stopped"));
    // The job was resumed, but the next event has not come yet.
    let fake = FakeCoordinator::start(state);
    let (child, mut output) = watch(&fake, &["--retry-seconds", "1"]);
    assert!(next_line(&mut output).contains("saved and stopped"));
    drop(fake);
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    let last = error.lines().last().unwrap();
    assert!(last.starts_with("error: no coordinator answers at http://127.0.0.1:"), "{error}");
    assert!(last.ends_with("; continue later with --after 8"), "{error}");
}

#[test]
fn a_coordinator_that_leaves_after_the_end_of_its_job_ends_the_watch() {
    let fake = FakeCoordinator::start(training());
    let (mut child, mut output) = watch(&fake, &[]);
    fake.update(|state| {
        state.status_refusal = Some(tonic::Status::unavailable("gone"));
        state.events.push(event(8, Kind::Ended, "failed"));
        state.events.push(event(9, Kind::NodeLost, "node vm left"));
    });
    assert!(next_line(&mut output).contains("failed"));
    assert!(next_line(&mut output).contains("node vm left"));
    assert_eq!(next_line(&mut output), "");
    assert_eq!(child.wait().unwrap().code(), Some(0), "whatever the outcome is");
}

#[test]
fn a_watch_of_a_job_that_has_ended_prints_its_events_and_ends() {
    let fake = FakeCoordinator::start(FakeState { status: testing::completed(), ..training() });
    let output = stdout(&fake, &["watch"]);
    assert_eq!(output.lines().count(), testing::events().len(), "{output}");
    let refusal = Some(tonic::Status::permission_denied("this needs a token of role viewer"));
    let fake = FakeCoordinator::start(FakeState { status_refusal: refusal, ..training() });
    let output = baton(&fake, &["watch"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), error.lines().count()), (Some(2), 1), "{error}");
}

#[test]
fn a_watched_status_waits_for_a_coordinator_that_restarts() {
    let fake = FakeCoordinator::start(training());
    let mut command = command(&fake, &["status", "--watch", "--json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    assert!(next_line(&mut output).contains("\"phase\":\"training\""));
    let address = fake.address();
    drop(fake);
    let mut note = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut note).unwrap();
    assert!(
        note.ends_with("is not reachable, retrying for 30 s; the job may still run\n"),
        "{note}"
    );

    let state = FakeState { status: testing::completed(), ..training() };
    let _fake = FakeCoordinator::start_at(address, state);
    let mut lines = output.lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("\"phase\":\"ended\"")));
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn metrics_are_printed_as_table_json_and_csv() {
    let fake = FakeCoordinator::start(training());
    let points = testing::points().len();
    let table = stdout(&fake, &["metrics"]);
    assert!(table.contains("STEP") && table.lines().count() == points + 1, "{table}");
    let csv = stdout(&fake, &["metrics", "--csv"]);
    assert!(csv.starts_with("unix_millis,generation,kind,step,"), "{csv}");
    assert_eq!(csv.lines().count(), points + 1);
    let json = stdout(&fake, &["metrics", "--json"]);
    assert_eq!(json.lines().count(), points);
    assert_eq!(baton(&fake, &["metrics", "--json", "--csv"]).status.code(), Some(2));
}

#[test]
fn followed_metrics_end_with_the_job() {
    let fake = FakeCoordinator::start(training());
    let (mut child, mut output) = follow(&fake, &["metrics", "--follow", "--csv"]);
    next_line(&mut output);
    testing::points().iter().for_each(|_| drop(next_line(&mut output)));
    fake.update(|state| {
        let mut point = state.points[1].clone();
        point.unix_millis += 1_000_000;
        state.points.push(point);
        state.status = testing::completed();
    });
    assert!(next_line(&mut output).contains(",step,10,"));
    assert_eq!(next_line(&mut output), "");
    assert!(child.wait().unwrap().success());
}

#[test]
fn the_recipe_in_effect_is_printed() {
    let recipe = GetRecipeResponse {
        name: "demo".to_owned(),
        toml: "name = \"demo\"\n".to_owned(),
        json: "{\"name\":\"demo\"}".to_owned(),
        hash: "0".to_owned(),
    };
    let fake = FakeCoordinator::start(FakeState { recipe, ..training() });
    assert_eq!(stdout(&fake, &["recipe", "get"]), "name = \"demo\"\n");
    assert_eq!(stdout(&fake, &["recipe", "get", "--json"]), "{\"name\":\"demo\"}\n");
}

const DIGITS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/digits_cpu.toml");

#[test]
fn a_job_is_submitted_with_base_and_changes_but_without_defaults() {
    let fake =
        FakeCoordinator::start(FakeState { status: testing::idle(), ..FakeState::default() });
    let folder = tempfile::tempdir().unwrap();
    let heir = folder.path().join("heir.toml");
    std::fs::write(&heir, format!("name = \"heir\"\nbase = {DIGITS:?}\n")).unwrap();
    let heir = heir.to_str().unwrap();
    let output = stdout(&fake, &["submit", heir, "--set", "train.epochs=3"]);
    assert_eq!(output, "demo: job 5f0c8d5e has started; `baton watch` shows its progress\n");
    let requests = fake.requests();
    let sent: toml::Table = requests[0].strip_prefix("submit []: ").unwrap().parse().unwrap();
    assert_eq!(sent["name"].as_str(), Some("heir"));
    assert_eq!(sent["train"]["epochs"].as_integer(), Some(3));
    assert_eq!(sent["train"]["global_batch"].as_integer(), Some(64), "from the base recipe");
    assert!(!sent.contains_key("base") && !sent.contains_key("guard"), "{sent}");
    let output: serde_json::Value =
        serde_json::from_str(&stdout(&fake, &["submit", DIGITS, "--json"])).unwrap();
    assert_eq!(output, serde_json::json!({ "job_id": "5f0c8d5e", "name": "demo" }));
    fake.update(|state| state.status = testing::completed());
    let output = stdout(&fake, &["submit", heir]);
    assert!(output.starts_with("demo: job 5f0c8d5e had ended before: "), "{output}");
}

#[test]
fn a_recipe_is_found_by_its_name_and_checked_before_it_is_sent() {
    let fake =
        FakeCoordinator::start(FakeState { status: testing::idle(), ..FakeState::default() });
    let mut submit = command(&fake, &["submit", "digits_cpu", "--set", "train.epochs=0"]);
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let output = submit.current_dir(root).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(
        error.starts_with("error: recipes/digits_cpu.toml: ") && error.contains("train.epochs = 0"),
        "{error}"
    );
    assert_eq!(fake.requests(), [""; 0]);
}

#[test]
fn a_recipe_rejected_by_the_coordinator_is_bad_input() {
    let refusal = Some(tonic::Status::invalid_argument("data.train: there is no x.beton"));
    let fake = FakeCoordinator::start(FakeState { refusal, ..FakeState::default() });
    let output = baton(&fake, &["submit", DIGITS]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error, "error: data.train: there is no x.beton\n");
}
