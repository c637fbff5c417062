//! Operations on local folders beyond those of an object store.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, absolute},
};

/// Creates a folder and its parents durably: they survive a power failure.
pub(crate) fn create(folder: &Path) -> io::Result<()> {
    let folder = absolute(folder)?;
    if folder.is_dir() {
        return Ok(());
    }
    let parent = folder.parent().ok_or(io::ErrorKind::NotFound)?;
    create(parent)?;
    match fs::create_dir(&folder) {
        // Several ranks open the same store at the same time.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
        created => created?,
    }
    sync(parent)
}

/// Checks that the folder is writable: writes and removes a small file. Its name is random, because ranks in
/// different containers may have the same process id.
pub(crate) fn probe(folder: &Path) -> io::Result<()> {
    let mut file = tempfile::Builder::new().prefix("probe-").tempfile_in(folder)?;
    file.write_all(b"probe")?;
    file.close()
}

/// Creates a file, without hard links: an empty file of the name claims it, and is replaced. One that a crash left empty
/// stays, so nobody else may believe that the name is free.
pub(crate) fn create_by_claim(out: &Path, bytes: &[u8]) -> io::Result<()> {
    create(out.parent().ok_or(io::ErrorKind::IsADirectory)?)?;
    OpenOptions::new().write(true).create_new(true).open(out)?;
    let written =
        write_whole(out, |options, path| options.open(path), |mut file| file.write_all(bytes));
    if written.is_err() && fs::metadata(out).is_ok_and(|claim| claim.len() == 0) {
        // Best effort: nobody has read anything here.
        let _ = fs::remove_file(out);
    }
    written
}

/// Writes a file atomically and durably: `open` opens a temporary file, `write` writes its content, then it is
/// renamed to `out`.
pub(crate) fn write_whole<T>(
    out: &Path,
    open: impl Fn(&mut OpenOptions, &Path) -> io::Result<File>,
    write: impl FnOnce(&File) -> io::Result<T>,
) -> io::Result<T> {
    let out = absolute(out)?;
    let folder = out.parent().ok_or(io::ErrorKind::IsADirectory)?;
    let temporary = tempfile::Builder::new().make_in(folder, |path| {
        // Temporary files are private by default; give this one the usual permissions.
        open(OpenOptions::new().write(true).create_new(true).mode(0o644), path)
    })?;
    let written = write(temporary.as_file())?;
    temporary.as_file().sync_all()?;
    temporary.persist(&out)?;
    sync(folder)?;
    Ok(written)
}

/// Names of the folders in a folder that are UTF-8; empty if it does not exist.
pub(crate) fn folders(folder: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        if let Ok(name) = entry.file_name().into_string()
            && entry.path().is_dir()
        {
            names.push(name);
        }
    }
    Ok(names)
}

/// Removes all files of a folder except `kept`.
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

/// An error unless `file` is a regular file. To open a named pipe blocks until somebody writes to it, so open the file
/// with `O_NONBLOCK`, which changes nothing for a regular one.
pub(crate) fn check_is_regular(file: &File) -> io::Result<()> {
    if file.metadata()?.is_file() { Ok(()) } else { Err(io::Error::other(NOT_REGULAR)) }
}

/// The problem of what has the name of a file and is none: a named pipe, a device, a folder.
pub(crate) const NOT_REGULAR: &str = "it is not a regular file";

/// Makes creations and removals in a folder durable.
pub(crate) fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
