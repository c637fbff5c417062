//! What the local disk needs beyond an object store's operations.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, absolute},
};

/// Creates a folder and those above it, each of them safe from a power cut.
pub(crate) fn create(folder: &Path) -> io::Result<()> {
    let folder = absolute(folder)?;
    if folder.is_dir() {
        return Ok(());
    }
    let parent = folder.parent().ok_or(io::ErrorKind::NotFound)?;
    create(parent)?;
    match fs::create_dir(&folder) {
        // Ranks open the same store at the same time.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
        created => created?,
    }
    sync(parent)
}

/// Writes and removes a small file. Its name is random: ranks in containers share process ids.
pub(crate) fn probe(folder: &Path) -> io::Result<()> {
    let mut file = tempfile::Builder::new().prefix("probe-").tempfile_in(folder)?;
    file.write_all(b"probe")?;
    file.close()
}

/// Writes a file that is complete and durable, or not there: what `write` writes to a draft that `open` opens.
pub(crate) fn write_whole<T>(
    out: &Path,
    open: impl Fn(&mut OpenOptions, &Path) -> io::Result<File>,
    write: impl FnOnce(&File) -> io::Result<T>,
) -> io::Result<T> {
    let out = absolute(out)?;
    let folder = out.parent().ok_or(io::ErrorKind::IsADirectory)?;
    let draft = tempfile::Builder::new().make_in(folder, |path| {
        // Temporary files are private by default; this one is to be shared like any other.
        open(OpenOptions::new().write(true).create_new(true).mode(0o644), path)
    })?;
    let written = write(draft.as_file())?;
    draft.as_file().sync_all()?;
    draft.persist(&out)?;
    sync(folder)?;
    Ok(written)
}

/// Removes all files of a folder but `kept`.
pub(crate) fn clear(folder: &Path, kept: &str) -> io::Result<()> {
    for file in fs::read_dir(folder)? {
        let file = file?;
        if file.file_name() == kept {
            continue;
        }
        match fs::remove_file(file.path()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Makes what was created and removed in a folder outlive the machine.
pub(crate) fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
