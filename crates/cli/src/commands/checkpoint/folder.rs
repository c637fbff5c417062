//! Finds the folder that holds a job's checkpoints, and the checkpoint that is meant.

use std::path::{Path, PathBuf};

use baton_checkpoint::{EntryState, Manifest, Store};
use baton_job::exit::Failure;

use crate::{
    connect::{self, Coordinator, Where},
    failure::failed,
};

/// Flags of every command that reads checkpoints.
#[derive(Debug, clap::Args)]
pub(super) struct Folder {
    /// The folder that holds the checkpoints [default: that of the job, else of the newest run]
    #[arg(long, value_name = "DIR")]
    pub(super) dir: Option<PathBuf>,
    #[command(flatten)]
    pub(super) place: Where,
}

impl Folder {
    /// The folder: as named, else as a coordinator says, else in the run folder, else in the newest
    /// run's.
    pub(super) async fn find(&self) -> Result<String, Failure> {
        if let Some(dir) = &self.dir {
            return Ok(dir.display().to_string());
        }
        if let Some(location) = self.ask().await {
            return Ok(location);
        }
        let in_run = match &self.place.run_dir {
            Some(run_dir) => run_dir.join(CHECKPOINTS),
            None => connect::newest_below(Path::new(connect::RUNS), CHECKPOINTS)
                .unwrap_or_else(|| Path::new(connect::RUNS).join("*").join(CHECKPOINTS)),
        };
        if in_run.is_dir() {
            return Ok(in_run.display().to_string());
        }
        Err(failed(format!(
            "no coordinator answers, and there is no {}: name the folder of the checkpoints with --dir",
            in_run.display()
        )))
    }

    async fn ask(&self) -> Option<String> {
        let status = Coordinator::find(&self.place).ok()?.status().await.ok()?;
        Some(status.checkpoint_location).filter(|location| !location.is_empty())
    }
}

/// Where a run folder has its checkpoints unless the recipe says otherwise.
const CHECKPOINTS: &str = "checkpoints";

/// Works on the store at `location`, away from the async threads: its calls block.
pub(super) async fn with_store<T: Send + 'static>(
    location: String,
    work: impl FnOnce(&Store) -> Result<T, baton_checkpoint::Error> + Send + 'static,
) -> Result<T, Failure> {
    let work = move || Store::open_existing(&location).and_then(|store| work(&store));
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| failed(error.to_string())),
        Err(error) => Err(failed(format!("reading checkpoints: {error}; this is a bug"))),
    }
}

/// The checkpoint called `name`, or the newest whole one.
pub(super) fn pick(
    store: &Store,
    name: Option<&str>,
) -> Result<Option<Manifest>, baton_checkpoint::Error> {
    if let Some(name) = name {
        return store.manifest(name).map(Some);
    }
    let whole = store.list()?.into_iter().find_map(|entry| match entry.state {
        EntryState::Whole(manifest) => Some(*manifest),
        EntryState::Damaged(_) | EntryState::Unfinished => None,
    });
    Ok(whole)
}

/// Why [`pick`] found none.
pub(super) fn none_whole(location: &str) -> Failure {
    failed(format!("{location} holds no whole checkpoint"))
}
