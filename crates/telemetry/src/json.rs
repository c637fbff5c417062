//! What the job's status looks like as JSON, on the command line and in the web dashboard. These are promises to scripts:
//! fields are added, never renamed or removed. Shares are 0..1, durations seconds; what does not exist yet is `null`,
//! as is a number that is infinite or none.

use baton_proto::v1;
use serde::{Deserialize, Deserializer, Serialize};

use crate::names::{activity_name, extent_name, extent_of, kind_name, outcome_name, phase_name};

/// `baton status --json`.
#[derive(Debug, Serialize)]
pub struct Status {
    /// UUID of the job, the same over all restarts.
    pub job_id: String,
    /// The recipe's name.
    pub name: String,
    /// `idle`, `gathering`, `backoff`, `forming`, `meeting`, `training`, `paused`, `settling`, `reattaching`,
    /// `draining` or `ended`.
    pub phase: String,
    /// Why, in words.
    pub reason: String,
    /// For how long it has been in this phase.
    pub phase_seconds: f64,
    /// The newest membership of ranks.
    pub generation: u64,
    /// Passes over the data to make.
    pub epochs: u32,
    /// The latest update.
    pub latest: Option<Step>,
    /// The latest evaluation.
    pub evaluation: Option<Evaluation>,
    /// The best evaluation.
    pub best: Option<Evaluation>,
    /// The last committed checkpoint.
    pub checkpoint: Option<Checkpoint>,
    /// Its age, if this coordinator saw it being committed.
    pub checkpoint_age_seconds: Option<f64>,
    /// The folder that holds the checkpoints.
    pub checkpoint_location: String,
    /// The ranks of the newest generation.
    pub ranks: Vec<Rank>,
    /// All nodes.
    pub nodes: Vec<Node>,
    /// Samples that could not be used and were replaced or left out: by all rank processes heard of
    /// since the coordinator started, also those that are gone.
    pub skipped_samples: u64,
    /// Training that went wrong over the job's whole life, in order: why the step went back.
    pub divergences: Vec<Divergence>,
    /// What the job has cost.
    pub spending: Spending,
    /// The newest 1,000 failures and planned changes of nodes over the job's whole life, oldest first.
    pub recoveries: Vec<Recovery>,
    /// The number of all of them.
    pub recoveries_total: u64,
    /// Messages refused because they came from an older generation or connection.
    pub stale_messages: u64,
    /// Where the state came from that training last began with, in words.
    pub began_with: Option<String>,
    /// Why the newest save failed, if it did.
    pub save_problem: Option<String>,
    /// How far saving and stopping has come, while draining.
    pub drain: Option<Drain>,
    /// Why and for how long training stands still; `null` unless a user asked for that.
    pub pause: Option<Pause>,
    /// When the coordinator's process started, seconds since 1970-01-01 UTC.
    pub coordinator_started_unix_seconds: u64,
    /// Version of the coordinator's program.
    pub coordinator_version: String,
    /// Estimated time to the end, while training.
    pub eta_seconds: Option<f64>,
    /// How the job ended, once it has.
    pub outcome: Option<Outcome>,
}

/// One optimizer update.
#[derive(Debug, Serialize, Deserialize)]
pub struct Step {
    /// Updates made.
    pub step: u64,
    /// Whole passes made.
    pub epoch: u32,
    /// Updates in all.
    pub total_steps: u64,
    /// Batches of the present pass.
    pub steps_per_epoch: u64,
    /// Those of them that are behind, also those that were left out.
    pub step_of_epoch: u64,
    /// Mean loss of the batch.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Top-1 of the batch.
    #[serde(deserialize_with = "number")]
    pub top1: f64,
    /// Learning rate.
    #[serde(deserialize_with = "number")]
    pub lr: f64,
    /// L2 norm of the whole gradient before clipping.
    pub gradient_norm: Option<f64>,
    /// Factor on the loss; of fp16 only.
    pub loss_scale: Option<f64>,
    /// Side of the training images in pixels; 0 for arrays.
    pub resolution: u32,
    /// Samples of a full update.
    pub global_batch: u64,
    /// All ranks together, over the last seconds.
    #[serde(deserialize_with = "number")]
    pub samples_per_second: f64,
    /// Share of time that rank 0 waited for its loader.
    #[serde(deserialize_with = "number")]
    pub loader_wait: f64,
}

