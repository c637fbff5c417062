//! Job events, and their texts.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{EvaluationResult, Incident, Recovery};
use crate::{
    ids::{Generation, Rank},
    message::{Commit, LoaderReport, RankHeartbeat, Restored, SaveTimes, StateSource},
    plan::Placement,
};
use baton_recipe::{
    Epoch, Step,
    progress::{Extent, Progress},
    task,
};

/// An event of a job, for people and scripts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobEvent {
    /// What happened.
    pub kind: JobEventKind,
    /// The generation at that time.
    pub generation: Generation,
    /// The step at which it happened, for kinds that have one.
    pub step: Option<Step>,
    /// One line of text.
    pub message: String,
}

/// Kinds of job events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobEventKind {
    /// An agent attached.
    NodeJoined,
    /// An agent's connection ended.
    NodeLost,
    /// A node is leaving, and training continues without it.
    NodeLeaves,
    /// A node's machine may be taken away soon; a checkpoint is being saved.
    CheckpointAdvised,
    /// A node that joined takes part in training from now on.
    NodesAdded,
    /// A node whose ranks failed repeatedly is quarantined.
    NodeQuarantined,
    /// A new generation was opened.
    GenerationOpened,
    /// Training began or continued; the text states from which state.
    TrainingStarted,
    /// An evaluation ended.
    Evaluated,
    /// Training diverged; the text states what was done.
    Diverged,
    /// The job completes before its last epoch; the text states why.
    EndsEarly,
    /// A checkpoint was committed.
    Saved,
    /// Training waits because the previous checkpoint is still being written.
    SaveWaits,
    /// A checkpoint failed; training continues.
    SaveFailed,
    /// The checkpoint store refuses a new generation; it is tried again.
    StoreUnavailable,
    /// A coordinator on another machine continues the job; the text states where.
    CoordinatorMoved,
    /// A rank's process ended before it was done.
    RankFailed,
    /// The driver reported an error of a GPU, or a GPU is unhealthy.
    GpuWarning,
    /// A rank skipped its first unusable sample, or ten times as many as at the last such event.
    SamplesSkipped,
    /// A rank has been slower than the others for some time, and delays them.
    Straggler,
    /// The first step after a failure or a planned change of nodes is done; the text states how long each part took.
    Recovered,
    /// The job is being saved and stopped.
    Draining,
    /// A user paused training.
    Paused,
    /// A user resumed training.
    Resumed,
    /// A large share of the limits on time or money is used up.
    Budget,
    /// The job is over.
    Ended,
}

/// Text for a number of ranks.
pub(super) fn ranks(count: u32) -> String {
    if count == 1 { "1 rank".to_owned() } else { format!("{count} ranks") }
}

/// Text for what ranks do, in the singular and in the plural.
pub(super) fn ranks_that(count: u32, one: &str, many: &str) -> String {
    format!("{} {}", ranks(count), if count == 1 { one } else { many })
}

/// Text for a committed checkpoint: its name, and the time it took.
pub(super) fn describe_commit(commit: &Commit) -> String {
    let mut text = format!("checkpoint {} saved", commit.name);
    if let Some(SaveTimes { stall_seconds, seconds }) = commit.took {
        let stall = 1000.0 * stall_seconds;
        text += &format!(" in {seconds:.1} s; training was blocked for {stall:.0} ms");
    }
    if commit.fence_lost {
        text += "; but not in the store that the coordinator sees, or that store has lost what this job wrote: is its \
                 disk mounted, and checkpoint.dir the same folder on all machines?";
    }
    text
}

/// Text for training that waits for the previous checkpoint.
pub(super) fn describe_save_wait(step: Step, behind: Step, seconds: f64) -> String {
    format!(
        "training waits at step {step}: a checkpoint is due, but the checkpoint of step {behind} is still being \
         written after {seconds:.1} s; use a faster store or save less often"
    )
}

