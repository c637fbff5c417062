//! The file `coordinator.json` in the run folder, by which other programs find this coordinator.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use baton_access::RunFolder;
use baton_job::exit::{Failure, bad_input};
use rustix::{fs::FlockOperation, io::Errno};
use serde::Serialize;

#[derive(Serialize)]
struct Endpoint {
    address: String,
    pid: u32,
    /// Whether clients must use `https`.
    tls: bool,
    /// Id of the run, which clients send with every call.
    run_id: String,
    /// Inode number of the run folder, by which clients recognize a copy of it.
    folder: u64,
}

/// The run folder, locked for this process until it ends: a second coordinator would replace and then delete the file.
pub(crate) struct ServeLock {
    _folder: File,
}

impl ServeLock {
    /// # Errors
    /// Another process holds it, or the folder cannot be read.
    pub(crate) fn take(run_dir: &Path) -> Result<Self, Failure> {
        let folder = File::open(run_dir).map_err(|error| {
            let dir = run_dir.display();
            bad_input(format!("run folder {dir}: {error}; give a readable one with --run-dir"))
        })?;
        match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Err(bad_input(format!(
                "run folder {} is in use: another coordinator is running on it; stop it, or give another --run-dir",
                run_dir.display()
            ))),
            // Some network file systems have no locks.
            Ok(()) | Err(_) => Ok(Self { _folder: folder }),
        }
    }
}

/// The file; deleted when this value is dropped.
pub(crate) struct CoordinatorFile(PathBuf);

impl CoordinatorFile {
    /// Writes the file atomically.
    pub(crate) fn write(
        run_dir: &Path,
        run: RunFolder,
        address: SocketAddr,
        tls: bool,
    ) -> Result<Self> {
        let path = run_dir.join("coordinator.json");
        let endpoint = Endpoint {
            address: address.to_string(),
            pid: std::process::id(),
            tls,
            run_id: run.run_id,
            folder: run.inode,
        };
        let temporary = path.with_extension(format!("{}.tmp", endpoint.pid));
        fs::write(&temporary, serde_json::to_vec(&endpoint)?)
            .and_then(|()| fs::rename(&temporary, &path))
            .with_context(|| format!("{}: cannot be written", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for CoordinatorFile {
    fn drop(&mut self) {
        // Best effort: the next caller of a stale file is refused, as its run is not served at that address.
        let _ = fs::remove_file(&self.0);
    }
}
