//! Statuses for tests: one job at several times.

use baton_proto::v1::{
    Accuracy, Activity, BatchMark, Checkpoint, Diagnosis, DrainStatus, Empty, EvaluatedStep,
    Extent, Failure, Fit, GetStatusResponse, Gpu, Host, Incident, Loader, LocalCheckpoint,
    NodeStatus, Outcome, PauseStatus, RankHeartbeat, RankStatus, Recovery, Rollback, SaveTimes,
    Spending, Step, StreamLogsResponse, StreamMetricsResponse, WatchEventsResponse,
    diagnosis::Divergence, failure::Class, get_status_response::Phase, outcome,
    stream_metrics_response::Metrics, watch_events_response::Kind,
};

/// Before any agent has joined.
pub(crate) fn gathering() -> GetStatusResponse {
    GetStatusResponse {
        job_id: "5f0c8d5e-3d6c-4b59-9a3c-6d1f0f3f2a11".to_owned(),
        name: "digits_cpu".to_owned(),
        phase: Phase::Gathering.into(),
        reason: "waiting for agents: 0 of at least 1 ranks are available".to_owned(),
        phase_seconds: 3.25,
        epochs: 16,
        checkpoint_location: "runs/digits_cpu/checkpoints".to_owned(),
        ..GetStatusResponse::default()
    }
}

/// In the fifth epoch, with all optional fields set.
pub(crate) fn training() -> GetStatusResponse {
    GetStatusResponse {
        phase: Phase::Training.into(),
        reason: "3 ranks train".to_owned(),
        phase_seconds: 192.0,
        generation: 2,
        latest: Some(Step {
            step: 101,
            epoch: 4,
            total_steps: 352,
            steps_per_epoch: 22,
            loss: 1.234_56,
            top1: 0.562_5,
            lr: 0.000_85,
            samples_per_second: 412.4,
            loader_wait: 0.031,
            gradient_norm: Some(1.375),
            loss_scale: Some(65_536.0),
            resolution: 32,
            global_batch: 64,
            step_of_epoch: 13,
            ..Step::default()
        }),
        evaluation: Some(EvaluatedStep {
            ema: Some(accuracy(0.921)),
            extent: Extent::Subset.into(),
            ..evaluated(88, 0.912)
        }),
        best: Some(evaluated(66, 0.925)),
        checkpoint: Some(Checkpoint {
            name: "step-0000000088-gen-000002".to_owned(),
            generation: 2,
            step: 88,
            accuracy: Some(accuracy(0.912)),
            bytes: 282_300_000,
            took: Some(SaveTimes { stall_seconds: 0.012, seconds: 0.84 }),
        }),
        checkpoint_age_seconds: Some(34.2),
        ranks: vec![
            with_loader(rank(0, "a", 0), 0.031, 6),
            with_skipped(with_loader(rank(1, "a", 1), 0.25, 0), 12),
            rank(2, "b", 0),
        ],
        skipped_samples: 13,
        nodes: vec![node("a", 2, true), node("b", 1, true)],
        recoveries: vec![Recovery { lost_steps: 1, ..recovered(192.0) }],
        recoveries_total: 1,
        incidents: vec![rolled_back(1, 70)],
        spending: Some(Spending {
            hours: 1.25,
            most_hours: Some(2.0),
            dollars: Some(5.0),
            projected_dollars: Some(5.14),
            ..Spending::default()
        }),
        stale_messages: 2,
        eta_seconds: Some(125.0),
        ..gathering()
    }
}

/// A rank was killed, and the next generation is forming.
pub(crate) fn recovering() -> GetStatusResponse {
    let mut status = training();
    status.phase = Phase::Forming.into();
    status.reason = "waiting for 3 ranks to start".to_owned();
    status.phase_seconds = 0.4;
    status.generation = 3;
    status.ranks[1].state = "starting".to_owned();
    status.ranks.iter_mut().for_each(|rank| rank.loader = None);
    status.nodes[1].attached = false;
    status.eta_seconds = None;
    status.recoveries.push(Recovery {
        generation: 3,
        cause: "rank 2: its process was killed".to_owned(),
        detect_seconds: Some(0.015_625),
        age_seconds: 0.5,
        ..Recovery::default()
    });
    status.recoveries_total = 2;
    status
}

