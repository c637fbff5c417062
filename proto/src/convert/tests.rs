use std::{sync::Arc, time::Duration};

use baton_job::{
    Generation, NodeId, Rank, Time,
    engine::{
        DrainStatus, Incident, Meter, NodeStatus, NoticeKind, PhaseName, RankState, RankStatus,
        Recovery, Share, Spending, Status,
    },
    exit::{Class, Failure, Outcome},
    ids::LocalRank,
    message::{
        Activity, Beat, Commit, Directive, Gpu, Hello, Hold, Holding, Host, Launch, LoaderNews,
        Pulse, RankNews, RankPhase, Report, Restore, Restored, Rollback, SaveProblem, SaveTimes,
        StateSource, StepNews, Vitals,
    },
};
use baton_recipe::{
    Epoch, Step,
    guard::{BatchMark, Diagnosis, Divergence, LossWatch},
    progress::{Accuracy, Extent, Fit, Progress},
};
use proptest::{collection::vec, option, prelude::*};

use super::*;
use crate::v1;

// ---- arbitrary values ----

fn share() -> impl Strategy<Value = f64> {
    0.0..=1.0
}

fn word() -> impl Strategy<Value = String> {
    "[a-zé0-9:/ -]{1,12}"
}

fn accuracy() -> impl Strategy<Value = Accuracy> {
    let fit = (share(), share(), share()).prop_map(|(mae, pearson, spearman)| Fit {
        mae,
        pearson,
        spearman,
    });
    (0.0..100.0, share(), share(), any::<u64>(), option::of(fit))
        .prop_map(|(loss, top1, top5, samples, fit)| Accuracy { loss, top1, top5, samples, fit })
}

fn extent() -> impl Strategy<Value = Extent> {
    prop_oneof![Just(Extent::Subset), Just(Extent::Full)]
}

fn batch_mark() -> impl Strategy<Value = BatchMark> {
    (any::<u32>(), any::<u64>())
        .prop_map(|(epoch, cursor)| BatchMark { epoch: Epoch(epoch), cursor })
}

fn diagnosis() -> impl Strategy<Value = Diagnosis> {
    let divergence = prop_oneof![
        Just(Divergence::LossNotFinite),
        Just(Divergence::GradientNotFinite),
        (share(), share()).prop_map(|(mean, bound)| Divergence::LossRose { mean, bound }),
        (share(), share()).prop_map(|(score, best)| Divergence::AccuracyCollapsed { score, best }),
    ];
    let numbers = (share(), option::of(share()), option::of(share()));
    (divergence, any::<u64>(), batch_mark(), numbers, vec(any::<u64>(), 0..4)).prop_map(
        |(divergence, step, batch, (lr, loss, gradient_norm), samples)| Diagnosis {
            divergence,
            step: Step(step),
            batch,
            lr,
            loss,
            gradient_norm,
            samples,
        },
    )
}

fn rollback() -> impl Strategy<Value = Rollback> {
    (any::<u64>(), any::<u64>(), option::of(batch_mark())).prop_map(|(generation, before, skip)| {
        Rollback { generation: Generation(generation), before: Step(before), skip }
    })
}

fn commit() -> impl Strategy<Value = Commit> {
    let took = (0.0..1e6, 0.0..1e6)
        .prop_map(|(stall_seconds, seconds)| SaveTimes { stall_seconds, seconds });
    (word(), any::<u64>(), any::<u64>(), option::of(accuracy()), any::<u64>(), option::of(took))
        .prop_map(|(name, generation, step, accuracy, bytes, took)| Commit {
            name,
            generation: Generation(generation),
            step: Step(step),
            accuracy,
            bytes,
            took,
        })
}

fn failure() -> impl Strategy<Value = Failure> {
    let classes = [
        Class::BadInput,
        Class::Diverged,
        Class::TakenOver,
        Class::Device,
        Class::OutOfMemory,
        Class::Crash,
    ];
    let class = proptest::sample::select(classes.to_vec());
    (class, word()).prop_map(|(class, message)| Failure { class, message })
}

