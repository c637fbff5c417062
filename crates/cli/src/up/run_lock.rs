//! One run folder, one `baton up`.
//!
//! The lock is held by an open file that all processes of the run inherit: it is free once the last
//! of them has ended. So a `baton up` that follows one killed with SIGKILL waits until the ranks left
//! behind have saved and stopped, instead of training beside them.

use std::{
    fs::{self, File, OpenOptions},
    path::Path,
    time::{Duration, Instant},
};

use baton_access::Credentials;
use baton_job::exit::Failure;
use rustix::{
    fs::{FlockOperation, flock},
    io::{Errno, FdFlags, fcntl_setfd},
};

use crate::{
    connect::{Address, Coordinator, EndpointFile},
    failure::{bad_input, failed},
};

/// Held as long as it lives, here or in a child process.
#[derive(Debug)]
pub(super) struct RunLock {
    _file: File,
}

/// Between two looks at a lock that another run holds.
const RETRY: Duration = Duration::from_millis(200);
/// A coordinator that answers this long is not one that is just being ended.
const IN_USE_AFTER: Duration = Duration::from_secs(3);

impl RunLock {
    /// Makes the run folder and locks it. What an earlier run left behind may take `patience` to
    /// end; `waiting` is called once if there is something to wait for.
    pub(super) async fn take(
        run_dir: &Path,
        patience: Duration,
        mut waiting: impl FnMut(),
    ) -> Result<Self, Failure> {
        let path = run_dir.join("baton-up.lock");
        let refused = |error: &dyn std::fmt::Display| {
            let dir = run_dir.display();
            bad_input(format!("run folder {dir}: {error}; give a writable one with --run-dir"))
        };
        fs::create_dir_all(run_dir).map_err(|error| refused(&error))?;
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(|error| refused(&error))?;
        fcntl_setfd(&file, FdFlags::empty()).map_err(|error| refused(&error))?;
        let began = Instant::now();
        let mut has_waited = false;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                // A file system without locks; the coordinator's journal still guards the run.
                Ok(()) | Err(_) => return Ok(Self { _file: file }),
            }
            if began.elapsed() >= IN_USE_AFTER && is_served(run_dir).await {
                return Err(in_use(run_dir));
            }
            if began.elapsed() >= patience {
                return Err(failed(format!(
                    "processes of an earlier run in {} do not end; `fuser {}` lists them",
                    run_dir.display(),
                    path.display()
                )));
            }
            if !has_waited && began.elapsed() >= 2 * RETRY {
                waiting();
                has_waited = true;
            }
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// Refuses a run folder that a coordinator serves, whoever started it.
pub(super) async fn check_not_served(run_dir: &Path) -> Result<(), Failure> {
    if is_served(run_dir).await { Err(in_use(run_dir)) } else { Ok(()) }
}

fn in_use(run_dir: &Path) -> Failure {
    let dir = run_dir.display();
    bad_input(format!(
        "a job runs in {dir} already: `baton status --run-dir {dir}` shows it, `baton drain --run-dir \
         {dir}` saves and stops it"
    ))
}

async fn is_served(run_dir: &Path) -> bool {
    let path = EndpointFile::path(run_dir);
    let Some(endpoint) = EndpointFile::read(&path) else { return false };
    let address = Address::of_endpoint(&endpoint, &path);
    let Ok(mut coordinator) = Coordinator::at(address, &Credentials::default()) else {
        return false;
    };
    coordinator.answers().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_second_run_waits_until_the_first_one_and_its_children_are_gone() {
        let folder = tempfile::tempdir().unwrap();
        let take = async |patience| {
            let mut has_waited = false;
            let lock = RunLock::take(folder.path(), patience, || has_waited = true).await;
            (lock, has_waited)
        };
        let (first, has_waited) = take(Duration::ZERO).await;
        assert!(!has_waited);
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();

        drop(first.unwrap());
        let (second, has_waited) = take(3 * RETRY).await;
        assert!(has_waited);
        assert!(second.unwrap_err().message.contains("do not end"));

        child.kill().unwrap();
        child.wait().unwrap();
        let (third, _) = take(Duration::from_secs(60)).await;
        assert!(third.is_ok());
    }
}
