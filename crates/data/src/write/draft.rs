//! A file with a hidden name until it is complete.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, RenameFlags, renameat_with},
    io::Errno,
};

use super::Error;
use crate::file::{is_at, try_lock};

/// A file being written: `.NAME.draft` in the folder of its target, locked by this process. If it is dropped
/// unfinished, it is removed; if a killed process left one, the next draft of the same target replaces it.
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
        // A path with a slash at its end can only be a folder.
        if target.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(Error::Target { path: target.to_owned() });
        }
        let mut name = OsString::from(".");
        name.push(target.file_name().ok_or_else(|| Error::Target { path: target.to_owned() })?);
        name.push(".draft");
        refuse_special_file(target)?;
        let path = target.with_file_name(name);
        loop {
            // Do not truncate yet: it may belong to another writer.
            let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
            let file = file.map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => Error::Folder { path: target.to_owned() },
                _ => failed("create", &path)(error),
            })?;
            if !try_lock(&file).map_err(failed("lock", &path))? {
                return Err(Error::Busy { path: target.to_owned() });
            }
            // Between open and lock another writer may have finished and renamed this file to its target. Then try
            // again.
            if is_at(&file, &path) {
                file.set_len(0).map_err(failed("empty", &path))?;
                return Ok(Self { file, path, target: target.to_owned(), finished: false });
            }
        }
    }

    /// Writes at the current position.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all(bytes).map_err(failed("write", &self.path))
    }

    /// Writes lines.
    pub(super) fn write_lines(&mut self, lines: &[String]) -> Result<(), Error> {
        self.write(lines.iter().map(|line| format!("{line}\n")).collect::<String>().as_bytes())
    }

    /// Moves to a position, which may be beyond the end; the gap is filled with zeros.
    pub(super) fn seek(&mut self, position: u64) -> Result<(), Error> {
        self.file.seek(SeekFrom::Start(position)).map_err(failed("write", &self.path))?;
        Ok(())
    }

    /// Waits until everything written so far is on the disk.
    pub(super) fn sync(&self) -> Result<(), Error> {
        self.file.sync_all().map_err(failed("sync", &self.path))
    }

    /// Renames the file to its target, replacing an older one. It is durable afterwards.
    pub(super) fn finish(self) -> Result<(), Error> {
        self.sync()?;
        self.publish()
    }

    /// Renames the file, which is [synced](Self::sync), to its target.
    pub(super) fn publish(mut self) -> Result<(), Error> {
        self.rename()?;
        self.sync_folder()
    }

    fn rename(&mut self) -> Result<(), Error> {
        fs::rename(&self.path, &self.target).map_err(failed("replace", &self.target))?;
        self.finished = true;
        Ok(())
    }

    /// Exchanges the file with its target, where the file system can do that; otherwise renames it.
    fn exchange(&mut self) -> Result<Published, Error> {
        // A folder would be exchanged like a file, and get a hidden name.
        refuse_special_file(&self.target)?;
        // The older file gets the draft's name for a moment, in which it must not be taken for a draft that nobody writes.
        let older = File::open(&self.target).ok();
        if let Some(older) = &older {
            // Best effort: some file systems have no locks.
            let _ = try_lock(older);
        }
        match renameat_with(CWD, &self.path, CWD, &self.target, RenameFlags::EXCHANGE) {
            Ok(()) => Ok(Published::Exchanged { _older: older }),
            Err(Errno::NOENT) => self.rename().map(|()| Published::New),
            Err(Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP) => {
                let is_new = older.is_none();
                self.rename()?;
                Ok(if is_new { Published::New } else { Published::Replaced })
            }
            Err(error) => Err(failed("replace", &self.target)(error.into())),
        }
    }

    /// Undoes an [`exchange`](Self::exchange) as far as that is possible.
    fn put_back(&mut self, published: &Published) {
        let undone = match published {
            Published::Exchanged { .. } => {
                renameat_with(CWD, &self.path, CWD, &self.target, RenameFlags::EXCHANGE)
            }
            Published::New => {
                renameat_with(CWD, &self.target, CWD, &self.path, RenameFlags::NOREPLACE)
            }
            Published::Replaced => return,
        };
        // Best effort, as there is another failure to report. What is not put back must stay.
        self.finished = undone.is_err();
    }

    fn sync_folder(&self) -> Result<(), Error> {
        let folder = match self.target.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        File::open(folder).and_then(|file| file.sync_all()).map_err(failed("sync", folder))
    }
}

