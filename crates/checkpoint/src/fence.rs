//! The fence: which generations may no longer commit.
//!
//! The fence is made of objects that are only ever created, one for each generation that was opened:
//! `fences/000003`. The highest number counts, so it can never be lowered.
//!
//! Why nothing of an older generation is committed once [`Store::raise_fence`] has returned:
//!
//! 1. A commit first sees all its shards in its folder, then looks at the fence, then creates its manifest.
//! 2. Raising first creates the fence, then lists the folders, then creates a tombstone in the manifest's place
//!    in every older folder that has no manifest.
//! 3. A commit that looks after the fence was created is refused. One that looked before has its folder in
//!    that listing, so both want to create the same object, and one of them loses: either the tombstone
//!    stands and the commit is refused, or the commit came before raising was done, which is legitimate.
//!
//! For the same reason a tombstone stays when the rest of its folder is pruned. Pruning looks at the fence
//! before each removal; one that looked a moment too early still removes one checkpoint that it holds for
//! superfluous, which is never the newest good one it knows.
//!
//! All of it needs listings that show what was written before, as local disks, FSx for Lustre and S3 give
//! them. NFS clients remember listings for up to a minute: mount with `actimeo=0`.

use baton_job::Generation;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::{ObjectStoreExt, path::Path};
use serde::{Deserialize, Serialize};

use crate::{
    Error, SaveId, Store, VERSION,
    name::{FENCES, MANIFEST},
};

/// Stands in the place of a manifest that shall never be written.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Tombstone {
    version: u32,
    /// The generation that took over.
    pub(crate) abandoned_by: Generation,
}

impl Tombstone {
    /// What a manifest's file holds, if it is a tombstone.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }
}

/// Questions to a store under way at a time.
const LOOKS_AT_ONCE: usize = 16;

fn manifest_file(id: SaveId) -> String {
    format!("{}/{MANIFEST}", id.name())
}

fn fence_file(generation: Generation) -> String {
    format!("{FENCES}/{:06}", generation.0)
}

impl Store {
    /// The newest generation that was ever opened on this store; 0 if none was.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn fence(&self) -> Result<Generation, Error> {
        let fences = self.files(FENCES)?;
        let numbers = fences.iter().filter_map(|fence| fence.location.filename()?.parse().ok());
        Ok(Generation(numbers.max().unwrap_or(0)))
    }

    /// Keeps generations below `generation` from changing anything here; never lowers the fence. What they
    /// have not committed when this returns they can never commit. May be repeated after a failure.
    ///
    /// # Errors
    /// The store cannot be read or written.
    pub fn raise_fence(&self, generation: Generation) -> Result<(), Error> {
        self.create(&fence_file(generation), format!("{}\n", generation.0).as_bytes())?;
        self.bury_below(generation)
    }

    /// Raises the fence for a generation that `owner` alone opens: two coordinators on one store must not both
    /// believe that a number is theirs, for their ranks could then commit side by side. May be repeated by the
    /// same owner.
    ///
    /// # Errors
    /// [`Error::TakenOver`] if somebody else holds this generation or a newer one; the store cannot be read or
    /// written.
    pub fn claim(&self, generation: Generation, owner: &str) -> Result<(), Error> {
        let taken_over =
            |by| Error::TakenOver { location: self.location().to_owned(), generation: by };
        if self.create(&fence_file(generation), format!("{owner}\n").as_bytes())?.is_some() {
            return Err(taken_over(generation));
        }
        // Looked at last: of two who claim at the same time, the older one sees the newer one's.
        let fence = self.fence()?;
        if fence > generation {
            return Err(taken_over(fence));
        }
        self.bury_below(generation)
    }

    /// Puts a tombstone into every older save that has no manifest.
    fn bury_below(&self, generation: Generation) -> Result<(), Error> {
        let tombstone = Tombstone { version: VERSION, abandoned_by: generation };
        let text = serde_json::json!(tombstone).to_string();
        for id in self.unfinished_below(generation)? {
            // Whatever is there already is as good: a commit that was faster, or another tombstone.
            self.create(&manifest_file(id), text.as_bytes())?;
        }
        Ok(())
    }

    pub(crate) fn check_fence(&self, mine: Generation) -> Result<(), Error> {
        let fence = self.fence()?;
        if mine < fence { Err(Error::Fenced { mine, fence }) } else { Ok(()) }
    }

    /// Every save of an older generation that has a folder and no manifest. Folders are listed, as in each there is a
    /// file of every rank.
    fn unfinished_below(&self, generation: Generation) -> Result<Vec<SaveId>, Error> {
        let older = self.ids()?.into_iter().filter(|id| id.generation < generation);
        let looks = older.map(|id| async move {
            match self.objects.head(&Path::from(manifest_file(id))).await {
                Ok(_) => Ok(None),
                Err(object_store::Error::NotFound { .. }) => Ok(Some(id)),
                Err(error) => Err(error),
            }
        });
        let found = stream::iter(looks).buffer_unordered(LOOKS_AT_ONCE);
        let found = found.try_filter_map(|id| async move { Ok(id) }).try_collect();
        self.wait(found).map_err(|source| self.failed("look for", MANIFEST, source))
    }
}
