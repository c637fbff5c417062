//! `baton aws status`

use std::{thread, time::Duration};

use baton_console::{failure::failed, human, output};
use baton_job::exit::Failure;
use serde::Serialize;

use crate::{
    Launched,
    api::Api,
    fleet::{self, Fleet, Report, Role},
    stack::{self, Job, Stack},
};

/// Show the machines of a job, and how its training goes
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton aws status
  baton aws status --watch
  baton aws status --json | jq .report.status.latest.loss

The machines tell the bucket some times a minute, so this works without a way in, and when they are gone.
What happens this second: baton aws connect -- top")]
pub struct Args {
    #[command(flatten)]
    launched: Launched,
    /// Print one JSON object; with --watch one per line
    #[arg(long)]
    json: bool,
    /// Look again every 15 seconds until no machine is wanted
    #[arg(long)]
    watch: bool,
}

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(15);

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Told<'a> {
    job: &'a str,
    stack: &'a str,
    place: String,
    #[serde(flatten)]
    fleet: &'a Fleet,
    report: &'a Option<Report>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let api = args.launched.place.api();
    let job = args.launched.job(&api)?;
    loop {
        let (stack, fleet, report) = look(&api, &job)?;
        if args.json {
            let told = Told {
                job: job.name(),
                stack: &stack.status,
                place: stack.place(),
                fleet: &fleet,
                report: &report,
            };
            output::line(serde_json::to_string(&told).map_err(failed)?);
        } else {
            let text = text(&job, &stack, &fleet, report.as_ref(), fleet::now());
            match args.watch && output::is_terminal() {
                true => output::page(text),
                false => output::line(text),
            }
        }
        if !args.watch || fleet.wanted == 0 {
            return Ok(());
        }
        thread::sleep(INTERVAL);
    }
}

fn look(api: &impl Api, job: &Job) -> Result<(Stack, Fleet, Option<Report>), Failure> {
    let stack = stack::get(api, job)?;
    let fleet = Fleet::look_and_listen(api, job, &stack)?;
    let report = fleet::report(api, &stack)?;
    Ok((stack, fleet, report))
}

/// For people.
pub(super) fn text(
    job: &Job,
    stack: &Stack,
    fleet: &Fleet,
    report: Option<&Report>,
    now: u64,
) -> String {
    let mut lines = vec![format!("{job}: {}, {}", summary(fleet), stack.place())];
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
            line += &format!(": {}, {}", stage.words, since(stage.unix_seconds, now));
        }
        lines.push(line);
    }
    if let Some(trouble) = &fleet.trouble {
        lines.push(format!("  no machine: {trouble}"));
    }
    match report {
        Some(report) => {
            lines.push(format!(
                "\nas {} told {}:",
                report.instance,
                since(report.unix_seconds, now)
            ));
            lines.push(report.text.trim_end().to_owned());
        }
        None => lines.push("the job has told nothing yet".to_owned()),
    }
    lines.join("\n")
}

fn summary(fleet: &Fleet) -> String {
    let running = |role| {
        let all = fleet.machines.iter();
        all.filter(|machine| machine.role == role && machine.runs()).count() as u64
    };
    let (running, coordinators) = (running(Role::Node), running(Role::Coordinator));
    match (fleet.wanted, running) {
        (0, 0) if coordinators > 0 => {
            "over, but the coordinator's machine runs: `baton aws down` ends it".to_owned()
        }
        (0, 0) => "over, no machine runs".to_owned(),
        (0, _) => format!("over, {} still ending", human::count(running, "machine")),
        (wanted, running) if running >= wanted => human::count(running, "machine"),
        (wanted, running) => format!("{running} of {}", human::count(wanted, "machine")),
    }
}

fn since(then: u64, now: u64) -> String {
    human::ago(now.saturating_sub(then) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fleet::{Machine, Stage},
        testing::{break_each, fleet_answers, launched, stack_of, told_answers},
    };
    use serde_json::json;

    #[test]
    fn an_error_of_any_call_ends_it_with_one_line_that_names_the_call() {
        let answers = || {
            let short = fleet_answers(launched("2"), 2, &["i-1"])
                .answer("describe-scaling-activities", json!({"Activities": []}));
            told_answers(short)
        };
        let run = |api: &_| look(api, &Launched::default().job(api)?);
        let (_, fleet, report) = run(&answers()).unwrap();
        assert_eq!((fleet.machines.len(), report.unwrap().text.as_str()), (1, "training"));
        break_each(answers, run);
    }

    #[test]
    fn one_look_tells_machines_trouble_and_training() {
        let machine = Machine {
            instance: "i-1".to_owned(),
            role: Role::Node,
            kind: "p4d.24xlarge".to_owned(),
            zone: "us-east-1a".to_owned(),
            state: "InService".to_owned(),
            launched: None,
            stage: Some(Stage { unix_seconds: 900, words: "starting".to_owned() }),
        };
        let mut fleet =
            Fleet { wanted: 2, machines: vec![machine], trouble: Some("no capacity".to_owned()) };
        let report = Report {
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

        as i-1 told 20 s ago:
        training, epoch 3
        ");
        fleet.wanted = 0;
        fleet.machines[0].role = Role::Coordinator;
        assert!(summary(&fleet).contains("the coordinator's machine runs"), "{}", summary(&fleet));
        fleet = Fleet { wanted: 0, machines: Vec::new(), trouble: None };
        insta::assert_snapshot!(text(&job, &stack_of("1"), &fleet, None, 1_000), @"
        digits: over, no machine runs, s3://bucket/digits
        the job has told nothing yet
        ");
    }
}