/// Refuses a target that is no regular file: a rename would replace a device or a pipe.
fn refuse_special_file(target: &Path) -> Result<(), Error> {
    match fs::metadata(target).is_ok_and(|existing| !existing.is_file()) {
        true => Err(Error::SpecialFile { path: target.to_owned() }),
        false => Ok(()),
    }
}

/// What became of the older file when a draft got its name.
enum Published {
    /// It has the draft's name, and is locked.
    Exchanged { _older: Option<File> },
    /// There was none.
    New,
    /// It is gone: this file system cannot exchange files.
    Replaced,
}

/// Renames files that belong together, which are [synced](Draft::sync), to their targets. If one cannot be renamed, the older
/// files of the others are put back, where the file system can exchange files.
pub(super) fn publish_all(drafts: Vec<Draft>) -> Result<(), Error> {
    let mut published = Vec::new();
    for mut draft in drafts {
        match draft.exchange() {
            Ok(how) => published.push((draft, how)),
            Err(error) => {
                published.iter_mut().for_each(|(draft, how)| draft.put_back(how));
                return Err(error);
            }
        }
    }
    // The older files now have the names of the drafts, and are removed with them.
    published.iter().try_for_each(|(draft, _)| draft.sync_folder())
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished {
            // Best effort: a leftover draft does no harm, because it is never taken for a finished file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Replaces a small file atomically.
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
    fn the_draft_of_a_killed_writer_is_replaced() {
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
    fn a_target_that_is_no_regular_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (pipe, link) = (folder.path().join("pipe"), folder.path().join("link"));
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        std::os::unix::fs::symlink("/dev/full", &link).unwrap();
        for target in [&pipe, &link, folder.path()] {
            let refused = Draft::create(target).unwrap_err().to_string();
            assert!(refused.contains("is not a regular file"), "{refused}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left behind");
    }

    /// Drafts of a.beton, b.beton and c.beton with `text`.
    fn drafts(folder: &Path, text: &str) -> Vec<Draft> {
        let draft = |name| {
            let mut draft = Draft::create(&folder.join(name)).unwrap();
            draft.write(text.as_bytes()).unwrap();
            draft
        };
        ["a.beton", "b.beton", "c.beton"].map(draft).into()
    }

    #[test]
    fn files_that_belong_together_are_all_replaced_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        publish_all(drafts(folder.path(), "old")).unwrap();
        publish_all(drafts(folder.path(), "older")).unwrap();
        assert_eq!(["a.beton", "b.beton", "c.beton"].map(read), ["older"; 3]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "nothing else is left");

        // The second has no older file, and the third becomes a folder while they are written.
        fs::remove_file(folder.path().join("b.beton")).unwrap();
        let drafts = drafts(folder.path(), "new");
        fs::remove_file(folder.path().join("c.beton")).unwrap();
        fs::create_dir_all(folder.path().join("c.beton/full")).unwrap();
        let error = publish_all(drafts).unwrap_err().to_string();
        assert!(error.contains("c.beton exists and is not a regular file"), "{error}");
        assert_eq!(read("a.beton"), "older");
        let mut names: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["a.beton", "c.beton"], "b.beton would have only a part");
    }

    #[test]
    fn a_missing_folder_and_a_target_without_a_name_are_reported() {
        let missing = Draft::create(Path::new("/nowhere/set.beton"));
        assert!(matches!(missing, Err(Error::Folder { .. })), "{missing:?}");
        for target in ["/", "/tmp/set.beton/"] {
            assert!(matches!(Draft::create(Path::new(target)), Err(Error::Target { .. })));
        }
    }
}
