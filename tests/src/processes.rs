//! Looking at and killing processes by their ids.

use std::{fs, path::PathBuf};

use rustix::process::{Pid, Signal, kill_process};

/// One of the workspace's binaries, beside this test in the target folder.
#[must_use]
pub fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this test's path");
    let folder = test.ancestors().nth(2).expect("the target folder");
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

/// Whether a process runs; one that has ended but not been waited for does not.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    state.is_some_and(|state| !matches!(state, "Z" | "X"))
}

/// Kills a process with SIGKILL.
pub fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process id");
    kill_process(pid, Signal::KILL).expect("it can be killed");
}

/// Asks a process to end with SIGTERM.
pub fn terminate(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process id");
    kill_process(pid, Signal::TERM).expect("it can be signalled");
}
