//! A file in memory for the input: `Beton` needs a file for `mmap` and `pread`, so a slice is not sufficient.

use std::{
    fs::File,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::PathBuf,
};

use rustix::fs::{MemfdFlags, memfd_create};

/// A file in memory, reused for every input: between two inputs, nothing is open or mapped.
pub struct Scratch {
    file: File,
    path: PathBuf,
}

impl Scratch {
    /// An empty file.
    #[must_use]
    pub fn new() -> Self {
        let file = File::from(memfd_create(c"input", MemfdFlags::CLOEXEC).expect("memfd_create"));
        let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        Self { file, path }
    }

    /// Writes these bytes to the file; returns its path.
    pub fn fill(&self, bytes: &[u8]) -> &PathBuf {
        self.file.set_len(bytes.len() as u64).expect("a file in memory has any length");
        self.file.write_all_at(bytes, 0).expect("a file in memory can be written");
        &self.path
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}
