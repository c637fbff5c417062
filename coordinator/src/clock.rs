//! The clock of the state machine.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use baton_job::Time;

/// The wall clock at process start, continued by the monotonic clock.
///
/// So the times in the journal are valid for the next coordinator, and a timeout fires in time even if the wall clock
/// is set back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    started: Instant,
    started_at: Time,
}

impl Clock {
    pub(crate) fn start() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { started: Instant::now(), started_at: Time(0).after(since_epoch) }
    }

    pub(crate) fn now(&self) -> Time {
        self.started_at.after(self.started.elapsed())
    }
}

/// The wall clock, milliseconds since 1970-01-01 UTC.
pub(crate) fn unix_millis() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}