/// As `recovering`, after a planned change, a failed recovery, and more recoveries than are kept.
pub(crate) fn recovering_again() -> GetStatusResponse {
    let mut status = recovering();
    let planned = Recovery {
        cause: "node b takes part with 1 rank from here on".to_owned(),
        planned: true,
        respawn_seconds: Some(0.0),
        rendezvous_seconds: None,
        total_seconds: Some(0.312_5),
        ..recovered(7_500.0)
    };
    let failed = Recovery {
        detect_seconds: Some(1.0),
        tear_down_seconds: Some(0.0),
        respawn_seconds: Some(2.5),
        age_seconds: 400.0,
        cause:
            "rank 0: its process was killed (signal 9); if nobody did that, look for the kernel's \
                out-of-memory killer in dmesg"
                .to_owned(),
        ..Recovery::default()
    };
    let slow = Recovery {
        respawn_seconds: Some(10.25),
        total_seconds: Some(10.5),
        lost_steps: 12,
        ..recovered(3_700.0)
    };
    status.recoveries.splice(..0, [recovered(100_000.0), planned, slow, failed]);
    for (recovery, generation) in status.recoveries.iter_mut().zip(2..) {
        recovery.generation = generation;
        status.generation = generation;
    }
    status.recoveries_total = 1_234;
    status
}

/// A complete recovery.
fn recovered(age_seconds: f64) -> Recovery {
    Recovery {
        generation: 2,
        cause: "rank 1: its process was killed".to_owned(),
        detect_seconds: Some(0.015_625),
        tear_down_seconds: Some(0.062_5),
        respawn_seconds: Some(0.25),
        rendezvous_seconds: Some(0.031_25),
        restore_seconds: Some(0.125),
        first_step_seconds: Some(0.078_125),
        total_seconds: Some(0.562_5),
        age_seconds,
        ..Recovery::default()
    }
}

/// A job that saves and stops.
pub(crate) fn draining() -> GetStatusResponse {
    GetStatusResponse {
        phase: Phase::Draining.into(),
        reason: "draining: spot notice; 98 s to save and stop".to_owned(),
        drain: Some(DrainStatus {
            reason: "spot notice".to_owned(),
            seconds_left: 97.5,
            stop_step: Some(441),
            agreed_after_seconds: Some(0.4),
            copied_after_seconds: Some(0.5),
            durable_after_seconds: None,
        }),
        local_checkpoint: Some(LocalCheckpoint {
            step: 441,
            nodes: vec!["a".to_owned(), "b".to_owned()],
            seconds: 0.21,
        }),
        save_problem: Some(
            "cannot write shard-00000-of-00003.safetensors: the disk is full".to_owned(),
        ),
        ..training()
    }
}

/// A paused job.
pub(crate) fn paused() -> GetStatusResponse {
    let mut status = training();
    for rank in &mut status.ranks {
        if let Some(heartbeat) = &mut rank.heartbeat {
            (heartbeat.activity, heartbeat.seconds) = (Activity::Paused.into(), 119.0);
        }
    }
    GetStatusResponse {
        phase: Phase::Paused.into(),
        reason: "paused: the GPUs are needed".to_owned(),
        phase_seconds: 120.0,
        pause: Some(PauseStatus { reason: "the GPUs are needed".to_owned(), seconds: 120.5 }),
        eta_seconds: None,
        ..status
    }
}

