//! The machines of a job, and what they report.
//!
//! A machine writes its status and log to the bucket several times a minute (`deploy/aws/node/report.sh`). So both can
//! be read without a connection to the machine, and after its end.

use std::{
    collections::BTreeMap,
    fs, io,
    time::{SystemTime, UNIX_EPOCH},
};

use baton_console::failure::failed;
use baton_job::exit::Failure;
use serde::Serialize;
use serde_json::Value;

use crate::{
    api::{Api, QUOTA},
    market::list,
    stack::{Job, Stack},
};

/// File in which a machine reports its current stage.
const STAGE_FILE: &str = "stage.json";

/// The Auto Scaling group of a job, and its machines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Fleet {
    /// Desired number of machines in the group; 0 when the job has ended.
    pub(super) desired: u64,
    pub(super) machines: Vec<Machine>,
    /// AWS's message about why the group last failed to get a machine.
    pub(super) launch_failure: Option<String>,
}

/// One machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Machine {
    pub(super) instance: String,
    pub(super) role: Role,
    pub(super) kind: String,
    pub(super) zone: String,
    /// State in the group (`InService`, …), or EC2's state for a machine outside the group.
    pub(super) state: String,
    /// Start time given by EC2, RFC 3339.
    pub(super) launched: Option<String>,
    /// The last stage it reported.
    pub(super) stage: Option<Stage>,
}

/// Purpose of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Role {
    /// Trains; on a job with one machine, it also runs the coordinator.
    Node,
    /// Runs the coordinator of several nodes.
    Coordinator,
}

/// What a machine is doing, as it reported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Stage {
    /// Time of the report, Unix seconds.
    pub(super) unix_seconds: u64,
    /// The stage, as text.
    pub(super) text: String,
}

/// The last status report of the job's coordinator.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct JobReport {
    /// The machine that reported.
    pub(super) instance: String,
    /// Time of the report, Unix seconds.
    pub(super) unix_seconds: u64,
    /// Output of `baton status --json` on that machine.
    pub(super) status: Value,
    /// Output of `baton status` on that machine.
    #[serde(skip)]
    pub(super) text: String,
}

impl Fleet {
    /// Queries AWS for the group and its machines.
    pub(super) fn query(api: &impl Api, job: &Job) -> Result<Self, Failure> {
        let group = group(api, job)?;
        let answer = api.json(&[
            "ec2",
            "describe-instances",
            "--filters",
            &format!("Name=tag:baton:job,Values={job}"),
            "Name=instance-state-name,Values=pending,running,stopping,stopped,shutting-down",
        ])?;
        let mut machines: Vec<Machine> = list(&answer, "Reservations")
            .flat_map(|reservation| list(reservation, "Instances"))
            .map(|instance| machine(instance, &group))
            .collect();
        // The coordinator first, then by launch time.
        machines.sort_by(|a, b| {
            (a.role != Role::Coordinator, &a.launched)
                .cmp(&(b.role != Role::Coordinator, &b.launched))
        });
        let desired = desired_capacity(&group);
        let running = machines.iter().filter(|machine| machine.role == Role::Node).count() as u64;
        let launch_failure =
            if desired > running { launch_failure(api, &job.stack())? } else { None };
        Ok(Self { desired, machines, launch_failure })
    }

    /// As [`query`](Self::query), with the last stage that each machine reported.
    pub(super) fn query_with_stages(
        api: &impl Api,
        job: &Job,
        stack: &Stack,
    ) -> Result<Self, Failure> {
        let mut fleet = Self::query(api, job)?;
        let mut stages = stages(api, stack)?;
        for machine in &mut fleet.machines {
            machine.stage = stages.remove(&machine.instance);
        }
        Ok(fleet)
    }

    /// The machine that runs the coordinator, if it is running.
    pub(super) fn coordinator(&self, stack: &Stack) -> Option<&Machine> {
        let role = if stack.has_several_nodes() { Role::Coordinator } else { Role::Node };
        let mut running =
            self.machines.iter().filter(|machine| machine.role == role && machine.is_running());
        running.next_back()
    }
}

/// The Auto Scaling group of a job as AWS describes it, or `null`.
pub(super) fn group(api: &impl Api, job: &Job) -> Result<Value, Failure> {
    let answer = api.json(&[
        "autoscaling",
        "describe-auto-scaling-groups",
        "--auto-scaling-group-names",
        &job.stack(),
    ])?;
    Ok(list(&answer, "AutoScalingGroups").next().cloned().unwrap_or_default())
}

/// Desired number of machines of a group.
pub(super) fn desired_capacity(group: &Value) -> u64 {
    group["DesiredCapacity"].as_u64().unwrap_or(0)
}

