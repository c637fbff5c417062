//! One slot of a node: the local rank's assignment and process.

use super::hang::LastReport;
use crate::{
    gpu::xid::PossibleCause,
    ids::{Generation, Incarnation, Rank},
    message::{RankCommand, RankPhase, Restore},
    time::Time,
};

/// A rank's assignment in a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Assignment {
    pub(super) generation: Generation,
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    pub(super) restore: Restore,
}

impl Assignment {
    /// The command to join this generation.
    pub(super) fn join(&self, paused: bool) -> RankCommand {
        RankCommand::Join {
            generation: self.generation,
            rank: self.rank,
            world_size: self.world_size,
            restore: self.restore.clone(),
            paused,
        }
    }
}

/// The process in a slot.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Process {
    /// No process; `done` if the last one finished its work.
    Empty { done: Option<RankPhase> },
    /// Running.
    Alive { phase: RankPhase },
    /// Asked to exit, and killed at the given time; `None` if it was killed already.
    Stopping { kill_at: Option<Time> },
}

/// A slot: its assignment in the newest generation and its process.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) assignment: Option<Assignment>,
    pub(super) incarnation: Incarnation,
    pub(super) process: Process,
    /// Last report of the process in the newest generation.
    pub(super) last_report: Option<LastReport>,
    /// GPU error that may make the process fail.
    pub(super) possible_cause: PossibleCause,
    /// Set if the process is warmed up without an assignment: whether it is ready.
    pub(super) warm: Option<bool>,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            assignment: None,
            incarnation: Incarnation(0),
            process: Process::Empty { done: None },
            last_report: None,
            possible_cause: PossibleCause::default(),
            warm: None,
        }
    }
}

impl Slot {
    /// The last report, if the process is training and must therefore send heartbeats.
    pub(super) fn watched_report(&self) -> Option<&LastReport> {
        match self.process {
            Process::Alive { phase: RankPhase::Training } => self.last_report.as_ref(),
            _ => None,
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        matches!(self.process, Process::Alive { .. })
    }

    pub(super) fn is_assigned(&self) -> bool {
        self.is_alive() && self.assignment.is_some()
    }

    pub(super) fn kill_at(&self) -> Option<Time> {
        match self.process {
            Process::Stopping { kill_at } => kill_at,
            _ => None,
        }
    }

    pub(super) fn phase(&self) -> Option<&RankPhase> {
        match &self.process {
            Process::Alive { phase } => Some(phase),
            Process::Empty { done } => done.as_ref(),
            Process::Stopping { .. } => None,
        }
    }

    /// Rank and phase in `generation`, for the next hello.
    pub(super) fn hello_entry(&self, generation: Generation) -> Option<(Rank, RankPhase)> {
        let assignment =
            self.assignment.as_ref().filter(|assignment| assignment.generation == generation)?;
        let phase = match &self.process {
            // A new process follows.
            Process::Stopping { .. } => RankPhase::Joining,
            _ => self.phase()?.clone(),
        };
        Some((assignment.rank, phase))
    }
}

impl RankPhase {
    /// Whether its process can join another generation: every process but one that has finished its work and is
    /// exiting.
    pub(super) fn is_reusable(&self) -> bool {
        !matches!(self, Self::Done { .. })
    }
}
