//! Tests of single events: set a state, handle one event, check the actions. `tests/simulation` tests whole jobs.

mod attachments;
mod budget;
mod connecting;
mod divergence;
mod edges;
mod ending;
mod evaluation;
mod heartbeats;
mod local;
mod opening;
mod pause;
mod placement;
mod profile;
mod recovery;
mod requests;
mod texts;
mod waits;

use std::time::Duration;

use super::*;
use crate::exit::crash;
use crate::{
    exit::{self, Class, Failure},
    ids::{Attachment, JobId, LocalRank, Rank},
    kit::recipe,
    mesh_secret::MeshSecret,
    message::{
        Activity, AgentHeartbeat, AgentReport, Commit, EvaluationProgress, Hello, Launch,
        LoaderReport, PauseState, RankHeartbeat, RankPhase, RankReport, Restore, Rollback,
        RunningRanks, SaveProblem, SaveTimes, StateSource, StepReport,
    },
    plan::Placement,
};
use baton_recipe::progress::{Accuracy, Progress};

fn spec(min_ranks: u32) -> JobSpec {
    spec_with(&[&format!("cluster.min_ranks={min_ranks}")])
}

fn spec_with(overrides: &[&str]) -> JobSpec {
    recipe(&["cluster.rendezvous_seconds=20"], overrides)
}

fn at(seconds: f64) -> Time {
    Time(0).after(Duration::from_secs_f64(seconds))
}

fn begin(generation: u64, peers: &[String]) -> Directive {
    let (peers, secret) = (peers.into(), MeshSecret::default());
    Directive::Begin { generation: Generation(generation), peers, secret }
}

fn node(number: u32) -> NodeId {
    NodeId(format!("node{number}"))
}

fn origin() -> JobOrigin {
    JobOrigin {
        job: JobId(uuid::Uuid::nil()),
        recipe: None,
        first_generation: Generation(1),
        restore: Restore::default(),
    }
}

impl Engine {
    /// [`handle`](Engine::handle) with a store that accepts every fence: returns the actions of its answer too.
    fn drive(&mut self, now: Time, event: Event) -> Vec<Action> {
        let mut actions = self.handle(now, event);
        if actions.iter().any(|action| matches!(action, Action::Fence(_))) {
            actions.extend(self.drive(now, Event::Fenced));
        }
        actions
    }
}

// ---- states, each built from the previous one ----

fn gathering(min_ranks: u32) -> Engine {
    let mut engine = Engine::new(&spec(min_ranks), origin(), at(0.0));
    assert_eq!(engine.drive(at(0.0), Event::Tick), [Action::Persist(Record::Created(origin()))]);
    engine
}

/// Generation 1 on nodes with these slots.
fn forming(slots: &[u32]) -> Engine {
    let mut engine = gathering(slots.iter().sum());
    for (number, slots) in (0..).zip(slots) {
        attach(&mut engine, at(0.0), number, *slots, None);
    }
    assert_eq!(engine.status().phase, PhaseName::Forming);
    engine
}

fn meeting(slots: &[u32]) -> Engine {
    let mut engine = forming(slots);
    all_ready(&mut engine, at(1.0), None);
    assert_eq!(engine.status().phase, PhaseName::Meeting);
    engine
}

fn training(slots: &[u32]) -> Engine {
    let mut engine = meeting(slots);
    all_started(&mut engine, at(2.0));
    assert_eq!(engine.status().phase, PhaseName::Training);
    engine
}

/// One of two ranks has lost its connection to the other.
fn detecting() -> Engine {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(10.0), 0, lost());
    engine
}

/// The second failure in a row.
fn backing_off() -> Engine {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(10.0), 1, crashed());
    report(&mut engine, at(11.0), 1, crashed());
    engine
}

/// The coordinator of `training(slots)` died and was restarted.
fn reattaching(slots: &[u32]) -> Engine {
    let placements = training(slots).lifecycle.world().unwrap().placements().to_vec();
    replay(&[opened(1, placements)])
}

fn ended() -> Engine {
    let mut engine = gathering(1);
    engine.drive(at(0.0), Event::Stop);
    engine
}

// ---- events ----

/// Attaches over a connection newer than any before.
fn attach(
    engine: &mut Engine,
    now: Time,
    number: u32,
    slots: u32,
    running: Option<RunningRanks>,
) -> Vec<Action> {
    let newest = engine.nodes.values().map(|node| node.attachment).max().unwrap_or_default();
    let hello = Hello::new(node(number), slots, running);
    without_events(engine.drive(now, Event::Attached { attachment: newest.next(), hello }))
}

fn detach(engine: &mut Engine, now: Time, number: u32) -> Vec<Action> {
    let (node, attachment) = (node(number), attachment(engine, number));
    without_events(engine.drive(now, Event::Detached { node, attachment }))
}

fn attachment(engine: &Engine, number: u32) -> Attachment {
    engine.nodes[&node(number)].attachment
}

/// Sends a report of a rank of the current generation, over its node's current connection.
fn report(engine: &mut Engine, now: Time, rank: u32, rank_report: RankReport) -> Vec<Action> {
    let generation = engine.lifecycle.generation;
    without_events(engine.drive(now, rank_event(engine, generation, rank, rank_report)))
}

fn rank_event(
    engine: &Engine,
    generation: Generation,
    rank: u32,
    rank_report: RankReport,
) -> Event {
    let status = engine.status();
    let status = status.ranks.iter().find(|status| status.rank == Rank(rank));
    let node = status.map_or(node(0), |status| status.node.clone());
    let attachment = engine.nodes[&node].attachment;
    let report = AgentReport::Rank { generation, rank: Rank(rank), report: rank_report };
    Event::Reported { node, attachment, report }
}

fn all_ready(engine: &mut Engine, now: Time, step: Option<u64>) -> Vec<Action> {
    let mut actions = Vec::new();
    for rank in 0..engine.status().ranks.len() as u32 {
        actions = report(engine, now, rank, ready(rank, step));
    }
    actions
}

fn all_started(engine: &mut Engine, now: Time) {
    for rank in 0..engine.status().ranks.len() as u32 {
        report(engine, now, rank, started());
    }
}

fn tick(engine: &mut Engine, now: Time) -> Vec<Action> {
    without_events(engine.drive(now, Event::Tick))
}

fn drain(engine: &mut Engine, now: Time) -> Vec<Action> {
    let reason = "a user asked".to_owned();
    let is_new = engine.outcome().is_none() && engine.status().drain.is_none();
    let mut actions = without_events(engine.drive(now, Event::Drain { reason: reason.clone() }));
    if is_new {
        // Persisted first, so that the next coordinator knows.
        let record = Action::Persist(Record::Draining { reason });
        let place = actions.iter().position(|action| *action == record);
        actions.remove(place.unwrap());
    }
    actions
}

/// Removes job events, metric points and meter records from `actions`.
fn without_events(mut actions: Vec<Action>) -> Vec<Action> {
    let is_ignored = |action: &Action| {
        let is_for_people = matches!(action, Action::Publish(_) | Action::AddPoint(_));
        is_for_people || matches!(action, Action::Persist(Record::Metered(_) | Record::Paid { .. }))
    };
    actions.retain(|action| !is_ignored(action));
    actions
}

// ---- reports ----

fn ready(rank: u32, step: Option<u64>) -> RankReport {
    RankReport::Ready { address: address(rank), step: step.map(Step) }
}

fn address(rank: u32) -> String {
    format!("host:{rank}")
}

fn started() -> RankReport {
    RankReport::Started { source: StateSource::fresh(), progress: Progress::default() }
}

fn stepped(step: u64) -> RankReport {
    RankReport::Stepped(StepReport { step: Step(step), ..StepReport::default() })
}

fn loader(skipped: u64) -> LoaderReport {
    let last_skipped =
        (skipped > 0).then(|| "train.beton: sample 7: no JPEG at byte 4096".to_owned());
    LoaderReport { wait: 0.25, ready: 3, capacity: 8, skipped, last_skipped }
}

fn lost() -> RankReport {
    RankReport::Lost { detail: "connection reset".to_owned(), unreached: Vec::new() }
}

fn crashed() -> RankReport {
    RankReport::Exited(crash("killed".to_owned()))
}

fn done(outcome: Outcome, digest: &str) -> RankReport {
    RankReport::Done { outcome, digest: digest.to_owned() }
}

fn drained() -> Outcome {
    Outcome::Drained { reason: "a user asked".to_owned() }
}