/// Sets the desired number of machines of the job's group.
pub(super) fn set_desired_capacity(
    api: &impl Api,
    job: &Job,
    machines: u32,
) -> Result<(), Failure> {
    api.json(&[
        "autoscaling",
        "set-desired-capacity",
        "--auto-scaling-group-name",
        &job.stack(),
        "--desired-capacity",
        &machines.to_string(),
    ])?;
    Ok(())
}

impl Machine {
    pub(super) fn is_running(&self) -> bool {
        ["InService", "Pending", "running", "pending"]
            .iter()
            .any(|state| self.state.starts_with(state))
    }
}

fn machine(instance: &Value, group: &Value) -> Machine {
    let text = |key: &str| instance[key].as_str().unwrap_or_default().to_owned();
    let id = text("InstanceId");
    let member = list(group, "Instances").find(|member| member["InstanceId"] == id.as_str());
    let state = member.map_or(&instance["State"]["Name"], |member| &member["LifecycleState"]);
    let is_member = list(instance, "Tags").any(|tag| tag["Key"] == "aws:autoscaling:groupName");
    Machine {
        role: if is_member { Role::Node } else { Role::Coordinator },
        kind: text("InstanceType"),
        zone: instance["Placement"]["AvailabilityZone"].as_str().unwrap_or_default().to_owned(),
        state: state.as_str().unwrap_or_default().to_owned(),
        launched: instance["LaunchTime"].as_str().map(ToOwned::to_owned),
        stage: None,
        instance: id,
    }
}

/// Why the group has fewer machines than desired.
fn launch_failure(api: &impl Api, group: &str) -> Result<Option<String>, Failure> {
    let answer = api.json(&[
        "autoscaling",
        "describe-scaling-activities",
        "--auto-scaling-group-name",
        group,
        "--max-items",
        "1",
    ])?;
    let newest = list(&answer, "Activities").next();
    let failed = newest.filter(|activity| {
        activity["StatusCode"] == "Failed" || activity["StatusCode"] == "Cancelled"
    });
    let message = failed.and_then(|activity| activity["StatusMessage"].as_str());
    Ok(message.map(|message| match message {
        _ if message.contains("MaxSpotInstanceCountExceeded")
            || message.contains("Max spot instance count")
            || message.contains("vCPU") =>
        {
            format!("{message}: {QUOTA}")
        }
        _ if message.contains("capacity") => format!(
            "{message} The group keeps trying; another zone or --instance-type may have capacity"
        ),
        _ if message.contains("price") => {
            format!("{message} The group keeps trying; a higher --max-price would get a machine")
        }
        _ => message.to_owned(),
    }))
}

/// The last reported stage of each machine of the job by instance id, including machines that have ended. Needs one
/// call for any number of machines.
pub(super) fn stages(api: &impl Api, stack: &Stack) -> Result<BTreeMap<String, Stage>, Failure> {
    let folder_error = |error: io::Error| {
        failed(format!("cannot use a temporary folder for the machines' reports: {error}"))
    };
    let folder = tempfile::tempdir().map_err(folder_error)?;
    let (from, to) = (format!("{}/machines/", stack.url()), folder.path().display().to_string());
    let only = ["--exclude", "*", "--include", &format!("*/{STAGE_FILE}")];
    let call = [&["s3", "cp", "--only-show-errors", "--recursive"][..], &only, &[&from, &to]];
    match api.call(&call.concat()) {
        Ok(_) => {}
        Err(error) if error.is_not_found() => return Ok(BTreeMap::new()),
        Err(error) => return Err(error.into()),
    }
    let machines = fs::read_dir(folder.path()).map_err(folder_error)?.flatten();
    let stages = machines.filter_map(|machine| {
        let json = fs::read(machine.path().join(STAGE_FILE)).ok()?;
        let json: Value = serde_json::from_slice(&json).ok()?;
        let stage = Stage {
            unix_seconds: json["time"].as_u64()?,
            text: json["stage"].as_str()?.to_owned(),
        };
        Some((machine.file_name().into_string().ok()?, stage))
    });
    Ok(stages.collect())
}

/// The newest report of any coordinator of the job.
pub(super) fn report(api: &impl Api, stack: &Stack) -> Result<Option<JobReport>, Failure> {
    let reports = machine_files(api, stack, "status.json")?;
    let Some(MachineFile { instance, .. }) = reports.last() else { return Ok(None) };
    let json = read(api, stack, instance, "status.json")?
        .and_then(|text| serde_json::from_slice::<Value>(&text).ok());
    Ok(json.and_then(|json| {
        Some(JobReport {
            instance: instance.clone(),
            unix_seconds: json["time"].as_u64()?,
            status: json["status"].clone(),
            text: json["text"].as_str()?.to_owned(),
        })
    }))
}

/// A file that a machine has written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct MachineFile {
    /// Time of the last write.
    pub(super) written: SystemTime,
    /// Instance id of the machine.
    pub(super) instance: String,
}