fn outcome() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        Just(Outcome::Completed),
        word().prop_map(|reason| Outcome::Drained { reason }),
        word().prop_map(|reason| Outcome::LimitReached { reason }),
        Just(Outcome::Stopped),
        failure().prop_map(|failure| Outcome::Failed { failure }),
    ]
}

fn progress() -> impl Strategy<Value = Progress> {
    let position = (any::<u64>(), any::<u32>(), any::<u64>());
    let marks = (option::of(any::<u32>()), option::of(any::<u64>()), option::of(any::<u64>()));
    let best = option::of((any::<u64>().prop_map(Step), accuracy()));
    let watch = (any::<u64>(), share(), share(), share(), any::<u32>()).prop_map(
        |(updates, mean, first, lowest, overflows)| LossWatch {
            updates,
            mean,
            first,
            lowest,
            overflows,
        },
    );
    let found = (option::of(accuracy()), best, option::of(any::<u32>()), option::of(accuracy()));
    let guarded = (any::<u32>(), watch, any::<u32>(), vec(batch_mark(), 0..4));
    (position, marks, found, guarded).prop_map(
        |(
            (step, epoch, cursor),
            (evaluated, evaluated_at, saved),
            (last_evaluation, best, evaluated_fully, last_ema),
            (evaluations_since_best, watch, lr_cuts, skips),
        )| Progress {
            step: Step(step),
            epoch: Epoch(epoch),
            cursor,
            evaluated: evaluated.map(Epoch),
            evaluated_at: evaluated_at.map(Step),
            saved: saved.map(Step),
            last_evaluation,
            best,
            evaluated_fully: evaluated_fully.map(Epoch),
            last_ema,
            evaluations_since_best,
            watch,
            lr_cuts,
            skips,
        },
    )
}

fn step_news() -> impl Strategy<Value = StepNews> {
    let counts = (any::<u64>(), any::<u32>(), any::<u64>(), any::<u64>());
    let numbers = (0.0..100.0, share(), share(), 0.0..1e6, share());
    let details = (option::of(share()), option::of(share()), any::<u32>());
    let batches = (any::<u64>(), any::<u64>());
    (counts, numbers, details, batches).prop_map(
        |(
            (step, epoch, total_steps, steps_per_epoch),
            (loss, top1, lr, samples_per_second, loader_wait),
            (gradient_norm, loss_scale, resolution),
            (global_batch, step_of_epoch),
        )| StepNews {
            step: Step(step),
            epoch: Epoch(epoch),
            total_steps,
            steps_per_epoch,
            loss,
            top1,
            lr,
            samples_per_second,
            loader_wait,
            gradient_norm,
            loss_scale,
            resolution,
            global_batch,
            step_of_epoch,
        },
    )
}

fn loader_news() -> impl Strategy<Value = LoaderNews> {
    (share(), any::<u32>(), any::<u32>(), any::<u64>(), option::of(word())).prop_map(
        |(wait, ready, room, skipped, last_skipped)| LoaderNews {
            wait,
            ready,
            room,
            skipped,
            last_skipped,
        },
    )
}

fn pulse() -> impl Strategy<Value = Pulse> {
    let activity = prop_oneof![
        Just(Activity::Restoring),
        Just(Activity::Loading),
        Just(Activity::Computing),
        Just(Activity::Exchanging),
        Just(Activity::Evaluating),
        Just(Activity::Saving),
        Just(Activity::Paused),
    ];
    (activity, 0.0..1e6, any::<u64>(), 0.0..1e6).prop_map(
        |(activity, seconds, step, own_step_seconds)| Pulse {
            activity,
            seconds,
            step: Step(step),
            own_step_seconds,
        },
    )
}