fn commit(generation: u64, step: u64) -> Commit {
    Commit {
        name: format!("step-{step}"),
        generation: Generation(generation),
        step: Step(step),
        accuracy: None,
        bytes: 1,
        took: None,
        fence_lost: false,
    }
}

// ---- actions ----

fn opened(generation: u64, placements: Vec<Placement>) -> Record {
    Record::Opened { generation: Generation(generation), placements }
}

fn placement(rank: u32, number: u32, local_rank: u32) -> Placement {
    Placement { rank: Rank(rank), node: node(number), local_rank: LocalRank(local_rank) }
}

fn launch(generation: u64, world_size: u32, ranks: &[(u32, u32)]) -> Launch {
    Launch {
        generation: Generation(generation),
        world_size,
        ranks: ranks.iter().map(|(rank, local)| (Rank(*rank), LocalRank(*local))).collect(),
        replace: Vec::new(),
        restore: Restore::default(),
        pause: PauseState::default(),
    }
}

fn send(number: u32, attachment: u64, directive: Directive) -> Action {
    Action::Send { node: node(number), attachment: Attachment(attachment), directive }
}

fn running(generation: u64, ranks: &[(u32, RankPhase)]) -> Option<RunningRanks> {
    let held = (0..).zip(ranks).filter(|(_, (_, phase))| phase.may_hold_state());
    let holders = held.map(|(local_rank, _)| LocalRank(local_rank)).collect();
    let ranks = ranks.iter().map(|(rank, phase)| (Rank(*rank), phase.clone())).collect();
    let generation = Generation(generation);
    Some(RunningRanks { generation, ranks, holders, ..RunningRanks::default() })
}

fn replay(records: &[Record]) -> Engine {
    let mut journal = vec![Record::Created(origin())];
    journal.extend_from_slice(records);
    Engine::replay(&spec(1), &journal, at(0.0)).unwrap()
}

fn opens(actions: &[Action], generation: u64) -> bool {
    actions.iter().any(|action| {
        matches!(action, Action::Persist(Record::Opened { generation: opened, .. })
            if *opened == Generation(generation))
    })
}

fn launches(actions: &[Action]) -> Vec<Launch> {
    let launch_in = |action: &Action| match action {
        Action::Send { directive: Directive::Launch(launch), .. } => Some(launch.clone()),
        _ => None,
    };
    actions.iter().filter_map(launch_in).collect()
}

/// The cause of each recovery.
fn causes(engine: &Engine) -> Vec<String> {
    engine.status().recoveries.iter().map(|recovery| recovery.cause.clone()).collect()
}

fn failure_of(engine: &Engine) -> Failure {
    match engine.outcome() {
        Some(Outcome::Failed { failure }) => failure.clone(),
        other => panic!("expected a failure, got {other:?}"),
    }
}

// ---- gathering and starting ----

#[test]
fn waits_until_enough_ranks_are_available() {
    let mut engine = gathering(3);

    assert_eq!(attach(&mut engine, at(1.0), 0, 2, None), []);

    assert_eq!(engine.status().reason, "waiting for agents: 2 of at least 3 ranks are available");
}

#[test]
fn opening_is_persisted_and_fenced_before_launches_are_sent() {
    let mut engine = gathering(3);
    attach(&mut engine, at(1.0), 1, 1, None);

    let actions = attach(&mut engine, at(1.0), 0, 2, None);

    let placements = vec![placement(0, 0, 0), placement(1, 0, 1), placement(2, 1, 0)];
    assert_eq!(
        actions,
        [
            Action::Persist(opened(1, placements)),
            Action::Fence(Generation(1)),
            send(0, 2, Directive::Launch(launch(1, 3, &[(0, 0), (1, 1)]))),
            send(1, 1, Directive::Launch(launch(1, 3, &[(2, 0)]))),
        ]
    );
}

#[test]
fn begins_when_all_are_ready() {
    let mut engine = forming(&[1, 1]);
    assert_eq!(report(&mut engine, at(1.0), 1, ready(1, None)), []);

    let actions = report(&mut engine, at(2.0), 0, ready(0, None));

    let begin = begin(1, &[address(0), address(1)]);
    assert_eq!(actions, [send(0, 1, begin.clone()), send(1, 2, begin)]);
}

#[test]
fn trains_when_all_have_started() {
    let mut engine = meeting(&[1, 1]);
    report(&mut engine, at(2.0), 1, started());
    assert_eq!(engine.status().phase, PhaseName::Meeting);

    report(&mut engine, at(3.0), 0, started());

    assert_eq!(engine.status().reason, "2 ranks train");
    assert_eq!(engine.deadline(), None);
}

#[test]
fn a_spare_node_gets_a_launch_without_ranks() {
    let mut engine = training(&[1]);
    engine.policy.max_ranks = 1;

    let actions = attach(&mut engine, at(3.0), 1, 4, None);

    assert_eq!(actions, [send(1, 2, Directive::Launch(launch(1, 1, &[])))]);
}

fn warm(engine: &mut Engine, now: Time, number: u32, local: u32) -> Vec<Action> {
    let report = AgentReport::Warm { local_rank: LocalRank(local) };
    agent_report(engine, now, number, report)
}

fn agent_report(engine: &mut Engine, now: Time, number: u32, report: AgentReport) -> Vec<Action> {
    let (node, attachment) = (node(number), attachment(engine, number));
    engine.drive(now, Event::Reported { node, attachment, report })
}

/// Node of each rank in the current generation.
fn placed(engine: &Engine) -> Vec<String> {
    engine.status().ranks.into_iter().map(|rank| rank.node.0).collect()
}

#[test]
fn a_joining_node_takes_part_once_its_processes_are_ready() {
    let mut engine = training(&[1]);

    let actions = attach(&mut engine, at(3.0), 1, 2, None);
    let local_ranks = vec![LocalRank(0), LocalRank(1)];
    assert_eq!(actions[1], send(1, 2, Directive::Warm { local_ranks }));
    assert_eq!(warm(&mut engine, at(5.0), 1, 1), [], "the others keep training");
    assert_eq!(placed(&engine), ["node0"]);

    let opened = warm(&mut engine, at(6.0), 1, 0);
    let is_reported = |action: &Action| matches!(action, Action::Publish(event) if event.kind == JobEventKind::NodesAdded);
    assert!(opened.iter().any(is_reported), "{opened:?}");
    assert_eq!(placed(&engine), ["node0", "node1", "node1"]);
    let status = engine.status();
    assert_eq!((status.phase, status.generation), (PhaseName::Forming, Generation(2)));
    assert_eq!(status.recoveries[0].cause, "node node1 takes part with 2 ranks from here on");
}

#[test]
fn a_process_that_ends_before_it_joins_is_retried_once_and_then_its_node_is_quarantined() {
    let mut engine = training(&[1]);
    attach(&mut engine, at(3.0), 1, 2, None);
    warm(&mut engine, at(4.0), 1, 0);
    let failed = || AgentReport::WarmFailed {
        local_rank: LocalRank(0),
        failure: crash("no memory".to_owned()),
    };

    let retried = without_events(agent_report(&mut engine, at(5.0), 1, failed()));
    assert_eq!(retried, [send(1, 2, Directive::Warm { local_ranks: vec![LocalRank(0)] })]);
    warm(&mut engine, at(6.0), 1, 1);
    assert_eq!(placed(&engine), ["node0"], "local rank 0 is no longer ready");

    let actions = agent_report(&mut engine, at(7.0), 1, failed());
    let Some(Action::Publish(published)) = actions.last() else { panic!("{actions:?}") };
    assert_eq!(published.kind, JobEventKind::NodeQuarantined);
    assert_eq!(engine.deadline(), Some(at(67.0)));
    let local_ranks = vec![LocalRank(0), LocalRank(1)];
    let ends = Launch { replace: local_ranks.clone(), ..launch(1, 1, &[]) };
    let expected = [Directive::Launch(ends), Directive::Warm { local_ranks }];
    let actions = tick(&mut engine, at(67.0));
    assert_eq!(actions, expected.map(|directive| send(1, 2, directive)));
}

#[test]
fn a_node_that_lacks_a_file_is_sent_away_and_not_tried_again() {
    let mut engine = training(&[1]);
    attach(&mut engine, at(3.0), 1, 1, None);
    let failure = exit::bad_input("data.train: no such file");
    let report = AgentReport::WarmFailed { local_rank: LocalRank(0), failure: failure.clone() };
    let actions = agent_report(&mut engine, at(4.0), 1, report);
    let outcome = Outcome::Failed { failure };
    let is_dismissed = |action: &Action| matches!(action, Action::Send { directive: Directive::Dismiss { outcome: found }, .. } if *found == outcome);
    assert!(actions.iter().any(is_dismissed), "{actions:?}");
    assert_eq!(engine.status().phase, PhaseName::Training);
    assert!(engine.nodes.get(&node(1)).is_none());
}

