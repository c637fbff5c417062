//! The evaluation of a checkpoint, written after the checkpoint is committed.
//!
//! A checkpoint is committed before its state is evaluated, so that a long evaluation puts no update at risk. The progress
//! after the evaluation is then written beside the manifest, and readers take it instead of the manifest's. The file may be
//! replaced: the evaluation of a subset is followed by one of the whole set, and a generation that repeats an evaluation
//! gets the same result. If the file is missing or damaged, the checkpoint counts as not evaluated.

use baton_job::Generation;
use baton_recipe::progress::Progress;
use object_store::PutMode;
use serde::{Deserialize, Serialize};

use crate::{
    Error, Manifest, SaveId, Store,
    manifest::{MAX_BYTES, is_sealed},
    name::{EVALUATION, MANIFEST},
};

/// Content of the file. Its last field, `blake3`, is the digest of the text before it, as in a manifest.
#[derive(Debug, Serialize, Deserialize)]
struct EvaluationFile {
    /// The position of training after the evaluation.
    progress: Progress,
}

pub(crate) fn evaluation_file(id: SaveId) -> String {
    format!("{}/{EVALUATION}", id.name())
}

impl Store {
    /// Adds the results of the evaluation of a checkpoint's state; `progress` is the position after it. Does nothing if
    /// the store does not hold the checkpoint.
    ///
    /// # Errors
    /// A generation newer than `writer` has taken over; the file cannot be written.
    pub fn add_evaluation(
        &self,
        id: SaveId,
        progress: &Progress,
        writer: Generation,
    ) -> Result<(), Error> {
        self.check_fence(writer)?;
        if self.read(&format!("{}/{MANIFEST}", id.name()), MAX_BYTES)?.is_none() {
            return Ok(());
        }
        let evaluation = EvaluationFile { progress: progress.clone() };
        let not_writable = |error: serde_json::Error| Error::NotCommittable {
            name: id.name(),
            problem: format!("its evaluation cannot be encoded: {error}"),
        };
        let text = serde_json::to_string_pretty(&evaluation).map_err(not_writable)?;
        self.write(&evaluation_file(id), Manifest::seal(&text).into(), PutMode::Overwrite)
    }

    /// Takes over the evaluation that was added to a checkpoint.
    pub(crate) fn read_evaluation(&self, manifest: &mut Manifest) -> Result<(), Error> {
        let file = evaluation_file(manifest.id());
        let bytes = match self.read(&file, MAX_BYTES) {
            Err(error) if error.is_unreachable() => return Err(error),
            read => read.ok().flatten(),
        };
        let Some(bytes) = bytes.filter(|bytes| is_sealed(bytes)) else { return Ok(()) };
        let position = |progress: &Progress| (progress.step, progress.epoch, progress.cursor);
        if let Ok(EvaluationFile { progress }) = serde_json::from_slice(&bytes)
            && position(&progress) == position(&manifest.progress)
        {
            manifest.progress = progress;
        }
        Ok(())
    }
}
