//! Converts the engine's status to the message that users receive.

use std::{collections::HashMap, sync::Arc, time::Duration};

use baton_job::{
    JobId, NodeId, Time,
    engine::{
        DrainStatus, Incident, JobEventKind, NodeStatus, PhaseName, RankStatus, Recovery, Status,
    },
    message::{GpuStats, MachineStats},
};

use super::same_variants;
use crate::v1;

same_variants!(
    JobEventKind,
    v1::watch_events_response::Kind,
    [
        NodeJoined,
        NodeLost,
        GenerationOpened,
        TrainingStarted,
        Evaluated,
        Saved,
        SaveWaits,
        SaveFailed,
        StoreUnavailable,
        CoordinatorMoved,
        RankFailed,
        GpuWarning,
        Diverged,
        EndsEarly,
        SamplesSkipped,
        Straggler,
        NodeLeaves,
        CheckpointAdvised,
        NodesAdded,
        NodeQuarantined,
        Recovered,
        Draining,
        Paused,
        Resumed,
        Budget,
        Ended,
    ]
);

same_variants!(
    PhaseName,
    v1::get_status_response::Phase,
    [
        Gathering,
        Backoff,
        Forming,
        Meeting,
        Training,
        Paused,
        Detecting,
        Reattaching,
        Draining,
        Ended
    ]
);

/// Properties of the job that the engine does not have.
#[derive(Clone, Copy, Debug)]
pub struct JobInfo<'a> {
    /// The job's UUID.
    pub id: JobId,
    /// The recipe's name.
    pub name: &'a str,
    /// Path or URL of the checkpoint store.
    pub checkpoint_location: &'a str,
    /// Time since the last checkpoint was committed, seconds; `None` before the first one since this coordinator
    /// started.
    pub checkpoint_age_seconds: Option<f64>,
    /// When the coordinator's process started, seconds since 1970-01-01 UTC.
    pub coordinator_started_unix_seconds: u64,
    /// Version of the coordinator's program.
    pub coordinator_version: &'a str,
}

/// The status message, from the engine's status.
#[must_use]
pub fn status(status: &Status, now: Time, job: JobInfo<'_>) -> v1::GetStatusResponse {
    v1::GetStatusResponse {
        job_id: job.id.to_string(),
        name: job.name.to_owned(),
        phase: v1::get_status_response::Phase::from(status.phase).into(),
        reason: status.reason.clone(),
        phase_seconds: seconds(status.since, now),
        generation: status.generation.0,
        began_with: status.began_with.clone(),
        save_problem: status.save_problem.clone(),
        epochs: status.epochs,
        latest: status.latest.clone().map(Into::into),
        evaluation: status.evaluation.clone().map(Into::into),
        best: status.best.clone().map(Into::into),
        checkpoint: status.commit.clone().map(Into::into),
        checkpoint_age_seconds: job.checkpoint_age_seconds,
        checkpoint_location: job.checkpoint_location.to_owned(),
        local_checkpoint: status.local.as_ref().map(|local| v1::LocalCheckpoint {
            step: local.step.0,
            nodes: local.nodes.iter().map(ToString::to_string).collect(),
            seconds: local.seconds,
        }),
        ranks: ranks(status, now),
        nodes: status.nodes.iter().map(|node| node_status(node, now)).collect(),
        skipped_samples: status.skipped_samples,
        recoveries: status.recoveries.iter().map(|entry| recovery(entry, now)).collect(),
        recoveries_total: status.recoveries_total,
        incidents: status.incidents.iter().map(Into::into).collect(),
        invalidated_checkpoints: status.invalidated.iter().map(Into::into).collect(),
        spending: Some(spending(status, now)),
        eta_seconds: status.eta_seconds(),
        stale_messages: status.stale_messages,
        drain: status.drain.as_ref().map(|drain| drain_status(drain, now)),
        pause: status.pause.as_ref().map(|pause| v1::PauseStatus {
            reason: pause.reason.clone(),
            seconds: seconds(pause.since, now),
        }),
        evaluating: status.evaluating.map(Into::into),
        outcome: status.outcome.clone().map(Into::into),
        coordinator_started_unix_seconds: job.coordinator_started_unix_seconds,
        coordinator_version: job.coordinator_version.to_owned(),
    }
}

