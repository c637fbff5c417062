//! Removing one checkpoint by hand.

use futures::TryStreamExt;
use object_store::path::Path;

use crate::{Error, SaveId, Store};

impl Store {
    /// Removes a checkpoint, finished or not, its manifest first: half removed it is no checkpoint. The
    /// bytes of the files that are gone. It is for the caller to know that nobody needs it.
    ///
    /// # Errors
    /// There is none of that name, or it cannot be removed.
    pub fn discard(&self, id: SaveId) -> Result<u64, Error> {
        let name = id.name();
        if !self.ids()?.contains(&id) {
            return Err(Error::Missing { name, location: self.location().to_owned() });
        }
        let folder = Path::from(name.as_str());
        let files = self.wait(self.objects().list(Some(&folder)).try_collect::<Vec<_>>());
        let files = files.map_err(|source| self.failed("list", &name, source))?;
        self.remove(id)?;
        Ok(files.iter().map(|file| file.size).fold(0, u64::saturating_add))
    }
}