#[test]
fn a_node_that_is_not_ready_to_join_in_time_is_quarantined() {
    let mut engine = training(&[1]);
    attach(&mut engine, at(3.0), 1, 1, None);
    assert_eq!(engine.deadline(), Some(at(23.0)), "cluster.rendezvous_seconds later");
    assert_eq!(tick(&mut engine, at(23.0)), []);
    assert_eq!(engine.deadline(), Some(at(83.0)));
    assert_eq!(engine.status().phase, PhaseName::Training);
}

#[test]
fn a_node_that_joined_while_ranks_start_takes_part_in_the_next_generation() {
    let mut engine = forming(&[1]);
    attach(&mut engine, at(0.5), 1, 1, None);
    all_ready(&mut engine, at(1.0), None);
    let actions = report(&mut engine, at(2.0), 0, started());
    assert_eq!(actions, [send(1, 2, Directive::Warm { local_ranks: vec![LocalRank(0)] })]);
    warm(&mut engine, at(3.0), 1, 0);
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

fn depart(engine: &mut Engine, now: Time, number: u32, seconds_left: Option<f64>) -> Vec<Action> {
    agent_report(
        engine,
        now,
        number,
        AgentReport::NodeDeparting { reason: "spot notice".to_owned(), seconds_left },
    )
}

#[test]
fn training_continues_without_a_leaving_node() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;

    let actions = without_events(depart(&mut engine, at(10.0), 0, Some(120.0)));

    assert_eq!(placed(&engine), ["node1"]);
    assert_eq!(engine.status().drain, None);
    assert!(!actions.iter().any(|action| matches!(
        action,
        Action::Send { node: to, directive: Directive::Launch(_), .. } if *to == node(0)
    )));
    all_ready(&mut engine, at(10.1), Some(70));
    let released = send(0, 1, Directive::Release { reason: "spot notice".to_owned() });
    assert_eq!(report(&mut engine, at(10.2), 0, started()), [released]);
}

#[test]
fn a_leaving_node_stays_until_the_others_hold_the_state() {
    let mut engine = meeting(&[1, 1]);
    engine.policy.min_ranks = 1;
    assert_eq!(without_events(depart(&mut engine, at(1.5), 0, None)), []);
    assert_eq!(placed(&engine), ["node0", "node1"], "it may be the only node that holds the state");

    all_started(&mut engine, at(2.0));

    assert_eq!(placed(&engine), ["node1"]);
}

#[test]
fn a_leaving_spare_node_is_released_at_once() {
    let mut engine = training(&[1]);
    engine.policy.max_ranks = 1;
    attach(&mut engine, at(3.0), 1, 1, None);

    let actions = without_events(depart(&mut engine, at(10.0), 1, None));

    assert_eq!(actions, [send(1, 2, Directive::Release { reason: "spot notice".to_owned() })]);
    assert_eq!(engine.status().phase, PhaseName::Training);
}

#[test]
fn a_drain_publishes_each_stage_and_accepts_an_earlier_deadline() {
    let mut engine = training(&[1]);
    depart(&mut engine, at(10.0), 0, None);
    assert_eq!(engine.status().drain.unwrap().until, at(110.0));
    depart(&mut engine, at(11.0), 0, Some(49.0));
    assert_eq!(engine.status().drain.unwrap().until, at(60.0));

    let mut stages = Vec::new();
    for (second, rank_report) in [
        (12.0, RankReport::Stopping { step: Step(7) }),
        (12.5, RankReport::Copied { step: Step(7) }),
        (14.0, RankReport::Saved(commit(1, 7))),
    ] {
        let event = rank_event(&engine, engine.lifecycle.generation, 0, rank_report);
        for action in engine.drive(at(second), event) {
            if let Action::Publish(published) = action
                && published.kind == JobEventKind::Draining
            {
                stages.push(published.message);
            }
        }
    }
    assert_eq!(
        stages,
        [
            "all ranks stop after step 7, 2.0 s after the request; 48 s are left",
            "the state after step 7 is copied, 2.5 s after the request; 47 s are left",
            "the state after step 7 is durable, 4.0 s after the request; 46 s are left",
        ]
    );
    let drain = engine.status().drain.unwrap();
    assert_eq!((drain.stop_step, drain.durable_at), (Some(Step(7)), Some(at(14.0))));
}

#[test]
fn an_agent_that_missed_its_launch_gets_it_again_with_a_full_timeout() {
    let mut engine = forming(&[1, 1]);
    detach(&mut engine, at(17.0), 1);

    let actions = attach(&mut engine, at(19.0), 1, 1, None);

    assert_eq!(actions, [send(1, 3, Directive::Launch(launch(1, 2, &[(1, 0)])))]);
    assert_eq!(engine.deadline(), Some(at(39.0)));
}

#[test]
fn a_node_that_reconnects_gets_the_begin_directive_again() {
    let mut engine = meeting(&[1, 1]);
    detach(&mut engine, at(2.0), 1);
    let waits = RankPhase::Ready { address: address(1), step: None };

    let actions = attach(&mut engine, at(3.0), 1, 1, running(1, &[(1, waits)]));

    let begin = begin(1, &[address(0), address(1)]);
    assert_eq!(actions, [send(1, 3, begin)]);
}

// ---- ranks that are late ----

#[test]
fn a_rank_that_does_not_get_ready_is_replaced() {
    let mut engine = forming(&[1, 1]);
    report(&mut engine, at(1.0), 0, ready(0, None));
    assert_eq!(engine.deadline(), Some(at(20.0)));

    let actions = tick(&mut engine, at(20.0));

    let replace = vec![LocalRank(0)];
    assert_eq!(
        launches(&actions),
        [launch(2, 2, &[(0, 0)]), Launch { replace, ..launch(2, 2, &[(1, 0)]) }]
    );
}

#[test]
fn a_rank_that_hangs_is_replaced_even_after_a_backoff() {
    let mut engine = forming(&[1, 1]);
    tick(&mut engine, at(20.0));
    report(&mut engine, at(21.0), 0, ready(0, None));
    tick(&mut engine, at(40.0));
    assert_eq!(engine.status().phase, PhaseName::Backoff);

    let actions = tick(&mut engine, at(41.0));

    let replaced: Vec<_> = launches(&actions).into_iter().map(|launch| launch.replace).collect();
    assert_eq!(replaced, [vec![], vec![LocalRank(0)]]);
}

#[test]
fn a_rank_that_holds_state_is_not_replaced_for_a_failed_meeting() {
    let mut engine = forming(&[1, 1]);
    report(&mut engine, at(1.0), 0, ready(0, Some(7)));
    report(&mut engine, at(1.0), 1, ready(1, None));

    let actions = tick(&mut engine, at(21.0));

    let replaced: Vec<_> = launches(&actions).into_iter().map(|launch| launch.replace).collect();
    assert_eq!(replaced, [vec![], vec![LocalRank(0)]]);
}

#[test]
fn ranks_of_a_disconnected_node_do_not_count_as_hanging() {
    let mut engine = forming(&[1, 1]);
    report(&mut engine, at(1.0), 0, ready(0, None));
    detach(&mut engine, at(18.0), 1);

    assert_eq!(tick(&mut engine, at(20.0)), []);

    assert_eq!(engine.deadline(), Some(at(23.0)));
}

// ---- losing ranks ----

#[test]
fn rank_death_opens_a_new_generation_at_once_and_keeps_the_survivors() {
    let mut engine = training(&[1, 1]);

    let actions = report(&mut engine, at(10.0), 1, crashed());

    assert!(opens(&actions, 2));
    assert_eq!(launches(&actions), [launch(2, 2, &[(0, 0)]), launch(2, 2, &[(1, 0)])]);
    assert_eq!(engine.status().recoveries[0].cause, "rank 1: killed");
}

#[test]
fn a_lost_connection_waits_for_the_report_of_a_death() {
    let mut engine = training(&[1, 1]);

    assert_eq!(report(&mut engine, at(10.0), 0, lost()), []);

    assert_eq!(
        engine.status().reason,
        "rank 0 lost its connection to the others: connection reset; waiting to learn which ranks were lost"
    );
    let actions = report(&mut engine, at(10.1), 1, crashed());
    assert!(opens(&actions, 2));
    assert_eq!(causes(&engine), ["rank 1: killed"]);
}

