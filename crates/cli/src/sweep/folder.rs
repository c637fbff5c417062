//! The list of a sweep's trials, in `sweep.json` of its folder: which number has which settings.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use baton_job::exit::Failure;
use serde::{Deserialize, Serialize};

use super::space::{TrialSettings, is_same};
use crate::failure::bad_input;

/// The version of the file that this program writes.
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
struct SavedSweep {
    version: u32,
    /// `KEY=VALUE` each. The position is the number of the run folder, so trials are added at the end and never removed.
    trials: Vec<TrialSettings>,
}

/// The trials of a sweep.
#[derive(Debug)]
pub(super) struct SweepFolder {
    /// All trials, also those of earlier starts.
    pub(super) trials: Vec<TrialSettings>,
}

impl SweepFolder {
    /// Reads the list in a folder, and adds the `wanted` trials that are not there yet.
    pub(super) fn open(dir: &Path, wanted: &[TrialSettings]) -> Result<Self, Failure> {
        let path = dir.join("sweep.json");
        let about = |problem: String| bad_input(format!("{}: {problem}", path.display()));
        let mut trials = match fs::read(&path) {
            Ok(bytes) => {
                let saved: SavedSweep = serde_json::from_slice(&bytes).map_err(|error| {
                    about(format!("is damaged ({error}); give another folder with --dir"))
                })?;
                if saved.version > VERSION {
                    return Err(about("a newer Baton wrote it: use that one".to_owned()));
                }
                saved.trials
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(about(error.to_string())),
        };
        let known = trials.len();
        for trial in wanted {
            if !trials.iter().any(|other| is_same(other, trial)) {
                trials.push(trial.clone());
            }
        }
        if trials.len() > known {
            let saved = SavedSweep { version: VERSION, trials };
            let text =
                serde_json::to_string_pretty(&saved).map_err(|error| about(error.to_string()))?;
            write(&path, &text)?;
            trials = saved.trials;
        }
        Ok(Self { trials })
    }
}

/// Writes a file whole or not at all.
pub(super) fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let mut new = PathBuf::from(path).into_os_string();
    new.push(".new");
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    written
        .map_err(|error| bad_input(format!("{}: {error}; give a writable --dir", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(texts: &[&str]) -> Vec<TrialSettings> {
        texts.iter().map(|text| text.split(' ').map(str::to_owned).collect()).collect()
    }

    #[test]
    fn trials_keep_their_numbers_when_others_are_added() {
        let dir = tempfile::tempdir().unwrap();
        let open =
            |wanted: &[&str]| SweepFolder::open(dir.path(), &settings(wanted)).unwrap().trials;
        assert_eq!(open(&["a=1 seed=0", "a=1 seed=1"]), settings(&["a=1 seed=0", "a=1 seed=1"]));
        let all = settings(&["a=1 seed=0", "a=1 seed=1", "a=2 seed=0"]);
        assert_eq!(open(&["a=2 seed=0", "seed=1 a=1"]), all);
        assert_eq!(open(&["a=1 seed=1"]), all);
    }

    #[test]
    fn a_list_that_cannot_be_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |text: &str| {
            fs::write(dir.path().join("sweep.json"), text).unwrap();
            SweepFolder::open(dir.path(), &settings(&["a=1"])).unwrap_err().message
        };
        assert!(refused("{").contains("is damaged"));
        assert!(refused("{\"version\":2,\"trials\":[]}").contains("a newer Baton wrote it"));
    }
}
