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
    /// Folder on each machine's own disk, an absolute path, for [local checkpoints](checkpoints.md#local-checkpoints);
    /// empty means none.
    pub local_dir: String,
    /// Steps between local checkpoints; 0 means only when the job stops or waits for the store.
    pub local_every_steps: u64,
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
            local_dir: String::new(),
            local_every_steps: 0,
            keep_last: 3,
            keep_best: true,
            keep_every_epochs: 0,
        }
    }
}

impl Checkpoint {
    /// Whether each machine keeps local checkpoints.
    #[must_use]
    pub fn has_local(&self) -> bool {
        !self.local_dir.is_empty()
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
    let local = &spec.checkpoint.local_dir;
    rules.check(
        !spec.checkpoint.has_local() || local.starts_with('/'),
        "checkpoint.local_dir",
        local,
        "must be an absolute path of a folder on each machine's own disk",
    );
    rules.check(
        spec.checkpoint.has_local() || spec.checkpoint.local_every_steps == 0,
        "checkpoint.local_every_steps",
        spec.checkpoint.local_every_steps,
        "needs checkpoint.local_dir, the folder for local checkpoints",
    );
    // A shell expands it only at the beginning of a word; a folder of this name is a trap for `rm -r`.
    rules.check(
        !spec.checkpoint.dir.starts_with('~'),
        "checkpoint.dir",
        &spec.checkpoint.dir,
        "must not begin with ~, which is not expanded here: write the path of the home folder, or $HOME in a shell",
    );
}
