//! `baton aws down`

use baton_job::exit::Failure;
use serde_json::Value;

use super::{
    Place,
    api::Api,
    fleet::Fleet,
    market::list,
    stack::{self, Job},
};
use crate::{failure::bad_input, human, output};

/// End a job's machines and remove all that was made for it, but not what it has trained
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton aws down                            machines save first; volume and bucket stay
  baton aws down --name imagenet --yes
  baton aws down --delete-data              checkpoints, logs and the volume too: nothing is left

Machines that train get two minutes to save. `baton aws up` with the same recipe goes on where they stopped.")]
pub(crate) struct Args {
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

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let api = args.place.api();
    let launched = super::Launched { name: args.name.clone(), place: args.place.clone() };
    let job = launched.job(&api)?;
    carry_out(&api, &job, args)
}

fn carry_out(api: &impl Api, job: &Job, args: &Args) -> Result<(), Failure> {
    let stack = stack::find(api, job)?;
    let volumes = volumes(api, job)?;
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
    if let Some(stack) = &stack {
        let fleet = Fleet::look(api, job, stack)?;
        let running = fleet.machines.iter().filter(|machine| machine.runs()).count() as u64;
        plan.push(format!(
            "{} and all that is in the stack {} will go",
            human::count(running, "machine"),
            job.stack()
        ));
    }
    if args.delete_data {
        plan.extend(volumes.iter().map(|volume| {
            format!("the volume {} ({} GB) will be DELETED", volume.id, volume.gigabytes)
        }));
        plan.extend(
            place.iter().map(|place| format!("all below {place} will be DELETED, checkpoints too")),
        );
    }
    plan.iter().for_each(output::note);
    if !args.yes {
        match output::confirm("go on?") {
            Some(true) => {}
            Some(false) => return Err(bad_input("nothing was done")),
            None => return Err(bad_input("nobody can be asked here: add --yes; nothing was done")),
        }
    }

    if let Some(stack) = &stack {
        output::note("machines that train save now; this takes some minutes");
        stack::delete(api, job)?;
        if stack.has_several_nodes() {
            forget_credentials(api, job)?;
        }
    }
    if args.delete_data {
        for volume in &volumes {
            api.json(&["ec2", "delete-volume", "--volume-id", &volume.id])?;
        }
        if let Some(place) = &place {
            api.call(
                &["s3", "rm", "--recursive", "--only-show-errors", &format!("{place}/")],
                &[],
            )?;
        }
        output::line(format_args!("{job}: nothing is left"));
        return Ok(());
    }
    output::line(format_args!(
        "{job}: no machine runs, and nothing more is paid but for what is kept:"
    ));
    if let Some(place) = place {
        output::line(format_args!(
            "  {place}: checkpoints, logs, programs (`aws s3 ls --recursive --summarize {place}/` counts them)"
        ));
    }
    for volume in &volumes {
        output::line(format_args!(
            "  {} ({} GB, about ${:.0} a month)",
            volume.id,
            volume.gigabytes,
            volume.gigabytes as f64 * VOLUME_PRICE
        ));
    }
    output::line(format_args!(
        "`baton aws up` with the same recipe goes on; `baton aws down --name {job} --delete-data` removes that too"
    ));
    Ok(())
}

/// A volume of the job's own.
struct Volume {
    id: String,
    gigabytes: u64,
}

/// Found by the tag, as they outlive their stack. One that the user brought has it too.
fn volumes(api: &impl Api, job: &Job) -> Result<Vec<Volume>, Failure> {
    let answer = api.json(&[
        "ec2",
        "describe-volumes",
        "--filters",
        &format!("Name=tag:baton:job,Values={job}"),
    ])?;
    let volume = |volume: &Value| {
        Some(Volume {
            id: volume["VolumeId"].as_str()?.to_owned(),
            gigabytes: volume["Size"].as_u64()?,
        })
    };
    Ok(list(&answer, "Volumes").filter_map(volume).collect())
}

fn forget_credentials(api: &impl Api, job: &Job) -> Result<(), Failure> {
    for name in ["agent/ca", "agent/token", "operator/ca", "operator/token"] {
        api.find(&["ssm", "delete-parameter", "--name", &format!("/baton/{job}/{name}")])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aws::testing::{Script, fleet_answers, stack};
    use serde_json::json;

    fn args(delete_data: bool) -> Args {
        Args { name: None, place: Place::default(), delete_data, bucket: None, yes: true }
    }

    fn with_one_machine() -> Script {
        let parameters = [("Bucket", "bucket"), ("Job", "digits"), ("Nodes", "1")];
        let script = Script::new()
            .answer("describe-stacks", json!({"Stacks": [stack("CREATE_COMPLETE", &parameters)]}))
            .answer("describe-volumes", json!({"Volumes": [{"VolumeId": "vol-1", "Size": 500}]}));
        fleet_answers(script, 1, &["i-1"])
            .bytes("s3 cp", b"{}")
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer("delete-stack", Value::Null)
            .error(
                "describe-stacks",
                "ValidationError",
                "Stack with id baton-digits does not exist",
            )
            .answer("describe-stack-events", json!({"StackEvents": []}))
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

        let api = with_one_machine()
            .answer("delete-volume --volume-id vol-1", Value::Null)
            .answer("s3 rm --recursive", Value::Null);
        carry_out(&api, &job, &args(true)).unwrap();
    }

    #[test]
    fn an_error_of_any_call_ends_it_with_one_line_that_names_the_call() {
        let job = "digits".parse().unwrap();
        let calls = with_one_machine().len();
        for index in 0..calls {
            let (api, call) = with_one_machine().breaking_at(index, "AccessDenied");
            let failure = carry_out(&api, &job, &args(false)).unwrap_err();
            assert!(
                failure.message.contains(&call) && failure.message.contains("docs/runbook.md"),
                "{call}: {failure}"
            );
        }
    }
}
