//! `baton aws status`
//!
//! The keys of `--json` are a promise to scripts: adding is allowed, renaming is not. The text may change at any time.

use std::{thread, time::Duration};

use baton_console::{clean, human, json, output};
use baton_job::exit::Failure;
use serde::Serialize;

use crate::{
    JobFlags,
    api::Api,
    fleet::{self, Fleet, JobReport, Role},
    stack::{self, Job, Stack},
};

/// Show the machines of a job, and its training
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton aws status
  baton aws status --watch
  baton aws status --json | jq .report.status.latest.loss

The machines write their status to the bucket several times a minute, so this works without a connection to
them, and after their end. For the current status: baton aws connect -- top")]
pub struct Args {
    #[command(flatten)]
    flags: JobFlags,
    /// Print one JSON object; with --watch one per line
    #[arg(long)]
    json: bool,
    /// Refresh every 15 seconds until the job needs no machine
    #[arg(long)]
    watch: bool,
}

/// Poll interval of `--watch`.
const STATUS_POLL_INTERVAL: Duration = Duration::from_secs(15);

/// The output of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct StatusJson<'a> {
    job: &'a str,
    stack: &'a str,
    /// Address of the job's files in the bucket.
    url: String,
    #[serde(flatten)]
    fleet: &'a Fleet,
    report: Option<&'a JobReport>,
}

