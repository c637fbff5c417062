//! One state, one event, the resulting actions. Whole histories are tested in `tests/simulation`.

use super::*;
use crate::{
    exit::{Class, Failure},
    gpu::xid::Xid,
    ids::{Incarnation, Rank},
    mesh_secret::MeshSecret,
    message::{
        Activity, AgentHeartbeat, AgentReport, Directive, GeneratedText, Hello, Launch,
        LoaderReport, ProfileRequest, RankCommand, RankHeartbeat, RankMessage, RankPhase,
        RankReport, Restore, RunningRanks, StateSource, StepReport,
    },
};
use baton_recipe::{
    Epoch, Step,
    guard::{BatchMark, Diagnosis, Divergence},
    progress::{Accuracy, Extent, Progress},
};

fn at(seconds: f64) -> Time {
    Time(0).after(Duration::from_secs_f64(seconds))
}

// ---- states, each built from the previous one ----

/// An agent with `slots` slots that has just sent its hello.
fn attached(slots: u32) -> Session {
    let mut session = Session::new(NodeId("node0".to_owned()), slots, Policy::default());
    assert_eq!(session.handle(at(0.0), Event::Tick), [Action::Connect]);
    assert_eq!(session.handle(at(0.0), Event::Connected), [hello(slots, None)]);
    session
}

/// Every slot runs a rank of generation 1 that joins.
fn joining(slots: u32) -> Session {
    let mut session = attached(slots);
    session.handle(at(1.0), launched(1, slots));
    session
}

fn training(slots: u32) -> Session {
    let mut session = joining(slots);
    for local in 0..slots {
        reports(&mut session, at(2.0), local, ready(local, None));
        reports(&mut session, at(3.0), local, started());
    }
    session
}

/// Training continues, but the coordinator is away.
fn disconnected(slots: u32) -> Session {
    let mut session = training(slots);
    session.handle(at(10.0), Event::Disconnected);
    session
}

// ---- events ----

/// A launch of ranks 0, 1, … in the slots with the same numbers.
fn launch(generation: u64, ranks: u32) -> Launch {
    Launch {
        generation: Generation(generation),
        world_size: 4,
        ranks: (0..ranks).map(|local| (Rank(local), LocalRank(local))).collect(),
        replace: Vec::new(),
        restore: Restore::default(),
        pause: PauseState::default(),
    }
}

fn launched(generation: u64, ranks: u32) -> Event {
    Event::Directive(Directive::Launch(launch(generation, ranks)))
}

fn begin(generation: u64) -> Event {
    let (generation, peers) = (Generation(generation), ["host:0".to_owned()].into());
    Event::Directive(Directive::Begin { generation, peers, secret: secret() })
}

fn secret() -> MeshSecret {
    MeshSecret::new([7; MeshSecret::BYTES])
}

fn shutdown_signal() -> Event {
    Event::ShutdownSignal { reason: "spot notice".to_owned(), is_orphan: false }
}

fn dismissed() -> Event {
    Event::Directive(Directive::Dismiss { outcome: Outcome::Completed })
}

/// The present process in a slot sends a report about the present generation.
fn reports(session: &mut Session, now: Time, local: u32, report: RankReport) -> Vec<Action> {
    let generation = session.generation;
    let incarnation = session.slots[local as usize].incarnation;
    session.handle(now, rank_reported(local, incarnation, generation, report))
}

fn rank_reported(
    local: u32,
    incarnation: Incarnation,
    generation: Generation,
    report: RankReport,
) -> Event {
    Event::RankReported {
        local_rank: LocalRank(local),
        incarnation,
        message: RankMessage { generation, report },
    }
}

/// The present process in a slot ends.
fn exit(session: &mut Session, now: Time, local: u32) -> Vec<Action> {
    let incarnation = session.slots[local as usize].incarnation;
    session.handle(now, exited(local, incarnation))
}

fn exited(local: u32, incarnation: Incarnation) -> Event {
    Event::RankExited { local_rank: LocalRank(local), incarnation, failure: killed() }
}

fn killed() -> Failure {
    failure_of(None, Some(15), false)
}

// ---- reports ----

fn ready(local: u32, step: Option<u64>) -> RankReport {
    RankReport::Ready { address: format!("host:{local}"), step: step.map(Step) }
}

fn started() -> RankReport {
    RankReport::Started { source: StateSource::fresh(), progress: Progress::default() }
}

fn lost() -> RankReport {
    RankReport::Lost { detail: "connection reset".to_owned(), unreached: Vec::new() }
}

fn done(outcome: Outcome) -> RankReport {
    RankReport::Done { outcome, digest: "d".to_owned() }
}

fn drained() -> Outcome {
    Outcome::Drained { reason: "spot notice".to_owned() }
}

fn commit() -> Commit {
    Commit {
        name: "step-50".to_owned(),
        generation: Generation(1),
        step: Step(50),
        accuracy: None,
        bytes: 1,
        took: None,
        fence_lost: false,
    }
}

#[test]
fn an_agent_connects_to_another_coordinator_at_once() {
    let mut session = training(1);
    assert_eq!(
        session.handle(at(5.0), Event::Redirected),
        [coordinator_lost(0, true), Action::Connect]
    );
    for second in 6..20 {
        session.handle(at(f64::from(second)), Event::Disconnected);
        session.handle(at(f64::from(second) + 0.9), Event::Tick);
    }
    session.handle(at(20.0), Event::Disconnected);
    assert_eq!(session.handle(at(20.1), Event::Redirected), [Action::Connect], "without a pause");
}

// ---- pauses and heartbeats ----

fn pause(number: u64, paused: bool) -> Event {
    Event::Directive(Directive::Pause(PauseState { number, paused }))
}

fn pause_command(local: u32, paused: bool) -> Action {
    send_to_rank(local, RankCommand::Pause { generation: Generation(1), paused })
}

#[test]
fn pause_and_resume_are_sent_once_and_late_pauses_are_ignored() {
    let mut session = training(2);
    let expected = [pause_command(0, true), pause_command(1, true)];
    assert_eq!(session.handle(at(5.0), pause(1, true)), expected);
    assert_eq!(session.handle(at(6.0), pause(1, true)), []);
    let expected = [pause_command(0, false), pause_command(1, false)];
    assert_eq!(session.handle(at(7.0), pause(2, false)), expected);
    assert_eq!(session.handle(at(8.0), pause(1, true)), [], "a pause of an earlier connection");
    assert_eq!(session.stale_messages(), 2);
}

#[test]
fn a_profile_is_requested_from_every_rank_with_the_name_of_its_node() {
    let mut session = training(2);
    let profile = |generation| {
        Event::Directive(Directive::Profile { generation, name: "1".to_owned(), steps: 5 })
    };
    let command = |local| {
        let (name, node) = ("1".to_owned(), session.node.clone());
        let request = ProfileRequest { name, steps: 5, node };
        send_to_rank(local, RankCommand::Profile { generation: Generation(1), request })
    };
    let expected = [command(0), command(1)];
    assert_eq!(session.handle(at(5.0), profile(Generation(1))), expected);
    assert_eq!(session.handle(at(6.0), profile(Generation(9))), []);
    let (name, problem) = ("1".to_owned(), None);
    let written = RankReport::Profiled { name, problem };
    let forwarded =
        session.handle(at(7.0), rank_reported(0, Incarnation(1), Generation(1), written.clone()));
    let report = AgentReport::Rank { generation: Generation(1), rank: Rank(0), report: written };
    assert_eq!(forwarded, [Action::Send(report)]);
}

