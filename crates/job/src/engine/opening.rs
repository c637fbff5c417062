//! Opening a generation.
//!
//! The checkpoint store comes first: once its fence is raised, no older generation can commit. The ranks learn of the
//! new generation only then. Until then the phase stays what it was, except that ranks that still connect do not begin to
//! train. A bucket may take minutes to answer, and the job receives events meanwhile: nodes come and go, ranks that train make
//! steps and may fail, users ask for things. If the planned ranks are then no longer possible, they are placed anew.
//!
//! If the store refuses the fence, for example because its disk is full or its credentials have expired, ranks that run
//! keep their state, and the fence is tried again.

use std::{collections::BTreeSet, time::Duration};

use super::{
    Action, Engine, JobEventKind, Record,
    job_event::ranks,
    lifecycle::Phase,
    membership::{MemberKind, World},
    nodes::Node,
    policy::Policy,
};
use crate::{
    exit::{Failure, Outcome},
    ids::{Generation, LocalRank, NodeId},
    message::{Directive, Launch},
    plan::place_ranks,
    time::Time,
};

/// After this time without an answer of the checkpoint store, an event says so.
const SLOW_STORE: Duration = Duration::from_secs(5);

/// How long a job whose ranks hold no state waits for a store that refuses its generations.
const STORE_TIMEOUT: Duration = Duration::from_secs(600);

