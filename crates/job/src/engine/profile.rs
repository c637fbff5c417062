//! The profile that the ranks record.

use std::collections::BTreeSet;

use super::{Engine, JobEventKind};
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
    steps: u32,
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
        match self.profile_obstacle() {
            Some(obstacle) => Err(obstacle),
            None => Ok(()),
        }
    }

    /// Why ranks cannot record now, or what they record cannot be reported.
    fn profile_obstacle(&self) -> Option<String> {
        let Some(world) = self.lifecycle.training_world() else {
            return Some(format!("training was interrupted: {}", self.status_reason()));
        };
        let node = self.nodes.disconnected_in(world)?;
        Some(format!("node {node} is not connected"))
    }

    /// Asks all ranks to record their next steps.
    pub(super) fn profile(&mut self, name: String, steps: u32) {
        if self.can_profile(steps).is_err() {
            return;
        }
        let Some(world) = self.lifecycle.training_world() else { return };
        let waiting = world.members().map(|(placement, _)| placement.rank).collect();
        let generation = self.lifecycle.generation;
        self.profile = Some(Profile { generation, name: name.clone(), steps, waiting });
        self.send_to_world(&Directive::Profile { generation, name, steps });
    }

    /// A rank has written its part of a profile, or could not.
    pub(super) fn profiled(&mut self, rank: Rank, name: &str, problem: Option<String>) {
        let Some(profile) = self.profile.as_mut().filter(|profile| profile.name == name) else {
            return;
        };
        if let Some(problem) = problem {
            let text = format!("profile {name}: rank {rank} could not write its part: {problem}");
            self.profile = None;
            self.publish(JobEventKind::ProfileFailed, text);
            return;
        }
        profile.waiting.remove(&rank);
        if profile.waiting.is_empty() {
            let text = format!("profile {name}: {} steps are recorded", profile.steps);
            self.profile = None;
            self.publish(JobEventKind::Profiled, text);
        }
    }

    /// Gives up a profile that some rank will not report.
    pub(super) fn end_profile_if_interrupted(&mut self) {
        let Some(profile) = &self.profile else { return };
        let generation = self.lifecycle.generation;
        let obstacle = if profile.generation == generation {
            self.profile_obstacle()
        } else {
            Some(format!("generation {generation} was opened"))
        };
        let Some(obstacle) = obstacle else { return };
        let name = profile.name.clone();
        self.profile = None;
        // The end of the job has an event of its own.
        if self.outcome().is_none() {
            self.publish(JobEventKind::ProfileFailed, format!("profile {name}: {obstacle}"));
        }
    }
}
