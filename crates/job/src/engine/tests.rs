//! One state, one event, its actions. Whole histories are in `tests/simulation`.

mod budget;
mod divergence;
mod evaluation;
mod pause;
mod recovery;
mod signs_of_life;

use std::time::Duration;

use super::*;
use crate::exit::crash;
use crate::{
    exit::{self, Class, Failure},
    ids::{Attachment, JobId, LocalRank, Rank},
    kit::recipe,
    message::{
        Beat, Commit, Hello, Hold, Holding, Launch, LoaderNews, Pulse, RankNews, RankPhase, Report,
        Restore, SaveProblem, StateSource, StepNews,
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

fn node(number: u32) -> NodeId {
    NodeId(format!("node{number}"))
}

fn origin() -> Origin {
    Origin {
        job: JobId(uuid::Uuid::nil()),
        recipe: None,
        first_generation: Generation(1),
        restore: Restore::default(),
    }
}

// ---- states, each made from the one before ----

fn gathering(min_ranks: u32) -> Engine {
    let mut engine = Engine::new(&spec(min_ranks), origin(), at(0.0));
    assert_eq!(engine.handle(at(0.0), Event::Tick), [Action::Persist(Record::Created(origin()))]);
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

/// A rank of two has lost touch with the other.
fn settling() -> Engine {
    let mut engine = training(&[1, 1]);
    say(&mut engine, at(10.0), 0, lost());
    engine
}

/// The second failure in a row.
fn pausing() -> Engine {
    let mut engine = training(&[1, 1]);
    say(&mut engine, at(10.0), 1, crashed());
    say(&mut engine, at(11.0), 1, crashed());
    engine
}

/// The coordinator of `training(slots)` died and was started again.
fn reattaching(slots: &[u32]) -> Engine {
    let placements = training(slots).lifecycle.world().unwrap().placements().to_vec();
    replay(&[opened(1, placements)])
}

fn ended() -> Engine {
    let mut engine = gathering(1);
    engine.handle(at(0.0), Event::Stop);
    engine
}

// ---- events ----

/// Attaches over a connection newer than any before.
fn attach(
    engine: &mut Engine,
    now: Time,
    number: u32,
    slots: u32,
    holding: Option<Holding>,
) -> Vec<Action> {
    let newest = engine.nodes.values().map(|node| node.attachment).max().unwrap_or_default();
    let hello = Hello { node: node(number), slots, holding };
    told(engine.handle(now, Event::Attached { attachment: newest.next(), hello }))
}

fn detach(engine: &mut Engine, now: Time, number: u32) -> Vec<Action> {
    let (node, attachment) = (node(number), attachment(engine, number));
    told(engine.handle(now, Event::Detached { node, attachment }))
}

fn attachment(engine: &Engine, number: u32) -> Attachment {
    engine.nodes[&node(number)].attachment
}

/// News of a rank of the present generation, over its node's present connection.
fn say(engine: &mut Engine, now: Time, rank: u32, news: RankNews) -> Vec<Action> {
    let generation = engine.lifecycle.generation;
    told(engine.handle(now, report(engine, generation, rank, news)))
}

fn report(engine: &Engine, generation: Generation, rank: u32, news: RankNews) -> Event {
    let status = engine.status();
    let place = status.ranks.iter().find(|place| place.rank == Rank(rank));
    let node = place.map_or(node(0), |place| place.node.clone());
    let attachment = engine.nodes[&node].attachment;
    let report = Report::Rank { generation, rank: Rank(rank), news };
    Event::Reported { node, attachment, report }
}

fn all_ready(engine: &mut Engine, now: Time, step: Option<u64>) -> Vec<Action> {
    let mut actions = Vec::new();
    for rank in 0..engine.status().ranks.len() as u32 {
        actions = say(engine, now, rank, ready(rank, step));
    }
    actions
}

fn all_started(engine: &mut Engine, now: Time) {
    for rank in 0..engine.status().ranks.len() as u32 {
        say(engine, now, rank, started());
    }
}

fn tick(engine: &mut Engine, now: Time) -> Vec<Action> {
    told(engine.handle(now, Event::Tick))
}

fn drain(engine: &mut Engine, now: Time) -> Vec<Action> {
    told(engine.handle(now, Event::Drain { reason: "a user asked".to_owned() }))
}

/// Without what is only announced, and without the meter's entries.
fn told(mut actions: Vec<Action>) -> Vec<Action> {
    let aside = |action: &Action| {
        let only_told = matches!(action, Action::Announce(_) | Action::Measured(_));
        only_told || matches!(action, Action::Persist(Record::Metered(_)))
    };
    actions.retain(|action| !aside(action));
    actions
}

// ---- news ----

fn ready(rank: u32, step: Option<u64>) -> RankNews {
    RankNews::Ready { address: address(rank), step: step.map(Step) }
}

fn address(rank: u32) -> String {
    format!("host:{rank}")
}

fn started() -> RankNews {
    RankNews::Started { source: StateSource::Fresh, progress: Progress::default() }
}

fn stepped(step: u64) -> RankNews {
    RankNews::Stepped(StepNews { step: Step(step), ..StepNews::default() })
}

fn loader(skipped: u64) -> LoaderNews {
    let last_skipped =
        (skipped > 0).then(|| "train.beton: sample 7: no JPEG at byte 4096".to_owned());
    LoaderNews { wait: 0.25, ready: 3, room: 8, skipped, last_skipped }
}

fn lost() -> RankNews {
    RankNews::Lost { detail: "connection reset".to_owned() }
}

fn crashed() -> RankNews {
    RankNews::Exited(crash("killed".to_owned()))
}

fn done(outcome: Outcome, digest: &str) -> RankNews {
    RankNews::Done { outcome, digest: digest.to_owned() }
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
        hold: Hold::default(),
    }
}

fn send(number: u32, attachment: u64, directive: Directive) -> Action {
    Action::Send { node: node(number), attachment: Attachment(attachment), directive }
}

fn holding(generation: u64, ranks: &[(u32, RankPhase)]) -> Option<Holding> {
    let ranks = ranks.iter().map(|(rank, phase)| (Rank(*rank), phase.clone())).collect();
    Some(Holding { generation: Generation(generation), ranks, commit: None })
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

/// What each recovery was for.
fn causes(engine: &Engine) -> Vec<String> {
    engine.status().recoveries.iter().map(|one| one.cause.clone()).collect()
}

fn failure_of(engine: &Engine) -> Failure {
    match engine.outcome() {
        Some(Outcome::Failed { failure }) => failure.clone(),
        other => panic!("expected a failure, got {other:?}"),
    }
}

// ---- coming together ----

#[test]
fn waits_until_enough_ranks_are_here() {
    let mut engine = gathering(3);

    assert_eq!(attach(&mut engine, at(1.0), 0, 2, None), []);

    assert_eq!(engine.status().reason, "waiting for agents: 2 of at least 3 ranks are here");
}

#[test]
fn opening_is_persisted_and_fenced_before_anybody_is_told() {
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
    assert_eq!(say(&mut engine, at(1.0), 1, ready(1, None)), []);

    let actions = say(&mut engine, at(2.0), 0, ready(0, None));

    let begin =
        Directive::Begin { generation: Generation(1), peers: [address(0), address(1)].into() };
    assert_eq!(actions, [send(0, 1, begin.clone()), send(1, 2, begin)]);
}

#[test]
fn trains_when_all_have_started() {
    let mut engine = meeting(&[1, 1]);
    say(&mut engine, at(2.0), 1, started());
    assert_eq!(engine.status().phase, PhaseName::Meeting);

    say(&mut engine, at(3.0), 0, started());

    assert_eq!(engine.status().reason, "2 ranks train");
    assert_eq!(engine.deadline(), None);
}

#[test]
fn a_spare_node_is_told_that_it_runs_nothing() {
    let mut engine = training(&[1]);
    engine.policy.max_ranks = 1;

    let actions = attach(&mut engine, at(3.0), 1, 4, None);

    assert_eq!(actions, [send(1, 2, Directive::Launch(launch(1, 1, &[])))]);
}

fn warm(engine: &mut Engine, now: Time, number: u32, local: u32) -> Vec<Action> {
    let report = Report::Warm { local_rank: LocalRank(local) };
    reports(engine, now, number, report)
}

fn reports(engine: &mut Engine, now: Time, number: u32, report: Report) -> Vec<Action> {
    let (node, attachment) = (node(number), attachment(engine, number));
    engine.handle(now, Event::Reported { node, attachment, report })
}

/// Ranks of each node in the present generation.
fn placed(engine: &Engine) -> Vec<String> {
    engine.status().ranks.into_iter().map(|rank| rank.node.0).collect()
}

#[test]
fn a_node_that_joins_is_taken_in_once_its_processes_are_ready() {
    let mut engine = training(&[1]);

    let actions = attach(&mut engine, at(3.0), 1, 2, None);
    let local_ranks = vec![LocalRank(0), LocalRank(1)];
    assert_eq!(actions[1], send(1, 2, Directive::Warm { local_ranks }));
    assert_eq!(warm(&mut engine, at(5.0), 1, 1), [], "the others train on");
    assert_eq!(placed(&engine), ["node0"]);

    let opened = warm(&mut engine, at(6.0), 1, 0);
    let Action::Announce(notice) = &opened[0] else { panic!("{opened:?}") };
    assert_eq!(notice.kind, NoticeKind::Grows);
    assert_eq!(placed(&engine), ["node0", "node1", "node1"]);
    let status = engine.status();
    assert_eq!((status.phase, status.generation), (PhaseName::Forming, Generation(2)));
    assert_eq!(status.recoveries[0].cause, "node node1 takes part with 2 ranks from here on");
}

#[test]
fn a_process_that_ends_before_it_joins_is_tried_once_more_and_then_its_node_rests() {
    let mut engine = training(&[1]);
    attach(&mut engine, at(3.0), 1, 2, None);
    warm(&mut engine, at(4.0), 1, 0);
    let failed =
        || Report::WarmFailed { local_rank: LocalRank(0), failure: crash("no memory".to_owned()) };

    let again = told(reports(&mut engine, at(5.0), 1, failed()));
    assert_eq!(again, [send(1, 2, Directive::Warm { local_ranks: vec![LocalRank(0)] })]);
    warm(&mut engine, at(6.0), 1, 1);
    assert_eq!(placed(&engine), ["node0"], "the one that was ready is not");

    let rests = reports(&mut engine, at(7.0), 1, failed());
    let Some(Action::Announce(notice)) = rests.last() else { panic!("{rests:?}") };
    assert_eq!(notice.kind, NoticeKind::NodeRests);
    assert_eq!(engine.deadline(), Some(at(67.0)));
    let local_ranks = vec![LocalRank(0), LocalRank(1)];
    assert_eq!(tick(&mut engine, at(67.0)), [send(1, 2, Directive::Warm { local_ranks })]);
}

#[test]
fn a_node_that_is_never_ready_to_join_rests() {
    let mut engine = training(&[1]);
    attach(&mut engine, at(3.0), 1, 1, None);
    assert_eq!(engine.deadline(), Some(at(23.0)), "as long as a meeting may take");
    assert_eq!(tick(&mut engine, at(23.0)), []);
    assert_eq!(engine.deadline(), Some(at(83.0)));
    assert_eq!(engine.status().phase, PhaseName::Training);
}

#[test]
fn a_node_that_joined_between_two_generations_is_taken_in_afterwards() {
    let mut engine = forming(&[1]);
    attach(&mut engine, at(0.5), 1, 1, None);
    all_ready(&mut engine, at(1.0), None);
    let actions = say(&mut engine, at(2.0), 0, started());
    assert_eq!(actions, [send(1, 2, Directive::Warm { local_ranks: vec![LocalRank(0)] })]);
    warm(&mut engine, at(3.0), 1, 0);
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

fn must_go(engine: &mut Engine, now: Time, number: u32, seconds_left: Option<f64>) -> Vec<Action> {
    reports(
        engine,
        now,
        number,
        Report::DrainRequested { reason: "spot notice".to_owned(), seconds_left },
    )
}

#[test]
fn the_others_go_on_without_a_node_that_must_go() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;

    let actions = told(must_go(&mut engine, at(10.0), 0, Some(120.0)));

    assert_eq!(placed(&engine), ["node1"]);
    assert_eq!(engine.status().drain, None);
    let released = send(0, 1, Directive::Release { reason: "spot notice".to_owned() });
    assert_eq!(actions.last(), Some(&released));
    assert!(!actions.iter().any(|action| matches!(
        action,
        Action::Send { node: to, directive: Directive::Launch(_), .. } if *to == node(0)
    )));
}

#[test]
fn a_node_that_must_go_stays_until_the_others_hold_the_state() {
    let mut engine = meeting(&[1, 1]);
    engine.policy.min_ranks = 1;
    assert_eq!(told(must_go(&mut engine, at(1.5), 0, None)), []);
    assert_eq!(placed(&engine), ["node0", "node1"], "it may be the only one that holds it");

    all_started(&mut engine, at(2.0));

    assert_eq!(placed(&engine), ["node1"]);
}

#[test]
fn a_spare_node_that_must_go_just_goes() {
    let mut engine = training(&[1]);
    engine.policy.max_ranks = 1;
    attach(&mut engine, at(3.0), 1, 1, None);

    let actions = told(must_go(&mut engine, at(10.0), 1, None));

    assert_eq!(actions, [send(1, 2, Directive::Release { reason: "spot notice".to_owned() })]);
    assert_eq!(engine.status().phase, PhaseName::Training);
}

#[test]
fn a_drain_tells_each_stage_and_heeds_an_earlier_end() {
    let mut engine = training(&[1]);
    must_go(&mut engine, at(10.0), 0, None);
    assert_eq!(engine.status().drain.unwrap().until, at(110.0));
    must_go(&mut engine, at(11.0), 0, Some(49.0));
    assert_eq!(engine.status().drain.unwrap().until, at(60.0));

    let mut stages = Vec::new();
    for (second, news) in [
        (12.0, RankNews::Stopping { step: Step(7) }),
        (12.5, RankNews::Copied { step: Step(7) }),
        (14.0, RankNews::Saved(commit(1, 7))),
    ] {
        let event = report(&engine, engine.lifecycle.generation, 0, news);
        for action in engine.handle(at(second), event) {
            if let Action::Announce(notice) = action
                && notice.kind == NoticeKind::Draining
            {
                stages.push(notice.message);
            }
        }
    }
    assert_eq!(
        stages,
        [
            "all ranks stop after step 7, 2.0 s after the wish; 48 s are left",
            "the state after step 7 is copied, 2.5 s after the wish; 47 s are left",
            "the state after step 7 is durable, 4.0 s after the wish; 46 s are left",
        ]
    );
    let drain = engine.status().drain.unwrap();
    assert_eq!((drain.stop_step, drain.durable_at), (Some(Step(7)), Some(at(14.0))));
}

#[test]
fn second_agent_of_the_same_name_displaces_the_first() {
    let mut engine = gathering(2);
    attach(&mut engine, at(1.0), 0, 1, None);

    let actions = attach(&mut engine, at(2.0), 0, 1, None);

    let reason = "another agent attached as node node0; give each its own --node-id".to_owned();
    let refuse = Action::Refuse { node: node(0), attachment: Attachment(1), reason };
    assert_eq!(actions, [refuse]);
    let late = Event::Detached { node: node(0), attachment: Attachment(1) };
    engine.handle(at(3.0), late);
    assert!(engine.status().nodes[0].attached);
}

#[test]
fn an_agent_that_missed_its_launch_is_given_it_with_all_its_time() {
    let mut engine = forming(&[1, 1]);
    detach(&mut engine, at(17.0), 1);

    let actions = attach(&mut engine, at(19.0), 1, 1, None);

    assert_eq!(actions, [send(1, 3, Directive::Launch(launch(1, 2, &[(1, 0)])))]);
    assert_eq!(engine.deadline(), Some(at(39.0)));
}

#[test]
fn a_node_that_comes_back_is_told_again_to_begin() {
    let mut engine = meeting(&[1, 1]);
    detach(&mut engine, at(2.0), 1);
    let waits = RankPhase::Ready { address: address(1), step: None };

    let actions = attach(&mut engine, at(3.0), 1, 1, holding(1, &[(1, waits)]));

    let begin =
        Directive::Begin { generation: Generation(1), peers: [address(0), address(1)].into() };
    assert_eq!(actions, [send(1, 3, begin)]);
}

// ---- ranks that keep the others waiting ----

#[test]
fn a_rank_that_does_not_get_ready_is_replaced() {
    let mut engine = forming(&[1, 1]);
    say(&mut engine, at(1.0), 0, ready(0, None));
    assert_eq!(engine.deadline(), Some(at(20.0)));

    let actions = tick(&mut engine, at(20.0));

    let replace = vec![LocalRank(0)];
    assert_eq!(
        launches(&actions),
        [launch(2, 2, &[(0, 0)]), Launch { replace, ..launch(2, 2, &[(1, 0)]) }]
    );
}

#[test]
fn a_rank_that_hangs_is_replaced_even_after_a_pause() {
    let mut engine = forming(&[1, 1]);
    tick(&mut engine, at(20.0));
    say(&mut engine, at(21.0), 0, ready(0, None));
    tick(&mut engine, at(40.0));
    assert_eq!(engine.status().phase, PhaseName::Backoff);

    let actions = tick(&mut engine, at(41.0));

    let replaced: Vec<_> = launches(&actions).into_iter().map(|launch| launch.replace).collect();
    assert_eq!(replaced, [vec![], vec![LocalRank(0)]]);
}

#[test]
fn a_rank_that_holds_state_is_not_replaced_for_a_failed_meeting() {
    let mut engine = forming(&[1, 1]);
    say(&mut engine, at(1.0), 0, ready(0, Some(7)));
    say(&mut engine, at(1.0), 1, ready(1, None));

    let actions = tick(&mut engine, at(21.0));

    let replaced: Vec<_> = launches(&actions).into_iter().map(|launch| launch.replace).collect();
    assert_eq!(replaced, [vec![], vec![LocalRank(0)]]);
}

#[test]
fn ranks_of_a_node_that_is_away_are_not_taken_for_hanging() {
    let mut engine = forming(&[1, 1]);
    say(&mut engine, at(1.0), 0, ready(0, None));
    detach(&mut engine, at(18.0), 1);

    assert_eq!(tick(&mut engine, at(20.0)), []);

    assert_eq!(engine.deadline(), Some(at(23.0)));
}

// ---- losing ranks ----

#[test]
fn rank_death_opens_a_new_generation_at_once_and_keeps_the_survivors() {
    let mut engine = training(&[1, 1]);

    let actions = say(&mut engine, at(10.0), 1, crashed());

    assert!(opens(&actions, 2));
    assert_eq!(launches(&actions), [launch(2, 2, &[(0, 0)]), launch(2, 2, &[(1, 0)])]);
    assert_eq!(engine.status().recoveries[0].cause, "rank 1: killed");
}

#[test]
fn lost_touch_waits_for_the_word_of_a_death() {
    let mut engine = training(&[1, 1]);

    assert_eq!(say(&mut engine, at(10.0), 0, lost()), []);

    assert_eq!(
        engine.status().reason,
        "rank 0 lost touch with the others: connection reset; waiting to hear who died"
    );
    let actions = say(&mut engine, at(10.1), 1, crashed());
    assert!(opens(&actions, 2));
    assert_eq!(causes(&engine), ["rank 1: killed"]);
}

#[test]
fn lost_touch_without_a_word_opens_a_new_generation_soon() {
    let mut engine = settling();
    assert_eq!(engine.deadline(), Some(at(10.5)));

    assert!(opens(&tick(&mut engine, at(10.5)), 2));
}

#[test]
fn once_all_have_lost_touch_there_is_nothing_to_wait_for() {
    let mut engine = settling();

    assert!(opens(&say(&mut engine, at(10.1), 1, lost()), 2));
}

#[test]
fn a_death_waits_for_a_node_that_is_away_as_it_may_hold_the_furthest_state() {
    let mut engine = training(&[1, 1]);
    detach(&mut engine, at(9.0), 1);

    assert_eq!(say(&mut engine, at(10.0), 0, crashed()), []);

    assert_eq!(engine.status().reason, "rank 0: killed; waiting for node node1, which is away");
    assert_eq!(engine.deadline(), Some(at(14.0)));
    let back = attach(&mut engine, at(11.0), 1, 1, holding(1, &[(1, RankPhase::Waiting)]));
    assert_eq!(launches(&back), [launch(2, 2, &[(0, 0)]), launch(2, 2, &[(1, 0)])]);
}

#[test]
fn bad_input_ends_the_job() {
    let mut engine = training(&[1, 1]);
    let failure = Failure { class: Class::BadInput, message: "no such file".to_owned() };

    let actions = say(&mut engine, at(10.0), 1, RankNews::Exited(failure.clone()));

    let outcome = Outcome::Failed {
        failure: Failure { message: "rank 1: no such file".to_owned(), ..failure },
    };
    assert_eq!(
        actions,
        [
            Action::Persist(Record::Ended(outcome.clone())),
            send(0, 1, Directive::Dismiss { outcome: outcome.clone() }),
            send(1, 2, Directive::Dismiss { outcome }),
        ]
    );
}

#[test]
fn pauses_grow_until_the_restart_limit_ends_the_job() {
    let mut engine = training(&[1]);
    let mut pauses = Vec::new();
    let mut now = at(10.0);
    while engine.outcome().is_none() {
        say(&mut engine, now, 0, crashed());
        let deadline = engine.deadline().filter(|_| engine.status().phase == PhaseName::Backoff);
        if let Some(until) = deadline {
            pauses.push(until.since(now).as_secs_f64());
            now = until;
            tick(&mut engine, now);
        }
    }

    // A quarter more or less, so that jobs that failed together do not try again together.
    let [first, second] = pauses[..] else { panic!("{pauses:?}") };
    assert!((0.75..=1.25).contains(&first) && (1.5..=2.5).contains(&second), "{pauses:?}");
    let message = "4 generations ended without a new step, the last because rank 0: killed";
    assert_eq!(failure_of(&engine), crash(message.to_owned()));
}

#[test]
fn a_node_that_fails_again_and_again_is_left_out_for_a_while() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;
    say(&mut engine, at(10.0), 1, crashed());
    assert_eq!(placed(&engine), ["node0", "node1"], "once may happen to anybody");
    all_ready(&mut engine, at(11.0), None);
    all_started(&mut engine, at(12.0));
    say(&mut engine, at(13.0), 1, crashed());
    let until = engine.deadline().unwrap();
    tick(&mut engine, until);
    assert_eq!(placed(&engine), ["node0"]);

    all_ready(&mut engine, at(16.0), Some(0));
    all_started(&mut engine, at(17.0));
    assert_eq!(engine.deadline(), Some(at(73.0)));
    let actions = tick(&mut engine, at(73.0));
    assert_eq!(actions, [send(1, 2, Directive::Warm { local_ranks: vec![LocalRank(0)] })]);
}

#[test]
fn those_who_are_left_out_come_back_if_the_others_hold_no_state() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;
    for (failed, ready) in [(10.0, 11.0), (13.0, 16.0)] {
        say(&mut engine, at(failed), 1, crashed());
        if let Some(until) = engine.deadline().filter(|_| placed(&engine).is_empty()) {
            tick(&mut engine, until);
        }
        all_ready(&mut engine, at(ready), None);
        all_started(&mut engine, at(ready + 0.5));
    }
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

#[test]
fn a_node_that_fails_is_kept_if_the_others_are_too_few() {
    let mut engine = training(&[1, 1]);
    say(&mut engine, at(10.0), 1, crashed());
    all_ready(&mut engine, at(11.0), None);
    all_started(&mut engine, at(12.0));
    say(&mut engine, at(13.0), 1, crashed());
    let until = engine.deadline().unwrap();
    tick(&mut engine, until);
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

#[test]
fn a_new_step_forgives_earlier_failures() {
    let mut engine = training(&[1]);
    say(&mut engine, at(10.0), 0, crashed());
    all_ready(&mut engine, at(11.0), None);
    all_started(&mut engine, at(12.0));
    say(&mut engine, at(13.0), 0, stepped(1));

    assert!(opens(&say(&mut engine, at(14.0), 0, crashed()), 3));
}

// ---- losing nodes ----

#[test]
fn a_node_that_stays_away_is_given_up_after_its_grace() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;
    assert_eq!(detach(&mut engine, at(10.0), 1), []);
    assert_eq!(engine.deadline(), Some(at(15.0)));

    let actions = tick(&mut engine, at(15.0));

    assert_eq!(launches(&actions), [launch(2, 1, &[(0, 0)])]);
    assert_eq!(engine.status().recoveries[0].cause, "node node1 was away for 5 s");
}

#[test]
fn a_node_back_within_its_grace_with_its_ranks_changes_nothing() {
    let mut engine = training(&[1, 1]);
    detach(&mut engine, at(10.0), 1);

    let actions = attach(&mut engine, at(14.0), 1, 1, holding(1, &[(1, RankPhase::Training)]));

    assert_eq!(actions, []);
    assert_eq!((engine.status().phase, engine.deadline()), (PhaseName::Training, None));
}

#[test]
fn a_node_back_without_one_of_its_ranks_means_that_it_died() {
    let mut engine = training(&[1, 2]);
    detach(&mut engine, at(10.0), 1);

    let actions = attach(&mut engine, at(11.0), 1, 2, holding(1, &[(1, RankPhase::Training)]));

    assert!(opens(&actions, 2));
    let cause = "rank 2: rank 2 ended while node node1 was out of touch";
    assert_eq!(engine.status().recoveries[0].cause, cause);
}

#[test]
fn an_agent_that_restarted_without_its_ranks_means_a_new_generation() {
    let mut engine = training(&[1, 1]);

    let actions = attach(&mut engine, at(10.0), 1, 1, None);

    assert!(opens(&actions, 2));
    let cause = "the agent of node node1 restarted without its ranks";
    assert_eq!(engine.status().recoveries[0].cause, cause);
}

#[test]
fn ranks_that_are_done_need_their_node_no_more() {
    let mut engine = training(&[1, 1]);
    say(&mut engine, at(10.0), 1, done(Outcome::Completed, "d"));
    detach(&mut engine, at(10.0), 1);
    tick(&mut engine, at(15.0));

    say(&mut engine, at(16.0), 0, done(Outcome::Completed, "d"));

    assert_eq!(engine.outcome(), Some(&Outcome::Completed));
}

// ---- stale messages ----

/// Feeds a message that must change nothing but the count of such messages.
fn refused(mut engine: Engine, event: Event) {
    let (before, deadline) = (engine.status(), engine.deadline());

    assert_eq!(engine.handle(at(10.0), event), []);

    let stale_messages = before.stale_messages + 1;
    assert_eq!(engine.status(), Status { stale_messages, ..before });
    assert_eq!(engine.deadline(), deadline);
}

#[test]
fn news_of_an_older_generation_are_refused_and_counted() {
    let mut engine = training(&[1, 1]);
    say(&mut engine, at(5.0), 1, crashed());
    let event = report(&engine, Generation(1), 0, crashed());
    refused(engine, event);
}

#[test]
fn news_over_an_older_connection_are_refused_and_counted() {
    let mut engine = training(&[1]);
    let event = report(&engine, Generation(1), 0, crashed());
    attach(&mut engine, at(5.0), 0, 1, holding(1, &[(0, RankPhase::Training)]));
    refused(engine, event);
}

#[test]
fn news_of_a_rank_that_another_node_runs_are_refused_and_counted() {
    let engine = training(&[1, 1]);
    let report = Report::Rank { generation: Generation(1), rank: Rank(1), news: crashed() };
    let event = Event::Reported { node: node(0), attachment: Attachment(1), report };
    refused(engine, event);
}

// ---- checkpoints ----

#[test]
fn a_checkpoint_is_asked_for_only_while_ranks_train() {
    let checkpoint = Directive::Checkpoint { generation: Generation(1) };
    let actions = training(&[1]).handle(at(10.0), Event::Checkpoint);
    assert_eq!(actions, [send(0, 1, checkpoint)]);

    let mut early = meeting(&[1]);
    let reason = "nothing trains: 1 ranks meet and take their state";
    assert_eq!(early.can_checkpoint(), Err(reason.to_owned()));
    assert_eq!(early.handle(at(10.0), Event::Checkpoint), []);
}

#[test]
fn a_commit_is_persisted() {
    let mut engine = training(&[1]);

    let actions = say(&mut engine, at(10.0), 0, RankNews::Saved(commit(1, 50)));

    assert_eq!(actions, [Action::Persist(Record::Saved(commit(1, 50)))]);
}

#[test]
fn a_commit_told_in_a_hello_is_persisted_unless_a_newer_one_is_known() {
    let told_in_hello = |engine: &mut Engine, step| {
        let holding = Holding { commit: Some(commit(1, step)), ..holding(1, &[]).unwrap() };
        let ranks = vec![(Rank(0), RankPhase::Training)];
        detach(engine, at(10.0), 0);
        attach(engine, at(10.0), 0, 1, Some(Holding { ranks, ..holding }))
    };
    let mut engine = training(&[1]);

    assert_eq!(told_in_hello(&mut engine, 50), [Action::Persist(Record::Saved(commit(1, 50)))]);

    assert_eq!(told_in_hello(&mut engine, 40), []);
    assert_eq!(engine.status().commit, Some(commit(1, 50)));
}

// ---- loaders ----

/// What is announced when a rank has skipped so many samples.
fn skips(engine: &mut Engine, rank: u32, skipped: u64) -> Vec<String> {
    let generation = engine.lifecycle.generation;
    let event = report(engine, generation, rank, RankNews::Loader(loader(skipped)));
    let announced = |action| match action {
        Action::Announce(notice) if notice.kind == NoticeKind::SamplesSkipped => notice.message,
        other => panic!("{other:?}"),
    };
    engine.handle(at(10.0), event).into_iter().map(announced).collect()
}

fn loaders(engine: &Engine) -> Vec<Option<LoaderNews>> {
    engine.status().ranks.into_iter().map(|rank| rank.loader).collect()
}

#[test]
fn the_newest_word_on_each_rank_s_loader_is_kept() {
    let mut engine = training(&[1, 1]);
    assert_eq!(say(&mut engine, at(10.0), 1, RankNews::Loader(LoaderNews::default())), []);
    assert_eq!(say(&mut engine, at(11.0), 1, RankNews::Loader(loader(0))), []);

    assert_eq!(loaders(&engine), [None, Some(loader(0))]);
    assert_eq!(engine.status().skipped_samples, 0);
}

#[test]
fn a_rank_that_is_gone_loses_its_loader_and_late_words_on_it_change_nothing() {
    let mut engine = training(&[1, 1]);
    detach(&mut engine, at(9.0), 1);
    skips(&mut engine, 0, 2);
    // Node 1, which is away, keeps the generation open.
    say(&mut engine, at(10.0), 0, crashed());
    assert_eq!(loaders(&engine), [None, None]);

    assert_eq!(skips(&mut engine, 0, 3), [""; 0]);

    assert_eq!(loaders(&engine), [None, None]);
    assert_eq!(engine.status().skipped_samples, 2);
}

#[test]
fn a_new_generation_knows_nothing_of_loaders_until_they_tell() {
    let mut engine = training(&[1, 1]);
    skips(&mut engine, 0, 2);

    say(&mut engine, at(10.0), 1, crashed());

    assert_eq!(loaders(&engine), [None, None]);
}

#[test]
fn skipped_samples_are_announced_at_the_first_and_at_each_tenfold() {
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
fn a_survivor_s_skipped_samples_are_neither_announced_nor_counted_again_under_its_new_rank() {
    let mut engine = training(&[1, 1]);
    skips(&mut engine, 1, 5);
    detach(&mut engine, at(9.0), 0);
    tick(&mut engine, at(14.0));
    attach(&mut engine, at(15.0), 2, 1, holding(1, &[]));
    assert_eq!(engine.status().ranks[0].node, node(1), "node 1 runs rank 0 now");

    assert_eq!(skips(&mut engine, 0, 6), [""; 0]);

    assert_eq!(engine.status().skipped_samples, 6);
}

#[test]
fn the_successor_of_a_dead_rank_skips_samples_of_its_own() {
    let mut engine = training(&[1]);
    skips(&mut engine, 0, 5);
    say(&mut engine, at(10.0), 0, crashed());

    assert_eq!(skips(&mut engine, 0, 7).len(), 1, "announced anew");

    assert_eq!(engine.status().skipped_samples, 12);
}

#[test]
fn a_smaller_count_is_another_process_s() {
    let mut engine = training(&[1]);
    skips(&mut engine, 0, 5);

    assert_eq!(skips(&mut engine, 0, 2).len(), 1, "announced anew");

    assert_eq!(engine.status().skipped_samples, 7);
}

// ---- the end ----

#[test]
fn all_done_ends_the_job() {
    let mut engine = training(&[1, 1]);
    assert_eq!(say(&mut engine, at(10.0), 0, done(Outcome::Completed, "d")), []);

    let actions = say(&mut engine, at(10.0), 1, done(Outcome::Completed, "d"));

    assert_eq!(actions[0], Action::Persist(Record::Ended(Outcome::Completed)));
    let dismiss = Directive::Dismiss { outcome: Outcome::Completed };
    assert_eq!(actions[1..], [send(0, 1, dismiss.clone()), send(1, 2, dismiss)]);
}

#[test]
fn ranks_that_disagree_on_the_final_digest_fail_the_job() {
    let mut engine = training(&[1, 1]);
    say(&mut engine, at(10.0), 0, done(Outcome::Completed, "one"));

    say(&mut engine, at(10.0), 1, done(Outcome::Completed, "another"));

    assert!(failure_of(&engine).message.starts_with("ranks ended with different states"));
}

#[test]
fn ranks_may_have_been_drained_for_different_reasons() {
    let mut engine = training(&[1, 1]);
    let because = |reason: &str| Outcome::Drained { reason: reason.to_owned() };
    say(&mut engine, at(10.0), 0, done(because("spot notice"), "d"));

    say(&mut engine, at(10.0), 1, done(because("node node0: spot notice"), "d"));

    assert_eq!(engine.outcome(), Some(&because("spot notice")));
}

#[test]
fn an_agent_that_comes_after_the_end_is_dismissed() {
    let mut engine = ended();

    let actions = attach(&mut engine, at(10.0), 0, 1, None);

    assert_eq!(actions, [send(0, 1, Directive::Dismiss { outcome: Outcome::Stopped })]);
}

// ---- drains, in every phase ----

#[test]
fn draining_while_gathering_ends_the_job() {
    let mut engine = gathering(1);
    let actions = drain(&mut engine, at(10.0));
    assert_eq!(actions, [Action::Persist(Record::Ended(drained()))]);
}

#[test]
fn draining_while_training_is_told_to_all_and_ends_when_all_are_done() {
    let mut engine = training(&[1, 1]);

    let actions = drain(&mut engine, at(10.0));

    let told = Directive::Drain { generation: Generation(1), reason: "a user asked".to_owned() };
    assert_eq!(actions, [send(0, 1, told.clone()), send(1, 2, told)]);
    assert_eq!(engine.status().reason, "draining: a user asked; 100 s to save and stop");
    say(&mut engine, at(11.0), 0, done(drained(), "d"));
    say(&mut engine, at(11.0), 1, done(drained(), "d"));
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
    say(&mut engine, at(10.0), 1, crashed());
    assert_eq!(drain(&mut engine, at(10.1)), []);

    say(&mut engine, at(11.0), 0, ready(0, Some(70)));
    say(&mut engine, at(11.0), 1, ready(1, None));
    all_started(&mut engine, at(12.0));

    assert_eq!(engine.status().phase, PhaseName::Draining);
}

#[test]
fn draining_while_ranks_meet_is_told_once_they_train() {
    let mut engine = meeting(&[1]);
    assert_eq!(drain(&mut engine, at(1.5)), []);

    let actions = say(&mut engine, at(2.0), 0, started());

    let told = Directive::Drain { generation: Generation(1), reason: "a user asked".to_owned() };
    assert_eq!(actions, [send(0, 1, told)]);
}

#[test]
fn draining_in_a_pause_opens_the_next_generation_at_once() {
    assert!(opens(&drain(&mut pausing(), at(11.1)), 3));
}

#[test]
fn draining_while_settling_goes_on_with_the_next_generation() {
    let mut engine = settling();
    assert_eq!(drain(&mut engine, at(10.1)), []);
    assert!(opens(&tick(&mut engine, at(10.5)), 2));
    assert!(engine.status().drain.is_some());
}

#[test]
fn draining_while_reattaching_is_told_once_all_are_there() {
    let mut engine = reattaching(&[1]);
    assert_eq!(drain(&mut engine, at(0.1)), []);

    let actions = attach(&mut engine, at(0.2), 0, 1, holding(1, &[(0, RankPhase::Training)]));

    let told = Directive::Drain { generation: Generation(1), reason: "a user asked".to_owned() };
    assert_eq!(actions, [send(0, 1, told)]);
}

#[test]
fn draining_after_the_end_changes_nothing() {
    let mut engine = ended();
    assert_eq!(drain(&mut engine, at(10.0)), []);
    assert_eq!(engine.outcome(), Some(&Outcome::Stopped));
}

#[test]
fn a_node_that_was_away_when_the_drain_was_told_is_told_on_its_return() {
    let mut engine = training(&[1]);
    detach(&mut engine, at(10.0), 0);
    assert_eq!(drain(&mut engine, at(10.1)), []);

    let actions = attach(&mut engine, at(11.0), 0, 1, holding(1, &[(0, RankPhase::Training)]));

    let told = Directive::Drain { generation: Generation(1), reason: "a user asked".to_owned() };
    assert_eq!(actions, [send(0, 2, told)]);
}

#[test]
fn a_drain_that_takes_too_long_ends_the_job() {
    let mut engine = training(&[1]);
    drain(&mut engine, at(10.0));
    assert_eq!(engine.deadline(), Some(at(110.0)));

    tick(&mut engine, at(110.0));

    let reason = "a user asked; ranks did not stop in time, the last checkpoint counts".to_owned();
    assert_eq!(engine.outcome(), Some(&Outcome::Drained { reason }));
}

#[test]
fn a_node_that_must_go_drains_the_job() {
    let mut engine = training(&[1]);
    let report = Report::DrainRequested { reason: "spot notice".to_owned(), seconds_left: None };

    engine.handle(at(10.0), Event::Reported { node: node(0), attachment: Attachment(1), report });

    let reason = "draining: node node0: spot notice; 100 s to save and stop";
    assert_eq!(engine.status().reason, reason);
}

// ---- after a restart of the coordinator ----

#[test]
fn training_that_went_on_without_the_coordinator_goes_on() {
    let mut engine = reattaching(&[1, 1]);
    assert_eq!(engine.deadline(), Some(at(5.0)));

    for number in [0, 1] {
        let held = holding(1, &[(number, RankPhase::Training)]);
        assert_eq!(attach(&mut engine, at(1.0), number, 1, held), []);
    }

    let status = engine.status();
    assert_eq!((status.phase, status.generation), (PhaseName::Training, Generation(1)));
    assert_eq!(status.reason, "2 ranks train; they went on while the coordinator was away");
}

#[test]
fn a_rank_that_died_without_the_coordinator_means_a_new_generation_once_all_are_heard() {
    let mut engine = reattaching(&[1, 1]);
    assert_eq!(attach(&mut engine, at(1.0), 0, 1, holding(1, &[])), []);

    let held = holding(1, &[(1, RankPhase::Training)]);
    let actions = attach(&mut engine, at(2.0), 1, 1, held);

    assert_eq!(launches(&actions), [launch(2, 2, &[(0, 0)]), launch(2, 2, &[(1, 0)])]);
}

#[test]
fn nodes_that_do_not_come_back_to_the_new_coordinator_are_given_up() {
    let mut engine = reattaching(&[1, 1]);
    attach(&mut engine, at(1.0), 0, 1, holding(1, &[(0, RankPhase::Training)]));

    let actions = tick(&mut engine, at(5.0));

    assert_eq!(launches(&actions), [launch(2, 1, &[(0, 0)])]);
}

#[test]
fn a_node_that_left_again_is_waited_for_even_after_a_restart() {
    let mut engine = reattaching(&[1, 1, 1]);
    for number in [0, 1] {
        let held = holding(1, &[(number, RankPhase::Waiting)]);
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

    let actions = attach(&mut engine, at(1.0), 0, 1, holding(1, &[(0, RankPhase::Waiting)]));

    assert_eq!(launches(&actions), [launch(3, 1, &[(0, 0)])]);
}

#[test]
fn ranks_that_finished_without_the_coordinator_end_the_job() {
    let mut engine = reattaching(&[1]);
    let phase = RankPhase::Done { outcome: Outcome::Completed, digest: "d".to_owned() };

    attach(&mut engine, at(1.0), 0, 1, holding(1, &[(0, phase)]));

    assert_eq!(engine.outcome(), Some(&Outcome::Completed));
}

#[test]
fn a_completed_job_stays_ended() {
    let engine = replay(&[opened(1, vec![placement(0, 0, 0)]), Record::Ended(Outcome::Completed)]);
    assert_eq!(engine.outcome(), Some(&Outcome::Completed));
}

#[test]
fn a_drained_job_is_taken_up_again() {
    let saved = Record::Saved(commit(1, 50));
    let records = [opened(1, vec![placement(0, 0, 0)]), saved, Record::Ended(drained())];
    let mut engine = replay(&records);

    let actions = attach(&mut engine, at(1.0), 0, 1, None);

    assert_eq!(launches(&actions), [launch(2, 1, &[(0, 0)])]);
    assert_eq!(engine.status().commit, Some(commit(1, 50)));
}

#[test]
fn a_journal_without_a_job_gives_no_machine() {
    assert!(Engine::replay(&spec(1), &[], at(0.0)).is_none());
}

// ---- reasons ----

#[test]
fn every_phase_tells_its_reason() {
    let mut draining = training(&[1]);
    drain(&mut draining, at(10.0));
    let engines = [
        gathering(1),
        pausing(),
        forming(&[1]),
        meeting(&[1]),
        training(&[1]),
        settling(),
        reattaching(&[1]),
        draining,
        ended(),
    ];

    let told: Vec<String> = engines
        .iter()
        .map(|engine| format!("{:?}: {}", engine.status().phase, engine.status().reason))
        .collect();

    assert_eq!(
        told,
        [
            "Gathering: waiting for agents",
            "Backoff: pausing before restart 2 of 3: rank 1: killed",
            "Forming: waiting for 1 ranks to start",
            "Meeting: 1 ranks meet and take their state",
            "Training: 1 ranks train",
            "Settling: rank 0 lost touch with the others: connection reset; waiting to hear who died",
            "Reattaching: the coordinator restarted and waits for its agents",
            "Draining: draining: a user asked; 100 s to save and stop",
            "Ended: stopped on request without a checkpoint",
        ]
    );
}

#[test]
fn a_rank_that_holds_the_others_up_is_named_once_and_shown() {
    let mut engine = training(&[2]);
    let pulse = |own_step_seconds| {
        RankNews::Pulse(Pulse { own_step_seconds, step: Step(3), ..Pulse::default() })
    };
    let mut told = Vec::new();
    for second in 10..40u32 {
        let now = at(f64::from(second));
        for (rank, seconds) in [(0, 0.2), (1, 0.5)] {
            let event = report(&engine, engine.lifecycle.generation, rank, pulse(seconds));
            told.extend(engine.handle(now, event));
        }
    }
    let [Action::Announce(notice)] = &told[..] else { panic!("{told:?}") };
    assert_eq!(notice.kind, NoticeKind::Straggler);
    assert!(
        notice.message.contains("rank 1") && notice.message.contains("2.5 times"),
        "{notice:?}"
    );
    let status = engine.status();
    assert_eq!((status.ranks[0].slowness, status.ranks[1].slowness), (Some(1.0), Some(2.5)));
    assert_eq!(status.ranks[1].heard_at, Some(at(39.0)));
}

#[test]
fn a_save_that_failed_is_shown_until_one_succeeds() {
    let mut engine = training(&[1]);
    let problem = SaveProblem::from("the disk is full".to_owned());
    say(&mut engine, at(10.0), 0, RankNews::SaveFailed(problem));
    assert_eq!(engine.status().save_problem.as_deref(), Some("the disk is full"));
    assert_eq!(engine.status().phase, PhaseName::Training);

    say(&mut engine, at(20.0), 0, RankNews::Saved(commit(1, 7)));
    assert_eq!(engine.status().save_problem, None);
}

#[test]
fn a_job_whose_store_another_coordinator_holds_ends_for_good() {
    let refused = |fence| {
        let message = "a newer generation has it".to_owned();
        RankNews::SaveFailed(SaveProblem { message, fence: Some(Generation(fence)) })
    };
    let mut engine = training(&[1]);
    // The fence of its own generation, and an older one's word.
    say(&mut engine, at(10.0), 0, refused(1));
    assert_eq!(engine.status().phase, PhaseName::Training);

    let actions = say(&mut engine, at(11.0), 0, refused(2));

    let Some(outcome @ Outcome::Failed { failure }) = engine.outcome() else { panic!() };
    assert_eq!((failure.class, outcome.exit_code()), (Class::TakenOver, exit::BAD_INPUT));
    assert!(actions.contains(&send(0, 1, Directive::Dismiss { outcome: outcome.clone() })));
    let origin = Record::Created(engine.origin().clone());
    let records = [origin, Record::Ended(outcome.clone())];
    let restarted = Engine::replay(&spec(1), &records, at(0.0)).unwrap();
    assert_eq!(restarted.outcome(), Some(outcome), "it must not take the store back");
}

#[test]
fn a_generation_that_another_coordinator_has_opened_ends_the_job() {
    let mut engine = forming(&[1]);

    engine.handle(at(1.0), Event::TakenOver { message: "generation 9 has it".to_owned() });

    let Some(Outcome::Failed { failure }) = engine.outcome() else { panic!() };
    assert_eq!(
        (failure.class, failure.message.as_str()),
        (Class::TakenOver, "generation 9 has it")
    );
}

#[test]
fn a_warning_about_a_gpu_is_told_with_its_node() {
    let mut engine = training(&[1, 1]);
    let message = "GPU 3 has fallen off the bus (Xid 79)".to_owned();

    let actions = reports(&mut engine, at(9.0), 1, Report::GpuWarning { message });

    let [Action::Announce(notice)] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(notice.kind, NoticeKind::GpuWarning);
    assert_eq!(notice.message, "node node1: GPU 3 has fallen off the bus (Xid 79)");
}