#[test]
fn a_lost_connection_without_a_death_opens_a_new_generation_after_a_timeout() {
    let mut engine = detecting();
    assert_eq!(engine.deadline(), Some(at(10.5)));

    assert!(opens(&tick(&mut engine, at(10.5)), 2));
}

#[test]
fn once_all_ranks_lost_their_connection_a_new_generation_opens_at_once() {
    let mut engine = detecting();

    assert!(opens(&report(&mut engine, at(10.1), 1, lost()), 2));
}

#[test]
fn a_death_waits_for_a_disconnected_node_that_may_hold_the_newest_state() {
    let mut engine = training(&[1, 1]);
    detach(&mut engine, at(9.0), 1);

    assert_eq!(report(&mut engine, at(10.0), 0, crashed()), []);

    assert_eq!(
        engine.status().reason,
        "rank 0: killed; waiting for node node1, which is disconnected"
    );
    assert_eq!(engine.deadline(), Some(at(14.0)));
    let back = attach(&mut engine, at(11.0), 1, 1, running(1, &[(1, RankPhase::Waiting)]));
    assert_eq!(launches(&back), [launch(2, 2, &[(0, 0)]), launch(2, 2, &[(1, 0)])]);
}

#[test]
fn backoffs_grow_until_the_restart_limit_ends_the_job() {
    let mut engine = training(&[1]);
    let mut pauses = Vec::new();
    let mut now = at(10.0);
    while engine.outcome().is_none() {
        report(&mut engine, now, 0, crashed());
        let deadline = engine.deadline().filter(|_| engine.status().phase == PhaseName::Backoff);
        if let Some(until) = deadline {
            pauses.push(until.since(now).as_secs_f64());
            now = until;
            tick(&mut engine, now);
        }
    }

    // Varied by up to a quarter, so that jobs that failed together do not restart together.
    let [first, second] = pauses[..] else { panic!("{pauses:?}") };
    assert!((0.75..=1.25).contains(&first) && (1.5..=2.5).contains(&second), "{pauses:?}");
    let message = "4 generations ended without a new step, the last because rank 0: killed";
    assert_eq!(failure_of(&engine), crash(message.to_owned()));
}

#[test]
fn a_node_that_fails_repeatedly_is_quarantined() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;
    report(&mut engine, at(10.0), 1, crashed());
    assert_eq!(placed(&engine), ["node0", "node1"], "a single failure does not count");
    all_ready(&mut engine, at(11.0), None);
    all_started(&mut engine, at(12.0));
    report(&mut engine, at(13.0), 1, crashed());
    let until = engine.deadline().unwrap();
    tick(&mut engine, until);
    assert_eq!(placed(&engine), ["node0"]);

    all_ready(&mut engine, at(16.0), Some(0));
    all_started(&mut engine, at(17.0));
    assert_eq!(engine.deadline(), Some(at(73.0)));
    let actions = tick(&mut engine, at(73.0));
    let local_ranks = vec![LocalRank(0)];
    let ends = Launch { replace: local_ranks.clone(), ..launch(3, 1, &[]) };
    let expected = [Directive::Launch(ends), Directive::Warm { local_ranks }];
    assert_eq!(actions, expected.map(|directive| send(1, 2, directive)));
}

#[test]
fn quarantines_end_if_the_other_nodes_hold_no_state() {
    let mut engine = training(&[1, 2]);
    engine.policy.min_ranks = 1;
    for (failed, ready) in [(10.0, 11.0), (13.0, 16.0)] {
        report(&mut engine, at(failed), 1, crashed());
        if let Some(until) = engine.deadline().filter(|_| placed(&engine).is_empty()) {
            tick(&mut engine, until);
        }
        all_ready(&mut engine, at(ready), None);
        all_started(&mut engine, at(ready + 0.5));
    }
    assert_eq!(placed(&engine), ["node0", "node1", "node1"]);
}

#[test]
fn a_failing_node_is_kept_if_the_others_are_too_few() {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(10.0), 1, crashed());
    all_ready(&mut engine, at(11.0), None);
    all_started(&mut engine, at(12.0));
    report(&mut engine, at(13.0), 1, crashed());
    let until = engine.deadline().unwrap();
    tick(&mut engine, until);
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

#[test]
fn a_new_step_resets_the_failure_count() {
    let mut engine = training(&[1]);
    report(&mut engine, at(10.0), 0, crashed());
    all_ready(&mut engine, at(11.0), None);
    all_started(&mut engine, at(12.0));
    report(&mut engine, at(13.0), 0, stepped(1));

    assert!(opens(&report(&mut engine, at(14.0), 0, crashed()), 3));
}

// ---- losing nodes ----

#[test]
fn a_node_that_stays_disconnected_is_given_up_after_its_grace_time() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;
    assert_eq!(detach(&mut engine, at(10.0), 1), []);
    assert_eq!(engine.deadline(), Some(at(15.0)));

    let actions = tick(&mut engine, at(15.0));

    assert_eq!(launches(&actions), [launch(2, 1, &[(0, 0)])]);
    assert_eq!(engine.status().recoveries[0].cause, "node node1 was disconnected for 5 s");
}

#[test]
fn a_node_that_reconnects_with_its_ranks_in_its_grace_time_changes_nothing() {
    let mut engine = training(&[1, 1]);
    detach(&mut engine, at(10.0), 1);

    let actions = attach(&mut engine, at(14.0), 1, 1, running(1, &[(1, RankPhase::Training)]));

    assert_eq!(actions, []);
    assert_eq!((engine.status().phase, engine.deadline()), (PhaseName::Training, None));
}

#[test]
fn a_rank_that_is_missing_after_a_reconnect_counts_as_dead() {
    let mut engine = training(&[1, 2]);
    detach(&mut engine, at(10.0), 1);

    let actions = attach(&mut engine, at(11.0), 1, 2, running(1, &[(1, RankPhase::Training)]));

    assert!(opens(&actions, 2));
    let cause = "rank 2: rank 2 ended while node node1 was disconnected";
    assert_eq!(engine.status().recoveries[0].cause, cause);
}

#[test]
fn a_node_whose_ranks_are_not_those_of_the_journal_keeps_its_state() {
    let mut engine = training(&[1, 1, 1]);
    detach(&mut engine, at(10.0), 1);

    // By the journal it has rank 1.
    let phase = RankPhase::Ready { address: "1/1".to_owned(), step: Some(Step(9)) };
    attach(&mut engine, at(10.1), 1, 1, running(1, &[(0, phase)]));

    assert_eq!(engine.nodes[&node(1)].holders, [LocalRank(0)].into());
}

#[test]
fn an_agent_that_restarted_without_its_ranks_causes_a_new_generation() {
    let mut engine = training(&[1, 1]);

    let actions = attach(&mut engine, at(10.0), 1, 1, None);

    assert!(opens(&actions, 2));
    let cause = "the agent of node node1 restarted without its ranks";
    assert_eq!(engine.status().recoveries[0].cause, cause);
}

#[test]
fn ranks_that_are_done_no_longer_need_their_node() {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(10.0), 1, done(Outcome::Completed, "d"));
    detach(&mut engine, at(10.0), 1);
    tick(&mut engine, at(15.0));

    report(&mut engine, at(16.0), 0, done(Outcome::Completed, "d"));

    assert_eq!(engine.outcome(), Some(&Outcome::Completed));
}

// ---- stale messages ----

/// Handles a message that must only increase the count of stale messages.
fn assert_rejected(mut engine: Engine, event: Event) {
    let (before, deadline) = (engine.status(), engine.deadline());

    assert_eq!(engine.drive(at(10.0), event), []);

    let stale_messages = before.stale_messages + 1;
    assert_eq!(engine.status(), Status { stale_messages, ..before });
    assert_eq!(engine.deadline(), deadline);
}

#[test]
fn reports_of_an_older_generation_are_rejected_and_counted() {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(5.0), 1, crashed());
    let event = rank_event(&engine, Generation(1), 0, crashed());
    assert_rejected(engine, event);
}

#[test]
fn reports_over_an_older_connection_are_rejected_and_counted() {
    let mut engine = training(&[1]);
    let event = rank_event(&engine, Generation(1), 0, crashed());
    attach(&mut engine, at(5.0), 0, 1, running(1, &[(0, RankPhase::Training)]));
    assert_rejected(engine, event);
}

