//! `baton aws logs`

use std::{thread, time::Duration};

use baton_console::{failure::bad_input, json, output};
use baton_job::exit::Failure;
use serde::Serialize;

use crate::{
    JobFlags,
    api::Api,
    fleet::{self, MachineFile},
    market::list,
    stack,
};

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
    /// Keep printing new lines, every 15 seconds, until a minute after the job's last machine; without INSTANCE, go on
    /// with the next machine when this one is replaced
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
/// A log that is older than the job's newest log by this much is stale: a running machine writes its log more often.
const STALE_AFTER: Duration = Duration::from_secs(60);
/// Polls in a row without a new line after which the log of a job without machines is complete: a machine that ends
/// writes its log a last time, and until then as rarely as this command polls.
const QUIET_POLLS: u64 = STALE_AFTER.as_secs() / LOG_POLL_INTERVAL.as_secs() + 1;
/// File to which a machine copies its log.
const LOG_FILE: &str = "log.txt";

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    show(&args.flags.aws.api(), args, LOG_POLL_INTERVAL, |logged| {
        json::print(args.json, logged, |_| logged.line.unwrap_or(logged.instance).to_owned());
    })
}

fn show(
    api: &impl Api,
    args: &Args,
    poll_interval: Duration,
    mut print: impl FnMut(&LoggedLine<'_>),
) -> Result<(), Failure> {
    let job = args.flags.job(api)?;
    let stack = stack::get(api, &job)?;
    if args.list {
        for MachineFile { instance, .. } in fleet::machine_files(api, &stack, LOG_FILE)? {
            print(&LoggedLine { instance: &instance, line: None });
        }
        return Ok(());
    }
    let mut shown_instance: Option<String> = None;
    let mut shown_text = String::new();
    let mut quiet_polls = 0;
    loop {
        // `baton aws down` sets the group to 0 before its machines have saved and ended.
        let has_ended = args.follow && {
            let group = fleet::group(api, &job)?;
            fleet::desired_capacity(&group) == 0 && list(&group, "Instances").next().is_none()
        };
        let instance = match &args.instance {
            Some(instance) => instance.clone(),
            None => {
                let logs = fleet::machine_files(api, &stack, LOG_FILE)?;
                choose(&logs, shown_instance.as_deref()).ok_or_else(|| {
                    bad_input(format!(
                        "no machine of {job} has logged yet: `baton aws status --name {job}` shows what they are doing; \
                         `aws ec2 get-console-output --latest --instance-id …` shows a start that failed before Baton's scripts ran"
                    ))
                })?
            }
        };
        if let Some(previous) = &shown_instance
            && *previous != instance
        {
            output::note(format_args!(
                "{previous} no longer writes its log; the log of {instance} follows"
            ));
            shown_text.clear();
        }
        let text = fleet::read(api, &stack, &instance, LOG_FILE)?.ok_or_else(|| {
            bad_input(format!(
                "{instance} has logged nothing: `baton aws logs --name {job} --list` lists the machines that have"
            ))
        })?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines = new_lines(&shown_text, &text);
        quiet_polls = if has_ended && lines.is_empty() { quiet_polls + 1 } else { 0 };
        let is_over = !args.follow || quiet_polls >= QUIET_POLLS;
        for line in lines {
            print(&LoggedLine { instance: &instance, line: Some(line) });
        }
        if is_over {
            return Ok(());
        }
        (shown_instance, shown_text) = (Some(instance), text);
        thread::sleep(poll_interval);
    }
}

/// The machine whose log to show next: the one shown so far while it still writes its log, otherwise the one that wrote
/// last. On several nodes all machines write all the time, so the one that wrote last changes with every poll.
fn choose(logs: &[MachineFile], shown: Option<&str>) -> Option<String> {
    let newest = logs.last()?;
    let current = logs.iter().find(|log| Some(log.instance.as_str()) == shown);
    let chosen = match current {
        Some(log)
            if newest.written.duration_since(log.written).unwrap_or_default() < STALE_AFTER =>
        {
            log
        }
        _ => newest,
    };
    Some(chosen.instance.clone())
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
    use std::time::UNIX_EPOCH;

    use serde_json::{Value, json};

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

    fn following(instance: Option<&str>) -> Args {
        Args { follow: true, ..args(instance) }
    }

    /// Adds the answer to a query of the machines that have logged, each with the time of day of its last write.
    fn log_answers(script: ScriptedApi, logs: &[(&str, &str)]) -> ScriptedApi {
        let objects: Vec<Value> = logs
            .iter()
            .map(|(name, at)| {
                json!({"Key": format!("digits/machines/{name}/log.txt"), "LastModified": format!("2026-11-22T{at}+00:00")})
            })
            .collect();
        script.answer("list-objects-v2", json!({"Contents": objects}))
    }

    /// Adds the answer to a query of the group.
    fn group_answer(script: ScriptedApi, desired: u64) -> ScriptedApi {
        let groups = json!({"AutoScalingGroups": [{"DesiredCapacity": desired}]});
        script.answer("describe-auto-scaling-groups", groups)
    }

    /// Adds the answers to one poll of `--follow`.
    fn poll_answers(
        script: ScriptedApi,
        desired: u64,
        logs: &[(&str, &str)],
        (instance, text): (&str, &str),
    ) -> ScriptedApi {
        log_answers(group_answer(script, desired), logs)
            .bytes(&format!("machines/{instance}/log.txt"), text.as_bytes())
    }

    fn answers() -> ScriptedApi {
        log_answers(launched_answers("1"), &[("i-2", "10:00:00"), ("i-1", "09:00:00")])
            .bytes("s3://bucket/digits/machines/i-2/log.txt", b"training\n")
    }

    /// Answers about a machine that is replaced by another one, on which the job ends.
    fn replaced_answers() -> ScriptedApi {
        let both = [("i-1", "09:00:30"), ("i-2", "09:02:00")];
        let mut script = launched_answers("1");
        script = poll_answers(script, 1, &[("i-1", "09:00:00")], ("i-1", "a\n"));
        // The next machine already logs, but this one still does too.
        script =
            poll_answers(script, 1, &[("i-1", "09:00:30"), ("i-2", "09:00:40")], ("i-1", "a\nb\n"));
        script = poll_answers(script, 1, &both, ("i-2", "c\n"));
        // The job has ended, but there is a new line.
        script = poll_answers(script, 0, &both, ("i-2", "c\nd\n"));
        for _ in 0..QUIET_POLLS {
            script = poll_answers(script, 0, &both, ("i-2", "c\nd\n"));
        }
        script
    }

    /// The printed lines, each after its machine. All calls of the script must be made.
    fn shown(api: &ScriptedApi, args: &Args) -> Result<Vec<String>, Failure> {
        let mut lines = Vec::new();
        show(api, args, Duration::ZERO, |logged| {
            lines.push(format!("{} {}", logged.instance, logged.line.unwrap_or("has logged")));
        })?;
        assert_eq!(api.len(), 0, "{:?}", api.called());
        Ok(lines)
    }

    #[test]
    fn an_error_of_any_call_ends_it_with_one_line_that_names_the_call() {
        break_each(answers, |api| shown(api, &args(None)));
        break_each(replaced_answers, |api| shown(api, &following(None)));
    }

    #[test]
    fn the_log_of_the_machine_that_logged_last_is_shown() {
        assert_eq!(shown(&answers(), &args(None)).unwrap(), ["i-2 training"]);
    }

    #[test]
    fn the_machines_that_have_logged_are_listed() {
        let api = log_answers(launched_answers("1"), &[("i-2", "10:00:00"), ("i-1", "09:00:00")]);
        let listed = shown(&api, &Args { list: true, ..args(None) }).unwrap();
        assert_eq!(listed, ["i-1 has logged", "i-2 has logged"]);
    }

    #[test]
    fn following_goes_on_with_the_next_machine_and_ends_with_the_job() {
        let lines = shown(&replaced_answers(), &following(None)).unwrap();
        assert_eq!(lines, ["i-1 a", "i-1 b", "i-2 c", "i-2 d"]);
    }

    #[test]
    fn following_one_machine_ends_with_the_job() {
        let mut script = launched_answers("1");
        let quiet = |text: &'static str, polls: u64| (0..polls).map(move |_| (0_u64, text));
        let polls = [(1, "a\n")].into_iter().chain(quiet("a\n", QUIET_POLLS - 1));
        // The last lines come late.
        let polls = polls.chain([(0, "a\nb\n")]).chain(quiet("a\nb\n", QUIET_POLLS));
        for (desired, text) in polls {
            script = group_answer(script, desired).bytes("machines/i-3/log.txt", text.as_bytes());
        }
        assert_eq!(shown(&script, &following(Some("i-3"))).unwrap(), ["i-3 a", "i-3 b"]);
    }

    #[test]
    fn following_does_not_end_while_machines_save() {
        let saving = json!({"AutoScalingGroups": [{"DesiredCapacity": 0,
            "Instances": [{"InstanceId": "i-3", "LifecycleState": "Terminating:Wait"}]}]});
        let mut script = launched_answers("1");
        for _ in 0..2 * QUIET_POLLS {
            script = script
                .answer("describe-auto-scaling-groups", saving.clone())
                .bytes("machines/i-3/log.txt", b"a\n");
        }
        for _ in 0..QUIET_POLLS {
            script = group_answer(script, 0).bytes("machines/i-3/log.txt", b"a\n");
        }
        assert_eq!(shown(&script, &following(Some("i-3"))).unwrap(), ["i-3 a"]);
    }

    #[test]
    fn the_shown_machine_changes_only_when_its_log_is_stale() {
        let log = |instance: &str, seconds: u64| MachineFile {
            written: UNIX_EPOCH + Duration::from_secs(seconds),
            instance: instance.to_owned(),
        };
        let stale = STALE_AFTER.as_secs();
        let several = [log("i-1", 100), log("i-2", 99 + stale)];
        assert_eq!(choose(&several, None).as_deref(), Some("i-2"));
        assert_eq!(choose(&several, Some("i-1")).as_deref(), Some("i-1"));
        assert_eq!(choose(&several, Some("i-2")).as_deref(), Some("i-2"));
        assert_eq!(choose(&several, Some("i-0")).as_deref(), Some("i-2"));
        let replaced = [log("i-1", 100), log("i-2", 100 + stale)];
        assert_eq!(choose(&replaced, Some("i-1")).as_deref(), Some("i-2"));
        assert_eq!(choose(&[], Some("i-1")), None);
    }

    #[test]
    fn a_machine_without_a_log_is_reported_with_a_remedy() {
        let no_logs = launched_answers("1").answer("list-objects-v2", json!({}));
        let failure = shown(&no_logs, &args(None)).unwrap_err();
        assert!(failure.message.contains("get-console-output"), "{failure}");
        let no_log = launched_answers("1").error(
            "s3 cp",
            "404",
            "Key \"digits/machines/i-3/log.txt\" does not exist",
        );
        let failure = shown(&no_log, &args(Some("i-3"))).unwrap_err();
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