#[test]
fn join_includes_whether_the_job_is_paused() {
    let mut session = attached(1);
    let paused = |actions: &[Action]| {
        let command = actions.iter().find_map(|action| match action {
            Action::SendToRank { command: RankCommand::Join { paused, .. }, .. } => Some(*paused),
            _ => None,
        });
        command.unwrap()
    };
    let launch = Launch { pause: PauseState { number: 1, paused: true }, ..launch(1, 1) };
    assert!(paused(&session.handle(at(1.0), Event::Directive(Directive::Launch(launch)))));
    session.handle(at(2.0), pause(2, false));
    assert!(!paused(&session.handle(at(3.0), launched(2, 1))));
}

#[test]
fn heartbeat_includes_the_last_round_trip_time() {
    let mut session = attached(1);
    let heartbeat = |number, round_trip: Option<u64>| {
        let round_trip = round_trip.map(Duration::from_millis);
        [Action::Send(AgentReport::Heartbeat(AgentHeartbeat { number, round_trip, stats: None }))]
    };
    let ack = |number| Event::Directive(Directive::HeartbeatAck { number });
    assert_eq!(session.handle(at(1.0), Event::MachineStats(None)), heartbeat(1, None));
    assert_eq!(session.handle(at(1.02), ack(1)), []);
    assert_eq!(session.handle(at(2.0), Event::MachineStats(None)), heartbeat(2, Some(20)));
    // A late answer to an earlier heartbeat.
    assert_eq!(session.handle(at(2.5), ack(1)), []);
    assert_eq!(session.handle(at(3.0), Event::MachineStats(None)), heartbeat(3, Some(20)));
    session.handle(at(3.1), Event::Disconnected);
    assert_eq!(session.handle(at(3.15), Event::MachineStats(None)), []);
}

// ---- actions ----

fn hello(slots: u32, holding: Option<RunningRanks>) -> Action {
    Action::Send(AgentReport::Hello(Hello::new(NodeId("node0".to_owned()), slots, holding)))
}

fn running_ranks(ranks: &[(u32, RankPhase)]) -> Option<RunningRanks> {
    // Here each rank has the number of its slot.
    let held = ranks.iter().filter(|(_, phase)| phase.may_hold_state());
    let holders = held.map(|(rank, _)| LocalRank(*rank)).collect();
    let ranks = ranks.iter().map(|(rank, phase)| (Rank(*rank), phase.clone())).collect();
    Some(RunningRanks { generation: Generation(1), ranks, holders, ..RunningRanks::default() })
}

fn forwarded(rank: u32, report: RankReport) -> Action {
    Action::Send(AgentReport::Rank { generation: Generation(1), rank: Rank(rank), report })
}

fn evaluated(step: u64) -> RankReport {
    RankReport::Evaluated {
        step: Step(step),
        epoch: Epoch(1),
        accuracy: Accuracy::default(),
        ema: None,
        extent: Extent::Full,
        texts: Vec::new(),
    }
}

fn stepped(step: u64) -> RankReport {
    RankReport::Stepped(StepReport { step: Step(step), ..StepReport::default() })
}

fn spawn(local: u32, incarnation: u64) -> Action {
    Action::Spawn { local_rank: LocalRank(local), incarnation: Incarnation(incarnation) }
}

fn send_to_rank(local: u32, command: RankCommand) -> Action {
    Action::SendToRank { local_rank: LocalRank(local), command }
}

fn join(generation: u64, local: u32) -> Action {
    let command = RankCommand::Join {
        generation: Generation(generation),
        rank: Rank(local),
        world_size: 4,
        restore: Restore::default(),
        paused: false,
    };
    send_to_rank(local, command)
}

fn drain(local: u32) -> Action {
    let reason = "spot notice".to_owned();
    send_to_rank(local, RankCommand::Drain { generation: Generation(1), reason })
}

fn departure_report() -> Action {
    Action::Send(AgentReport::NodeDeparting {
        reason: "spot notice".to_owned(),
        seconds_left: None,
    })
}

// ---- launching ----

#[test]
fn launch_starts_a_process_for_each_rank() {
    let actions = attached(3).handle(at(1.0), launched(1, 2));

    assert_eq!(actions, [spawn(0, 1), join(1, 0), spawn(1, 1), join(1, 1)]);
}

#[test]
fn running_processes_join_and_only_ended_ones_are_started_again() {
    let mut session = training(2);
    let failed = forwarded(1, RankReport::Exited(killed()));
    assert_eq!(exit(&mut session, at(10.0), 1), [failed]);

    let actions = session.handle(at(10.1), launched(2, 2));

    assert_eq!(actions, [join(2, 0), spawn(1, 2), join(2, 1)]);
}

#[test]
fn spare_is_kept_once_all_ranks_train_if_the_recipe_requests_one() {
    let mut session = joining(2);
    session.set_policy(Policy { warm_spare: true, ..Policy::default() });
    assert_eq!(reports(&mut session, at(2.0), 0, started()), [forwarded(0, started())]);
    assert_eq!(
        reports(&mut session, at(2.0), 1, started()),
        [forwarded(1, started()), Action::KeepSpare]
    );
    // The spare has replaced a process that ended; a new spare is needed.
    exit(&mut session, at(3.0), 1);
    session.handle(at(3.1), launched(2, 2));
    let rank_reported = |local, report| {
        rank_reported(local, Incarnation(1 + u64::from(local)), Generation(2), report)
    };
    session.handle(at(4.0), rank_reported(0, started()));
    let actions = session.handle(at(4.0), rank_reported(1, started()));
    assert_eq!(actions.last(), Some(&Action::KeepSpare));
    session.handle(at(5.0), dismissed());
    assert!(!session.handle(at(5.0), rank_reported(0, started())).contains(&Action::KeepSpare));

    let mut session = joining(1);
    assert_eq!(reports(&mut session, at(2.0), 0, started()), [forwarded(0, started())]);
}

#[test]
fn hanging_process_is_killed_and_replaced_after_it_has_ended() {
    let mut session = training(1);
    let launch = Launch { replace: vec![LocalRank(0)], ..launch(2, 1) };

    let actions = session.handle(at(10.0), Event::Directive(Directive::Launch(launch)));

    assert_eq!(actions, [Action::Kill(LocalRank(0))]);
    assert_eq!(exit(&mut session, at(10.1), 0), [spawn(0, 2), join(2, 0)]);
}

#[test]
fn finished_process_is_not_reused() {
    let mut session = training(1);
    reports(&mut session, at(9.0), 0, done(Outcome::Completed));

    assert_eq!(session.handle(at(10.0), launched(2, 1)), [Action::Terminate(LocalRank(0))]);

    assert_eq!(exit(&mut session, at(10.1), 0), [spawn(0, 2), join(2, 0)]);
}

#[test]
fn process_without_a_rank_is_asked_to_exit_and_then_killed() {
    let mut session = training(1);

    assert_eq!(session.handle(at(10.0), launched(2, 0)), [Action::Terminate(LocalRank(0))]);

    assert_eq!(session.deadline(), Some(at(15.0)));
    assert_eq!(session.handle(at(15.0), Event::Tick), [Action::Kill(LocalRank(0))]);
    assert_eq!(session.deadline(), None);
    assert_eq!(exit(&mut session, at(15.1), 0), []);
}

#[test]
fn repeated_launch_does_not_restart_ended_processes() {
    let mut session = training(1);
    exit(&mut session, at(10.0), 0);

    assert_eq!(session.handle(at(10.1), launched(1, 1)), []);
}

