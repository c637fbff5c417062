//! Commands that ask a coordinator, which is a fake one.

#![allow(clippy::unwrap_used, reason = "a test's helpers may fail as loudly as the test")]

mod fake;
#[allow(dead_code, reason = "its statuses are many, and each file needs some")]
#[path = "../src/testing.rs"]
mod testing;

use std::{
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Command, Output, Stdio},
};

use baton_proto::v1::{GetRecipeResponse, StreamLogsResponse};
use fake::{Fake, Told};

fn training() -> Told {
    Told {
        status: testing::training(),
        events: testing::events(),
        points: testing::points(),
        lines: testing::lines(),
        ..Told::default()
    }
}

fn command(fake: &Fake, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(arguments).args(["--coordinator", &fake.address().to_string()]);
    command
}

fn baton(fake: &Fake, arguments: &[&str]) -> Output {
    command(fake, arguments).output().unwrap()
}

fn stdout(fake: &Fake, arguments: &[&str]) -> String {
    let output = baton(fake, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A command that goes on, and what it prints.
fn follow(fake: &Fake, arguments: &[&str]) -> (Child, BufReader<ChildStdout>) {
    let mut child = command(fake, arguments).stdout(Stdio::piped()).spawn().unwrap();
    let told = BufReader::new(child.stdout.take().unwrap());
    (child, told)
}

fn next_line(told: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    told.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

#[test]
fn pause_and_resume_name_the_job_and_pass_on_the_reason() {
    let fake = Fake::start(training());
    let told = stdout(&fake, &["pause", "--reason", "the GPUs are needed"]);
    let job = format!("digits_cpu at http://{} (--coordinator)", fake.address());
    let expected =
        format!("{job}: standing still after the current step; `baton resume` goes on\n");
    assert_eq!(told, expected);
    assert_eq!(stdout(&fake, &["resume"]), format!("{job}: training goes on\n"));
    let told: serde_json::Value =
        serde_json::from_str(&stdout(&fake, &["pause", "--json"])).unwrap();
    assert_eq!(told, serde_json::json!({ "asked": "pause", "job": job }));
    assert_eq!(fake.asked(), ["pause: the GPUs are needed", "resume", "pause: `baton pause`"]);
}

#[test]
fn a_refusal_is_one_line() {
    let refusal = Some(tonic::Status::failed_precondition("the job is not paused"));
    let fake = Fake::start(Told { refusal, ..training() });
    let output = baton(&fake, &["resume"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "error: the job is not paused\n");
}

#[test]
fn events_are_those_of_the_past() {
    let fake = Fake::start(training());
    let told = stdout(&fake, &["events"]);
    assert_eq!(told.lines().count(), testing::events().len(), "{told}");
    let told = stdout(&fake, &["events", "--after", "4", "-n", "2", "--json"]);
    let ids: Vec<serde_json::Value> = told
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["id"].clone())
        .collect();
    assert_eq!(ids, [6, 7]);
}

#[test]
fn logs_are_of_the_ranks_asked_for_and_with_all_of_everybody() {
    let fake = Fake::start(training());
    let told = stdout(&fake, &["logs"]);
    let expected = "rank 0 │ took the state of rank 2\n\
                    rank 2 │ … 812 lines left out\nrank 2 │ slow disk\n\
                    rank 1 │ restored in 0.1 s\n";
    assert_eq!(told, expected);
    assert_eq!(stdout(&fake, &["logs", "0"]), "rank 0 │ took the state of rank 2\n");
    assert_eq!(stdout(&fake, &["logs", "-n", "1"]), "rank 1 │ restored in 0.1 s\n");
    let all = stdout(&fake, &["logs", "--all"]);
    assert!(all.starts_with("coordinator │ generation 2 is open\nagent a │ rank 1 was"), "{all}");
    let told = stdout(&fake, &["logs", "2", "--json"]);
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!((&told["rank"], &told["left_out"]), (&2.into(), &812.into()));
}

#[test]
fn followed_logs_outlive_a_coordinator_and_end_with_the_job() {
    let line = |unix_millis| StreamLogsResponse {
        unix_millis,
        node_id: "a".to_owned(),
        local_rank: Some(0),
        rank: Some(0),
        line: format!("line {unix_millis}"),
        left_out: 0,
    };
    let lines = |count| (1..=count).map(line).collect::<Vec<_>>();
    let fake = Fake::start(Told { lines: lines(3), ..training() });
    let (mut child, mut told) = follow(&fake, &["logs", "--follow", "--tail", "2"]);
    assert_eq!(next_line(&mut told), "rank 0 │ line 2");
    assert_eq!(next_line(&mut told), "rank 0 │ line 3");
    fake.tell(|told| told.lines.push(line(4)));
    assert_eq!(next_line(&mut told), "rank 0 │ line 4");

    let address = fake.address();
    drop(fake);
    let fake = Fake::start_at(address, Told { lines: lines(6), ..training() });
    assert_eq!(next_line(&mut told), "rank 0 │ line 5");
    assert_eq!(next_line(&mut told), "rank 0 │ line 6");
    fake.tell(|told| {
        told.lines.push(line(7));
        told.status = testing::completed();
    });
    assert_eq!(next_line(&mut told), "rank 0 │ line 7");
    assert_eq!(next_line(&mut told), "");
    assert!(child.wait().unwrap().success());
}

#[test]
fn metrics_come_as_a_table_as_json_and_as_csv() {
    let fake = Fake::start(training());
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
    let fake = Fake::start(training());
    let (mut child, mut told) = follow(&fake, &["metrics", "--follow", "--csv"]);
    next_line(&mut told);
    testing::points().iter().for_each(|_| drop(next_line(&mut told)));
    fake.tell(|told| {
        let mut point = told.points[1].clone();
        point.unix_millis += 1_000_000;
        told.points.push(point);
        told.status = testing::completed();
    });
    assert!(next_line(&mut told).contains(",step,10,"));
    assert_eq!(next_line(&mut told), "");
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
    let fake = Fake::start(Told { recipe, ..training() });
    assert_eq!(stdout(&fake, &["recipe", "get"]), "name = \"demo\"\n");
    assert_eq!(stdout(&fake, &["recipe", "get", "--json"]), "{\"name\":\"demo\"}\n");
}

const DIGITS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/digits_cpu.toml");

#[test]
fn a_job_is_submitted_with_its_base_and_its_changes_and_without_defaults() {
    let fake = Fake::start(Told { status: testing::idle(), ..Told::default() });
    let folder = tempfile::tempdir().unwrap();
    let heir = folder.path().join("heir.toml");
    std::fs::write(&heir, format!("name = \"heir\"\nbase = {DIGITS:?}\n")).unwrap();
    let heir = heir.to_str().unwrap();
    let told = stdout(&fake, &["submit", heir, "--set", "train.epochs=3"]);
    assert_eq!(told, "demo: job 5f0c8d5e has begun; `baton watch` tells how it goes\n");
    let asked = fake.asked();
    let sent: toml::Table = asked[0].strip_prefix("submit []: ").unwrap().parse().unwrap();
    assert_eq!(sent["name"].as_str(), Some("heir"));
    assert_eq!(sent["train"]["epochs"].as_integer(), Some(3));
    assert_eq!(sent["train"]["global_batch"].as_integer(), Some(64), "of the base");
    assert!(!sent.contains_key("base") && !sent.contains_key("guard"), "{sent}");
    let told: serde_json::Value =
        serde_json::from_str(&stdout(&fake, &["submit", DIGITS, "--json"])).unwrap();
    assert_eq!(told, serde_json::json!({ "job_id": "5f0c8d5e", "name": "demo" }));
}

#[test]
fn a_recipe_is_found_by_its_name_and_checked_before_it_is_sent() {
    let fake = Fake::start(Told { status: testing::idle(), ..Told::default() });
    let mut submit = command(&fake, &["submit", "digits_cpu", "--set", "train.epochs=0"]);
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let output = submit.current_dir(root).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(
        error.starts_with("error: recipes/digits_cpu.toml: ") && error.contains("train.epochs = 0"),
        "{error}"
    );
    assert_eq!(fake.asked(), [""; 0]);
}

#[test]
fn what_the_coordinator_finds_wrong_with_a_recipe_is_bad_input() {
    let refusal = Some(tonic::Status::invalid_argument("data.train: there is no x.beton"));
    let fake = Fake::start(Told { refusal, ..Told::default() });
    let output = baton(&fake, &["submit", DIGITS]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error, "error: data.train: there is no x.beton\n");
}
