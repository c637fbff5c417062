//! When and where state is saved.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// When and where state is saved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Checkpoint {
    /// Folder, or `s3://bucket/prefix`; empty is `checkpoints` in the run folder.
    pub dir: String,
    /// Epochs between saves; 0 is off.
    pub every_epochs: u32,
    /// Updates between saves; 0 is off.
    pub every_steps: u64,
    /// Newest ones kept, at least 1.
    pub keep_last: u32,
    /// Keep the best by evaluation too.
    pub keep_best: bool,
    /// Keep those of the end of every so many epochs for ever too; 0 is off.
    pub keep_every_epochs: u32,
}

impl Default for Checkpoint {
    fn default() -> Self {
        Self {
            dir: String::new(),
            every_epochs: 1,
            every_steps: 0,
            keep_last: 3,
            keep_best: true,
            keep_every_epochs: 0,
        }
    }
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let keep = spec.checkpoint.keep_last;
    rules.check(keep >= 1, "checkpoint.keep_last", keep, "must be at least 1");
}
