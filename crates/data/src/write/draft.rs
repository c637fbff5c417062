//! A file under a hidden name until it is whole.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Seek, SeekFrom, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::Error;

/// A file being written: `.NAME.draft` beside its target, locked by this process. Dropped
/// unfinished, it is removed; left behind by a killed process, the next draft of the same target
/// takes its place.
#[derive(Debug)]
pub(super) struct Draft {
    file: File,
    path: PathBuf,
    target: PathBuf,
    finished: bool,
}

impl Draft {
    /// An empty draft.
    pub(super) fn create(target: &Path) -> Result<Self, Error> {
        let mut name = OsString::from(".");
        name.push(target.file_name().ok_or_else(|| Error::Target { path: target.to_owned() })?);
        name.push(".draft");
        let path = target.with_file_name(name);
        loop {
            // Not truncated yet: it may be another writer's.
            let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
            let file = file.map_err(failed("create", &path))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::Busy { path: target.to_owned() });
                }
                Err(TryLockError::Error(error)) => return Err(failed("lock", &path)(error)),
            }
            // Between open and lock another writer may have finished, and made this very file its
            // target. Then the name is free or someone else's by now.
            if is_same_file(&file, &path) {
                file.set_len(0).map_err(failed("empty", &path))?;
                return Ok(Self { file, path, target: target.to_owned(), finished: false });
            }
        }
    }

    /// Writes behind what was written last.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all(bytes).map_err(failed("write", &self.path))
    }

    /// Moves to a place that may lie behind the end; what is between then reads as zeros.
    pub(super) fn seek(&mut self, place: u64) -> Result<(), Error> {
        self.file.seek(SeekFrom::Start(place)).map_err(failed("write", &self.path))?;
        Ok(())
    }

    /// Waits until what was written so far is on the disk.
    pub(super) fn sync(&self) -> Result<(), Error> {
        self.file.sync_all().map_err(failed("sync", &self.path))
    }

    /// Gives the file its name, in the place of an older one. It is on the disk afterwards.
    pub(super) fn finish(mut self) -> Result<(), Error> {
        self.sync()?;
        fs::rename(&self.path, &self.target).map_err(failed("rename", &self.path))?;
        self.finished = true;
        let folder = match self.target.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        File::open(folder).and_then(|file| file.sync_all()).map_err(failed("sync", folder))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished {
            // Nobody takes it for a data set, so that it stays is no more than untidy.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn is_same_file(file: &File, path: &Path) -> bool {
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(file), Ok(named)) => identity(file) == identity(named),
        _ => false,
    }
}

/// Replaces a small file as a whole.
pub(super) fn replace(target: &Path, text: &str) -> Result<(), Error> {
    let mut draft = Draft::create(target)?;
    draft.write(text.as_bytes())?;
    draft.finish()
}

pub(super) fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { operation, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_becomes_its_target_only_when_finished() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("set.beton");
        fs::write(&target, "old").unwrap();

        let mut draft = Draft::create(&target).unwrap();
        draft.write(b"new").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"old");
        drop(draft);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

        replace(&target, "new").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_a_killed_writer_left_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("set.beton");
        fs::write(folder.path().join(".set.beton.draft"), "half of a longer file").unwrap();
        replace(&target, "new").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_second_writer_of_the_same_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("set.beton");
        let first = Draft::create(&target).unwrap();
        assert!(matches!(Draft::create(&target), Err(Error::Busy { .. })));
        drop(first);
        Draft::create(&target).unwrap();
    }

    #[test]
    fn a_folder_that_is_not_there_and_a_target_without_a_name_are_named() {
        let refused = Draft::create(Path::new("/nowhere/set.beton")).unwrap_err().to_string();
        assert!(
            refused.starts_with("cannot create /nowhere/.set.beton.draft: No such"),
            "{refused}"
        );
        assert!(matches!(Draft::create(Path::new("/")), Err(Error::Target { .. })));
    }
}
