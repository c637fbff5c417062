//! Agents come and go, and some of their nodes must go for good.

use super::{
    Action, Engine, NoticeKind, elastic::Leaving, lifecycle::Phase, membership::Member, nodes::Node,
};
use crate::{
    exit::{Failure, crash},
    ids::{Attachment, LocalRank, NodeId, Rank},
    message::{Beat, Directive, Hello, RankNews},
    time::Time,
};
use std::time::Duration;

impl Engine {
    pub(super) fn attached(&mut self, now: Time, attachment: Attachment, hello: Hello) {
        let Hello { node, slots, holding } = hello;
        let before = self.nodes.insert(node.clone(), Node::new(attachment, slots));
        if let (Some(old), Some(state)) = (&before, self.nodes.get_mut(&node)) {
            // A new agent on the same machine makes that no better.
            (state.failures, state.quarantined_until) = (old.failures, old.quarantined_until);
        }
        match before {
            Some(old) if old.is_attached() => {
                let reason =
                    format!("another agent attached as node {node}; give each its own --node-id");
                self.actions.push(Action::Refuse {
                    node: node.clone(),
                    attachment: old.attachment,
                    reason,
                });
            }
            _ => self
                .announce(NoticeKind::NodeJoined, format!("node {node} joined with {slots} slots")),
        }
        if let Some(outcome) = self.outcome().cloned() {
            return self.send(&node, Directive::Dismiss { outcome });
        }
        let generation = self.lifecycle.generation;
        let held = holding.filter(|held| held.generation == generation);
        let Some(world) = self.lifecycle.world_mut().filter(|world| world.includes(&node)) else {
            // Not part of what runs. Whatever it still runs belongs to the past.
            self.send_launch(&node, &[]);
            self.adapt(now);
            return self.open_if_gathering(now);
        };
        match held {
            Some(held) => {
                let (mut news, missing) = world.reconcile(&node, held.ranks);
                news.extend(
                    missing.into_iter().map(|rank| (rank, RankNews::Exited(vanished(rank, &node)))),
                );
                if let Some(commit) = held.commit {
                    self.saved(now, commit);
                }
                for (rank, news) in news {
                    // The first loss reported may have ended the generation.
                    if self.lifecycle.generation == generation {
                        self.rank_reported(now, rank, news);
                    }
                }
                self.remind(&node);
                self.lifecycle.extend_wait(now.after(self.policy.rendezvous));
                self.train_when_all_started(now);
                self.finish_reattaching(now);
                self.adapt(now);
            }
            // It never got the launch, or it restarted before anybody counted on its ranks.
            None if matches!(self.lifecycle.phase, Phase::Forming { .. }) => {
                if let Some(world) = self.lifecycle.world_mut() {
                    world.reset(&node);
                }
                self.send_launch(&node, &[]);
                self.lifecycle.extend_wait(now.after(self.policy.rendezvous));
            }
            None => {
                let cause = format!("the agent of node {node} restarted without its ranks");
                self.lost_node(now, &node, crash(cause));
            }
        }
    }

    /// A node that came back may have missed the order to begin, to pause, to go on, or to drain.
    fn remind(&mut self, node: &NodeId) {
        if self.pauses.changes > 0 {
            self.send(node, Directive::Hold(self.pauses.hold()));
        }
        let generation = self.lifecycle.generation;
        match (&self.lifecycle.phase, &self.drain) {
            (Phase::Meeting { world, .. }, _) => {
                let peers = world.peers();
                self.send(node, Directive::Begin { generation, peers });
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
        self.nodes.lose(node, now.after(grace));
        let counted_on = self.lifecycle.includes(node);
        if !counted_on || self.outcome().is_some() {
            self.nodes.remove(node);
        }
        let text = if counted_on {
            format!("node {node} lost touch; its ranks are given up in {} s", grace.as_secs_f64())
        } else {
            format!("node {node} left")
        };
        self.announce(NoticeKind::NodeLost, text);
    }

    /// Keeps how a machine does, and answers, so that its agent knows how far away this is.
    pub(super) fn heartbeat(&mut self, now: Time, node: &NodeId, beat: Beat) {
        let number = beat.number;
        self.nodes.hear(node, now, beat);
        self.send(node, Directive::Heard { number });
        self.actions.extend(self.accounting.persist_now_and_then(now));
    }

    /// The machine of a node is taken away.
    pub(super) fn node_must_leave(
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
        let Some(state) = self.nodes.get_mut(node) else { return };
        let leaving = Leaving { reason: reason.to_owned(), end };
        if state.leaving.replace(leaving).is_none() {
            let text = format!("node {node} must go ({reason}); the others go on without it");
            self.announce(NoticeKind::NodeLeaves, text);
        }
        self.release_leaving();
        self.adapt(now);
    }

    /// Lets nodes go that must and that no generation counts on.
    pub(super) fn release_leaving(&mut self) {
        for (node, reason) in self.nodes.free_to_leave(self.lifecycle.world()) {
            self.send(&node, Directive::Release { reason });
        }
    }

    /// A process of a node that joins is ready. Once all are, the node is taken in.
    pub(super) fn warmed_up(&mut self, now: Time, node: &NodeId, local_rank: LocalRank) {
        let warm_up = self.nodes.get_mut(node).and_then(|state| state.warm_up.as_mut());
        if let Some(warm_up) = warm_up {
            warm_up.ready.insert(local_rank);
            self.adapt(now);
        }
    }

    /// A process of a node that joins ended. It is tried once more.
    pub(super) fn warm_up_failed(
        &mut self,
        now: Time,
        node: &NodeId,
        local_rank: LocalRank,
        failure: &Failure,
    ) {
        let text = format!("a process that was to join on node {node} ended: {failure}");
        self.announce(NoticeKind::RankFailed, text);
        let Some(state) = self.nodes.get_mut(node) else { return };
        state.count_failure();
        if state.is_failing() {
            state.warm_up = None;
            return self.quarantine(now, node);
        }
        if let Some(warm_up) = &mut state.warm_up {
            warm_up.ready.remove(&local_rank);
            self.send(node, Directive::Warm { local_ranks: vec![local_rank] });
        }
    }

    /// What time alone changes about nodes that take no part.
    pub(super) fn expire_waiting_nodes(&mut self, now: Time) {
        if self.nodes.end_quarantines(now) {
            self.adapt(now);
            self.open_if_gathering(now);
        }
        for node in self.nodes.end_late_warm_ups(now) {
            self.quarantine(now, &node);
        }
    }

    /// Gives up nodes that were away for too long.
    pub(super) fn expire_away_nodes(&mut self, now: Time) {
        for node in self.nodes.given_up(now) {
            self.nodes.remove(&node);
            // Reattaching has its own deadline and looks at all nodes at once.
            let waits = matches!(self.lifecycle.phase, Phase::Reattaching { .. });
            if !waits && self.lifecycle.includes(&node) {
                let grace = self.policy.node_grace.as_secs_f64();
                self.lost_node(now, &node, crash(format!("node {node} was away for {grace} s")));
            }
        }
    }

    fn lost_node(&mut self, now: Time, node: &NodeId, failure: Failure) {
        let Some(world) = self.lifecycle.world() else { return };
        let ranks: Vec<Rank> = world.ranks_of(node).into_iter().map(|(rank, _)| rank).collect();
        self.lost(now, &ranks, Member::Gone, failure);
    }
}

fn vanished(rank: Rank, node: &NodeId) -> Failure {
    crash(format!("rank {rank} ended while node {node} was out of touch"))
}
