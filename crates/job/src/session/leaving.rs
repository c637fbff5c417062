//! Leaving the job: the node must leave, or the job is over.

use std::time::Duration;

use super::{
    Action, ConnectionState, Departure, Session,
    slot::{Process, Slot},
};
use crate::{
    exit::Outcome,
    message::{AgentReport, RankCommand, RankPhase},
    time::Time,
};

/// Signals within this time of the first one are no second wish: a terminal sends one to a program and to its parent, and
/// at the end of a login session systemd sends SIGTERM and SIGHUP at once.
pub const DUPLICATE_SIGNAL_WINDOW: Duration = Duration::from_millis(500);

impl Session {
    /// A shutdown signal; the second one kills the ranks, unless it belongs to the first.
    pub(super) fn shutdown_signal(&mut self, now: Time, reason: String) {
        match self.departure.as_ref().and_then(|departure| departure.signalled) {
            Some(first) if now.since(first) < DUPLICATE_SIGNAL_WINDOW => return,
            Some(_) => return self.leave_at_once(reason),
            None => {}
        }
        self.depart(now, reason, None);
        if let Some(departure) = &mut self.departure {
            departure.signalled = Some(now);
        }
    }

    /// The node must leave, at `end` if that is known. The coordinator decides whether the job continues without this
    /// node. Without a connection to it, the ranks are asked to save and stop.
    pub(super) fn depart(&mut self, now: Time, reason: String, end: Option<Time>) {
        let before = self.departure.as_ref().filter(|departure| !departure.job_is_over);
        let signalled = before.and_then(|departure| departure.signalled);
        let latest = now.after(self.policy.drain_timeout);
        let mut deadline = before.map_or(latest, |departure| departure.deadline);
        if let Some(end) = end {
            // Ranks that do not stop must be killed before the end.
            deadline =
                deadline.min(Time(0).after(end.since(Time(0).after(self.policy.kill_after))));
        }
        let is_earlier = before.is_none_or(|departure| deadline < departure.deadline);
        if !is_earlier {
            return;
        }
        let since = before.map_or(now, |departure| departure.since);
        let has_broken_off = before.is_some_and(|departure| departure.has_broken_off);
        self.departure = Some(Departure {
            reason: reason.clone(),
            end,
            deadline,
            since,
            has_broken_off,
            job_is_over: false,
            signalled,
        });
        if self.connection == ConnectionState::Up {
            return self.report_departure(now);
        }
        self.drain_ranks(reason.clone());
        if !self.slots.iter().any(Slot::is_assigned) {
            self.leave(now, Outcome::Drained { reason });
        }
    }

    /// The ranks save and stop, because the job has ended. If it was started again, its coordinator takes them back.
    pub(super) fn job_over(&mut self, now: Time, reason: String) {
        if self.departure.is_some() {
            return;
        }
        self.depart(now, reason, None);
        if let Some(departure) = &mut self.departure {
            departure.job_is_over = true;
        }
    }

    /// Leaves at once if no rank has anything to save: without a coordinator, ranks that are ready do not begin, and a node
    /// without ranks gets none.
    pub(super) fn leave_without_state(&mut self, now: Time) {
        let Some(Departure { reason, .. }) = &self.departure else { return };
        let is_ready =
            |slot: &Slot| matches!(slot.phase(), Some(RankPhase::Ready { step: None, .. }));
        let mut assigned = self.slots.iter().filter(|slot| slot.is_assigned()).peekable();
        let is_alone = self.leaving.is_none() && self.connection != ConnectionState::Up;
        let has_none = self.slots.iter().all(|slot| slot.assignment.is_none());
        if is_alone && (has_none || assigned.peek().is_some() && assigned.all(is_ready)) {
            let reason = reason.clone();
            self.leave(now, Outcome::Drained { reason });
        }
    }

    pub(super) fn report_departure(&mut self, now: Time) {
        let Some(Departure { reason, end, .. }) = self.departure.clone() else { return };
        let seconds_left = end.map(|end| end.since(now).as_secs_f64());
        self.report(AgentReport::NodeDeparting { reason, seconds_left });
    }

    pub(super) fn drain_ranks(&mut self, reason: String) {
        let generation = self.generation;
        self.send_to_all(&RankCommand::Drain { generation, reason });
    }

    /// Requests a checkpoint, because the machine may soon be taken away. The vote of one rank is enough.
    pub(super) fn checkpoint_advised(&mut self, reason: String) {
        let generation = self.generation;
        let assigned = self.local_ranks().zip(&self.slots).find(|(_, slot)| slot.is_assigned());
        if let Some((local_rank, _)) = assigned {
            let command = RankCommand::Checkpoint { generation };
            self.actions.push(Action::SendToRank { local_rank, command });
        }
        self.report(AgentReport::CheckpointAdvised { reason });
    }

    /// Kills all ranks and leaves.
    pub(super) fn leave_at_once(&mut self, reason: String) {
        self.leaving.get_or_insert(Outcome::Drained { reason });
        self.final_report_deadline = None;
        for local_rank in self.local_ranks() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            slot.assignment = None;
            if slot.is_alive() || slot.kill_at().is_some() {
                slot.process = Process::Stopping { kill_at: None };
                self.actions.push(Action::Kill(local_rank));
            }
        }
    }

    /// Asks all ranks to exit; those that do not are killed later.
    pub(super) fn leave(&mut self, now: Time, outcome: Outcome) {
        self.leaving = Some(outcome);
        self.final_report_deadline = None;
        let kill_at = now.after(self.policy.kill_after);
        for local_rank in self.local_ranks() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            slot.assignment = None;
            if let Process::Alive { phase } = &slot.process {
                let exits_by_itself = matches!(phase, RankPhase::Done { .. });
                slot.process = Process::Stopping { kill_at: Some(kill_at) };
                if !exits_by_itself {
                    self.actions.push(Action::Terminate(local_rank));
                }
            }
        }
    }

    /// Exits once no rank process is left.
    pub(super) fn exit_when_empty(&mut self, now: Time) {
        let empty = self.slots.iter().all(|slot| matches!(slot.process, Process::Empty { .. }));
        if let Some(outcome) = self.leaving.clone().filter(|_| empty) {
            self.exited = true;
            self.actions.push(Action::Exit(outcome));
        } else if !(self.connection == ConnectionState::Up && self.answered)
            && self.final_report_deadline.is_none()
            && self.common_outcome().is_some()
        {
            self.final_report_deadline = Some(now.after(self.policy.final_report_timeout));
        }
    }

    /// The outcome, if there is at least one assigned rank and all are done.
    pub(super) fn common_outcome(&self) -> Option<Outcome> {
        let mut outcome = None;
        for slot in self.slots.iter().filter(|slot| slot.assignment.is_some()) {
            match slot.phase() {
                Some(RankPhase::Done { outcome: done, .. }) => outcome = Some(done.clone()),
                _ => return None,
            }
        }
        outcome
    }
}
