//! Requests of other threads to the step loop, which votes on them at its next step, and the activity it shows them.

use std::{
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use baton_job::message::ProfileRequest;

use crate::activity::SharedActivity;

/// Requests from outside, set by the thread that reads the agent's commands.
#[derive(Debug, Default)]
pub struct Controls {
    save: AtomicBool,
    stop: AtomicBool,
    reason: Mutex<String>,
    pause: Mutex<bool>,
    profile: Mutex<Option<ProfileRequest>>,
    coordinator_lost: AtomicBool,
    saves_alone: AtomicBool,
    agreed_to_stop: AtomicBool,
    /// Notified when a request changes; a paused step loop waits on it.
    changed: Condvar,
    activity: SharedActivity,
}

/// Requests after a step, of one rank or of all ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Votes {
    pub(crate) save: bool,
    pub(crate) stop: bool,
    /// At least one rank is still writing its shard of a checkpoint.
    pub(crate) writing: bool,
    /// Make no further step until the job is resumed.
    pub(crate) pause: bool,
    /// A rank gave up waiting for its data, because another vote asks for a stop or a pause: its part of the step is
    /// missing, so the step must not be made.
    pub(crate) abandon: bool,
}

/// Slot of the votes on writing in the tail; not a number if a rank abandons the step.
const WRITING: usize = 2;

impl Votes {
    /// The votes as numbers for the tail of the gradient; the all-reduce adds them up.
    pub(crate) fn to_tail(self) -> [f32; 4] {
        let votes = [self.save, self.stop, self.writing, self.pause];
        let mut tail = votes.map(|vote| f32::from(u8::from(vote)));
        // A sum with a NaN is NaN, whatever the others add.
        if self.abandon {
            tail[WRITING] = f32::NAN;
        }
        tail
    }

    /// The votes of all ranks together, from the sums in the tail.
    pub(crate) fn from_tail(tail: &[f32]) -> Self {
        let vote = |slot: usize| tail.get(slot).is_some_and(|votes| *votes > 0.0);
        let abandon = tail.get(WRITING).is_some_and(|votes| votes.is_nan());
        // In an abandoned step nobody knows whether a rank is writing; the next vote tells.
        let writing = abandon || vote(WRITING);
        Self { save: vote(0), stop: vote(1), writing, pause: vote(3), abandon }
    }

    /// Whether the loop must do anything before the next step; `is_saving`: a checkpoint is being written.
    pub(crate) fn need_action(self, is_saving: bool) -> bool {
        self.save || self.stop || self.pause || (is_saving && !self.writing)
    }

    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            save: self.save || other.save,
            stop: self.stop || other.stop,
            writing: self.writing || other.writing,
            pause: self.pause || other.pause,
            abandon: self.abandon || other.abandon,
        }
    }
}

impl Controls {
    /// The current activity of the step loop.
    #[must_use]
    pub fn activity(&self) -> &SharedActivity {
        &self.activity
    }

    /// Requests a checkpoint after the next step.
    pub fn request_save(&self) {
        self.save.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Pauses training after the next step, or resumes it.
    pub fn set_paused(&self, paused: bool) {
        *self.pause.lock().unwrap_or_else(PoisonError::into_inner) = paused;
        self.changed.notify_all();
    }

    /// Requests a checkpoint after the next step, then the end of training.
    pub fn request_stop(&self, reason: String) {
        if let Ok(mut kept) = self.reason.lock() {
            *kept = reason;
        }
        self.stop.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Sets whether the agent has lost its coordinator.
    pub fn set_coordinator_lost(&self, lost: bool) {
        self.coordinator_lost.store(lost, Ordering::Release);
    }

    /// Whether the agent has lost its coordinator.
    #[must_use]
    pub fn has_lost_coordinator(&self) -> bool {
        self.coordinator_lost.load(Ordering::Acquire)
    }

    /// Sets that this rank saves without the others of its generation.
    pub fn set_saves_alone(&self) {
        self.saves_alone.store(true, Ordering::Release);
    }

    /// Whether this rank saves without the others of its generation.
    pub(crate) fn saves_alone(&self) -> bool {
        self.saves_alone.load(Ordering::Acquire)
    }

    /// All ranks have agreed to save and stop now.
    pub(crate) fn agree_to_stop(&self) {
        self.agreed_to_stop.store(true, Ordering::Release);
    }

    /// Whether all ranks have agreed to save and stop: what they wait for is the checkpoint.
    #[must_use]
    pub fn has_agreed_to_stop(&self) -> bool {
        self.agreed_to_stop.load(Ordering::Acquire)
    }

    /// Whether training is to be saved and stopped.
    #[must_use]
    pub fn stops(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Requests a profile of the next steps. No vote is needed: it changes nothing.
    pub fn request_profile(&self, request: ProfileRequest) {
        *self.profile.lock().unwrap_or_else(PoisonError::into_inner) = Some(request);
    }

    /// The profile that was requested; clears the request.
    pub(crate) fn take_profile(&self) -> Option<ProfileRequest> {
        self.profile.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether a vote now would ask for anything.
    pub(crate) fn has_request(&self) -> bool {
        self.save.load(Ordering::Acquire) || self.interrupts_waiting()
    }

    /// This rank's vote; `writing`: it is still writing its shard. A request to save is cleared by this call; a request
    /// to stop is kept.
    pub(crate) fn vote(&self, writing: bool) -> Votes {
        Votes {
            save: self.save.swap(false, Ordering::AcqRel),
            stop: self.stops(),
            writing,
            pause: *self.pause.lock().unwrap_or_else(PoisonError::into_inner),
            abandon: false,
        }
    }

    /// Whether a rank should not wait for its data any longer.
    pub(crate) fn interrupts_waiting(&self) -> bool {
        self.stops() || *self.pause.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// While training is paused: waits for `timeout`, or until a request changes. Otherwise returns at once.
    pub(crate) fn wait_while_paused(&self, timeout: Duration) {
        let paused = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        if *paused {
            drop(self.changed.wait_timeout(paused, timeout));
        }
    }

    /// Why training stops; the request may have come from another rank.
    pub(crate) fn reason(&self) -> String {
        let reason = self.reason.lock().map(|reason| reason.clone()).unwrap_or_default();
        if reason.is_empty() { "requested by another rank".to_owned() } else { reason }
    }
}
