//! The EBS volumes of a job, which outlive its stack and are found by their tag.

use baton_job::exit::Failure;

use crate::{api::Api, market::list, stack::Job};

/// An EBS volume of a job, made by an earlier launch or by the user, with the job's tag.
pub(super) struct Volume {
    pub(super) id: String,
    pub(super) zone: String,
    pub(super) gigabytes: u64,
    /// Whether the user made it, not a launch.
    pub(super) made_by_user: bool,
}

/// All volumes with the tag `baton:job` of this job.
pub(super) fn of(api: &impl Api, job: &Job) -> Result<Vec<Volume>, Failure> {
    let answer = api.json(&[
        "ec2",
        "describe-volumes",
        "--filters",
        &format!("Name=tag:baton:job,Values={job}"),
    ])?;
    let volumes = list(&answer, "Volumes").filter_map(|volume| {
        Some(Volume {
            id: volume["VolumeId"].as_str()?.to_owned(),
            zone: volume["AvailabilityZone"].as_str()?.to_owned(),
            gigabytes: volume["Size"].as_u64()?,
            // CloudFormation's tags stay on what it made, even after the stack is deleted.
            made_by_user: !list(volume, "Tags")
                .filter_map(|tag| tag["Key"].as_str())
                .any(|key| key.starts_with("aws:cloudformation:")),
        })
    });
    Ok(volumes.collect())
}
