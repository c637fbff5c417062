//! What users see.

use baton_job::{
    Time,
    engine::{NodeStatus, NoticeKind, PhaseName, RankStatus, Recovery, Status},
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
        SaveFailed,
        RankFailed,
        SamplesSkipped,
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
/// `job_id`, `name`, `epochs`, `checkpoint_age_seconds`, `checkpoint_location`, `eta_seconds`.
#[must_use]
pub fn status(status: &Status, now: Time) -> v1::GetStatusResponse {
    v1::GetStatusResponse {
        phase: v1::get_status_response::Phase::from(status.phase).into(),
        reason: status.reason.clone(),
        phase_seconds: seconds(status.since, now),
        generation: status.generation.0,
        latest: status.latest.clone().map(Into::into),
        evaluation: status.evaluation.map(Into::into),
        best: status.best.map(Into::into),
        checkpoint: status.commit.clone().map(Into::into),
        ranks: status.ranks.iter().map(Into::into).collect(),
        nodes: status.nodes.iter().map(Into::into).collect(),
        skipped_samples: status.skipped_samples,
        recoveries: status.recoveries.iter().map(Into::into).collect(),
        stale_messages: status.stale_messages,
        drain_seconds_left: status.drain_until.map(|until| seconds(now, until)),
        outcome: status.outcome.clone().map(Into::into),
        ..v1::GetStatusResponse::default()
    }
}

impl From<&RankStatus> for v1::RankStatus {
    fn from(status: &RankStatus) -> Self {
        Self {
            rank: status.rank.0,
            node_id: status.node.0.clone(),
            local_rank: status.local_rank.0,
            state: status.state.to_owned(),
            loader: status.loader.clone().map(Into::into),
        }
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