/// Text for the start of training: the state that it starts from.
pub(super) fn describe_start(source: &StateSource, progress: &Progress) -> String {
    let position = format!("epoch {}, step {}", progress.epoch, progress.step);
    match source {
        StateSource::Fresh { skipped } if skipped.is_empty() => {
            "training from fresh weights".to_owned()
        }
        StateSource::Fresh { skipped } => {
            format!("training from fresh weights; SKIPPED: {}", skipped.join("; "))
        }
        StateSource::Survivor { rank } => {
            format!("training continues at {position} with the state of rank {rank}")
        }
        StateSource::Checkpoint(restored) => {
            let Restored {
                name,
                local_of,
                skipped,
                changes,
                world_size,
                age_seconds,
                lr,
                seconds,
                commit: _,
            } = restored;
            let found = match local_of {
                Some(node) => format!("local checkpoint {name} of node {node}"),
                None => format!("checkpoint {name}"),
            };
            let ranks = ranks(*world_size);
            let best = progress.best.as_ref().map_or(String::new(), |(step, best)| {
                let best = best.metrics.first().map(task::display).unwrap_or_default();
                format!(", best {best} after step {step}")
            });
            let mut text = format!(
                "resumed in {seconds:.2} s at {position}, sample {} of the epoch, from {found}, \
                 written by {ranks} {age_seconds} s ago; learning rate {lr:.3e}{best}",
                progress.cursor
            );
            if !skipped.is_empty() {
                text += &format!("; SKIPPED: {}", skipped.join("; "));
            }
            if !changes.is_empty() {
                text += &format!("; the recipe was changed: {}", changes.join(", "));
            }
            text
        }
    }
}

/// Text for a recovery that has reached its first step: the time it took, and after a failure the time of each part.
pub(super) fn describe_recovery(recovery: &Recovery) -> String {
    let Recovery { cause, planned, lost_steps, .. } = recovery;
    let total = recovery.total().unwrap_or_default().as_secs_f64();
    if *planned {
        return format!("training continued after {total:.2} s: {cause}");
    }
    let describe = |(name, took): (&str, Option<Duration>)| {
        took.map(|took| format!("{name} {:.2}", took.as_secs_f64()))
    };
    let parts: Vec<String> = recovery.parts().named().into_iter().filter_map(describe).collect();
    let (parts, steps) = (parts.join(", "), if *lost_steps == 1 { "step" } else { "steps" });
    format!("recovered in {total:.2} s ({parts}), {lost_steps} {steps} lost: {cause}")
}

/// Text for an evaluation: all metrics, and the first metric of the averaged weights.
pub(super) fn describe_evaluation(epoch: Epoch, evaluation: &EvaluationResult) -> String {
    let quick = if evaluation.extent == Extent::Subset { "quick " } else { "" };
    let mut metrics: Vec<String> = evaluation.accuracy.metrics.iter().map(task::display).collect();
    let averaged = evaluation.ema.as_ref().and_then(|ema| ema.metrics.first());
    if let (Some(first), Some((name, value))) = (metrics.first_mut(), averaged) {
        *first += &format!(" (EMA {})", task::display_value(name, *value));
    }
    format!("epoch {epoch}: {quick}validation {}", metrics.join(", "))
}

/// Text for a divergence: the diagnosis, what was done, and the file with details.
pub(super) fn describe_divergence(
    incident: &Incident,
    rollbacks: usize,
    max_rollbacks: u32,
    file: &str,
) -> String {
    let which = match incident.rollback {
        Some(_) => format!(" (rollback {rollbacks} of {max_rollbacks})"),
        None => String::new(),
    };
    let (diagnosis, remedy) = (&incident.diagnosis, incident.remedy());
    format!("training diverged: {diagnosis}; {remedy}{which}; see {file}.md in the run folder")
}

/// Text for a slow rank.
pub(super) fn describe_straggler(
    placement: &Placement,
    heartbeat: RankHeartbeat,
    slowdown: f64,
) -> String {
    let Placement { rank, node, local_rank } = placement;
    let seconds = heartbeat.own_step_seconds;
    format!(
        "rank {rank} (local rank {local_rank} of node {node}) delays the others: its own work takes \
         {seconds:.3} s per step, {slowdown:.1} times the median of all ranks"
    )
}

/// Text for skipped samples: their number, and the error of the last one.
pub(super) fn describe_skips(rank: Rank, report: &LoaderReport) -> String {
    let samples = if report.skipped == 1 { "sample" } else { "samples" };
    let skipped = format!("rank {rank} skipped {} bad {samples}", report.skipped);
    match &report.last_skipped {
        Some(last) => format!("{skipped}; the last: {last}"),
        None => skipped,
    }
}
