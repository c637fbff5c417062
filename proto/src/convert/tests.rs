use std::{sync::Arc, time::Duration};

use baton_job::{
    Generation, JobId, NodeId, Rank, Time,
    engine::{
        Budget, DrainStatus, EvaluationResult, Incident, Meter, MeterShare, NodeStatus, PhaseName,
        RankState, RankStatus, Recovery, Spending, Status,
    },
    exit::{Class, Failure, Outcome},
    ids::LocalRank,
    message::{
        Activity, Commit, GeneratedText, GpuStats, HostStats, LoaderReport, MachineStats,
        RankHeartbeat, Rollback, SaveTimes, StepReport,
    },
};
use baton_recipe::{
    Epoch, Step,
    guard::{BatchMark, Diagnosis, Divergence},
    progress::{Accuracy, Extent},
    spec::Limits,
};

use super::*;
use crate::v1;

/// A recovery in which all ranks are ready.
fn recovery() -> Recovery {
    Recovery {
        generation: Generation(2),
        cause: "rank 1 was killed".into(),
        planned: false,
        lost_at: Time(5_000),
        launched_at: Some(Time(5_250)),
        torn_down_at: Some(Time(5_750)),
        ready_at: Some(Time(7_250)),
        met_at: None,
        started_at: None,
        stepped_at: None,
        step_before: Step(40),
        lost_steps: 0,
        metered_from: Duration::ZERO,
        metered: None,
        redo: Duration::ZERO,
    }
}

fn draining_since_8_s() -> Status {
    Status {
        phase: PhaseName::Draining,
        reason: "draining: spot notice; 110 s to save and stop".into(),
        since: Time(8_000),
        generation: Generation(2),
        epochs: 16,
        recoveries: Arc::new([recovery()].into()),
        recoveries_total: 3,
        stale_messages: 3,
        drain: Some(DrainStatus {
            reason: "spot notice".into(),
            since: Time(8_000),
            until: Time(120_000),
            stop_step: Some(Step(41)),
            agreed_at: Some(Time(8_250)),
            copied_at: Some(Time(8_500)),
            locally_at: None,
            durable_at: None,
            by_user: false,
            is_replayed: false,
        }),
        ..Status::default()
    }
}

/// The status message at 10 s.
fn message(engine_status: &Status) -> v1::GetStatusResponse {
    let job = JobInfo {
        id: JobId::default(),
        name: "digits_cpu",
        checkpoint_location: "runs/digits_cpu/checkpoints",
        checkpoint_age_seconds: Some(1.5),
        coordinator_started_unix_seconds: 1_700_000_000,
        coordinator_version: "0.1.0",
    };
    status(engine_status, Time(10_000), job)
}

#[test]
fn a_status_has_durations_in_seconds_and_omits_those_that_have_not_ended() {
    let wire = message(&draining_since_8_s());

    assert_eq!(wire.phase(), v1::get_status_response::Phase::Draining);
    assert_eq!(wire.phase_seconds, 2.0);
    let drain = wire.drain.as_ref().unwrap();
    assert_eq!((drain.seconds_left, drain.stop_step), (110.0, Some(41)));
    assert_eq!((drain.agreed_after_seconds, drain.copied_after_seconds), (Some(0.25), Some(0.5)));
    assert_eq!(drain.durable_after_seconds, None);
    let expected = v1::Recovery {
        generation: 2,
        cause: "rank 1 was killed".into(),
        detect_seconds: Some(0.25),
        tear_down_seconds: Some(0.5),
        respawn_seconds: Some(1.5),
        age_seconds: 5.0,
        ..v1::Recovery::default()
    };
    assert_eq!((wire.recoveries, wire.recoveries_total), (vec![expected], 3));
    assert_eq!(wire.stale_messages, 3);
}

#[test]
fn a_recovery_that_reached_its_first_step_has_all_parts_and_their_sum() {
    let whole = Recovery {
        planned: true,
        met_at: Some(Time(7_500)),
        started_at: Some(Time(8_500)),
        stepped_at: Some(Time(8_625)),
        lost_steps: 2,
        ..recovery()
    };
    let engine_status = Status { recoveries: Arc::new([whole].into()), ..draining_since_8_s() };

    let wire = message(&engine_status).recoveries.remove(0);

    assert_eq!((wire.rendezvous_seconds, wire.restore_seconds), (Some(0.25), Some(1.0)));
    assert_eq!((wire.first_step_seconds, wire.total_seconds), (Some(0.125), Some(3.625)));
    assert_eq!((wire.lost_steps, wire.planned), (2, true));
}