#[test]
fn repeated_launch_brings_a_pause_that_was_missed() {
    let mut session = training(1);
    let launch = Launch { pause: PauseState { number: 1, paused: true }, ..launch(1, 1) };

    let actions = session.handle(at(10.0), Event::Directive(Directive::Launch(launch)));

    assert_eq!(actions, [pause_command(0, true)]);
    assert_eq!(session.stale_messages(), 0);
}

#[test]
fn replaced_process_is_part_of_the_next_hello() {
    let mut session = training(1);
    let launch = Launch { replace: vec![LocalRank(0)], ..launch(2, 1) };
    session.handle(at(10.0), Event::Directive(Directive::Launch(launch)));
    session.handle(at(10.1), Event::Disconnected);
    session.handle(at(10.2), Event::Tick);

    let actions = session.handle(at(10.3), Event::Connected);

    let running = running_ranks(&[(0, RankPhase::Joining)]);
    let running = running.map(|running| RunningRanks { generation: Generation(2), ..running });
    assert_eq!(actions, [hello(1, running)]);
}

#[test]
fn begin_is_sent_to_a_rank_once() {
    let mut session = joining(1);
    reports(&mut session, at(2.0), 0, ready(0, None));

    let (generation, peers) = (Generation(1), vec!["host:0".to_owned()]);
    let passed = RankCommand::Begin { generation, peers, secret: secret() };
    assert_eq!(session.handle(at(3.0), begin(1)), [send_to_rank(0, passed)]);
    assert_eq!(session.handle(at(3.1), begin(1)), []);
}

#[test]
fn checkpoint_is_sent_to_rank_0_and_drain_to_every_rank() {
    let mut session = training(2);
    let generation = Generation(1);
    let checkpoint = Event::Directive(Directive::Checkpoint { generation });
    let reason = "spot notice".to_owned();
    let drain_all = Event::Directive(Directive::Drain { generation, reason });

    let passed = RankCommand::Checkpoint { generation };
    assert_eq!(session.handle(at(10.0), checkpoint), [send_to_rank(0, passed)]);
    assert_eq!(session.handle(at(11.0), drain_all), [drain(0), drain(1)]);
}

#[test]
fn an_agent_is_attached_once_it_has_an_answer() {
    let mut session = attached(1);
    assert!(session.reason().starts_with("looking for the coordinator"), "{}", session.reason());
    session.handle(at(1.0), launched(1, 1));
    assert!(session.reason().starts_with("attached"), "{}", session.reason());
}

// ---- stale messages ----

/// Checks that a stale message only increases the count of stale messages.
fn ignored(mut session: Session, event: Event) {
    let (reason, deadline, stale) =
        (session.reason(), session.deadline(), session.stale_messages());

    assert_eq!(session.handle(at(10.0), event), []);

    assert_eq!((session.reason(), session.deadline()), (reason, deadline));
    assert_eq!(session.stale_messages(), stale + 1);
}

#[test]
fn directives_of_an_older_generation_are_ignored_and_counted() {
    let mut session = training(1);
    session.handle(at(4.0), launched(2, 1));
    reports(&mut session, at(5.0), 0, ready(0, None));
    let generation = Generation(1);
    let reason = "stale".to_owned();
    for event in [
        launched(1, 0),
        begin(1),
        Event::Directive(Directive::Checkpoint { generation }),
        Event::Directive(Directive::Drain { generation, reason }),
    ] {
        ignored(session.clone(), event);
    }
}

#[test]
fn late_messages_of_a_replaced_process_are_ignored() {
    let mut session = training(1);
    exit(&mut session, at(4.0), 0);
    session.handle(at(5.0), launched(2, 1));
    ignored(session.clone(), rank_reported(0, Incarnation(1), Generation(2), ready(0, None)));
    ignored(session, exited(0, Incarnation(1)));
}

#[test]
fn messages_of_an_older_generation_are_ignored_and_counted() {
    let mut session = training(1);
    session.handle(at(4.0), launched(2, 1));
    ignored(session, rank_reported(0, Incarnation(1), Generation(1), lost()));
}

// ---- without a coordinator ----

#[test]
fn reconnects_at_growing_intervals() {
    let mut session = attached(1);
    let mut now = at(10.0);
    let mut pauses = Vec::new();
    for _ in 0..6 {
        session.handle(now, Event::Disconnected);
        let retry_at = session.deadline().unwrap();
        pauses.push(retry_at.since(now).as_millis());
        now = retry_at;
        assert_eq!(session.handle(now, Event::Tick), [Action::Connect]);
    }
    assert_eq!(pauses, [100, 200, 400, 800, 1_600, 1_600]);

    // A connection over which no directive came was refused.
    session.handle(now, Event::Connected);
    session.handle(now, Event::Disconnected);
    assert_eq!(session.deadline(), Some(now.after(Duration::from_millis(1_600))));
    session.handle(now, Event::Connected);
    session.handle(now, Event::Directive(Directive::HeartbeatAck { number: 1 }));
    session.handle(now, Event::Disconnected);
    assert_eq!(session.deadline(), Some(now.after(Duration::from_millis(100))));
}

#[test]
fn loader_reports_are_forwarded_and_change_no_phase() {
    let mut session = joining(5);
    reports(&mut session, at(2.0), 0, started());
    let report =
        RankReport::Loader(LoaderReport { ready: 3, capacity: 8, ..LoaderReport::default() });

    assert_eq!(reports(&mut session, at(3.0), 0, report.clone()), [forwarded(0, report)]);
}

#[test]
fn report_that_a_rank_met_the_others_is_forwarded_and_changes_no_phase() {
    let mut session = joining(1);
    reports(&mut session, at(2.0), 0, ready(0, None));
    session.handle(at(3.0), begin(1));

    assert_eq!(reports(&mut session, at(3.1), 0, RankReport::Met), [forwarded(0, RankReport::Met)]);

    session.handle(at(4.0), Event::Disconnected);
    session.handle(at(4.2), Event::Tick);
    let actions = session.handle(at(4.3), Event::Connected);
    assert_eq!(actions, [hello(1, running_ranks(&[(0, RankPhase::Meeting)]))]);
}

fn heartbeat(activity: Activity, seconds: f64) -> RankReport {
    RankReport::Heartbeat(RankHeartbeat {
        activity,
        seconds,
        step: Step(7),
        ..RankHeartbeat::default()
    })
}

/// Two ranks train; a rank that hangs for 20 s is killed.
fn with_hang_timeout() -> Session {
    let mut session = training(2);
    session.set_policy(Policy { hang_timeout: Duration::from_secs(20), ..Policy::default() });
    session
}

/// Advances time like the agent does, with `alive` once a second; returns the actions.
fn advance(
    session: &mut Session,
    until: Time,
    mut alive: impl FnMut(&mut Session, Time) -> Vec<Action>,
) -> Vec<Action> {
    let mut actions = Vec::new();
    let mut second = 4;
    loop {
        let heartbeat = at(f64::from(second));
        let tick = session.deadline().unwrap_or(heartbeat).min(heartbeat);
        if tick > until {
            return actions;
        }
        if tick == heartbeat {
            actions.extend(alive(session, tick));
            second += 1;
        }
        actions.extend(session.handle(tick, Event::Tick));
    }
}