impl<'a> StatusJson<'a> {
    pub(super) fn new(
        job: &'a Job,
        stack: &'a Stack,
        fleet: &'a Fleet,
        report: Option<&'a JobReport>,
    ) -> Self {
        Self { job: job.name(), stack: &stack.status, url: stack.url(), fleet, report }
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let api = args.flags.aws.api();
    let job = args.flags.job(&api)?;
    loop {
        let (stack, fleet, report) = query(&api, &job)?;
        if args.json {
            output::line(json::line(&StatusJson::new(&job, &stack, &fleet, report.as_ref())));
        } else {
            let text = text(&job, &stack, &fleet, report.as_ref(), fleet::now());
            match args.watch && output::is_terminal() {
                true => output::page(text),
                false => output::line(text),
            }
        }
        if !args.watch || fleet.desired == 0 {
            return Ok(());
        }
        thread::sleep(STATUS_POLL_INTERVAL);
    }
}

fn query(api: &impl Api, job: &Job) -> Result<(Stack, Fleet, Option<JobReport>), Failure> {
    let stack = stack::get(api, job)?;
    let fleet = Fleet::query_with_stages(api, job, &stack)?;
    let report = fleet::report(api, &stack)?;
    Ok((stack, fleet, report))
}

/// The status as text. AWS's messages and the machines' reports do not control the terminal.
pub(super) fn text(
    job: &Job,
    stack: &Stack,
    fleet: &Fleet,
    report: Option<&JobReport>,
    now: u64,
) -> String {
    let mut lines = vec![format!("{job}: {}, {}", summary(job, fleet), stack.url())];
    if !stack.status.ends_with("_COMPLETE") {
        lines.push(format!("  stack: {}", stack.status));
    }
    for machine in &fleet.machines {
        let role = if machine.role == Role::Coordinator { " (coordinator)" } else { "" };
        let mut line = format!(
            "  {} {} in {}, {}{role}",
            machine.instance, machine.kind, machine.zone, machine.state
        );
        if let Some(stage) = &machine.stage {
            line += &format!(": {}, {}", stage.text, time_ago(stage.unix_seconds, now));
        }
        lines.push(line);
    }
    if let Some(failure) = &fleet.launch_failure {
        lines.push(format!("  no machine: {failure}"));
    }
    match report {
        Some(report) => {
            lines.push(format!(
                "\nreported by {} {}:",
                report.instance,
                time_ago(report.unix_seconds, now)
            ));
            lines.push(report.text.trim_end().to_owned());
        }
        None => lines.push("the job has reported nothing yet".to_owned()),
    }
    clean::lines(&lines.join("\n")).into_owned()
}

fn summary(job: &Job, fleet: &Fleet) -> String {
    let running = |role| {
        let all = fleet.machines.iter();
        all.filter(|machine| machine.role == role && machine.is_running()).count() as u64
    };
    let (running, coordinators) = (running(Role::Node), running(Role::Coordinator));
    match (fleet.desired, running) {
        (0, 0) if coordinators > 0 => {
            format!(
                "ended, but the coordinator's machine is still running: `baton aws down --name {job}` ends it"
            )
        }
        (0, 0) => "ended, no machine is running".to_owned(),
        (0, _) => format!("ended, {} still shutting down", human::count(running, "machine")),
        (desired, running) if running >= desired => human::count(running, "machine"),
        (desired, running) => format!("{running} of {}", human::count(desired, "machine")),
    }
}

fn time_ago(then: u64, now: u64) -> String {
    human::ago(now.saturating_sub(then) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fleet::{Machine, Stage},
        testing::{break_each, fleet_answers, launched_answers, report_answers, stack_of},
    };
    use serde_json::json;

    #[test]
    fn an_error_of_any_call_ends_it_with_one_line_that_names_the_call() {
        let answers = || {
            let short = fleet_answers(launched_answers("2"), 2, &["i-1"])
                .answer("describe-scaling-activities", json!({"Activities": []}));
            report_answers(short)
        };
        let run = |api: &_| query(api, &JobFlags::default().job(api)?);
        let (_, fleet, report) = run(&answers()).unwrap();
        assert_eq!((fleet.machines.len(), report.unwrap().text.as_str()), (1, "training"));
        break_each(answers, run);
    }

    #[test]
    fn the_status_shows_machines_launch_failure_and_training() {
        let machine = Machine {
            instance: "i-1".to_owned(),
            role: Role::Node,
            kind: "p4d.24xlarge".to_owned(),
            zone: "us-east-1a".to_owned(),
            state: "InService".to_owned(),
            launched: None,
            stage: Some(Stage { unix_seconds: 900, text: "starting".to_owned() }),
        };
        let mut fleet = Fleet {
            desired: 2,
            machines: vec![machine],
            launch_failure: Some("no capacity".to_owned()),
        };
        let report = JobReport {
            instance: "i-1".to_owned(),
            unix_seconds: 980,
            status: serde_json::Value::Null,
            text: "training, epoch 3\n".to_owned(),
        };
        let job = "digits".parse().unwrap();
        insta::assert_snapshot!(text(&job, &stack_of("1"), &fleet, Some(&report), 1_000), @"
        digits: 1 of 2 machines, s3://bucket/digits
          i-1 p4d.24xlarge in us-east-1a, InService: starting, 1 min ago
          no machine: no capacity

        reported by i-1 20 s ago:
        training, epoch 3
        ");
        let hostile = JobReport { text: "\x1b[2Jphase \x1b]0;title\x07".to_owned(), ..report };
        fleet.launch_failure = Some("no \u{9b}2Jcapacity".to_owned());
        let shown = text(&job, &stack_of("1"), &fleet, Some(&hostile), 1_000);
        assert!(shown.contains("\n  no machine: no \u{fffd}2Jcapacity\n"), "{shown:?}");
        assert!(shown.ends_with("\nphase \u{fffd}]0;title\u{fffd}"), "{shown:?}");
        fleet.desired = 0;
        fleet.machines[0].role = Role::Coordinator;
        assert!(
            summary(&job, &fleet).contains("the coordinator's machine is still running"),
            "{}",
            summary(&job, &fleet)
        );
        fleet = Fleet { desired: 0, machines: Vec::new(), launch_failure: None };
        insta::assert_snapshot!(text(&job, &stack_of("1"), &fleet, None, 1_000), @"
        digits: ended, no machine is running, s3://bucket/digits
        the job has reported nothing yet
        ");
    }
}