#[test]
fn reports_of_a_rank_that_another_node_runs_are_rejected_and_counted() {
    let engine = training(&[1, 1]);
    let report = AgentReport::Rank { generation: Generation(1), rank: Rank(1), report: crashed() };
    let event = Event::Reported { node: node(0), attachment: Attachment(1), report };
    assert_rejected(engine, event);
}

// ---- checkpoints ----

#[test]
fn a_checkpoint_can_be_requested_only_while_ranks_train() {
    let checkpoint = Directive::Checkpoint { generation: Generation(1) };
    let actions = training(&[1]).drive(at(10.0), Event::Checkpoint);
    assert_eq!(actions, [send(0, 1, checkpoint)]);

    let mut early = meeting(&[1]);
    let reason = "no training is running: 1 rank connects and restores its state";
    assert_eq!(early.can_checkpoint(), Err(reason.to_owned()));
    assert_eq!(early.drive(at(10.0), Event::Checkpoint), []);
}

#[test]
fn a_commit_is_persisted() {
    let mut engine = training(&[1]);

    let actions = report(&mut engine, at(10.0), 0, RankReport::Saved(commit(1, 50)));

    assert_eq!(actions, [Action::Persist(Record::Saved(commit(1, 50)))]);
}

#[test]
fn steps_of_the_time_without_a_connection_are_recorded_once() {
    let attach_with_steps = |engine: &mut Engine, steps: &[u64]| -> Vec<u64> {
        let report = |step: &u64| StepReport { step: Step(*step), ..StepReport::default() };
        let steps = steps.iter().map(report).collect();
        let held = running(1, &[(0, RankPhase::Training)]).unwrap();
        detach(engine, at(10.0), 0);
        let running = Some(RunningRanks { steps, ..held });
        let hello = Hello::new(node(0), 1, running);
        let actions = engine.drive(at(10.0), Event::Attached { attachment: Attachment(9), hello });
        let step_of = |action: &Action| match action {
            Action::AddPoint(MetricPoint::Step(report)) => Some(report.step.0),
            _ => None,
        };
        actions.iter().filter_map(step_of).collect()
    };
    let mut engine = training(&[1]);
    report(&mut engine, at(9.0), 0, stepped(3));

    assert_eq!(attach_with_steps(&mut engine, &[2, 3, 4, 5]), [4, 5]);
    assert_eq!(engine.status().latest.map(|latest| latest.step), Some(Step(5)));
    assert_eq!(attach_with_steps(&mut engine, &[4, 5, u64::MAX]), [0; 0], "not a real step");
}

#[test]
fn an_evaluation_is_recorded_although_the_job_completed_without_the_coordinator() {
    let mut engine = training(&[1]);
    detach(&mut engine, at(10.0), 0);
    let phase = RankPhase::Done { outcome: Outcome::Completed, digest: "d".to_owned() };
    let evaluation = RankReport::Evaluated {
        step: Step(44),
        epoch: baton_recipe::Epoch(2),
        accuracy: Accuracy::default(),
        ema: None,
        extent: baton_recipe::progress::Extent::Full,
        texts: Vec::new(),
    };
    let held = running(1, &[(0, phase)]).unwrap();
    let evaluations = vec![evaluation, RankReport::Met];

    attach(&mut engine, at(20.0), 0, 1, Some(RunningRanks { evaluations, ..held }));

    assert_eq!(engine.status().outcome, Some(Outcome::Completed));
    assert_eq!(engine.status().evaluation.map(|evaluation| evaluation.step), Some(Step(44)));
}

#[test]
fn steps_of_a_node_without_rank_0_are_not_recorded() {
    let mut engine = training(&[1, 1]);
    detach(&mut engine, at(10.0), 1);
    let steps = vec![StepReport { step: Step(9), ..StepReport::default() }];
    let held = running(1, &[(1, RankPhase::Training)]).unwrap();

    attach(&mut engine, at(10.0), 1, 1, Some(RunningRanks { steps, ..held }));

    assert_eq!(engine.status().latest, None);
}

#[test]
fn a_commit_in_a_hello_is_persisted_unless_a_newer_one_is_known() {
    let attach_with_commit = |engine: &mut Engine, step| {
        let held = RunningRanks { commit: Some(commit(1, step)), ..running(1, &[]).unwrap() };
        let ranks = vec![(Rank(0), RankPhase::Training)];
        detach(engine, at(10.0), 0);
        attach(engine, at(10.0), 0, 1, Some(RunningRanks { ranks, ..held }))
    };
    let mut engine = training(&[1]);

    assert_eq!(
        attach_with_commit(&mut engine, 50),
        [Action::Persist(Record::Saved(commit(1, 50)))]
    );

    assert_eq!(attach_with_commit(&mut engine, 40), []);
    assert_eq!(engine.status().commit, Some(commit(1, 50)));
}

// ---- loaders ----

/// Texts that are published when a rank reports this number of skipped samples.
fn skips(engine: &mut Engine, rank: u32, skipped: u64) -> Vec<String> {
    let generation = engine.lifecycle.generation;
    let event = rank_event(engine, generation, rank, RankReport::Loader(loader(skipped)));
    let message = |action| match action {
        Action::Publish(published) if published.kind == JobEventKind::SamplesSkipped => {
            published.message
        }
        other => panic!("{other:?}"),
    };
    engine.drive(at(10.0), event).into_iter().map(message).collect()
}

fn loaders(engine: &Engine) -> Vec<Option<LoaderReport>> {
    engine.status().ranks.into_iter().map(|rank| rank.loader).collect()
}

#[test]
fn the_newest_report_of_each_rank_s_loader_is_kept() {
    let mut engine = training(&[1, 1]);
    assert_eq!(report(&mut engine, at(10.0), 1, RankReport::Loader(LoaderReport::default())), []);
    assert_eq!(report(&mut engine, at(11.0), 1, RankReport::Loader(loader(0))), []);

    assert_eq!(loaders(&engine), [None, Some(loader(0))]);
    assert_eq!(engine.status().skipped_samples, 0);
}

#[test]
fn the_loader_of_a_dead_rank_is_removed_and_late_reports_change_nothing() {
    let mut engine = training(&[1, 1]);
    detach(&mut engine, at(9.0), 1);
    skips(&mut engine, 0, 2);
    // Node 1 is disconnected, so the generation stays open.
    report(&mut engine, at(10.0), 0, crashed());
    assert_eq!(loaders(&engine), [None, None]);

    assert_eq!(skips(&mut engine, 0, 3), [""; 0]);

    assert_eq!(loaders(&engine), [None, None]);
    assert_eq!(engine.status().skipped_samples, 2);
}

#[test]
fn a_new_generation_has_no_loader_status_before_the_first_reports() {
    let mut engine = training(&[1, 1]);
    skips(&mut engine, 0, 2);

    report(&mut engine, at(10.0), 1, crashed());

    assert_eq!(loaders(&engine), [None, None]);
}

#[test]
fn skipped_samples_are_published_at_the_first_one_and_at_each_tenfold() {
    let mut engine = training(&[1]);
    let bad = "the last: train.beton: sample 7: no JPEG at byte 4096";

    assert_eq!(skips(&mut engine, 0, 0), [""; 0]);
    assert_eq!(skips(&mut engine, 0, 1), [format!("rank 0 skipped 1 bad sample; {bad}")]);
    assert_eq!(skips(&mut engine, 0, 9), [""; 0]);
    assert_eq!(skips(&mut engine, 0, 12), [format!("rank 0 skipped 12 bad samples; {bad}")]);
    assert_eq!(skips(&mut engine, 0, 119), [""; 0]);
    assert_eq!(skips(&mut engine, 0, 120), [format!("rank 0 skipped 120 bad samples; {bad}")]);
    assert_eq!(engine.status().skipped_samples, 120);
}

#[test]
fn skipped_samples_of_all_ranks_add_up() {
    let mut engine = training(&[2, 1]);
    for (rank, skipped) in [(0, 1), (2, 4), (0, 2), (2, 4)] {
        skips(&mut engine, rank, skipped);
    }

    assert_eq!(engine.status().skipped_samples, 6);
}

#[test]
fn a_survivor_s_skipped_samples_are_not_published_or_counted_again_under_its_new_rank() {
    let mut engine = training(&[1, 1]);
    skips(&mut engine, 1, 5);
    detach(&mut engine, at(9.0), 0);
    tick(&mut engine, at(14.0));
    attach(&mut engine, at(15.0), 2, 1, running(1, &[]));
    assert_eq!(engine.status().ranks[0].node, node(1), "node 1 runs rank 0 now");

    assert_eq!(skips(&mut engine, 0, 6), [""; 0]);

    assert_eq!(engine.status().skipped_samples, 6);
}