/// The files of this name that machines have written, ordered by the time of their last write.
pub(super) fn machine_files(
    api: &impl Api,
    stack: &Stack,
    file: &str,
) -> Result<Vec<MachineFile>, Failure> {
    let prefix = format!("{}/machines/", stack.parameter("Job"));
    let answer = api.find(&[
        "s3api",
        "list-objects-v2",
        "--bucket",
        stack.parameter("Bucket"),
        "--prefix",
        &prefix,
    ])?;
    let answer = answer.unwrap_or_default();
    let mut found: Vec<MachineFile> = list(&answer, "Contents")
        .filter_map(|object| {
            let (instance, name) =
                object["Key"].as_str()?.strip_prefix(&prefix)?.split_once('/')?;
            (name == file).then(|| MachineFile {
                written: object["LastModified"].as_str().and_then(time).unwrap_or(UNIX_EPOCH),
                instance: instance.to_owned(),
            })
        })
        .collect();
    found.sort();
    Ok(found)
}

/// Parses a time as the AWS CLI prints it.
pub(super) fn time(text: &str) -> Option<SystemTime> {
    humantime::parse_rfc3339_weak(&text.replace("+00:00", "Z")).ok()
}

/// Content of a file that a machine has written, if there is one.
pub(super) fn read(
    api: &impl Api,
    stack: &Stack,
    instance: &str,
    file: &str,
) -> Result<Option<Vec<u8>>, Failure> {
    let url = format!("{}/machines/{instance}/{file}", stack.url());
    match api.call(&["s3", "cp", "--only-show-errors", &url, "-"]) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The current time, Unix seconds.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ScriptedApi, fleet_answers, stack_of};
    use serde_json::json;

    fn job() -> Job {
        "digits".parse().unwrap()
    }

    #[test]
    fn machines_are_listed_with_their_stage() {
        let api = fleet_answers(ScriptedApi::new(), 1, &["i-1"]).file(
            "s3 cp",
            "i-1/stage.json",
            br#"{"time": 7, "stage": "installing libtorch"}"#,
        );
        let fleet = Fleet::query_with_stages(&api, &job(), &stack_of("1")).unwrap();
        assert_eq!(fleet.desired, 1);
        assert_eq!(fleet.machines[0].stage.as_ref().unwrap().text, "installing libtorch");
        assert_eq!(
            (fleet.machines[0].role, fleet.machines[0].state.as_str()),
            (Role::Node, "InService")
        );
        assert_eq!(fleet.coordinator(&stack_of("1")).unwrap().instance, "i-1");
        assert_eq!(fleet.coordinator(&stack_of("2")), None);
    }

    #[test]
    fn a_group_that_gets_no_machine_shows_reason_and_remedy() {
        for (message, expected) in [
            ("Max spot instance count exceeded. Launching EC2 instance failed.", "Service Quotas"),
            (
                "We currently do not have sufficient p4d.24xlarge capacity in the Availability Zone you requested.",
                "keeps trying",
            ),
            (
                "Your Spot request price of 1.0 is lower than the minimum required Spot request fulfillment price of 8.0.",
                "--max-price",
            ),
            ("Something else.", "Something else."),
        ] {
            let api = fleet_answers(ScriptedApi::new(), 1, &[]).answer(
                "describe-scaling-activities",
                json!({"Activities": [{"StatusCode": "Failed", "StatusMessage": message}]}),
            );
            let failure = Fleet::query(&api, &job()).unwrap().launch_failure.unwrap();
            assert!(failure.starts_with(message) && failure.contains(expected), "{failure}");
        }
    }

    #[test]
    fn the_times_of_the_aws_cli_are_parsed() {
        let expected = UNIX_EPOCH + std::time::Duration::from_secs(86_400);
        for text in ["1970-01-02T00:00:00+00:00", "1970-01-02T00:00:00.000Z"] {
            assert_eq!(time(text), Some(expected), "{text}");
        }
        assert_eq!(time("yesterday"), None);
    }

    #[test]
    fn the_newest_report_is_the_last_one_written() {
        let object = |key: &str, at: &str| json!({"Key": format!("digits/machines/{key}"), "LastModified": at});
        let api = ScriptedApi::new()
            .answer(
                "list-objects-v2",
                json!({"Contents": [
                object("i-2/status.json", "2026-11-22T10:00:00Z"),
                object("i-1/status.json", "2026-11-22T09:00:00Z"),
                object("i-3/log.txt", "2026-11-22T11:00:00Z")]}),
            )
            .bytes(
                "machines/i-2/status.json",
                br#"{"time": 9, "text": "training", "status": {"phase": "training"}}"#,
            );
        let report = report(&api, &stack_of("1")).unwrap().unwrap();
        assert_eq!((report.instance.as_str(), report.text.as_str()), ("i-2", "training"));
    }
}
