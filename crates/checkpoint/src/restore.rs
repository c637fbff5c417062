//! Finding what to resume from, and reading it.

use std::{sync::mpsc, thread};

use baton_job::{
    Rank,
    message::{Restore, Rollback},
};

use crate::{Error, Manifest, SaveId, Store, shard};

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
        self.find_by(restore, &mut |store, manifest| store.verify(manifest, &mut |_, _| {}))
    }

    /// As [`find`](Self::find), where `prove` reads the checkpoint and says whether it is damaged: whoever
    /// wants its values gets them by [`load`](Self::load) in there, and reads all only once. What was read
    /// of a damaged one is of no use.
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
                Err(error @ Error::NewerVersion { .. }) => return Err(error),
                Err(error) if self.is_unreachable(&error) => return Err(error),
                Err(error) => {
                    let problem = match error {
                        Error::Damaged { problem, .. } => problem,
                        other => other.to_string(),
                    };
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

    /// Reads every shard and compares digests, telling `progress(done, total)` in bytes.
    ///
    /// # Errors
    /// [`Error::Damaged`] names the first file that is not as it was written.
    pub fn verify(
        &self,
        manifest: &Manifest,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        let mut done = 0;
        for shard in &manifest.shards {
            self.read_shard(manifest, shard.rank)?;
            done += shard.bytes;
            progress(done, manifest.bytes());
        }
        Ok(())
    }

    /// Hands every value of the state to `into(region, offset, values)`, one shard after the other,
    /// each verified before its values are used. The next one is read meanwhile, so that two or three are
    /// in memory.
    ///
    /// # Errors
    /// A file is missing or not as it was written.
    pub fn load(
        &self,
        manifest: &Manifest,
        into: &mut dyn FnMut(&str, usize, &[f32]),
    ) -> Result<(), Error> {
        thread::scope(|scope| {
            let (sender, shards) = mpsc::sync_channel(0);
            scope.spawn(move || {
                for shard in &manifest.shards {
                    let read = self.read_shard(manifest, shard.rank);
                    let is_last = read.is_err();
                    // Nobody listens once a shard was found to be wrong.
                    if sender.send((shard, read)).is_err() || is_last {
                        break;
                    }
                }
            });
            for (shard, read) in shards {
                shard::decode(&read?, manifest, shard.rank, into).map_err(|problem| {
                    damaged(manifest.id(), format!("{}: {problem}", shard.file))
                })?;
            }
            Ok(())
        })
    }

    pub(crate) fn read_shard(
        &self,
        manifest: &Manifest,
        rank: Rank,
    ) -> Result<bytes::Bytes, Error> {
        let id = manifest.id();
        let Some(shard) = manifest.shards.get(rank.0 as usize) else {
            return Err(damaged(id, format!("it has no shard of rank {rank}")));
        };
        let file = format!("{}/{}", id.name(), shard.file);
        let bytes = self
            .read(&file, shard.bytes)?
            .ok_or_else(|| damaged(id, format!("{} is missing", shard.file)))?;
        if blake3::hash(&bytes).to_hex().as_str() != shard.blake3 {
            return Err(damaged(id, format!("{} does not match its digest", shard.file)));
        }
        Ok(bytes)
    }
}

/// Why a whole checkpoint is no good.
fn condemned(rollback: &Rollback) -> String {
    let Rollback { generation, before, .. } = rollback;
    format!("training went wrong, and generation {generation} went back to before step {before}")
}

fn damaged(id: SaveId, problem: String) -> Error {
    Error::Damaged { name: id.name(), problem }
}
