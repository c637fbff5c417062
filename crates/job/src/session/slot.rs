//! One local rank's place on a node.

use super::hang::Heard;
use crate::{
    gpu::xid::Suspicion,
    ids::{Generation, Incarnation, Rank},
    message::{RankCommand, RankPhase, Restore},
    time::Time,
};

/// A place in a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    pub(super) generation: Generation,
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    pub(super) restore: Restore,
}

impl Seat {
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

/// The process in a place.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Process {
    /// None; `done` if the last one finished its work.
    Empty { done: Option<RankPhase> },
    /// Running.
    Alive { phase: RankPhase },
    /// Asked to end; killed at the time given, or killed already.
    Stopping { kill_at: Option<Time> },
}

/// A place, its seat in the newest generation and its process.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) seat: Option<Seat>,
    pub(super) incarnation: Incarnation,
    pub(super) process: Process,
    /// Of the process, in the newest generation.
    pub(super) heard: Option<Heard>,
    /// What its process may die of.
    pub(super) suspicion: Suspicion,
    /// Its process is to be ready although it has no seat as yet; whether it is.
    pub(super) warm: Option<bool>,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            seat: None,
            incarnation: Incarnation(0),
            process: Process::Empty { done: None },
            heard: None,
            suspicion: Suspicion::default(),
            warm: None,
        }
    }
}

impl Slot {
    /// Who trains has to be heard of.
    pub(super) fn watched(&self) -> Option<&Heard> {
        match self.process {
            Process::Alive { phase: RankPhase::Training } => self.heard.as_ref(),
            _ => None,
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        matches!(self.process, Process::Alive { .. })
    }

    pub(super) fn is_seated(&self) -> bool {
        self.is_alive() && self.seat.is_some()
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

    /// Where its rank stands in `generation`, for the next hello.
    pub(super) fn standing(&self, generation: Generation) -> Option<(Rank, RankPhase)> {
        let seat = self.seat.as_ref().filter(|seat| seat.generation == generation)?;
        let phase = match &self.process {
            // A successor is on its way.
            Process::Stopping { .. } => RankPhase::Joining,
            _ => self.phase()?.clone(),
        };
        Some((seat.rank, phase))
    }
}

impl RankPhase {
    /// Whether its process can take a place in another generation: all but one that has finished
    /// and is leaving.
    pub(super) fn is_reusable(&self) -> bool {
        !matches!(self, Self::Done { .. })
    }
}
