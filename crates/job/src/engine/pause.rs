//! Training that is paused because a user asked for that: the ranks keep their state in memory until it goes on.

use std::time::Duration;

use super::Share;
use crate::{message::Hold, time::Time};

/// A request to pause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Why, in words.
    pub reason: String,
    /// When it was asked for.
    pub since: Time,
    /// What the meter showed then.
    pub(super) from: Duration,
}

/// The present pause, and the sum of the earlier ones.
#[derive(Clone, Debug, Default)]
pub(super) struct Pauses {
    pub(super) present: Option<Pause>,
    /// How often one began or ended.
    pub(super) changes: u64,
    /// Attached time of earlier pauses.
    before: Duration,
}

impl Pauses {
    /// Training is paused from `now` on, when the meter shows `at`.
    pub(super) fn begin(&mut self, now: Time, reason: &str, at: Duration) {
        self.changes += 1;
        self.present = Some(Pause { reason: reason.to_owned(), since: now, from: at });
    }

    /// It goes on when the meter shows `at`; whether it was paused.
    pub(super) fn end(&mut self, at: Duration) -> bool {
        let Some(pause) = self.present.take() else { return false };
        self.changes += 1;
        self.before += at.saturating_sub(pause.from);
        true
    }

    /// Attached time of all pauses.
    pub(super) fn time(&self) -> Share {
        Share { before: self.before, since: self.present.as_ref().map(|pause| pause.from) }
    }

    /// What the ranks have to know.
    pub(super) fn hold(&self) -> Hold {
        Hold { number: self.changes, paused: self.present.is_some() }
    }
}
