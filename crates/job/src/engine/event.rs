//! The state machine's inputs and outputs.

use super::{EvaluationResult, JobEvent, Record, WrittenDiagnosis};
use crate::{
    exit::Failure,
    ids::{Attachment, Generation, NodeId},
    message::{AgentReport, Commit, Directive, Hello, RankReport, Restore, StepReport},
};
use baton_recipe::{Step, progress::Progress};

/// Input of the state machine.
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
        /// The connection; ignored if the node has a newer one.
        attachment: Attachment,
    },
    /// An agent sent a report.
    Reported {
        /// The agent's node.
        node: NodeId,
        /// The connection that the report came over.
        attachment: Attachment,
        /// The report.
        report: AgentReport,
    },
    /// A user asks to save and stop the job.
    Drain {
        /// Why, as text.
        reason: String,
    },
    /// A user asks for a checkpoint now.
    Checkpoint,
    /// A user asks to pause training.
    Pause {
        /// Why, as text.
        reason: String,
    },
    /// A user asks to resume training.
    Resume,
    /// A user asks for a profile of the next steps.
    Profile {
        /// Its name in the store.
        name: String,
        /// Number of steps.
        steps: u32,
    },
    /// A user asks to stop the job at once, without saving.
    Stop,
    /// The fence is raised.
    Fenced,
    /// The fence cannot be raised: the store is unavailable, or refuses to be written.
    FenceFailed {
        /// What, where, what to do.
        failure: Failure,
    },
    /// The fence cannot be raised because another coordinator has claimed the checkpoint store.
    TakenOver {
        /// One line: what, where, what to do.
        message: String,
    },
    /// The journal's copy in the checkpoint store could not be written or read.
    JournalCopyFailed {
        /// What, where, what to do.
        problem: String,
    },
    /// This coordinator continues the job of a lost one, with the copy of its journal.
    CoordinatorMoved {
        /// From where to where, for people.
        text: String,
    },
    /// The checkpoint from which the next generation would resume, in answer to [`Action::FindCheckpoint`]; `None` if this
    /// job has saved none, or the store cannot be read. With it comes the position of training, after the evaluation of its
    /// state if there was one.
    CheckpointFound(Option<Box<(Commit, Progress)>>),
    /// The time of [`Engine::deadline`](super::Engine::deadline) is reached.
    Tick,
}

impl Event {
    /// Whether this is one of the frequent reports that only show that a process is alive. They cannot change a
    /// deadline.
    pub(super) fn is_heartbeat(&self) -> bool {
        use RankReport::{Heartbeat, Loader};
        let Self::Reported { report, .. } = self else { return false };
        matches!(
            report,
            AgentReport::Heartbeat(_) | AgentReport::Rank { report: Heartbeat(_) | Loader(_), .. }
        )
    }
}

/// Action that the coordinator program must perform, in the order returned.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Make this record durable before the next action.
    Persist(Record),
    /// Begin to raise the checkpoint store's fence, so that older generations can no longer commit. The result is one of
    /// [`Event::Fenced`], [`Event::FenceFailed`] and [`Event::TakenOver`]; other events may come before. There is never
    /// more than one that has no result yet.
    Fence(Generation),
    /// Look in the checkpoint store for the checkpoint that a next generation would resume from. The result is
    /// [`Event::CheckpointFound`]. There is never more than one that has no result yet.
    FindCheckpoint(Box<Restore>),
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
        /// Why, as text.
        reason: String,
        /// Whether its agent may attach again.
        retry: AgentRetry,
    },
    /// Add a metric point.
    AddPoint(MetricPoint),
    /// Write a diagnosis next to the journal, for people; if that fails, continue.
    WriteDiagnosis(Box<WrittenDiagnosis>),
    /// The profile that a user has asked for is written by so many ranks, or why there is none.
    ProfileEnded(Result<u32, String>),
    /// Publish a job event to all watchers.
    Publish(JobEvent),
}

/// Whether an agent whose connection is refused may attach again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentRetry {
    /// It connects again: it has run ranks of this job, and the reason will soon be gone.
    Reconnect,
    /// It ends, but may be started again: the agent before it may just have been killed.
    Restart,
    /// It ends, because another agent took its place.
    Never,
}

/// A point in the series of metrics, from which curves are drawn.
#[derive(Clone, Debug, PartialEq)]
pub enum MetricPoint {
    /// Training began or continued after this many updates: points recorded before for later updates are obsolete.
    BeganAt(Step),
    /// Metrics of an update.
    Step(StepReport),
    /// An evaluation.
    Evaluation(EvaluationResult),
}