/// A coordinator without a job.
pub(crate) fn idle() -> GetStatusResponse {
    GetStatusResponse {
        phase: Phase::Idle.into(),
        reason: "there is no job".to_owned(),
        phase_seconds: 42.0,
        nodes: vec![node("a", 2, true)],
        coordinator_version: "0.1.0".to_owned(),
        ..GetStatusResponse::default()
    }
}

/// Training on two machines with GPU statistics and a price.
pub(crate) fn on_gpus() -> GetStatusResponse {
    let mut status = training();
    for rank in &mut status.ranks {
        rank.gpu = Some(Gpu {
            index: rank.local_rank,
            name: "NVIDIA H100 80GB HBM3".to_owned(),
            uuid: format!("GPU-{}", rank.rank),
            utilisation: Some(0.97),
            memory_used: 31_200_000_000,
            memory_total: 80_000_000_000,
            celsius: Some(61.0),
            watts: Some(644.5),
        });
    }
    // A GPU with few statistics.
    if let Some(gpu) = status.ranks.last_mut().and_then(|rank| rank.gpu.as_mut()) {
        (gpu.utilisation, gpu.celsius, gpu.watts) = (None, None, None);
    }
    for node in &mut status.nodes {
        node.host = Some(Host {
            name: format!("ip-10-0-0-7-{}", node.node_id),
            cpu: 0.31,
            cpus: 16,
            memory_used: 12_300_000_000,
            memory_total: 64_000_000_000,
            disk_free: 100_000_000_000,
            disk_total: 500_000_000_000,
            received_per_second: 1_250_000.0,
            sent_per_second: 3_400_000.0,
        });
        node.heartbeat_age_seconds = Some(0.4);
        node.round_trip_seconds = Some(0.000_8);
    }
    status.spending = Some(Spending {
        dollars_per_hour: Some(4.0),
        dollars_per_epoch: Some(0.31),
        interruption_hours: 0.05,
        interruption_dollars: Some(0.2),
        paused_hours: 0.2,
        used: Some(0.625),
        ..status.spending.unwrap_or_default()
    });
    status
}

/// Training with this number of ranks, eight per node.
pub(crate) fn many(ranks: u32) -> GetStatusResponse {
    let mut status = on_gpus();
    let model = status.ranks[0].clone();
    status.ranks = (0..ranks)
        .map(|rank| RankStatus {
            rank,
            local_rank: rank % 8,
            node_id: format!("node-{}", rank / 8),
            slowdown: Some(if rank == 7 { 2.5 } else { 1.0 }),
            ..model.clone()
        })
        .collect();
    let model = status.nodes[0].clone();
    status.nodes = (0..ranks.div_ceil(8))
        .map(|node| NodeStatus { node_id: format!("node-{node}"), slots: 8, ..model.clone() })
        .collect();
    status.reason = format!("{ranks} ranks train");
    status
}

/// Start of the job, Unix milliseconds.
const JOB_START: u64 = 1_795_252_508_000;

/// Metrics of steps and evaluations, with a recovery between them.
pub(crate) fn points() -> Vec<StreamMetricsResponse> {
    let point = |seconds: u64, generation, metrics| StreamMetricsResponse {
        unix_millis: JOB_START + 1_000 * seconds,
        generation,
        metrics: Some(metrics),
        ..Default::default()
    };
    let step = |step: u64| {
        let share = step as f64 / 100.0;
        Metrics::Step(Step {
            step,
            epoch: (step / 22) as u32,
            loss: 2.3 - 1.2 * share,
            top1: 0.1 + 0.5 * share,
            lr: 0.001 - 0.000_15 * share,
            samples_per_second: 400.0 + 12.5 * share,
            ..training().latest.unwrap_or_default()
        })
    };
    let mut points = vec![point(0, 1, Metrics::BeganAt(0))];
    points.extend((1..=7).map(|tens| point(tens, 1, step(10 * tens))));
    points.extend((1..=3).map(|pass| {
        point(8, 1, Metrics::Evaluation(evaluated(22 * pass, 0.6 + 0.1 * pass as f64)))
    }));
    points.push(point(9, 2, Metrics::BeganAt(66)));
    points.extend((7..=10).map(|tens| point(3 + tens, 2, step(10 * tens))));
    points.extend(
        training().evaluation.map(|evaluated| point(13, 2, Metrics::Evaluation(evaluated))),
    );
    points
}

