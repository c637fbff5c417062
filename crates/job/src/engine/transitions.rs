//! Transitions from one phase to the next: see the diagram in [`engine`](super).

use std::{collections::BTreeSet, time::Duration};

use super::{
    Engine, JobEventKind, Recovery,
    connecting::ranks_on_nodes,
    elastic::NodeChange,
    job_event::ranks_that,
    lifecycle::Phase,
    membership::{MemberKind, World},
    opening::NodeChangeCause,
};
use crate::{
    exit::{Failure, Outcome, crash},
    ids::{LocalRank, NodeId},
    mesh_secret::MeshSecret,
    message::Directive,
    plan::Placement,
    time::Time,
};

/// How long ranks that have connected may restore their state: a large model from a slow store takes many minutes. A hung
/// exchange ends by `cluster.collective_seconds`.
pub(super) const RESTORE_TIMEOUT: Duration = Duration::from_secs(900);

impl Engine {
    // ---- forming and meeting ----

    pub(super) fn begin_when_all_ready(&mut self, now: Time) {
        if self.lifecycle.opening.is_some() {
            return;
        }
        let Phase::Forming { world, .. } = &mut self.lifecycle.phase else { return };
        let Some(peers) = world.begin() else { return };
        let holds_state = world.holds_state();
        if !holds_state && self.nodes.end_quarantines_of_holders() {
            return self.open(now);
        }
        if !holds_state {
            self.forget_replayed_drain(now);
        }
        if let Some(drain) = self.drain.as_ref().filter(|_| !holds_state) {
            let reason = drain.reason.clone();
            return self.end(now, Outcome::Drained { reason });
        }
        let Some(world) = self.lifecycle.take_world() else { return };
        let generation = self.lifecycle.generation;
        if let Some(recovery) = self.recoveries.in_progress(generation) {
            recovery.torn_down_at = world.holders_ready_at().or(recovery.launched_at);
            recovery.ready_at = Some(now);
        }
        let until = now.after(self.policy.rendezvous);
        let reason = ranks_that(
            world.size(),
            "connects and restores its state",
            "connect and restore their state",
        );
        self.lifecycle.set_phase(now, Phase::Meeting { world, until }, reason);
        let secret = MeshSecret::default();
        self.send_to_world(&Directive::Begin { generation, peers, secret });
    }

    pub(super) fn train_when_all_started(&mut self, now: Time) {
        let Phase::Meeting { world, .. } = &self.lifecycle.phase else { return };
        if !world.all_have_started() || self.lifecycle.opening.is_some() {
            return;
        }
        let Some(world) = self.lifecycle.take_world() else { return };
        let reason = ranks_that(world.size(), "trains", "train");
        if let Some(recovery) = self.recoveries.in_progress(self.lifecycle.generation) {
            recovery.started_at = Some(now);
        }
        if self.pauses.current.is_some() {
            self.finish_recovery(now);
        }
        self.train(now, world, reason);
    }

    fn train(&mut self, now: Time, world: World, reason: String) {
        self.lifecycle.set_phase(now, Phase::Training { world }, reason);
        self.release_leaving();
        self.send_drain_if_requested(now);
        self.end_when_all_done(now);
        self.adapt_to_nodes(now);
    }

    // ---- changing nodes ----

    /// Opens a generation with other nodes, if some are leaving or have become ready.
    pub(super) fn adapt_to_nodes(&mut self, now: Time) {
        if self.drain.is_some() || !self.may_change_nodes() {
            return;
        }
        let Some(world) = self.lifecycle.training_world() else { return };
        match self.nodes.change(world) {
            Some(NodeChange::Leaves { node, reason, end }) => {
                match self.nodes.is_enough_without(&node, &self.policy) {
                    true => {
                        let cause = NodeChangeCause { text: reason, joins: false };
                        self.open_for_change(now, cause);
                    }
                    false => self.drain(now, reason, end),
                }
            }
            Some(NodeChange::Joins { node, ranks }) => {
                let what = if ranks == 1 { "rank" } else { "ranks" };
                let text = format!("node {node} takes part with {ranks} {what} from here on");
                self.open_for_change(now, NodeChangeCause { text, joins: true });
            }
            None => {
                let until = now.after(self.policy.rendezvous);
                for (node, local_ranks) in self.nodes.begin_warm_ups(world, &self.policy, until) {
                    self.end_processes_after_quarantine(&node);
                    self.send(&node, Directive::Warm { local_ranks });
                }
            }
        }
    }

