//! Bytes that can be opened as a file: `Beton` maps and preads one, so a slice does not do.

use std::{
    fs::File,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::PathBuf,
};

use rustix::fs::{MemfdFlags, memfd_create};

/// A file in memory, the same for every input: nothing is open or mapped between two of them.
pub struct Scratch {
    file: File,
    path: PathBuf,
}

impl Scratch {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        let file = File::from(memfd_create(c"input", MemfdFlags::CLOEXEC).expect("memfd_create"));
        let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        Self { file, path }
    }

    /// Makes these its bytes, and says how it is opened.
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
