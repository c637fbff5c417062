//! What goes into the machine, and what comes out of it.

use crate::{
    exit::{Failure, Outcome},
    gpu::xid::Xid,
    ids::{Incarnation, LocalRank},
    message::{Directive, RankCommand, RankSays, Report, Vitals},
    time::Time,
};

/// Input of the machine.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A connection to the coordinator stands.
    Connected,
    /// The connection ended, or none could be made.
    Disconnected,
    /// The coordinator sent something.
    Directed(Directive),
    /// A rank process sent something.
    RankSaid {
        /// The process's place.
        local_rank: LocalRank,
        /// The process's number in that place.
        incarnation: Incarnation,
        /// The message.
        says: RankSays,
    },
    /// A rank process has loaded all it needs and waits for a place in a generation.
    RankWarm {
        /// The process's place.
        local_rank: LocalRank,
        /// The process's number in that place.
        incarnation: Incarnation,
    },
    /// A rank process ended.
    RankExited {
        /// The process's place.
        local_rank: LocalRank,
        /// The process's number in that place.
        incarnation: Incarnation,
        /// How it ended, unless it said that it was done.
        failure: Failure,
    },
    /// A signal: this node must go. The second one means at once.
    MustGo {
        /// Why, in words.
        reason: String,
    },
    /// Whoever owns the machine takes it away.
    Noticed {
        /// Why, in words.
        reason: String,
        /// When, if that is known.
        end: Option<Time>,
    },
    /// Whoever owns the machine may soon take it away: what is not saved is in danger.
    Advised {
        /// Why, in words.
        reason: String,
    },
    /// The driver tells of an error of a GPU.
    GpuFailed {
        /// The ranks that have it, or a part of it.
        local_ranks: Vec<LocalRank>,
        /// Its name, for people.
        gpu: String,
        /// The error.
        xid: Xid,
    },
    /// Something about a GPU that its user should know.
    GpuWarning {
        /// One line: which GPU, what is wrong, what to do.
        message: String,
    },
    /// How the machine does; once a second, to be reported.
    Vitals(Option<Vitals>),
    /// The time of [`Session::deadline`](super::Session::deadline) has come.
    Tick,
}

/// What the shell must do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Open a connection to the coordinator.
    Connect,
    /// Send over the present connection.
    Send(Report),
    /// Start a rank process.
    Spawn {
        /// Its place.
        local_rank: LocalRank,
        /// Its number in that place.
        incarnation: Incarnation,
    },
    /// Have a process ready that the next [`Spawn`](Self::Spawn) takes, if there is none.
    KeepSpare,
    /// Send to a rank process.
    Tell {
        /// Its place.
        local_rank: LocalRank,
        /// The command.
        command: RankCommand,
    },
    /// Ask a rank process to end.
    Terminate(LocalRank),
    /// End a rank process (SIGKILL to its group).
    Kill(LocalRank),
    /// Leave; no rank process is left.
    Exit(Outcome),
}