    /// Ends what still runs on a node that was in quarantine: it occupies the slots. The node may have been sent no launch,
    /// because its processes might have been the only ones with the state; all ranks have it now. If it was sent one, this
    /// changes nothing.
    fn end_processes_after_quarantine(&mut self, node: &NodeId) {
        let Some(state) = self.nodes.get_mut(node).filter(|state| state.is_failing()) else {
            return;
        };
        state.holders.clear();
        let all: Vec<LocalRank> = (0..state.slots).map(LocalRank).collect();
        self.send_launch(node, &all);
    }

    /// Whether the ranks train, and another generation may follow although nothing failed. A disconnected node may hold the
    /// newest state. If some ranks are done already, it is better to let the others finish too.
    pub(super) fn may_change_nodes(&self) -> bool {
        self.lifecycle.training_world().is_some_and(|world| {
            self.nodes.disconnected_in(world).is_none() && world.all_are(&[MemberKind::Started])
        })
    }

    pub(super) fn begin_recovery(&mut self, now: Time, lost_at: Time, cause: &str, planned: bool) {
        let (meter, spent) = (&self.accounting.meter, self.accounting.spent(now));
        self.actions.extend(self.recoveries.abandon(spent));
        // The first report may be older than `now`.
        let metered_from = meter.read(lost_at).min(spent);
        let step = self.results.reached;
        let recovery = Recovery::new(self.lifecycle.generation, cause, lost_at, step);
        self.recoveries.begin(Recovery { planned, metered_from, ..recovery });
    }

    // ---- losing ranks ----

    /// Stops the generation, and waits for reports that show which ranks were lost.
    pub(super) fn wait_for_losses(
        &mut self,
        now: Time,
        world: World,
        (until, lost_at): (Time, Time),
        failure: Failure,
        suffix: &str,
    ) {
        let reason = match self.nodes.disconnected_in(&world) {
            Some(node) => format!("{failure}; waiting for node {node}, which is disconnected"),
            None => format!("{failure}{suffix}"),
        };
        let phase = Phase::Detecting { world, until, lost_at, failure };
        self.lifecycle.set_phase(now, phase, reason);
        self.fail_once_losses_are_known(now);
    }

    /// Continues once it is known which ranks were lost, or after the timeout.
    pub(super) fn fail_once_losses_are_known(&mut self, now: Time) {
        let Phase::Detecting { world, until, lost_at, failure } = &self.lifecycle.phase else {
            return;
        };
        // If all ranks lost their connection, none has died, and no death will be reported.
        let known = world.has(MemberKind::Gone) || world.all_are(&[MemberKind::Lost]);
        if self.nodes.disconnected_in(world).is_none() && (known || *until <= now) {
            let (lost_at, failure) = (*lost_at, failure.clone());
            self.fail(now, lost_at, failure);
        }
    }

    /// Ends a generation in which some ranks were not ready or not connected in time.
    pub(super) fn fail_late(&mut self, now: Time) {
        let are_connected = self.lifecycle.world().is_some_and(World::is_connected);
        let limit = if are_connected { RESTORE_TIMEOUT } else { self.policy.rendezvous };
        let failure = self.give_up_late(limit.as_secs_f64());
        self.fail(now, now, failure);
    }

