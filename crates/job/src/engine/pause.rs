//! Standing still because a user asked for that: the ranks keep their state in memory and go on when told.

use std::time::Duration;

use super::{Action, Engine, NoticeKind, Phase, Record, Share};
use crate::{
    ids::NodeId,
    message::{Directive, Hold},
    time::Time,
};

/// A wish to stand still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Why, in words.
    pub reason: String,
    /// When it was asked for.
    pub since: Time,
    /// What the meter showed then.
    pub(super) from: Duration,
}

impl Engine {
    /// Whether training can be paused, else why not.
    ///
    /// # Errors
    /// The reason, in words.
    pub fn can_pause(&self) -> Result<(), String> {
        match (&self.phase, &self.drain, &self.pause) {
            (Phase::Ended { outcome }, ..) => Err(format!("the job is over: {outcome}")),
            (_, Some(drain), _) => {
                Err(format!("the job is being saved and stopped: {}", drain.reason))
            }
            (_, _, Some(pause)) => Err(format!("training is paused already: {}", pause.reason)),
            (_, None, None) => Ok(()),
        }
    }

    /// Whether training is paused, so that it can go on; else why not.
    ///
    /// # Errors
    /// The reason, in words.
    pub fn can_resume(&self) -> Result<(), String> {
        match &self.pause {
            Some(_) => Ok(()),
            None => Err(format!("training is not paused: {}", self.status_reason())),
        }
    }

    pub(super) fn pause(&mut self, now: Time, reason: String) {
        if self.can_pause().is_err() {
            return;
        }
        let text = format!("training stands still after the current step: {reason}");
        let from = self.meter.read(now);
        self.actions.push(Action::Persist(Record::Paused { reason: reason.clone(), at: from }));
        self.announce(NoticeKind::Paused, text);
        self.replay_pause(now, &reason, from);
        self.tell_world_to_hold();
    }

    pub(super) fn resume(&mut self, now: Time) {
        if self.end_pause(now) {
            self.announce(NoticeKind::Resumed, "training goes on".to_owned());
            self.tell_world_to_hold();
        }
    }

    /// Forgets the wish, if there is one: somebody wants the job to go on, or to end.
    pub(super) fn end_pause(&mut self, now: Time) -> bool {
        let at = self.meter.read(now);
        let was_paused = self.replay_resume(at);
        if was_paused {
            self.actions.push(Action::Persist(Record::Resumed { at }));
        }
        was_paused
    }

    pub(super) fn replay_pause(&mut self, now: Time, reason: &str, at: Duration) {
        self.pause_changes += 1;
        self.pause = Some(Pause { reason: reason.to_owned(), since: now, from: at });
    }

    pub(super) fn replay_resume(&mut self, at: Duration) -> bool {
        let Some(pause) = self.pause.take() else { return false };
        self.pause_changes += 1;
        self.paused_before += at.saturating_sub(pause.from);
        true
    }

    /// Attached time that training stood still because a user asked for that.
    pub(super) fn paused_time(&self) -> Share {
        Share { before: self.paused_before, since: self.pause.as_ref().map(|pause| pause.from) }
    }

    fn tell_world_to_hold(&mut self) {
        self.send_to_world(&Directive::Hold(self.hold()));
    }

    /// To a node that may have missed it.
    pub(super) fn remind_to_hold(&mut self, node: &NodeId) {
        if self.pause_changes > 0 {
            self.send(node, Directive::Hold(self.hold()));
        }
    }

    pub(super) fn hold(&self) -> Hold {
        Hold { number: self.pause_changes, paused: self.pause.is_some() }
    }
}
