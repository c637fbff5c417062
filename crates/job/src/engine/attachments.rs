//! Agents attach, detach and send heartbeats; nodes join and leave.

use super::{
    Action, AgentRetry, Engine, JobEventKind, elastic::Departure, lifecycle::Phase,
    membership::Member, nodes::Node,
};
use crate::{
    exit::{Failure, crash},
    ids::{Attachment, LocalRank, NodeId, Rank},
    mesh_secret::MeshSecret,
    message::{AgentHeartbeat, Directive, Hello, RankPhase, RankReport, RunningRanks},
    time::Time,
};
use std::time::Duration;

impl Engine {
    pub(super) fn attached(&mut self, now: Time, attachment: Attachment, hello: Hello) {
        let is_taken = self.nodes.get(&hello.node).is_some_and(|state| state.is_alive(now));
        if is_taken && !self.is_same_agent(&hello) {
            let Hello { node, running, .. } = hello;
            let reason = format!(
                "node {node} is already attached; give this agent another name with --node-id"
            );
            // An agent that has run ranks of this job may have missed the newest launch when its stream broke. Then
            // its old stream is soon silent.
            let retry = if running.is_some() { AgentRetry::Reconnect } else { AgentRetry::Restart };
            return self.actions.push(Action::Refuse { node, attachment, reason, retry });
        }
        let Hello { node, slots, job, pause, running } = hello;
        let mut new = Node::new(attachment, now, slots);
        let holders = running.as_ref().map(|held| held.holders.clone()).unwrap_or_default();
        if job == Some(self.origin.job) {
            self.adopt_pause(now, pause);
        }
        let generation = self.lifecycle.generation;
        // A copy of the journal may lack the last assignment of this generation.
        let agrees = |held: &RunningRanks| {
            let runs_here = |rank| self.lifecycle.world().is_none_or(|it| it.runs(&node, rank));
            held.ranks.iter().all(|(rank, _)| runs_here(*rank))
        };
        let held = running.filter(|held| held.generation == generation && agrees(held));
        // A node without ranks in the generation ends its processes.
        let is_in_world = self.lifecycle.world().is_none_or(|world| world.includes(&node));
        let knows_ranks = held.is_some() && self.lifecycle.world().is_some();
        if is_in_world && !knows_ranks {
            new.holders = holders.into_iter().filter(|local_rank| local_rank.0 < slots).collect();
        }
        let before = self.nodes.insert(node.clone(), new);
        if let (Some(old), Some(state)) = (&before, self.nodes.get_mut(&node)) {
            // A new agent on the same machine does not remove the cause of the failures.
            (state.failures, state.quarantined_until) = (old.failures, old.quarantined_until);
            (state.was_left_out, state.has_held_state) = (old.was_left_out, old.has_held_state);
            if is_in_world && knows_ranks {
                state.holders.clone_from(&old.holders);
            }
        }
        match before {
            Some(old) if old.is_attached() => {
                let reason = format!(
                    "node {node} attached again over another connection; if these are two agents, give one of them \
                     another name with --node-id"
                );
                self.actions.push(Action::Refuse {
                    node: node.clone(),
                    attachment: old.attachment,
                    reason,
                    retry: AgentRetry::Never,
                });
            }
            _ => self.publish(
                JobEventKind::NodeJoined,
                format!("node {node} joined with {slots} slots"),
            ),
        }
        if let Some(outcome) = self.outcome().cloned() {
            return self.send(&node, Directive::Dismiss { outcome });
        }
        if held.is_some() {
            self.confirm_fence();
        }
        let Some(world) = self.lifecycle.world_mut().filter(|world| world.includes(&node)) else {
            // The node has no ranks in this generation; any rank that it still runs belongs to an older one.
            if self.lifecycle.is_fenced {
                self.send_launch(&node, &[]);
            }
            self.adapt_to_nodes(now);
            return self.open_if_gathering(now);
        };
        match held {
            Some(held) => {
                let holds_state =
                    |(rank, phase): &(Rank, RankPhase)| phase.may_hold_state().then_some(*rank);
                let holders: Vec<Rank> = held.ranks.iter().filter_map(holds_state).collect();
                let (mut reports, missing) = world.reconcile(&node, held.ranks);
                holders.into_iter().for_each(|rank| self.record_state(rank, true));
                reports.extend(missing.into_iter().map(|rank| {
                    (rank, RankReport::Exited(exited_while_disconnected(rank, &node)))
                }));
                self.reported_meanwhile(now, &node, held.steps, held.evaluations);
                if let Some(commit) = held.commit {
                    self.saved(now, commit);
                }
                for (rank, report) in reports {
                    // The first loss reported may have ended the generation.
                    if self.lifecycle.generation == generation {
                        self.rank_reported(now, rank, report);
                    }
                }
                self.resend_state(&node);
                self.lifecycle.extend_timeout(now.after(self.policy.rendezvous));
                self.train_when_all_started(now);
                self.finish_reattaching(now);
                self.adapt_to_nodes(now);
            }
            // It never received the launch, or it restarted before its ranks were needed.
            None if matches!(self.lifecycle.phase, Phase::Forming { .. }) => {
                if let Some(world) = self.lifecycle.world_mut() {
                    world.reset(&node);
                }
                self.send_launch(&node, &[]);
                self.lifecycle.extend_timeout(now.after(self.policy.rendezvous));
            }
            None => {
                let cause = format!("the agent of node {node} restarted without its ranks");
                self.lost_node(now, &node, crash(cause));
            }
        }
    }

