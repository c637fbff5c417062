//! The volumes of a job, which outlive its stack and are found by their tag.

use baton_job::exit::Failure;

use crate::{api::Api, market::list, stack::Job};

/// A volume of a job's: made by an earlier launch, or brought by the user, who gave it the tag.
pub(super) struct Volume {
    pub(super) id: String,
    pub(super) zone: String,
    pub(super) gigabytes: u64,
    /// Not made by any launch: it is the user's.
    pub(super) is_brought: bool,
}

/// All of them, by the tag `baton:job`.
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
            // CloudFormation leaves its tags on what it made, also when the stack is gone.
            is_brought: !list(volume, "Tags")
                .filter_map(|tag| tag["Key"].as_str())
                .any(|key| key.starts_with("aws:cloudformation:")),
        })
    });
    Ok(volumes.collect())
}
