//! The process that started this one.

use baton_job::exit::{Failure, crash};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// The process that started this one.
#[derive(Clone, Copy, Debug)]
pub struct Parent(Option<Pid>);

impl Parent {
    /// Makes the kernel send this process a signal when its parent ends.
    ///
    /// # Errors
    /// The kernel refuses, or the parent is not `expected`: it had ended before this call.
    pub fn follow(signal: Signal, expected: Option<u32>) -> Result<Self, Failure> {
        set_parent_process_death_signal(Some(signal))
            .map_err(|error| crash(format!("cannot follow the parent process: {error}")))?;
        let parent = getppid();
        let id = parent.and_then(|pid| u32::try_from(pid.as_raw_nonzero().get()).ok());
        match expected {
            Some(expected) if id != Some(expected) => {
                Err(crash(format!("process {expected}, which started this one, has ended")))
            }
            _ => Ok(Self(parent)),
        }
    }

    /// Whether it has ended: this process has another parent then.
    pub fn has_ended(self) -> bool {
        getppid() != self.0
    }
}