/// One evaluation.
#[derive(Debug, Serialize, Deserialize)]
pub struct Evaluation {
    /// After this many updates.
    pub step: u64,
    /// Mean loss.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Share of samples whose first guess is right.
    #[serde(deserialize_with = "number")]
    pub top1: f64,
    /// Share of samples with the label among the first five guesses.
    #[serde(deserialize_with = "number")]
    pub top5: f64,
    /// Number of samples.
    pub samples: u64,
    /// How well a regression fits, whose `top1` and `top5` mean nothing.
    pub fit: Option<Fit>,
    /// What was found with the averaged weights; of the latest evaluation only.
    pub ema: Option<Averaged>,
    /// `full`, or `subset` for a quick look; of the latest evaluation only.
    pub extent: Option<String>,
}

/// How well a regression's outputs fit.
#[derive(Debug, Serialize, Deserialize)]
pub struct Fit {
    /// Mean absolute error, in units of the label.
    #[serde(deserialize_with = "number")]
    pub mae: f64,
    /// Pearson's correlation, -1..1.
    #[serde(deserialize_with = "number")]
    pub pearson: f64,
    /// Spearman's rank correlation, -1..1.
    #[serde(deserialize_with = "number")]
    pub spearman: f64,
}

/// What was found with averaged weights.
#[derive(Debug, Serialize, Deserialize)]
pub struct Averaged {
    /// Mean loss.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Share of samples whose first guess is right.
    #[serde(deserialize_with = "number")]
    pub top1: f64,
    /// Share of samples with the label among the first five guesses.
    #[serde(deserialize_with = "number")]
    pub top5: f64,
    /// How well a regression fits.
    pub fit: Option<Fit>,
}

/// Training that went wrong, and what was done about it.
#[derive(Debug, Serialize)]
pub struct Divergence {
    /// The generation that found it.
    pub generation: u64,
    /// Updates made before it.
    pub step: u64,
    /// The batch's pass over the data, counted from 0.
    pub epoch: u32,
    /// Samples of the pass before the batch.
    pub cursor: u64,
    /// What was found, in words.
    pub cause: String,
    /// What was done, in words.
    pub remedy: String,
    /// The generation that went back, and the first step that is no good; null if the job ended.
    pub rollback: Option<Rollback>,
}

/// A way back.
#[derive(Debug, Serialize)]
pub struct Rollback {
    /// The generation that goes on.
    pub generation: u64,
    /// The first step that is no good.
    pub before: u64,
    /// `lower_lr` or `skip_batch`.
    pub remedy: &'static str,
}

/// Time that machines are paid for, over the job's whole life.
#[derive(Debug, Serialize)]
pub struct Spending {
    /// For how many hours nodes have been attached.
    pub hours: f64,
    /// At how many hours the recipe's limits end the job.
    pub most_hours: Option<f64>,
    /// What the hours cost, if there is a price.
    pub dollars: Option<f64>,
    /// What the whole job will have cost at the present rate, while it trains.
    pub projected_dollars: Option<f64>,
    /// Price of all nodes together, in dollars; `null` without one.
    pub dollars_per_hour: Option<f64>,
    /// What a pass costs at the present rate; `null` without a price and unless training.
    pub dollars_per_epoch: Option<f64>,
    /// Hours of them that brought nothing because of failures and planned changes of nodes.
    pub interruption_hours: f64,
    /// What those cost; `null` without a price.
    pub interruption_dollars: Option<f64>,
    /// Hours of them that training stood still because a user asked for that.
    pub paused_hours: f64,
    /// The share of the limits that is used up; `null` without a limit.
    pub used: Option<f64>,
}

/// One committed checkpoint.
#[derive(Debug, Serialize)]
pub struct Checkpoint {
    /// Name of its folder.
    pub name: String,
    /// The generation that wrote it.
    pub generation: u64,
    /// Updates made.
    pub step: u64,
    /// Size of all its files.
    pub bytes: u64,
    /// Seconds that training stood still for it; `null` where that was not seen.
    pub stall_seconds: Option<f64>,
    /// Seconds from there until it was committed.
    pub save_seconds: Option<f64>,
    /// Top-1, if it was evaluated there.
    pub top1: Option<f64>,
    /// How well a regression fits there.
    pub fit: Option<Fit>,
}

