//! File operations that the standard library does not offer in one call.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
};

/// Allocates disk space, so that a full disk is detected before a download, not in the middle of it.
pub(crate) fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::{
        fs::{FallocateFlags, fallocate},
        io::Errno,
    };
    file.set_len(bytes)?;
    match fallocate(file, FallocateFlags::empty(), 0, bytes.max(1)) {
        // Some file systems do not support it. Then only the length is set, which the cache limit needs.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(bytes),
        Err(error) => Err(error.into()),
    }
}

/// Whether the disk has no more space, or none for this user.
pub(crate) fn is_disk_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// BLAKE3 digest of a file's bytes.
pub(crate) fn digest(file: &File) -> io::Result<blake3::Hash> {
    let mut digest = blake3::Hasher::new();
    digest.update_reader(file)?;
    Ok(digest.finalize())
}

/// Whether `path` still refers to the open `file`. While a process waits for a lock, the file may be removed or
/// replaced.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    let of = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(file), Ok(named)) => of(file) == of(named),
        _ => false,
    }
}

/// Takes the exclusive lock; `false` if another process has an exclusive or shared lock.
pub(crate) fn try_lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}
