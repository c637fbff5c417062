//! What users see.

use std::{collections::HashMap, sync::Arc, time::Duration};

use baton_job::{
    JobId, NodeId, Time,
    engine::{
        DrainStatus, Incident, NodeStatus, NoticeKind, PhaseName, RankStatus, Recovery, Status,
    },
    message::{Gpu, Vitals},
};

use super::same_variants;
use crate::v1;

same_variants!(
    NoticeKind,
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
        RankFailed,
        GpuWarning,
        Diverged,
        EndsEarly,
        SamplesSkipped,
        Straggler,
        NodeLeaves,
        Advised,
        Grows,
        NodeRests,
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
        Settling,
        Reattaching,
        Draining,
        Ended
    ]
);

/// What the machine does not know of its job.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// Its UUID.
    pub id: JobId,
    /// The recipe's name.
    pub name: &'a str,
    /// Folder of the checkpoint store.
    pub checkpoint_location: &'a str,
    /// Seconds since the last committed checkpoint, if this coordinator saw one.
    pub checkpoint_age_seconds: Option<f64>,
    /// When the coordinator's process started, seconds since 1970-01-01 UTC.
    pub coordinator_started_unix_seconds: u64,
    /// Version of the coordinator's program.
    pub coordinator_version: &'a str,
}

/// The machine's state as users see it.
#[must_use]
pub fn status(status: &Status, now: Time, job: Job<'_>) -> v1::GetStatusResponse {
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
        ranks: ranks(status, now),
        nodes: status.nodes.iter().map(|node| node_status(node, now)).collect(),
        skipped_samples: status.skipped_samples,
        recoveries: status.recoveries.iter().map(|one| recovery(one, now)).collect(),
        recoveries_total: status.recoveries_total,
        incidents: status.incidents.iter().map(Into::into).collect(),
        spending: Some(spending(status, now)),
        eta_seconds: status.eta_seconds(),
        stale_messages: status.stale_messages,
        drain: status.drain.as_ref().map(|drain| drain_status(drain, now)),
        pause: status.pause.as_ref().map(|pause| v1::PauseStatus {
            reason: pause.reason.clone(),
            seconds: seconds(pause.since, now),
        }),
        outcome: status.outcome.clone().map(Into::into),
        coordinator_started_unix_seconds: job.coordinator_started_unix_seconds,
        coordinator_version: job.coordinator_version.to_owned(),
    }
}

fn spending(status: &Status, now: Time) -> v1::Spending {
    let time = status.spending.meter.read(now);
    let interrupted = status.spending.interrupted.read(time);
    let hours = |time: Duration| time.as_secs_f64() / 3_600.0;
    v1::Spending {
        hours: hours(time),
        most_hours: status.spending.most.map(hours),
        dollars: status.spending.dollars(time),
        projected_dollars: status.projected_dollars(now),
        dollars_per_hour: status.spending.dollars_per_hour,
        dollars_per_epoch: status.dollars_per_epoch(),
        interruption_hours: hours(interrupted),
        interruption_dollars: status.spending.dollars(interrupted),
        paused_hours: hours(status.spending.paused.read(time)),
        used: status
            .spending
            .most
            .map(|most| if most.is_zero() { 1.0 } else { time.as_secs_f64() / most.as_secs_f64() }),
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

/// Each with its GPU: that of its local rank.
fn ranks(status: &Status, now: Time) -> Vec<v1::RankStatus> {
    let vitals = status.nodes.iter().filter_map(|node| Some((&node.node, node.vitals.as_ref()?)));
    let vitals: HashMap<&NodeId, &Arc<Vitals>> = vitals.collect();
    let with_gpu = |rank: &RankStatus| {
        let gpus = vitals.get(&rank.node).map_or(&[][..], |vitals| &vitals.gpus);
        rank_status(rank, gpus.iter().find(|gpu| gpu.index == rank.local_rank.0), now)
    };
    status.ranks.iter().map(with_gpu).collect()
}

fn rank_status(status: &RankStatus, gpu: Option<&Gpu>, now: Time) -> v1::RankStatus {
    v1::RankStatus {
        rank: status.rank.0,
        node_id: status.node.0.clone(),
        local_rank: status.local_rank.0,
        state: status.state.name().to_owned(),
        loader: status.loader.clone().map(Into::into),
        pulse: status.pulse.map(Into::into),
        heartbeat_age_seconds: status.heard_at.map(|at| seconds(at, now)),
        slowness: status.slowness,
        gpu: gpu.cloned().map(Into::into),
    }
}

fn node_status(status: &NodeStatus, now: Time) -> v1::NodeStatus {
    let NodeStatus { node, slots, attached, vitals, heard_at, round_trip } = status;
    v1::NodeStatus {
        node_id: node.0.clone(),
        slots: *slots,
        attached: *attached,
        host: vitals.as_ref().map(|vitals| vitals.host.clone().into()),
        heartbeat_age_seconds: heard_at.map(|at| seconds(at, now)),
        round_trip_seconds: round_trip.map(|time| time.as_secs_f64()),
    }
}

fn recovery(recovery: &Recovery, now: Time) -> v1::Recovery {
    let seconds_of = |took: Option<Duration>| took.map(|took| took.as_secs_f64());
    let parts = recovery.parts();
    v1::Recovery {
        generation: recovery.generation.0,
        cause: recovery.cause.clone(),
        settle_seconds: seconds_of(parts.settle),
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
