//! Opening a generation.
//!
//! The checkpoint store comes first: once its fence is raised, no older generation can commit. The ranks learn of the
//! new generation only then. Until then the phase stays what it was. If the store refuses the fence, for example
//! because its disk is full or its credentials have expired, ranks that run keep their state, and the fence is tried
//! again.

use std::collections::BTreeSet;

use super::{
    Action, Engine, JobEventKind, Record, job_event::ranks, lifecycle::Phase, membership::World,
    nodes::Node, policy::Policy,
};
use crate::{
    exit::{Failure, Outcome},
    ids::{Generation, LocalRank, NodeId},
    message::{Directive, Launch},
    plan::place_ranks,
    time::Time,
};

/// A generation whose fence is being raised.
#[derive(Clone, Debug)]
pub(super) struct GenerationOpening {
    generation: Generation,
    world: World,
    /// Nodes to notify, which may run no ranks.
    nodes: BTreeSet<NodeId>,
    /// Why the nodes change although nothing failed.
    change: Option<NodeChangeCause>,
}

/// Why the nodes of a generation change although nothing failed.
#[derive(Clone, Debug)]
pub(super) struct NodeChangeCause {
    pub(super) text: String,
    /// Whether a node joins.
    pub(super) joins: bool,
}

/// The checkpoint store refuses the fence of a generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoreOutage {
    /// The fence may have been raised to this generation.
    generation: Generation,
    /// Refusals in a row.
    refusals: u32,
    /// When the fence is tried again, until then.
    pub(super) retry_at: Option<Time>,
}

impl Engine {
    pub(super) fn open_if_gathering(&mut self, now: Time) {
        if matches!(self.lifecycle.phase, Phase::Gathering) {
            self.open(now);
        }
    }

    /// Opens the next generation with the nodes that are attached, or waits for more nodes.
    pub(super) fn open(&mut self, now: Time) {
        self.raise_fence(now, None);
    }

    /// Opens a generation with other nodes although nothing failed. Every rank keeps its state.
    pub(super) fn open_for_change(&mut self, now: Time, cause: NodeChangeCause) {
        let outage = self.lifecycle.store_outage;
        if outage.and_then(|outage| outage.retry_at).is_none() {
            self.raise_fence(now, Some(cause));
        }
    }

    fn raise_fence(&mut self, now: Time, change: Option<NodeChangeCause>) {
        if self.lifecycle.opening.is_some() {
            return;
        }
        // Until all ranks hold the state, a leaving node may be the only one that does.
        let all_hold_state = self.lifecycle.training_world().is_some();
        let can_run_ranks =
            |node: &Node| node.departure.is_none() || !all_hold_state && !node.holders.is_empty();
        let slots = self.nodes.slots(can_run_ranks);
        let holders = self.nodes.holders(can_run_ranks);
        let only_saves = self.fails_with.is_some() || self.drain.is_some() && holders > 0;
        let (min_ranks, max_ranks) = match only_saves {
            false => (self.policy.min_ranks, self.policy.max_ranks),
            // Only processes that hold state: they come first.
            true => (1, self.policy.max_ranks.min(holders)),
        };
        // Counted before ranks are placed: while thousands of nodes attach, this runs once for each of them.
        let mut offers =
            if slots >= min_ranks { self.nodes.offers(can_run_ranks) } else { Vec::new() };
        if all_hold_state {
            offers.extend(self.nodes.last_holder());
        }
        let Some(placements) = place_ranks(&offers, min_ranks, max_ranks) else {
            if self.fails_with.is_some() {
                return self.end(now, Outcome::Drained { reason: String::new() });
            }
            let reason =
                format!("waiting for agents: {slots} of at least {min_ranks} ranks are available");
            return self.lifecycle.set_phase(now, Phase::Gathering, reason);
        };
        let generation = self.lifecycle.generation.next();
        let world = World::new(placements);
        self.actions.push(Action::Persist(Record::Opened {
            generation,
            placements: world.placements().to_vec(),
        }));
        self.actions.extend(self.accounting.persist(now));
        self.actions.push(Action::Fence(generation));
        let nodes = offers.into_iter().map(|offer| offer.node).collect();
        self.lifecycle.opening = Some(GenerationOpening { generation, world, nodes, change });
    }

