//! Requests for a drain, a pause or a checkpoint, from users; a drain may also come from a machine or a budget.

use std::time::Duration;

use super::{
    Action, DrainStatus, Engine, JobEventKind, Record, drain::DrainStage, lifecycle::Phase,
};
use crate::{
    exit::Outcome,
    message::{Directive, PauseState},
    time::Time,
};
use baton_recipe::Step;

impl Engine {
    // ---- checkpoint ----

    /// Checks whether a checkpoint can be requested now.
    ///
    /// # Errors
    /// Why not, as text.
    pub fn can_checkpoint(&self) -> Result<(), String> {
        match self.lifecycle.training_world() {
            Some(_) => Ok(()),
            None => Err(format!("no training is running: {}", self.lifecycle.reason)),
        }
    }

    pub(super) fn checkpoint(&mut self) {
        if self.can_checkpoint().is_ok() {
            let generation = self.lifecycle.generation;
            self.send_to_world(&Directive::Checkpoint { generation });
        }
    }

    // ---- pause ----

    /// Checks whether training can be paused.
    ///
    /// # Errors
    /// Why not, as text.
    pub fn can_pause(&self) -> Result<(), String> {
        match (self.outcome(), &self.drain, &self.pauses.current) {
            (Some(outcome), ..) => Err(format!("the job is over: {outcome}")),
            (_, Some(drain), _) => {
                Err(format!("the job is being saved and stopped: {}", drain.reason))
            }
            (_, _, Some(pause)) => Err(format!("training is already paused: {}", pause.reason)),
            (None, None, None) => Ok(()),
        }
    }

    /// Checks whether training is paused and can be resumed.
    ///
    /// # Errors
    /// Why not, as text.
    pub fn can_resume(&self) -> Result<(), String> {
        match &self.pauses.current {
            Some(_) => Ok(()),
            None => Err(format!("training is not paused: {}", self.status_reason())),
        }
    }

    pub(super) fn pause(&mut self, now: Time, reason: String) {
        if self.can_pause().is_ok() {
            self.pauses.is_requested_here = true;
            self.begin_pause(now, reason);
        }
    }

    pub(super) fn resume(&mut self, now: Time) {
        if self.can_resume().is_ok() {
            self.pauses.is_requested_here = true;
            self.go_on(now);
        }
    }

    fn begin_pause(&mut self, now: Time, reason: String) {
        self.finish_recovery(now);
        let text = format!("training pauses after the current step: {reason}");
        let at = self.accounting.spent(now);
        self.pauses.begin(now, &reason, at);
        self.actions.push(Action::Persist(Record::Paused { reason, at }));
        self.publish(JobEventKind::Paused, text);
        self.send_to_world(&Directive::Pause(self.pauses.state()));
    }

    fn go_on(&mut self, now: Time) {
        self.end_pause(now);
        self.publish(JobEventKind::Resumed, "training resumes".to_owned());
        self.send_to_world(&Directive::Pause(self.pauses.state()));
    }

    /// Adopts a pause state that is newer than the journal: it may lack the newest records if it is the copy of a lost
    /// coordinator.
    pub(super) fn adopt_pause(&mut self, now: Time, known: PauseState) {
        if known.number <= self.pauses.changes || self.outcome().is_some() {
            return;
        }
        let is_paused = self.pauses.current.is_some();
        if self.pauses.is_requested_here && is_paused != known.paused {
            // Newer than what the ranks know.
            self.pauses.changes = known.number + 1;
            return;
        }
        match (known.paused, is_paused) {
            // A drain by a user ends a pause. The state must be newer than what the ranks know.
            (true, false) if self.drain.as_ref().is_some_and(|drain| drain.by_user) => {
                self.pauses.changes = known.number + 1;
            }
            (true, false) => {
                self.begin_pause(now, "requested before the coordinator was lost".to_owned());
            }
            (false, true) => self.go_on(now),
            _ => {}
        }
        self.pauses.changes = self.pauses.changes.max(known.number);
    }

    /// Ends the pause, if there is one, because the job must resume or end.
    pub(super) fn end_pause(&mut self, now: Time) {
        let at = self.accounting.spent(now);
        if self.pauses.end(at) {
            self.actions.push(Action::Persist(Record::Resumed { at }));
        }
    }

    // ---- drain ----

    /// A user wants to save and stop. That ends a pause, unlike a notice or a budget: then the next start stays paused.
    pub(super) fn drain_as_requested(&mut self, now: Time, reason: String) {
        if self.outcome().is_none() && self.drain.is_none() {
            // The ranks save and stop at the step at which they are paused.
            self.end_pause(now);
        }
        let is_known = self.drain.as_ref().is_some_and(|drain| drain.by_user);
        if self.outcome().is_none() && !is_known {
            self.actions.push(Action::Persist(Record::Draining { reason: reason.clone() }));
        }
        self.drain(now, reason, None);
        if let Some(drain) = &mut self.drain {
            drain.by_user = true;
        }
    }

