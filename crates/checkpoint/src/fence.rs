//! The fence: prevents commits by generations that have been replaced.
//!
//! The fence consists of objects that are created and never changed or removed, one for each opened generation:
//! `fences/000003`. The highest number is the current fence, so the fence can never be lowered.
//!
//! Why an older generation can commit nothing once [`Store::raise_fence`] has returned:
//!
//! 1. A commit first checks that all its shards are in its folder, then reads the fence, then creates its manifest.
//! 2. Raising first creates the fence object, then lists the folders, then creates a tombstone in every older
//!    folder that has no manifest, under the name of the manifest.
//! 3. A commit that reads the fence after its creation is refused. If a commit read the fence before, its folder is
//!    in that listing. Then both try to create the same object, and only one succeeds: either the tombstone is
//!    created and the commit is refused, or the commit succeeds before raising has returned, which is allowed.
//!
//! For the same reason a tombstone is kept when the rest of its folder is pruned. Pruning reads the fence before
//! each removal; if it read the fence a moment too early, it still removes one checkpoint that retention does not
//! keep, which is never the newest good checkpoint that it has listed.
//!
//! There is one exception, for the last save of ranks whose agents are not connected to a coordinator. If that was lost
//! after it had claimed the next generation, and before the ranks learned it, nobody else has their state. All of them
//! together then commit as that generation (`baton_trainer`, `checkpointing.rs`). What they commit has the bits that it would
//! have: only a rollback or another recipe makes others. Another recipe is another job, which is not the claimant. A rollback
//! needs that all ranks of the generation have diverged, and then they no longer train or save; a rank that has lost the
//! others does not know that, so it commits only as its own generation. Should somebody have opened the next generation after
//! all, both may commit the same step; only one succeeds, with the same bits. With `precision.determinism = "fast"` the bits
//! may differ. Then a shard that both have written under one name may not be that of the manifest: such a checkpoint counts as
//! damaged, and training continues from the one before it.
//!
//! The content of a fence is the [`Claimant`] of its generation, for people and for coordinators of other jobs; the
//! proof does not need it.
//!
//! All of this needs listings that include everything written before, as local disks, FSx for Lustre and S3 provide.
//! NFS clients cache listings for up to a minute: mount with `actimeo=0`. On a file system without hard links, step 3 also
//! needs that nobody stalls for five seconds between claiming a name and writing its content.

use std::fmt;

use baton_job::{Generation, JobId};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::{ObjectStoreExt, path::Path};
use serde::{Deserialize, Serialize};

use crate::{
    Error, SaveId, Store, VERSION,
    name::{FENCES, MANIFEST},
};

/// The coordinator that opened a generation, as JSON in the fence. Fences of older versions have only a number or the
/// `owner`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claimant {
    /// Random identity of the coordinator's process. The job's id is not enough: if the run folder was copied, two
    /// coordinators have the same job.
    pub owner: String,
    /// The job.
    pub job: JobId,
    /// Name of the job.
    pub name: String,
    /// The recipe as JSON.
    pub recipe: String,
    /// Name of the coordinator's machine.
    pub host: String,
    /// The run folder on that machine.
    pub run_dir: String,
    /// Oldest generation whose checkpoints belong to the job's run, which removes no older ones; older versions do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_before: Option<Generation>,
}

impl fmt::Display for Claimant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job `{}` (run folder {} on host {})", self.name, self.run_dir, self.host)
    }
}

/// Content of a manifest file that blocks the commit of an abandoned save.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Tombstone {
    version: u32,
    /// The generation that took over.
    pub(crate) abandoned_by: Generation,
}

impl Tombstone {
    /// Parses the content of a manifest file; `None` if it is not a tombstone.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }
}

/// Maximum size of a fence, bytes: it contains a recipe.
const MAX_FENCE_BYTES: u64 = 1 << 20;

/// Maximum number of requests to the store in flight.
const MAX_CONCURRENT_REQUESTS: usize = 16;

fn manifest_file(id: SaveId) -> String {
    format!("{}/{MANIFEST}", id.name())
}

fn fence_file(generation: Generation) -> String {
    format!("{FENCES}/{:06}", generation.0)
}

