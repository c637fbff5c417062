//! Names of checkpoints and of their files.
//!
//! Checkpoints of every earlier version have these names: they may not change.

use std::str::FromStr;

use baton_job::{Generation, Rank};
use baton_recipe::Step;
use serde::{Deserialize, Serialize};

use crate::Error;

/// Identity of a checkpoint. Ordered by age: a higher generation is newer, whatever its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SaveId {
    /// The generation that writes the checkpoint.
    pub generation: Generation,
    /// Number of updates made.
    pub step: Step,
}

impl SaveId {
    /// Name of the folder, e.g. `step-0000000440-gen-000003`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("step-{:010}-gen-{:06}", self.step.0, self.generation.0)
    }

    /// Parses the name of a folder; `None` if it is not the name of a checkpoint.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let (step, generation) = name.strip_prefix("step-")?.split_once("-gen-")?;
        let id = Self {
            generation: Generation(generation.parse().ok()?),
            step: Step(step.parse().ok()?),
        };
        // Accept only the canonical form, so that names and identities correspond one to one.
        (id.name() == name).then_some(id)
    }

    /// Name of the checkpoint in which this folder or `s3://bucket/prefix` would be. Retention removes whole checkpoints.
    #[must_use]
    pub fn around(location: &str) -> Option<&str> {
        location.split('/').find(|part| Self::parse(part).is_some())
    }
}

/// A checkpoint as a user names it, for instance with `--resume`: `NAME`, or `LOCATION/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointReference {
    /// The folder or `s3://bucket/prefix`, if given.
    pub location: Option<String>,
    /// Identity of the checkpoint.
    pub id: SaveId,
}

impl FromStr for CheckpointReference {
    type Err = Error;

    fn from_str(typed: &str) -> Result<Self, Error> {
        let trimmed = typed.trim_end_matches('/');
        let (location, name) = match trimmed.rsplit_once('/') {
            // The checkpoint is in the root folder.
            Some(("", name)) => (Some("/"), name),
            Some((location, name)) => (Some(location), name),
            None => (None, trimmed),
        };
        let id = SaveId::parse(name).ok_or_else(|| Error::NoReference(typed.to_owned()))?;
        Ok(Self { location: location.map(str::to_owned), id })
    }
}

/// Name of the file that makes a folder a checkpoint.
pub const MANIFEST: &str = "manifest.json";
pub(crate) const EVALUATION: &str = "evaluation.json";
pub(crate) const FROZEN: &str = "frozen";
pub(crate) const FENCES: &str = "fences";
pub(crate) const JOURNAL: &str = "journal";
pub(crate) const LEASES: &str = "leases";
pub(crate) const LATEST: &str = "latest";
pub(crate) const PROFILES: &str = "profiles";

pub(crate) fn shard_file(rank: Rank, world_size: u32) -> String {
    format!("shard-{:05}-of-{world_size:05}.safetensors", rank.0)
}

/// The file that says that a rank's part of a local checkpoint is complete.
pub(crate) fn part_file(rank: Rank, parts: u32) -> String {
    format!("part-{:05}-of-{parts:05}.json", rank.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_canonical_names_are_parsed() {
        let id = SaveId { generation: Generation(3), step: Step(440) };
        assert_eq!(id.name(), "step-0000000440-gen-000003");
        assert_eq!(SaveId::parse(&id.name()), Some(id));
        for other in ["step-440-gen-3", "step-0000000440", "latest", "step-x-gen-y", ""] {
            assert_eq!(SaveId::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_reference_is_a_name_with_or_without_a_location() {
        let id = SaveId { generation: Generation(3), step: Step(440) };
        let name = id.name();
        for (typed, location) in [
            (name.clone(), None),
            (format!("{name}/"), None),
            (format!("/{name}"), Some("/")),
            (format!("runs/a/{name}"), Some("runs/a")),
            (format!("s3://bucket/prefix/{name}/"), Some("s3://bucket/prefix")),
        ] {
            let expected = CheckpointReference { location: location.map(str::to_owned), id };
            assert_eq!(typed.parse::<CheckpointReference>().unwrap(), expected, "{typed}");
        }
    }

    #[test]
    fn what_names_no_checkpoint_is_refused_with_the_forms_that_do() {
        for typed in ["nosuch", "", "..", "/", "s3://", "http://x", "s3://bucket/nosuch"] {
            let error = typed.parse::<CheckpointReference>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{typed:?} is not a checkpoint: ")), "{error}");
            assert!(error.contains("FOLDER/NAME") && !error.contains('\n'), "{error}");
        }
    }
}