#[test]
fn a_status_has_activity_and_loader_of_each_rank_and_the_skipped_samples() {
    let loader = LoaderReport {
        wait: 0.25,
        ready: 3,
        capacity: 8,
        skipped: 12,
        last_skipped: Some("train.beton: sample 7: no JPEG at byte 4096".into()),
    };
    let rank = |rank, loader: Option<LoaderReport>| RankStatus {
        rank: Rank(rank),
        node: NodeId("a".into()),
        local_rank: LocalRank(rank),
        state: RankState::Training,
        heartbeat: loader
            .as_ref()
            .map(|_| RankHeartbeat { step: Step(9), ..RankHeartbeat::default() }),
        heartbeat_at: loader.as_ref().map(|_| Time(9_500)),
        slowdown: None,
        loader,
    };
    let ranks = vec![rank(0, None), rank(1, Some(loader.clone()))];
    let engine_status = Status { ranks, skipped_samples: 15, ..draining_since_8_s() };

    let wire = message(&engine_status);

    assert_eq!(wire.skipped_samples, 15);
    assert_eq!(wire.ranks[0].loader, None);
    assert_eq!(wire.ranks[1].loader, Some(loader.into()));
    assert_eq!(wire.ranks[1].heartbeat.map(|heartbeat| heartbeat.step), Some(9));
    assert_eq!(wire.ranks[1].heartbeat_age_seconds, Some(0.5));
    assert_eq!((wire.ranks[0].heartbeat, wire.ranks[0].heartbeat_age_seconds), (None, None));
}

#[test]
fn a_status_has_the_reason_why_the_step_went_back() {
    let diagnosis = Diagnosis {
        divergence: Divergence::LossNotFinite,
        step: Step(40),
        batch: BatchMark { epoch: Epoch(1), cursor: 640 },
        lr: 0.1,
        loss: None,
        gradient_norm: Some(3.5),
        samples: vec![7],
        evaluated: None,
    };
    let rollback = Rollback {
        generation: Generation(2),
        before: Step(41),
        suspect_from: Some(Step(30)),
        skip: None,
    };
    let incident = Incident { generation: Generation(1), diagnosis, rollback: Some(rollback) };
    let incidents = vec![incident.clone()];
    let invalidated = vec![Rollback {
        generation: Generation(2),
        before: Step(41),
        suspect_from: Some(Step(30)),
        skip: None,
    }];
    let engine_status = Status { incidents, invalidated, ..draining_since_8_s() };

    let mut message = message(&engine_status);

    let from = v1::InvalidatedCheckpoints {
        before_generation: 2,
        from_step: 41,
        suspect_from_step: Some(30),
    };
    assert_eq!(message.invalidated_checkpoints, [from]);
    let wire = message.incidents.remove(0);
    assert_eq!(wire.cause, incident.diagnosis.to_string());
    assert_eq!(wire.remedy, "back to before step 30 with a lower learning rate");
    let rollback = v1::Rollback { generation: 2, before: 41, suspect_from: Some(30), skip: None };
    assert_eq!(wire.rollback, Some(rollback));
    let diagnosis = v1::Diagnosis {
        divergence: Some(v1::diagnosis::Divergence::LossNotFinite(v1::Empty {})),
        step: 40,
        batch: Some(v1::BatchMark { epoch: 1, cursor: 640 }),
        lr: 0.1,
        loss: None,
        gradient_norm: Some(3.5),
        samples: vec![7],
    };
    assert_eq!(wire.diagnosis, Some(diagnosis));
}

