//! A file as a slice of bytes.
#![allow(unsafe_code)] // The only way to map a file; see `Mapping::open`.

use std::{fs::File, ops::Deref, path::Path};

use crate::Error;

/// A whole file, mapped read-only. The page cache holds it once for all processes of a machine.
#[derive(Debug)]
pub(crate) struct Mapping(memmap2::Mmap);

impl Mapping {
    /// Maps the file.
    ///
    /// Nobody may change or shorten a data set while it is in use: a shortened file ends the
    /// process with SIGBUS, a changed one gives changed pixels.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let failed =
            |operation| move |source| Error::Io { operation, path: path.to_owned(), source };
        let file = File::open(path).map_err(failed("open"))?;
        // SAFETY: the mapping is private to this value and read-only. That no other process
        // changes the file underneath cannot be enforced, only asked for (see above).
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(failed("map"))?;
        Ok(Self(map))
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
