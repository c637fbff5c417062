//! The file `coordinator.json` in the run folder, by which other programs find this coordinator.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde::Serialize;

#[derive(Serialize)]
struct Endpoint {
    address: String,
    pid: u32,
    /// Whether clients must use `https`.
    tls: bool,
}

/// The file; deleted when this value is dropped.
pub(crate) struct CoordinatorFile(PathBuf);

impl CoordinatorFile {
    /// Writes the file atomically.
    pub(crate) fn write(run_dir: &Path, address: SocketAddr, tls: bool) -> Result<Self> {
        let path = run_dir.join("coordinator.json");
        let endpoint = Endpoint { address: address.to_string(), pid: std::process::id(), tls };
        let temporary = path.with_extension(format!("{}.tmp", endpoint.pid));
        fs::write(&temporary, serde_json::to_vec(&endpoint)?)
            .and_then(|()| fs::rename(&temporary, &path))
            .with_context(|| format!("{}: cannot be written", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for CoordinatorFile {
    fn drop(&mut self) {
        // Best effort: a stale file only costs the next caller one refused connection.
        let _ = fs::remove_file(&self.0);
    }
}