#[test]
fn a_status_has_the_cost_of_the_job() {
    let latest = StepReport {
        epoch: Epoch(15),
        steps_per_epoch: 100,
        global_batch: 36,
        samples_per_second: 1.0,
        ..StepReport::default()
    };
    let limits = Limits { max_hours: Some(1.5), dollars_per_hour: Some(4.0), ..Limits::default() };
    let spending = Spending {
        meter: Meter::default(),
        budget: Budget::new(&limits),
        interrupted: MeterShare::default(),
        paused: MeterShare::default(),
    };
    let engine_status = Status { spending, latest: Some(latest), ..draining_since_8_s() };

    let wire = message(&engine_status);

    assert_eq!((wire.epochs, wire.eta_seconds), (16, Some(3_600.0)));
    let expected = v1::Spending {
        hours: 0.0,
        most_hours: Some(1.5),
        dollars: Some(0.0),
        projected_dollars: Some(4.0),
        dollars_per_hour: Some(4.0),
        dollars_per_epoch: Some(4.0),
        interruption_dollars: Some(0.0),
        used: Some(0.0),
        ..v1::Spending::default()
    };
    assert_eq!(wire.spending, Some(expected));
}

#[test]
fn a_rank_has_the_gpu_of_its_local_rank_and_a_node_its_machine_statistics() {
    let gpu = |index| GpuStats { index, memory_used: u64::from(index), ..GpuStats::default() };
    let stats = MachineStats {
        host: HostStats { cpus: 96, ..HostStats::default() },
        gpus: vec![gpu(1), gpu(0)],
    };
    let node = |node: &str, stats| NodeStatus {
        node: NodeId(node.to_owned()),
        slots: 2,
        attached: true,
        stats,
        heartbeat_at: Some(Time(9_000)),
        round_trip: Some(Duration::from_millis(2)),
    };
    let rank = |rank, node: &str, local| RankStatus {
        rank: Rank(rank),
        node: NodeId(node.to_owned()),
        local_rank: LocalRank(local),
        state: RankState::Training,
        loader: None,
        heartbeat: None,
        heartbeat_at: None,
        slowdown: None,
    };
    let engine_status = Status {
        nodes: vec![node("a", Some(Arc::new(stats))), node("b", None)],
        ranks: vec![rank(0, "a", 0), rank(1, "a", 1), rank(2, "b", 0)],
        ..draining_since_8_s()
    };

    let wire = message(&engine_status);

    let gpus = wire.ranks.iter().map(|rank| rank.gpu.as_ref().map(|gpu| gpu.memory_used));
    assert_eq!(gpus.collect::<Vec<_>>(), [Some(0), Some(1), None]);
    let (a, b) = (&wire.nodes[0], &wire.nodes[1]);
    assert_eq!((a.host.as_ref().map(|host| host.cpus), b.host.as_ref()), (Some(96), None));
    assert_eq!((a.heartbeat_age_seconds, a.round_trip_seconds), (Some(1.0), Some(0.002)));
}

#[test]
fn every_outcome_converts_back_unchanged_and_one_of_a_newer_version_is_none() {
    let classes = [
        Class::BadInput,
        Class::Diverged,
        Class::TakenOver,
        Class::Device,
        Class::OutOfMemory,
        Class::Crash,
    ];
    let failed = classes.map(|class| Failure { class, message: "a disk is full".into() });
    let failed = failed.map(|failure| Outcome::Failed { failure });
    let reason = "requested".to_owned();
    let others = [
        Outcome::Completed,
        Outcome::Drained { reason: reason.clone() },
        Outcome::LimitReached { reason },
        Outcome::Stopped,
    ];
    for outcome in others.into_iter().chain(failed) {
        assert_eq!(v1::Outcome::from(outcome.clone()).known(), Some(outcome));
    }
    let failure = |class| Some(v1::Failure { class, message: String::new() });
    for (kind, failure) in [(0, None), (99, None), (4, None), (4, failure(0)), (4, failure(99))] {
        assert_eq!(v1::Outcome { kind, failure, ..v1::Outcome::default() }.known(), None);
    }
}

fn metric(name: &str, value: f64, direction: i32, is_fraction: bool) -> v1::Metric {
    v1::Metric { name: name.to_owned(), value, direction, is_fraction }
}

#[test]
fn metrics_with_the_old_name_of_a_field_are_read() {
    let line = r#"{"name":"top1","value":0.5,"direction":"higher","is_share":true}"#;
    assert_eq!(serde_json::from_str::<v1::Metric>(line).unwrap(), metric("top1", 0.5, 1, true));
}

