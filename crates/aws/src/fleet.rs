//! The machines of a job, and what they tell of themselves.
//!
//! A machine writes some times a minute into the bucket what it sees and logs (`deploy/aws/node/report.sh`), so that it can
//! be asked without a way in, and after its end.

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

/// In which a machine says what it does.
const STAGE: &str = "stage.json";

/// The group of a job, and its machines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Fleet {
    /// How many machines the group is to have; 0 when the job is over.
    pub(super) wanted: u64,
    pub(super) machines: Vec<Machine>,
    /// Why the last try to get a machine failed, in the words of AWS.
    pub(super) trouble: Option<String>,
}

/// One machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Machine {
    pub(super) instance: String,
    pub(super) role: Role,
    pub(super) kind: String,
    pub(super) zone: String,
    /// As the group has it (`InService`, …), else as EC2 does.
    pub(super) state: String,
    /// When EC2 started it.
    pub(super) launched: Option<String>,
    /// What it said last that it does, and when.
    pub(super) stage: Option<Stage>,
}

/// What a machine is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Role {
    /// Trains; the only machine of a job has the coordinator too.
    Node,
    /// Has the coordinator of several nodes.
    Coordinator,
}

/// What a machine does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Stage {
    /// Seconds since 1970.
    pub(super) unix_seconds: u64,
    pub(super) words: String,
}

/// The job as its coordinator told of it last.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Report {
    /// The machine that told.
    pub(super) instance: String,
    /// Seconds since 1970.
    pub(super) unix_seconds: u64,
    /// What `baton status --json` printed there.
    pub(super) status: Value,
    /// What `baton status` printed there.
    #[serde(skip)]
    pub(super) text: String,
}

impl Fleet {
    /// What AWS tells of it.
    pub(super) fn look(api: &impl Api, job: &Job) -> Result<Self, Failure> {
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
        machines.sort_by(|a, b| {
            (a.role != Role::Coordinator, &a.launched)
                .cmp(&(b.role != Role::Coordinator, &b.launched))
        });
        let wanted = wanted(&group);
        let running = machines.iter().filter(|machine| machine.role == Role::Node).count() as u64;
        let trouble = if wanted > running { trouble(api, &job.stack())? } else { None };
        Ok(Self { wanted, machines, trouble })
    }

    /// As [`look`](Self::look), and what each machine said last that it does.
    pub(super) fn look_and_listen(
        api: &impl Api,
        job: &Job,
        stack: &Stack,
    ) -> Result<Self, Failure> {
        let mut fleet = Self::look(api, job)?;
        let mut stages = stages(api, stack)?;
        for machine in &mut fleet.machines {
            machine.stage = stages.remove(&machine.instance);
        }
        Ok(fleet)
    }

    /// The machine that has the coordinator, if one runs.
    pub(super) fn coordinator(&self, stack: &Stack) -> Option<&Machine> {
        let role = if stack.has_several_nodes() { Role::Coordinator } else { Role::Node };
        let mut running =
            self.machines.iter().filter(|machine| machine.role == role && machine.runs());
        running.next_back()
    }
}

/// The group of a job, or `null`.
pub(super) fn group(api: &impl Api, job: &Job) -> Result<Value, Failure> {
    let answer = api.json(&[
        "autoscaling",
        "describe-auto-scaling-groups",
        "--auto-scaling-group-names",
        &job.stack(),
    ])?;
    Ok(list(&answer, "AutoScalingGroups").next().cloned().unwrap_or_default())
}

/// How many machines a group is to have.
pub(super) fn wanted(group: &Value) -> u64 {
    group["DesiredCapacity"].as_u64().unwrap_or(0)
}

