//! The file with the prediction for every sample.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write as _},
    path::{Path, PathBuf},
};

use baton_job::exit::{Failure, crash};

use crate::predictions::refuse_other_file;

/// A file that gets its name when it is complete.
pub(super) struct PredictionFile {
    path: PathBuf,
    draft: PathBuf,
    file: BufWriter<File>,
}

impl PredictionFile {
    pub(super) fn create(path: &Path, header: &str) -> Result<Self, Failure> {
        refuse_other_file(path)?;
        let mut draft = path.as_os_str().to_owned();
        draft.push(".new");
        let draft = PathBuf::from(draft);
        let file = File::create(&draft).map_err(|error| unwritable(path, &error))?;
        let mut created = Self { path: path.to_owned(), draft, file: BufWriter::new(file) };
        created.line(header)?;
        Ok(created)
    }

    pub(super) fn line(&mut self, line: &str) -> Result<(), Failure> {
        writeln!(self.file, "{line}").map_err(|error| unwritable(&self.path, &error))
    }

    pub(super) fn finish(mut self) -> Result<(), Failure> {
        let finished = self.file.flush().and_then(|()| fs::rename(&self.draft, &self.path));
        finished.map_err(|error| unwritable(&self.path, &error))
    }
}

impl Drop for PredictionFile {
    fn drop(&mut self) {
        // Nothing is left of one that is not finished.
        let _ = fs::remove_file(&self.draft);
    }
}

fn unwritable(path: &Path, error: &io::Error) -> Failure {
    crash(format!("{}: {error}; give another --predictions", path.display()))
}