#[test]
fn rank_without_heartbeats_is_killed_and_its_failure_reported_at_once() {
    let mut session = with_hang_timeout();
    let actions = advance(&mut session, at(24.0), |session, now| {
        let mut expected = reports(session, now, 0, heartbeat(Activity::Exchanging, 20.0));
        expected.retain(|action| {
            !matches!(action, Action::Send(AgentReport::Rank { rank: Rank(0), .. }))
        });
        expected
    });
    let [Action::Kill(LocalRank(1)), Action::Send(AgentReport::Rank { rank, report, .. })] =
        &actions[..]
    else {
        panic!("{actions:?}")
    };
    assert_eq!(*rank, Rank(1));
    let RankReport::Exited(failure) = report else { panic!("{report:?}") };
    assert!(failure.message.contains("did not answer for 20 s"), "{failure}");
    // The next launch starts a new process once this one has ended.
    let actions = session.handle(at(25.0), launched(2, 2));
    assert!(!actions.iter().any(|action| matches!(action, Action::Spawn { .. })), "{actions:?}");
    let spawned = exit(&mut session, at(25.1), 1);
    assert!(matches!(spawned[0], Action::Spawn { local_rank: LocalRank(1), .. }), "{spawned:?}");
}

#[test]
fn rank_with_one_activity_for_too_long_is_killed_unless_it_waits_for_others() {
    for (activity, seconds, dies) in [
        (Activity::Computing, 19.0, false),
        (Activity::Computing, 20.0, true),
        (Activity::Loading, 79.0, false),
        (Activity::Saving, 80.0, true),
        (Activity::Exchanging, 1e6, false),
    ] {
        let mut session = with_hang_timeout();
        let actions = reports(&mut session, at(4.0), 0, heartbeat(activity, seconds));
        let killed = actions.contains(&Action::Kill(LocalRank(0)));
        assert_eq!(killed, dies, "{activity:?} for {seconds} s: {actions:?}");
    }
}

#[test]
fn agent_that_was_suspended_kills_no_rank() {
    let mut session = with_hang_timeout();
    session.handle(at(4.0), Event::Tick);
    assert_eq!(session.handle(at(1_000.0), Event::Tick), []);
    let actions = advance(&mut session, at(1_019.0), |_, _| Vec::new());
    assert_eq!(actions, [], "the timeout starts again after the suspension");
}

#[test]
fn ranks_that_restore_or_leave_are_not_checked_for_hangs() {
    let mut session = joining(2);
    session.set_policy(Policy { hang_timeout: Duration::from_secs(20), ..Policy::default() });
    assert_eq!(advance(&mut session, at(100.0), |_, _| Vec::new()), []);
    let mut session = with_hang_timeout();
    session.handle(at(4.0), dismissed());
    let actions = session.handle(at(8.0), Event::Tick);
    assert!(!actions.contains(&Action::Kill(LocalRank(0))), "{actions:?}");
}

fn diagnosis() -> Diagnosis {
    Diagnosis {
        divergence: Divergence::LossNotFinite,
        step: Step(40),
        batch: BatchMark::default(),
        lr: 0.1,
        loss: None,
        gradient_norm: None,
        samples: Vec::new(),
        evaluated: None,
    }
}

#[test]
fn diverged_rank_waits_for_a_new_generation() {
    let mut session = training(1);
    let report = RankReport::Diverged(diagnosis());
    assert_eq!(reports(&mut session, at(10.0), 0, report.clone()), [forwarded(0, report)]);

    assert_eq!(session.handle(at(11.0), launched(2, 1)), [join(2, 0)]);
}

#[test]
fn divergence_while_the_coordinator_is_away_is_reported_in_the_next_hello() {
    let mut session = disconnected(1);
    session.handle(at(10.1), Event::Tick);
    assert_eq!(reports(&mut session, at(11.0), 0, RankReport::Diverged(diagnosis())), []);

    let actions = session.handle(at(12.0), Event::Connected);

    assert_eq!(actions, [hello(1, running_ranks(&[(0, RankPhase::Diverged(diagnosis()))]))]);
}

#[test]
fn evaluations_are_part_of_the_next_hello() {
    let mut session = training(1);
    assert_eq!(reports(&mut session, at(9.0), 0, evaluated(10)), [forwarded(0, evaluated(10))]);
    session.handle(at(10.0), Event::Disconnected);
    session.handle(at(10.1), Event::Tick);
    assert_eq!(reports(&mut session, at(11.0), 0, evaluated(20)), []);

    let actions = session.handle(at(12.0), Event::Connected);

    // The first one may have been lost with the connection.
    let running = running_ranks(&[(0, RankPhase::Training)]);
    let evaluations = vec![evaluated(10), evaluated(20)];
    assert_eq!(actions, [hello(1, running.map(|ranks| RunningRanks { evaluations, ..ranks }))]);
    session.handle(at(12.0), launched(2, 1));
    assert_eq!(hello_after(&mut session, 13.0).evaluations, [], "those of an older generation");
}

fn hello_after(session: &mut Session, seconds: f64) -> RunningRanks {
    session.handle(at(seconds), Event::Disconnected);
    let actions = session.handle(at(seconds + 1.0), Event::Connected);
    let Some(Action::Send(AgentReport::Hello(hello))) = actions.into_iter().next() else {
        panic!("no hello")
    };
    hello.running.unwrap()
}

fn steps_in_next_hello(session: &mut Session, seconds: f64) -> Vec<u64> {
    hello_after(session, seconds).steps.iter().map(|step| step.step.0).collect()
}

#[test]
fn steps_that_the_coordinator_may_have_missed_are_part_of_the_next_hello() {
    let mut session = training(1);
    reports(&mut session, at(9.0), 0, stepped(1));
    session.handle(at(10.0), Event::Disconnected);
    reports(&mut session, at(11.0), 0, stepped(2));

    assert_eq!(steps_in_next_hello(&mut session, 12.0), [1, 2]);

    session.handle(at(14.0), launched(2, 1));
    assert_eq!(steps_in_next_hello(&mut session, 15.0), [0; 0], "those of an older generation");
}

#[test]
fn of_many_steps_the_newest_are_sent_again_and_every_second_one_of_a_long_absence() {
    let mut session = training(1);
    for step in 1..=2_000 {
        reports(&mut session, at(9.0), 0, stepped(step));
    }
    let recent: Vec<_> = (977..=2_000).collect();
    assert_eq!(steps_in_next_hello(&mut session, 10.0), recent);

    session.handle(at(12.0), Event::Disconnected);
    for step in 2_001..=5_073 {
        reports(&mut session, at(13.0), 0, stepped(step));
    }
    let every_second: Vec<_> = (977..=5_073).step_by(2).collect();
    assert_eq!(steps_in_next_hello(&mut session, 14.0), every_second);
}

#[test]
fn steps_are_kept_until_the_coordinator_has_answered() {
    let mut session = training(1);
    session.handle(at(10.0), Event::Disconnected);
    for step in 1..=2_000 {
        reports(&mut session, at(11.0), 0, stepped(step));
    }
    // Somebody takes the connection, and does not read.
    assert_eq!(steps_in_next_hello(&mut session, 12.0).len(), 2_000);
    reports(&mut session, at(14.0), 0, stepped(2_001));

    assert_eq!(steps_in_next_hello(&mut session, 15.0).len(), 2_001);
}

#[test]
fn only_steps_that_the_coordinator_records_are_kept() {
    let mut session = training(1);
    session.set_policy(Policy { log_every: 20, ..Policy::default() });
    for step in 1..=50 {
        reports(&mut session, at(9.0), 0, stepped(step));
    }
    assert_eq!(steps_in_next_hello(&mut session, 10.0), [20, 40]);
}

