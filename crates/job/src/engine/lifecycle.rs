//! The present generation, and the phase it is in.

use super::membership::World;
use crate::{
    exit::{Failure, Outcome},
    ids::{Generation, LocalRank, NodeId},
    time::Time,
};
use baton_recipe::Step;

/// Each phase carries only what that phase knows; `lost_at` is when the first word of a loss came.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    Gathering,
    Backoff { until: Time },
    Forming { world: World, until: Time },
    Meeting { world: World, until: Time },
    Training { world: World },
    Settling { world: World, until: Time, lost_at: Time, failure: Failure },
    Reattaching { world: World, until: Time, lost_at: Option<Time> },
    Ended { outcome: Outcome },
}

/// The newest generation, its phase and why it is in it.
#[derive(Clone, Debug)]
pub(super) struct Lifecycle {
    pub(super) generation: Generation,
    pub(super) phase: Phase,
    /// Start of the phase.
    pub(super) since: Time,
    /// Why, in words a person can act on.
    pub(super) reason: String,
    /// Source of the state that the generation began with, in words.
    pub(super) began_with: Option<String>,
    /// The step that the generation began with, once a rank has reported it.
    pub(super) began_at: Option<Step>,
    /// Generations that ended one after the other without progress.
    pub(super) failures: u32,
    /// Ranks that kept the others waiting: their processes are not kept in the next generation.
    pub(super) hanging: Vec<(NodeId, LocalRank)>,
}

impl Lifecycle {
    /// Before the first generation.
    pub(super) fn new(first: Generation, now: Time) -> Self {
        Self {
            generation: Generation(first.0.saturating_sub(1)),
            phase: Phase::Gathering,
            since: now,
            reason: "waiting for agents".to_owned(),
            began_with: None,
            began_at: None,
            failures: 0,
            hanging: Vec::new(),
        }
    }

    pub(super) fn set_phase(&mut self, now: Time, phase: Phase, reason: String) {
        self.phase = phase;
        self.since = now;
        self.reason = reason;
    }

    /// How the job ended, if it has.
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
            | Phase::Settling { world, .. }
            | Phase::Reattaching { world, .. } => Some(world),
            Phase::Gathering | Phase::Backoff { .. } | Phase::Ended { .. } => None,
        }
    }

    pub(super) fn world_mut(&mut self) -> Option<&mut World> {
        match &mut self.phase {
            Phase::Forming { world, .. }
            | Phase::Meeting { world, .. }
            | Phase::Training { world }
            | Phase::Settling { world, .. }
            | Phase::Reattaching { world, .. } => Some(world),
            Phase::Gathering | Phase::Backoff { .. } | Phase::Ended { .. } => None,
        }
    }

    /// Moves the world out of the present phase, for the phase that follows at once.
    pub(super) fn take_world(&mut self) -> Option<World> {
        match std::mem::replace(&mut self.phase, Phase::Gathering) {
            Phase::Forming { world, .. }
            | Phase::Meeting { world, .. }
            | Phase::Training { world }
            | Phase::Settling { world, .. }
            | Phase::Reattaching { world, .. } => Some(world),
            other => {
                self.phase = other;
                None
            }
        }
    }

    /// The ranks that train, while they do.
    pub(super) fn training_world(&self) -> Option<&World> {
        match &self.phase {
            Phase::Training { world } => Some(world),
            _ => None,
        }
    }

    /// Whether a node runs ranks of this generation.
    pub(super) fn includes(&self, node: &NodeId) -> bool {
        self.world().is_some_and(|world| world.includes(node))
    }

    /// The ranks of a node that came back may only now be asked to start or to meet.
    pub(super) fn extend_wait(&mut self, to: Time) {
        if let Phase::Forming { until, .. } | Phase::Meeting { until, .. } = &mut self.phase {
            *until = to;
        }
    }
}
