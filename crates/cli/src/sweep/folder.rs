//! The list of a sweep's trials, in `sweep.json` of its folder: which number has which settings.

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use baton_console::output::refuse_special_file;
use baton_job::exit::Failure;
use baton_recipe::data_summary::SetSummary;
use serde::{Deserialize, Serialize};

use super::space::TrialSettings;
use crate::failure::{bad_input, failed};

/// The version of the file that this program writes.
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
struct SavedSweep {
    version: u32,
    /// `KEY=VALUE` each. The position is the number of the run folder, so trials are added at the end and never removed.
    trials: Vec<TrialSettings>,
    /// What the sets of samples hold, by their place.
    #[serde(default)]
    data: BTreeMap<String, SetSummary>,
}

/// The trials of a sweep, in `sweep.json` of its folder.
#[derive(Debug)]
pub(super) struct SweepFolder {
    path: PathBuf,
    /// All trials, also those of earlier starts.
    pub(super) trials: Vec<TrialSettings>,
    /// What the sets of samples held when they were first used.
    pub(super) data: BTreeMap<String, SetSummary>,
}

impl SweepFolder {
    /// Reads the list in a folder, which may not exist yet.
    pub(super) fn open(dir: &Path) -> Result<Self, Failure> {
        let path = dir.join("sweep.json");
        let about = |problem: String| bad_input(format!("{}: {problem}", path.display()));
        refuse_special_file(&path)?;
        let (trials, data) = match fs::read(&path) {
            Ok(bytes) => {
                let saved: SavedSweep = serde_json::from_slice(&bytes).map_err(|error| {
                    about(format!("is damaged ({error}); give another folder with --dir"))
                })?;
                if saved.version > VERSION {
                    return Err(about("a newer Baton wrote it: use that one".to_owned()));
                }
                (saved.trials, saved.data)
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Default::default(),
            Err(error) => return Err(about(error.to_string())),
        };
        Ok(Self { path, trials, data })
    }

    /// Writes the list.
    pub(super) fn save(&self) -> Result<(), Failure> {
        let (trials, data) = (self.trials.clone(), self.data.clone());
        let saved = SavedSweep { version: VERSION, trials, data };
        let text = serde_json::to_string_pretty(&saved).map_err(failed)?;
        write(&self.path, &text)
    }
}

/// Writes a file whole or not at all.
pub(super) fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let mut new = PathBuf::from(path).into_os_string();
    new.push(".new");
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    written.map_err(|error| match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => failed(format!(
            "{}: {error}; the same command goes on once there is space",
            path.display()
        )),
        _ => bad_input(format!("{}: {error}; give a writable --dir", path.display())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_there_after_it_was_saved() {
        let dir = tempfile::tempdir().unwrap();
        let mut folder = SweepFolder::open(dir.path()).unwrap();
        assert!(folder.trials.is_empty());
        folder.trials = vec![vec!["a=1".to_owned(), "seed=0".to_owned()]];
        folder.save().unwrap();
        assert_eq!(SweepFolder::open(dir.path()).unwrap().trials, folder.trials);
    }

    #[test]
    fn a_list_that_cannot_be_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |text: &str| {
            fs::write(dir.path().join("sweep.json"), text).unwrap();
            SweepFolder::open(dir.path()).unwrap_err().message
        };
        assert!(refused("{").contains("is damaged"));
        assert!(refused("{\"version\":2,\"trials\":[]}").contains("a newer Baton wrote it"));
    }
}
