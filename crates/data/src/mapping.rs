//! A part of a file as a slice of bytes.
#![allow(unsafe_code)] // The only way to map a file; see `Mapping::new`.

use std::{fs::File, io, ops::Deref, ops::Range};

/// Bytes of a file, mapped read-only. The page cache holds them once for all processes of a machine.
///
/// Only what is small and read often is mapped: header, rows and allocation table. Values are read
/// with `pread`, so that memory does not grow with the part of a file that has been seen, and a file
/// that is cut off under us is an error instead of a signal.
#[derive(Debug)]
pub(crate) struct Mapping(memmap2::Mmap);

impl Mapping {
    /// Maps `range`, which must lie inside the file.
    ///
    /// Nobody may change or shorten a data set while it is in use: shortened to less than its rows, it
    /// ends the process with SIGBUS; changed, it gives changed samples.
    pub(crate) fn new(file: &File, range: Range<u64>) -> io::Result<Self> {
        let mut options = memmap2::MmapOptions::new();
        options.offset(range.start).len((range.end - range.start) as usize);
        // SAFETY: the mapping is private to this value and read-only. That no other process
        // changes the file underneath cannot be enforced, only asked for (see above).
        unsafe { options.map(file) }.map(Self)
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
