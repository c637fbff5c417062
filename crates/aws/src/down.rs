//! `baton aws down`

use std::{
    thread,
    time::{Duration, Instant},
};

use baton_console::{failure::bad_input, human, output};
use baton_job::exit::Failure;

use crate::{
    Place,
    api::Api,
    fleet::{self, Fleet},
    market::list,
    stack::{self, Job},
    volume::{self, Volume},
};

/// End a job's machines and remove all that was made for it, but not what it has trained
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton aws down                            machines save first; volume and bucket stay
  baton aws down --name imagenet --yes
  baton aws down --delete-data              checkpoints, logs and the volume too: nothing is left

Machines that train get two minutes to save. `baton aws up` with the same recipe goes on where they stopped.")]
pub struct Args {
    /// The job, if there are several
    #[arg(long, value_name = "NAME")]
    name: Option<Job>,
    #[command(flatten)]
    place: Place,
    /// Delete the volume, checkpoints, logs and staged files too; they cannot be had back
    #[arg(long)]
    delete_data: bool,
    /// Bucket of a job whose stack has gone already
    #[arg(long, value_name = "BUCKET", requires = "delete_data")]
    bucket: Option<String>,
    /// Ask nothing
    #[arg(short, long)]
    yes: bool,
}

/// Of gp3 in us-east-1, dollars per GB and month: <https://aws.amazon.com/ebs/pricing/>, as remembered, not looked up.
const VOLUME_PRICE: f64 = 0.08;
/// Between two looks at a group that ends.
const INTERVAL: Duration = Duration::from_secs(4);
/// Longest wait for its machines; they have two minutes to save.
const PATIENCE: Duration = Duration::from_secs(600);

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let api = args.place.api();
    let launched = super::Launched { name: args.name.clone(), place: args.place.clone() };
    let job = launched.job(&api)?;
    carry_out(&api, &job, args)
}

fn carry_out(api: &impl Api, job: &Job, args: &Args) -> Result<(), Failure> {
    let stack = stack::find(api, job)?;
    let volumes = volume::of(api, job)?;
    let bucket = stack
        .as_ref()
        .map(|stack| stack.parameter("Bucket").to_owned())
        .or_else(|| args.bucket.clone());
    let place = bucket.map(|bucket| format!("s3://{bucket}/{job}"));
    if stack.is_none() && volumes.is_empty() && place.is_none() {
        return Err(bad_input(format!(
            "nothing of a job {job} is in this region (with --bucket, what it left in a bucket is deleted)"
        )));
    }

    let mut plan = Vec::new();
    if stack.is_some() {
        let fleet = Fleet::look(api, job)?;
        let running = fleet.machines.iter().filter(|machine| machine.runs()).count() as u64;
        plan.push(format!(
            "{} and all that is in the stack {} will go",
            human::count(running, "machine"),
            job.stack()
        ));
    }
    let (kept, deleted): (Vec<Volume>, Vec<Volume>) =
        volumes.into_iter().partition(|volume| volume.is_brought || !args.delete_data);
    plan.extend(deleted.iter().map(|volume| {
        format!("the volume {} ({} GB) will be DELETED", volume.id, volume.gigabytes)
    }));
    if args.delete_data {
        plan.push(match &place {
            Some(place) => format!("all below {place} will be DELETED, checkpoints too"),
            None => {
                "no bucket is known any more: what the job left in one stays (--bucket)".to_owned()
            }
        });
    }
    plan.iter().for_each(output::note);
    if !args.yes {
        match output::confirm("go on?") {
            Some(true) => {}
            Some(false) => return Err(bad_input("nothing was done")),
            None => return Err(bad_input("nobody can be asked here: add --yes; nothing was done")),
        }
    }

    if stack.is_some() {
        output::note("machines that train save now; this takes some minutes");
        empty(api, job)?;
        stack::delete(api, job)?;
    }
    forget_credentials(api, job)?;
    for volume in &deleted {
        api.find(&["ec2", "delete-volume", "--volume-id", &volume.id])?;
    }
    if let (true, Some(place)) = (args.delete_data, &place) {
        api.call(&["s3", "rm", "--recursive", "--only-show-errors", &format!("{place}/")])?;
    }
    what_is_left(job, args.delete_data, place.as_deref(), &kept).iter().for_each(output::line);
    Ok(())
}

/// Ends the machines of the group, and waits for them: a stack that is deleted takes their rights and the rules of their
/// network away while they still save.
fn empty(api: &impl Api, job: &Job) -> Result<(), Failure> {
    if fleet::wanted(&fleet::group(api, job)?) > 0 {
        fleet::want(api, job, 0)?;
    }
    let start = Instant::now();
    while list(&fleet::group(api, job)?, "Instances").next().is_some() {
        if start.elapsed() > PATIENCE {
            output::note("they have not ended in time; the stack takes them with it");
            break;
        }
        thread::sleep(INTERVAL);
    }
    Ok(())
}

