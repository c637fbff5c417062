//! `baton aws down`

use std::{
    thread,
    time::{Duration, Instant},
};

use baton_console::{failure::bad_input, human, json, output};
use baton_job::exit::Failure;
use serde::Serialize;

use crate::{
    AwsFlags,
    api::Api,
    fleet::{self, Fleet},
    market::list,
    stack::{self, Job},
    volume::{self, Volume},
};

/// End a job's machines and remove its AWS resources, but keep its checkpoints and volume
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton aws down                            machines save first; volume and bucket are kept
  baton aws down --name imagenet --yes
  baton aws down --delete-data              delete checkpoints, logs and the volume too

Machines that train get two minutes to save. `baton aws up` with the same recipe, --name and --bucket resumes where
they stopped.")]
pub struct Args {
    /// Job name, if there are several jobs
    #[arg(long, value_name = "NAME")]
    name: Option<Job>,
    #[command(flatten)]
    aws: AwsFlags,
    /// Delete the volume, checkpoints, logs and staged files too; this cannot be undone
    #[arg(long)]
    delete_data: bool,
    /// Bucket of a job whose stack is already removed
    #[arg(long, value_name = "BUCKET", requires = "delete_data")]
    bucket: Option<String>,
    /// Do not ask for confirmation
    #[arg(short, long)]
    yes: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The output of `--json`: what is kept, and still costs money.
#[derive(Debug, Serialize)]
struct KeptData<'a> {
    job: &'a str,
    /// Address of the job's files in its bucket; `null` if they are deleted, or the bucket is not known.
    url: Option<&'a str>,
    /// Whether the job's bucket is known; otherwise its files there are kept.
    bucket_is_known: bool,
    volumes: Vec<KeptVolume<'a>>,
}

/// A volume that is kept.
#[derive(Debug, Serialize)]
struct KeptVolume<'a> {
    /// Id of the volume.
    volume: &'a str,
    gigabytes: u64,
    zone: &'a str,
    /// Whether the user made it, and not `baton aws up`.
    made_by_user: bool,
}

impl<'a> KeptData<'a> {
    fn new(job: &'a Job, delete_data: bool, url: Option<&'a str>, kept: &'a [Volume]) -> Self {
        let volumes = kept.iter().map(|kept| KeptVolume {
            volume: &kept.id,
            gigabytes: kept.gigabytes,
            zone: &kept.zone,
            made_by_user: kept.made_by_user,
        });
        Self {
            job: job.name(),
            url: url.filter(|_| !delete_data),
            bucket_is_known: url.is_some(),
            volumes: volumes.collect(),
        }
    }
}

/// Price of a gp3 volume in us-east-1, dollars per GB and month; not checked against
/// <https://aws.amazon.com/ebs/pricing/>.
const VOLUME_PRICE: f64 = 0.08;
/// Poll interval while the machines of the group shut down.
const GROUP_POLL_INTERVAL: Duration = Duration::from_secs(4);
/// Maximum wait for the machines to end; they have two minutes to save.
const GROUP_END_TIMEOUT: Duration = Duration::from_secs(600);

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let api = args.aws.api();
    let flags = super::JobFlags { name: args.name.clone(), aws: args.aws.clone() };
    let job = flags.job(&api)?;
    remove(&api, &job, args)
}