/// A wish to save and stop.
#[derive(Debug, Serialize)]
pub struct Drain {
    /// Why, in words.
    pub reason: String,
    /// Until nobody waits for it any more.
    pub seconds_left: f64,
    /// The update after which all ranks stop, once they have agreed on it.
    pub stop_step: Option<u64>,
    /// From the wish until they had.
    pub agreed_after_seconds: Option<f64>,
    /// From the wish until the state was copied.
    pub copied_after_seconds: Option<f64>,
    /// From the wish until it was durable and committed.
    pub durable_after_seconds: Option<f64>,
}

/// One rank.
#[derive(Debug, Serialize)]
pub struct Rank {
    /// Its number.
    pub rank: u32,
    /// Its node.
    pub node: String,
    /// Its number there.
    pub local_rank: u32,
    /// `starting`, `ready`, `meeting`, `training`, `waiting`, `gone`, `done` or `unheard`.
    pub state: String,
    /// How its loader does, once it has told and while its process lives.
    pub loader: Option<Loader>,
    /// What it did when it was last heard of.
    pub pulse: Option<Pulse>,
    /// Seconds since it was last heard of.
    pub heartbeat_age_seconds: Option<f64>,
    /// Its own time per update, divided by the median over all ranks.
    pub slowness: Option<f64>,
    /// Its GPU; `null` without one, and until its agent has told.
    pub gpu: Option<Gpu>,
}

/// How a GPU does.
#[derive(Debug, Serialize)]
pub struct Gpu {
    /// Its CUDA device on its node.
    pub index: u32,
    /// Its name, as the driver tells it.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// Share of the last second that a kernel ran on it; `null` if it does not tell.
    pub utilisation: Option<f64>,
    /// Bytes of its memory in use, by whomever.
    pub memory_used: u64,
    /// Bytes of its memory in all.
    pub memory_total: u64,
    /// Degrees Celsius; `null` if it does not tell.
    pub celsius: Option<f64>,
    /// Watts that it draws; `null` if it does not tell.
    pub watts: Option<f64>,
}

/// What a rank does.
#[derive(Debug, Serialize)]
pub struct Pulse {
    /// `restoring`, `loading`, `computing`, `exchanging`, `evaluating`, `saving` or `paused`.
    pub activity: String,
    /// Seconds it has been at it.
    pub seconds: f64,
    /// Updates made.
    pub step: u64,
    /// Seconds that an update takes of the rank's own time, exchanges left out; 0 before the first.
    pub own_step_seconds: f64,
}

/// One rank's loader.
#[derive(Debug, Serialize)]
pub struct Loader {
    /// Share of the last seconds that the rank's training waited for it.
    pub wait: f64,
    /// Finished batches that wait for training.
    pub ready: u32,
    /// The most finished batches there can be.
    pub room: u32,
    /// Samples that could not be used, since the rank's process started.
    pub skipped: u64,
    /// What was wrong with the last of them: file, sample and byte.
    pub last_skipped: Option<String>,
}

/// One node.
#[derive(Debug, Serialize)]
pub struct Node {
    /// Its name.
    pub node: String,
    /// Ranks it can run.
    pub slots: u32,
    /// Whether its agent is connected.
    pub attached: bool,
    /// How its machine does; `null` until its agent has told.
    pub host: Option<Host>,
    /// Since its agent was last heard of.
    pub heartbeat_age_seconds: Option<f64>,
    /// What the last answer of the coordinator took to reach it, there and back.
    pub round_trip_seconds: Option<f64>,
}

/// How a machine does.
#[derive(Debug, Serialize)]
pub struct Host {
    /// Its host name.
    pub name: String,
    /// Share of all its cores that is busy.
    pub cpu: f64,
    /// Its cores.
    pub cpus: u32,
    /// Bytes of memory that cannot be had.
    pub memory_used: u64,
    /// Bytes of memory in all.
    pub memory_total: u64,
    /// Bytes free on the disk that holds the run folder.
    pub disk_free: u64,
    /// Its size in bytes.
    pub disk_total: u64,
    /// Bytes received per second over the network, loopback left out.
    pub received_per_second: f64,
    /// Bytes sent per second.
    pub sent_per_second: f64,
}

