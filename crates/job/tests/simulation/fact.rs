//! Facts about each event, for invariants and counts.

use baton_job::{
    Generation, NodeId, engine::Record, exit::Outcome, ids::LocalRank, message::Directive,
};

use crate::{agent::AgentId, process::Pid};

/// One thing that happened in an event.
pub(crate) enum Fact {
    /// The engine handled an event; its status is in the cluster.
    EngineMoved,
    /// A session handled an event.
    SessionMoved(AgentId),
    /// A state machine was woken at its deadline.
    Woke(StateMachine),
    /// A record was written to the journal.
    Persisted(Record),
    /// A record was lost with the coordinator's machine, the newest first.
    Forgotten(Record),
    /// The store's fence was raised.
    FenceRaised(Generation),
    /// The store refused to raise the fence.
    FenceRefused,
    /// The coordinator sent a directive to an agent.
    DirectiveSent(NodeId, Directive),
    /// The coordinator crashed.
    CoordinatorCrashed,
    /// The coordinator was restarted from the journal.
    CoordinatorReplayed,
    /// An agent crashed, with all its ranks.
    AgentCrashed,
    /// An agent exited.
    AgentLeft(AgentId, Outcome),
    /// A rank process was started.
    Spawned {
        slot: (AgentId, LocalRank),
        /// Whether the previous process in this slot had not ended.
        occupied: bool,
    },
    /// An agent ends a rank process.
    Ended {
        pid: Pid,
        /// Whether the process was healthy, had state, and was assigned in the newest generation.
        useful: bool,
        /// Whether the coordinator had it replaced because it seemed to hang.
        replaced: bool,
    },
    /// All ranks of a generation met and agreed on a step.
    Met(Meeting),
    /// Ranks made an update.
    Stepped {
        step: u64,
        /// Generation of each of these ranks.
        generations: Vec<Generation>,
    },
    /// A checkpoint became visible.
    Committed { generation: Generation, step: u64, fence: Generation },
    /// A checkpoint was refused by the fence.
    CommitRefused,
    /// The coordinator, all of whose ranks are gone, has found their last checkpoint.
    CheckpointFound {
        /// Whether it has the end of training.
        is_complete: bool,
    },
    /// A fault, by name.
    Fault(&'static str),
}

/// A state machine of the simulation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum StateMachine {
    Engine,
    Session(AgentId),
}

/// A generation that has met.
pub(crate) struct Meeting {
    pub(crate) generation: Generation,
    /// Slots by rank.
    pub(crate) slots: Vec<(AgentId, LocalRank)>,
    /// Steps of the ranks that had state.
    pub(crate) steps: Vec<u64>,
    /// Step with which training starts.
    pub(crate) start: u64,
    /// Generation that produced the state with which training starts; `None` for fresh weights.
    pub(crate) state_of: Option<Generation>,
}