#[test]
fn reports_while_the_coordinator_is_away_are_part_of_the_next_hello() {
    let mut session = joining(5);
    reports(&mut session, at(2.0), 0, started());
    reports(&mut session, at(2.0), 1, started());
    reports(&mut session, at(2.0), 2, started());
    session.handle(at(10.0), Event::Disconnected);
    session.handle(at(10.1), Event::Tick);
    assert_eq!(reports(&mut session, at(11.0), 0, RankReport::Saved(commit())), []);
    assert_eq!(reports(&mut session, at(11.0), 1, lost()), []);
    assert_eq!(exit(&mut session, at(11.0), 2), []);
    assert_eq!(reports(&mut session, at(11.0), 3, ready(3, Some(7))), []);

    let actions = session.handle(at(12.0), Event::Connected);

    let address = "host:3".to_owned();
    let running = running_ranks(&[
        (0, RankPhase::Training),
        (1, RankPhase::Waiting),
        (3, RankPhase::Ready { address, step: Some(Step(7)) }),
        (4, RankPhase::Joining),
    ]);
    let running = running.map(|running| RunningRanks { commit: Some(commit()), ..running });
    assert_eq!(actions, [hello(5, running)]);
}

#[test]
fn finished_ranks_are_part_of_the_next_hello_even_if_they_have_exited() {
    let mut session = disconnected(1);
    reports(&mut session, at(11.0), 0, done(Outcome::Completed));
    exit(&mut session, at(11.1), 0);

    let actions = session.handle(at(12.0), Event::Connected);

    let phase = RankPhase::Done { outcome: Outcome::Completed, digest: "d".to_owned() };
    assert_eq!(actions, [hello(1, running_ranks(&[(0, phase)]))]);
}

#[test]
fn agent_exits_when_all_ranks_are_done_and_the_coordinator_stays_away() {
    let mut session = disconnected(1);
    session.handle(at(10.1), Event::Tick);
    reports(&mut session, at(11.0), 0, done(Outcome::Completed));
    assert_eq!(exit(&mut session, at(11.1), 0), []);
    assert_eq!(session.deadline(), Some(at(21.0)));

    let actions = session.handle(at(21.0), Event::Tick);

    assert_eq!(actions, [Action::Exit(Outcome::Completed)]);
}

#[test]
fn agent_whose_starter_has_ended_waits_for_no_coordinator_once_its_ranks_have_saved() {
    let mut session = disconnected(1);
    let (reason, is_orphan) = ("spot notice".to_owned(), true);
    session.handle(at(10.1), Event::ShutdownSignal { reason, is_orphan });
    let drained = Outcome::Drained { reason: "spot notice".to_owned() };
    reports(&mut session, at(11.0), 0, done(drained.clone()));
    assert_eq!(session.deadline(), Some(at(11.0)));

    assert_eq!(exit(&mut session, at(11.1), 0), [Action::Exit(drained)]);
}

#[test]
fn agent_stays_when_all_ranks_are_done_and_the_coordinator_comes_back() {
    let mut session = disconnected(1);
    session.handle(at(10.1), Event::Tick);
    reports(&mut session, at(11.0), 0, done(Outcome::Completed));
    exit(&mut session, at(11.1), 0);

    session.handle(at(12.0), Event::Connected);
    session.handle(at(12.1), Event::Directive(Directive::HeartbeatAck { number: 1 }));

    assert_eq!(session.deadline(), None);
}

// ---- departure ----

#[test]
fn departing_node_reports_and_drains_its_ranks_when_directed() {
    let mut session = training(2);
    assert_eq!(session.handle(at(10.0), shutdown_signal()), [departure_report()]);

    let reason = "spot notice".to_owned();
    let expected = Event::Directive(Directive::Drain { generation: Generation(1), reason });
    assert_eq!(session.handle(at(10.1), expected), [drain(0), drain(1)]);
}

#[test]
fn departing_node_that_loses_its_coordinator_drains_by_itself() {
    let mut session = training(2);
    session.handle(at(10.0), shutdown_signal());

    let expected = [coordinator_lost(0, true), coordinator_lost(1, true), drain(0), drain(1)];
    assert_eq!(session.handle(at(11.0), Event::Disconnected), expected);
}

#[test]
fn ranks_that_have_not_stopped_in_half_of_the_time_save_alone_if_there_is_no_coordinator() {
    let mut session = training(2);
    session.handle(at(9.0), Event::Disconnected);
    session.handle(at(10.0), interruption_notice(Some(75.0)));
    // The machine is taken away at 75 s, and ranks need 5 s to be killed.
    session.handle(at(39.9), Event::Tick);
    assert_eq!(session.deadline().map(|at| at <= self::at(40.0)), Some(true));
    let break_off =
        |local| send_to_rank(local, RankCommand::BreakOff { generation: Generation(1) });
    let actions = session.handle(at(40.0), Event::Tick);
    assert!(actions.ends_with(&[break_off(0), break_off(1)]), "{actions:?}");
    let sent = |actions: &[Action]| actions.contains(&break_off(0));
    assert!(!sent(&session.handle(at(41.0), Event::Tick)), "once");

    let mut session = training(1);
    session.handle(at(10.0), interruption_notice(Some(75.0)));
    assert!(!sent(&session.handle(at(41.0), Event::Tick)), "the coordinator decides");
}

fn coordinator_lost(local: u32, lost: bool) -> Action {
    send_to_rank(local, RankCommand::CoordinatorLost { generation: Generation(1), lost })
}

#[test]
fn ranks_learn_once_that_the_coordinator_is_lost_and_that_there_is_one_again() {
    let mut session = training(1);
    assert_eq!(session.handle(at(5.0), Event::Disconnected), [coordinator_lost(0, true)]);
    session.handle(at(6.0), Event::Tick);
    // The connection ends before it was answered.
    session.handle(at(6.1), Event::Connected);
    assert_eq!(session.handle(at(6.2), Event::Disconnected), []);
    session.handle(at(9.0), Event::Tick);
    session.handle(at(9.1), Event::Connected);
    let ack = || Event::Directive(Directive::HeartbeatAck { number: 0 });
    assert_eq!(session.handle(at(9.2), ack()), [coordinator_lost(0, false)]);
    assert_eq!(session.handle(at(9.3), ack()), []);
}

fn interruption_notice(end: Option<f64>) -> Event {
    Event::InterruptionNotice { reason: "spot notice".to_owned(), end: end.map(at) }
}

#[test]
fn notice_sets_a_deadline_and_only_an_earlier_end_is_reported_again() {
    let mut session = training(1);
    let reported = |seconds_left| {
        let reason = "spot notice".to_owned();
        [Action::Send(AgentReport::NodeDeparting { reason, seconds_left })]
    };
    assert_eq!(session.handle(at(10.0), interruption_notice(None)), reported(None));
    assert_eq!(session.deadline(), Some(at(110.0)), "the drain timeout of the recipe");

    assert_eq!(session.handle(at(12.0), interruption_notice(Some(500.0))), []);
    assert_eq!(session.handle(at(12.0), interruption_notice(Some(60.0))), reported(Some(48.0)));
    assert_eq!(session.deadline(), Some(at(55.0)), "time is left to kill ranks");
    assert_eq!(session.handle(at(12.0), interruption_notice(Some(60.0))), []);

    // The first signal after the notice comes from the shutdown of the machine.
    assert_eq!(session.handle(at(13.0), shutdown_signal()), []);
    assert_eq!(session.handle(at(14.0), shutdown_signal()), [Action::Kill(LocalRank(0))]);
}

