//! Finding what to resume from, and reading it.

use std::{num::NonZeroUsize, thread};

use baton_job::message::{Restore, Rollback};

use crate::{Error, Manifest, SaveId, Store};

/// A checkpoint to resume from.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// What it holds; its digests have been verified.
    pub manifest: Manifest,
    /// The store it lies in, if not the one that was asked.
    pub elsewhere: Option<String>,
    /// Newer ones that were passed over, each with the reason.
    pub skipped: Vec<String>,
}

impl Store {
    /// The checkpoint that `restore` names; see [`Restore`] for the rule.
    ///
    /// # Errors
    /// The store cannot be read, or the checkpoint named by the user is not there or damaged;
    /// [`Error::NoneWhole`] if there is something to resume from, none of it is good and some of it is
    /// damaged;
    /// [`Error::NewerVersion`], or a bucket that does not answer, which is no damage and must not cost
    /// training time.
    pub fn find(&self, restore: &Restore) -> Result<Option<Found>, Error> {
        let jobs = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        self.find_by(restore, &mut |store, manifest| {
            store.prove(&[manifest], jobs, &|_| {}).into_iter().collect()
        })
    }

    /// As [`find`](Self::find), where `prove` reads the checkpoint and says whether it is damaged: whoever
    /// wants its values gets them by [`load`](Self::load) in there, and reads all only once.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub fn find_by(
        &self,
        restore: &Restore,
        prove: &mut dyn FnMut(&Self, &Manifest) -> Result<(), Error>,
    ) -> Result<Option<Found>, Error> {
        let mut skipped = Vec::new();
        let mut any_damaged = false;
        for id in self.ids()?.into_iter().filter(|id| id.generation >= restore.not_before) {
            if let Some(rollback) = restore.condemned_by(id.generation, id.step) {
                if !matches!(self.inspect(id), Ok(None)) {
                    skipped.push(format!("{} ({})", id.name(), condemned(rollback)));
                }
                continue;
            }
            match self.proven(id, prove) {
                Ok(Some(manifest)) => {
                    return Ok(Some(Found { manifest, elsewhere: None, skipped }));
                }
                // A save that never ended is what a kill leaves behind: nothing was lost with it.
                Ok(None) => {}
                Err(error) => {
                    let problem = self.damage(error)?;
                    skipped.push(format!("{} ({problem})", id.name()));
                    any_damaged = true;
                }
            }
        }
        match &restore.path {
            Some(path) => self.named(path, skipped, prove).map(Some),
            // From before the first good checkpoint the way back leads to fresh weights.
            None if !any_damaged => Ok(None),
            None => Err(Error::NoneWhole { location: self.location().to_owned(), skipped }),
        }
    }

    /// What is wrong with a checkpoint that could not be read because of `error`.
    ///
    /// # Errors
    /// The error itself, if it does not say that the checkpoint is no good.
    pub fn damage(&self, error: Error) -> Result<String, Error> {
        match error {
            Error::Damaged { problem, .. } => Ok(problem),
            Error::NewerVersion { .. } => Err(error),
            error if self.is_unreachable(&error) => Err(error),
            other => Ok(other.to_string()),
        }
    }

    /// The manifest of a checkpoint whose every byte is right; `None` if it is unfinished.
    fn proven(
        &self,
        id: SaveId,
        prove: &mut dyn FnMut(&Self, &Manifest) -> Result<(), Error>,
    ) -> Result<Option<Manifest>, Error> {
        let Some(manifest) = self.inspect(id)? else { return Ok(None) };
        prove(self, &manifest)?;
        Ok(Some(manifest))
    }

    /// A checkpoint named by the user: in this store, or the folder of one in any other.
    fn named(
        &self,
        path: &str,
        skipped: Vec<String>,
        prove: &mut dyn FnMut(&Self, &Manifest) -> Result<(), Error>,
    ) -> Result<Found, Error> {
        let (parent, name) = match path.trim_end_matches('/').rsplit_once('/') {
            Some((parent, name)) => (Some(parent), name),
            None => (None, path),
        };
        let other = match parent {
            Some(parent) => Some(Self::open_existing(parent)?),
            None => None,
        };
        let store = other.as_ref().unwrap_or(self);
        let manifest = store.manifest(name)?;
        prove(store, &manifest)?;
        Ok(Found { manifest, elsewhere: parent.map(str::to_owned), skipped })
    }
}

/// Why a whole checkpoint is no good.
fn condemned(rollback: &Rollback) -> String {
    let Rollback { generation, before, .. } = rollback;
    format!("training went wrong, and generation {generation} went back to before step {before}")
}
