//! Names of checkpoints and of their files.
//!
//! Checkpoints of every earlier version have these names: they may not change.

use baton_job::{Generation, Rank};
use baton_recipe::Step;

/// Identity of a checkpoint. Ordered by age: a higher generation is newer, whatever its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
}

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const FROZEN: &str = "frozen";
pub(crate) const FENCES: &str = "fences";
pub(crate) const LATEST: &str = "latest";

pub(crate) fn shard_file(rank: Rank, world_size: u32) -> String {
    format!("shard-{:05}-of-{world_size:05}.safetensors", rank.0)
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
}