fn source() -> impl Strategy<Value = StateSource> {
    prop_oneof![
        Just(StateSource::Fresh),
        any::<u32>().prop_map(|rank| StateSource::Survivor { rank: Rank(rank) }),
        (
            word(),
            vec(word(), 0..3),
            vec(word(), 0..3),
            any::<u32>(),
            any::<u64>(),
            share(),
            share()
        )
            .prop_map(|(name, skipped, changes, world_size, age_seconds, lr, seconds)| {
                StateSource::Checkpoint(Restored {
                    name,
                    skipped,
                    changes,
                    world_size,
                    age_seconds,
                    lr,
                    seconds,
                })
            }),
    ]
}

fn ready() -> impl Strategy<Value = (String, Option<Step>)> {
    (word(), option::of(any::<u64>().prop_map(Step)))
}

fn evaluated() -> impl Strategy<Value = RankNews> {
    (any::<u64>(), any::<u32>(), accuracy(), option::of(accuracy()), extent()).prop_map(
        |(step, epoch, accuracy, ema, extent)| RankNews::Evaluated {
            step: Step(step),
            epoch: Epoch(epoch),
            accuracy,
            ema,
            extent,
        },
    )
}

fn news() -> impl Strategy<Value = RankNews> {
    prop_oneof![
        ready().prop_map(|(address, step)| RankNews::Ready { address, step }),
        Just(RankNews::Met),
        (source(), progress())
            .prop_map(|(source, progress)| RankNews::Started { source, progress }),
        step_news().prop_map(RankNews::Stepped),
        evaluated(),
        diagnosis().prop_map(RankNews::Diverged),
        word().prop_map(|reason| RankNews::EndsEarly { reason }),
        loader_news().prop_map(RankNews::Loader),
        pulse().prop_map(RankNews::Pulse),
        commit().prop_map(RankNews::Saved),
        (word(), proptest::option::of(any::<u64>())).prop_map(|(message, fence)| {
            RankNews::SaveFailed(SaveProblem { message, fence: fence.map(Generation) })
        }),
        (any::<u64>(), any::<u64>(), 0.0..1e6).prop_map(|(step, behind, seconds)| {
            RankNews::SaveWaits { step: Step(step), behind: Step(behind), seconds }
        }),
        any::<u64>().prop_map(|step| RankNews::Stopping { step: Step(step) }),
        any::<u64>().prop_map(|step| RankNews::Copied { step: Step(step) }),
        word().prop_map(|detail| RankNews::Lost { detail }),
        (outcome(), word()).prop_map(|(outcome, digest)| RankNews::Done { outcome, digest }),
        failure().prop_map(RankNews::Exited),
    ]
}

fn phase() -> impl Strategy<Value = RankPhase> {
    prop_oneof![
        Just(RankPhase::Joining),
        ready().prop_map(|(address, step)| RankPhase::Ready { address, step }),
        Just(RankPhase::Meeting),
        Just(RankPhase::Training),
        Just(RankPhase::Waiting),
        diagnosis().prop_map(RankPhase::Diverged),
        (outcome(), word()).prop_map(|(outcome, digest)| RankPhase::Done { outcome, digest }),
    ]
}

fn holding() -> impl Strategy<Value = Holding> {
    let ranks = vec((any::<u32>().prop_map(Rank), phase()), 0..4);
    (any::<u64>(), ranks, option::of(commit())).prop_map(|(generation, ranks, commit)| Holding {
        generation: Generation(generation),
        ranks,
        commit,
    })
}

fn vitals() -> impl Strategy<Value = Vitals> {
    let gpu = (any::<u32>(), word(), option::of(share()), any::<u64>(), option::of(share()));
    let gpu = gpu.prop_map(|(index, name, utilisation, memory_used, watts)| Gpu {
        index,
        uuid: format!("GPU-{index}"),
        name,
        utilisation,
        memory_used,
        memory_total: 80,
        celsius: watts,
        watts,
    });
    let host = (word(), share(), any::<u32>(), any::<u64>(), share());
    (host, vec(gpu, 0..4)).prop_map(|((name, cpu, cpus, bytes, rate), gpus)| Vitals {
        host: Host {
            name,
            cpu,
            cpus,
            memory_used: bytes,
            memory_total: bytes,
            disk_free: bytes,
            disk_total: bytes,
            received_per_second: rate,
            sent_per_second: rate,
        },
        gpus,
    })
}