/// A generation whose fence is being raised.
#[derive(Clone, Debug)]
pub(super) struct GenerationOpening {
    generation: Generation,
    world: World,
    /// Nodes to notify, which may run no ranks.
    nodes: BTreeSet<NodeId>,
    /// Whether it consists of processes that hold state, to save it.
    only_saves: bool,
    /// Whether it carries out a rollback, which the journal then has before it.
    rolls_back: bool,
    /// Why the nodes change although nothing failed.
    pub(super) change: Option<NodeChangeCause>,
    /// When an event says that the store does not answer, until then.
    pub(super) slow_at: Option<Time>,
    /// Whether the fence is raised.
    is_fenced: bool,
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
    /// When the first fence was refused.
    since: Time,
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
        let Some(mut opening) = self.place_next_generation(now, change) else { return };
        opening.slow_at = Some(now.after(SLOW_STORE));
        if let Some(outage) = &mut self.lifecycle.store_outage {
            outage.retry_at = None;
        }
        self.lifecycle.last_fence = opening.generation;
        self.actions.push(Action::Fence(opening.generation));
        self.lifecycle.opening = Some(opening);
    }

    /// Places the ranks of the next generation on the nodes that are attached. If they are too few, waits for more.
    fn place_next_generation(
        &mut self,
        now: Time,
        change: Option<NodeChangeCause>,
    ) -> Option<GenerationOpening> {
        let mut all_hold_state = self.lifecycle.training_world().is_some();
        if all_hold_state
            && self.nodes.slots(|node| can_run_ranks(node, true)) < self.policy.min_ranks
        {
            // A node that was to replace a leaving one is gone. The leaving one takes part until it has saved.
            all_hold_state = false;
        }
        let can_run_ranks = |node: &Node| can_run_ranks(node, all_hold_state);
        let slots = self.nodes.slots(can_run_ranks);
        let holders = self.nodes.holders(can_run_ranks);
        let only_saves = self.only_saves(holders);
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
                self.end(now, Outcome::Drained { reason: String::new() });
                return None;
            }
            let reason =
                format!("waiting for agents: {slots} of at least {min_ranks} ranks are available");
            self.lifecycle.set_phase(now, Phase::Gathering, reason);
            self.look_for_the_last_checkpoint(now);
            return None;
        };
        let generation = self.lifecycle.generation.next();
        let world = World::new(placements);
        self.actions.push(Action::Persist(Record::Opened {
            generation,
            placements: world.placements().to_vec(),
        }));
        self.actions.extend(self.accounting.persist(now));
        let nodes = offers.into_iter().map(|offer| offer.node).collect();
        let rolls_back = self.divergences.is_rollback_due(self.lifecycle.generation);
        Some(GenerationOpening {
            generation,
            world,
            nodes,
            only_saves,
            rolls_back,
            change,
            slow_at: None,
            is_fenced: false,
        })
    }

    /// Whether the next generation only saves what ranks hold, before the job ends.
    fn only_saves(&self, holders: u32) -> bool {
        self.fails_with.is_some() || self.drain.is_some() && holders > 0
    }

    /// Whether a generation can open as it was planned before the store answered.
    fn is_possible(&self, opening: &GenerationOpening) -> bool {
        let all_hold_state = self.lifecycle.training_world().is_some();
        let last_holder = self.nodes.last_holder().map(|offer| offer.node);
        let can_run_its_ranks = |id: &NodeId| {
            let runs = |node: &Node| {
                node.quarantined_until.is_none()
                    && (can_run_ranks(node, all_hold_state) || last_holder.as_ref() == Some(id))
                    && node.slots as usize >= opening.world.ranks_of(id).len()
            };
            self.nodes.get(id).is_some_and(runs)
        };
        let holders = self.nodes.holders(|node| can_run_ranks(node, all_hold_state));
        let placements = opening.world.placements().iter();
        let placed_holders = placements.filter(|at| self.nodes.may_hold_state(at)).count();
        let no_others = !opening.only_saves || placed_holders == opening.world.placements().len();
        placed_holders >= holders.min(self.policy.max_ranks) as usize
            && no_others
            && opening.only_saves == self.only_saves(holders)
            && opening.rolls_back == self.divergences.is_rollback_due(self.lifecycle.generation)
            && opening.world.nodes().all(can_run_its_ranks)
    }

    /// Reports that the store does not answer.
    pub(super) fn report_slow_store(&mut self, now: Time) {
        let Some(opening) = &mut self.lifecycle.opening else { return };
        if opening.slow_at.take_if(|at| *at <= now).is_none() {
            return;
        }
        let (generation, seconds) = (opening.generation, SLOW_STORE.as_secs());
        let is_training = matches!(self.lifecycle.phase, Phase::Training { .. });
        let what = match is_training {
            true => "training continues with the same nodes",
            false => "ranks that run keep their state",
        };
        let text = format!(
            "generation {generation} waits for the checkpoint store, which has not answered for {seconds} s; {what}"
        );
        self.publish(JobEventKind::StoreUnavailable, text.clone());
        if !is_training {
            self.lifecycle.reason = text;
        }
    }

    /// The fence is raised.
    pub(super) fn fenced(&mut self, now: Time) {
        let Some(opening) = &mut self.lifecycle.opening else { return };
        opening.is_fenced = true;
        opening.slow_at = None;
        self.lifecycle.store_outage = None;
        self.open_if_fenced(now);
    }

    /// Opens a generation whose fence is raised. A node that got disconnected meanwhile may hold the newest state; it is
    /// waited for, unless the generation includes it anyway. So are reports that tell which ranks were lost meanwhile.
    ///
    /// A generation that is given up stays in the journal; a restarted coordinator opens the one after it.
    pub(super) fn open_if_fenced(&mut self, now: Time) {
        if self.lifecycle.is_losing_while_opening() {
            return;
        }
        let Some(opening) = self.lifecycle.opening.take_if(|opening| opening.is_fenced) else {
            return;
        };
        let is_possible = self.is_possible(&opening);
        let is_left_behind = |node: &NodeId| !is_possible || !opening.world.includes(node);
        let world = self.lifecycle.world();
        let left_behind = world.and_then(|world| {
            self.nodes.all_disconnected_in(world).find(|node| is_left_behind(node)).cloned()
        });
        if let Some(node) = left_behind {
            if self.lifecycle.training_world().is_none() {
                self.lifecycle.reason = format!("waiting for node {node}, which is disconnected");
            }
            self.lifecycle.opening = Some(opening);
            return;
        }
        if self.lifecycle.training_world().is_some_and(|world| world.has(MemberKind::Done)) {
            // The last checkpoint is committed. If another rank is lost before it is done too, the generation opens then.
            return;
        }
        let opening = match is_possible {
            true => Some(opening),
            false => self.place_next_generation(now, opening.change),
        };
        if let Some(opening) = opening {
            self.begin_generation(now, opening);
        }
    }

    /// The ranks leave the old generation.
    fn begin_generation(&mut self, now: Time, opening: GenerationOpening) {
        let GenerationOpening { generation, world, mut nodes, change, .. } = opening;
        self.keep_those_that_answered();
        // Those that attached while the store was slow, too: processes of older generations must learn of this one.
        let attached = self.nodes.offers(|node| node.departure.is_none());
        nodes.extend(attached.into_iter().map(|offer| offer.node));
        self.lifecycle.may_have_ranks = true;
        if let Some(NodeChangeCause { text, joins }) = &change {
            if *joins {
                self.publish(JobEventKind::NodesAdded, text.clone());
            }
            self.begin_recovery(now, now, text, true);
        }
        self.lifecycle.generation = generation;
        self.lifecycle.is_fenced = true;
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

    /// The store refuses the fence. Ranks that run hold state that may be nowhere else, so the job waits for the store. If none
    /// is known to hold any, it waits [`STORE_TIMEOUT`]: agents may be away, and a bucket out of reach for a minute must not
    /// end a job. Before the first generation nothing is lost by ending it.
    pub(super) fn fence_failed(&mut self, now: Time, failure: Failure) {
        let is_losing = self.lifecycle.is_losing_while_opening();
        if self.lifecycle.opening.take().is_none() {
            return;
        }
        let before = self.lifecycle.store_outage;
        let since = before.map_or(now, |outage| outage.since);
        let holds_nothing = self.nodes.values().all(|node| node.holders.is_empty());
        let may_wait = self.lifecycle.may_have_ranks && now.since(since) < STORE_TIMEOUT;
        if holds_nothing && !may_wait {
            return self.end(now, Outcome::Failed { failure });
        }
        let refusals = before.map_or(0, |outage| outage.refusals).saturating_add(1);
        let pause = Policy::store_retry(refusals);
        let retry_at = now.after(pause);
        self.lifecycle.store_outage =
            Some(StoreOutage { since, refusals, retry_at: Some(retry_at) });
        let is_training = matches!(self.lifecycle.phase, Phase::Training { .. });
        let what = match (is_training, holds_nothing) {
            (true, _) => {
                "training continues with the same nodes until the checkpoint store can be written"
            }
            (false, false) => {
                "the next generation waits for the checkpoint store; ranks that run keep their state"
            }
            (false, true) => {
                "the next generation, which resumes from the newest checkpoint, waits for the checkpoint store"
            }
        };
        if before.is_none() {
            self.publish(JobEventKind::StoreUnavailable, format!("{what}: {failure}"));
        }
        // The next generation opens, and tries again, once it is known which ranks were lost.
        if !is_training && !is_losing {
            let seconds = pause.as_secs();
            let reason = format!("{what}; the next try is in {seconds} s: {failure}");
            self.lifecycle.set_phase(now, Phase::Backoff { until: retry_at }, reason);
        }
    }

    /// Whether this generation waits for its fence.
    pub(super) fn is_opening(&self, generation: Generation) -> bool {
        let opening = self.lifecycle.opening.as_ref();
        opening.is_some_and(|opening| opening.generation == generation)
    }

    /// Handles a save that was refused because the fence is at a newer generation than that of the ranks. If this job did
    /// not try to raise it so far, another coordinator did.
    pub(super) fn refused_by_fence(&mut self, now: Time, fence: Generation, message: String) {
        let current = self.lifecycle.generation;
        if fence > current.max(self.lifecycle.last_fence) {
            return self.taken_over(now, message);
        }
        // The fence was raised for a change of nodes that was given up: the ranks can save only in a newer generation.
        if fence > current && self.may_change_nodes() {
            let text = format!("the checkpoint store expects generation {fence}");
            self.open_for_change(now, NodeChangeCause { text, joins: false });
        }
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

/// Whether a node gets ranks of the next generation. Until all ranks hold the state, a leaving node may be the only one
/// that does.
fn can_run_ranks(node: &Node, all_hold_state: bool) -> bool {
    node.departure.is_none() || !all_hold_state && !node.holders.is_empty()
}
