//! What users see.

use std::time::Duration;

use baton_job::{
    Time,
    engine::{
        DrainStatus, Incident, NodeStatus, NoticeKind, PhaseName, RankStatus, Recovery, Status,
    },
};

use super::same_variants;
use crate::v1;

same_variants!(
    NoticeKind,
    v1::watch_events_response::Kind,
    "WatchEventsResponse",
    "kind",
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
        Ended,
    ]
);

same_variants!(
    PhaseName,
    v1::get_status_response::Phase,
    "GetStatusResponse",
    "phase",
    [Gathering, Backoff, Forming, Meeting, Training, Settling, Reattaching, Draining, Ended,]
);

/// The machine's state as users see it. The coordinator fills in what the machine does not know:
/// `job_id`, `name`, `checkpoint_age_seconds`, `checkpoint_location`.
#[must_use]
pub fn status(status: &Status, now: Time) -> v1::GetStatusResponse {
    v1::GetStatusResponse {
        phase: v1::get_status_response::Phase::from(status.phase).into(),
        reason: status.reason.clone(),
        phase_seconds: seconds(status.since, now),
        generation: status.generation.0,
        began_with: status.began_with.clone(),
        epochs: status.epochs,
        latest: status.latest.clone().map(Into::into),
        evaluation: status.evaluation.map(Into::into),
        best: status.best.map(Into::into),
        checkpoint: status.commit.clone().map(Into::into),
        ranks: status.ranks.iter().map(|rank| rank_status(rank, now)).collect(),
        nodes: status.nodes.iter().map(Into::into).collect(),
        skipped_samples: status.skipped_samples,
        recoveries: status.recoveries.iter().map(Into::into).collect(),
        incidents: status.incidents.iter().map(Into::into).collect(),
        spending: Some(spending(status, now)),
        eta_seconds: status.eta_seconds(),
        stale_messages: status.stale_messages,
        drain: status.drain.as_ref().map(|drain| drain_status(drain, now)),
        outcome: status.outcome.clone().map(Into::into),
        ..v1::GetStatusResponse::default()
    }
}

fn spending(status: &Status, now: Time) -> v1::Spending {
    let time = status.spending.meter.read(now);
    let hours = |time: Duration| time.as_secs_f64() / 3_600.0;
    v1::Spending {
        hours: hours(time),
        most_hours: status.spending.most.map(hours),
        dollars: status.spending.dollars(time),
        projected_dollars: status.projected_dollars(now),
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

fn rank_status(status: &RankStatus, now: Time) -> v1::RankStatus {
    v1::RankStatus {
        rank: status.rank.0,
        node_id: status.node.0.clone(),
        local_rank: status.local_rank.0,
        state: status.state.to_owned(),
        loader: status.loader.clone().map(Into::into),
        pulse: status.pulse.map(Into::into),
        heartbeat_age_seconds: status.heard_at.map(|at| seconds(at, now)),
        slowness: status.slowness,
    }
}

impl From<&NodeStatus> for v1::NodeStatus {
    fn from(status: &NodeStatus) -> Self {
        let NodeStatus { node, slots, attached } = status;
        Self { node_id: node.0.clone(), slots: *slots, attached: *attached }
    }
}

impl From<&Recovery> for v1::Recovery {
    fn from(recovery: &Recovery) -> Self {
        let part = |from: Option<Time>, to: Option<Time>| Some(seconds(from?, to?));
        Self {
            generation: recovery.generation.0,
            cause: recovery.cause.clone(),
            launch_seconds: part(Some(recovery.lost_at), recovery.launched_at),
            ready_seconds: part(recovery.launched_at, recovery.ready_at),
            start_seconds: part(recovery.ready_at, recovery.started_at),
            step_seconds: part(recovery.started_at, recovery.stepped_at),
            lost_steps: recovery.lost_steps,
        }
    }
}

fn seconds(from: Time, to: Time) -> f64 {
    to.since(from).as_secs_f64()
}