fn remove(api: &impl Api, job: &Job, args: &Args) -> Result<(), Failure> {
    let stack = stack::find(api, job)?;
    let volumes = volume::of(api, job)?;
    let bucket = stack
        .as_ref()
        .map(|stack| stack.parameter("Bucket").to_owned())
        .or_else(|| args.bucket.clone());
    let url = bucket.map(|bucket| format!("s3://{bucket}/{job}"));
    if stack.is_none() && volumes.is_empty() && url.is_none() {
        return Err(bad_input(format!(
            "there is nothing of a job {job} in this region (with --bucket, its files in a bucket are deleted)"
        )));
    }

    let mut plan = Vec::new();
    if stack.is_some() {
        let fleet = Fleet::query(api, job)?;
        let running = fleet.machines.iter().filter(|machine| machine.is_running()).count() as u64;
        plan.push(format!(
            "{} and everything in the stack {} will be removed",
            human::count(running, "machine"),
            job.stack()
        ));
    }
    let (kept, deleted): (Vec<Volume>, Vec<Volume>) =
        volumes.into_iter().partition(|volume| volume.made_by_user || !args.delete_data);
    plan.extend(deleted.iter().map(|volume| {
        format!("the volume {} ({} GB) will be DELETED", volume.id, volume.gigabytes)
    }));
    if args.delete_data {
        plan.push(match &url {
            Some(url) => {
                format!("everything below {url} will be DELETED, including checkpoints")
            }
            None => "the job's bucket is not known, its files there are kept: name it with --bucket to delete them"
                .to_owned(),
        });
    }
    plan.iter().for_each(output::note);
    if !args.yes {
        match output::confirm("continue?") {
            Some(true) => {}
            Some(false) => return Err(bad_input("nothing was done")),
            None => {
                return Err(bad_input(
                    "cannot ask for confirmation without a terminal: add --yes; nothing was done",
                ));
            }
        }
    }

    if stack.is_some() {
        output::note("machines that train are saving; this takes some minutes");
        end_machines(api, job)?;
        stack::delete(api, job)?;
    }
    delete_credentials(api, job)?;
    for volume in &deleted {
        api.find(&["ec2", "delete-volume", "--volume-id", &volume.id])?;
    }
    if let (true, Some(url)) = (args.delete_data, &url) {
        api.call(&["s3", "rm", "--recursive", "--only-show-errors", &format!("{url}/")])?;
    }
    let url = url.as_deref();
    let kept_data = KeptData::new(job, args.delete_data, url, &kept);
    json::print(args.json, &kept_data, |_| {
        remaining(job, args.delete_data, url, &kept, &args.aws).join("\n")
    });
    Ok(())
}

/// Ends the machines of the group and waits for them. Deleting the stack first would take their permissions and network
/// rules away while they still save.
fn end_machines(api: &impl Api, job: &Job) -> Result<(), Failure> {
    if fleet::desired_capacity(&fleet::group(api, job)?) > 0 {
        fleet::set_desired_capacity(api, job, 0)?;
    }
    let start = Instant::now();
    while list(&fleet::group(api, job)?, "Instances").next().is_some() {
        if start.elapsed() > GROUP_END_TIMEOUT {
            output::note("the machines have not ended in time; deleting the stack ends them");
            break;
        }
        thread::sleep(GROUP_POLL_INTERVAL);
    }
    Ok(())
}

/// Lines that list what is kept, with its cost and the command that removes it.
fn remaining(
    job: &Job,
    delete_data: bool,
    url: Option<&str>,
    kept: &[Volume],
    aws: &AwsFlags,
) -> Vec<String> {
    let kept_url = url.filter(|_| !delete_data);
    if kept_url.is_none() && kept.is_empty() && (url.is_some() || !delete_data) {
        return vec![format!("{job}: nothing is left")];
    }
    let mut lines =
        vec![format!("{job}: no machine is running; these are kept and still cost money:")];
    match (kept_url, url) {
        (Some(url), _) => lines.push(format!(
            "  {url}: checkpoints, logs, programs (`aws s3 ls --recursive --summarize {url}/` shows their size)"
        )),
        (None, None) => {
            lines.push("  the job's files in its bucket: name it with --bucket".to_owned());
        }
        (None, Some(_)) => {}
    }
    lines.extend(kept.iter().map(|volume| {
        format!(
            "  {} ({} GB, about ${:.0} a month){}",
            volume.id,
            volume.gigabytes,
            volume.gigabytes as f64 * VOLUME_PRICE,
            if volume.made_by_user { ", made by you" } else { "" }
        )
    }));
    if let Some((bucket, _)) = kept_url.and_then(|url| url.strip_prefix("s3://")?.split_once('/')) {
        let flags = aws.text();
        lines.push(format!(
            "`baton aws up RECIPE --name {job} --bucket {bucket}{flags}` with the same recipe resumes the job; \
             `baton aws down --name {job} --delete-data --bucket {bucket}{flags}` removes these too"
        ));
    }
    lines
}

