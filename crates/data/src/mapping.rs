//! A part of a file in memory.
#![allow(unsafe_code)] // The only way to map a file; see `Mapping::new`.

use std::{fs::File, io, ops::Deref, ops::Range, os::unix::fs::FileExt};

/// Largest part that is read instead of mapped, bytes: half a million images.
const MOST_READ: usize = 16 << 20;

/// Bytes of a file: read if they are few, or else mapped read-only, so that the page cache holds them once for all
/// processes of a machine.
///
/// Only small parts that are read often are here: header, rows and allocation table. Values are read with
/// `pread`, so that memory use does not grow with the number of values read, and a file that is truncated while in
/// use causes an error instead of a signal.
#[derive(Debug)]
pub(crate) enum Mapping {
    Read(Vec<u8>),
    Mapped(memmap2::Mmap),
}

impl Mapping {
    /// Reads or maps `range`, which must lie inside the file.
    ///
    /// A data set must not be changed while it is in use: if it is truncated within rows that are mapped, the process ends
    /// with SIGBUS; other changes give changed samples.
    pub(crate) fn new(file: &File, range: Range<u64>) -> io::Result<Self> {
        let len = (range.end - range.start) as usize;
        if len <= MOST_READ {
            let mut bytes = vec![0; len];
            return file.read_exact_at(&mut bytes, range.start).map(|()| Self::Read(bytes));
        }
        let mut options = memmap2::MmapOptions::new();
        options.offset(range.start).len(len);
        // SAFETY: the mapping is private to this value and read-only. It cannot be enforced that no other process
        // changes the file; it is a documented requirement (see above).
        unsafe { options.map(file) }.map(Self::Mapped)
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Read(bytes) => bytes,
            Self::Mapped(mapped) => mapped,
        }
    }
}