    /// Begins to save and stop, by `end` at the latest. During a drain, an earlier `end` replaces the deadline.
    pub(super) fn drain(&mut self, now: Time, reason: String, end: Option<Time>) {
        if self.outcome().is_some() {
            return;
        }
        let until = now.after(self.policy.drain);
        let until = end.map_or(until, |end| until.min(end));
        let left = until.since(now).as_secs();
        let too_late = self.too_late_to_save(until.since(now));
        let too_late = too_late.map(|text| format!("; {text}")).unwrap_or_default();
        if let Some(drain) = &mut self.drain {
            if until < drain.until {
                drain.until = until;
                let text = format!("{reason}; {left} s are left to save and stop{too_late}");
                self.publish(JobEventKind::Draining, text);
            }
            return;
        }
        let text = format!("saving and stopping, {left} s are left: {reason}{too_late}");
        self.publish(JobEventKind::Draining, text);
        self.drain = Some(DrainStatus::new(reason.clone(), now, until));
        match &self.lifecycle.phase {
            Phase::Training { .. } => self.send_drain_if_requested(now),
            Phase::Gathering => self.save_or_end(now, reason),
            Phase::Backoff { .. } => self.open(now),
            // The directive is sent once training begins; if no rank holds state, the job ends before that.
            Phase::Forming { .. }
            | Phase::Meeting { .. }
            | Phase::Detecting { .. }
            | Phase::Reattaching { .. }
            | Phase::Ended { .. } => {}
        }
    }

    /// Opens a generation of the ranks that hold state, even of one, or ends the job if none does.
    fn save_or_end(&mut self, now: Time, reason: String) {
        self.nodes.end_quarantines_of_holders();
        if self.nodes.holders(|_| true) > 0 {
            self.open(now);
        }
        let is_opening = self.lifecycle.opening.is_some();
        if !is_opening && matches!(self.lifecycle.phase, Phase::Gathering) {
            let reason = match self.unsaved_state() {
                Some(unsaved) => format!("{reason}; {unsaved}"),
                None => reason,
            };
            self.end(now, Outcome::Drained { reason });
        }
    }

    /// Text about what ranks may have and what is in no checkpoint, while none can be reached.
    fn unsaved_state(&self) -> Option<String> {
        let reached = self.results.reached;
        let restore = self.restore();
        let saved = self.results.valid_commit(&restore).map(|commit| commit.step);
        let missing = if saved < Some(reached) && reached > Step(0) {
            format!("no agent that is connected has the state after step {reached}")
        } else if self.lifecycle.may_have_ranks && !self.nodes.any_attached() {
            // After a restart of the coordinator, ranks may be further than it knows.
            "no agent is connected".to_owned()
        } else {
            return None;
        };
        let otherwise = match saved {
            Some(saved) => format!("the job continues from the checkpoint of step {saved}"),
            None if restore.last_saved.is_none() && restore.path.is_none() => {
                "the job begins anew, as it has saved no checkpoint".to_owned()
            }
            None => "the job continues from its newest checkpoint".to_owned(),
        };
        Some(format!(
            "{missing}: agents that still run and read the checkpoint store (cluster.standby, --store) save what they \
             have within seconds; otherwise {otherwise}"
        ))
    }

    pub(super) fn send_drain_if_requested(&mut self, now: Time) {
        let Some(DrainStatus { reason, until, .. }) = self.drain.clone() else { return };
        let left = until.since(now).as_secs();
        let too_late = self.too_late_to_save(until.since(now));
        let too_late = too_late.map(|text| format!("; {text}")).unwrap_or_default();
        self.lifecycle.reason = format!("draining: {reason}; {left} s to save and stop{too_late}");
        let generation = self.lifecycle.generation;
        self.send_to_world(&Directive::Drain { generation, reason });
    }

    /// A warning if the last save took longer than the time that is `left`.
    fn too_late_to_save(&self, left: Duration) -> Option<String> {
        let seconds = self.results.save_seconds()?;
        let left = left.as_secs_f64();
        let local = self.results.local.as_ref().map(|local| local.seconds);
        (seconds > left).then(|| match local.filter(|seconds| *seconds <= left) {
            Some(local) => format!(
                "the store may be too slow, the last checkpoint took {seconds:.1} s; then the job continues from the local \
                 checkpoint, which takes {local:.1} s, if its machine comes back"
            ),
            None => format!(
                "this may be too late: the last checkpoint took {seconds:.1} s; if it is not done in time, the job \
                 continues from the one before"
            ),
        })
    }

    /// Records the progress of saving and stopping.
    pub(super) fn drain_advanced(&mut self, now: Time, step: Step, stage: DrainStage) {
        let drain = self.drain.as_mut();
        if let Some(text) = drain.and_then(|drain| drain.advance(now, step, stage)) {
            self.publish_at(JobEventKind::Draining, Some(step), text);
        }
        // The machines may have been faster than rank 0.
        let local = self.results.local.as_ref().map(|local| local.step);
        if stage == DrainStage::Agreed && local == Some(step) {
            self.drain_advanced(now, step, DrainStage::SavedLocally);
        }
        // Nothing remains to be written if the checkpoint of this step is committed already.
        if stage == DrainStage::Copied && self.holds_checkpoint_of(step) {
            self.drain_advanced(now, step, DrainStage::Durable);
        }
    }

    fn holds_checkpoint_of(&self, step: Step) -> bool {
        let commit = self.results.commit.as_ref().filter(|commit| commit.step == step);
        commit.is_some_and(|commit| {
            let mut rollbacks = self.divergences.rollbacks();
            !rollbacks.any(|rollback| rollback.invalidates(commit.generation, step))
        })
    }

    /// Drains the job once its budget is used up.
    pub(super) fn check_budget(&mut self, now: Time) {
        if self.drain.is_some() || self.outcome().is_some() {
            return;
        }
        if let Some(text) = self.accounting.alert(now) {
            self.publish(JobEventKind::Budget, text);
        }
        if let Some(reason) = self.accounting.used_up(now) {
            self.actions.extend(self.accounting.persist(now));
            self.drain(now, reason, None);
        }
    }
}
