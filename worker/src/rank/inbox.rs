//! Commands from the agent, for the main thread.
//!
//! Only the newest generation counts. When the agent announces a new one, the collectives of the old one are aborted,
//! so that the main thread does not wait for them.

use std::{os::unix::net::UnixStream, sync::Arc, thread};

use baton_collectives::AbortHandle;
use baton_job::{
    Generation, MeshSecret, Rank,
    message::{RankCommand, RankHeartbeat, Restore},
};
use baton_trainer::Controls;
use parking_lot::{Condvar, Mutex};
use tracing::warn;

use crate::link::{self, ToRank};

/// The rank's assignment in a generation.
#[derive(Clone)]
pub(super) struct GenerationAssignment {
    pub(super) generation: Generation,
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    pub(super) restore: Restore,
    /// Aborts this generation's collectives.
    pub(super) abort: AbortHandle,
    /// Requests from the agent for this generation's step loop, and the step loop's activity.
    pub(super) controls: Arc<Controls>,
}

/// What a rank needs to connect to the others.
#[derive(Clone)]
pub(super) struct Meeting {
    /// Addresses of all ranks.
    pub(super) peers: Vec<String>,
    /// With which the ranks recognise each other.
    pub(super) secret: MeshSecret,
}

impl InboxState {
    /// Whether the node must leave and its agent is not connected to a coordinator, which would let the ranks save; true
    /// once in a generation.
    fn must_leave_alone(&mut self) -> bool {
        let controls = self.assignment.as_ref().map(|assignment| &assignment.controls);
        let must =
            controls.is_some_and(|controls| controls.stops() && controls.has_lost_coordinator());
        must && !std::mem::replace(&mut self.leaves_alone, true)
    }
}

/// What follows for a rank that takes part in no generation.
pub(super) enum Next {
    /// A new generation.
    Join(GenerationAssignment),
    /// The node must leave, and no coordinator opens another generation.
    Leave(GenerationAssignment),
}

/// What follows for a rank that is ready.
pub(super) enum Begin {
    /// It connects to the others.
    Meet(Meeting),
    /// A newer generation was announced.
    Newer,
    /// The node must leave, and its agent is not connected to a coordinator, which would begin this generation.
    Never,
}

/// State of the [`Inbox`].
#[derive(Default)]
struct InboxState {
    /// Assignment in the newest generation.
    assignment: Option<GenerationAssignment>,
    /// Whether the main thread has taken `assignment`.
    taken: bool,
    /// Set once all ranks are ready.
    meeting: Option<Meeting>,
    /// Whether the rank knows that it must leave alone.
    leaves_alone: bool,
}

/// The newest assignment and its commands; shared by the reading thread and the main thread.
#[derive(Clone, Default)]
pub(super) struct Inbox(Arc<(Mutex<InboxState>, Condvar)>);

impl Inbox {
    /// Starts the thread that reads `link`.
    pub(super) fn start(link: UnixStream) -> std::io::Result<Self> {
        let inbox = Self::default();
        let writer = inbox.clone();
        thread::Builder::new().name("inbox".to_owned()).spawn(move || writer.read(&link))?;
        Ok(inbox)
    }

    /// Waits for a generation newer than the last one returned, or until it is known that none will come.
    pub(super) fn next(&self) -> Next {
        let mut state = self.0.0.lock();
        loop {
            if let Some(assignment) = state.assignment.clone()
                && !state.taken
            {
                state.taken = true;
                return Next::Join(assignment);
            }
            if state.must_leave_alone()
                && let Some(assignment) = &mut state.assignment
            {
                // That of the collectives with the others may be used up.
                assignment.abort = AbortHandle::new();
                return Next::Leave(assignment.clone());
            }
            self.0.1.wait(&mut state);
        }
    }

    /// Waits until all ranks of `generation` are ready, or it is known that they will not be.
    pub(super) fn wait_for_begin(&self, generation: Generation) -> Begin {
        let mut state = self.0.0.lock();
        loop {
            let current = state
                .assignment
                .as_ref()
                .is_some_and(|assignment| assignment.generation == generation);
            if !current {
                return Begin::Newer;
            }
            if let Some(meeting) = &state.meeting {
                return Begin::Meet(meeting.clone());
            }
            if state.must_leave_alone() {
                return Begin::Never;
            }
            self.0.1.wait(&mut state);
        }
    }

    /// The current generation and a heartbeat of its step loop, once the main thread has taken the assignment.
    pub(super) fn heartbeat(&self) -> Option<(Generation, RankHeartbeat)> {
        let state = self.0.0.lock();
        let assignment = state.assignment.as_ref().filter(|_| state.taken)?;
        Some((assignment.generation, assignment.controls.activity().heartbeat()))
    }

    fn read(&self, link: &UnixStream) {
        loop {
            match link::read::<ToRank>(link) {
                Ok(Some(ToRank::Command(command))) => self.take(command),
                Ok(Some(other)) => warn!(?other, "ignored an unexpected message"),
                Ok(None) | Err(_) => {
                    // A new agent will start new ranks, and two sets of ranks must never train at the same time.
                    tracing::error!("the agent has ended; this rank exits too");
                    std::process::exit(i32::from(baton_job::exit::FAILED));
                }
            }
        }
    }

    fn take(&self, command: RankCommand) {
        let mut state = self.0.0.lock();
        let current = state.assignment.as_ref().map(|assignment| assignment.generation);
        match command {
            RankCommand::Join { generation, rank, world_size, restore, paused } => {
                if let Some(old) = &state.assignment {
                    old.abort.abort();
                }
                let (abort, controls) = (AbortHandle::new(), Arc::new(Controls::default()));
                controls.set_paused(paused);
                let assignment =
                    GenerationAssignment { generation, rank, world_size, restore, abort, controls };
                *state = InboxState { assignment: Some(assignment), ..InboxState::default() };
            }
            RankCommand::Begin { generation, peers, secret } if current == Some(generation) => {
                state.meeting = Some(Meeting { peers, secret });
            }
            RankCommand::Pause { generation, paused } if current == Some(generation) => {
                if let Some(assignment) = &state.assignment {
                    assignment.controls.set_paused(paused);
                }
            }
            RankCommand::Checkpoint { generation } if current == Some(generation) => {
                if let Some(assignment) = &state.assignment {
                    assignment.controls.request_save();
                }
            }
            RankCommand::CoordinatorLost { generation, lost } if current == Some(generation) => {
                if let Some(assignment) = &state.assignment {
                    assignment.controls.set_coordinator_lost(lost);
                }
            }
            RankCommand::BreakOff { generation } if current == Some(generation) => {
                if let Some(assignment) = &state.assignment
                    && !state.leaves_alone
                    && !assignment.controls.has_agreed_to_stop()
                {
                    warn!(%generation, "the other ranks do not answer, and this node must leave");
                    assignment.abort.abort();
                }
            }
            RankCommand::Profile { generation, request } if current == Some(generation) => {
                if let Some(assignment) = &state.assignment {
                    assignment.controls.request_profile(request);
                }
            }
            RankCommand::Drain { generation, reason } if current == Some(generation) => {
                if let Some(assignment) = &state.assignment {
                    assignment.controls.request_stop(reason);
                }
            }
            stale => warn!(?stale, "ignored a command for another generation"),
        }
        self.0.1.notify_all();
    }
}
