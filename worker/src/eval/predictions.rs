//! The prediction for every sample, as a CSV file.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write as _},
    path::{Path, PathBuf},
};

use baton_console::output::refuse_special_file;
use baton_job::exit::{Failure, crash};

use super::by_class::{Prediction, prediction};

/// A file that gets its name when it is complete.
pub(super) struct PredictionFile {
    path: PathBuf,
    draft: PathBuf,
    file: BufWriter<File>,
    /// Whether the probabilities of all classes are written.
    has_probabilities: bool,
}

impl PredictionFile {
    /// A file of a classification with so many classes, or of a regression with so many outputs.
    pub(super) fn create(
        path: &Path,
        outputs: usize,
        is_classification: bool,
        has_probabilities: bool,
    ) -> Result<Self, Failure> {
        refuse_special_file(path)?;
        let mut draft = path.as_os_str().to_owned();
        draft.push(".new");
        let draft = PathBuf::from(draft);
        let file = File::create(&draft).map_err(|error| unwritable(path, &error))?;
        let mut created =
            Self { path: path.to_owned(), draft, file: BufWriter::new(file), has_probabilities };
        let numbered = |name: &str| match outputs {
            1 => name.to_owned(),
            _ => (0..outputs).map(|output| format!("{name}{output}")).collect::<Vec<_>>().join(","),
        };
        let header = match (is_classification, has_probabilities) {
            (false, _) => format!("sample,{},{}", numbered("target"), numbered("prediction")),
            (true, false) => "sample,label,prediction,probability".to_owned(),
            (true, true) => format!("sample,label,prediction,probability,{}", numbered("p")),
        };
        created.line(&header)?;
        Ok(created)
    }

    /// A sample of a classification.
    pub(super) fn add_class(
        &mut self,
        sample: u64,
        label: i64,
        probabilities: &[f32],
    ) -> Result<(), Failure> {
        let Prediction { class, probability } = prediction(probabilities);
        let mut line = format!("{sample},{label},{class},{probability}");
        if self.has_probabilities {
            probabilities.iter().for_each(|value| line += &format!(",{value}"));
        }
        self.line(&line)
    }

    /// A sample of a regression.
    pub(super) fn add_values(
        &mut self,
        sample: u64,
        targets: &[f32],
        outputs: &[f32],
    ) -> Result<(), Failure> {
        let values = targets.iter().chain(outputs).map(|value| format!(",{value}"));
        self.line(&format!("{sample}{}", values.collect::<String>()))
    }

    pub(super) fn finish(mut self) -> Result<(), Failure> {
        let finished = self.file.flush().and_then(|()| fs::rename(&self.draft, &self.path));
        finished.map_err(|error| unwritable(&self.path, &error))
    }

    fn line(&mut self, line: &str) -> Result<(), Failure> {
        writeln!(self.file, "{line}").map_err(|error| unwritable(&self.path, &error))
    }
}

fn unwritable(path: &Path, error: &io::Error) -> Failure {
    crash(format!("{}: {error}; give another --predictions", path.display()))
}