fn beat() -> impl Strategy<Value = Beat> {
    let round_trip = option::of((0u64..1_000_000).prop_map(Duration::from_micros));
    (any::<u64>(), round_trip, option::of(vitals())).prop_map(|(number, round_trip, vitals)| Beat {
        number,
        round_trip,
        vitals,
    })
}

fn report() -> impl Strategy<Value = Report> {
    prop_oneof![
        (word(), any::<u32>(), option::of(holding())).prop_map(|(node, slots, holding)| {
            Report::Hello(Hello { node: NodeId(node), slots, holding })
        }),
        (any::<u64>(), any::<u32>(), news()).prop_map(|(generation, rank, news)| Report::Rank {
            generation: Generation(generation),
            rank: Rank(rank),
            news,
        }),
        (word(), option::of(0.0..1e6))
            .prop_map(|(reason, seconds_left)| Report::DrainRequested { reason, seconds_left }),
        word().prop_map(|reason| Report::Advised { reason }),
        word().prop_map(|message| Report::GpuWarning { message }),
        beat().prop_map(Report::Beat),
        any::<u32>().prop_map(|local| Report::Warm { local_rank: LocalRank(local) }),
        (any::<u32>(), failure()).prop_map(|(local, failure)| Report::WarmFailed {
            local_rank: LocalRank(local),
            failure,
        }),
    ]
}

fn launch() -> impl Strategy<Value = Launch> {
    let local = || any::<u32>().prop_map(LocalRank);
    let ranks = vec((any::<u32>().prop_map(Rank), local()), 0..9);
    let flags = any::<(bool, bool)>();
    let restore = (any::<u64>(), option::of(word()), flags, vec(rollback(), 0..3));
    (any::<u64>(), any::<u32>(), ranks, vec(local(), 0..3), restore).prop_map(
        |(
            generation,
            world_size,
            ranks,
            replace,
            (not_before, path, (allow_recipe_change, paused), rollbacks),
        )| Launch {
            generation: Generation(generation),
            world_size,
            ranks,
            replace,
            restore: Restore {
                not_before: Generation(not_before),
                path,
                allow_recipe_change,
                rollbacks,
            },
            hold: Hold { number: u64::from(world_size), paused },
        },
    )
}

fn directive() -> impl Strategy<Value = Directive> {
    let generation = || any::<u64>().prop_map(Generation);
    prop_oneof![
        launch().prop_map(Directive::Launch),
        (generation(), vec(word(), 0..9))
            .prop_map(|(generation, peers)| Directive::Begin { generation, peers: peers.into() }),
        any::<(u64, bool)>().prop_map(|(number, paused)| Directive::Hold(Hold { number, paused })),
        any::<u64>().prop_map(|number| Directive::Heard { number }),
        generation().prop_map(|generation| Directive::Checkpoint { generation }),
        (generation(), word())
            .prop_map(|(generation, reason)| Directive::Drain { generation, reason }),
        word().prop_map(|reason| Directive::Release { reason }),
        vec(any::<u32>().prop_map(LocalRank), 0..4)
            .prop_map(|local_ranks| Directive::Warm { local_ranks }),
        outcome().prop_map(|outcome| Directive::Dismiss { outcome }),
    ]
}

/// What the peer's decoder sees.
fn over_the_wire<M: prost::Message + Default>(message: &M) -> M {
    M::decode(message.encode_to_vec().as_slice()).unwrap()
}

proptest! {
    #[test]
    fn reports_survive_the_wire(report in report()) {
        let wire = over_the_wire(&v1::AgentMessage::from(report.clone()));
        prop_assert_eq!(Report::try_from(wire), Ok(report));
    }

    #[test]
    fn directives_survive_the_wire(directive in directive()) {
        let wire = over_the_wire(&v1::CoordinatorMessage::from(directive.clone()));
        prop_assert_eq!(Directive::try_from(wire), Ok(directive));
    }
}

