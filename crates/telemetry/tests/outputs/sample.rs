//! A sample job of 2,000 steps: interrupted at 700 and at 1,400, the second time with a rollback by 100 steps.

use std::path::Path;

use baton_proto::v1::{
    Accuracy, Activity, Checkpoint, Diagnosis, DrainStatus, EvaluatedStep, Extent,
    GetStatusResponse, Gpu, Host, Incident, Loader, NodeStatus, Outcome, PauseStatus,
    RankHeartbeat, RankStatus, Recovery, Rollback, SaveTimes, Spending, Step,
    StreamMetricsResponse, WatchEventsResponse, get_status_response::Phase, outcome,
    stream_metrics_response::Metrics, watch_events_response::Kind,
};
use baton_telemetry::tensorboard::EventFile;

const START_MILLIS: u64 = 1_763_000_000_000;

/// A status with every field set.
pub(crate) fn status() -> GetStatusResponse {
    GetStatusResponse {
        job_id: "7b0c6f2e-52f3-4c3e-9d5e-0d1f6a1c9b11".to_owned(),
        name: "digits \"cpu\"\\\n".to_owned(),
        phase: Phase::Training.into(),
        reason: "all 2 ranks train".to_owned(),
        phase_seconds: 61.5,
        generation: 3,
        epochs: 20,
        latest: Some(step_metrics(2_000)),
        evaluation: Some(evaluated(2_000, Extent::Full)),
        best: Some(EvaluatedStep {
            ema: None,
            extent: Extent::Unspecified.into(),
            ..evaluated(1_900, Extent::Full)
        }),
        checkpoint: Some(Checkpoint {
            name: "step-0000002000-gen-000003".to_owned(),
            generation: 3,
            step: 2_000,
            accuracy: evaluated(2_000, Extent::Full).accuracy,
            bytes: 204_800_000,
            took: Some(SaveTimes { stall_seconds: 0.125, seconds: 2.5 }),
        }),
        checkpoint_age_seconds: Some(12.0),
        checkpoint_location: "runs/digits_cpu/checkpoints".to_owned(),
        ranks: (0..2).map(rank).collect(),
        nodes: (0..2).map(node).collect(),
        recoveries: recoveries(),
        recoveries_total: 2,
        stale_messages: 4,
        began_with: Some("checkpoint step-0000001300-gen-000002".to_owned()),
        drain: Some(DrainStatus {
            reason: "a user asked".to_owned(),
            seconds_left: 110.0,
            ..DrainStatus::default()
        }),
        eta_seconds: Some(300.0),
        outcome: Some(Outcome { kind: outcome::Kind::Completed.into(), ..Outcome::default() }),
        skipped_samples: 5,
        incidents: vec![Incident {
            generation: 2,
            diagnosis: Some(Diagnosis { step: 1_400, ..Diagnosis::default() }),
            cause: "the loss at step 1401 is not a number".to_owned(),
            rollback: Some(Rollback {
                generation: 3,
                before: 1_300,
                suspect_from: None,
                skip: None,
            }),
            remedy: "from step 1300 with half the learning rate".to_owned(),
        }],
        spending: Some(Spending {
            hours: 2.0,
            most_hours: Some(8.0),
            dollars: Some(6.5),
            projected_dollars: Some(7.25),
            dollars_per_hour: Some(3.25),
            dollars_per_epoch: Some(0.325),
            interruption_hours: 0.125,
            interruption_dollars: Some(0.40625),
            paused_hours: 0.0625,
            used: Some(0.25),
        }),
        pause: Some(PauseStatus { reason: "a look at the data".to_owned(), seconds: 7.0 }),
        coordinator_started_unix_seconds: START_MILLIS / 1_000,
        coordinator_version: "0.1.0".to_owned(),
        ..GetStatusResponse::default()
    }
}

/// The metric points, without the rolled back ones, as a history returns them.
pub(crate) fn points() -> Vec<StreamMetricsResponse> {
    let mut points = Vec::new();
    for (generation, began, ended) in [(1, 0, 700), (2, 700, 1_300), (3, 1_300, 2_000)] {
        points.push(point(began, generation, Metrics::BeganAt(began)));
        for step in (began + 10..=ended).step_by(10) {
            points.push(point(step, generation, Metrics::Step(step_metrics(step))));
            if step % 100 == 0 {
                let found = evaluated(step, Extent::Full);
                points.push(point(step, generation, Metrics::Evaluation(found)));
            }
        }
    }
    points
}

/// Writes TensorBoard's files of two coordinators: the second starts with the third generation, after the steps that
/// are rolled back.
pub(crate) fn write_event_files(folder: &Path) {
    let mut file = EventFile::create(folder, 1_763_000_000, "first").unwrap();
    for sample in points() {
        if let (3, Some(Metrics::BeganAt(step))) = (sample.generation, &sample.metrics) {
            for undone in (step + 10..=step + 100).step_by(10) {
                let metrics = Step { loss: 99.0, ..step_metrics(undone) };
                file.add(&point(undone, 2, Metrics::Step(metrics))).unwrap();
            }
            file.flush().unwrap();
            file = EventFile::create(folder, 1_763_000_400, "second").unwrap();
        }
        file.add(&sample).unwrap();
    }
    file.flush().unwrap();
}

pub(crate) fn point(step: u64, generation: u64, metrics: Metrics) -> StreamMetricsResponse {
    let unix_millis = START_MILLIS + 250 * step + 30_000 * generation;
    StreamMetricsResponse { unix_millis, generation, metrics: Some(metrics), ..Default::default() }
}

