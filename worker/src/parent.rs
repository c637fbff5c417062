//! The process that started this one.

use baton_job::exit::{Failure, crash};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// Makes the kernel send this process a signal when its parent ends.
///
/// # Errors
/// The kernel refuses, or the parent is not `parent`: it had ended before this call.
pub(crate) fn follow_parent(signal: Signal, parent: Option<u32>) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(signal))
        .map_err(|error| crash(format!("cannot follow the parent process: {error}")))?;
    let now = getppid().map(|pid| pid.as_raw_nonzero().get());
    let now = now.and_then(|pid| u32::try_from(pid).ok());
    match parent {
        Some(parent) if now != Some(parent) => {
            Err(crash(format!("process {parent}, which started this one, has ended")))
        }
        _ => Ok(()),
    }
}