/// Events of the job.
pub(crate) fn events() -> Vec<WatchEventsResponse> {
    let events = [
        (Kind::NodeJoined, 1, None, "node a is here with 2 ranks"),
        (Kind::GenerationOpened, 1, None, "generation 1: 3 ranks on a, b"),
        (Kind::TrainingStarted, 1, Some(0), "training begins with fresh weights"),
        (Kind::Evaluated, 1, Some(66), "top-1 92.5 %"),
        (Kind::RankFailed, 1, Some(71), "rank 1: its process was killed"),
        (Kind::Recovered, 2, Some(67), "recovered in 0.56 s, 1 step lost"),
        (Kind::Saved, 2, Some(88), "checkpoint step-0000000088-gen-000002 is durable"),
    ];
    let event = |(id, (kind, generation, step, message)): (u64, (Kind, u64, Option<u64>, &str))| {
        WatchEventsResponse {
            id,
            unix_millis: JOB_START + 2_000 * id,
            kind: kind.into(),
            generation,
            step,
            message: message.to_owned(),
        }
    };
    (1..).zip(events).map(event).collect()
}

/// Log lines of ranks, an agent and the coordinator.
pub(crate) fn lines() -> Vec<StreamLogsResponse> {
    let lines = [
        ("", None, None, "generation 2 is open", 0),
        ("a", None, None, "rank 1 was started", 0),
        ("a", Some(0), Some(0), "took the state of rank 2", 0),
        ("b", Some(0), Some(2), "\x1b[33mslow\x1b[0m disk", 812),
        ("a", Some(1), Some(1), "restored in 0.1 s", 0),
        ("a", Some(1), None, "bye", 0),
    ];
    let line = |(number, (node, local_rank, rank, line, left_out)): (u64, _)| {
        let (node, line): (&str, &str) = (node, line);
        StreamLogsResponse {
            unix_millis: JOB_START + 1_000 * number,
            node_id: node.to_owned(),
            local_rank,
            rank,
            line: line.to_owned(),
            left_out,
        }
    };
    (0..).zip(lines).map(line).collect()
}

/// A job that has completed all epochs.
pub(crate) fn completed() -> GetStatusResponse {
    ended(outcome::Kind::Completed, "completed", None)
}

/// Training of a regression on arrays, without a price or averaged weights.
pub(crate) fn regression() -> GetStatusResponse {
    let fit = |spearman| Some(Fit { mae: 0.125, pearson: 0.905, spearman });
    let evaluated = |step, spearman| EvaluatedStep {
        step,
        accuracy: Some(Accuracy {
            loss: 0.04,
            samples: 2_048,
            fit: fit(spearman),
            ..Accuracy::default()
        }),
        extent: Extent::Full.into(),
        ..EvaluatedStep::default()
    };
    let mut status = training();
    status.latest =
        status.latest.map(|latest| Step { top1: 0.0, resolution: 0, loss_scale: None, ..latest });
    status.evaluation = Some(evaluated(88, 0.912));
    status.best = Some(evaluated(66, 0.925));
    status.spending = Some(Spending { hours: 0.5, ..Spending::default() });
    status.incidents.clear();
    status
}

/// A job whose budget is used up.
pub(crate) fn limited() -> GetStatusResponse {
    let reason = "limits.max_hours = 2 is reached; raise it to resume";
    let mut status =
        ended(outcome::Kind::LimitReached, &format!("saved and stopped: {reason}"), None);
    status.latest = training().latest;
    if let Some(outcome) = &mut status.outcome {
        outcome.reason = reason.to_owned();
    }
    status
}