#[test]
fn slot_without_a_rank_is_warmed_up_and_used_by_the_next_launch() {
    let mut session = attached(2);
    session.handle(at(1.0), launched(1, 0));
    let local_ranks = vec![LocalRank(0), LocalRank(1)];
    let incarnation = Incarnation(1);
    let spawn = |local| Action::Spawn { local_rank: LocalRank(local), incarnation };
    let warmed = session.handle(at(1.1), Event::Directive(Directive::Warm { local_ranks }));
    assert_eq!(warmed, [spawn(0), spawn(1)]);

    let ready = Event::RankWarm { local_rank: LocalRank(1), incarnation };
    let report = Action::Send(AgentReport::Warm { local_rank: LocalRank(1) });
    assert_eq!(session.handle(at(3.0), ready), [report]);

    let actions = session.handle(at(3.1), launched(2, 2));
    let joins = |action: &Action| matches!(action, Action::SendToRank { .. });
    assert!(actions.len() == 2 && actions.iter().all(joins), "{actions:?}");
}

#[test]
fn processes_of_an_older_generation_are_replaced_when_their_node_is_to_join_again() {
    let mut session = attached(2);
    session.handle(at(1.0), launched(1, 2));
    // Without a part in generation 2, which it was not sent.
    let local_ranks = vec![LocalRank(0), LocalRank(1)];
    let end = Launch { replace: local_ranks.clone(), ..launch(2, 0) };
    let kills = local_ranks.iter().map(|local| Action::Kill(*local)).collect::<Vec<_>>();
    assert_eq!(session.handle(at(61.0), Event::Directive(Directive::Launch(end))), kills);

    let warm = Event::Directive(Directive::Warm { local_ranks });
    assert_eq!(session.handle(at(61.0), warm), []);
    for local in [0, 1] {
        let (local_rank, incarnation) = (LocalRank(local), Incarnation(2));
        let actions = exit(&mut session, at(61.5), local);
        assert_eq!(actions, [Action::Spawn { local_rank, incarnation }]);
    }
}

#[test]
fn process_that_fails_to_warm_up_is_reported_and_replaced() {
    let mut session = attached(1);
    session.handle(at(1.0), launched(1, 0));
    let warm = || Event::Directive(Directive::Warm { local_ranks: vec![LocalRank(0)] });
    session.handle(at(1.1), warm());

    let Action::Send(AgentReport::WarmFailed { local_rank, .. }) =
        &exit(&mut session, at(2.0), 0)[0]
    else {
        panic!()
    };
    assert_eq!(*local_rank, LocalRank(0));

    let spawned = session.handle(at(3.0), warm());
    assert!(matches!(spawned[..], [Action::Spawn { .. }]), "{spawned:?}");
    // The process hangs.
    assert_eq!(session.handle(at(90.0), warm()), [Action::Kill(LocalRank(0))]);
    let spawned = exit(&mut session, at(90.1), 0);
    assert!(matches!(spawned[..], [Action::Spawn { .. }]), "{spawned:?}");
}

#[test]
fn rebalance_recommendation_requests_a_checkpoint_and_training_continues() {
    let mut session = training(2);
    let reason = "rebalance recommendation".to_owned();
    let command = RankCommand::Checkpoint { generation: Generation(1) };

    let actions = session.handle(at(10.0), Event::CheckpointAdvised { reason: reason.clone() });

    let send = Action::SendToRank { local_rank: LocalRank(0), command };
    assert_eq!(actions, [send, Action::Send(AgentReport::CheckpointAdvised { reason })]);
}

#[test]
fn departing_node_drains_without_a_coordinator() {
    let mut session = disconnected(1);

    assert_eq!(session.handle(at(10.05), shutdown_signal()), [drain(0)]);

    session.handle(at(10.1), Event::Tick);
    reports(&mut session, at(11.0), 0, done(drained()));
    exit(&mut session, at(11.1), 0);
    assert_eq!(session.handle(at(21.0), Event::Tick), [Action::Exit(drained())]);
}

#[test]
fn departing_node_without_a_coordinator_does_not_wait_for_ranks_that_have_nothing_to_save() {
    for (step, leaves) in [(None, true), (Some(40), false)] {
        let mut session = joining(2);
        reports(&mut session, at(2.0), 0, ready(0, step));
        session.handle(at(2.5), shutdown_signal());
        session.handle(at(3.0), Event::Disconnected);
        assert_eq!(session.leaving, None, "rank 1 may have state");

        let actions = reports(&mut session, at(3.5), 1, ready(1, None));

        assert_eq!(session.leaving.is_some(), leaves, "{step:?}");
        assert_eq!(actions.contains(&Action::Terminate(LocalRank(0))), leaves, "{actions:?}");
    }
}

#[test]
fn departing_node_leaves_although_a_coordinator_that_never_answers_accepts_its_connection() {
    let mut session = disconnected(1);
    session.handle(at(10.05), shutdown_signal());
    session.handle(at(10.1), Event::Tick);
    session.handle(at(10.2), Event::Connected);
    reports(&mut session, at(11.0), 0, done(drained()));
    exit(&mut session, at(11.1), 0);
    session.handle(at(20.3), Event::Disconnected);
    session.handle(at(20.4), Event::Tick);
    session.handle(at(20.5), Event::Connected);

    assert_eq!(session.handle(at(21.0), Event::Tick), [Action::Exit(drained())]);
}

#[test]
fn an_agent_that_leaves_because_the_job_has_ended_stays_if_a_coordinator_answers() {
    let over = || Event::JobOver { reason: "spot notice".to_owned() };
    let mut session = disconnected(1);
    assert_eq!(session.handle(at(10.05), over()), [drain(0)]);
    assert_eq!(session.handle(at(10.06), over()), []);
    let actions = session.handle(at(11.0), Event::Connected);
    assert_eq!(actions, [hello(1, running_ranks(&[(0, RankPhase::Training)]))]);

    // Another reason stays.
    let mut session = disconnected(1);
    session.handle(at(10.05), over());
    session.handle(at(10.1), shutdown_signal());
    let actions = session.handle(at(11.0), Event::Connected);
    assert_eq!(actions, [hello(1, running_ranks(&[(0, RankPhase::Training)])), departure_report()]);
}

#[test]
fn departure_is_reported_after_a_reconnect() {
    let mut session = disconnected(1);
    session.handle(at(10.05), shutdown_signal());

    let actions = session.handle(at(11.0), Event::Connected);

    assert_eq!(actions, [hello(1, running_ranks(&[(0, RankPhase::Training)])), departure_report()]);
}

#[test]
fn departing_node_without_ranks_exits_if_the_coordinator_is_away() {
    let mut session = Session::new(NodeId("node0".to_owned()), 1, Policy::default());
    session.handle(at(0.0), Event::Tick);

    assert_eq!(session.handle(at(1.0), shutdown_signal()), [Action::Exit(drained())]);
}

#[test]
fn a_node_without_ranks_leaves_once_the_connection_of_a_job_that_has_ended_is_lost() {
    let mut session = Session::new(NodeId("node0".to_owned()), 1, Policy::default());
    session.handle(at(0.0), Event::Tick);
    session.handle(at(0.1), Event::Connected);
    // Nobody has noticed yet that nothing arrives any more.
    let reason = "spot notice".to_owned();
    session.handle(at(8.0), Event::JobOver { reason });
    assert_eq!(session.handle(at(12.0), Event::Disconnected), [Action::Exit(drained())]);
}

#[test]
fn ranks_that_have_stopped_in_time_are_not_called_late_because_their_end_cannot_be_reported() {
    let mut session = disconnected(1);
    session.set_policy(Policy { drain_timeout: Duration::from_secs(6), ..Policy::default() });
    session.handle(at(10.05), shutdown_signal());
    reports(&mut session, at(11.0), 0, done(drained()));
    exit(&mut session, at(11.1), 0);
    assert_eq!(session.handle(at(17.0), Event::Tick), [Action::Exit(drained())]);
}