    /// An agent knows of the generation that the journal ends with, so the coordinator before had raised its fence.
    fn confirm_fence(&mut self) {
        if std::mem::replace(&mut self.lifecycle.is_fenced, true) {
            return;
        }
        let attached = self.nodes.offers(|_| true).into_iter().map(|offer| offer.node);
        let is_outside =
            |node: &NodeId| self.lifecycle.world().is_none_or(|world| !world.includes(node));
        let outside: Vec<NodeId> = attached.filter(is_outside).collect();
        for node in outside {
            self.send_launch(&node, &[]);
        }
    }

    /// Whether a hello is from the agent that is attached already. That agent may reconnect before the coordinator
    /// notices that its stream broke. It is known by the generation and the ranks that it runs: a second agent of the
    /// same name runs none.
    fn is_same_agent(&self, hello: &Hello) -> bool {
        let Some(held) = &hello.running else { return false };
        let may_run =
            |rank| self.lifecycle.world().is_none_or(|world| world.runs(&hello.node, rank));
        held.generation == self.lifecycle.generation
            && held.ranks.iter().all(|(rank, _)| may_run(*rank))
    }

    /// Sends the current state again: a node that reconnects may have missed a directive to begin, pause, resume or
    /// drain.
    fn resend_state(&mut self, node: &NodeId) {
        if self.pauses.changes > 0 {
            self.send(node, Directive::Pause(self.pauses.state()));
        }
        let generation = self.lifecycle.generation;
        match (&self.lifecycle.phase, &self.drain) {
            (Phase::Meeting { world, .. }, _) => {
                let (peers, secret) = (world.peers(), MeshSecret::default());
                self.send(node, Directive::Begin { generation, peers, secret });
            }
            (Phase::Training { .. }, Some(drain)) => {
                let reason = drain.reason.clone();
                self.send(node, Directive::Drain { generation, reason });
            }
            _ => {}
        }
    }

    pub(super) fn detached(&mut self, now: Time, node: &NodeId, attachment: Attachment) {
        if self.nodes.get(node).is_none_or(|state| state.attachment != attachment) {
            return;
        }
        let grace = self.policy.node_grace;
        self.nodes.mark_disconnected(node, now.after(grace));
        let has_ranks = self.lifecycle.includes(node);
        if !has_ranks || self.outcome().is_some() {
            self.nodes.remove(node);
        }
        let text = if has_ranks {
            format!(
                "node {node} lost its connection; its ranks are given up unless it reconnects within {} s",
                grace.as_secs_f64()
            )
        } else {
            format!("node {node} left")
        };
        self.publish(JobEventKind::NodeLost, text);
    }

    /// Stores the machine's statistics, and acknowledges the heartbeat so that the agent can measure the round trip.
    pub(super) fn agent_heartbeat(&mut self, now: Time, node: &NodeId, heartbeat: AgentHeartbeat) {
        let number = heartbeat.number;
        self.nodes.record_heartbeat(node, now, heartbeat);
        self.send(node, Directive::HeartbeatAck { number });
        self.actions.extend(self.accounting.persist_if_due(now));
    }

