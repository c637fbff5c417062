//! What watchers are told.

use serde::{Deserialize, Serialize};

use crate::{
    ids::{Generation, Step},
    message::StateSource,
    progress::Progress,
};

/// One thing that happened, for people and scripts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// What kind of thing.
    pub kind: NoticeKind,
    /// In which generation.
    pub generation: Generation,
    /// At which step, where that means something.
    pub step: Option<Step>,
    /// One line in words.
    pub message: String,
}

/// Kinds of notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoticeKind {
    /// An agent attached.
    NodeJoined,
    /// An agent's connection ended.
    NodeLost,
    /// A new generation was opened.
    GenerationOpened,
    /// Training began or went on; says from where.
    TrainingStarted,
    /// An evaluation ended.
    Evaluated,
    /// A checkpoint was committed.
    Saved,
    /// A checkpoint failed; training goes on.
    SaveFailed,
    /// A rank's process ended before it was done.
    RankFailed,
    /// The first step after a failure is done.
    Recovered,
    /// The job is being saved and stopped.
    Draining,
    /// The job is over.
    Ended,
}

/// Says from where training goes on.
pub(super) fn describe_start(source: &StateSource, progress: &Progress) -> String {
    let place = format!("epoch {}, step {}", progress.epoch, progress.step);
    match source {
        StateSource::Fresh => "training from fresh weights".to_owned(),
        StateSource::Survivor { rank } => {
            format!("training goes on at {place} with the state of rank {rank}")
        }
        StateSource::Checkpoint { name, skipped } if skipped.is_empty() => {
            format!("resumed at {place} from checkpoint {name}")
        }
        StateSource::Checkpoint { name, skipped } => {
            format!(
                "resumed at {place} from checkpoint {name}, passing over {}",
                skipped.join("; ")
            )
        }
    }
}