#[test]
fn the_replacement_of_a_dead_rank_counts_its_skipped_samples_from_zero() {
    let mut engine = training(&[1]);
    skips(&mut engine, 0, 5);
    report(&mut engine, at(10.0), 0, crashed());

    assert_eq!(skips(&mut engine, 0, 7).len(), 1, "published again");

    assert_eq!(engine.status().skipped_samples, 12);
}

#[test]
fn a_smaller_count_comes_from_another_process() {
    let mut engine = training(&[1]);
    skips(&mut engine, 0, 5);

    assert_eq!(skips(&mut engine, 0, 2).len(), 1, "published again");

    assert_eq!(engine.status().skipped_samples, 7);
}

// ---- end of the job ----

#[test]
fn all_done_ends_the_job() {
    let mut engine = training(&[1, 1]);
    assert_eq!(report(&mut engine, at(10.0), 0, done(Outcome::Completed, "d")), []);

    let actions = report(&mut engine, at(10.0), 1, done(Outcome::Completed, "d"));

    assert_eq!(actions[0], Action::Persist(Record::Ended(Outcome::Completed)));
    let dismiss = Directive::Dismiss { outcome: Outcome::Completed };
    assert_eq!(actions[1..], [send(0, 1, dismiss.clone()), send(1, 2, dismiss)]);
}

#[test]
fn ranks_that_disagree_on_the_final_digest_fail_the_job() {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(10.0), 0, done(Outcome::Completed, "one"));

    report(&mut engine, at(10.0), 1, done(Outcome::Completed, "another"));

    assert!(failure_of(&engine).message.starts_with("ranks ended with different states"));
}

#[test]
fn ranks_may_have_been_drained_for_different_reasons() {
    let mut engine = training(&[1, 1]);
    let because = |reason: &str| Outcome::Drained { reason: reason.to_owned() };
    report(&mut engine, at(10.0), 0, done(because("spot notice"), "d"));

    report(&mut engine, at(10.0), 1, done(because("node node0: spot notice"), "d"));

    assert_eq!(engine.outcome(), Some(&because("spot notice")));
}

#[test]
fn an_agent_that_attaches_after_the_end_is_dismissed() {
    let mut engine = ended();

    let actions = attach(&mut engine, at(10.0), 0, 1, None);

    assert_eq!(actions, [send(0, 1, Directive::Dismiss { outcome: Outcome::Stopped })]);
}

// ---- drains, in every phase ----

#[test]
fn a_drain_at_the_step_of_a_committed_checkpoint_is_durable_at_once() {
    let durable_at = |rollback: bool| {
        let mut engine = training(&[1]);
        report(&mut engine, at(9.0), 0, RankReport::Saved(commit(1, 7)));
        if rollback {
            let before = Step(7);
            let rollback =
                Rollback { generation: Generation(2), before, suspect_from: None, skip: None };
            let diagnosis = divergence::diagnosis(7);
            let incident =
                Incident { generation: Generation(1), diagnosis, rollback: Some(rollback) };
            engine.record_incident(&incident);
        }
        drain(&mut engine, at(10.0));
        report(&mut engine, at(11.0), 0, RankReport::Stopping { step: Step(7) });
        report(&mut engine, at(11.0), 0, RankReport::Copied { step: Step(7) });
        engine.status().drain.unwrap().durable_at
    };
    assert_eq!(durable_at(false), Some(at(11.0)));
    assert_eq!(durable_at(true), None, "a checkpoint that a rollback invalidated does not count");
}

#[test]
fn a_drain_says_if_the_last_save_took_longer_than_the_time_left() {
    let texts = |save_seconds: f64, seconds_left: f64| {
        let mut engine = training(&[1]);
        let took = Some(SaveTimes { stall_seconds: 0.0, seconds: save_seconds });
        report(&mut engine, at(9.0), 0, RankReport::Saved(Commit { took, ..commit(1, 7) }));
        let actions = depart(&mut engine, at(10.0), 0, Some(seconds_left));
        let event = actions.into_iter().find_map(|action| match action {
            Action::Publish(JobEvent { kind: JobEventKind::Draining, message, .. }) => {
                Some(message)
            }
            _ => None,
        });
        (event.unwrap(), engine.status().reason)
    };
    let warning = "; this may be too late: the last checkpoint took 31.0 s; if it is not done in time, the job \
                   continues from the one before";
    let event = "saving and stopping, 30 s are left: node node0: spot notice";
    let reason = "draining: node node0: spot notice; 30 s to save and stop";
    assert_eq!(texts(29.0, 30.0), (event.to_owned(), reason.to_owned()));
    assert_eq!(texts(30.0, 30.0), (event.to_owned(), reason.to_owned()));
    assert_eq!(texts(31.0, 30.0), (format!("{event}{warning}"), format!("{reason}{warning}")));
}

#[test]
fn draining_while_gathering_ends_the_job() {
    let mut engine = gathering(1);
    let actions = drain(&mut engine, at(10.0));
    assert_eq!(actions, [Action::Persist(Record::Ended(drained()))]);
}

#[test]
fn draining_while_training_is_sent_to_all_and_ends_when_all_are_done() {
    let mut engine = training(&[1, 1]);

    let actions = drain(&mut engine, at(10.0));

    let drain = Directive::Drain { generation: Generation(1), reason: "a user asked".to_owned() };
    assert_eq!(actions, [send(0, 1, drain.clone()), send(1, 2, drain)]);
    assert_eq!(engine.status().reason, "draining: a user asked; 100 s to save and stop");
    report(&mut engine, at(11.0), 0, done(drained(), "d"));
    report(&mut engine, at(11.0), 1, done(drained(), "d"));
    assert_eq!(engine.outcome(), Some(&drained()));
}

#[test]
fn draining_while_ranks_start_ends_the_job_once_it_is_known_that_none_holds_state() {
    let mut engine = forming(&[1, 1]);
    assert_eq!(drain(&mut engine, at(0.5)), []);

    all_ready(&mut engine, at(1.0), None);

    assert_eq!(engine.outcome(), Some(&drained()));
}

#[test]
fn draining_while_survivors_join_saves_what_they_hold() {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(10.0), 1, crashed());
    assert_eq!(drain(&mut engine, at(10.1)), []);

    report(&mut engine, at(11.0), 0, ready(0, Some(70)));
    report(&mut engine, at(11.0), 1, ready(1, None));
    all_started(&mut engine, at(12.0));

    assert_eq!(engine.status().phase, PhaseName::Draining);
}

#[test]
fn draining_while_ranks_meet_is_sent_once_they_train() {
    let mut engine = meeting(&[1]);
    assert_eq!(drain(&mut engine, at(1.5)), []);

    let actions = report(&mut engine, at(2.0), 0, started());

    let drain = Directive::Drain { generation: Generation(1), reason: "a user asked".to_owned() };
    assert_eq!(actions, [send(0, 1, drain)]);
}

#[test]
fn draining_during_a_backoff_opens_the_next_generation_at_once() {
    assert!(opens(&drain(&mut backing_off(), at(11.1)), 3));
}

#[test]
fn draining_while_detecting_continues_with_the_next_generation() {
    let mut engine = detecting();
    assert_eq!(drain(&mut engine, at(10.1)), []);
    assert!(opens(&tick(&mut engine, at(10.5)), 2));
    assert!(engine.status().drain.is_some());
}

#[test]
fn draining_while_reattaching_is_sent_once_all_nodes_are_attached() {
    let mut engine = reattaching(&[1]);
    assert_eq!(drain(&mut engine, at(0.1)), []);

    let actions = attach(&mut engine, at(0.2), 0, 1, running(1, &[(0, RankPhase::Training)]));

    let drain = Directive::Drain { generation: Generation(1), reason: "a user asked".to_owned() };
    assert_eq!(actions, [send(0, 1, drain)]);
}