fn spending(status: &Status, now: Time) -> v1::Spending {
    let time = status.spending.meter.read(now);
    let budget = status.spending.budget;
    let interrupted = status.spending.interrupted.read(time);
    let hours = |time: Duration| time.as_secs_f64() / 3_600.0;
    v1::Spending {
        hours: hours(time),
        most_hours: budget.limit().map(hours),
        dollars: budget.dollars_at(time),
        projected_dollars: status.projected_dollars(now),
        dollars_per_hour: budget.dollars_per_hour,
        dollars_per_epoch: status.dollars_per_epoch(),
        interruption_hours: hours(interrupted),
        interruption_dollars: budget.dollars_of_part(interrupted, time),
        paused_hours: hours(status.spending.paused.read(time)),
        used: budget.used(time),
    }
}

impl From<&Incident> for v1::Incident {
    fn from(incident: &Incident) -> Self {
        Self {
            generation: incident.generation.0,
            diagnosis: Some(incident.diagnosis.clone().into()),
            cause: incident.diagnosis.to_string(),
            rollback: incident.rollback.clone().map(Into::into),
            remedy: incident.remedy(),
        }
    }
}

fn drain_status(drain: &DrainStatus, now: Time) -> v1::DrainStatus {
    let after = |at: Option<Time>| at.map(|at| seconds(drain.since, at));
    v1::DrainStatus {
        reason: drain.reason.clone(),
        seconds_left: seconds(now, drain.until),
        stop_step: drain.stop_step.map(|step| step.0),
        agreed_after_seconds: after(drain.agreed_at),
        copied_after_seconds: after(drain.copied_at),
        durable_after_seconds: after(drain.durable_at),
    }
}

/// Status of the ranks, each with the GPU of its local rank.
fn ranks(status: &Status, now: Time) -> Vec<v1::RankStatus> {
    let stats = status.nodes.iter().filter_map(|node| Some((&node.node, node.stats.as_ref()?)));
    let stats: HashMap<&NodeId, &Arc<MachineStats>> = stats.collect();
    let with_gpu = |rank: &RankStatus| {
        let gpus = stats.get(&rank.node).map_or(&[][..], |stats| &stats.gpus);
        rank_status(rank, gpus.iter().find(|gpu| gpu.index == rank.local_rank.0), now)
    };
    status.ranks.iter().map(with_gpu).collect()
}

fn rank_status(status: &RankStatus, gpu: Option<&GpuStats>, now: Time) -> v1::RankStatus {
    v1::RankStatus {
        rank: status.rank.0,
        node_id: status.node.0.clone(),
        local_rank: status.local_rank.0,
        state: status.state.name().to_owned(),
        loader: status.loader.clone().map(Into::into),
        heartbeat: status.heartbeat.map(Into::into),
        heartbeat_age_seconds: status.heartbeat_at.map(|at| seconds(at, now)),
        slowdown: status.slowdown,
        gpu: gpu.cloned().map(Into::into),
    }
}

fn node_status(status: &NodeStatus, now: Time) -> v1::NodeStatus {
    let NodeStatus { node, slots, attached, stats, heartbeat_at, round_trip } = status;
    v1::NodeStatus {
        node_id: node.0.clone(),
        slots: *slots,
        attached: *attached,
        host: stats.as_ref().map(|stats| stats.host.clone().into()),
        heartbeat_age_seconds: heartbeat_at.map(|at| seconds(at, now)),
        round_trip_seconds: round_trip.map(|time| time.as_secs_f64()),
    }
}

fn recovery(recovery: &Recovery, now: Time) -> v1::Recovery {
    let seconds_of = |took: Option<Duration>| took.map(|took| took.as_secs_f64());
    let parts = recovery.parts();
    v1::Recovery {
        generation: recovery.generation.0,
        cause: recovery.cause.clone(),
        detect_seconds: seconds_of(parts.detect),
        tear_down_seconds: seconds_of(parts.tear_down),
        respawn_seconds: seconds_of(parts.respawn),
        rendezvous_seconds: seconds_of(parts.rendezvous),
        restore_seconds: seconds_of(parts.restore),
        first_step_seconds: seconds_of(parts.first_step),
        total_seconds: seconds_of(recovery.total()),
        lost_steps: recovery.lost_steps,
        planned: recovery.planned,
        age_seconds: seconds(recovery.lost_at, now),
    }
}

fn seconds(from: Time, to: Time) -> f64 {
    to.since(from).as_secs_f64()
}