#[test]
fn ranks_that_do_not_drain_in_time_are_asked_to_exit_and_then_killed() {
    let mut session = training(1);
    session.handle(at(10.0), shutdown_signal());
    assert_eq!(session.deadline(), Some(at(110.0)));

    assert_eq!(session.handle(at(110.0), Event::Tick), [Action::Terminate(LocalRank(0))]);

    assert_eq!(session.handle(at(115.0), Event::Tick), [Action::Kill(LocalRank(0))]);
    let reason =
        "spot notice; ranks did not stop in time, so the job continues from the last checkpoint"
            .to_owned();
    let outcome = Outcome::Drained { reason };
    assert_eq!(exit(&mut session, at(115.1), 0), [Action::Exit(outcome)]);
}

#[test]
fn second_signal_kills_all_ranks() {
    let mut session = training(1);
    session.handle(at(10.0), shutdown_signal());

    assert_eq!(session.handle(at(11.0), shutdown_signal()), [Action::Kill(LocalRank(0))]);

    assert_eq!(exit(&mut session, at(11.1), 0), [Action::Exit(drained())]);
}

#[test]
fn sigterm_and_sighup_at_the_end_of_a_login_session_are_one_signal() {
    let mut session = training(1);
    assert_eq!(session.handle(at(10.0), shutdown_signal()), [departure_report()]);
    let hangup =
        Event::ShutdownSignal { reason: "the agent received SIGHUP".to_owned(), is_orphan: false };

    assert_eq!(session.handle(at(10.0), hangup.clone()), []);
    assert_eq!(session.handle(at(10.49), hangup.clone()), []);

    assert_eq!(session.handle(at(10.5), hangup), [Action::Kill(LocalRank(0))]);
}

#[test]
fn second_signal_also_kills_ranks_that_were_asked_to_exit() {
    let mut session = training(2);
    session.handle(at(9.0), launched(2, 1));
    session.handle(at(10.0), shutdown_signal());

    let actions = session.handle(at(11.0), shutdown_signal());

    assert_eq!(actions, [Action::Kill(LocalRank(0)), Action::Kill(LocalRank(1))]);
}

#[test]
fn second_signal_ends_the_wait_for_the_coordinator() {
    let mut session = disconnected(1);
    session.handle(at(10.1), Event::Tick);
    reports(&mut session, at(11.0), 0, done(drained()));
    session.handle(at(12.0), shutdown_signal());

    session.handle(at(13.0), shutdown_signal());

    assert_eq!(session.deadline(), None);
}

// ---- the end ----

#[test]
fn dismissed_agent_stops_its_ranks_and_exits_when_they_have_ended() {
    let mut session = training(2);

    let stop = [Action::Terminate(LocalRank(0)), Action::Terminate(LocalRank(1))];
    assert_eq!(session.handle(at(10.0), dismissed()), stop);

    assert_eq!(session.reason(), "leaving (completed); 0 ranks still run");
    assert_eq!(exit(&mut session, at(10.1), 0), []);
    assert_eq!(exit(&mut session, at(10.2), 1), [Action::Exit(Outcome::Completed)]);
}

#[test]
fn released_agent_stops_its_ranks_and_exits_as_drained() {
    let mut session = training(1);
    let released = Event::Directive(Directive::Release { reason: "a user asked".to_owned() });

    assert_eq!(session.handle(at(10.0), released), [Action::Terminate(LocalRank(0))]);

    let drained = Outcome::Drained { reason: "a user asked".to_owned() };
    assert_eq!(exit(&mut session, at(10.1), 0), [Action::Exit(drained)]);
}

#[test]
fn finished_rank_may_exit_by_itself_but_is_killed_if_it_does_not() {
    let mut session = training(1);
    reports(&mut session, at(9.0), 0, done(Outcome::Completed));

    assert_eq!(session.handle(at(10.0), dismissed()), []);

    assert_eq!(session.handle(at(15.0), Event::Tick), [Action::Kill(LocalRank(0))]);
}

#[test]
fn leaving_agent_ignores_directives_and_sends_no_hello() {
    let mut session = disconnected(1);
    session.handle(at(10.1), Event::Tick);
    session.handle(at(10.2), shutdown_signal());
    session.handle(at(10.8), shutdown_signal());

    assert_eq!(session.handle(at(10.9), Event::Connected), []);
    assert_eq!(session.handle(at(11.0), launched(2, 1)), []);
}

#[test]
fn events_after_the_exit_are_ignored() {
    let mut session = attached(1);
    assert_eq!(session.handle(at(10.0), dismissed()), [Action::Exit(Outcome::Completed)]);

    assert_eq!(session.handle(at(11.0), launched(2, 1)), []);
    assert_eq!(session.deadline(), None);
}

#[test]
fn end_without_a_reported_failure_is_classified_by_code_and_signal() {
    assert_eq!(failure_of(Some(2), None, false).class, Class::BadInput);
    assert_eq!(failure_of(Some(1), None, false).class, Class::Crash);
    let killed = failure_of(None, Some(9), false);
    assert_eq!((killed.class, killed.message.contains("memory ran out")), (Class::Crash, false));
    let killed = failure_of(None, Some(9), true);
    assert_eq!(
        (killed.class, killed.message.contains("memory ran out")),
        (Class::OutOfMemory, true)
    );
    assert_eq!(failure_of(None, Some(15), true).class, Class::Crash);
}

// ---- GPUs ----

fn gpu_failed(local: u32, xid: u64) -> Event {
    let local_ranks = vec![LocalRank(local)];
    Event::GpuFailed { local_ranks, gpu: format!("GPU {local}"), xid: Xid(xid) }
}

fn warned(message: &str) -> Action {
    Action::Send(AgentReport::GpuWarning { message: message.to_owned() })
}

/// The failure in the report of a rank's end.
fn reported_failure(actions: &[Action]) -> &Failure {
    match actions {
        [Action::Send(AgentReport::Rank { report: RankReport::Exited(failure), .. })] => failure,
        other => panic!("{other:?}"),
    }
}

#[test]
fn gpu_error_is_reported_once_and_a_later_failure_names_it() {
    let mut session = training(2);

    let expected = session.handle(at(5.0), gpu_failed(1, 79));
    assert_eq!(expected, [warned(&Xid(79).describe("GPU 1"))]);
    assert_eq!(session.handle(at(5.1), gpu_failed(1, 79)), []);

    let actions = exit(&mut session, at(5.2), 1);
    let failure = reported_failure(&actions);
    assert_eq!(failure.class, Class::Device);
    assert!(failure.message.contains("GPU 1 has fallen off the bus (Xid 79)"), "{failure}");
    let actions = exit(&mut session, at(5.3), 0);
    assert_eq!(reported_failure(&actions), &killed(), "on another GPU");
}

#[test]
fn gpu_error_before_the_start_of_a_process_does_not_explain_its_failure() {
    let mut session = training(1);
    session.handle(at(5.0), gpu_failed(0, 94));
    exit(&mut session, at(5.2), 0);
    session.handle(at(6.0), launched(2, 1));

    let actions = exit(&mut session, at(7.0), 0);

    assert_eq!(reported_failure(&actions), &killed());
}

#[test]
fn hang_after_a_gpu_error_names_that_error() {
    let mut session = with_hang_timeout();
    session.handle(at(4.0), gpu_failed(1, 119));
    let actions = advance(&mut session, at(24.0), |session, now| {
        reports(session, now, 0, heartbeat(Activity::Exchanging, 1.0))
    });
    let expected = actions.iter().find_map(|action| match action {
        Action::Send(AgentReport::Rank { report: RankReport::Exited(failure), .. }) => {
            Some(failure)
        }
        _ => None,
    });
    let failure = expected.expect("the rank is killed");
    assert!(failure.message.contains("(Xid 119)"), "{failure}");
    assert!(failure.message.contains("did not answer"), "{failure}");
}

