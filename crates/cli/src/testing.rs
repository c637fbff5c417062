//! Statuses for tests: one job at several moments of its life.

use baton_proto::v1::{
    Accuracy, Activity, BatchMark, Checkpoint, Diagnosis, DrainStatus, Empty, EvaluatedStep,
    Extent, Failure, Fit, GetStatusResponse, Incident, Loader, NodeStatus, Outcome, Pulse,
    RankStatus, Recovery, Rollback, SaveTimes, Spending, Step, diagnosis::Divergence,
    failure::Class, get_status_response::Phase, outcome,
};

/// No agent has come yet.
pub(crate) fn gathering() -> GetStatusResponse {
    GetStatusResponse {
        job_id: "5f0c8d5e-3d6c-4b59-9a3c-6d1f0f3f2a11".to_owned(),
        name: "digits_cpu".to_owned(),
        phase: Phase::Gathering.into(),
        reason: "waiting for agents: 0 of at least 1 ranks are here".to_owned(),
        phase_seconds: 3.25,
        epochs: 16,
        checkpoint_location: "runs/digits_cpu/checkpoints".to_owned(),
        ..GetStatusResponse::default()
    }
}

/// In the fifth epoch, with everything there is to show.
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
            fed(rank(0, "a", 0), 0.031, 6),
            losing(fed(rank(1, "a", 1), 0.25, 0), 12),
            rank(2, "b", 0),
        ],
        skipped_samples: 13,
        nodes: vec![node("a", 2, true), node("b", 1, true)],
        recoveries: vec![Recovery { lost_steps: 1, ..recovered(192.0) }],
        recoveries_total: 1,
        incidents: vec![went_back(1, 70)],
        spending: Some(Spending {
            hours: 1.25,
            most_hours: Some(2.0),
            dollars: Some(5.0),
            projected_dollars: Some(5.14),
        }),
        stale_messages: 2,
        eta_seconds: Some(125.0),
        ..gathering()
    }
}

/// A rank died and the next generation forms.
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
        settle_seconds: Some(0.015_625),
        age_seconds: 0.5,
        ..Recovery::default()
    });
    status.recoveries_total = 2;
    status
}

/// As `recovering`, after a planned change, a recovery that failed, and more than are kept.
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
        settle_seconds: Some(1.0),
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

/// A recovery that came to its first step.
fn recovered(age_seconds: f64) -> Recovery {
    Recovery {
        generation: 2,
        cause: "rank 1: its process was killed".to_owned(),
        settle_seconds: Some(0.015_625),
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

/// Asked to save and stop.
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
        save_problem: Some(
            "cannot write shard-00000-of-00003.safetensors: the disk is full".to_owned(),
        ),
        ..training()
    }
}

/// All epochs are done.
pub(crate) fn completed() -> GetStatusResponse {
    ended(outcome::Kind::Completed, "completed", None)
}

/// A regression on arrays, without a price or averaged weights.
pub(crate) fn regression() -> GetStatusResponse {
    let fit = |spearman| Some(Fit { mae: 0.125, pearson: 0.905, spearman });
    let found = |step, spearman| EvaluatedStep {
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
    status.evaluation = Some(found(88, 0.912));
    status.best = Some(found(66, 0.925));
    status.spending = Some(Spending { hours: 0.5, ..Spending::default() });
    status.incidents.clear();
    status
}

/// The budget is used up.
pub(crate) fn limited() -> GetStatusResponse {
    let reason = "limits.max_hours = 2 is reached; raise it to go on";
    let mut status =
        ended(outcome::Kind::LimitReached, &format!("saved and stopped: {reason}"), None);
    status.latest = training().latest;
    if let Some(outcome) = &mut status.outcome {
        outcome.reason = reason.to_owned();
    }
    status
}

/// A rank found that its input is wrong.
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

/// A rollback after so many updates in a generation, to the next.
fn went_back(generation: u64, step: u64) -> Incident {
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
        rollback: Some(Rollback { generation: generation + 1, before: step + 1, skip: None }),
        remedy: format!("back to before step {} with a lower learning rate", step + 1),
    }
}

fn accuracy(top1: f64) -> Accuracy {
    Accuracy { loss: 0.321, top1, top5: 0.997, samples: 360, fit: None }
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

/// `rank`, which has told how it is fed and what it does.
fn fed(rank: RankStatus, wait: f64, ready: u32) -> RankStatus {
    let activity = Activity::Computing.into();
    let own_step_seconds = 0.5 + wait;
    RankStatus {
        loader: Some(Loader { wait, ready, room: 8, ..Loader::default() }),
        pulse: Some(Pulse { activity, seconds: 0.1, step: 440, own_step_seconds }),
        heartbeat_age_seconds: Some(0.4),
        slowness: Some(own_step_seconds / 0.531),
        ..rank
    }
}

/// `rank`, which skipped so many samples.
fn losing(mut rank: RankStatus, skipped: u64) -> RankStatus {
    if let Some(loader) = &mut rank.loader {
        loader.skipped = skipped;
        loader.last_skipped = Some("train.beton: sample 7: no JPEG at byte 4096".to_owned());
    }
    rank
}

fn node(node: &str, slots: u32, attached: bool) -> NodeStatus {
    NodeStatus { node_id: node.to_owned(), slots, attached }
}
