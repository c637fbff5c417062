//! Copies a checkpoint from one store to another.

use bytes::Bytes;
use object_store::PutMode;

use crate::{
    Error, Manifest, Store,
    evaluation::evaluation_file,
    fence::Tombstone,
    manifest::MAX_BYTES,
    name::{LATEST, MANIFEST},
    store::first_wrong_file,
};

/// Result of copying a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyResult {
    /// Number of files written, without the manifest.
    pub written: usize,
    /// Number of files left by an earlier copy that match their digests and were not written again.
    pub kept: usize,
    /// Total size of the written files, in bytes.
    pub written_bytes: u64,
    /// Whether the checkpoint was already committed in the destination. Then nothing is changed.
    pub was_there: bool,
}

impl Store {
    /// Copies a checkpoint into the store `to` under the same name, one file after the other: the manifest
    /// last and create-only. Each file is verified before it is written, and skipped if the destination already
    /// has it. The destination's fence is raised to the checkpoint's generation, so that a job that resumes from
    /// the copy gets a newer generation. `progress` is called with the bytes processed since its last call,
    /// [`Manifest::all_bytes`] in total.
    ///
    /// # Errors
    /// The checkpoint is damaged, or was removed meanwhile; the destination has a different checkpoint of that name, or cannot be written.
    pub fn copy_to(
        &self,
        manifest: &Manifest,
        to: &Self,
        progress: &dyn Fn(u64),
    ) -> Result<CopyResult, Error> {
        let name = manifest.name();
        let path = format!("{name}/{MANIFEST}");
        let commit = self.read(&path, MAX_BYTES)?.ok_or_else(|| Error::Missing {
            name: name.clone(),
            location: self.location().to_owned(),
        })?;
        if to.holds_commit(&name, &path, &commit)? {
            self.copy_evaluation(manifest, to)?;
            progress(manifest.all_bytes());
            let kept = manifest.files().count();
            return Ok(CopyResult { kept, was_there: true, ..CopyResult::default() });
        }
        to.raise_fence(manifest.generation)?;
        let mut copied = CopyResult::default();
        for file in manifest.files() {
            match to.read_verified(&file, &mut |_, _| {}) {
                Ok(()) => copied.kept += 1,
                // Missing, or incomplete because an earlier copy was interrupted.
                Err(_) => {
                    let mut bytes = Vec::with_capacity(usize::try_from(file.bytes).unwrap_or(0));
                    self.read_verified(&file, &mut |_, block| bytes.extend_from_slice(block))
                        .map_err(|error| self.unless_removed(manifest, error))?;
                    to.write(&file.path, bytes.into(), PutMode::Overwrite)?;
                    copied.written += 1;
                    copied.written_bytes += file.bytes;
                }
            }
            progress(file.bytes);
        }
        // A job there takes the files of an older generation for an abandoned save.
        if let Some(problem) = first_wrong_file(manifest, &to.file_sizes(manifest)?) {
            let location = to.location().to_owned();
            let problem = format!(
                "a job in {location} removed a file of the copy: {problem}; run the command again"
            );
            return Err(Error::NotCommittable { name, problem });
        }
        match to.create(&path, &commit)? {
            // Of a save or a copy that was abandoned: no rank can commit under this name, now as before.
            Some(existing) if Tombstone::parse(&existing).is_some() => {
                to.write(&path, commit.into(), PutMode::Overwrite)?;
            }
            Some(_) => return Err(Error::Exists(name)),
            None => {}
        }
        self.copy_evaluation(manifest, to)?;
        if to.ids()?.first() == Some(&manifest.id()) {
            // Best effort: no code reads this file, so the copy is complete without it.
            let _ = to.write(LATEST, format!("{name}\n").into(), PutMode::Overwrite);
        }
        Ok(copied)
    }

    fn copy_evaluation(&self, manifest: &Manifest, to: &Self) -> Result<(), Error> {
        let file = evaluation_file(manifest.id());
        match self.read(&file, MAX_BYTES)? {
            Some(evaluation) => to.write(&file, evaluation.into(), PutMode::Overwrite),
            None => Ok(()),
        }
    }

    /// Whether the store already has exactly this manifest; an error if it has a different one.
    fn holds_commit(&self, name: &str, file: &str, commit: &Bytes) -> Result<bool, Error> {
        match self.read(file, MAX_BYTES)? {
            None => Ok(false),
            Some(existing) if existing == *commit => Ok(true),
            Some(existing) if Tombstone::parse(&existing).is_some() => Ok(false),
            Some(_) => Err(Error::Exists(name.to_owned())),
        }
    }
}
