//! Saving and stopping before a deadline, and nodes whose machines are taken away.
//!
//! A node that must go takes the job down with it only if too few ranks would be left. Else the others open a
//! generation without it, as soon as they hold the state.

use std::time::Duration;

use super::{Engine, NoticeKind, Phase};
use crate::{exit::Outcome, ids::NodeId, message::Directive, plan::place_ranks, time::Time};
use baton_recipe::Step;

/// A wish to save and stop, and how far that has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainStatus {
    /// Why, in words.
    pub reason: String,
    /// When it was asked for.
    pub since: Time,
    /// When nobody waits for it any more.
    pub until: Time,
    /// The update after which all ranks stop, once they have agreed on it.
    pub stop_step: Option<Step>,
    /// When they had.
    pub agreed_at: Option<Time>,
    /// When the state was copied and nothing was left but to write it.
    pub copied_at: Option<Time>,
    /// When it was durable and committed.
    pub durable_at: Option<Time>,
}

/// A node's machine is taken away.
#[derive(Clone, Debug)]
pub(super) struct Leaving {
    /// Why, in words.
    pub(super) reason: String,
    /// When, if that is known.
    pub(super) end: Option<Time>,
}

/// What rank 0 tells on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrainStage {
    Agreed,
    Copied,
    Durable,
}

impl Engine {
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
        // They save and stop from where they stand.
        self.end_pause(now);
        let text = format!("saving and stopping, {left} s are left: {reason}");
        self.announce(NoticeKind::Draining, text);
        self.drain = Some(DrainStatus {
            reason: reason.clone(),
            since: now,
            until,
            stop_step: None,
            agreed_at: None,
            copied_at: None,
            durable_at: None,
        });
        match &self.phase {
            Phase::Training { .. } => self.send_drain_if_wanted(now),
            // Too few ranks to save anything.
            Phase::Gathering => self.end(now, Outcome::Drained { reason }),
            Phase::Backoff { .. } => self.open(now),
            // Once it trains it is told; if no rank turns out to hold state, it ends before.
            Phase::Forming { .. }
            | Phase::Meeting { .. }
            | Phase::Settling { .. }
            | Phase::Reattaching { .. }
            | Phase::Ended { .. } => {}
        }
    }

    pub(super) fn send_drain_if_wanted(&mut self, now: Time) {
        let Some(DrainStatus { reason, until, .. }) = self.drain.clone() else { return };
        let directive = Directive::Drain { generation: self.generation, reason: reason.clone() };
        self.send_to_world(&directive);
        self.reason =
            format!("draining: {reason}; {} s to save and stop", until.since(now).as_secs());
    }

    /// Notes how far saving and stopping has come.
    pub(super) fn heard_of_drain(&mut self, now: Time, step: Step, stage: DrainStage) {
        let Some(status) = &mut self.drain else { return };
        let (at, what) = match stage {
            DrainStage::Agreed => {
                status.stop_step = Some(step);
                (&mut status.agreed_at, format!("all ranks stop after step {step}"))
            }
            DrainStage::Copied => {
                (&mut status.copied_at, format!("the state after step {step} is copied"))
            }
            DrainStage::Durable if status.stop_step == Some(step) => {
                (&mut status.durable_at, format!("the state after step {step} is durable"))
            }
            DrainStage::Durable => return,
        };
        if at.is_some() {
            return;
        }
        *at = Some(now);
        let (took, left) =
            (now.since(status.since).as_secs_f64(), status.until.since(now).as_secs());
        let text = format!("{what}, {took:.1} s after the wish; {left} s are left");
        self.announce_at(NoticeKind::Draining, Some(step), text);
    }

    /// The machine of a node is taken away.
    pub(super) fn node_must_go(
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
        if self.drain.is_some() || !self.is_enough_without(node) {
            return self.drain(now, format!("node {node}: {reason}"), end);
        }
        let Some(state) = self.nodes.get_mut(node) else { return };
        let leaving = Leaving { reason: reason.to_owned(), end };
        if state.leaving.replace(leaving).is_none() {
            let text = format!("node {node} must go ({reason}); the others go on without it");
            self.announce(NoticeKind::NodeLeaves, text);
        }
        self.release_the_leaving();
        self.adapt(now);
    }

    /// Those that no generation counts on may go.
    pub(super) fn release_the_leaving(&mut self) {
        let world = self.world().cloned();
        let is_counted_on = |node: &NodeId| world.as_ref().is_some_and(|w| w.includes(node));
        let free = self.nodes.iter().filter(|(node, _)| !is_counted_on(node));
        let free: Vec<(NodeId, String)> = free
            .filter_map(|(node, state)| Some((node.clone(), state.leaving.clone()?.reason)))
            .collect();
        for (node, reason) in free {
            self.send(&node, Directive::Release { reason });
        }
    }

    /// Whether the nodes that stay offer enough ranks if this one goes.
    pub(super) fn is_enough_without(&self, node: &NodeId) -> bool {
        let mut offers = self.offers(|state| state.leaving.is_none());
        offers.retain(|offer| offer.node != *node);
        place_ranks(&offers, self.policy.min_ranks, self.policy.max_ranks).is_some()
    }
}
