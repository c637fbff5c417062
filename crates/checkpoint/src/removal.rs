//! Removing one checkpoint by hand.

use crate::{Error, SaveId, Store};

impl Store {
    /// Removes a checkpoint, finished or not, its manifest first: half removed it is no checkpoint; then what
    /// it was the last one to refer to. The bytes of the files that are gone. It is for the caller to know that nobody needs it.
    ///
    /// # Errors
    /// There is none of that name, or it cannot be removed.
    pub fn discard(&self, id: SaveId) -> Result<u64, Error> {
        let name = id.name();
        if !self.ids()?.contains(&id) {
            return Err(Error::Missing { name, location: self.location().to_owned() });
        }
        let files = self.files(&name)?;
        self.remove(id)?;
        let shared = self.sweep_frozen(|| Ok(()))?;
        Ok(files.iter().map(|file| file.size).fold(shared, u64::saturating_add))
    }
}
