//! What watchers are told.

use serde::{Deserialize, Serialize};

use crate::{
    ids::{Generation, Rank, Step},
    message::{LoaderNews, StateSource},
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
    /// A rank begins to skip samples that it cannot use, or has skipped ten times as many.
    SamplesSkipped,
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

/// Says that a rank loses samples, and what is wrong with the last.
pub(super) fn describe_skips(rank: Rank, news: &LoaderNews) -> String {
    let samples = if news.skipped == 1 { "sample" } else { "samples" };
    let skipped = format!("rank {rank} skipped {} bad {samples}", news.skipped);
    match &news.last_skipped {
        Some(last) => format!("{skipped}; the last: {last}"),
        None => skipped,
    }
}
