//! What `baton up` itself reads of checkpoint stores.

use std::path::Path;

use baton_checkpoint::{CheckpointReference, EntryState};
use baton_job::exit::Failure;
use baton_recipe::JobSpec;

use crate::{
    commands::checkpoint::folder::{CHECKPOINTS, blocking, open, store_failure},
    failure::bad_input,
};

/// Checks the checkpoint of `--resume` before anything starts: the ranks would find out late, and would be restarted.
///
/// `typed` is one of the job's own store, or the path or URL of another one.
///
/// # Errors
/// It is not, or it is damaged, or its bucket does not answer.
pub(super) async fn check(typed: &str, spec: &JobSpec, run_dir: &Path) -> Result<(), Failure> {
    let about = |message: String| format!("--resume: {message}");
    let CheckpointReference { location, id } = typed
        .parse()
        .map_err(|error: baton_checkpoint::Error| bad_input(about(error.to_string())))?;
    let location = location.unwrap_or_else(|| own_store(spec, run_dir));
    blocking(move || {
        let store = open(&location).map_err(|failure| bad_input(about(failure.message)))?;
        let manifest = store.manifest(&id.name()).map_err(store_failure);
        manifest.map(drop).map_err(|failure| Failure { message: about(failure.message), ..failure })
    })
    .await
}

/// Name of the newest complete checkpoint of a job.
///
/// # Errors
/// The store cannot be read.
pub(super) async fn newest(spec: &JobSpec, run_dir: &Path) -> Result<Option<String>, Failure> {
    let location = own_store(spec, run_dir);
    blocking(move || {
        let entries = open(&location)?.list().map_err(store_failure)?;
        let mut complete =
            entries.into_iter().filter(|entry| matches!(entry.state, EntryState::Complete(_)));
        Ok(complete.next().map(|entry| entry.name))
    })
    .await
}

/// Location of the checkpoints of a job, by the rule of the coordinator.
pub(super) fn own_store(spec: &JobSpec, run_dir: &Path) -> String {
    match spec.checkpoint.dir.as_str() {
        "" => run_dir.join(CHECKPOINTS).display().to_string(),
        dir => dir.to_owned(),
    }
}
