//! `baton aws logs`

use std::{thread, time::Duration};

use baton_console::{failure::bad_input, output};
use baton_job::exit::Failure;

use crate::{Launched, api::Api, fleet, stack};

/// Show what a machine logs: its start, the coordinator, the agent and its ranks
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton aws logs
  baton aws logs --follow
  baton aws logs i-0123456789abcdef0        also of a machine that is gone
  baton aws logs --list")]
pub struct Args {
    #[command(flatten)]
    launched: Launched,
    /// The machine [default: the one that wrote last]
    #[arg(value_name = "INSTANCE")]
    instance: Option<String>,
    /// Name the machines that have logged, and print nothing of it
    #[arg(long, conflicts_with = "follow")]
    list: bool,
    /// Go on with what is logged from now on, every 15 seconds
    #[arg(short, long)]
    follow: bool,
}

/// Between two looks; a machine writes about as often.
const INTERVAL: Duration = Duration::from_secs(15);

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    show(&args.launched.place.api(), args)
}

fn show(api: &impl Api, args: &Args) -> Result<(), Failure> {
    let job = args.launched.job(api)?;
    let stack = stack::get(api, &job)?;
    let machines = fleet::written(api, &stack, "log.txt")?;
    if args.list {
        machines.iter().for_each(output::line);
        return Ok(());
    }
    let Some(instance) = args.instance.as_ref().or(machines.last()) else {
        return Err(bad_input(format!(
            "no machine of {job} has logged yet: `baton aws status` tells what they do; `aws ec2 get-console-output --latest --instance-id …` \
             shows a start that went wrong before Baton's own"
        )));
    };
    let mut last = String::new();
    loop {
        let text = fleet::read(api, &stack, instance, "log.txt")?.ok_or_else(|| {
            bad_input(format!(
                "{instance} has logged nothing: `baton aws logs --list` names those that have"
            ))
        })?;
        let text = String::from_utf8_lossy(&text).into_owned();
        fresh(&last, &text).iter().for_each(output::line);
        last = text;
        if !args.follow {
            return Ok(());
        }
        thread::sleep(INTERVAL);
    }
}

/// The lines behind those that were shown; a log begins later when it is too long.
fn fresh<'a>(shown: &str, now: &'a str) -> Vec<&'a str> {
    let lines: Vec<&str> = now.lines().collect();
    let Some(last) = shown.lines().last() else { return lines };
    match lines.iter().rposition(|line| *line == last) {
        Some(place) => lines[place + 1..].to_vec(),
        None => lines,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{Script, break_each, launched};

    fn args(instance: Option<&str>) -> Args {
        Args {
            launched: Launched::default(),
            instance: instance.map(ToOwned::to_owned),
            list: false,
            follow: false,
        }
    }

    fn answers() -> Script {
        let object = |name: &str, at: &str| json!({"Key": format!("digits/machines/{name}/log.txt"), "LastModified": at});
        let objects =
            [object("i-2", "2026-11-22T10:00:00Z"), object("i-1", "2026-11-22T09:00:00Z")];
        launched("1")
            .answer("list-objects-v2", json!({"Contents": objects}))
            .bytes("s3://bucket/digits/machines/i-2/log.txt", b"training\n")
    }

    #[test]
    fn an_error_of_any_call_ends_it_with_one_line_that_names_the_call() {
        show(&answers(), &args(None)).unwrap();
        break_each(answers, |api| show(api, &args(None)));
    }

    #[test]
    fn a_machine_that_has_logged_nothing_is_told_with_what_to_do() {
        let nobody = launched("1").answer("list-objects-v2", json!({}));
        let failure = show(&nobody, &args(None)).unwrap_err();
        assert!(failure.message.contains("get-console-output"), "{failure}");
        let silent = launched("1").answer("list-objects-v2", json!({})).error(
            "s3 cp",
            "404",
            "Key \"digits/machines/i-3/log.txt\" does not exist",
        );
        let failure = show(&silent, &args(Some("i-3"))).unwrap_err();
        assert!(failure.message.contains("i-3 has logged nothing"), "{failure}");
    }

    #[test]
    fn only_what_is_new_is_shown() {
        assert_eq!(fresh("", "a\nb\n"), ["a", "b"]);
        assert_eq!(fresh("a\nb\n", "b\nc\nd\n"), ["c", "d"]);
        assert_eq!(fresh("a\n", "a\n"), [""; 0]);
        assert_eq!(fresh("a\n", "x\n"), ["x"]);
    }
}
