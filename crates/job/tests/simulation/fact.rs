//! What happened, for invariants and counts.

use baton_job::{Generation, engine::Record, exit::Outcome, ids::LocalRank, message::Directive};

use crate::{agent::AgentId, process::Pid};

/// One thing that happened in one event.
pub(crate) enum Fact {
    /// The coordinator's machine handled an event; its status is in the cluster.
    EngineMoved,
    /// An agent's machine handled an event.
    SessionMoved(AgentId),
    /// A machine was woken at the time it had asked for.
    Woke(Machine),
    /// The journal took a record.
    Persisted(Record),
    /// The store's fence was raised.
    FenceRaised(Generation),
    /// The coordinator said something to an agent.
    Told(Directive),
    /// A coordinator died.
    CoordinatorDied,
    /// A coordinator was built from the journal.
    CoordinatorReplayed,
    /// An agent died, with all its ranks.
    AgentDied,
    /// An agent left of its own will.
    AgentLeft(AgentId, Outcome),
    /// A rank process was started.
    Spawned {
        place: (AgentId, LocalRank),
        /// The one before in this place had not ended.
        crowded: bool,
    },
    /// An agent ends a rank process.
    Ended {
        pid: Pid,
        /// It was told to take a place in the newest generation and could have.
        wanted: bool,
        /// The coordinator took it for hanging.
        replaced: bool,
    },
    /// All ranks of a generation met and agreed on a step.
    Met(Meeting),
    /// Ranks made an update.
    Stepped {
        step: u64,
        /// The generation in which each of them is.
        generations: Vec<Generation>,
    },
    /// A checkpoint became visible.
    Committed { generation: Generation, step: u64, fence: Generation },
    /// A checkpoint was refused by the fence.
    CommitRefused,
    /// A fault, by name.
    Fault(&'static str),
}

/// Who waits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Machine {
    Engine,
    Session(AgentId),
}

/// A generation that has met.
pub(crate) struct Meeting {
    pub(crate) generation: Generation,
    /// By rank.
    pub(crate) places: Vec<(AgentId, LocalRank)>,
    /// The steps of those that held state.
    pub(crate) held: Vec<u64>,
    /// The step they agreed on.
    pub(crate) start: u64,
    /// The generation that came to the state they take; none of fresh weights.
    pub(crate) state_of: Option<Generation>,
}
