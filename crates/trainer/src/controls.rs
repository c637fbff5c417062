//! What other threads ask of the step loop, which votes for it at its next step, and what they see of it.

use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};

use crate::vitals::Vitals;

/// Requests from outside, set by the thread that reads the agent's commands.
#[derive(Debug, Default)]
pub struct Controls {
    save: AtomicBool,
    stop: AtomicBool,
    reason: Mutex<String>,
    vitals: Vitals,
}

/// What one rank, or all together, want after a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Votes {
    pub(crate) save: bool,
    pub(crate) stop: bool,
    /// Somebody's part of a checkpoint is still being written.
    pub(crate) writing: bool,
}

impl Votes {
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            save: self.save || other.save,
            stop: self.stop || other.stop,
            writing: self.writing || other.writing,
        }
    }
}

impl Controls {
    /// What the step loop does.
    #[must_use]
    pub fn vitals(&self) -> &Vitals {
        &self.vitals
    }

    /// Save after the next step.
    pub fn request_save(&self) {
        self.save.store(true, Ordering::Release);
    }

    /// Save after the next step and stop.
    pub fn request_stop(&self, reason: String) {
        if let Ok(mut kept) = self.reason.lock() {
            *kept = reason;
        }
        self.stop.store(true, Ordering::Release);
    }

    /// This rank's vote, given whether it is still writing. A wish to save is spent by it; a wish to stop
    /// stands.
    pub(crate) fn vote(&self, writing: bool) -> Votes {
        Votes {
            save: self.save.swap(false, Ordering::AcqRel),
            stop: self.stop.load(Ordering::Acquire),
            writing,
        }
    }

    /// Why to stop; other ranks may have asked.
    pub(crate) fn reason(&self) -> String {
        let reason = self.reason.lock().map(|reason| reason.clone()).unwrap_or_default();
        if reason.is_empty() { "asked by another rank".to_owned() } else { reason }
    }
}
