//! How others find this coordinator: a small file in the run folder.

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
    /// Whether it is `https`.
    tls: bool,
}

/// The file, for as long as the coordinator serves.
pub(crate) struct EndpointFile(PathBuf);

impl EndpointFile {
    /// Writes the file in one piece.
    pub(crate) fn write(run_dir: &Path, address: SocketAddr, tls: bool) -> Result<Self> {
        let path = run_dir.join("coordinator.json");
        let endpoint = Endpoint { address: address.to_string(), pid: std::process::id(), tls };
        let draft = path.with_extension(format!("{}.tmp", endpoint.pid));
        fs::write(&draft, serde_json::to_vec(&endpoint)?)
            .and_then(|()| fs::rename(&draft, &path))
            .with_context(|| format!("{}: cannot be written", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for EndpointFile {
    fn drop(&mut self) {
        // Left behind it only costs the next caller one refused connection.
        let _ = fs::remove_file(&self.0);
    }
}
