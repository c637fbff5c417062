//! What the cache needs of a file and the standard library does not offer in one call.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
};

/// Takes disk space now rather than fail in the middle of a download.
pub(super) fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::{
        fs::{FallocateFlags, fallocate},
        io::Errno,
    };
    file.set_len(bytes)?;
    match fallocate(file, FallocateFlags::empty(), 0, bytes.max(1)) {
        // Not every file system can; the length alone is what the bound needs.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(bytes),
        Err(error) => Err(error.into()),
    }
}

/// The digest of a file's bytes.
pub(super) fn digest(file: &File) -> io::Result<blake3::Hash> {
    let mut digest = blake3::Hasher::new();
    digest.update_reader(file)?;
    Ok(digest.finalize())
}

/// Whether a file still has its name: who waited for its lock may hold a removed one.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    let of = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(file), Ok(named)) => of(file) == of(named),
        _ => false,
    }
}

/// Takes the exclusive lock, unless somebody has it or shares it.
pub(super) fn try_lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}
