//! Why a process ended, and what follows from it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What the reason of an end says if the newest state is lost; a sweep looks for it in the output of its trials.
pub const NOT_SAVED: &str = "was not saved";

/// Exit code of every Baton process on success.
pub const OK: u8 = 0;
/// Exit code of a job that failed for a reason that a restart may resolve.
pub const FAILED: u8 = 1;
/// Exit code for bad input (a recipe, a file or a flag), for training that diverges, and for a job whose
/// checkpoint store another coordinator has taken over. A scheduler must not requeue the job.
pub const BAD_INPUT: u8 = 2;
/// Exit code after `baton stop`: a user requested the end, so a supervisor must not restart the job.
pub const STOPPED: u8 = 3;
/// Exit code when a budget of the recipe's `limits` is used up: state is saved, and the same command
/// continues the job once the limit is raised. A supervisor must not restart the job.
pub const LIMIT_REACHED: u8 = 4;
/// Exit code after a drain: state is saved, and the same command continues the job (BSD's `EX_TEMPFAIL`).
pub const DRAINED: u8 = 75;

/// The kind of failure that ended a rank; it decides what happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// The recipe, the data or a path is wrong: another try would end the same way.
    BadInput,
    /// Training diverges: another try would end the same way.
    Diverged,
    /// Another coordinator has taken over the checkpoint store: after a restart, each would end the other again.
    TakenOver,
    /// A device or its driver failed.
    Device,
    /// The machine or a device had no memory left.
    OutOfMemory,
    /// A process was killed or crashed.
    Crash,
}

impl Class {
    /// Whether starting the rank again can help.
    #[must_use]
    pub fn is_retriable(self) -> bool {
        !matches!(self, Self::BadInput | Self::Diverged | Self::TakenOver)
    }
}

/// Why a rank ended, as text that a person can act on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Decides whether the job continues.
    pub class: Class,
    /// One line: what, where, what to do.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// The recipe, a flag, a path or the data is wrong: another try would end the same way.
pub fn bad_input(message: impl fmt::Display) -> Failure {
    Failure { class: Class::BadInput, message: message.to_string() }
}

/// Another try may help.
pub fn crash(message: impl fmt::Display) -> Failure {
    Failure { class: Class::Crash, message: message.to_string() }
}

/// A device or its driver failed.
pub fn device(message: impl fmt::Display) -> Failure {
    Failure { class: Class::Device, message: message.to_string() }
}

/// How a job, or an agent's part in it, ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Outcome {
    /// Every epoch is done.
    Completed,
    /// State is saved; the same command continues the job.
    Drained {
        /// Who requested it and why, as text.
        reason: String,
    },
    /// A budget is used up and state is saved; the same command continues the job once the limit is raised.
    LimitReached {
        /// Which limit was reached, and what to do.
        reason: String,
    },
    /// Stopped at once on request, without saving state.
    Stopped,
    /// The job cannot continue.
    Failed {
        /// The failure that ended it.
        failure: Failure,
    },
}

impl Outcome {
    /// The process exit code, from which a scheduler decides what to do.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Completed => OK,
            Self::Drained { .. } => DRAINED,
            Self::LimitReached { .. } => LIMIT_REACHED,
            Self::Stopped => STOPPED,
            Self::Failed { failure } if failure.class.is_retriable() => FAILED,
            Self::Failed { .. } => BAD_INPUT,
        }
    }

    /// Whether a restarted coordinator resumes the job; otherwise it reports the end again.
    #[must_use]
    pub fn is_resumable(&self) -> bool {
        match self {
            Self::Completed => false,
            Self::Failed { failure } => failure.class != Class::TakenOver,
            _ => true,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completed => f.write_str("completed"),
            Self::Drained { reason } => write!(f, "drained ({reason}); the same command continues"),
            Self::LimitReached { reason } => write!(f, "saved and stopped: {reason}"),
            Self::Stopped => f.write_str("stopped on request without a checkpoint"),
            Self::Failed { failure } => write!(f, "failed: {failure}"),
        }
    }
}