/// Sets how many machines the group is to have.
pub(super) fn want(api: &impl Api, job: &Job, machines: u32) -> Result<(), Failure> {
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
    pub(super) fn runs(&self) -> bool {
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

/// Why the group has fewer machines than it wants.
fn trouble(api: &impl Api, group: &str) -> Result<Option<String>, Failure> {
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
    let words = failed.and_then(|activity| activity["StatusMessage"].as_str());
    Ok(words.map(|words| match words {
        _ if words.contains("MaxSpotInstanceCountExceeded")
            || words.contains("Max spot instance count")
            || words.contains("vCPU") =>
        {
            format!("{words}: {QUOTA}")
        }
        _ if words.contains("capacity") => format!(
            "{words} The group goes on trying; another zone or --instance-type may have some"
        ),
        _ if words.contains("price") => {
            format!("{words} The group goes on trying; a higher --max-price would get one")
        }
        _ => words.to_owned(),
    }))
}

/// What each machine of the job said last that it does, also those that are gone. One call, however many they are.
pub(super) fn stages(api: &impl Api, stack: &Stack) -> Result<BTreeMap<String, Stage>, Failure> {
    let about = |error: io::Error| failed(format!("a folder for what machines tell: {error}"));
    let folder = tempfile::tempdir().map_err(about)?;
    let (from, to) = (format!("{}/machines/", stack.place()), folder.path().display().to_string());
    let only = ["--exclude", "*", "--include", &format!("*/{STAGE}")];
    let call = [&["s3", "cp", "--only-show-errors", "--recursive"][..], &only, &[&from, &to]];
    match api.call(&call.concat()) {
        Ok(_) => {}
        Err(error) if error.is_absence() => return Ok(BTreeMap::new()),
        Err(error) => return Err(error.into()),
    }
    let machines = fs::read_dir(folder.path()).map_err(about)?.flatten();
    let told = machines.filter_map(|machine| {
        let told = fs::read(machine.path().join(STAGE)).ok()?;
        let told: Value = serde_json::from_slice(&told).ok()?;
        let stage = Stage {
            unix_seconds: told["time"].as_u64()?,
            words: told["stage"].as_str()?.to_owned(),
        };
        Some((machine.file_name().into_string().ok()?, stage))
    });
    Ok(told.collect())
}

/// The newest word of any coordinator of the job.
pub(super) fn report(api: &impl Api, stack: &Stack) -> Result<Option<Report>, Failure> {
    let names = written(api, stack, "status.json")?;
    let Some(instance) = names.last() else { return Ok(None) };
    let told = read(api, stack, instance, "status.json")?
        .and_then(|text| serde_json::from_slice::<Value>(&text).ok());
    Ok(told.and_then(|told| {
        Some(Report {
            instance: instance.clone(),
            unix_seconds: told["time"].as_u64()?,
            status: told["status"].clone(),
            text: told["text"].as_str()?.to_owned(),
        })
    }))
}

/// The machines that have written such a file, those that wrote last at the end.
pub(super) fn written(api: &impl Api, stack: &Stack, file: &str) -> Result<Vec<String>, Failure> {
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
    let mut found: Vec<(String, String)> = list(&answer, "Contents")
        .filter_map(|object| {
            let (instance, name) =
                object["Key"].as_str()?.strip_prefix(&prefix)?.split_once('/')?;
            (name == file).then(|| {
                (
                    object["LastModified"].as_str().unwrap_or_default().to_owned(),
                    instance.to_owned(),
                )
            })
        })
        .collect();
    found.sort();
    Ok(found.into_iter().map(|(_, instance)| instance).collect())
}

/// A file that a machine has written.
pub(super) fn read(
    api: &impl Api,
    stack: &Stack,
    instance: &str,
    file: &str,
) -> Result<Option<Vec<u8>>, Failure> {
    let url = format!("{}/machines/{instance}/{file}", stack.place());
    match api.call(&["s3", "cp", "--only-show-errors", &url, "-"]) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.is_absence() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Script, fleet_answers, stack_of};
    use serde_json::json;

    fn job() -> Job {
        "digits".parse().unwrap()
    }

    #[test]
    fn machines_are_told_with_what_they_do() {
        let api = fleet_answers(Script::new(), 1, &["i-1"]).file(
            "s3 cp",
            "i-1/stage.json",
            br#"{"time": 7, "stage": "installing libtorch"}"#,
        );
        let fleet = Fleet::look_and_listen(&api, &job(), &stack_of("1")).unwrap();
        assert_eq!(fleet.wanted, 1);
        assert_eq!(fleet.machines[0].stage.as_ref().unwrap().words, "installing libtorch");
        assert_eq!(
            (fleet.machines[0].role, fleet.machines[0].state.as_str()),
            (Role::Node, "InService")
        );
        assert_eq!(fleet.coordinator(&stack_of("1")).unwrap().instance, "i-1");
        assert_eq!(fleet.coordinator(&stack_of("2")), None);
    }

    #[test]
    fn a_group_that_gets_no_machine_says_why_and_what_to_do() {
        for (words, told) in [
            ("Max spot instance count exceeded. Launching EC2 instance failed.", "Service Quotas"),
            (
                "We currently do not have sufficient p4d.24xlarge capacity in the Availability Zone you requested.",
                "goes on trying",
            ),
            (
                "Your Spot request price of 1.0 is lower than the minimum required Spot request fulfillment price of 8.0.",
                "--max-price",
            ),
            ("Something else.", "Something else."),
        ] {
            let api = fleet_answers(Script::new(), 1, &[]).answer(
                "describe-scaling-activities",
                json!({"Activities": [{"StatusCode": "Failed", "StatusMessage": words}]}),
            );
            let trouble = Fleet::look(&api, &job()).unwrap().trouble.unwrap();
            assert!(trouble.starts_with(words) && trouble.contains(told), "{trouble}");
        }
    }

    #[test]
    fn the_newest_report_is_the_one_that_was_written_last() {
        let object = |key: &str, at: &str| json!({"Key": format!("digits/machines/{key}"), "LastModified": at});
        let api = Script::new()
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
