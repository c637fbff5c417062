//! Events and actions of the session.

use crate::{
    exit::{Failure, Outcome},
    gpu::xid::Xid,
    ids::{Incarnation, LocalRank},
    message::{AgentReport, Directive, MachineStats, RankCommand, RankMessage},
    time::Time,
};

/// Input of [`Session::handle`](super::Session::handle).
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The agent is connected to the coordinator.
    Connected,
    /// The connection ended, or an attempt to connect failed.
    Disconnected,
    /// The coordinator is at another address now. A connection to the one before has ended.
    Redirected,
    /// The coordinator sent a directive.
    Directive(Directive),
    /// A rank process sent a message.
    RankReported {
        /// Slot of the process.
        local_rank: LocalRank,
        /// Process number in that slot.
        incarnation: Incarnation,
        /// The message.
        message: RankMessage,
    },
    /// A rank process has loaded its libraries and the job, and waits to join a generation.
    RankWarm {
        /// Slot of the process.
        local_rank: LocalRank,
        /// Process number in that slot.
        incarnation: Incarnation,
    },
    /// A rank process ended.
    RankExited {
        /// Slot of the process.
        local_rank: LocalRank,
        /// Process number in that slot.
        incarnation: Incarnation,
        /// How it ended; ignored if it had already reported that it was done.
        failure: Failure,
    },
    /// A shutdown signal: this node must leave. After a second one its ranks are killed at once.
    ShutdownSignal {
        /// Reason, for people.
        reason: String,
        /// Whether the process has ended that started this agent: the coordinator that it had started too comes back no more.
        is_orphan: bool,
    },
    /// An interruption notice: the machine will be taken away.
    InterruptionNotice {
        /// Reason, for people.
        reason: String,
        /// Time when the machine is taken away, if known.
        end: Option<Time>,
    },
    /// The job has ended while this agent had no coordinator.
    JobOver {
        /// Reason, for people.
        reason: String,
    },
    /// A rebalance recommendation: the machine may soon be taken away, so a checkpoint should be saved.
    CheckpointAdvised {
        /// Reason, for people.
        reason: String,
    },
    /// The driver reported an error of a GPU.
    GpuFailed {
        /// Local ranks that use the GPU or a part of it.
        local_ranks: Vec<LocalRank>,
        /// Name of the GPU, for people.
        gpu: String,
        /// Error number.
        xid: Xid,
    },
    /// A warning about a GPU for the user.
    GpuWarning {
        /// One line: which GPU, what is wrong, what to do.
        message: String,
    },
    /// It is time to send a heartbeat (once a second), with the machine statistics if there are new ones.
    MachineStats(Option<MachineStats>),
    /// The time given by [`Session::deadline`](super::Session::deadline) was reached.
    Tick,
}

/// What the agent must do, in the given order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Open a connection to the coordinator.
    Connect,
    /// Send over the current connection.
    Send(AgentReport),
    /// Start a rank process.
    Spawn {
        /// Slot.
        local_rank: LocalRank,
        /// Process number in that slot.
        incarnation: Incarnation,
    },
    /// Start a spare process, if there is none; the next [`Spawn`](Self::Spawn) uses it.
    KeepSpare,
    /// Send to a rank process.
    SendToRank {
        /// Slot of the process.
        local_rank: LocalRank,
        /// The command.
        command: RankCommand,
    },
    /// Ask a rank process to exit.
    Terminate(LocalRank),
    /// Kill a rank process (SIGKILL to its process group).
    Kill(LocalRank),
    /// Exit; no rank process is left.
    Exit(Outcome),
}
