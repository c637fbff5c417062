//! What time it is to the machine.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use baton_job::Time;

/// The wall clock as it was when this process started, and steady from there.
///
/// So the journal's times mean something to the next coordinator, and no clock that is set back makes a timeout late.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    began: Instant,
    at: Time,
}

impl Clock {
    pub(crate) fn start() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { began: Instant::now(), at: Time(0).after(since_epoch) }
    }

    pub(crate) fn now(&self) -> Time {
        self.at.after(self.began.elapsed())
    }
}

/// The wall clock, milliseconds since 1970-01-01 UTC.
pub(crate) fn unix_millis() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}