    /// Handles a node that is leaving: continues without it if enough nodes stay, otherwise drains the job.
    pub(super) fn node_departing(
        &mut self,
        now: Time,
        node: &NodeId,
        reason: &str,
        seconds_left: Option<f64>,
    ) {
        let end = seconds_left.map(|seconds| {
            let left = Duration::try_from_secs_f64(seconds.max(0.0));
            now.after(left.unwrap_or(self.policy.drain))
        });
        if self.drain.is_some() || !self.nodes.is_enough_without(node, &self.policy) {
            return self.drain(now, format!("node {node}: {reason}"), end);
        }
        let latest = now.after(self.policy.drain);
        let until = end.map_or(latest, |end| end.min(latest));
        let departure = Departure { reason: reason.to_owned(), end, since: now, until };
        if self.nodes.mark_leaving(node, departure) {
            let text = format!("node {node} is leaving ({reason}); training continues without it");
            self.publish(JobEventKind::NodeLeaves, text);
        }
        self.release_leaving();
        self.adapt_to_nodes(now);
        self.continue_without_leaving(now, node, reason);
    }

    /// Releases nodes that are leaving and run no ranks of the current generation.
    pub(super) fn release_leaving(&mut self) {
        let others_train = self.lifecycle.training_world().is_some();
        for (node, reason) in self.nodes.releasable_nodes(self.lifecycle.world(), others_train) {
            self.send(&node, Directive::Release { reason });
        }
    }

    /// A process of a joining node is ready. Once all are ready, the node joins training.
    pub(super) fn warmed_up(&mut self, now: Time, node: &NodeId, local_rank: LocalRank) {
        let warm_up = self.nodes.get_mut(node).and_then(|state| state.warm_up.as_mut());
        if let Some(warm_up) = warm_up {
            warm_up.ready.insert(local_rank);
            self.adapt_to_nodes(now);
        }
    }

    /// A process of a joining node ended. It is started once more.
    pub(super) fn warm_up_failed(
        &mut self,
        now: Time,
        node: &NodeId,
        local_rank: LocalRank,
        failure: &Failure,
    ) {
        let text = format!("a process on node {node} ended before it could join: {failure}");
        self.publish(JobEventKind::RankFailed, text);
        if !failure.class.is_retriable() {
            // Such as a file that is not there: the others are enough without this node, which holds no state.
            return self.send_away(node, failure.clone());
        }
        let Some(state) = self.nodes.get_mut(node) else { return };
        state.count_failure();
        if state.is_failing() {
            state.warm_up = None;
            return self.quarantine(now, node);
        }
        if let Some(warm_up) = &mut state.warm_up {
            warm_up.restart(local_rank, now.after(self.policy.rendezvous));
            self.send(node, Directive::Warm { local_ranks: vec![local_rank] });
        }
    }

    /// Handles timeouts of nodes that run no ranks: ends of quarantines, and late processes.
    pub(super) fn expire_waiting_nodes(&mut self, now: Time) {
        if self.nodes.end_quarantines(now) {
            self.adapt_to_nodes(now);
            self.open_if_gathering(now);
        }
        for node in self.nodes.end_late_warm_ups(now) {
            self.quarantine(now, &node);
        }
    }

    /// Gives up nodes that were disconnected for too long.
    pub(super) fn expire_disconnected_nodes(&mut self, now: Time) {
        for node in self.nodes.past_grace_time(now) {
            self.nodes.remove(&node);
            // Reattaching has its own deadline and checks all nodes at once.
            let is_reattaching = matches!(self.lifecycle.phase, Phase::Reattaching { .. });
            if !is_reattaching && self.lifecycle.includes(&node) {
                let grace = self.policy.node_grace.as_secs_f64();
                let cause = format!("node {node} was disconnected for {grace} s");
                self.lost_node(now, &node, crash(cause));
            }
        }
    }

    pub(super) fn lost_node(&mut self, now: Time, node: &NodeId, failure: Failure) {
        let Some(world) = self.lifecycle.world() else { return };
        let ranks: Vec<Rank> = world.ranks_of(node).into_iter().map(|(rank, _)| rank).collect();
        self.lost(now, &ranks, Member::Gone, failure);
    }
}

fn exited_while_disconnected(rank: Rank, node: &NodeId) -> Failure {
    crash(format!("rank {rank} ended while node {node} was disconnected"))
}