fn what_is_left(job: &Job, delete_data: bool, place: Option<&str>, kept: &[Volume]) -> Vec<String> {
    let bucket = place.filter(|_| !delete_data);
    if bucket.is_none() && kept.is_empty() && (place.is_some() || !delete_data) {
        return vec![format!("{job}: nothing is left")];
    }
    let mut lines =
        vec![format!("{job}: no machine runs, and nothing more is paid but for what is kept:")];
    match (bucket, place) {
        (Some(place), _) => lines.push(format!(
            "  {place}: checkpoints, logs, programs (`aws s3 ls --recursive --summarize {place}/` counts them)"
        )),
        (None, None) => {
            lines.push("  what the job left in its bucket: --bucket names it".to_owned());
        }
        (None, Some(_)) => {}
    }
    lines.extend(kept.iter().map(|volume| {
        format!(
            "  {} ({} GB, about ${:.0} a month){}",
            volume.id,
            volume.gigabytes,
            volume.gigabytes as f64 * VOLUME_PRICE,
            if volume.is_brought { ", which is yours" } else { "" }
        )
    }));
    if let Some((bucket, _)) = bucket.and_then(|place| place.strip_prefix("s3://")?.split_once('/'))
    {
        lines.push(format!(
            "`baton aws up` with the same recipe goes on; `baton aws down --name {job} --delete-data --bucket {bucket}` removes that too"
        ));
    }
    lines
}

/// Those of a job on several nodes; of one that had none, nothing is there.
fn forget_credentials(api: &impl Api, job: &Job) -> Result<(), Failure> {
    let names = ["agent/ca", "agent/token", "operator/ca", "operator/token"]
        .map(|name| format!("/baton/{job}/{name}"));
    let mut arguments = vec!["ssm", "delete-parameters", "--names"];
    arguments.extend(names.iter().map(String::as_str));
    api.json(&arguments)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Script, break_each, fleet_answers, stack};
    use serde_json::{Value, json};

    fn args(delete_data: bool) -> Args {
        Args { name: None, place: Place::default(), delete_data, bucket: None, yes: true }
    }

    fn with_one_machine() -> Script {
        let parameters = [("Bucket", "bucket"), ("Job", "digits"), ("Nodes", "1")];
        let script = Script::new()
            .answer("describe-stacks", json!({"Stacks": [stack("CREATE_COMPLETE", &parameters)]}))
            .answer("describe-volumes", json!({"Volumes": [{"VolumeId": "vol-1", "Size": 500, "AvailabilityZone": "us-east-1a", "Tags": [{"Key": "aws:cloudformation:stack-name", "Value": "x"}]}]}));
        let group = |wanted: u64| json!({"AutoScalingGroups": [{"DesiredCapacity": wanted}]});
        fleet_answers(script, 1, &["i-1"])
            .answer("describe-auto-scaling-groups", group(1))
            .answer(
                "set-desired-capacity --auto-scaling-group-name baton-digits --desired-capacity 0",
                Value::Null,
            )
            .answer("describe-auto-scaling-groups", group(0))
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer("delete-stack", Value::Null)
            .error(
                "describe-stacks",
                "ValidationError",
                "Stack with id baton-digits does not exist",
            )
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer("ssm delete-parameters --names /baton/digits/agent/ca", json!({}))
    }

    fn and_its_data() -> Script {
        with_one_machine()
            .answer("delete-volume --volume-id vol-1", Value::Null)
            .answer("s3 rm --recursive", Value::Null)
    }

    #[test]
    fn what_was_trained_is_deleted_only_when_asked_for() {
        let job = "digits".parse().unwrap();
        let api = with_one_machine();
        carry_out(&api, &job, &args(false)).unwrap();
        let called = api.called().join("\n");
        assert!(
            called.contains("delete-stack")
                && !called.contains("delete-volume")
                && !called.contains("s3 rm"),
            "{called}"
        );

        carry_out(&and_its_data(), &job, &args(true)).unwrap();
    }

    #[test]
    fn a_volume_that_the_user_brought_is_not_deleted() {
        let brought = json!({"VolumeId": "vol-2", "Size": 9, "AvailabilityZone": "us-east-1a",
            "Tags": [{"Key": "baton:job", "Value": "digits"}]});
        let api = Script::new()
            .error("describe-stacks", "ValidationError", "Stack baton-digits does not exist")
            .answer("describe-volumes", json!({"Volumes": [brought]}))
            .answer("ssm delete-parameters", json!({}));
        carry_out(&api, &"digits".parse().unwrap(), &args(true)).unwrap();
    }

    #[test]
    fn what_is_left_is_told_with_the_command_that_removes_it() {
        let job = "digits".parse().unwrap();
        assert_eq!(
            what_is_left(&job, true, Some("s3://b/digits"), &[]),
            ["digits: nothing is left"]
        );
        let told = what_is_left(&job, true, None, &[]).join("\n");
        assert!(told.contains("--bucket names it"), "{told}");
        let told = what_is_left(&job, false, Some("s3://b/digits"), &[]).join("\n");
        assert!(told.contains("--delete-data --bucket b`"), "{told}");
    }

    #[test]
    fn an_error_of_any_call_ends_it_with_one_line_that_names_the_call() {
        let job = "digits".parse().unwrap();
        break_each(and_its_data, |api| carry_out(api, &job, &args(true)));
    }
}
