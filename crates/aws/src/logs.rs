//! `baton aws logs`

use std::{thread, time::Duration};

use baton_console::{failure::bad_input, json};
use baton_job::exit::Failure;
use serde::Serialize;

use crate::{JobFlags, api::Api, fleet, stack};

/// Show a machine's log: its start, the coordinator, the agent and its ranks
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton aws logs
  baton aws logs --follow
  baton aws logs i-0123456789abcdef0        also for a machine that has ended
  baton aws logs --list")]
pub struct Args {
    #[command(flatten)]
    flags: JobFlags,
    /// Instance id of the machine [default: the one that logged last]
    #[arg(value_name = "INSTANCE")]
    instance: Option<String>,
    /// List the machines that have logged, without their logs
    #[arg(long, conflicts_with = "follow")]
    list: bool,
    /// Keep printing new lines, every 15 seconds
    #[arg(short, long)]
    follow: bool,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// One line of `--json`.
#[derive(Debug, Serialize)]
struct LoggedLine<'a> {
    /// Instance id of the machine.
    instance: &'a str,
    /// Line of its log; `null` with `--list`.
    line: Option<&'a str>,
}

/// Poll interval of `--follow`; a machine writes its log about as often.
const LOG_POLL_INTERVAL: Duration = Duration::from_secs(15);

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    show(&args.flags.aws.api(), args)
}

fn show(api: &impl Api, args: &Args) -> Result<(), Failure> {
    let job = args.flags.job(api)?;
    let stack = stack::get(api, &job)?;
    let machines = fleet::machines_with_file(api, &stack, "log.txt")?;
    if args.list {
        for instance in &machines {
            let listed = LoggedLine { instance, line: None };
            json::print(args.json, &listed, |_| instance.clone());
        }
        return Ok(());
    }
    let Some(instance) = args.instance.as_ref().or(machines.last()) else {
        return Err(bad_input(format!(
            "no machine of {job} has logged yet: `baton aws status` shows what they are doing; \
             `aws ec2 get-console-output --latest --instance-id …` shows a start that failed before Baton's scripts ran"
        )));
    };
    let mut last = String::new();
    loop {
        let text = fleet::read(api, &stack, instance, "log.txt")?.ok_or_else(|| {
            bad_input(format!(
                "{instance} has logged nothing: `baton aws logs --list` lists the machines that have"
            ))
        })?;
        let text = String::from_utf8_lossy(&text).into_owned();
        for line in new_lines(&last, &text) {
            let logged = LoggedLine { instance, line: Some(line) };
            json::print(args.json, &logged, |_| line.to_owned());
        }
        last = text;
        if !args.follow {
            return Ok(());
        }
        thread::sleep(LOG_POLL_INTERVAL);
    }
}

/// The lines of `now` after the last line of `shown`; all lines if that line is no longer in the log, because a long
/// log loses its first lines.
fn new_lines<'a>(shown: &str, now: &'a str) -> Vec<&'a str> {
    let lines: Vec<&str> = now.lines().collect();
    let Some(last) = shown.lines().last() else { return lines };
    match lines.iter().rposition(|line| *line == last) {
        Some(index) => lines[index + 1..].to_vec(),
        None => lines,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{ScriptedApi, break_each, launched_answers};

    fn args(instance: Option<&str>) -> Args {
        Args {
            flags: JobFlags::default(),
            instance: instance.map(ToOwned::to_owned),
            list: false,
            follow: false,
            json: false,
        }
    }

    fn answers() -> ScriptedApi {
        let object = |name: &str, at: &str| json!({"Key": format!("digits/machines/{name}/log.txt"), "LastModified": at});
        let objects =
            [object("i-2", "2026-11-22T10:00:00Z"), object("i-1", "2026-11-22T09:00:00Z")];
        launched_answers("1")
            .answer("list-objects-v2", json!({"Contents": objects}))
            .bytes("s3://bucket/digits/machines/i-2/log.txt", b"training\n")
    }

    #[test]
    fn an_error_of_any_call_ends_it_with_one_line_that_names_the_call() {
        show(&answers(), &args(None)).unwrap();
        break_each(answers, |api| show(api, &args(None)));
    }

    #[test]
    fn a_machine_without_a_log_is_reported_with_a_remedy() {
        let no_logs = launched_answers("1").answer("list-objects-v2", json!({}));
        let failure = show(&no_logs, &args(None)).unwrap_err();
        assert!(failure.message.contains("get-console-output"), "{failure}");
        let no_log = launched_answers("1").answer("list-objects-v2", json!({})).error(
            "s3 cp",
            "404",
            "Key \"digits/machines/i-3/log.txt\" does not exist",
        );
        let failure = show(&no_log, &args(Some("i-3"))).unwrap_err();
        assert!(failure.message.contains("i-3 has logged nothing"), "{failure}");
    }

    #[test]
    fn only_new_lines_are_shown() {
        assert_eq!(new_lines("", "a\nb\n"), ["a", "b"]);
        assert_eq!(new_lines("a\nb\n", "b\nc\nd\n"), ["c", "d"]);
        assert_eq!(new_lines("a\n", "a\n"), [""; 0]);
        assert_eq!(new_lines("a\n", "x\n"), ["x"]);
    }
}
