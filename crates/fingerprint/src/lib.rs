//! Whether a file has been written since its digest was computed, without reading it.
//!
//! Every write by a program changes a file's change time, which no program can set. Writes can be lost only in a reboot, so
//! a fingerprint is valid during one boot of one machine.

#![forbid(unsafe_code)]

use std::{
    fs::{self, Metadata},
    os::unix::fs::MetadataExt,
};

use serde::{Deserialize, Serialize};

/// Identifies the boot of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootId(String);

impl BootId {
    /// The current boot. If the system has no boot ID, a random one, which makes fingerprints valid for this process only.
    #[must_use]
    pub fn current() -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .unwrap_or_else(|_| fastrand::u128(..).to_string());
        Self(boot.trim().to_owned())
    }
}

/// Properties of a file when its digest was computed. If they and its size are unchanged, it has not been written since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    boot: String,
    inode: u64,
    changed_seconds: i64,
    changed_nanos: i64,
}

impl Fingerprint {
    /// The fingerprint of a file. Read the metadata before the content, so that a write in between changes it.
    #[must_use]
    pub fn of(metadata: &Metadata, boot: &BootId) -> Self {
        Self {
            boot: boot.0.clone(),
            inode: metadata.ino(),
            changed_seconds: metadata.ctime(),
            changed_nanos: metadata.ctime_nsec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Write};

    use super::*;

    #[test]
    fn a_write_a_new_file_and_a_reboot_change_it_and_reading_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let boot = BootId::current();
        let now = || Fingerprint::of(&fs::metadata(&path).unwrap(), &boot);
        fs::write(&path, "before").unwrap();
        let first = now();
        assert_eq!(fs::read(&path).unwrap(), b"before");
        assert_eq!(now(), first);
        let later = BootId("another".to_owned());
        assert_ne!(Fingerprint::of(&fs::metadata(&path).unwrap(), &later), first);
        // Change times have a resolution of some milliseconds.
        let changed = (0..1_000_000).any(|_| {
            File::options().append(true).open(&path).unwrap().write_all(b"!").unwrap();
            now() != first
        });
        assert!(changed);
        let second = now();
        fs::write(folder.path().join("b"), "before").unwrap();
        fs::rename(folder.path().join("b"), &path).unwrap();
        assert_ne!(now(), second);
    }
}
