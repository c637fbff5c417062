//! Removal of one checkpoint by a user.

use crate::{Error, SaveId, Store};

impl Store {
    /// Removes a checkpoint, finished or not, then the frozen files that no other checkpoint refers to. The
    /// manifest is removed first, so that a partly removed checkpoint no longer counts as one. Returns the number of
    /// bytes freed. The caller must make sure that the checkpoint is not needed.
    ///
    /// # Errors
    /// There is no such checkpoint, or it cannot be removed.
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
