//! The end of the job.
//!
//! A failure that another try would repeat ends the job. If ranks hold state that no checkpoint has, they form one last
//! generation first, as many as there are, and save it. A node that joined and only now shows that it cannot take part
//! ends nothing: the job sends it away.

use std::time::Duration;

use super::{
    Action, DrainStatus, Engine, JobEventKind, Record,
    lifecycle::Phase,
    membership::{Member, World},
};
use crate::{
    exit::{Class, Failure, NOT_SAVED, Outcome, crash},
    ids::{NodeId, Rank},
    message::{Commit, Directive},
    time::Time,
};
use baton_recipe::{
    Step,
    progress::{Progress, TrainingPlan},
};

/// Pause between two looks for the last checkpoint.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_secs(10);

impl Engine {
    /// Handles a rank whose process ended for a reason that another try would repeat.
    pub(super) fn failed_for_good(&mut self, now: Time, rank: Rank, failure: Failure) {
        if let Some(node) = self.dispensable_node(rank, &failure) {
            return self.dismiss(now, &node, failure);
        }
        self.record_state(rank, false);
        match self.fails_with.is_some() || self.begin_last_save(now, &failure) {
            true => self.lost(now, &[rank], Member::Gone, crash(failure.message)),
            false => {
                let outcome = match self.results.reached {
                    Step(0) => Outcome::Failed { failure },
                    _ => failed(failure, &self.saved_state()),
                };
                self.end(now, outcome);
            }
        }
    }

    /// The node of this rank, if it has brought no state and the others, which have some, are enough.
    fn dispensable_node(&self, rank: Rank, failure: &Failure) -> Option<NodeId> {
        let world = self.lifecycle.world()?;
        let node = &world.placement_of(rank)?.node;
        let others_hold_state = self.nodes.values().any(|state| !state.holders.is_empty());
        let is_dispensable = failure.class == Class::BadInput
            && self.nodes.get(node).is_some_and(|state| state.holders.is_empty())
            && others_hold_state
            && self.nodes.is_enough_without(node, &self.policy);
        is_dispensable.then(|| node.clone())
    }

    /// Sends a node away whose ranks would fail again; the others go on.
    fn dismiss(&mut self, now: Time, node: &NodeId, failure: Failure) {
        let message = failure.message.clone();
        self.send_away(node, failure);
        self.lost_node(now, node, crash(message));
    }

    /// Begins to save what ranks hold, before the job ends with `failure`; false if there is nothing to save. Ranks may
    /// have made steps that they have not reported yet.
    pub(super) fn begin_last_save(&mut self, now: Time, failure: &Failure) -> bool {
        let is_valid =
            leaves_state(failure) && !self.divergences.is_rollback_due(self.lifecycle.generation);
        if self.fails_with.is_some() || !is_valid {
            return false;
        }
        self.nodes.end_quarantines_of_holders();
        if self.nodes.holders(|_| true) == 0 {
            return false;
        }
        self.end_pause(now);
        self.fails_with = Some(failure.clone());
        // Failures before that must not end the save.
        self.lifecycle.failures = 0;
        let text = format!("saving what ranks hold before the job ends: {failure}");
        self.publish(JobEventKind::Draining, text);
        let until = now.after(self.policy.drain);
        let reason = failure.message.clone();
        self.drain.get_or_insert_with(|| DrainStatus::new(reason, now, until));
        true
    }

    /// When the last checkpoint of the job is looked for, if no rank is known that may run: ranks may complete the job while
    /// no agent can report it, and then their agents leave.
    pub(super) fn looks_at(&self) -> Option<Time> {
        let at = self.lifecycle.looks_at.filter(|_| self.lifecycle.may_have_ranks)?;
        let is_rollback_due = self.divergences.is_rollback_due(self.lifecycle.generation);
        (!is_rollback_due && self.nodes.holders(|_| true) == 0).then_some(at)
    }

    pub(super) fn look_for_the_last_checkpoint(&mut self, now: Time) {
        if self.looks_at().is_some_and(|at| at <= now) {
            self.lifecycle.looks_at = None;
            self.actions.push(Action::FindCheckpoint(Box::new(self.restore())));
        }
    }

    /// Ends the job if its last checkpoint says that training is complete. Otherwise, or if ranks have been placed meanwhile,
    /// the next generation goes on from it.
    pub(super) fn checkpoint_found(&mut self, now: Time, found: Option<Box<(Commit, Progress)>>) {
        self.lifecycle.looks_at = Some(now.after(LOOK_INTERVAL));
        let Some((commit, progress)) = found.map(|found| *found) else { return };
        let is_waiting = matches!(self.lifecycle.phase, Phase::Gathering)
            && self.lifecycle.opening.is_none()
            && commit.generation <= self.lifecycle.generation;
        if !is_waiting || !TrainingPlan::is_complete(&self.spec, &progress) {
            return;
        }
        self.results.reached = commit.step;
        let text = format!(
            "training was completed while no agent could reach the coordinator: checkpoint {} has its end",
            commit.name
        );
        self.record_commit(now, commit, text);
        self.record_past_evaluations(&progress);
        self.end(now, Outcome::Completed);
    }

