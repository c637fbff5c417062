//! The profile that the ranks record.

use std::collections::BTreeSet;

use super::{Action, Engine};
use crate::{
    ids::{Generation, Rank},
    message::Directive,
};

/// Most steps of a profile: libtorch's profiler keeps each operation in memory, thousands per step.
pub const MAX_PROFILED_STEPS: u32 = 50;

/// A profile that ranks are recording.
#[derive(Clone, Debug)]
pub(super) struct Profile {
    generation: Generation,
    name: String,
    ranks: u32,
    /// Ranks that have not written it.
    waiting: BTreeSet<Rank>,
}

impl Engine {
    /// Checks whether a profile of so many steps can be recorded.
    ///
    /// # Errors
    /// Why not, as text.
    pub fn can_profile(&self, steps: u32) -> Result<(), String> {
        if steps == 0 || steps > MAX_PROFILED_STEPS {
            return Err(format!("a profile has 1 to {MAX_PROFILED_STEPS} steps, not {steps}"));
        }
        if let Some(pause) = &self.pauses.current {
            return Err(format!("training is paused: {}", pause.reason));
        }
        if let Some(drain) = &self.drain {
            return Err(format!("the job is being saved and stopped: {}", drain.reason));
        }
        if self.profile.is_some() {
            return Err("another profile is being recorded; try again when it is done".to_owned());
        }
        self.can_checkpoint()?;
        self.profile_obstacle().map_or(Ok(()), Err)
    }

    /// Why ranks cannot record now, or what they record cannot be reported.
    fn profile_obstacle(&self) -> Option<String> {
        if let Some(outcome) = self.outcome() {
            return Some(format!("the job ended: {outcome}"));
        }
        let Some(world) = self.lifecycle.training_world() else {
            return Some(format!("training was interrupted: {}; try again", self.status_reason()));
        };
        let node = self.nodes.disconnected_in(world)?;
        Some(format!("node {node} is not connected; try again when it is"))
    }

    /// Asks all ranks to record their next steps.
    pub(super) fn profile(&mut self, name: String, steps: u32) {
        if self.can_profile(steps).is_err() {
            return;
        }
        let Some(world) = self.lifecycle.training_world() else { return };
        let waiting: BTreeSet<Rank> = world.members().map(|(at, _)| at.rank).collect();
        let generation = self.lifecycle.generation;
        let ranks = world.size();
        self.profile = Some(Profile { generation, name: name.clone(), ranks, waiting });
        self.send_to_world(&Directive::Profile { generation, name, steps });
    }

    /// A rank has written its part of a profile, or could not.
    pub(super) fn profiled(&mut self, rank: Rank, name: &str, problem: Option<String>) {
        let Some(profile) = self.profile.as_mut().filter(|profile| profile.name == name) else {
            return;
        };
        profile.waiting.remove(&rank);
        let ranks = profile.ranks;
        if let Some(problem) = problem {
            self.end_profile(Err(format!("rank {rank} could not write its part: {problem}")));
        } else if profile.waiting.is_empty() {
            self.end_profile(Ok(ranks));
        }
    }

    /// Gives up a profile that some rank will not report.
    pub(super) fn end_profile_if_interrupted(&mut self) {
        let Some(profile) = &self.profile else { return };
        let generation = self.lifecycle.generation;
        let is_of_another = profile.generation != generation;
        let replaced = || format!("generation {generation} was opened; try again");
        let obstacle = is_of_another.then(replaced).or_else(|| self.profile_obstacle());
        if let Some(obstacle) = obstacle {
            self.end_profile(Err(obstacle));
        }
    }

    fn end_profile(&mut self, result: Result<u32, String>) {
        self.profile = None;
        self.actions.push(Action::ProfileEnded(result));
    }
}