/// Standing still because a user asked for that.
#[derive(Debug, Serialize)]
pub struct Pause {
    /// Why, in words.
    pub reason: String,
    /// Since it was asked for.
    pub seconds: f64,
}

/// A line of `baton metrics --json`: numbers of an update or an evaluation, or that training began.
#[derive(Debug, Serialize, Deserialize)]
pub struct Point {
    /// When it was told, milliseconds since 1970-01-01 UTC.
    pub unix_millis: u64,
    /// The generation that told it.
    pub generation: u64,
    /// Numbers of an update.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<Step>,
    /// Numbers of an evaluation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<Evaluation>,
    /// Training began, or went on, after so many updates: later ones told before count no more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub began_at: Option<u64>,
}

/// A line of `baton logs --json`.
#[derive(Debug, Serialize)]
pub struct LogLine {
    /// When it was read, milliseconds since 1970-01-01 UTC.
    pub unix_millis: u64,
    /// The node it comes from; `null` for the coordinator.
    pub node: Option<String>,
    /// The place of the rank on its node; `null` for agents and the coordinator.
    pub local_rank: Option<u32>,
    /// The rank that had that place then.
    pub rank: Option<u32>,
    /// The line.
    pub line: String,
    /// Lines left out before this one because there were too many.
    pub left_out: u64,
}

/// A failure or a planned change of nodes, and its recovery. A part of it begins where the one before it ended, and is
/// `null` until it has ended; for good, if the generation that took over failed before its first update.
#[derive(Debug, Serialize)]
pub struct Recovery {
    /// The generation that took over; the one that failed, until another is opened.
    pub generation: u64,
    /// What failed, or which nodes came or went.
    pub cause: String,
    /// Nodes came or went; nothing failed.
    pub planned: bool,
    /// Since the first word of it.
    pub age_seconds: f64,
    /// From that word until the new generation was opened: to hear who died, and a pause before a restart.
    pub settle_seconds: Option<f64>,
    /// Until the ranks that hold state had left the old generation and were ready again.
    pub tear_down_seconds: Option<f64>,
    /// Until the ranks that had to be started were ready too; 0 if there were none.
    pub respawn_seconds: Option<f64>,
    /// Until all ranks had met. If one could not tell, it stays `null` and counts to the next part.
    pub rendezvous_seconds: Option<f64>,
    /// Until all ranks had the state.
    pub restore_seconds: Option<f64>,
    /// Until the first update was done.
    pub first_step_seconds: Option<f64>,
    /// All parts together, once the first update was done.
    pub total_seconds: Option<f64>,
    /// Updates that had to be made again; known once all ranks have the state.
    pub lost_steps: u64,
}

/// How a job ended.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// `completed`, `drained`, `limit_reached`, `stopped` or `failed`.
    pub kind: String,
    /// Why it was drained or failed, or which limit is reached.
    pub reason: Option<String>,
}

/// One event: a line of `baton watch --json`.
#[derive(Debug, Serialize)]
pub struct Event {
    /// Rises by one over the job's whole life; `baton watch --after ID` goes on from it.
    pub id: u64,
    /// When, milliseconds since 1970-01-01 UTC.
    pub unix_millis: u64,
    /// `node_joined`, `node_lost`, `generation_opened`, `training_started`, `evaluated`, `diverged`,
    /// `ends_early`, `saved`, `save_waits`, `save_failed`, `rank_failed`, `gpu_warning`, `straggler`, `samples_skipped`,
    /// `recovered`, `node_leaves`, `advised`, `grows`, `node_rests`, `paused`, `resumed`, `budget`, `draining` or `ended`.
    pub kind: String,
    /// In which generation.
    pub generation: u64,
    /// At which step, where that means something.
    pub step: Option<u64>,
    /// In words.
    pub message: String,
}

