//! What other threads ask of the step loop, which votes for it at its next step, and what they see of it.

use std::{
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::vitals::Vitals;

/// Requests from outside, set by the thread that reads the agent's commands.
#[derive(Debug, Default)]
pub struct Controls {
    save: AtomicBool,
    stop: AtomicBool,
    reason: Mutex<String>,
    pause: Mutex<bool>,
    /// Somebody may want something else of a loop that stands still.
    told: Condvar,
    vitals: Vitals,
}

/// What one rank, or all together, want after a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Votes {
    pub(crate) save: bool,
    pub(crate) stop: bool,
    /// Somebody's part of a checkpoint is still being written.
    pub(crate) writing: bool,
    /// Stand still.
    pub(crate) pause: bool,
}

impl Votes {
    /// As they travel behind the gradient, where they are added up.
    pub(crate) fn to_tail(self) -> [f32; 4] {
        [self.save, self.stop, self.writing, self.pause].map(|vote| f32::from(u8::from(vote)))
    }

    /// Those of all ranks, from their sums.
    pub(crate) fn of_tail(tail: &[f32]) -> Self {
        let vote = |slot: usize| tail.get(slot).is_some_and(|votes| *votes > 0.0);
        Self { save: vote(0), stop: vote(1), writing: vote(2), pause: vote(3) }
    }

    /// Whether anything but the next step follows from them, given whether a checkpoint is being written.
    pub(crate) fn ask(self, is_saving: bool) -> bool {
        self.save || self.stop || self.pause || (is_saving && !self.writing)
    }

    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            save: self.save || other.save,
            stop: self.stop || other.stop,
            writing: self.writing || other.writing,
            pause: self.pause || other.pause,
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
        self.told.notify_all();
    }

    /// Stand still after the next step until told otherwise, or go on.
    pub fn set_paused(&self, paused: bool) {
        *self.pause.lock().unwrap_or_else(PoisonError::into_inner) = paused;
        self.told.notify_all();
    }

    /// Save after the next step and stop.
    pub fn request_stop(&self, reason: String) {
        if let Ok(mut kept) = self.reason.lock() {
            *kept = reason;
        }
        self.stop.store(true, Ordering::Release);
        self.told.notify_all();
    }

    /// This rank's vote, given whether it is still writing. A wish to save is spent by it; a wish to stop
    /// stands.
    pub(crate) fn vote(&self, writing: bool) -> Votes {
        Votes {
            save: self.save.swap(false, Ordering::AcqRel),
            stop: self.stop.load(Ordering::Acquire),
            writing,
            pause: *self.pause.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Waits a moment, or until somebody wants something; not at all if nobody wants this rank to stand still.
    pub(crate) fn stand_still(&self, moment: Duration) {
        let paused = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        if *paused {
            drop(self.told.wait_timeout(paused, moment));
        }
    }

    /// Why to stop; other ranks may have asked.
    pub(crate) fn reason(&self) -> String {
        let reason = self.reason.lock().map(|reason| reason.clone()).unwrap_or_default();
        if reason.is_empty() { "asked by another rank".to_owned() } else { reason }
    }
}
