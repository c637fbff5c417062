//! Sleeping until a socket is ready, the deadline passes or the group is aborted.

use std::io::{self, PipeReader};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_job::Rank;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::{AbortHandle, Error};

/// An abort that can be polled for: a pipe whose other end is closed by it.
#[derive(Clone, Debug)]
pub(super) struct Alarm {
    abort: AbortHandle,
    pipe: Arc<PipeReader>,
}

impl Alarm {
    pub(super) fn new(abort: AbortHandle) -> Result<Self, Error> {
        let (pipe, other_end) = io::pipe().map_err(Error::io("pipe"))?;
        abort.on_abort(move || drop(other_end));
        Ok(Self { abort, pipe: Arc::new(pipe) })
    }

    pub(super) fn handle(&self) -> &AbortHandle {
        &self.abort
    }
}

/// What ends an operation before its time.
#[derive(Debug)]
pub(super) struct Limit<'a> {
    pub(super) operation: &'static str,
    after: Duration,
    deadline: Instant,
    alarm: &'a Alarm,
}

impl<'a> Limit<'a> {
    /// Starts an operation that may take `after`.
    pub(super) fn new(
        operation: &'static str,
        after: Duration,
        alarm: &'a Alarm,
    ) -> Result<Self, Error> {
        alarm.abort.check(operation)?;
        Ok(Self { operation, after, deadline: Instant::now() + after, alarm })
    }

    /// Sleeps until one of `sockets` is ready for what is asked of it; tells which are. At the
    /// deadline `waiting_for` is to blame.
    pub(super) fn wait(
        &self,
        sockets: &[(BorrowedFd<'_>, PollFlags)],
        waiting_for: Rank,
    ) -> Result<Vec<bool>, Error> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(Error::TimedOut {
                operation: self.operation,
                waiting_for: Some(waiting_for),
                after: self.after,
            });
        }
        // A time beyond what the system can express is no limit at all.
        let timeout = Timespec::try_from(remaining).ok();
        let mut fds: Vec<PollFd<'_>> =
            sockets.iter().map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
        fds.push(PollFd::new(&self.alarm.pipe, PollFlags::IN));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::io(self.operation)(errno.into())),
        }
        self.alarm.abort.check(self.operation)?;
        fds.pop();
        Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
    }
}