#[test]
fn every_kind_on_the_wire_has_a_meaning() {
    use v1::watch_events_response::Kind;
    for kind in (1..).map_while(|number| Kind::try_from(number).ok()) {
        assert_eq!(NoticeKind::try_from(kind).map(Kind::from), Ok(kind));
    }
}

// ---- messages that make no sense ----

fn problem_of(message: impl TryInto<Report, Error = Malformed>) -> String {
    message.try_into().unwrap_err().to_string()
}

fn rank_report(news: Option<v1::rank_report::News>) -> v1::AgentMessage {
    let report = v1::RankReport { generation: 1, rank: 0, news };
    v1::AgentMessage { message: Some(v1::agent_message::Message::Rank(report)) }
}

#[test]
fn a_missing_oneof_is_named() {
    assert_eq!(
        problem_of(v1::AgentMessage::default()),
        "malformed AgentMessage: message is missing"
    );
    assert_eq!(problem_of(rank_report(None)), "malformed RankReport: news is missing");
    let started = v1::rank_report::News::Started(v1::RankStarted::default());
    assert_eq!(problem_of(rank_report(Some(started))), "malformed RankStarted: source is missing");
}

#[test]
fn an_unknown_or_unset_enum_is_named() {
    let exited = |class| v1::rank_report::News::Exited(v1::Failure { class, ..Default::default() });
    assert_eq!(problem_of(rank_report(Some(exited(0)))), "malformed Failure: class is missing");
    assert_eq!(
        problem_of(rank_report(Some(exited(99)))),
        "malformed Failure: class has the unknown value 99; is the peer of another version?"
    );
    let unset = Outcome::try_from(v1::Outcome::default()).unwrap_err();
    assert_eq!((unset.message, unset.field), ("Outcome", "kind"));
    let failed = v1::Outcome { kind: v1::outcome::Kind::Failed.into(), ..Default::default() };
    assert_eq!(Outcome::try_from(failed).unwrap_err().field, "failure");
}

#[test]
fn an_agent_without_a_name_is_refused() {
    let hello = v1::agent_message::Message::Hello(v1::Hello::default());
    assert_eq!(
        problem_of(v1::AgentMessage { message: Some(hello) }),
        "malformed Hello: node_id is missing"
    );
}

#[test]
fn a_second_welcome_is_refused() {
    let welcome = v1::coordinator_message::Message::Welcome(v1::Welcome::default());
    let second = v1::CoordinatorMessage { message: Some(welcome) };
    assert_eq!(Directive::try_from(second).unwrap_err().field, "message");
}

#[test]
fn an_agent_of_another_version_is_told_both() {
    let ours = v1::Hello::from(Hello { node: NodeId("a".into()), slots: 1, holding: None });
    assert_eq!(check_version(&ours), Ok(()));
    let theirs = v1::Hello { version: "0.0.9".into(), ..ours };
    let status = tonic::Status::from(check_version(&theirs).unwrap_err());
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
    assert!(status.message().contains("0.0.9"), "{status}");
    assert!(status.message().contains(env!("CARGO_PKG_VERSION")), "{status}");
}

// ---- status ----

/// All are ready.
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
        began_with: None,
        save_problem: None,
        ranks: vec![],
        nodes: vec![],
        epochs: 16,
        latest: None,
        evaluation: None,
        best: None,
        commit: None,
        skipped_samples: 0,
        recoveries: Arc::new([recovery()].into()),
        recoveries_total: 3,
        incidents: vec![],
        spending: Spending::default(),
        stale_messages: 3,
        drain: Some(DrainStatus {
            reason: "spot notice".into(),
            since: Time(8_000),
            until: Time(120_000),
            stop_step: Some(Step(41)),
            agreed_at: Some(Time(8_250)),
            copied_at: Some(Time(8_500)),
            durable_at: None,
        }),
        pause: None,
        outcome: None,
    }
}

