//! Inspects, signals and kills processes by their ids.

use std::{fs, os::fd::OwnedFd, path::PathBuf};

use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};

/// Names a folder with other programs to test: scripts/dist/test.sh.
const PROGRAMS: &str = "BATON_TEST_PROGRAMS";

/// Path of a binary of the workspace, in the target folder of this test if no other folder is set.
#[must_use]
pub fn binary(name: &str) -> PathBuf {
    let folder = std::env::var_os(PROGRAMS).map_or_else(
        || {
            let test = std::env::current_exe().expect("this test's path");
            test.ancestors().nth(2).expect("the target folder").to_owned()
        },
        PathBuf::from,
    );
    let path = folder.join(name);
    assert!(path.exists(), "{} is missing: run `make build` first", path.display());
    path
}

/// The direct children of a process.
#[must_use]
pub fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|id| id.parse().ok()).collect()
}

/// A process and all its descendants.
#[must_use]
pub fn descendants(pid: u32) -> Vec<u32> {
    let below = children(pid).into_iter().flat_map(descendants);
    std::iter::once(pid).chain(below).collect()
}

/// Waits for the exit of a process that is not a child of this one.
pub struct ProcessExit(OwnedFd);

impl ProcessExit {
    /// Must be created while the process is running.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        Self::if_running(pid).expect("the process is running")
    }

    /// `None` if the process has ended already.
    #[must_use]
    pub fn if_running(pid: u32) -> Option<Self> {
        pidfd_open(raw(pid), PidfdFlags::empty()).ok().map(Self)
    }

    /// Waits for the exit.
    pub async fn wait(self) {
        let wait = move || {
            // A pidfd becomes readable when its process ends.
            poll(&mut [PollFd::new(&self.0, PollFlags::IN)], None).expect("its exit");
        };
        tokio::task::spawn_blocking(wait).await.expect("a thread");
    }
}

/// Kills a process with SIGKILL.
pub fn kill(pid: u32) {
    kill_process(raw(pid), Signal::KILL).expect("it can be killed");
}

/// Stops a process with SIGSTOP: it stays alive, but does nothing.
pub fn stop(pid: u32) {
    kill_process(raw(pid), Signal::STOP).expect("it can be stopped");
}

/// Lets a stopped process continue.
pub fn wake(pid: u32) {
    kill_process(raw(pid), Signal::CONT).expect("it can be woken");
}

/// Sends SIGINT, like Ctrl-C in a terminal.
pub fn interrupt(pid: u32) {
    kill_process(raw(pid), Signal::INT).expect("it can be signalled");
}

/// Asks a process to exit, with SIGTERM.
pub fn terminate(pid: u32) {
    kill_process(raw(pid), Signal::TERM).expect("it can be signalled");
}

/// Sends SIGHUP, as the kernel does when a terminal is closed.
pub fn hang_up(pid: u32) {
    kill_process(raw(pid), Signal::HUP).expect("it can be signalled");
}

/// Sends SIGUSR1, with which Slurm can announce that a job's time limit is near.
pub fn announce_end(pid: u32) {
    kill_process(raw(pid), Signal::USR1).expect("it can be signalled");
}

fn raw(pid: u32) -> Pid {
    i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process id")
}
