//! Waiting until a socket is ready, the deadline passes or the group is aborted.

use std::io::{self, PipeReader};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_job::Rank;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::{AbortHandle, Error};

/// An abort that can be polled: a pipe whose other end is closed by the abort.
#[derive(Clone, Debug)]
pub(super) struct AbortSignal {
    abort: AbortHandle,
    pipe: Arc<PipeReader>,
}

impl AbortSignal {
    pub(super) fn new(abort: AbortHandle) -> Result<Self, Error> {
        let (pipe, other_end) = io::pipe().map_err(Error::io("pipe"))?;
        abort.on_abort(move || drop(other_end));
        Ok(Self { abort, pipe: Arc::new(pipe) })
    }

    pub(super) fn handle(&self) -> &AbortHandle {
        &self.abort
    }
}

/// Name, deadline and abort of one operation.
#[derive(Debug)]
pub(super) struct OperationContext<'a> {
    pub(super) operation: &'static str,
    after: Duration,
    deadline: Instant,
    abort_signal: &'a AbortSignal,
}

impl<'a> OperationContext<'a> {
    /// Starts an operation with the timeout `after`.
    pub(super) fn new(
        operation: &'static str,
        after: Duration,
        abort_signal: &'a AbortSignal,
    ) -> Result<Self, Error> {
        abort_signal.abort.check(operation)?;
        Ok(Self { operation, after, deadline: Instant::now() + after, abort_signal })
    }

    /// An error if the group was aborted, for work that does not wait.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.abort_signal.abort.check(self.operation)
    }

    /// Waits until at least one of `sockets` is ready for its flags; returns which are. After the deadline, the error
    /// names those of `waiting_for`.
    pub(super) fn wait(
        &self,
        sockets: &[(BorrowedFd<'_>, PollFlags)],
        waiting_for: &dyn Fn() -> Vec<Rank>,
    ) -> Result<Vec<bool>, Error> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(Error::TimedOut {
                operation: self.operation,
                waiting_for: waiting_for(),
                after: self.after,
            });
        }
        // A timeout that the system cannot express is no timeout.
        let timeout = Timespec::try_from(remaining).ok();
        let mut fds: Vec<PollFd<'_>> =
            sockets.iter().map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
        fds.push(PollFd::new(&self.abort_signal.pipe, PollFlags::IN));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::io(self.operation)(errno.into())),
        }
        self.abort_signal.abort.check(self.operation)?;
        fds.pop();
        Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
    }
}