/// As users see it two seconds after 8 s.
fn shown(told: &Status) -> v1::GetStatusResponse {
    let job = Job {
        id: "5f0c8d5e-3d6c-4b59-9a3c-6d1f0f3f2a11",
        name: "digits_cpu",
        checkpoint_location: "runs/digits_cpu/checkpoints",
        checkpoint_age_seconds: Some(1.5),
        coordinator_started_unix_seconds: 1_700_000_000,
        coordinator_version: "0.1.0",
    };
    status(told, Time(10_000), job)
}

#[test]
fn a_status_tells_durations_in_seconds_and_leaves_out_what_has_not_happened() {
    let wire = shown(&draining_since_8_s());

    assert_eq!(wire.phase(), v1::get_status_response::Phase::Draining);
    assert_eq!(wire.phase_seconds, 2.0);
    let drain = wire.drain.as_ref().unwrap();
    assert_eq!((drain.seconds_left, drain.stop_step), (110.0, Some(41)));
    assert_eq!((drain.agreed_after_seconds, drain.copied_after_seconds), (Some(0.25), Some(0.5)));
    assert_eq!(drain.durable_after_seconds, None);
    let expected = v1::Recovery {
        generation: 2,
        cause: "rank 1 was killed".into(),
        settle_seconds: Some(0.25),
        tear_down_seconds: Some(0.5),
        respawn_seconds: Some(1.5),
        age_seconds: 5.0,
        ..v1::Recovery::default()
    };
    assert_eq!((wire.recoveries, wire.recoveries_total), (vec![expected], 3));
    assert_eq!(wire.stale_messages, 3);
}

#[test]
fn a_recovery_that_came_to_its_first_step_tells_all_its_parts_and_their_sum() {
    let whole = Recovery {
        planned: true,
        met_at: Some(Time(7_500)),
        started_at: Some(Time(8_500)),
        stepped_at: Some(Time(8_625)),
        lost_steps: 2,
        ..recovery()
    };
    let told = Status { recoveries: Arc::new([whole].into()), ..draining_since_8_s() };

    let wire = shown(&told).recoveries.remove(0);

    assert_eq!((wire.rendezvous_seconds, wire.restore_seconds), (Some(0.25), Some(1.0)));
    assert_eq!((wire.first_step_seconds, wire.total_seconds), (Some(0.125), Some(3.625)));
    assert_eq!((wire.lost_steps, wire.planned), (2, true));
}

#[test]
fn a_status_tells_what_each_rank_does_how_it_is_fed_and_what_was_skipped() {
    let loader = LoaderNews {
        wait: 0.25,
        ready: 3,
        room: 8,
        skipped: 12,
        last_skipped: Some("train.beton: sample 7: no JPEG at byte 4096".into()),
    };
    let rank = |rank, loader: Option<LoaderNews>| RankStatus {
        rank: Rank(rank),
        node: NodeId("a".into()),
        local_rank: LocalRank(rank),
        state: RankState::Training,
        pulse: loader.as_ref().map(|_| Pulse { step: Step(9), ..Pulse::default() }),
        heard_at: loader.as_ref().map(|_| Time(9_500)),
        slowness: None,
        loader,
    };
    let ranks = vec![rank(0, None), rank(1, Some(loader.clone()))];
    let told = Status { ranks, skipped_samples: 15, ..draining_since_8_s() };

    let wire = shown(&told);

    assert_eq!(wire.skipped_samples, 15);
    assert_eq!(wire.ranks[0].loader, None);
    assert_eq!(wire.ranks[1].loader.clone().map(LoaderNews::from), Some(loader));
    assert_eq!(wire.ranks[1].pulse.map(|pulse| pulse.step), Some(9));
    assert_eq!(wire.ranks[1].heartbeat_age_seconds, Some(0.5));
    assert_eq!((wire.ranks[0].pulse, wire.ranks[0].heartbeat_age_seconds), (None, None));
}

