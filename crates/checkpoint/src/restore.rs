//! Finds the checkpoint to resume from.

use baton_job::message::{Restore, Rollback};

use crate::{CheckpointReference, Error, Manifest, SaveId, Store};

/// A checkpoint to resume from.
#[derive(Clone, Debug, PartialEq)]
pub struct ResumePoint {
    /// The manifest; the digests of its files have been verified.
    pub manifest: Manifest,
    /// Location of the store that contains it, if it is not the searched store.
    pub other_store: Option<String>,
    /// Newer checkpoints that were skipped, each with the reason.
    pub skipped: Vec<String>,
}

/// A checkpoint that the job has saved and that is no longer in its store, as one of those that are skipped.
#[must_use]
pub fn gone(name: &str, location: &str) -> String {
    format!(
        "{name} (the job has saved it, but it is not in {location}: was it removed, or is another disk mounted there?)"
    )
}

impl Store {
    /// The checkpoint that `restore` selects; see [`Restore`] for the rule. `verify` reads the checkpoint and
    /// returns an error if it is damaged. It may call [`load`](Self::load), which verifies too, so that the files
    /// are read only once.
    ///
    /// # Errors
    /// The store cannot be read, or the checkpoint named by the user is missing or damaged;
    /// [`Error::NoUsableCheckpoint`] if there are checkpoints, none of them is good and at least one is damaged;
    /// [`Error::CheckpointsGone`] if there is none, but the job has saved some;
    /// [`Error::NewerVersion`], a bucket that does not respond, or a file that this user may not read: that is not damage,
    /// and falling back to an older checkpoint would lose training time.
    pub fn find(
        &self,
        restore: &Restore,
        verify: &mut dyn FnMut(&Self, &Manifest) -> Result<(), Error>,
    ) -> Result<Option<ResumePoint>, Error> {
        let mut skipped = Vec::new();
        let mut any_damaged = false;
        let ids = self.ids()?.into_iter().filter(|id| id.generation >= restore.not_before);
        let is_suspect = |id: &SaveId| restore.suspected_by(id.generation, id.step).is_some();
        let (mut last_resort, good): (Vec<_>, Vec<_>) = ids.partition(is_suspect);
        last_resort.sort_by_key(|id| Restore::last_resort_key(id.generation, id.step));
        for id in good.into_iter().chain(last_resort.iter().copied()) {
            if let Some(rollback) = restore.invalidated_by(id.generation, id.step) {
                if !matches!(self.inspect(id), Ok(None)) {
                    skipped.push(format!("{} ({})", id.name(), invalidated(rollback)));
                }
                continue;
            }
            match self.verified(id, verify) {
                Ok(Some(manifest)) => {
                    // One that is a last resort itself comes after them.
                    let passed_over = if is_suspect(&id) { &[] } else { last_resort.as_slice() };
                    for newer in passed_over.iter().filter(|other| **other > id) {
                        let rollback = restore.suspected_by(newer.generation, newer.step);
                        if let (Some(rollback), Ok(Some(_))) = (rollback, self.inspect(*newer)) {
                            skipped.push(format!("{} ({})", newer.name(), suspected(rollback)));
                        }
                    }
                    skipped.extend(self.missing(restore, id, &skipped));
                    return Ok(Some(ResumePoint { manifest, other_store: None, skipped }));
                }
                // An unfinished save is what a killed process leaves behind. It is not damage: nothing was lost.
                Ok(None) => {}
                Err(error) => {
                    let problem = self.damage(error)?;
                    skipped.push(format!("{} ({problem})", id.name()));
                    any_damaged = true;
                }
            }
        }
        let location = || self.location().to_owned();
        let is_valid =
            |(generation, step): &(_, _)| restore.invalidated_by(*generation, *step).is_none();
        match (&restore.path, restore.last_saved.filter(is_valid)) {
            (None, _) if any_damaged => {
                Err(Error::NoUsableCheckpoint { location: location(), skipped })
            }
            (_, Some((generation, step))) => {
                let name = SaveId { step, generation }.name();
                Err(Error::CheckpointsGone { location: location(), name })
            }
            (Some(path), None) => self.named(path, skipped, verify).map(Some),
            // Without any good checkpoint the run starts with fresh weights.
            (None, None) => Ok(None),
        }
    }

    /// The newest checkpoint with a good manifest; `None` if there is none. Its files are not read.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn newest(&self) -> Result<Option<Manifest>, Error> {
        match self.find(&Restore::default(), &mut |_, _| Ok(())) {
            Err(Error::NoUsableCheckpoint { .. }) => Ok(None),
            found => Ok(found?.map(|found| found.manifest)),
        }
    }

    /// The newest checkpoint that the job has saved, with the reason, if it is valid and newer than `found`, but not among
    /// those that were `skipped`: it is no longer there.
    fn missing(&self, restore: &Restore, found: SaveId, skipped: &[String]) -> Option<String> {
        // After a rollback, retention may have removed it.
        let (generation, step) = restore.last_saved.filter(|_| restore.rollbacks.is_empty())?;
        let last = SaveId { generation, step };
        let is_valid =
            generation >= restore.not_before && restore.invalidated_by(generation, step).is_none();
        let is_named = skipped.iter().any(|reason| reason.starts_with(&last.name()));
        (last > found && is_valid && !is_named).then(|| gone(&last.name(), self.location()))
    }

    /// Describes the damage of a checkpoint that could not be read because of `error`.
    ///
    /// # Errors
    /// `error` itself, if it does not mean that the checkpoint is damaged.
    pub fn damage(&self, error: Error) -> Result<String, Error> {
        match error {
            Error::Damaged { problem, .. } => Ok(problem),
            Error::NewerVersion { .. } => Err(error),
            // Falling back to an older checkpoint would lose training time, and retention would remove the newer ones.
            error if error.is_unreachable() || error.is_denied() => Err(error),
            other => Ok(other.to_string()),
        }
    }

    /// The manifest of a verified checkpoint; `None` if it is unfinished.
    fn verified(
        &self,
        id: SaveId,
        verify: &mut dyn FnMut(&Self, &Manifest) -> Result<(), Error>,
    ) -> Result<Option<Manifest>, Error> {
        let Some(manifest) = self.inspect(id)? else { return Ok(None) };
        verify(self, &manifest)?;
        Ok(Some(manifest))
    }

    /// A checkpoint chosen by the user: a name in this store, or the path of a checkpoint in another store.
    fn named(
        &self,
        path: &str,
        skipped: Vec<String>,
        verify: &mut dyn FnMut(&Self, &Manifest) -> Result<(), Error>,
    ) -> Result<ResumePoint, Error> {
        let CheckpointReference { location, id } = path.parse()?;
        let other = location.as_deref().map(Self::open_existing).transpose()?;
        let store = other.as_ref().unwrap_or(self);
        let manifest = store.manifest(&id.name())?;
        verify(store, &manifest)?;
        Ok(ResumePoint { manifest, other_store: location, skipped })
    }
}

/// Why a checkpoint is a last resort.
fn suspected(Rollback { before, .. }: &Rollback) -> String {
    format!("training diverged before step {before}, and its state may be damaged")
}

/// Why an undamaged checkpoint is skipped.
fn invalidated(rollback: &Rollback) -> String {
    let Rollback { generation, before, .. } = rollback;
    format!("training diverged, and generation {generation} rolled back to before step {before}")
}
