//! Local checkpoints: each machine keeps one whole copy of the state on its own disk, newer than that in the store.
//!
//! Each rank of a machine writes a part of the copy. They need no messages for that: the rank that finds all parts complete
//! commits the checkpoint. So a machine's folder is a store like any other, for all commands that read one.

use baton_job::{Generation, JobId, Rank};
use object_store::PutMode;
use serde::{Deserialize, Serialize};

use crate::{
    EntryState, Error, FrozenEntry, Manifest, SaveId, ShardEntry, Snapshot, Store,
    manifest::MAX_BYTES, name::part_file,
};

/// A complete part, written after its files.
#[derive(Debug, Serialize, Deserialize)]
struct LocalPart {
    shard: ShardEntry,
    /// The frozen regions; empty except in the first part.
    frozen: Vec<FrozenEntry>,
}

/// The newest local checkpoints of a machine.
#[derive(Debug)]
pub struct NewestLocal {
    /// The newest complete one.
    pub usable: Option<Manifest>,
    /// Newer ones that are damaged, with the reason.
    pub damaged: Vec<(SaveId, String)>,
}

impl Store {
    /// Writes one of the `draft.world_size` parts of the checkpoint that `draft` describes; `draft.frozen` are the regions
    /// that this rank has written. Returns whether the checkpoint is complete now; then all older ones are removed.
    ///
    /// Each rank must write its parts in the order of steps: when all parts of one step are complete, nobody writes one of
    /// an older step.
    ///
    /// # Errors
    /// The files cannot be written, for example because the disk is full: then nothing of this part is left.
    pub fn write_part(
        &self,
        draft: &Manifest,
        rank: Rank,
        snapshot: &Snapshot,
    ) -> Result<bool, Error> {
        let (id, parts) = (draft.id(), draft.world_size);
        // The part before may still be completed by a slower rank. One before that never will: another rank has failed.
        let older = self.ids()?.into_iter().filter(|older| *older < id);
        older.skip(1).for_each(|older| self.discard_part(older, rank, parts));
        let written = self.try_to_write_part(draft, rank, snapshot);
        if written.is_err() {
            self.discard_part(id, rank, parts);
        }
        written
    }

    fn discard_part(&self, id: SaveId, rank: Rank, parts: u32) {
        if !matches!(self.inspect(id), Ok(Some(_))) {
            let _ = self.delete(&format!("{}/{}", id.name(), part_file(rank, parts)).into());
            self.discard_shard(id, rank, parts);
        }
    }

    fn try_to_write_part(
        &self,
        draft: &Manifest,
        rank: Rank,
        snapshot: &Snapshot,
    ) -> Result<bool, Error> {
        let (id, parts) = (draft.id(), draft.world_size);
        let shard = self.write_shard(&id, rank, parts, snapshot)?;
        let text = serde_json::to_vec(&LocalPart { shard, frozen: draft.frozen.clone() });
        let text = text.map_err(|error| Error::NotCommittable {
            name: id.name(),
            problem: error.to_string(),
        })?;
        let path = |rank| format!("{}/{}", id.name(), part_file(rank, parts));
        self.write(&path(rank), text.into(), PutMode::Overwrite)?;
        let mut manifest = Manifest { frozen: Vec::new(), ..draft.clone() };
        for rank in (0..parts).map(Rank) {
            let Some(bytes) = self.read(&path(rank), MAX_BYTES)? else { return Ok(false) };
            // It is written whole or not at all.
            let Ok(LocalPart { shard, frozen }) = serde_json::from_slice(&bytes) else {
                return Ok(false);
            };
            manifest.shards.push(shard);
            manifest.frozen.extend(frozen);
        }
        match self.commit(&manifest) {
            Ok(_) => {}
            // Another rank has found all parts complete too, and was faster.
            Err(Error::Exists(_)) => return Ok(false),
            Err(error) => return Err(error),
        }
        // Best effort: the next one tries again.
        let older = self.ids().unwrap_or_default().into_iter().filter(|older| *older < id);
        older.for_each(|older| drop(self.remove(older)));
        Ok(true)
    }

    /// The newest complete checkpoint of `job` that a generation from `not_before` on has written, and which newer ones
    /// are damaged, with the reason.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn newest_of(&self, job: JobId, not_before: Generation) -> Result<NewestLocal, Error> {
        let mut damaged = Vec::new();
        for entry in self.list()?.into_iter().filter(|entry| entry.id.generation >= not_before) {
            match entry.state {
                EntryState::Complete(manifest) if manifest.job == job => {
                    return Ok(NewestLocal { usable: Some(*manifest), damaged });
                }
                EntryState::Damaged(problem) => damaged.push((entry.id, problem)),
                _ => {}
            }
        }
        Ok(NewestLocal { usable: None, damaged })
    }
}