impl From<&v1::GetStatusResponse> for Status {
    fn from(status: &v1::GetStatusResponse) -> Self {
        Self {
            job_id: status.job_id.clone(),
            name: status.name.clone(),
            phase: phase_name(status.phase()),
            reason: status.reason.clone(),
            phase_seconds: status.phase_seconds,
            generation: status.generation,
            epochs: status.epochs,
            latest: status.latest.as_ref().map(Into::into),
            evaluation: status.evaluation.as_ref().map(Into::into),
            best: status.best.as_ref().map(Into::into),
            checkpoint: status.checkpoint.as_ref().map(Into::into),
            checkpoint_age_seconds: status.checkpoint_age_seconds,
            checkpoint_location: status.checkpoint_location.clone(),
            ranks: status.ranks.iter().map(Into::into).collect(),
            nodes: status.nodes.iter().map(Into::into).collect(),
            skipped_samples: status.skipped_samples,
            divergences: status.incidents.iter().map(Into::into).collect(),
            spending: status.spending.unwrap_or_default().into(),
            recoveries: status.recoveries.iter().map(Into::into).collect(),
            recoveries_total: status.recoveries_total,
            stale_messages: status.stale_messages,
            began_with: status.began_with.clone(),
            save_problem: status.save_problem.clone(),
            drain: status.drain.clone().map(Into::into),
            pause: status.pause.clone().map(Into::into),
            coordinator_started_unix_seconds: status.coordinator_started_unix_seconds,
            coordinator_version: status.coordinator_version.clone(),
            eta_seconds: status.eta_seconds,
            outcome: status.outcome.as_ref().map(Into::into),
        }
    }
}

impl From<&v1::Step> for Step {
    fn from(step: &v1::Step) -> Self {
        Self {
            step: step.step,
            epoch: step.epoch,
            total_steps: step.total_steps,
            steps_per_epoch: step.steps_per_epoch,
            step_of_epoch: step.step_of_epoch,
            loss: step.loss,
            top1: step.top1,
            lr: step.lr,
            gradient_norm: step.gradient_norm,
            loss_scale: step.loss_scale,
            resolution: step.resolution,
            global_batch: step.global_batch,
            samples_per_second: step.samples_per_second,
            loader_wait: step.loader_wait,
        }
    }
}

impl From<&v1::EvaluatedStep> for Evaluation {
    fn from(evaluated: &v1::EvaluatedStep) -> Self {
        let v1::Accuracy { loss, top1, top5, samples, fit } =
            evaluated.accuracy.unwrap_or_default();
        Self {
            step: evaluated.step,
            loss,
            top1,
            top5,
            samples,
            fit: fit.map(Into::into),
            ema: evaluated.ema.map(Into::into),
            extent: extent_name(evaluated.extent()),
        }
    }
}

impl From<v1::Fit> for Fit {
    fn from(v1::Fit { mae, pearson, spearman }: v1::Fit) -> Self {
        Self { mae, pearson, spearman }
    }
}

impl From<v1::Accuracy> for Averaged {
    fn from(v1::Accuracy { loss, top1, top5, fit, .. }: v1::Accuracy) -> Self {
        Self { loss, top1, top5, fit: fit.map(Into::into) }
    }
}

impl From<baton_recipe::progress::Fit> for Fit {
    fn from(fit: baton_recipe::progress::Fit) -> Self {
        let baton_recipe::progress::Fit { mae, pearson, spearman } = fit;
        Self { mae, pearson, spearman }
    }
}

impl From<baton_recipe::progress::Accuracy> for Averaged {
    fn from(accuracy: baton_recipe::progress::Accuracy) -> Self {
        let baton_recipe::progress::Accuracy { loss, top1, top5, fit, .. } = accuracy;
        Self { loss, top1, top5, fit: fit.map(Into::into) }
    }
}

impl From<&v1::Incident> for Divergence {
    fn from(incident: &v1::Incident) -> Self {
        let diagnosis = incident.diagnosis.clone().unwrap_or_default();
        let v1::BatchMark { epoch, cursor } = diagnosis.batch.unwrap_or_default();
        Self {
            generation: incident.generation,
            step: diagnosis.step,
            epoch,
            cursor,
            cause: incident.cause.clone(),
            remedy: incident.remedy.clone(),
            rollback: incident.rollback.map(Into::into),
        }
    }
}

impl From<v1::Rollback> for Rollback {
    fn from(v1::Rollback { generation, before, skip }: v1::Rollback) -> Self {
        let remedy = if skip.is_some() { "skip_batch" } else { "lower_lr" };
        Self { generation, before, remedy }
    }
}

impl From<v1::Spending> for Spending {
    fn from(spending: v1::Spending) -> Self {
        let v1::Spending {
            hours,
            most_hours,
            dollars,
            projected_dollars,
            dollars_per_hour,
            dollars_per_epoch,
            interruption_hours,
            interruption_dollars,
            paused_hours,
            used,
        } = spending;
        Self {
            hours,
            most_hours,
            dollars,
            projected_dollars,
            dollars_per_hour,
            dollars_per_epoch,
            interruption_hours,
            interruption_dollars,
            paused_hours,
            used,
        }
    }
}