#[test]
fn a_drain_outlives_the_coordinator_if_ranks_hold_state() {
    let placements = training(&[1, 1]).lifecycle.world().unwrap().placements().to_vec();
    let draining = Record::Draining { reason: "a user asked".to_owned() };
    let records = [opened(1, placements), draining];

    // All ranks train on: they hear it again.
    let mut engine = replay(&records);
    attach(&mut engine, at(0.1), 0, 1, running(1, &[(0, RankPhase::Training)]));
    let actions = attach(&mut engine, at(0.2), 1, 1, running(1, &[(1, RankPhase::Training)]));
    let drain = Directive::Drain { generation: Generation(1), reason: "a user asked".to_owned() };
    assert_eq!(actions, [send(0, 1, drain.clone()), send(1, 2, drain)]);

    // One was lost with the coordinator: the others save and stop.
    let mut engine = replay(&records);
    attach(&mut engine, at(0.1), 0, 1, running(1, &[(0, RankPhase::Training)]));
    attach(&mut engine, at(0.2), 1, 1, None);
    tick(&mut engine, at(60.0));
    assert_eq!(engine.status().drain.map(|drain| drain.reason), Some("a user asked".to_owned()));

    // The holder comes back later than the others are waited for.
    let mut engine = replay(&records);
    attach(&mut engine, at(0.2), 1, 1, None);
    tick(&mut engine, at(60.0));
    attach(&mut engine, at(61.0), 0, 1, running(1, &[(0, RankPhase::Training)]));
    tick(&mut engine, at(62.0));
    assert!(engine.status().drain.is_some());

    // All were lost, and somebody has started the job again.
    let mut engine = replay(&records);
    attach(&mut engine, at(0.1), 0, 1, None);
    attach(&mut engine, at(0.2), 1, 1, None);
    tick(&mut engine, at(60.0));
    all_ready(&mut engine, at(61.0), None);
    assert_eq!((engine.status().drain, engine.outcome()), (None, None));
    let mut engine = replay(&records);
    tick(&mut engine, at(1000.0));
    assert_eq!((engine.status().drain, engine.outcome()), (None, None), "nobody has come");

    // The coordinator's run folder is lost, and the copy of its journal lacks a generation.
    let mut copy = vec![Record::Created(origin())];
    copy.extend(records.iter().cloned());
    let added = Record::after_loss(&copy, Generation(2), RanksOfLostJob::MayRun).unwrap();
    copy.extend(added);
    let engine = Engine::replay(&spec(1), &copy, at(0.0)).unwrap();
    assert!(engine.status().drain.is_some(), "{copy:?}");

    // It was done.
    let ended = Record::Ended(drained());
    let engine = replay(&[&records[..], &[ended]].concat());
    assert_eq!(engine.status().drain, None);
}

#[test]
fn a_drain_of_a_user_during_a_notice_is_persisted_once() {
    let mut engine = training(&[1]);
    depart(&mut engine, at(10.0), 0, Some(30.0));
    assert!(engine.status().drain.is_some());
    let record = Action::Persist(Record::Draining { reason: "a user asked".to_owned() });
    let mut wish = |now| engine.drive(at(now), Event::Drain { reason: "a user asked".to_owned() });
    assert!(wish(11.0).contains(&record));
    assert!(!wish(12.0).contains(&record));
}

#[test]
fn draining_after_the_end_changes_nothing() {
    let mut engine = ended();
    assert_eq!(drain(&mut engine, at(10.0)), []);
    assert_eq!(engine.outcome(), Some(&Outcome::Stopped));
}

#[test]
fn a_node_that_was_disconnected_gets_the_drain_when_it_reconnects() {
    let mut engine = training(&[1]);
    detach(&mut engine, at(10.0), 0);
    assert_eq!(drain(&mut engine, at(10.1)), []);

    let actions = attach(&mut engine, at(11.0), 0, 1, running(1, &[(0, RankPhase::Training)]));

    let drain = Directive::Drain { generation: Generation(1), reason: "a user asked".to_owned() };
    assert_eq!(actions, [send(0, 2, drain)]);
}

#[test]
fn a_drain_that_takes_too_long_ends_the_job() {
    let mut engine = training(&[1]);
    drain(&mut engine, at(10.0));
    assert_eq!(engine.deadline(), Some(at(110.0)));

    tick(&mut engine, at(110.0));

    let reason = "a user asked; ranks did not stop in time, and the state after step 0 was not saved, and this job \
                  has saved none before";
    assert_eq!(engine.outcome(), Some(&Outcome::Drained { reason: reason.to_owned() }));
}

#[test]
fn a_drain_that_takes_too_long_tells_how_many_steps_are_lost() {
    for (reached, expected) in [
        (7, "the state after step 7 is saved"),
        (
            19,
            "the state after step 19 was not saved: the job continues from the checkpoint of step 7, so the steps \
             since then, 12, are lost",
        ),
    ] {
        let mut engine = training(&[1]);
        report(&mut engine, at(9.0), 0, RankReport::Saved(commit(1, 7)));
        report(&mut engine, at(9.5), 0, stepped(reached));
        drain(&mut engine, at(10.0));

        tick(&mut engine, at(110.0));

        let reason = format!("a user asked; ranks did not stop in time, and {expected}");
        assert_eq!(engine.outcome(), Some(&Outcome::Drained { reason }));
    }
}

#[test]
fn a_leaving_node_drains_the_job_if_too_few_ranks_remain() {
    let mut engine = training(&[1]);
    let report =
        AgentReport::NodeDeparting { reason: "spot notice".to_owned(), seconds_left: None };

    engine.drive(at(10.0), Event::Reported { node: node(0), attachment: Attachment(1), report });

    let reason = "draining: node node0: spot notice; 100 s to save and stop";
    assert_eq!(engine.status().reason, reason);
}

// ---- after a restart of the coordinator ----

#[test]
fn training_that_continued_without_the_coordinator_is_not_interrupted() {
    let mut engine = reattaching(&[1, 1]);
    assert_eq!(engine.deadline(), Some(at(5.0)));

    for number in [0, 1] {
        let held = running(1, &[(number, RankPhase::Training)]);
        assert_eq!(attach(&mut engine, at(1.0), number, 1, held), []);
    }

    let status = engine.status();
    assert_eq!((status.phase, status.generation), (PhaseName::Training, Generation(1)));
    assert_eq!(status.reason, "2 ranks train; they continued while the coordinator was away");
}

#[test]
fn a_rank_that_died_without_the_coordinator_causes_a_new_generation_once_all_have_reported() {
    let mut engine = reattaching(&[1, 1]);
    assert_eq!(attach(&mut engine, at(1.0), 0, 1, running(1, &[])), []);

    let held = running(1, &[(1, RankPhase::Training)]);
    let actions = attach(&mut engine, at(2.0), 1, 1, held);

    assert_eq!(launches(&actions), [launch(2, 2, &[(0, 0)]), launch(2, 2, &[(1, 0)])]);
}

#[test]
fn nodes_that_do_not_reattach_to_the_new_coordinator_are_given_up() {
    let mut engine = reattaching(&[1, 1]);
    attach(&mut engine, at(1.0), 0, 1, running(1, &[(0, RankPhase::Training)]));

    let actions = tick(&mut engine, at(5.0));

    assert_eq!(launches(&actions), [launch(2, 1, &[(0, 0)])]);
}

#[test]
fn a_node_that_disconnected_again_gets_its_grace_time_after_a_restart() {
    let mut engine = reattaching(&[1, 1, 1]);
    for number in [0, 1] {
        let held = running(1, &[(number, RankPhase::Waiting)]);
        attach(&mut engine, at(1.0), number, 1, held);
    }
    detach(&mut engine, at(3.0), 1);

    assert_eq!(tick(&mut engine, at(5.0)), []);

    assert_eq!(engine.deadline(), Some(at(8.0)));
    assert!(opens(&tick(&mut engine, at(8.0)), 2));
}

#[test]
fn a_generation_that_was_never_launched_is_followed_by_another() {
    let mut engine = replay(&[opened(2, vec![placement(0, 0, 0)])]);

    let actions = attach(&mut engine, at(1.0), 0, 1, running(1, &[(0, RankPhase::Waiting)]));

    assert_eq!(launches(&actions), [launch(3, 1, &[(0, 0)])]);
}

#[test]
fn ranks_that_finished_without_the_coordinator_end_the_job() {
    let mut engine = reattaching(&[1]);
    let phase = RankPhase::Done { outcome: Outcome::Completed, digest: "d".to_owned() };

    attach(&mut engine, at(1.0), 0, 1, running(1, &[(0, phase)]));

    assert_eq!(engine.outcome(), Some(&Outcome::Completed));
}

#[test]
fn a_completed_job_stays_ended() {
    let engine = replay(&[opened(1, vec![placement(0, 0, 0)]), Record::Ended(Outcome::Completed)]);
    assert_eq!(engine.outcome(), Some(&Outcome::Completed));
}

