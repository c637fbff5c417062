//! Users ask for a drain, a pause or a checkpoint; a drain may also come from a machine or a budget.

use super::{Action, DrainStatus, Engine, NoticeKind, Record, drain::DrainStage, lifecycle::Phase};
use crate::{exit::Outcome, message::Directive, time::Time};
use baton_recipe::Step;

impl Engine {
    // ---- checkpoint ----

    /// Whether a checkpoint can be asked for now, else why not.
    ///
    /// # Errors
    /// The reason, in words.
    pub fn can_checkpoint(&self) -> Result<(), String> {
        match self.lifecycle.training_world() {
            Some(_) => Ok(()),
            None => Err(format!("nothing trains: {}", self.lifecycle.reason)),
        }
    }

    pub(super) fn checkpoint(&mut self) {
        if self.can_checkpoint().is_ok() {
            let generation = self.lifecycle.generation;
            self.send_to_world(&Directive::Checkpoint { generation });
        }
    }

    // ---- pause ----

    /// Whether training can be paused, else why not.
    ///
    /// # Errors
    /// The reason, in words.
    pub fn can_pause(&self) -> Result<(), String> {
        match (self.outcome(), &self.drain, &self.pauses.present) {
            (Some(outcome), ..) => Err(format!("the job is over: {outcome}")),
            (_, Some(drain), _) => {
                Err(format!("the job is being saved and stopped: {}", drain.reason))
            }
            (_, _, Some(pause)) => Err(format!("training is paused already: {}", pause.reason)),
            (None, None, None) => Ok(()),
        }
    }

    /// Whether training is paused, so that it can go on; else why not.
    ///
    /// # Errors
    /// The reason, in words.
    pub fn can_resume(&self) -> Result<(), String> {
        match &self.pauses.present {
            Some(_) => Ok(()),
            None => Err(format!("training is not paused: {}", self.status_reason())),
        }
    }

    pub(super) fn pause(&mut self, now: Time, reason: String) {
        if self.can_pause().is_err() {
            return;
        }
        let text = format!("training stands still after the current step: {reason}");
        let at = self.accounting.spent(now);
        self.pauses.begin(now, &reason, at);
        self.actions.push(Action::Persist(Record::Paused { reason, at }));
        self.announce(NoticeKind::Paused, text);
        self.send_to_world(&Directive::Hold(self.pauses.hold()));
    }

    pub(super) fn resume(&mut self, now: Time) {
        if self.end_pause(now) {
            self.announce(NoticeKind::Resumed, "training goes on".to_owned());
            self.send_to_world(&Directive::Hold(self.pauses.hold()));
        }
    }

    /// Ends the pause, if there is one: somebody wants the job to go on, or to end.
    pub(super) fn end_pause(&mut self, now: Time) -> bool {
        let at = self.accounting.spent(now);
        let was_paused = self.pauses.end(at);
        if was_paused {
            self.actions.push(Action::Persist(Record::Resumed { at }));
        }
        was_paused
    }

    // ---- drain ----

    /// Begins to save and stop, at the latest until `end`; an end that comes sooner than was known counts.
    pub(super) fn drain(&mut self, now: Time, reason: String, end: Option<Time>) {
        if self.outcome().is_some() {
            return;
        }
        let until = now.after(self.policy.drain);
        let until = end.map_or(until, |end| until.min(end));
        let left = until.since(now).as_secs();
        if let Some(drain) = &mut self.drain {
            if until < drain.until {
                drain.until = until;
                let text = format!("{reason}; {left} s are left to save and stop");
                self.announce(NoticeKind::Draining, text);
            }
            return;
        }
        // Ranks save and stop from where they are paused.
        self.end_pause(now);
        let text = format!("saving and stopping, {left} s are left: {reason}");
        self.announce(NoticeKind::Draining, text);
        self.drain = Some(DrainStatus::new(reason.clone(), now, until));
        match &self.lifecycle.phase {
            Phase::Training { .. } => self.send_drain_if_wanted(now),
            // Too few ranks to save anything.
            Phase::Gathering => self.end(now, Outcome::Drained { reason }),
            Phase::Backoff { .. } => self.open(now),
            // Once it trains the ranks get to know; if no rank turns out to hold state, it ends before.
            Phase::Forming { .. }
            | Phase::Meeting { .. }
            | Phase::Settling { .. }
            | Phase::Reattaching { .. }
            | Phase::Ended { .. } => {}
        }
    }

    pub(super) fn send_drain_if_wanted(&mut self, now: Time) {
        let Some(DrainStatus { reason, until, .. }) = self.drain.clone() else { return };
        let left = until.since(now).as_secs();
        self.lifecycle.reason = format!("draining: {reason}; {left} s to save and stop");
        let generation = self.lifecycle.generation;
        self.send_to_world(&Directive::Drain { generation, reason });
    }

    /// Notes how far saving and stopping has come.
    pub(super) fn drain_advanced(&mut self, now: Time, step: Step, stage: DrainStage) {
        let drain = self.drain.as_mut();
        if let Some(text) = drain.and_then(|drain| drain.advance(now, step, stage)) {
            self.announce_at(NoticeKind::Draining, Some(step), text);
        }
    }

    /// Ends a drain that takes too long.
    pub(super) fn expire_drain(&mut self, now: Time) {
        let Some(drain) = self.drain.take_if(|drain| drain.until <= now) else { return };
        let reason =
            format!("{}; ranks did not stop in time, the last checkpoint counts", drain.reason);
        self.end(now, Outcome::Drained { reason });
    }

    /// Drains the job once its budget is used up.
    pub(super) fn check_budget(&mut self, now: Time) {
        if self.drain.is_some() || self.outcome().is_some() {
            return;
        }
        if let Some(text) = self.accounting.alert(now) {
            self.announce(NoticeKind::Budget, text);
        }
        if let Some(reason) = self.accounting.used_up(now) {
            self.actions.extend(self.accounting.persist(now));
            self.drain(now, reason, None);
        }
    }
}