    /// Notes which processes the next generation replaces, because their ranks did not connect in this time.
    pub(super) fn give_up_late(&mut self, seconds: f64) -> Failure {
        let late = self.lifecycle.world().map(World::late).unwrap_or_default();
        let are_connected = self.lifecycle.world().is_some_and(World::is_connected);
        let what = match (are_connected, late.len()) {
            (true, 1) => "has not restored its state",
            (true, _) => "have not restored their state",
            (false, _) => "did not connect to the others",
        };
        let cause = format!("{} {what} in {seconds} s", ranks_on_nodes(&late));
        // A rank that responds and holds state is kept: it may have waited for the others, or its reports were lost.
        let has_answered = matches!(self.lifecycle.phase, Phase::Meeting { .. });
        let is_kept = |placement: &&Placement| {
            let world = self.lifecycle.world();
            world.is_some_and(|world| world.holds_state_at(placement.rank))
                || has_answered && self.nodes.may_hold_state(placement)
        };
        let hanging = late.into_iter().filter(|placement| !is_kept(placement));
        let hanging: Vec<(NodeId, LocalRank)> =
            hanging.map(|placement| (placement.node.clone(), placement.local_rank)).collect();
        // As if they had died; but of ranks that have answered, one may hang and the others wait for it.
        let mut nodes: BTreeSet<NodeId> = hanging.iter().map(|(node, _)| node.clone()).collect();
        nodes.retain(|node| !has_answered || self.nodes.brings_no_state(node));
        self.nodes.count_failures_of(&nodes);
        self.lifecycle.hanging = hanging;
        crash(cause)
    }

    /// Ends the current generation, whose failure was first reported at `lost_at`: opens a new one, at once or after a
    /// backoff, or ends the job.
    pub(super) fn fail(&mut self, now: Time, lost_at: Time, failure: Failure) {
        // A change of nodes whose fence is being raised becomes the recovery from this failure; only the first one counts.
        let opening = self.lifecycle.opening.as_mut();
        if opening.is_some_and(|opening| opening.change.take().is_none()) {
            return;
        }
        let generation = self.lifecycle.generation;
        if self.divergences.is_rollback_due(generation) {
            // The generation ended for a rollback, which is not a failure.
            return self.open(now);
        }
        if !self.lifecycle.is_reattached {
            self.leave_out_unconnected(now, &failure);
            self.leave_out_unreached(now);
        }
        if !self.only_newcomers_failed() {
            self.lifecycle.failures += 1;
        }
        let (failures, limit) = (self.lifecycle.failures, self.policy.restart_limit);
        if failures > limit {
            let message = format!(
                "{failures} generations ended without a new step, the last because {}",
                failure.message
            );
            let failure = Failure { message, ..failure };
            if !self.begin_last_save(now, &failure) {
                return self.end(now, Outcome::Failed { failure });
            }
        }
        self.begin_recovery(now, lost_at, &failure.message, false);
        self.quarantine_failing_nodes(now);
        let until = now.after(self.policy.backoff(failures, self.origin.job, generation));
        if until <= now || self.drain.is_some() {
            return self.open(now);
        }
        let reason = format!("waiting before restart {failures} of {limit}: {failure}");
        self.lifecycle.set_phase(now, Phase::Backoff { until }, reason);
    }

    /// Quarantines nodes that failed too often, if the other nodes are enough and no state is lost.
    fn quarantine_failing_nodes(&mut self, now: Time) {
        while let Some(world) = self.lifecycle.world()
            && let Some(node) = self.nodes.failing(world, &self.policy)
        {
            self.quarantine(now, &node);
        }
    }

    pub(super) fn quarantine(&mut self, now: Time, node: &NodeId) {
        if let Some(text) = self.nodes.quarantine(now, node) {
            self.publish(JobEventKind::NodeQuarantined, text);
        }
    }

    // ---- restart of the coordinator ----

    pub(super) fn finish_reattaching(&mut self, now: Time) {
        let Phase::Reattaching { world, .. } = &self.lifecycle.phase else { return };
        if !world.has(MemberKind::Unknown) {
            self.give_up_reattaching(now);
        }
    }

    pub(super) fn give_up_reattaching(&mut self, now: Time) {
        let Phase::Reattaching { lost_at, .. } = self.lifecycle.phase else { return };
        let Some(world) = self.lifecycle.take_world() else { return };
        let is_rollback_due = self.divergences.is_rollback_due(self.lifecycle.generation);
        if world.all_have_started() && !is_rollback_due {
            let reason = ranks_that(
                world.size(),
                "trains; it continued while the coordinator was away",
                "train; they continued while the coordinator was away",
            );
            return self.train(now, world, reason);
        }
        let cause = "the coordinator restarted, and some ranks are no longer running".to_owned();
        let failure = crash(cause.clone());
        let lost_at = lost_at.unwrap_or(now);
        let phase = Phase::Detecting { world, until: now, lost_at, failure };
        self.lifecycle.set_phase(now, phase, cause);
        self.fail_once_losses_are_known(now);
    }
}