#[test]
fn every_number_is_in_the_right_field() {
    let report = StepReport {
        step: Step(1),
        epoch: Epoch(2),
        total_steps: 3,
        steps_per_epoch: 4,
        step_of_epoch: 5,
        loss: 6.0,
        metrics: [("top1".to_owned(), 7.0)].into(),
        lr: 8.0,
        gradient_norm: Some(9.0),
        loss_scale: Some(10.0),
        resolution: 11,
        global_batch: 12,
        samples_per_second: 13.0,
        loader_wait: 14.0,
    };
    let step = v1::Step {
        step: 1,
        epoch: 2,
        total_steps: 3,
        steps_per_epoch: 4,
        step_of_epoch: 5,
        loss: 6.0,
        top1: 7.0,
        lr: 8.0,
        gradient_norm: Some(9.0),
        loss_scale: Some(10.0),
        resolution: 11,
        global_batch: 12,
        samples_per_second: 13.0,
        loader_wait: 14.0,
        metrics: vec![metric("top1", 7.0, 1, true)],
    };
    assert_eq!(v1::Step::from(report), step);

    let metrics = [("spearman", 3.0), ("pearson", 2.0), ("mae", 1.0), ("top1", 5.0)];
    let accuracy = Accuracy::new(7, metrics);
    let found = v1::Accuracy {
        top1: 5.0,
        samples: 7,
        fit: Some(v1::Fit { mae: 1.0, pearson: 2.0, spearman: 3.0 }),
        metrics: vec![
            metric("spearman", 3.0, 1, false),
            metric("pearson", 2.0, 1, false),
            metric("mae", 1.0, 2, false),
            metric("top1", 5.0, 1, true),
        ],
        ..v1::Accuracy::default()
    };
    let ema = Some(Accuracy::new(7, [("loss", 4.0), ("top5", 6.0), ("perplexity", 8.0)]));
    let text = GeneratedText {
        sample: 3,
        prompt: "a".to_owned(),
        reference: "b".to_owned(),
        text: "c".to_owned(),
    };
    let evaluation = EvaluationResult {
        step: Step(9),
        accuracy: accuracy.clone(),
        ema,
        extent: Extent::Full,
        texts: vec![text],
    };
    let evaluated = v1::EvaluatedStep {
        step: 9,
        accuracy: Some(found.clone()),
        ema: Some(v1::Accuracy {
            loss: 4.0,
            top5: 6.0,
            samples: 7,
            metrics: vec![
                metric("loss", 4.0, 2, false),
                metric("top5", 6.0, 1, true),
                metric("perplexity", 8.0, 2, false),
            ],
            ..v1::Accuracy::default()
        }),
        extent: v1::Extent::Full.into(),
        texts: vec![v1::GeneratedText {
            sample: 3,
            prompt: "a".to_owned(),
            reference: "b".to_owned(),
            text: "c".to_owned(),
        }],
    };
    assert_eq!(v1::EvaluatedStep::from(evaluation), evaluated);

    let commit = Commit {
        name: "step-1".into(),
        generation: Generation(2),
        step: Step(1),
        accuracy: Some(accuracy),
        bytes: 3,
        took: Some(SaveTimes { stall_seconds: 4.0, seconds: 5.0 }),
        fence_lost: false,
    };
    let checkpoint = v1::Checkpoint {
        name: "step-1".into(),
        generation: 2,
        step: 1,
        accuracy: Some(found),
        bytes: 3,
        took: Some(v1::SaveTimes { stall_seconds: 4.0, seconds: 5.0 }),
    };
    assert_eq!(v1::Checkpoint::from(commit), checkpoint);

    let activity = Activity::Exchanging;
    let heartbeat = RankHeartbeat {
        activity,
        seconds: 1.0,
        step: Step(2),
        own_step_seconds: 3.0,
        evaluation: None,
    };
    let activity = v1::Activity::Exchanging.into();
    let wire = v1::RankHeartbeat { activity, seconds: 1.0, step: 2, own_step_seconds: 3.0 };
    assert_eq!(v1::RankHeartbeat::from(heartbeat), wire);
}