impl Store {
    /// The newest generation that was ever opened on this store; 0 if there is none.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn fence(&self) -> Result<Generation, Error> {
        let fences = self.files(FENCES)?;
        let numbers = fences.iter().filter_map(|fence| fence.location.filename()?.parse().ok());
        Ok(Generation(numbers.max().unwrap_or(0)))
    }

    /// The generation of a new run: newer than all that have written to this store, even if their fences are gone.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn unused_generation(&self) -> Result<Generation, Error> {
        let saved = self.ids()?.into_iter().map(|id| id.generation).max();
        Ok(saved.unwrap_or_default().max(self.fence()?).next())
    }

    /// The coordinator that opened this generation; `None` if the fence does not say it.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn claimant(&self, generation: Generation) -> Result<Option<Claimant>, Error> {
        let fence = self.read(&fence_file(generation), MAX_FENCE_BYTES)?;
        Ok(fence.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    /// Prevents generations below `generation` from changing anything in this store; never lowers the fence.
    /// When this returns, their uncommitted saves can never be committed. May be repeated after a failure.
    ///
    /// # Errors
    /// The store cannot be read or written.
    pub fn raise_fence(&self, generation: Generation) -> Result<(), Error> {
        self.create(&fence_file(generation), format!("{}\n", generation.0).as_bytes())?;
        self.abandon_unfinished_below(generation)
    }

    /// Raises the fence for a generation that only `claimant` may open: if two coordinators on one store used the
    /// same generation, the ranks of both could commit. May be repeated by the same claimant.
    ///
    /// # Errors
    /// [`Error::TakenOver`] if another one has claimed this generation or a newer one; the store cannot be read
    /// or written.
    pub fn claim(&self, generation: Generation, claimant: &Claimant) -> Result<(), Error> {
        let text = format!("{}\n", serde_json::json!(claimant));
        if self.create(&fence_file(generation), text.as_bytes())?.is_some() {
            return Err(self.taken_over(generation));
        }
        // Read the fence last: of two concurrent claims, the one with the older generation then sees the newer one.
        let fence = self.fence()?;
        if fence > generation {
            return Err(self.taken_over(fence));
        }
        self.abandon_unfinished_below(generation)
    }

    /// Checks that nobody has claimed this generation or a newer one yet.
    ///
    /// # Errors
    /// [`Error::TakenOver`] if somebody has; the store cannot be read.
    pub fn check_unclaimed(&self, generation: Generation) -> Result<(), Error> {
        let fence = self.fence()?;
        if fence < generation { Ok(()) } else { Err(self.taken_over(fence)) }
    }

    /// Creates a tombstone in every older save that has no manifest.
    fn abandon_unfinished_below(&self, generation: Generation) -> Result<(), Error> {
        let tombstone = Tombstone { version: VERSION, abandoned_by: generation };
        let text = serde_json::json!(tombstone).to_string();
        for id in self.unfinished_below(generation)? {
            // An existing file is fine: a commit that was faster, or another tombstone.
            self.create(&manifest_file(id), text.as_bytes())?;
        }
        Ok(())
    }

    /// The newest generation, which must not be newer than `mine`.
    pub(crate) fn check_fence(&self, mine: Generation) -> Result<Generation, Error> {
        let fence = self.fence()?;
        if mine < fence { Err(self.fenced(mine, fence)) } else { Ok(fence) }
    }

    /// The error of a writer of generation `mine`.
    pub(crate) fn fenced(&self, mine: Generation, fence: Generation) -> Error {
        Error::Fenced { mine, fence, by: self.named_claimant(fence) }
    }

    /// The error of a coordinator that another one has replaced.
    fn taken_over(&self, fence: Generation) -> Error {
        Error::TakenOver {
            location: self.location().to_owned(),
            generation: fence,
            by: self.named_claimant(fence),
        }
    }

    /// The claimant of a generation as a part of a message, or nothing if it is unknown.
    fn named_claimant(&self, generation: Generation) -> String {
        let claimant = self.claimant(generation).ok().flatten();
        claimant.map(|claimant| format!(" of {claimant}")).unwrap_or_default()
    }

    /// Every save of an older generation that has a folder and no manifest. Lists the folders only, because each
    /// contains one file per rank.
    fn unfinished_below(&self, generation: Generation) -> Result<Vec<SaveId>, Error> {
        let older = self.ids()?.into_iter().filter(|id| id.generation < generation);
        let checks = older.map(|id| async move {
            if self.is_special(&manifest_file(id)) {
                // Nothing can be committed under a name that is taken.
                return Ok(None);
            }
            match self.objects.head(&Path::from(manifest_file(id))).await {
                Ok(_) => Ok(None),
                Err(object_store::Error::NotFound { .. }) => Ok(Some(id)),
                Err(error) => Err(error),
            }
        });
        let found = stream::iter(checks).buffer_unordered(MAX_CONCURRENT_REQUESTS);
        let found = found.try_filter_map(|id| async move { Ok(id) }).try_collect();
        self.wait(found).map_err(|source| self.failed("look for", MANIFEST, source))
    }
}