impl From<&v1::Checkpoint> for Checkpoint {
    fn from(checkpoint: &v1::Checkpoint) -> Self {
        let v1::Checkpoint { name, generation, step, accuracy, bytes, took } = checkpoint;
        Self {
            name: name.clone(),
            generation: *generation,
            step: *step,
            bytes: *bytes,
            stall_seconds: took.map(|took| took.stall_seconds),
            save_seconds: took.map(|took| took.seconds),
            top1: accuracy.map(|accuracy| accuracy.top1),
            fit: accuracy.and_then(|accuracy| accuracy.fit).map(Into::into),
        }
    }
}

impl From<&v1::RankStatus> for Rank {
    fn from(status: &v1::RankStatus) -> Self {
        let v1::RankStatus {
            rank,
            node_id,
            local_rank,
            state,
            loader,
            pulse,
            heartbeat_age_seconds,
            slowness,
            gpu,
        } = status.clone();
        Self {
            rank,
            node: node_id,
            local_rank,
            state,
            loader: loader.map(Into::into),
            pulse: pulse.map(Into::into),
            heartbeat_age_seconds,
            slowness,
            gpu: gpu.map(Into::into),
        }
    }
}

impl From<v1::DrainStatus> for Drain {
    fn from(status: v1::DrainStatus) -> Self {
        let v1::DrainStatus {
            reason,
            seconds_left,
            stop_step,
            agreed_after_seconds,
            copied_after_seconds,
            durable_after_seconds,
        } = status;
        Self {
            reason,
            seconds_left,
            stop_step,
            agreed_after_seconds,
            copied_after_seconds,
            durable_after_seconds,
        }
    }
}

impl From<v1::Pulse> for Pulse {
    fn from(pulse: v1::Pulse) -> Self {
        let activity = activity_name(pulse.activity());
        let v1::Pulse { seconds, step, own_step_seconds, .. } = pulse;
        Self { activity, seconds, step, own_step_seconds }
    }
}

impl From<v1::Loader> for Loader {
    fn from(loader: v1::Loader) -> Self {
        let v1::Loader { wait, ready, room, skipped, last_skipped } = loader;
        Self { wait, ready, room, skipped, last_skipped }
    }
}

impl From<&v1::NodeStatus> for Node {
    fn from(status: &v1::NodeStatus) -> Self {
        let v1::NodeStatus {
            node_id,
            slots,
            attached,
            host,
            heartbeat_age_seconds,
            round_trip_seconds,
        } = status.clone();
        Self {
            node: node_id,
            slots,
            attached,
            host: host.map(Into::into),
            heartbeat_age_seconds,
            round_trip_seconds,
        }
    }
}

impl From<&v1::Recovery> for Recovery {
    fn from(recovery: &v1::Recovery) -> Self {
        Self {
            generation: recovery.generation,
            cause: recovery.cause.clone(),
            planned: recovery.planned,
            age_seconds: recovery.age_seconds,
            settle_seconds: recovery.settle_seconds,
            tear_down_seconds: recovery.tear_down_seconds,
            respawn_seconds: recovery.respawn_seconds,
            rendezvous_seconds: recovery.rendezvous_seconds,
            restore_seconds: recovery.restore_seconds,
            first_step_seconds: recovery.first_step_seconds,
            total_seconds: recovery.total_seconds,
            lost_steps: recovery.lost_steps,
        }
    }
}

impl From<&v1::Outcome> for Outcome {
    fn from(outcome: &v1::Outcome) -> Self {
        let failure = outcome.failure.as_ref().map(|failure| failure.message.clone());
        let reason = failure.or_else(|| Some(outcome.reason.clone()).filter(|r| !r.is_empty()));
        Self { kind: outcome_name(outcome.kind()), reason }
    }
}

impl From<&v1::WatchEventsResponse> for Event {
    fn from(event: &v1::WatchEventsResponse) -> Self {
        Self {
            id: event.id,
            unix_millis: event.unix_millis,
            kind: kind_name(event.kind()),
            generation: event.generation,
            step: event.step,
            message: event.message.clone(),
        }
    }
}

