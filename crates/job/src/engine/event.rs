//! What goes into the machine, and what comes out of it.

use super::{Evaluation, Notice, Record, WrittenDiagnosis};
use crate::{
    ids::{Attachment, Generation, NodeId},
    message::{Directive, Hello, RankNews, Report, StepNews},
};
use baton_recipe::Step;

/// Input of the machine.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A node's agent connected and introduced itself.
    Attached {
        /// The new connection.
        attachment: Attachment,
        /// The agent's first message.
        hello: Hello,
    },
    /// A connection ended.
    Detached {
        /// The node at its other end.
        node: NodeId,
        /// The connection; an older one than the node's present one changes nothing.
        attachment: Attachment,
    },
    /// An agent reported.
    Reported {
        /// The agent's node.
        node: NodeId,
        /// The connection that the report came over.
        attachment: Attachment,
        /// The report.
        report: Report,
    },
    /// A user wants the job saved and stopped.
    Drain {
        /// Why, in words.
        reason: String,
    },
    /// A user wants a checkpoint now.
    Checkpoint,
    /// A user wants training paused.
    Pause {
        /// Why, in words.
        reason: String,
    },
    /// A user wants training to go on.
    Resume,
    /// A user wants the job stopped at once.
    Stop,
    /// The fence cannot be raised, as another coordinator holds the checkpoint store.
    TakenOver {
        /// One line: what, where, what to do.
        message: String,
    },
    /// The time of [`Engine::deadline`](super::Engine::deadline) has come.
    Tick,
}

impl Event {
    /// Whether it is one of the many that only show that somebody is alive, and can change no deadline.
    pub(super) fn is_sign_of_life(&self) -> bool {
        use RankNews::{Loader, Pulse};
        let Self::Reported { report, .. } = self else { return false };
        matches!(report, Report::Beat(_) | Report::Rank { news: Pulse(_) | Loader(_), .. })
    }
}

/// What the shell must do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Make this durable before going on.
    Persist(Record),
    /// Raise the checkpoint store's fence: older generations can commit no more. If another coordinator holds
    /// the store, leave out the rest of this list and answer with [`Event::TakenOver`].
    Fence(Generation),
    /// Send to an agent.
    Send {
        /// The agent's node.
        node: NodeId,
        /// The connection to send over.
        attachment: Attachment,
        /// The message.
        directive: Directive,
    },
    /// Close a connection.
    Refuse {
        /// The node at its other end.
        node: NodeId,
        /// The connection.
        attachment: Attachment,
        /// Why, in words.
        reason: String,
    },
    /// Note a number for whoever draws curves.
    Measured(Measured),
    /// Write a diagnosis beside the journal, for people; if that cannot be done, go on.
    Write(Box<WrittenDiagnosis>),
    /// Tell everybody who watches.
    Announce(Notice),
}

/// What curves are drawn of.
#[derive(Clone, Debug, PartialEq)]
pub enum Measured {
    /// Training began, or went on, after so many updates: numbers of later ones from before do not count any more.
    BeganAt(Step),
    /// Numbers of an update.
    Step(StepNews),
    /// An evaluation.
    Evaluation(Evaluation),
}