#[test]
fn a_status_tells_why_the_step_went_back() {
    let diagnosis = Diagnosis {
        divergence: Divergence::LossNotFinite,
        step: Step(40),
        batch: BatchMark { epoch: Epoch(1), cursor: 640 },
        lr: 0.1,
        loss: None,
        gradient_norm: Some(3.5),
        samples: vec![7],
    };
    let rollback = Rollback { generation: Generation(2), before: Step(41), skip: None };
    let incident =
        Incident { generation: Generation(1), diagnosis, rollback: Some(rollback.clone()) };
    let told = Status { incidents: vec![incident.clone()], ..draining_since_8_s() };

    let mut wire = shown(&told).incidents;

    let wire = wire.remove(0);
    assert_eq!(wire.cause, incident.diagnosis.to_string());
    assert_eq!(wire.remedy, "back to before step 41 with a lower learning rate");
    assert_eq!(wire.rollback.map(Rollback::from), Some(rollback));
    assert_eq!(wire.diagnosis.map(Diagnosis::try_from), Some(Ok(incident.diagnosis)));
}

#[test]
fn a_status_tells_what_the_job_costs() {
    let latest = StepNews {
        epoch: Epoch(15),
        steps_per_epoch: 100,
        global_batch: 36,
        samples_per_second: 1.0,
        ..StepNews::default()
    };
    let spending = Spending {
        meter: Meter::default(),
        most: Some(Duration::from_secs(5_400)),
        dollars_per_hour: Some(4.0),
        interrupted: Share::default(),
        paused: Share::default(),
    };
    let told = Status { spending, latest: Some(latest), ..draining_since_8_s() };

    let wire = shown(&told);

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
fn what_is_not_finite_is_left_out_of_a_diagnosis() {
    let diagnosis = Diagnosis {
        divergence: Divergence::GradientNotFinite,
        step: Step(0),
        batch: BatchMark::default(),
        lr: 0.1,
        loss: Some(2.0),
        gradient_norm: Some(f64::INFINITY),
        samples: vec![],
    };
    let wire = v1::Diagnosis::from(diagnosis);
    assert_eq!((wire.loss, wire.gradient_norm), (Some(2.0), None));
}

#[test]
fn a_rank_shows_the_gpu_of_its_place_and_a_node_how_its_machine_does() {
    let gpu = |index| Gpu { index, memory_used: u64::from(index), ..Gpu::default() };
    let vitals = Vitals { host: Host { cpus: 96, ..Host::default() }, gpus: vec![gpu(1), gpu(0)] };
    let told = |node: &str, vitals| NodeStatus {
        node: NodeId(node.to_owned()),
        slots: 2,
        attached: true,
        vitals,
        heard_at: Some(Time(9_000)),
        round_trip: Some(Duration::from_millis(2)),
    };
    let rank = |rank, node: &str, local| RankStatus {
        rank: Rank(rank),
        node: NodeId(node.to_owned()),
        local_rank: LocalRank(local),
        state: RankState::Training,
        loader: None,
        pulse: None,
        heard_at: None,
        slowness: None,
    };
    let told = Status {
        nodes: vec![told("a", Some(Arc::new(vitals))), told("b", None)],
        ranks: vec![rank(0, "a", 0), rank(1, "a", 1), rank(2, "b", 0)],
        ..draining_since_8_s()
    };

    let wire = shown(&told);

    let gpus = wire.ranks.iter().map(|rank| rank.gpu.as_ref().map(|gpu| gpu.memory_used));
    assert_eq!(gpus.collect::<Vec<_>>(), [Some(0), Some(1), None]);
    let (a, b) = (&wire.nodes[0], &wire.nodes[1]);
    assert_eq!((a.host.as_ref().map(|host| host.cpus), b.host.as_ref()), (Some(96), None));
    assert_eq!((a.heartbeat_age_seconds, a.round_trip_seconds), (Some(1.0), Some(0.002)));
}