impl From<v1::Gpu> for Gpu {
    fn from(gpu: v1::Gpu) -> Self {
        let v1::Gpu { index, name, uuid, utilisation, memory_used, memory_total, celsius, watts } =
            gpu;
        Self { index, name, uuid, utilisation, memory_used, memory_total, celsius, watts }
    }
}

impl From<v1::Host> for Host {
    fn from(host: v1::Host) -> Self {
        let v1::Host {
            name,
            cpu,
            cpus,
            memory_used,
            memory_total,
            disk_free,
            disk_total,
            received_per_second,
            sent_per_second,
        } = host;
        Self {
            name,
            cpu,
            cpus,
            memory_used,
            memory_total,
            disk_free,
            disk_total,
            received_per_second,
            sent_per_second,
        }
    }
}

impl From<v1::PauseStatus> for Pause {
    fn from(v1::PauseStatus { reason, seconds }: v1::PauseStatus) -> Self {
        Self { reason, seconds }
    }
}

impl From<&v1::StreamMetricsResponse> for Point {
    fn from(point: &v1::StreamMetricsResponse) -> Self {
        use v1::stream_metrics_response::Metrics;
        let v1::StreamMetricsResponse { unix_millis, generation, metrics } = point;
        let (mut step, mut evaluation, mut began_at) = (None, None, None);
        match metrics {
            Some(Metrics::Step(told)) => step = Some(told.into()),
            Some(Metrics::Evaluation(told)) => evaluation = Some(told.into()),
            Some(Metrics::BeganAt(told)) => began_at = Some(*told),
            None => {}
        }
        Self { unix_millis: *unix_millis, generation: *generation, step, evaluation, began_at }
    }
}

/// A number that is infinite or none was written as `null`; it is read as none.
fn number<'de, D: Deserializer<'de>>(input: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(input)?.unwrap_or(f64::NAN))
}

impl From<Step> for v1::Step {
    fn from(step: Step) -> Self {
        Self {
            step: step.step,
            epoch: step.epoch,
            total_steps: step.total_steps,
            steps_per_epoch: step.steps_per_epoch,
            step_of_epoch: step.step_of_epoch,
            loss: step.loss,
            top1: step.top1,
            lr: step.lr,
            gradient_norm: step.gradient_norm,
            loss_scale: step.loss_scale,
            resolution: step.resolution,
            global_batch: step.global_batch,
            samples_per_second: step.samples_per_second,
            loader_wait: step.loader_wait,
        }
    }
}

impl From<Fit> for v1::Fit {
    fn from(Fit { mae, pearson, spearman }: Fit) -> Self {
        Self { mae, pearson, spearman }
    }
}

impl From<Evaluation> for v1::EvaluatedStep {
    fn from(evaluation: Evaluation) -> Self {
        let Evaluation { step, loss, top1, top5, samples, fit, ema, extent } = evaluation;
        let fit = fit.map(Into::into);
        // Both kinds of weights look at the same samples.
        let ema = ema.map(|Averaged { loss, top1, top5, fit }| v1::Accuracy {
            loss,
            top1,
            top5,
            samples,
            fit: fit.map(Into::into),
        });
        Self {
            step,
            accuracy: Some(v1::Accuracy { loss, top1, top5, samples, fit }),
            ema,
            extent: extent_of(extent.as_deref()).into(),
        }
    }
}

impl From<Point> for v1::StreamMetricsResponse {
    fn from(point: Point) -> Self {
        use v1::stream_metrics_response::Metrics;
        let Point { unix_millis, generation, step, evaluation, began_at } = point;
        let metrics = step
            .map(|step| Metrics::Step(step.into()))
            .or_else(|| evaluation.map(|evaluation| Metrics::Evaluation(evaluation.into())))
            .or_else(|| began_at.map(Metrics::BeganAt));
        Self { unix_millis, generation, metrics }
    }
}

impl From<&v1::StreamLogsResponse> for LogLine {
    fn from(line: &v1::StreamLogsResponse) -> Self {
        let v1::StreamLogsResponse { unix_millis, node_id, local_rank, rank, line, left_out } =
            line.clone();
        let node = (!node_id.is_empty()).then_some(node_id);
        Self { unix_millis, node, local_rank, rank, line, left_out }
    }
}