/// Deletes the credentials of a job on several nodes. Does nothing for a job on one node, which has none.
fn delete_credentials(api: &impl Api, job: &Job) -> Result<(), Failure> {
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
    use crate::testing::{ScriptedApi, break_each, fleet_answers, stack};
    use serde_json::{Value, json};

    fn args(delete_data: bool) -> Args {
        Args {
            name: None,
            aws: AwsFlags::default(),
            delete_data,
            bucket: None,
            yes: true,
            json: false,
        }
    }

    fn with_one_machine() -> ScriptedApi {
        let parameters = [("Bucket", "bucket"), ("Job", "digits"), ("Nodes", "1")];
        let script = ScriptedApi::new()
            .answer("describe-stacks", json!({"Stacks": [stack("CREATE_COMPLETE", &parameters)]}))
            .answer("describe-volumes", json!({"Volumes": [{"VolumeId": "vol-1", "Size": 500, "AvailabilityZone": "us-east-1a", "Tags": [{"Key": "aws:cloudformation:stack-name", "Value": "x"}]}]}));
        let group = |desired: u64| json!({"AutoScalingGroups": [{"DesiredCapacity": desired}]});
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

    fn with_its_data() -> ScriptedApi {
        with_one_machine()
            .answer("delete-volume --volume-id vol-1", Value::Null)
            .answer("s3 rm --recursive", Value::Null)
    }

    #[test]
    fn checkpoints_and_volume_are_deleted_only_on_request() {
        let job = "digits".parse().unwrap();
        let api = with_one_machine();
        remove(&api, &job, &args(false)).unwrap();
        let called = api.called().join("\n");
        assert!(
            called.contains("delete-stack")
                && !called.contains("delete-volume")
                && !called.contains("s3 rm"),
            "{called}"
        );

        remove(&with_its_data(), &job, &args(true)).unwrap();
    }

    #[test]
    fn a_volume_of_the_user_is_not_deleted() {
        let volume = json!({"VolumeId": "vol-2", "Size": 9, "AvailabilityZone": "us-east-1a",
            "Tags": [{"Key": "baton:job", "Value": "digits"}]});
        let api = ScriptedApi::new()
            .error("describe-stacks", "ValidationError", "Stack baton-digits does not exist")
            .answer("describe-volumes", json!({"Volumes": [volume]}))
            .answer("ssm delete-parameters", json!({}));
        remove(&api, &"digits".parse().unwrap(), &args(true)).unwrap();
    }

    #[test]
    fn what_remains_is_listed_with_the_commands_that_resume_and_remove_it() {
        let job: Job = "digits".parse().unwrap();
        let remaining = |delete_data: bool, url: Option<&str>, aws: &AwsFlags| {
            remaining(&job, delete_data, url, &[], aws).join("\n")
        };
        let no_flags = AwsFlags::default();
        let text = remaining(true, Some("s3://b/digits"), &no_flags);
        assert_eq!(text, "digits: nothing is left");
        let text = remaining(true, None, &no_flags);
        assert!(text.contains("name it with --bucket"), "{text}");
        let text = remaining(false, Some("s3://b/digits"), &no_flags);
        assert!(text.contains("--delete-data --bucket b`"), "{text}");
        assert!(text.contains("`baton aws up RECIPE --name digits --bucket b`"), "{text}");
        let region = AwsFlags { region: Some("eu-west-1".to_owned()), profile: None };
        let text = remaining(false, Some("s3://b/digits"), &region);
        assert_eq!(text.matches("--bucket b --region eu-west-1`").count(), 2, "{text}");
    }

    #[test]
    fn what_remains_as_json() {
        let job = "digits".parse().unwrap();
        let volume = Volume {
            id: "vol-1".to_owned(),
            gigabytes: 500,
            zone: "us-east-1a".to_owned(),
            made_by_user: false,
        };
        let kept = [volume];
        let found = serde_json::to_value(KeptData::new(&job, false, Some("s3://b/digits"), &kept));
        let volumes = json!([{
            "volume": "vol-1", "gigabytes": 500, "zone": "us-east-1a", "made_by_user": false,
        }]);
        let expected = json!({"job": "digits", "url": "s3://b/digits", "bucket_is_known": true, "volumes": volumes});
        assert_eq!(found.unwrap(), expected);
        let none = serde_json::to_value(KeptData::new(&job, true, None, &[])).unwrap();
        assert_eq!((&none["url"], &none["bucket_is_known"]), (&Value::Null, &false.into()));
    }

    #[test]
    fn an_error_of_any_call_ends_it_with_one_line_that_names_the_call() {
        let job = "digits".parse().unwrap();
        break_each(with_its_data, |api| remove(api, &job, &args(true)));
    }
}