    /// Forgets a drain that was requested from a coordinator that is lost: no rank has a state to save, and somebody has
    /// started the job again. A job without a budget that is left ends nevertheless.
    pub(super) fn forget_replayed_drain(&mut self, now: Time) {
        if self.accounting.used_up(now).is_some() {
            return;
        }
        if let Some(drain) = self.drain.take_if(|drain| drain.is_replayed) {
            let reason = drain.reason;
            let text = format!("nothing is left to save and stop, so training continues: {reason}");
            self.publish(JobEventKind::Draining, text);
        }
    }

    /// Ends a drain that takes too long.
    pub(super) fn expire_drain(&mut self, now: Time) {
        let is_over = self.drain.as_ref().is_some_and(|drain| drain.until <= now);
        if is_over && self.nodes.holders(|_| true) == 0 {
            self.forget_replayed_drain(now);
        }
        let Some(drain) = self.drain.take_if(|drain| drain.until <= now) else { return };
        let saved = format!("ranks did not stop in time, and {}", self.saved_state());
        let outcome = match self.fails_with.take() {
            Some(failure) => failed(failure, &saved),
            None => Outcome::Drained { reason: format!("{}; {saved}", drain.reason) },
        };
        self.end(now, outcome);
    }

    /// Whether the state that training has reached is in the store, as text.
    fn saved_state(&self) -> String {
        let reached = self.results.reached;
        let local = self.results.local.as_ref().filter(|local| local.step >= reached);
        match (self.results.commit.as_ref().map(|commit| commit.step), local) {
            (Some(step), _) if step >= reached => {
                format!("the state after step {step} is saved")
            }
            (_, Some(local)) => format!(
                "the state after step {reached} is not in the store, only in the local checkpoint of {}: start the job \
                 with this machine again to continue from it",
                local.names()
            ),
            (Some(step), None) => format!(
                "the state after step {reached} {NOT_SAVED}: the job continues from the checkpoint of step {step}, \
                 so the steps since then, {}, are lost",
                reached.0 - step.0
            ),
            (None, None) => format!(
                "the state after step {reached} {NOT_SAVED}, and this job has saved none before"
            ),
        }
    }

    pub(super) fn end_when_all_done(&mut self, now: Time) {
        let Some(outcome) = self.lifecycle.world().and_then(World::outcome) else { return };
        self.end(now, outcome);
    }

    pub(super) fn end(&mut self, now: Time, outcome: Outcome) {
        if self.outcome().is_some() {
            return;
        }
        let outcome = match (self.fails_with.take(), &outcome) {
            (Some(first), Outcome::Drained { .. }) => failed(first, &self.saved_state()),
            (Some(first), Outcome::Failed { failure }) if leaves_state(failure) => {
                failed(first, &format!("saving failed: {failure}; {}", self.saved_state()))
            }
            _ => self.accounting.limited(now, outcome),
        };
        if !matches!(outcome, Outcome::Drained { .. } | Outcome::LimitReached { .. }) {
            self.end_pause(now);
        }
        self.drain = None;
        self.lifecycle.opening = None;
        self.actions.extend(self.recoveries.abandon(self.accounting.spent(now)));
        self.actions.extend(self.accounting.persist(now));
        self.actions.push(Action::Persist(Record::Ended(outcome.clone())));
        self.publish(JobEventKind::Ended, format!("job {outcome}"));
        let reason = outcome.to_string();
        self.lifecycle.set_phase(now, Phase::Ended { outcome: outcome.clone() }, reason);
        let nodes: Vec<NodeId> = self.nodes.keys().cloned().collect();
        for node in nodes {
            self.send(&node, Directive::Dismiss { outcome: outcome.clone() });
        }
    }

    /// Ends the job because another coordinator has claimed its checkpoint store: nothing can be saved any more.
    pub(super) fn taken_over(&mut self, now: Time, message: String) {
        self.end(now, Outcome::Failed { failure: Failure { class: Class::TakenOver, message } });
    }
}

/// Whether the state of the other ranks is still good, and can be saved, after this failure of a rank.
fn leaves_state(failure: &Failure) -> bool {
    !matches!(failure.class, Class::Diverged | Class::TakenOver)
}

/// A failure after which ranks tried to save what they held.
fn failed(failure: Failure, saved: &str) -> Outcome {
    let message = format!("{failure}; {saved}");
    Outcome::Failed { failure: Failure { message, ..failure } }
}