    /// The fence is raised: the ranks leave the old generation.
    pub(super) fn fenced(&mut self, now: Time) {
        let Some(GenerationOpening { generation, world, nodes, change }) =
            self.lifecycle.opening.take()
        else {
            return;
        };
        self.lifecycle.store_outage = None;
        if let Some(NodeChangeCause { text, joins }) = &change {
            if *joins {
                self.publish(JobEventKind::NodesAdded, text.clone());
            }
            self.begin_recovery(now, now, text, true);
        }
        self.lifecycle.generation = generation;
        self.lifecycle.began_at = None;
        self.lifecycle.is_reattached = false;
        if let Some(recovery) = self.recoveries.waiting() {
            recovery.launched_at = Some(now);
            recovery.generation = generation;
        }
        let size = world.size();
        self.publish(
            JobEventKind::GenerationOpened,
            format!("generation {generation} opened with {}", ranks(size)),
        );
        let until = now.after(self.policy.rendezvous);
        let reason = format!("waiting for {} to start", ranks(size));
        self.lifecycle.set_phase(now, Phase::Forming { world, until }, reason);
        if let Some(world) = self.lifecycle.world() {
            self.nodes.begin_generation(&nodes, world);
        }
        self.forget_state_of_hanging();
        let hanging = std::mem::take(&mut self.lifecycle.hanging);
        for node in nodes {
            let here = hanging.iter().filter(|(other, _)| *other == node);
            let replace: Vec<LocalRank> = here.map(|(_, local)| *local).collect();
            self.send_launch(&node, &replace);
        }
        if change.is_some() {
            self.release_leaving();
        }
    }

    /// The store refuses the fence. Ranks that run hold state that may be nowhere else, so the job waits for the store
    /// as long as there are any; without them nothing is lost by ending it.
    pub(super) fn fence_failed(&mut self, now: Time, failure: Failure) {
        let Some(GenerationOpening { generation, .. }) = self.lifecycle.opening.take() else {
            return;
        };
        if self.nodes.values().all(|node| node.holders.is_empty()) {
            return self.end(now, Outcome::Failed { failure });
        }
        let before = self.lifecycle.store_outage;
        let refusals = before.map_or(0, |outage| outage.refusals).saturating_add(1);
        let pause = Policy::store_retry(refusals);
        let retry_at = now.after(pause);
        self.lifecycle.store_outage =
            Some(StoreOutage { generation, refusals, retry_at: Some(retry_at) });
        let is_training = matches!(self.lifecycle.phase, Phase::Training { .. });
        let what = match is_training {
            true => {
                "training goes on with the same nodes until the checkpoint store can be written"
            }
            false => {
                "the next generation waits for the checkpoint store; ranks that run keep their state"
            }
        };
        if before.is_none() {
            self.publish(JobEventKind::StoreUnavailable, format!("{what}: {failure}"));
        }
        if !is_training {
            let seconds = pause.as_secs();
            let reason = format!("{what}; the next try is in {seconds} s: {failure}");
            self.lifecycle.set_phase(now, Phase::Backoff { until: retry_at }, reason);
        }
    }

    /// Whether a fence at this generation is one that this job has raised or tried to raise.
    pub(super) fn is_own_fence(&self, fence: Generation) -> bool {
        let tried = self.lifecycle.store_outage.map(|outage| outage.generation);
        fence
            <= tried.map_or(self.lifecycle.generation, |tried| tried.max(self.lifecycle.generation))
    }

    pub(super) fn send_launch(&mut self, node: &NodeId, replace: &[LocalRank]) {
        let Some(world) = self.lifecycle.world() else { return };
        let launch = Launch {
            generation: self.lifecycle.generation,
            world_size: world.size(),
            ranks: world.ranks_of(node),
            replace: replace.to_vec(),
            restore: self.restore(),
            pause: self.pauses.state(),
        };
        self.send(node, Directive::Launch(launch));
    }
}
