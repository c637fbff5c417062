//! Where this coordinator runs, for its lease and for people.

use std::{
    fs,
    net::SocketAddr,
    path::{self, Path},
};

use baton_checkpoint::CoordinatorLease;
use baton_job::{
    JobId,
    exit::{Failure, bad_input, crash},
};

use crate::{args::Args, disk};

/// This coordinator's process, and where it runs.
pub(crate) struct ServingPlace {
    /// Random identity of the process.
    pub(crate) owner: String,
    /// Random identity of the run folder.
    folder: String,
    pub(crate) host: String,
    pub(crate) run_dir: String,
    /// URL at which others reach it.
    address: Option<String>,
}

impl ServingPlace {
    pub(crate) fn of(args: &Args, address: SocketAddr) -> Result<Self, Failure> {
        let scheme = if args.access.tls_cert.is_some() { "https" } else { "http" };
        let address = |host: &String| format!("{scheme}://{}:{}", in_url(host), address.port());
        Ok(Self {
            owner: uuid::Uuid::new_v4().to_string(),
            folder: folder_identity(&args.run_dir)?,
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            run_dir: path::absolute(&args.run_dir).map_err(crash)?.display().to_string(),
            address: args.host.as_ref().map(address),
        })
    }

    pub(crate) fn lease(&self, job: JobId) -> CoordinatorLease {
        let Self { owner, folder, host, run_dir, address } = self;
        CoordinatorLease {
            owner: owner.clone(),
            job,
            folder: folder.clone(),
            host: host.clone(),
            run_dir: run_dir.clone(),
            address: address.clone(),
            ..CoordinatorLease::default()
        }
    }
}

/// The random identity of a run folder, which is moved with it.
fn folder_identity(run_dir: &Path) -> Result<String, Failure> {
    let path = run_dir.join("identity");
    match fs::read_to_string(&path) {
        Ok(known) if !known.trim().is_empty() => return Ok(known.trim().to_owned()),
        _ => {}
    }
    let new = uuid::Uuid::new_v4().to_string();
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, format!("{new}\n"))
        .and_then(|()| fs::rename(&temporary, &path))
        .map_err(|error| {
            let path = path.display();
            let problem = format!("{path}: cannot be written: {error}");
            disk::full(run_dir, &problem).unwrap_or_else(|| {
                bad_input(format!(
                    "{problem}; make the run folder writable, or give another --run-dir"
                ))
            })
        })?;
    Ok(new)
}

/// A host as a part of a URL.
fn in_url(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}