/// A job that failed because of bad input.
pub(crate) fn failed() -> GetStatusResponse {
    let message = "cannot open /nowhere/train.beton".to_owned();
    let failure = Failure { class: Class::BadInput.into(), message };
    let mut status =
        ended(outcome::Kind::Failed, "failed: cannot open /nowhere/train.beton", Some(failure));
    (status.latest, status.evaluation, status.best) = (None, None, None);
    (status.checkpoint, status.checkpoint_age_seconds) = (None, None);
    status
}

fn ended(kind: outcome::Kind, reason: &str, failure: Option<Failure>) -> GetStatusResponse {
    let last =
        Step { step: 352, epoch: 16, step_of_epoch: 0, ..training().latest.unwrap_or_default() };
    GetStatusResponse {
        phase: Phase::Ended.into(),
        reason: reason.to_owned(),
        phase_seconds: 1.5,
        latest: Some(last),
        evaluation: Some(evaluated(352, 0.961)),
        best: Some(evaluated(352, 0.961)),
        ranks: vec![],
        skipped_samples: 0,
        spending: Some(Spending { hours: 1.25, dollars: Some(5.0), ..Spending::default() }),
        incidents: vec![],
        recoveries: vec![],
        recoveries_total: 0,
        stale_messages: 0,
        eta_seconds: None,
        outcome: Some(Outcome { kind: kind.into(), reason: String::new(), failure }),
        ..training()
    }
}

fn evaluated(step: u64, top1: f64) -> EvaluatedStep {
    EvaluatedStep { step, accuracy: Some(accuracy(top1)), ..EvaluatedStep::default() }
}

/// A rollback after `step` steps in a generation, to the next generation.
fn rolled_back(generation: u64, step: u64) -> Incident {
    Incident {
        generation,
        diagnosis: Some(Diagnosis {
            divergence: Some(Divergence::LossNotFinite(Empty {})),
            step,
            batch: Some(BatchMark { epoch: 3, cursor: 256 }),
            lr: 0.1,
            ..Diagnosis::default()
        }),
        cause: format!(
            "the loss is not a finite number at step {step} (epoch 3, sample 256 of it)"
        ),
        rollback: Some(Rollback {
            generation: generation + 1,
            before: step + 1,
            suspect_from: None,
            skip: None,
        }),
        remedy: format!("back to before step {} with a lower learning rate", step + 1),
    }
}

fn accuracy(top1: f64) -> Accuracy {
    baton_recipe::progress::Accuracy::from_legacy_fields(360, 0.321, (top1, 0.997), None).into()
}

fn rank(rank: u32, node: &str, local_rank: u32) -> RankStatus {
    RankStatus {
        rank,
        node_id: node.to_owned(),
        local_rank,
        state: "training".to_owned(),
        ..RankStatus::default()
    }
}

/// `rank` with reports about its loader and its activity.
fn with_loader(rank: RankStatus, wait: f64, ready: u32) -> RankStatus {
    let activity = Activity::Computing.into();
    let own_step_seconds = 0.5 + wait;
    RankStatus {
        loader: Some(Loader { wait, ready, capacity: 8, ..Loader::default() }),
        heartbeat: Some(RankHeartbeat { activity, seconds: 0.1, step: 440, own_step_seconds }),
        heartbeat_age_seconds: Some(0.4),
        slowdown: Some(own_step_seconds / 0.531),
        ..rank
    }
}

/// `rank` after it has skipped this number of samples.
fn with_skipped(mut rank: RankStatus, skipped: u64) -> RankStatus {
    if let Some(loader) = &mut rank.loader {
        loader.skipped = skipped;
        loader.last_skipped = Some("train.beton: sample 7: no JPEG at byte 4096".to_owned());
    }
    rank
}

fn node(node: &str, slots: u32, attached: bool) -> NodeStatus {
    NodeStatus { node_id: node.to_owned(), slots, attached, ..NodeStatus::default() }
}
