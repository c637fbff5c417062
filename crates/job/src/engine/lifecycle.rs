//! The current generation and its phase.

use std::collections::BTreeSet;

use super::{
    membership::World,
    opening::{GenerationOpening, StoreOutage},
};
use crate::{
    exit::{Failure, Outcome},
    ids::{Generation, LocalRank, NodeId},
    time::Time,
};
use baton_recipe::Step;

/// The phase of the job, with the data that exists only in that phase. `until` is the deadline of the phase; `lost_at`
/// is when the loss of a rank was first reported.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    /// Waits for enough ranks.
    Gathering,
    /// Waits after a failure before it opens the next generation.
    Backoff { until: Time },
    /// Waits until the process of every rank is ready.
    Forming { world: World, until: Time },
    /// The ranks connect to each other and restore the state.
    Meeting { world: World, until: Time },
    /// The ranks train.
    Training { world: World },
    /// A rank is lost: waits for reports that tell which ranks are lost, and why.
    Detecting { world: World, until: Time, lost_at: Time, failure: Failure },
    /// The coordinator restarted: waits until the agents have reconnected.
    Reattaching { world: World, until: Time, lost_at: Option<Time> },
    /// The job is over.
    Ended { outcome: Outcome },
}

/// The newest generation, its phase, and the reason for the phase.
#[derive(Clone, Debug)]
pub(super) struct Lifecycle {
    pub(super) generation: Generation,
    pub(super) phase: Phase,
    /// When the phase began.
    pub(super) since: Time,
    /// Why the job is in this phase, as text that a person can act on.
    pub(super) reason: String,
    /// Source of the state that the generation began with, as text.
    pub(super) began_with: Option<String>,
    /// The step at which the generation began, once a rank has reported it.
    pub(super) began_at: Option<Step>,
    /// The newest generation that made a step, and its nodes; not known after a restart of the coordinator.
    pub(super) stepped: Option<(Generation, BTreeSet<NodeId>)>,
    /// Whether the coordinator has restarted in this generation: ranks may then be late because of it.
    pub(super) is_reattached: bool,
    /// Number of generations in a row that ended without progress.
    pub(super) failures: u32,
    /// Ranks that did not respond in time: their processes are replaced in the next generation.
    pub(super) hanging: Vec<(NodeId, LocalRank)>,
    /// The next generation, while its fence is being raised.
    pub(super) opening: Option<GenerationOpening>,
    /// Whether ranks may run, also those of agents that are away: this coordinator has opened a generation, or the one
    /// before left one open.
    pub(super) may_have_ranks: bool,
    /// Whether the store has the fence of this generation for certain. No node may learn of it before: the copy of the
    /// journal may lack it, and who continues with that opens another one of this number.
    pub(super) is_fenced: bool,
    /// The newest generation whose fence this coordinator has tried to raise.
    pub(super) last_fence: Generation,
    /// When the last checkpoint may be looked for, which ranks may have completed the job with; `None` while the store has
    /// yet to answer.
    pub(super) looks_at: Option<Time>,
    /// Set while the checkpoint store refuses fences.
    pub(super) store_outage: Option<StoreOutage>,
}

impl Lifecycle {
    /// The state before the first generation.
    pub(super) fn new(first: Generation, now: Time) -> Self {
        Self {
            generation: Generation(first.0.saturating_sub(1)),
            phase: Phase::Gathering,
            since: now,
            reason: "waiting for agents".to_owned(),
            began_with: None,
            began_at: None,
            stepped: None,
            is_reattached: false,
            failures: 0,
            hanging: Vec::new(),
            opening: None,
            may_have_ranks: false,
            is_fenced: true,
            last_fence: Generation(0),
            looks_at: Some(now),
            store_outage: None,
        }
    }

    /// Records that the current generation has made a step.
    pub(super) fn note_step(&mut self) {
        let generation = self.generation;
        if self.stepped.as_ref().is_some_and(|(last, _)| *last == generation) {
            return;
        }
        self.stepped = self.world().map(|world| (generation, world.nodes().cloned().collect()));
    }

    pub(super) fn set_phase(&mut self, now: Time, phase: Phase, reason: String) {
        self.phase = phase;
        self.since = now;
        self.reason = reason;
    }

    /// Waits at least until then for the agents of the coordinator before.
    pub(super) fn wait_for_agents_until(&mut self, time: Time) {
        if let Phase::Reattaching { until, .. } = &mut self.phase {
            *until = time.max(*until);
        }
    }

    /// How the job ended, if it is over.
    pub(super) fn outcome(&self) -> Option<&Outcome> {
        match &self.phase {
            Phase::Ended { outcome } => Some(outcome),
            _ => None,
        }
    }

    pub(super) fn world(&self) -> Option<&World> {
        match &self.phase {
            Phase::Forming { world, .. }
            | Phase::Meeting { world, .. }
            | Phase::Training { world }
            | Phase::Detecting { world, .. }
            | Phase::Reattaching { world, .. } => Some(world),
            Phase::Gathering | Phase::Backoff { .. } | Phase::Ended { .. } => None,
        }
    }

    pub(super) fn world_mut(&mut self) -> Option<&mut World> {
        match &mut self.phase {
            Phase::Forming { world, .. }
            | Phase::Meeting { world, .. }
            | Phase::Training { world }
            | Phase::Detecting { world, .. }
            | Phase::Reattaching { world, .. } => Some(world),
            Phase::Gathering | Phase::Backoff { .. } | Phase::Ended { .. } => None,
        }
    }

    /// Moves the world out of the current phase; the caller must set the next phase at once.
    pub(super) fn take_world(&mut self) -> Option<World> {
        match std::mem::replace(&mut self.phase, Phase::Gathering) {
            Phase::Forming { world, .. }
            | Phase::Meeting { world, .. }
            | Phase::Training { world }
            | Phase::Detecting { world, .. }
            | Phase::Reattaching { world, .. } => Some(world),
            other => {
                self.phase = other;
                None
            }
        }
    }

    /// The ranks, in phase `Training` only.
    pub(super) fn training_world(&self) -> Option<&World> {
        match &self.phase {
            Phase::Training { world } => Some(world),
            _ => None,
        }
    }

    /// Whether ranks were lost while a change of nodes waits for its fence, and it is not known yet which.
    pub(super) fn is_losing_while_opening(&self) -> bool {
        matches!(self.phase, Phase::Detecting { .. })
            && self.opening.as_ref().is_some_and(|opening| opening.change.is_some())
    }

    /// Whether a node runs ranks of this generation.
    pub(super) fn includes(&self, node: &NodeId) -> bool {
        self.world().is_some_and(|world| world.includes(node))
    }

    /// Whether the pause before the next try of a refused fence ends now.
    pub(super) fn end_store_pause(&mut self, now: Time) -> bool {
        let outage = self.store_outage.as_mut();
        outage.is_some_and(|outage| outage.retry_at.take_if(|at| *at <= now).is_some())
    }

    /// Extends the deadline of the phase, because the ranks of a node that reconnected may start only now.
    pub(super) fn extend_timeout(&mut self, to: Time) {
        if let Phase::Forming { until, .. } | Phase::Meeting { until, .. } = &mut self.phase {
            *until = to;
        }
    }
}
