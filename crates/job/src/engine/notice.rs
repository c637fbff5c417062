//! What watchers are told.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Evaluation, Incident, Recovery};
use crate::{
    ids::{Generation, Rank},
    message::{Commit, LoaderNews, Pulse, Restored, SaveTimes, StateSource},
    plan::Placement,
};
use baton_recipe::{
    Epoch, Step,
    progress::{Extent, Progress},
    task,
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
    /// A node's machine is taken away, and the others go on.
    NodeLeaves,
    /// A node's machine may be taken away soon; a checkpoint is taken.
    Advised,
    /// A node that joined takes part from here on.
    Grows,
    /// A node whose ranks failed again and again is left out for a while.
    NodeRests,
    /// A new generation was opened.
    GenerationOpened,
    /// Training began or went on; says from where.
    TrainingStarted,
    /// An evaluation ended.
    Evaluated,
    /// Training went wrong; says what follows.
    Diverged,
    /// The job completes before its last epoch; says why.
    EndsEarly,
    /// A checkpoint was committed.
    Saved,
    /// A checkpoint waits for another to be written; says for which.
    SaveWaits,
    /// A checkpoint failed; training goes on.
    SaveFailed,
    /// A rank's process ended before it was done.
    RankFailed,
    /// The driver tells of an error of a GPU, or something is wrong with one.
    GpuWarning,
    /// A rank begins to skip samples that it cannot use, or has skipped ten times as many.
    SamplesSkipped,
    /// A rank has been slower than the others for a while, and holds them up.
    Straggler,
    /// The first step after a failure or a planned change of nodes is done; says how long each part took.
    Recovered,
    /// The job is being saved and stopped.
    Draining,
    /// A user lets training stand still.
    Paused,
    /// A user lets training go on.
    Resumed,
    /// A good part of the limits on time or money is used up.
    Budget,
    /// The job is over.
    Ended,
}

/// Says what was saved and what it cost.
pub(super) fn describe_commit(commit: &Commit) -> String {
    let name = &commit.name;
    match commit.took {
        None => format!("checkpoint {name} saved"),
        Some(SaveTimes { stall_seconds, seconds }) => {
            let stall = 1000.0 * stall_seconds;
            format!(
                "checkpoint {name} saved in {seconds:.1} s; training stood still for {stall:.0} ms"
            )
        }
    }
}

/// Says what a checkpoint waits for.
pub(super) fn describe_wait(step: Step, behind: Step, seconds: f64) -> String {
    format!(
        "training waits at step {step}, where a checkpoint is due: that of step {behind} is being written \
         since {seconds:.1} s; a faster store or fewer checkpoints would help"
    )
}

/// Says from where training goes on.
pub(super) fn describe_start(source: &StateSource, progress: &Progress) -> String {
    let place = format!("epoch {}, step {}", progress.epoch, progress.step);
    match source {
        StateSource::Fresh => "training from fresh weights".to_owned(),
        StateSource::Survivor { rank } => {
            format!("training goes on at {place} with the state of rank {rank}")
        }
        StateSource::Checkpoint(restored) => {
            let Restored { name, skipped, changes, world_size, age_seconds, lr, seconds } =
                restored;
            let ranks =
                if *world_size == 1 { "1 rank".to_owned() } else { format!("{world_size} ranks") };
            let best = progress.best.as_ref().map_or(String::new(), |(step, best)| {
                let best = best.metrics.first().map(task::shown).unwrap_or_default();
                format!(", best {best} after step {step}")
            });
            let mut text = format!(
                "resumed in {seconds:.2} s at {place}, sample {} of the epoch, from checkpoint {name}, \
                 written by {ranks} {age_seconds} s ago; learning rate {lr:.3e}{best}",
                progress.cursor
            );
            if !skipped.is_empty() {
                text += &format!("; PASSED OVER: {}", skipped.join("; "));
            }
            if !changes.is_empty() {
                text += &format!("; the recipe was changed: {}", changes.join(", "));
            }
            text
        }
    }
}

/// Says how long a recovery took that has come to its first step, and each part of it if something failed.
pub(super) fn describe_recovery(recovery: &Recovery) -> String {
    let Recovery { cause, planned, lost_steps, .. } = recovery;
    let total = recovery.total().unwrap_or_default().as_secs_f64();
    if *planned {
        return format!("went on after {total:.2} s: {cause}");
    }
    let told = |(name, took): (&str, Option<Duration>)| {
        took.map(|took| format!("{name} {:.2}", took.as_secs_f64()))
    };
    let parts: Vec<String> = recovery.parts().named().into_iter().filter_map(told).collect();
    let (parts, steps) = (parts.join(", "), if *lost_steps == 1 { "step" } else { "steps" });
    format!("recovered in {total:.2} s ({parts}), {lost_steps} {steps} lost: {cause}")
}

/// Says what an evaluation found, and of the averaged weights what they are compared by.
pub(super) fn describe_evaluation(epoch: Epoch, found: &Evaluation) -> String {
    let quick = if found.extent == Extent::Subset { "quick " } else { "" };
    let mut metrics: Vec<String> = found.accuracy.metrics.iter().map(task::shown).collect();
    let averaged = found.ema.as_ref().and_then(|ema| ema.metrics.first());
    if let (Some(first), Some((name, value))) = (metrics.first_mut(), averaged) {
        *first += &format!(" (EMA {})", task::shown_value(name, *value));
    }
    format!("epoch {epoch}: {quick}validation {}", metrics.join(", "))
}

/// Says that training went wrong, what follows, and where more is written.
pub(super) fn describe_divergence(
    incident: &Incident,
    rollbacks: usize,
    most: u32,
    file: &str,
) -> String {
    let which = match incident.rollback {
        Some(_) => format!(" (rollback {rollbacks} of {most})"),
        None => String::new(),
    };
    let (diagnosis, remedy) = (&incident.diagnosis, incident.remedy());
    format!("training went wrong: {diagnosis}; {remedy}{which}; see {file}.md in the run folder")
}

/// Says which rank is slow, and how slow.
pub(super) fn describe_straggler(place: &Placement, pulse: Pulse, slowness: f64) -> String {
    let Placement { rank, node, local_rank } = place;
    let seconds = pulse.own_step_seconds;
    format!(
        "rank {rank} (local rank {local_rank} of node {node}) holds the others up: an update takes it \
         {seconds:.3} s of its own, {slowness:.1} times the median of all ranks"
    )
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