#[test]
fn a_drained_job_is_resumed() {
    let saved = Record::Saved(commit(1, 50));
    let records = [opened(1, vec![placement(0, 0, 0)]), saved, Record::Ended(drained())];
    let mut engine = replay(&records);

    let actions = attach(&mut engine, at(1.0), 0, 1, None);

    let last_saved = Some((Generation(1), Step(50)));
    let restore = Restore { last_saved, ..Restore::default() };
    assert_eq!(launches(&actions), [Launch { restore, ..launch(2, 1, &[(0, 0)]) }]);
    assert_eq!(engine.status().commit, Some(commit(1, 50)));
}

#[test]
fn a_journal_without_a_job_gives_no_engine() {
    assert!(Engine::replay(&spec(1), &[], at(0.0)).is_none());
}

// ---- reasons ----

#[test]
fn every_phase_has_a_reason() {
    let mut draining = training(&[1]);
    drain(&mut draining, at(10.0));
    let engines = [
        gathering(1),
        backing_off(),
        forming(&[1]),
        meeting(&[1]),
        training(&[1]),
        detecting(),
        reattaching(&[1]),
        draining,
        ended(),
    ];

    let reasons: Vec<String> = engines
        .iter()
        .map(|engine| format!("{:?}: {}", engine.status().phase, engine.status().reason))
        .collect();

    assert_eq!(
        reasons,
        [
            "Gathering: waiting for agents",
            "Backoff: waiting before restart 2 of 3: rank 1: killed",
            "Forming: waiting for 1 rank to start",
            "Meeting: 1 rank connects and restores its state",
            "Training: 1 rank trains",
            "Detecting: rank 0 lost its connection to the others: connection reset; waiting to learn which ranks were lost",
            "Reattaching: the coordinator restarted and waits for its agents",
            "Draining: draining: a user asked; 100 s to save and stop",
            "Ended: stopped on request without a checkpoint",
        ]
    );
}

#[test]
fn a_straggler_is_published_once_and_shown_in_the_status() {
    let mut engine = training(&[2]);
    let heartbeat = |own_step_seconds| {
        RankReport::Heartbeat(RankHeartbeat {
            own_step_seconds,
            step: Step(3),
            ..RankHeartbeat::default()
        })
    };
    let mut actions = Vec::new();
    for second in 10..40u32 {
        let now = at(f64::from(second));
        for (rank, seconds) in [(0, 0.2), (1, 0.5)] {
            let event = rank_event(&engine, engine.lifecycle.generation, rank, heartbeat(seconds));
            actions.extend(engine.drive(now, event));
        }
    }
    let [Action::Publish(published)] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(published.kind, JobEventKind::Straggler);
    assert!(
        published.message.contains("rank 1") && published.message.contains("2.5 times"),
        "{published:?}"
    );
    let status = engine.status();
    assert_eq!((status.ranks[0].slowdown, status.ranks[1].slowdown), (Some(1.0), Some(2.5)));
    assert_eq!(status.ranks[1].heartbeat_at, Some(at(39.0)));
}

#[test]
fn a_save_that_failed_is_shown_until_one_succeeds() {
    let mut engine = training(&[1]);
    let problem = SaveProblem::from("the disk is full".to_owned());
    report(&mut engine, at(10.0), 0, RankReport::SaveFailed(problem));
    assert_eq!(engine.status().save_problem.as_deref(), Some("the disk is full"));
    assert_eq!(engine.status().phase, PhaseName::Training);

    report(&mut engine, at(20.0), 0, RankReport::Saved(commit(1, 7)));
    assert_eq!(engine.status().save_problem, None);
}

#[test]
fn the_status_says_that_only_the_last_save_is_left() {
    let mut engine = training(&[1]);
    let saving = RankHeartbeat { activity: Activity::Saving, ..RankHeartbeat::default() };
    let made = |step| StepReport { step: Step(step), total_steps: 100, ..StepReport::default() };
    report(&mut engine, at(10.0), 0, RankReport::Stepped(made(99)));
    report(&mut engine, at(11.0), 0, RankReport::Heartbeat(saving));
    assert_eq!(engine.status().reason, "1 rank trains");
    report(&mut engine, at(12.0), 0, RankReport::Stepped(made(100)));
    let expected = "every step is done, and the last checkpoint is being saved";
    assert_eq!(engine.status().reason, expected);
}

#[test]
fn a_job_whose_store_another_coordinator_has_claimed_ends_for_good() {
    let assert_rejected = |fence| {
        let message = "a newer generation has claimed it".to_owned();
        RankReport::SaveFailed(SaveProblem {
            message,
            fence: Some(Generation(fence)),
            exists: false,
        })
    };
    let mut engine = training(&[1]);
    // A fence at the job's own generation does not count.
    report(&mut engine, at(10.0), 0, assert_rejected(1));
    assert_eq!(engine.status().phase, PhaseName::Training);

    let actions = report(&mut engine, at(11.0), 0, assert_rejected(2));

    let Some(outcome @ Outcome::Failed { failure }) = engine.outcome() else { panic!() };
    assert_eq!((failure.class, outcome.exit_code()), (Class::TakenOver, exit::BAD_INPUT));
    assert!(actions.contains(&send(0, 1, Directive::Dismiss { outcome: outcome.clone() })));
    let origin = Record::Created(engine.origin().clone());
    let records = [origin, Record::Ended(outcome.clone())];
    let restarted = Engine::replay(&spec(1), &records, at(0.0)).unwrap();
    assert_eq!(restarted.outcome(), Some(outcome), "a restart must not claim the store again");
}

#[test]
fn a_generation_that_another_coordinator_has_opened_ends_the_job() {
    let mut engine = forming(&[1]);

    engine.drive(at(1.0), Event::TakenOver { message: "generation 9 has claimed it".to_owned() });

    let Some(Outcome::Failed { failure }) = engine.outcome() else { panic!() };
    assert_eq!(
        (failure.class, failure.message.as_str()),
        (Class::TakenOver, "generation 9 has claimed it")
    );
}

#[test]
fn a_warning_about_a_gpu_is_published_with_its_node() {
    let mut engine = training(&[1, 1]);
    let message = "GPU 3 has fallen off the bus (Xid 79)".to_owned();

    let actions = agent_report(&mut engine, at(9.0), 1, AgentReport::GpuWarning { message });

    let [Action::Publish(published)] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(published.kind, JobEventKind::GpuWarning);
    assert_eq!(published.message, "node node1: GPU 3 has fallen off the bus (Xid 79)");
}

#[test]
fn warnings_without_an_end_become_a_limited_number_of_events_of_which_the_last_says_so() {
    let mut engine = training(&[1]);
    let mut texts = Vec::new();
    for number in 0..3_000 {
        let warning = AgentReport::GpuWarning { message: format!("warning {number}") };
        for action in agent_report(&mut engine, at(9.0), 0, warning) {
            let Action::Publish(event) = action else { panic!("{action:?}") };
            texts.push(event.message);
        }
    }
    assert_eq!(texts.len(), 1_000);
    assert!(texts[999].ends_with("most of the next ones are left out"), "{}", texts[999]);
    assert!(!texts[998].contains("left out"));
}

#[test]
fn absurd_numbers_and_names_of_a_rank_change_nothing() {
    let mut engine = training(&[1]);
    let valid = StepReport { step: Step(5), ..StepReport::default() };
    let commit = commit(1, 7);
    for absurd in [
        RankReport::Stepped(StepReport { epoch: baton_recipe::Epoch(u32::MAX), ..valid.clone() }),
        RankReport::Stepped(StepReport { step_of_epoch: u64::MAX, ..valid.clone() }),
        RankReport::Stopping { step: Step(u64::MAX) },
        RankReport::Saved(Commit { name: "../../x".to_owned(), ..commit.clone() }),
        RankReport::Saved(Commit { bytes: u64::MAX, ..commit.clone() }),
    ] {
        let before = engine.status().stale_messages;
        assert_eq!(report(&mut engine, at(9.0), 0, absurd), []);
        assert_eq!(engine.status().stale_messages, before + 1);
    }
    report(&mut engine, at(9.0), 0, RankReport::Stepped(valid));
    assert_eq!(engine.status().latest.unwrap().step, Step(5));
    report(&mut engine, at(9.0), 0, RankReport::Saved(commit));
    assert_eq!(engine.status().commit.unwrap().step, Step(7));
}
