//! What commands read of `report.json`, which a job that has ended leaves in its run folder.

use std::{fs, io::ErrorKind, path::Path};

use baton_job::exit::Failure;
use baton_proto::v1::InvalidatedCheckpoints;
use serde::Deserialize;

use crate::failure::bad_input;

/// The report of the job in a run folder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SavedReport {
    pub(crate) status: SavedStatus,
    pub(crate) recipe_toml: String,
}

/// The status when the job last ended.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SavedStatus {
    pub(crate) checkpoint_location: String,
    pub(crate) invalidated_checkpoints: Vec<InvalidatedCheckpoints>,
    pub(crate) outcome: Option<SavedOutcome>,
    pub(crate) divergences: Vec<SavedDivergence>,
    pub(crate) spending: SavedSpending,
}

/// How the job ended.
#[derive(Debug, Deserialize)]
pub(crate) struct SavedOutcome {
    pub(crate) kind: String,
    pub(crate) reason: Option<String>,
}

/// A divergence of training.
#[derive(Debug, Deserialize)]
pub(crate) struct SavedDivergence {
    /// How training went on; absent if the divergence ended the job.
    pub(crate) rollback: Option<serde_json::Value>,
}

/// What the job has cost.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SavedSpending {
    pub(crate) hours: f64,
    pub(crate) dollars: Option<f64>,
}

impl SavedReport {
    /// `None` if there is none. One that cannot be read is an error: only it knows which checkpoints training has taken back.
    pub(crate) fn read(run_dir: &Path) -> Result<Option<Self>, Failure> {
        let path = run_dir.join("report.json");
        let refused = |problem: String| {
            bad_input(format!(
                "{}: {problem}, and only it says which checkpoints training has taken back: start the job again, which writes \
                 it anew, or give the folder of the checkpoints with --dir and a checkpoint's name",
                path.display()
            ))
        };
        match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(refused(format!("cannot be read: {error}"))),
            Ok(content) => serde_json::from_slice(&content)
                .map(Some)
                .map_err(|error| refused(format!("is damaged ({error})"))),
        }
    }
}
