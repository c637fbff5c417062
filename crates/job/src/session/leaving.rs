//! The node must go, or its part is over.

use super::{
    Action, Going, Link, Session,
    slot::{Process, Slot},
};
use crate::{
    exit::Outcome,
    message::{RankCommand, RankPhase, Report},
    time::Time,
};

impl Session {
    pub(super) fn must_go(&mut self, now: Time, reason: String) {
        if self.going.as_ref().is_some_and(|going| going.by_signal) {
            return self.leave_at_once(reason);
        }
        self.go(now, reason, None);
        if let Some(going) = &mut self.going {
            going.by_signal = true;
        }
    }

    /// The coordinator decides whether the others go on without this node. Without one the ranks are told to
    /// save and stop.
    pub(super) fn go(&mut self, now: Time, reason: String, end: Option<Time>) {
        let by_signal = self.going.as_ref().is_some_and(|going| going.by_signal);
        let patience = now.after(self.policy.drain);
        let mut until = self.going.as_ref().map_or(patience, |going| going.until);
        if let Some(end) = end {
            // Killing needs its time too.
            until = until.min(Time(0).after(end.since(Time(0).after(self.policy.kill_after))));
        }
        let is_news = self.going.as_ref().is_none_or(|going| until < going.until);
        if !is_news {
            return;
        }
        self.going = Some(Going { reason: reason.clone(), end, until, by_signal });
        if self.link == Link::Up {
            return self.report_going(now);
        }
        self.drain_ranks(reason.clone());
        if !self.slots.iter().any(Slot::is_seated) {
            self.leave(now, Outcome::Drained { reason });
        }
    }

    pub(super) fn report_going(&mut self, now: Time) {
        let Some(Going { reason, end, .. }) = self.going.clone() else { return };
        let seconds_left = end.map(|end| end.since(now).as_secs_f64());
        self.report(Report::DrainRequested { reason, seconds_left });
    }

    pub(super) fn drain_ranks(&mut self, reason: String) {
        let generation = self.generation;
        self.tell_all(&RankCommand::Drain { generation, reason });
    }

    /// One vote is enough for a checkpoint.
    pub(super) fn advised(&mut self, reason: String) {
        let generation = self.generation;
        let seated = self.locals().zip(&self.slots).find(|(_, slot)| slot.is_seated());
        if let Some((local_rank, _)) = seated {
            let command = RankCommand::Checkpoint { generation };
            self.actions.push(Action::Tell { local_rank, command });
        }
        self.report(Report::Advised { reason });
    }

    pub(super) fn leave_at_once(&mut self, reason: String) {
        self.leaving.get_or_insert(Outcome::Drained { reason });
        self.farewell_until = None;
        for local_rank in self.locals() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            slot.seat = None;
            if slot.is_alive() || slot.kill_at().is_some() {
                slot.process = Process::Stopping { kill_at: None };
                self.actions.push(Action::Kill(local_rank));
            }
        }
    }

    pub(super) fn leave(&mut self, now: Time, outcome: Outcome) {
        self.leaving = Some(outcome);
        self.farewell_until = None;
        let kill_at = now.after(self.policy.kill_after);
        for local_rank in self.locals() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            slot.seat = None;
            if let Process::Alive { phase } = &slot.process {
                let leaves_by_itself = matches!(phase, RankPhase::Done { .. });
                slot.process = Process::Stopping { kill_at: Some(kill_at) };
                if !leaves_by_itself {
                    self.actions.push(Action::Terminate(local_rank));
                }
            }
        }
    }

    pub(super) fn leave_when_empty(&mut self, now: Time) {
        let empty = self.slots.iter().all(|slot| matches!(slot.process, Process::Empty { .. }));
        if let Some(outcome) = self.leaving.clone().filter(|_| empty) {
            self.exited = true;
            self.actions.push(Action::Exit(outcome));
        } else if self.link != Link::Up
            && self.farewell_until.is_none()
            && self.all_done().is_some()
        {
            self.farewell_until = Some(now.after(self.policy.farewell));
        }
    }

    /// The common outcome, if every seated rank is done and there is at least one.
    pub(super) fn all_done(&self) -> Option<Outcome> {
        let mut outcome = None;
        for slot in self.slots.iter().filter(|slot| slot.seat.is_some()) {
            match slot.phase() {
                Some(RankPhase::Done { outcome: done, .. }) => outcome = Some(done.clone()),
                _ => return None,
            }
        }
        outcome
    }
}