pub(crate) fn step_metrics(step: u64) -> Step {
    let done = step as f64 / 2_000.0;
    // Deterministic noise.
    let noise = (step / 10 * 7 % 13) as f64 / 13.0 - 0.5;
    Step {
        step,
        epoch: (step / 100) as u32,
        total_steps: 2_000,
        steps_per_epoch: 100,
        step_of_epoch: step % 100,
        loss: 2.5 * (-6.0 * done).exp() * (1.0 + 0.3 * noise) + 0.01,
        top1: (1.0 - 0.9 * (-5.0 * done).exp() + 0.02 * noise).clamp(0.0, 1.0),
        lr: 0.5 * (1.0 - done),
        gradient_norm: Some(1.5 + noise),
        loss_scale: Some(65_536.0),
        resolution: if done < 0.5 { 160 } else { 224 },
        global_batch: 128,
        samples_per_second: 1_500.0 + 100.0 * noise,
        loader_wait: 0.02 + 0.01 * noise,
        metrics: Vec::new(),
    }
}

pub(crate) fn evaluated(step: u64, extent: Extent) -> EvaluatedStep {
    let done = step as f64 / 2_000.0;
    let top1 = 1.0 - 0.92 * (-4.0 * done).exp();
    let loss = 2.4 * (-4.0 * done).exp() + 0.04;
    let found = |loss, top1: f64| Accuracy {
        loss,
        top1,
        top5: top1.sqrt(),
        samples: 360,
        ..Accuracy::default()
    };
    let (accuracy, ema) =
        (found(loss, top1), Accuracy { top5: top1.sqrt(), ..found(loss * 0.9, top1 * 0.99) });
    let (accuracy, ema) = (Some(accuracy), Some(ema));
    EvaluatedStep { step, accuracy, ema, extent: extent.into(), ..EvaluatedStep::default() }
}

pub(crate) fn events() -> Vec<WatchEventsResponse> {
    let events = [
        (0, 1, Kind::GenerationOpened, "2 ranks on 2 nodes"),
        (0, 1, Kind::TrainingStarted, "from fresh weights"),
        (700, 1, Kind::RankFailed, "rank 1 on <node-1>: killed by signal 9"),
        (700, 2, Kind::Recovered, "after 4.2 s"),
        (1_400, 2, Kind::Diverged, "the loss at step 1401 is not a number"),
        (1_300, 3, Kind::Recovered, "after 6.0 s"),
        (2_000, 3, Kind::Saved, "step-0000002000-gen-000003"),
        (2_000, 3, Kind::Ended, "completed"),
    ];
    let event = |(id, (step, generation, kind, message)): (u64, (u64, u64, Kind, &str))| {
        let unix_millis = START_MILLIS + 250 * step + 30_000 * generation;
        let (kind, step, message) = (kind.into(), Some(step), message.to_owned());
        WatchEventsResponse { id, unix_millis, kind, generation, step, message }
    };
    (1..).zip(events).map(event).collect()
}

pub(crate) fn rank(rank: u32) -> RankStatus {
    RankStatus {
        rank,
        node_id: format!("node-{rank}"),
        local_rank: 0,
        state: "training".to_owned(),
        loader: Some(Loader { wait: 0.02, ready: 3, capacity: 4, skipped: 1, last_skipped: None }),
        heartbeat: Some(RankHeartbeat {
            activity: Activity::Computing.into(),
            seconds: 0.5,
            step: 2_000,
            own_step_seconds: 0.2 + 0.1 * f64::from(rank),
        }),
        heartbeat_age_seconds: Some(0.5),
        slowdown: Some(1.0 + 0.5 * f64::from(rank)),
        gpu: Some(Gpu {
            index: 0,
            name: "NVIDIA H100 80GB HBM3".to_owned(),
            uuid: format!("GPU-{rank}"),
            utilisation: Some(0.97),
            memory_used: 60 << 30,
            memory_total: 80 << 30,
            celsius: Some(61.0),
            watts: None,
        }),
    }
}

pub(crate) fn node(number: u32) -> NodeStatus {
    NodeStatus {
        node_id: format!("node-{number}"),
        slots: 1,
        attached: true,
        host: Some(Host {
            name: format!("ip-10-0-0-{number}"),
            cpu: 0.75,
            cpus: 16,
            memory_used: 20 << 30,
            memory_total: 128 << 30,
            disk_free: 40 << 30,
            disk_total: 64 << 30,
            received_per_second: 1e6,
            sent_per_second: 2e6,
        }),
        heartbeat_age_seconds: Some(0.25),
        round_trip_seconds: Some(0.001),
    }
}

fn recoveries() -> Vec<Recovery> {
    let first = Recovery {
        generation: 2,
        cause: "rank 1 on <node-1>: killed by signal 9".to_owned(),
        detect_seconds: Some(0.2),
        tear_down_seconds: Some(0.5),
        respawn_seconds: Some(2.5),
        rendezvous_seconds: Some(0.25),
        restore_seconds: Some(0.5),
        first_step_seconds: Some(0.25),
        total_seconds: Some(4.2),
        lost_steps: 0,
        planned: false,
        age_seconds: 400.0,
    };
    let cause = "the loss at step 1401 is not a number".to_owned();
    let planned = Recovery {
        generation: 3,
        cause,
        total_seconds: Some(6.0),
        respawn_seconds: Some(4.3),
        lost_steps: 100,
        planned: true,
        age_seconds: 150.0,
        ..first.clone()
    };
    vec![first, planned]
}