#[test]
fn warnings_about_gpus_are_kept_until_the_coordinator_is_connected() {
    let mut session = Session::new(NodeId("node0".to_owned()), 1, Policy::default());
    let warning = |text: &str| Event::GpuWarning { message: text.to_owned() };
    assert_eq!(session.handle(at(0.0), warning("hot")), [Action::Connect]);

    let expected = [hello(1, None), warned("hot")];
    assert_eq!(session.handle(at(0.1), Event::Connected), expected);
    assert_eq!(session.handle(at(0.2), warning("lost")), [warned("lost")]);
    session.handle(at(0.3), Event::Disconnected);
    assert_eq!(session.handle(at(1.0), Event::Connected), [hello(1, None)]);
}

// ---- limits ----

#[test]
fn only_the_newest_evaluations_are_kept_and_only_the_last_one_with_its_texts() {
    let text = GeneratedText { text: "def add(a, b):".to_owned(), ..GeneratedText::default() };
    let with_text = |step| {
        let mut report = evaluated(step);
        if let RankReport::Evaluated { texts, .. } = &mut report {
            texts.push(text.clone());
        }
        report
    };
    let mut session = training(1);
    for step in 0..258 {
        reports(&mut session, at(9.0), 0, with_text(step));
    }

    let kept = hello_after(&mut session, 10.0).evaluations;

    let expected: Vec<_> = (2..257).map(evaluated).chain([with_text(257)]).collect();
    assert_eq!(kept, expected);
}

#[test]
fn the_first_warnings_about_gpus_are_kept_while_the_coordinator_is_away() {
    let mut session = attached(1);
    session.handle(at(1.0), Event::Disconnected);
    for number in 0..66 {
        session.handle(at(1.0), Event::GpuWarning { message: format!("warning {number}") });
    }

    let actions = session.handle(at(2.0), Event::Connected);

    let kept: Vec<Action> = (0..64).map(|number| warned(&format!("warning {number}"))).collect();
    assert_eq!(actions[1..], kept);
}

#[test]
fn a_rank_that_loads_saves_or_is_paused_may_take_four_times_as_long() {
    for activity in [Activity::Loading, Activity::Saving, Activity::Paused] {
        for (seconds, dies) in [(79.0, false), (80.0, true)] {
            let mut session = with_hang_timeout();
            let actions = reports(&mut session, at(4.0), 0, heartbeat(activity, seconds));
            let killed = actions.contains(&Action::Kill(LocalRank(0)));
            assert_eq!(killed, dies, "{activity:?} for {seconds} s: {actions:?}");
        }
    }
    let mut session = with_hang_timeout();
    let actions = reports(&mut session, at(4.0), 0, heartbeat(Activity::Restoring, 1e6));
    assert!(!actions.contains(&Action::Kill(LocalRank(0))), "{actions:?}");
}

#[test]
fn ranks_are_checked_for_hangs_four_times_per_timeout() {
    let mut session = with_hang_timeout();
    session.handle(at(4.0), Event::Tick);
    assert_eq!(session.deadline(), Some(at(9.0)));
    session.handle(at(9.0), Event::Tick);
    assert_eq!(session.deadline(), Some(at(14.0)));
    // The last reports of the ranks arrived at 3 s.
    session.handle(at(19.0), Event::Tick);
    assert_eq!(session.deadline(), Some(at(23.0)), "the timeout is nearer");
    session.set_policy(Policy::default());
    assert_eq!(session.deadline(), None, "no limit");
}

#[test]
fn an_agent_counts_as_suspended_after_more_than_half_the_hang_timeout() {
    // The last reports of the ranks arrived at 3 s.
    for (checked_at, now, suspended) in [(13.0, 23.0, false), (12.0, 23.0, true)] {
        let mut session = with_hang_timeout();
        session.handle(at(4.0), Event::Tick);
        session.handle(at(checked_at), Event::Tick);
        let actions = session.handle(at(now), Event::Tick);
        let killed = actions.contains(&Action::Kill(LocalRank(0)));
        assert_eq!(killed, !suspended, "not checked from {checked_at} s to {now} s: {actions:?}");
    }
}

// ---- warm-ups and spares, at their edges ----

fn warm(local: u32) -> Event {
    Event::Directive(Directive::Warm { local_ranks: vec![LocalRank(local)] })
}

fn rank_warm(local: u32, incarnation: u64) -> Event {
    Event::RankWarm { local_rank: LocalRank(local), incarnation: Incarnation(incarnation) }
}

fn warm_report(local: u32) -> Action {
    Action::Send(AgentReport::Warm { local_rank: LocalRank(local) })
}

#[test]
fn a_process_that_is_ready_is_reported_again_and_kept() {
    let mut session = attached(1);
    session.handle(at(1.0), launched(1, 0));
    session.handle(at(1.1), warm(0));
    assert_eq!(session.handle(at(2.0), rank_warm(0, 1)), [warm_report(0)]);

    assert_eq!(session.handle(at(3.0), warm(0)), [warm_report(0)]);

    // Twice, because the first repetition must not lose that it is ready.
    assert_eq!(session.handle(at(4.0), warm(0)), [warm_report(0)]);
}

#[test]
fn a_process_that_replaces_a_hanging_one_is_not_ready_by_itself() {
    let mut session = attached(1);
    session.handle(at(1.0), launched(1, 0));
    session.handle(at(1.1), warm(0));
    assert_eq!(session.handle(at(90.0), warm(0)), [Action::Kill(LocalRank(0))]);
    assert_eq!(exit(&mut session, at(90.1), 0), [spawn(0, 2)]);
    assert_eq!(session.handle(at(91.0), rank_warm(0, 1)), [], "of the killed process");

    assert_eq!(session.handle(at(180.0), warm(0)), [Action::Kill(LocalRank(0))]);

    // It still sends that it is ready, but is being killed.
    assert_eq!(session.handle(at(180.1), rank_warm(0, 2)), []);
}

#[test]
fn a_process_with_a_rank_is_neither_warmed_up_nor_reported_as_ready() {
    let mut session = joining(1);
    assert_eq!(session.handle(at(2.0), rank_warm(0, 1)), []);
    assert_eq!(session.handle(at(2.1), warm(0)), []);
}

#[test]
fn a_process_that_was_to_be_warm_joins_if_its_slot_gets_a_rank_before_the_old_one_has_ended() {
    let mut session = attached(1);
    session.handle(at(1.0), launched(1, 0));
    session.handle(at(1.1), warm(0));
    session.handle(at(90.0), warm(0));
    assert_eq!(session.handle(at(90.05), launched(2, 1)), []);

    assert_eq!(exit(&mut session, at(90.1), 0), [spawn(0, 2), join(2, 0)]);
}

#[test]
fn no_spare_is_kept_on_a_node_that_must_leave() {
    let mut session = joining(1);
    session.set_policy(Policy { warm_spare: true, ..Policy::default() });
    session.handle(at(1.5), shutdown_signal());

    let actions = reports(&mut session, at(2.0), 0, started());

    assert_eq!(actions, [forwarded(0, started())]);
}

#[test]
fn a_process_without_a_rank_gets_no_commands() {
    let mut session = attached(1);
    session.handle(at(1.0), launched(1, 0));
    session.handle(at(1.1), warm(0));
    session.handle(at(2.0), rank_warm(0, 1));

    assert_eq!(session.handle(at(3.0), pause(1, true)), []);
}
