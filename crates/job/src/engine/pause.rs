//! Pauses that a user requested: the ranks keep their state in memory until training resumes.

use std::time::Duration;

use super::MeterShare;
use crate::{message::PauseState, time::Time};

/// A request to pause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Why, as text.
    pub reason: String,
    /// When it was requested.
    pub since: Time,
    /// Meter reading at that time.
    pub(super) from: Duration,
}

/// The current pause, and the total time of the earlier ones.
#[derive(Clone, Debug, Default)]
pub(super) struct Pauses {
    pub(super) current: Option<Pause>,
    /// Number of times that a pause began or ended.
    pub(super) changes: u64,
    /// Whether this coordinator was asked for a pause or for its end, which is newer than anything that ranks know.
    pub(super) is_requested_here: bool,
    /// Attached time of earlier pauses.
    before: Duration,
}

impl Pauses {
    /// Training is paused from `now` on; `at` is the meter reading.
    pub(super) fn begin(&mut self, now: Time, reason: &str, at: Duration) {
        self.changes += 1;
        self.current = Some(Pause { reason: reason.to_owned(), since: now, from: at });
    }

    /// Training resumes; `at` is the meter reading. Returns whether training was paused.
    pub(super) fn end(&mut self, at: Duration) -> bool {
        let Some(pause) = self.current.take() else { return false };
        self.changes += 1;
        self.before += at.saturating_sub(pause.from);
        true
    }

    /// Attached time of all pauses.
    pub(super) fn time(&self) -> MeterShare {
        MeterShare { before: self.before, since: self.current.as_ref().map(|pause| pause.from) }
    }

    /// The state to send to the ranks.
    pub(super) fn state(&self) -> PauseState {
        PauseState { number: self.changes, paused: self.current.is_some() }
    }
}
