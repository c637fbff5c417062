//! When and where the state is saved.

use serde::{Deserialize, Serialize};

use super::{JobSpec, rules::Rules};

/// When and where the state is saved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Checkpoint {
    /// Folder, or `s3://bucket/prefix`; empty means `checkpoints` in the run folder.
    pub dir: String,
    /// Epochs between saves; 0 disables them.
    pub every_epochs: u32,
    /// Steps between saves; 0 disables them.
    pub every_steps: u64,
    /// Number of newest checkpoints that are kept, at least 1.
    pub keep_last: u32,
    /// Also keep the checkpoint with the best evaluation.
    pub keep_best: bool,
    /// Also keep forever the checkpoint at the end of every n-th epoch; 0 disables this.
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
    rules.at_least_1("checkpoint.keep_last", spec.checkpoint.keep_last);
    let url = spec.checkpoint.dir.split_once("://");
    // The rest of a URL may contain a password.
    rules.check(
        url.is_none_or(|(scheme, rest)| scheme == "s3" && rest.starts_with(|c| c != '/')),
        "checkpoint.dir",
        format!("{}://…", url.unwrap_or_default().0),
        "must be a folder or s3://bucket/prefix",
    );
    // A shell expands it only at the beginning of a word; a folder of this name is a trap for `rm -r`.
    rules.check(
        !spec.checkpoint.dir.starts_with('~'),
        "checkpoint.dir",
        &spec.checkpoint.dir,
        "must not begin with ~, which is not expanded here: write the path of the home folder, or $HOME in a shell",
    );
}
