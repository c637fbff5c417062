//! A lock that allows one `baton up` per run folder.
//!
//! The lock is held by an open file that all processes of the run inherit, so it is free once the last of them has
//! ended. After a `baton up` was killed with SIGKILL, the next one waits until the remaining ranks have saved and
//! stopped, instead of training at the same time.

use std::{
    fs::{self, File, OpenOptions},
    path::Path,
    time::{Duration, Instant},
};

use baton_access::ClientCredentials;
use baton_job::exit::Failure;
use rustix::{
    fs::{FlockOperation, flock},
    io::{Errno, FdFlags, fcntl_setfd},
};

use crate::{
    connect::{Address, Coordinator, EndpointFile},
    failure::{bad_input, failed},
};

/// The lock, held until this value is dropped and all child processes have ended.
#[derive(Debug)]
pub(crate) struct RunLock {
    _file: File,
}

/// Poll interval of a lock that another run holds.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Time after which a coordinator that still answers is considered in use, not about to end.
const IN_USE_AFTER: Duration = Duration::from_secs(3);

/// Name of the locked file in the run folder.
const RUN_LOCK_FILE: &str = "baton-up.lock";

impl RunLock {
    /// Whether a `baton up` or its processes hold the lock of a run folder.
    pub(crate) fn is_held(run_dir: &Path) -> bool {
        let lock = File::open(run_dir.join(RUN_LOCK_FILE));
        let locked = lock.map(|file| flock(&file, FlockOperation::NonBlockingLockShared));
        locked.is_ok_and(|locked| locked == Err(Errno::WOULDBLOCK))
    }

    /// Creates the run folder and locks it. Waits up to `timeout` for processes of an earlier run to end; `waiting` is
    /// called once if it has to wait. `flag` is the one that names the folder.
    pub(crate) async fn take(
        run_dir: &Path,
        flag: &str,
        timeout: Duration,
        mut waiting: impl FnMut(),
    ) -> Result<Self, Failure> {
        let path = run_dir.join(RUN_LOCK_FILE);
        let unusable = |error: &dyn std::fmt::Display| {
            let dir = run_dir.display();
            bad_input(format!("run folder {dir}: {error}; give a writable one with {flag}"))
        };
        fs::create_dir_all(run_dir).map_err(|error| unusable(&error))?;
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(|error| unusable(&error))?;
        fcntl_setfd(&file, FdFlags::empty()).map_err(|error| unusable(&error))?;
        let start = Instant::now();
        let mut has_waited = false;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                // On a file system without locks, the coordinator's journal still protects the run.
                Ok(()) | Err(_) => return Ok(Self { _file: file }),
            }
            if start.elapsed() >= IN_USE_AFTER && is_served(run_dir).await {
                return Err(in_use(run_dir));
            }
            if start.elapsed() >= timeout {
                return Err(failed(format!(
                    "processes of an earlier run in {} do not end; `fuser {}` lists them",
                    run_dir.display(),
                    path.display()
                )));
            }
            if !has_waited && start.elapsed() >= 2 * LOCK_POLL_INTERVAL {
                waiting();
                has_waited = true;
            }
            tokio::time::sleep(LOCK_POLL_INTERVAL).await;
        }
    }
}

/// Fails if any coordinator serves this run folder.
pub(super) async fn check_not_served(run_dir: &Path) -> Result<(), Failure> {
    if is_served(run_dir).await { Err(in_use(run_dir)) } else { Ok(()) }
}

fn in_use(run_dir: &Path) -> Failure {
    let dir = run_dir.display();
    bad_input(format!(
        "a job is already running in {dir}: `baton status --run-dir {dir}` shows it, `baton drain --run-dir \
         {dir}` saves and stops it"
    ))
}

async fn is_served(run_dir: &Path) -> bool {
    let path = EndpointFile::path(run_dir);
    let endpoint = EndpointFile::read(&path).filter(|endpoint| endpoint.is_of(run_dir));
    let Some(endpoint) = endpoint else { return false };
    let address = Address::of_endpoint(&endpoint, &path);
    let Ok(mut coordinator) = Coordinator::at(address, &ClientCredentials::default()) else {
        return false;
    };
    coordinator.is_reachable().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_second_run_waits_until_the_first_one_and_its_children_have_ended() {
        let folder = tempfile::tempdir().unwrap();
        let take = async |timeout| {
            let mut has_waited = false;
            let lock =
                RunLock::take(folder.path(), "--run-dir", timeout, || has_waited = true).await;
            (lock, has_waited)
        };
        let (first, has_waited) = take(Duration::ZERO).await;
        assert!(!has_waited && RunLock::is_held(folder.path()));
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();

        drop(first.unwrap());
        let (second, has_waited) = take(3 * LOCK_POLL_INTERVAL).await;
        assert!(has_waited);
        assert!(second.unwrap_err().message.contains("do not end"));

        child.kill().unwrap();
        child.wait().unwrap();
        let (third, _) = take(Duration::from_secs(60)).await;
        assert!(third.is_ok());
        drop(third);
        assert!(!RunLock::is_held(folder.path()));
        assert!(!RunLock::is_held(&folder.path().join("nowhere")));
    }
}
