//! A memory-mapped part of a file.
#![allow(unsafe_code)] // The only way to map a file; see `Mapping::new`.

use std::{fs::File, io, ops::Deref, ops::Range};

/// Bytes of a file, mapped read-only. The page cache holds them once for all processes of a machine.
///
/// Only small parts that are read often are mapped: header, rows and allocation table. Values are read with
/// `pread`, so that memory use does not grow with the number of values read, and a file that is truncated while in
/// use causes an error instead of a signal.
#[derive(Debug)]
pub(crate) struct Mapping(memmap2::Mmap);

impl Mapping {
    /// Maps `range`, which must lie inside the file.
    ///
    /// A data set must not be changed while it is in use: if it is truncated within its rows, the process ends with
    /// SIGBUS; other changes give changed samples.
    pub(crate) fn new(file: &File, range: Range<u64>) -> io::Result<Self> {
        let mut options = memmap2::MmapOptions::new();
        options.offset(range.start).len((range.end - range.start) as usize);
        // SAFETY: the mapping is private to this value and read-only. It cannot be enforced that no other process
        // changes the file; it is a documented requirement (see above).
        unsafe { options.map(file) }.map(Self)
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
