//! One state, one event, its actions. Whole histories are in `tests/simulation`.

use super::*;
use crate::{
    exit::{Class, Failure},
    gpu::xid::Xid,
    ids::{Incarnation, Rank},
    message::{
        Activity, Beat, Directive, Hello, Holding, Launch, LoaderNews, Pulse, RankCommand,
        RankNews, RankPhase, RankSays, Restore, StateSource,
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

// ---- states, each made from the one before ----

/// An agent with `slots` places that has just said hello.
fn attached(slots: u32) -> Session {
    let mut session = Session::new(NodeId("node0".to_owned()), slots, Policy::default());
    assert_eq!(session.handle(at(0.0), Event::Tick), [Action::Connect]);
    assert_eq!(session.handle(at(0.0), Event::Connected), [hello(slots, None)]);
    session
}

/// Every place runs a rank of generation 1.
fn joining(slots: u32) -> Session {
    let mut session = attached(slots);
    session.handle(at(1.0), launched(1, slots));
    session
}

fn training(slots: u32) -> Session {
    let mut session = joining(slots);
    for local in 0..slots {
        say(&mut session, at(2.0), local, ready(local, None));
        say(&mut session, at(3.0), local, started());
    }
    session
}

/// Training goes on, but the coordinator is away.
fn alone(slots: u32) -> Session {
    let mut session = training(slots);
    session.handle(at(10.0), Event::Disconnected);
    session
}

// ---- events ----

/// A launch of as many ranks as places, on each place the rank of its number.
fn launch(generation: u64, ranks: u32) -> Launch {
    Launch {
        generation: Generation(generation),
        world_size: 4,
        ranks: (0..ranks).map(|local| (Rank(local), LocalRank(local))).collect(),
        replace: Vec::new(),
        restore: Restore::default(),
        hold: Hold::default(),
    }
}

fn launched(generation: u64, ranks: u32) -> Event {
    Event::Directed(Directive::Launch(launch(generation, ranks)))
}

fn begin(generation: u64) -> Event {
    let peers = vec!["host:0".to_owned()];
    Event::Directed(Directive::Begin { generation: Generation(generation), peers: peers.into() })
}

fn must_go() -> Event {
    Event::MustGo { reason: "spot notice".to_owned() }
}

fn dismissed() -> Event {
    Event::Directed(Directive::Dismiss { outcome: Outcome::Completed })
}

/// What the present process of a place says of the present generation.
fn say(session: &mut Session, now: Time, local: u32, news: RankNews) -> Vec<Action> {
    let generation = session.generation;
    let incarnation = session.slots[local as usize].incarnation;
    session.handle(now, said(local, incarnation, generation, news))
}

fn said(local: u32, incarnation: Incarnation, generation: Generation, news: RankNews) -> Event {
    Event::RankSaid {
        local_rank: LocalRank(local),
        incarnation,
        says: RankSays { generation, news },
    }
}

/// The present process of a place ends.
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

// ---- news ----

fn ready(local: u32, step: Option<u64>) -> RankNews {
    RankNews::Ready { address: format!("host:{local}"), step: step.map(Step) }
}

fn started() -> RankNews {
    RankNews::Started { source: StateSource::Fresh, progress: Progress::default() }
}

fn lost() -> RankNews {
    RankNews::Lost { detail: "connection reset".to_owned() }
}

fn done(outcome: Outcome) -> RankNews {
    RankNews::Done { outcome, digest: "d".to_owned() }
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
    }
}

// ---- pauses and signs of life ----

fn hold(number: u64, paused: bool) -> Event {
    Event::Directed(Directive::Hold(Hold { number, paused }))
}

fn told_to_hold(local: u32, paused: bool) -> Action {
    tell(local, RankCommand::Hold { generation: Generation(1), paused })
}

#[test]
fn ranks_are_told_once_to_stand_still_and_once_to_go_on_whatever_comes_late() {
    let mut session = training(2);
    let told = [told_to_hold(0, true), told_to_hold(1, true)];
    assert_eq!(session.handle(at(5.0), hold(1, true)), told);
    assert_eq!(session.handle(at(6.0), hold(1, true)), []);
    let told = [told_to_hold(0, false), told_to_hold(1, false)];
    assert_eq!(session.handle(at(7.0), hold(2, false)), told);
    assert_eq!(session.handle(at(8.0), hold(1, true)), [], "of a connection that is no more");
    assert_eq!(session.stale_messages(), 2);
}

#[test]
fn a_rank_that_joins_knows_whether_the_job_is_paused() {
    let mut session = attached(1);
    let paused = |actions: &[Action]| {
        let command = actions.iter().find_map(|action| match action {
            Action::Tell { command: RankCommand::Join { paused, .. }, .. } => Some(*paused),
            _ => None,
        });
        command.unwrap()
    };
    let launch = Launch { hold: Hold { number: 1, paused: true }, ..launch(1, 1) };
    assert!(paused(&session.handle(at(1.0), Event::Directed(Directive::Launch(launch)))));
    session.handle(at(2.0), hold(2, false));
    assert!(!paused(&session.handle(at(3.0), launched(2, 1))));
}

#[test]
fn a_beat_tells_how_long_the_answer_to_the_last_one_took() {
    let mut session = attached(1);
    let beat = |number, round_trip: Option<u64>| {
        let round_trip = round_trip.map(Duration::from_millis);
        [Action::Send(Report::Beat(Beat { number, round_trip, vitals: None }))]
    };
    let heard = |number| Event::Directed(Directive::Heard { number });
    assert_eq!(session.handle(at(1.0), Event::Vitals(None)), beat(1, None));
    assert_eq!(session.handle(at(1.02), heard(1)), []);
    assert_eq!(session.handle(at(2.0), Event::Vitals(None)), beat(2, Some(20)));
    // Late, and of an earlier beat.
    assert_eq!(session.handle(at(2.5), heard(1)), []);
    assert_eq!(session.handle(at(3.0), Event::Vitals(None)), beat(3, Some(20)));
    session.handle(at(3.1), Event::Disconnected);
    assert_eq!(session.handle(at(3.15), Event::Vitals(None)), []);
}

// ---- actions ----

fn hello(slots: u32, holding: Option<Holding>) -> Action {
    Action::Send(Report::Hello(Hello { node: NodeId("node0".to_owned()), slots, holding }))
}

fn holding(ranks: &[(u32, RankPhase)]) -> Option<Holding> {
    let ranks = ranks.iter().map(|(rank, phase)| (Rank(*rank), phase.clone())).collect();
    Some(Holding { generation: Generation(1), ranks, commit: None })
}

fn report(rank: u32, news: RankNews) -> Action {
    Action::Send(Report::Rank { generation: Generation(1), rank: Rank(rank), news })
}

fn spawn(local: u32, incarnation: u64) -> Action {
    Action::Spawn { local_rank: LocalRank(local), incarnation: Incarnation(incarnation) }
}

fn tell(local: u32, command: RankCommand) -> Action {
    Action::Tell { local_rank: LocalRank(local), command }
}

fn join(generation: u64, local: u32) -> Action {
    let command = RankCommand::Join {
        generation: Generation(generation),
        rank: Rank(local),
        world_size: 4,
        restore: Restore::default(),
        paused: false,
    };
    tell(local, command)
}

fn drain(local: u32) -> Action {
    let reason = "spot notice".to_owned();
    tell(local, RankCommand::Drain { generation: Generation(1), reason })
}

fn drain_requested() -> Action {
    Action::Send(Report::DrainRequested { reason: "spot notice".to_owned(), seconds_left: None })
}

// ---- launching ----

#[test]
fn a_launch_starts_a_process_for_each_of_its_ranks() {
    let actions = attached(3).handle(at(1.0), launched(1, 2));

    assert_eq!(actions, [spawn(0, 1), join(1, 0), spawn(1, 1), join(1, 1)]);
}

#[test]
fn survivors_are_told_to_join_and_only_the_dead_are_started_again() {
    let mut session = training(2);
    let failed = report(1, RankNews::Exited(killed()));
    assert_eq!(exit(&mut session, at(10.0), 1), [failed]);

    let actions = session.handle(at(10.1), launched(2, 2));

    assert_eq!(actions, [join(2, 0), spawn(1, 2), join(2, 1)]);
}

#[test]
fn a_spare_is_kept_from_when_all_train_if_the_recipe_wishes_one() {
    let mut session = joining(2);
    session.adopt(Policy { warm_spare: true, ..Policy::default() });
    assert_eq!(say(&mut session, at(2.0), 0, started()), [report(0, started())]);
    assert_eq!(say(&mut session, at(2.0), 1, started()), [report(1, started()), Action::KeepSpare]);
    // It has taken the place of one that died; another one is wanted.
    exit(&mut session, at(3.0), 1);
    session.handle(at(3.1), launched(2, 2));
    let said = |local, news| said(local, Incarnation(1 + u64::from(local)), Generation(2), news);
    session.handle(at(4.0), said(0, started()));
    let actions = session.handle(at(4.0), said(1, started()));
    assert_eq!(actions.last(), Some(&Action::KeepSpare));
    session.handle(at(5.0), dismissed());
    assert!(!session.handle(at(5.0), said(0, started())).contains(&Action::KeepSpare));

    let mut session = joining(1);
    assert_eq!(say(&mut session, at(2.0), 0, started()), [report(0, started())]);
}

#[test]
fn a_process_that_hangs_is_killed_and_its_successor_started_when_it_has_ended() {
    let mut session = training(1);
    let launch = Launch { replace: vec![LocalRank(0)], ..launch(2, 1) };

    let actions = session.handle(at(10.0), Event::Directed(Directive::Launch(launch)));

    assert_eq!(actions, [Action::Kill(LocalRank(0))]);
    assert_eq!(exit(&mut session, at(10.1), 0), [spawn(0, 2), join(2, 0)]);
}

#[test]
fn a_process_that_has_finished_is_not_used_again() {
    let mut session = training(1);
    say(&mut session, at(9.0), 0, done(Outcome::Completed));

    assert_eq!(session.handle(at(10.0), launched(2, 1)), [Action::Terminate(LocalRank(0))]);

    assert_eq!(exit(&mut session, at(10.1), 0), [spawn(0, 2), join(2, 0)]);
}

#[test]
fn a_process_without_a_place_is_asked_to_end_and_then_killed() {
    let mut session = training(1);

    assert_eq!(session.handle(at(10.0), launched(2, 0)), [Action::Terminate(LocalRank(0))]);

    assert_eq!(session.deadline(), Some(at(15.0)));
    assert_eq!(session.handle(at(15.0), Event::Tick), [Action::Kill(LocalRank(0))]);
    assert_eq!(session.deadline(), None);
    assert_eq!(exit(&mut session, at(15.1), 0), []);
}

#[test]
fn a_launch_told_again_does_not_raise_the_dead() {
    let mut session = training(1);
    exit(&mut session, at(10.0), 0);

    assert_eq!(session.handle(at(10.1), launched(1, 1)), []);
}

#[test]
fn begin_is_passed_on_once() {
    let mut session = joining(1);
    say(&mut session, at(2.0), 0, ready(0, None));

    let passed = RankCommand::Begin { generation: Generation(1), peers: vec!["host:0".to_owned()] };
    assert_eq!(session.handle(at(3.0), begin(1)), [tell(0, passed)]);
    assert_eq!(session.handle(at(3.1), begin(1)), []);
}

#[test]
fn a_checkpoint_is_passed_on_to_rank_0_and_a_drain_to_every_rank() {
    let mut session = training(2);
    let generation = Generation(1);
    let checkpoint = Event::Directed(Directive::Checkpoint { generation });
    let reason = "spot notice".to_owned();
    let wanted = Event::Directed(Directive::Drain { generation, reason });

    let passed = RankCommand::Checkpoint { generation };
    assert_eq!(session.handle(at(10.0), checkpoint), [tell(0, passed)]);
    assert_eq!(session.handle(at(11.0), wanted), [drain(0), drain(1)]);
}

// ---- stale messages ----

/// Feeds a message that must change nothing but the count of such messages.
fn refused(mut session: Session, event: Event) {
    let (reason, deadline, stale) =
        (session.reason(), session.deadline(), session.stale_messages());

    assert_eq!(session.handle(at(10.0), event), []);

    assert_eq!((session.reason(), session.deadline()), (reason, deadline));
    assert_eq!(session.stale_messages(), stale + 1);
}

#[test]
fn directives_of_an_older_generation_are_refused_and_counted() {
    let mut session = training(1);
    session.handle(at(4.0), launched(2, 1));
    say(&mut session, at(5.0), 0, ready(0, None));
    let generation = Generation(1);
    let reason = "stale".to_owned();
    for event in [
        launched(1, 0),
        begin(1),
        Event::Directed(Directive::Checkpoint { generation }),
        Event::Directed(Directive::Drain { generation, reason }),
    ] {
        refused(session.clone(), event);
    }
}

#[test]
fn last_words_of_a_process_are_not_taken_for_its_successors() {
    let mut session = training(1);
    exit(&mut session, at(4.0), 0);
    session.handle(at(5.0), launched(2, 1));
    refused(session.clone(), said(0, Incarnation(1), Generation(2), ready(0, None)));
    refused(session, exited(0, Incarnation(1)));
}

#[test]
fn words_about_an_older_generation_are_refused_and_counted() {
    let mut session = training(1);
    session.handle(at(4.0), launched(2, 1));
    refused(session, said(0, Incarnation(1), Generation(1), lost()));
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

    session.handle(now, Event::Connected);
    session.handle(now, Event::Disconnected);
    assert_eq!(session.deadline(), Some(now.after(Duration::from_millis(100))));
}

#[test]
fn words_on_a_loader_are_passed_on_and_change_no_phase() {
    let mut session = joining(5);
    say(&mut session, at(2.0), 0, started());
    let news = RankNews::Loader(LoaderNews { ready: 3, room: 8, ..LoaderNews::default() });

    assert_eq!(say(&mut session, at(3.0), 0, news.clone()), [report(0, news)]);
}

#[test]
fn word_that_a_rank_met_the_others_is_passed_on_and_changes_no_phase() {
    let mut session = joining(1);
    say(&mut session, at(2.0), 0, ready(0, None));
    session.handle(at(3.0), begin(1));

    assert_eq!(say(&mut session, at(3.1), 0, RankNews::Met), [report(0, RankNews::Met)]);

    session.handle(at(4.0), Event::Disconnected);
    session.handle(at(4.2), Event::Tick);
    let actions = session.handle(at(4.3), Event::Connected);
    assert_eq!(actions, [hello(1, holding(&[(0, RankPhase::Meeting)]))]);
}

fn pulse(activity: Activity, seconds: f64) -> RankNews {
    RankNews::Pulse(Pulse { activity, seconds, step: Step(7), ..Pulse::default() })
}

/// Two ranks train; who hangs for 20 s is killed.
fn minded() -> Session {
    let mut session = training(2);
    session.adopt(Policy { hang: Duration::from_secs(20), ..Policy::default() });
    session
}

/// Passes time as the shell does; what the machine asks for on the way.
fn pass(
    session: &mut Session,
    until: Time,
    mut alive: impl FnMut(&mut Session, Time) -> Vec<Action>,
) -> Vec<Action> {
    let mut actions = Vec::new();
    let mut second = 4;
    loop {
        let beat = at(f64::from(second));
        let tick = session.deadline().unwrap_or(beat).min(beat);
        if tick > until {
            return actions;
        }
        if tick == beat {
            actions.extend(alive(session, tick));
            second += 1;
        }
        actions.extend(session.handle(tick, Event::Tick));
    }
}

#[test]
fn a_rank_that_does_not_answer_is_killed_and_its_death_told_at_once() {
    let mut session = minded();
    let actions = pass(&mut session, at(24.0), |session, now| {
        let mut told = say(session, now, 0, pulse(Activity::Exchanging, 20.0));
        told.retain(|action| !matches!(action, Action::Send(Report::Rank { rank: Rank(0), .. })));
        told
    });
    let [Action::Kill(LocalRank(1)), Action::Send(Report::Rank { rank, news, .. })] = &actions[..]
    else {
        panic!("{actions:?}")
    };
    assert_eq!(*rank, Rank(1));
    let RankNews::Exited(failure) = news else { panic!("{news:?}") };
    assert!(failure.message.contains("did not answer for 20 s"), "{failure}");
    // Its place is taken by the next launch, once the process has ended.
    let places = session.handle(at(25.0), launched(2, 2));
    assert!(!places.iter().any(|action| matches!(action, Action::Spawn { .. })), "{places:?}");
    let spawned = exit(&mut session, at(25.1), 1);
    assert!(matches!(spawned[0], Action::Spawn { local_rank: LocalRank(1), .. }), "{spawned:?}");
}

#[test]
fn a_rank_that_is_at_one_thing_too_long_is_killed_unless_it_waits_for_others() {
    for (activity, seconds, dies) in [
        (Activity::Computing, 19.0, false),
        (Activity::Computing, 20.0, true),
        (Activity::Loading, 79.0, false),
        (Activity::Saving, 80.0, true),
        (Activity::Exchanging, 1e6, false),
    ] {
        let mut session = minded();
        let actions = say(&mut session, at(4.0), 0, pulse(activity, seconds));
        let killed = actions.contains(&Action::Kill(LocalRank(0)));
        assert_eq!(killed, dies, "{activity:?} for {seconds} s: {actions:?}");
    }
}

#[test]
fn an_agent_that_slept_itself_blames_nobody() {
    let mut session = minded();
    session.handle(at(4.0), Event::Tick);
    assert_eq!(session.handle(at(1_000.0), Event::Tick), []);
    let actions = pass(&mut session, at(1_019.0), |_, _| Vec::new());
    assert_eq!(actions, [], "its ranks have as long as ever from here");
}

#[test]
fn ranks_that_take_their_state_or_leave_are_not_judged() {
    let mut session = joining(2);
    session.adopt(Policy { hang: Duration::from_secs(20), ..Policy::default() });
    assert_eq!(pass(&mut session, at(100.0), |_, _| Vec::new()), []);
    let mut session = minded();
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
    }
}

#[test]
fn a_rank_that_diverged_waits_for_a_new_generation() {
    let mut session = training(1);
    let news = RankNews::Diverged(diagnosis());
    assert_eq!(say(&mut session, at(10.0), 0, news.clone()), [report(0, news)]);

    assert_eq!(session.handle(at(11.0), launched(2, 1)), [join(2, 0)]);
}

#[test]
fn a_divergence_while_the_coordinator_is_away_is_told_in_the_next_hello() {
    let mut session = alone(1);
    session.handle(at(10.1), Event::Tick);
    assert_eq!(say(&mut session, at(11.0), 0, RankNews::Diverged(diagnosis())), []);

    let actions = session.handle(at(12.0), Event::Connected);

    assert_eq!(actions, [hello(1, holding(&[(0, RankPhase::Diverged(diagnosis()))]))]);
}

#[test]
fn evaluations_are_told_again_to_a_coordinator_that_comes_back() {
    let evaluated = |step| RankNews::Evaluated {
        step: Step(step),
        epoch: Epoch(1),
        accuracy: Accuracy::default(),
        ema: None,
        extent: Extent::Full,
    };
    let mut session = training(1);
    assert_eq!(say(&mut session, at(9.0), 0, evaluated(10)), [report(0, evaluated(10))]);
    session.handle(at(10.0), Event::Disconnected);
    session.handle(at(10.1), Event::Tick);
    assert_eq!(say(&mut session, at(11.0), 0, evaluated(20)), []);

    let actions = session.handle(at(12.0), Event::Connected);

    // The first one may have been lost on the way.
    let told = [report(0, evaluated(10)), report(0, evaluated(20))];
    assert!(matches!(&actions[..1], [Action::Send(Report::Hello(_))]));
    assert_eq!(actions[1..], told);
    session.handle(at(12.0), launched(2, 1));
    session.handle(at(13.0), Event::Disconnected);
    let actions = session.handle(at(14.0), Event::Connected);
    assert_eq!(actions.len(), 1, "of an older generation nobody asks: {actions:?}");
}

#[test]
fn news_while_the_coordinator_is_away_are_told_in_the_next_hello() {
    let mut session = joining(5);
    say(&mut session, at(2.0), 0, started());
    say(&mut session, at(2.0), 1, started());
    say(&mut session, at(2.0), 2, started());
    session.handle(at(10.0), Event::Disconnected);
    session.handle(at(10.1), Event::Tick);
    assert_eq!(say(&mut session, at(11.0), 0, RankNews::Saved(commit())), []);
    assert_eq!(say(&mut session, at(11.0), 1, lost()), []);
    assert_eq!(exit(&mut session, at(11.0), 2), []);
    assert_eq!(say(&mut session, at(11.0), 3, ready(3, Some(7))), []);

    let actions = session.handle(at(12.0), Event::Connected);

    let address = "host:3".to_owned();
    let held = holding(&[
        (0, RankPhase::Training),
        (1, RankPhase::Waiting),
        (3, RankPhase::Ready { address, step: Some(Step(7)) }),
        (4, RankPhase::Joining),
    ]);
    let held = held.map(|held| Holding { commit: Some(commit()), ..held });
    assert_eq!(actions, [hello(5, held)]);
}

#[test]
fn ranks_that_are_done_are_told_in_the_next_hello_even_if_they_have_exited() {
    let mut session = alone(1);
    say(&mut session, at(11.0), 0, done(Outcome::Completed));
    exit(&mut session, at(11.1), 0);

    let actions = session.handle(at(12.0), Event::Connected);

    let phase = RankPhase::Done { outcome: Outcome::Completed, digest: "d".to_owned() };
    assert_eq!(actions, [hello(1, holding(&[(0, phase)]))]);
}

#[test]
fn leaves_when_all_is_done_and_nobody_listens() {
    let mut session = alone(1);
    session.handle(at(10.1), Event::Tick);
    say(&mut session, at(11.0), 0, done(Outcome::Completed));
    assert_eq!(exit(&mut session, at(11.1), 0), []);
    assert_eq!(session.deadline(), Some(at(21.0)));

    let actions = session.handle(at(21.0), Event::Tick);

    assert_eq!(actions, [Action::Exit(Outcome::Completed)]);
}

#[test]
fn stays_when_all_is_done_and_the_coordinator_comes_back() {
    let mut session = alone(1);
    session.handle(at(10.1), Event::Tick);
    say(&mut session, at(11.0), 0, done(Outcome::Completed));
    exit(&mut session, at(11.1), 0);

    session.handle(at(12.0), Event::Connected);

    assert_eq!(session.deadline(), None);
}

// ---- the node must go ----

#[test]
fn a_node_that_must_go_asks_the_coordinator_and_drains_its_ranks_if_that_says_so() {
    let mut session = training(2);
    assert_eq!(session.handle(at(10.0), must_go()), [drain_requested()]);

    let reason = "spot notice".to_owned();
    let told = Event::Directed(Directive::Drain { generation: Generation(1), reason });
    assert_eq!(session.handle(at(10.1), told), [drain(0), drain(1)]);
}

#[test]
fn a_node_that_loses_its_coordinator_while_it_must_go_drains_by_itself() {
    let mut session = training(2);
    session.handle(at(10.0), must_go());

    assert_eq!(session.handle(at(11.0), Event::Disconnected), [drain(0), drain(1)]);
}

fn noticed(end: Option<f64>) -> Event {
    Event::Noticed { reason: "spot notice".to_owned(), end: end.map(at) }
}

#[test]
fn a_notice_leaves_time_for_the_end_and_only_an_earlier_end_is_news() {
    let mut session = training(1);
    let asked = |seconds_left| {
        let reason = "spot notice".to_owned();
        [Action::Send(Report::DrainRequested { reason, seconds_left })]
    };
    assert_eq!(session.handle(at(10.0), noticed(None)), asked(None));
    assert_eq!(session.deadline(), Some(at(110.0)), "as long as the recipe allows");

    assert_eq!(session.handle(at(12.0), noticed(Some(500.0))), []);
    assert_eq!(session.handle(at(12.0), noticed(Some(60.0))), asked(Some(48.0)));
    assert_eq!(session.deadline(), Some(at(55.0)), "killing takes its time");
    assert_eq!(session.handle(at(12.0), noticed(Some(60.0))), []);

    // The first signal after it is that of the machine going down.
    assert_eq!(session.handle(at(13.0), must_go()), []);
    assert_eq!(session.handle(at(14.0), must_go()), [Action::Kill(LocalRank(0))]);
}

#[test]
fn a_place_without_a_rank_is_warmed_up_and_the_process_taken_by_the_next_launch() {
    let mut session = attached(2);
    session.handle(at(1.0), launched(1, 0));
    let local_ranks = vec![LocalRank(0), LocalRank(1)];
    let incarnation = Incarnation(1);
    let spawn = |local| Action::Spawn { local_rank: LocalRank(local), incarnation };
    let warmed = session.handle(at(1.1), Event::Directed(Directive::Warm { local_ranks }));
    assert_eq!(warmed, [spawn(0), spawn(1)]);

    let ready = Event::RankWarm { local_rank: LocalRank(1), incarnation };
    let report = Action::Send(Report::Warm { local_rank: LocalRank(1) });
    assert_eq!(session.handle(at(3.0), ready), [report]);

    let actions = session.handle(at(3.1), launched(2, 2));
    let joins = |action: &Action| matches!(action, Action::Tell { .. });
    assert!(actions.len() == 2 && actions.iter().all(joins), "{actions:?}");
}

#[test]
fn a_process_that_is_to_be_warm_and_is_not_is_replaced_and_its_end_told() {
    let mut session = attached(1);
    session.handle(at(1.0), launched(1, 0));
    let warm = || Event::Directed(Directive::Warm { local_ranks: vec![LocalRank(0)] });
    session.handle(at(1.1), warm());

    let Action::Send(Report::WarmFailed { local_rank, .. }) = &exit(&mut session, at(2.0), 0)[0]
    else {
        panic!()
    };
    assert_eq!(*local_rank, LocalRank(0));

    let spawned = session.handle(at(3.0), warm());
    assert!(matches!(spawned[..], [Action::Spawn { .. }]), "{spawned:?}");
    // It hangs.
    assert_eq!(session.handle(at(90.0), warm()), [Action::Kill(LocalRank(0))]);
    let spawned = exit(&mut session, at(90.1), 0);
    assert!(matches!(spawned[..], [Action::Spawn { .. }]), "{spawned:?}");
}

#[test]
fn advice_asks_for_a_checkpoint_and_training_goes_on() {
    let mut session = training(2);
    let reason = "rebalance recommendation".to_owned();
    let command = RankCommand::Checkpoint { generation: Generation(1) };

    let actions = session.handle(at(10.0), Event::Advised { reason: reason.clone() });

    let tell = Action::Tell { local_rank: LocalRank(0), command };
    assert_eq!(actions, [tell, Action::Send(Report::Advised { reason })]);
}

#[test]
fn a_node_that_must_go_drains_without_a_coordinator() {
    let mut session = alone(1);

    assert_eq!(session.handle(at(10.05), must_go()), [drain(0)]);

    session.handle(at(10.1), Event::Tick);
    say(&mut session, at(11.0), 0, done(drained()));
    exit(&mut session, at(11.1), 0);
    assert_eq!(session.handle(at(21.0), Event::Tick), [Action::Exit(drained())]);
}

#[test]
fn a_coordinator_that_was_away_is_asked_to_drain_in_the_next_connection() {
    let mut session = alone(1);
    session.handle(at(10.05), must_go());

    let actions = session.handle(at(11.0), Event::Connected);

    assert_eq!(actions, [hello(1, holding(&[(0, RankPhase::Training)])), drain_requested()]);
}

#[test]
fn a_node_that_must_go_and_runs_nothing_leaves_if_nobody_listens() {
    let mut session = Session::new(NodeId("node0".to_owned()), 1, Policy::default());
    session.handle(at(0.0), Event::Tick);

    assert_eq!(session.handle(at(1.0), must_go()), [Action::Exit(drained())]);
}

#[test]
fn ranks_that_do_not_drain_in_time_are_asked_to_end_and_then_killed() {
    let mut session = training(1);
    session.handle(at(10.0), must_go());
    assert_eq!(session.deadline(), Some(at(110.0)));

    assert_eq!(session.handle(at(110.0), Event::Tick), [Action::Terminate(LocalRank(0))]);

    assert_eq!(session.handle(at(115.0), Event::Tick), [Action::Kill(LocalRank(0))]);
    let reason = "spot notice; ranks did not stop in time, the last checkpoint counts".to_owned();
    let outcome = Outcome::Drained { reason };
    assert_eq!(exit(&mut session, at(115.1), 0), [Action::Exit(outcome)]);
}

#[test]
fn a_second_signal_kills() {
    let mut session = training(1);
    session.handle(at(10.0), must_go());

    assert_eq!(session.handle(at(11.0), must_go()), [Action::Kill(LocalRank(0))]);

    assert_eq!(exit(&mut session, at(11.1), 0), [Action::Exit(drained())]);
}

#[test]
fn a_second_signal_kills_those_that_were_asked_to_end_too() {
    let mut session = training(2);
    session.handle(at(9.0), launched(2, 1));
    session.handle(at(10.0), must_go());

    let actions = session.handle(at(11.0), must_go());

    assert_eq!(actions, [Action::Kill(LocalRank(0)), Action::Kill(LocalRank(1))]);
}

#[test]
fn a_second_signal_ends_the_wait_for_a_listener() {
    let mut session = alone(1);
    session.handle(at(10.1), Event::Tick);
    say(&mut session, at(11.0), 0, done(drained()));
    session.handle(at(12.0), must_go());

    session.handle(at(13.0), must_go());

    assert_eq!(session.deadline(), None);
}

// ---- the end ----

#[test]
fn a_dismissed_agent_stops_its_ranks_and_leaves_when_they_have_ended() {
    let mut session = training(2);

    let stop = [Action::Terminate(LocalRank(0)), Action::Terminate(LocalRank(1))];
    assert_eq!(session.handle(at(10.0), dismissed()), stop);

    assert_eq!(session.reason(), "leaving (completed); 0 ranks still run");
    assert_eq!(exit(&mut session, at(10.1), 0), []);
    assert_eq!(exit(&mut session, at(10.2), 1), [Action::Exit(Outcome::Completed)]);
}

#[test]
fn a_rank_that_is_done_may_exit_by_itself_but_is_killed_if_it_does_not() {
    let mut session = training(1);
    say(&mut session, at(9.0), 0, done(Outcome::Completed));

    assert_eq!(session.handle(at(10.0), dismissed()), []);

    assert_eq!(session.handle(at(15.0), Event::Tick), [Action::Kill(LocalRank(0))]);
}

#[test]
fn an_agent_that_leaves_takes_no_more_orders_and_offers_nothing() {
    let mut session = alone(1);
    session.handle(at(10.1), Event::Tick);
    session.handle(at(10.2), must_go());
    session.handle(at(10.3), must_go());

    assert_eq!(session.handle(at(10.4), Event::Connected), []);
    assert_eq!(session.handle(at(10.5), launched(2, 1)), []);
}

#[test]
fn after_the_exit_nothing_happens() {
    let mut session = attached(1);
    assert_eq!(session.handle(at(10.0), dismissed()), [Action::Exit(Outcome::Completed)]);

    assert_eq!(session.handle(at(11.0), launched(2, 1)), []);
    assert_eq!(session.deadline(), None);
}

#[test]
fn an_end_without_words_is_told_from_code_and_signal() {
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
    Action::Send(Report::GpuWarning { message: message.to_owned() })
}

/// How the death of a rank was told.
fn told_death(actions: &[Action]) -> &Failure {
    match actions {
        [Action::Send(Report::Rank { news: RankNews::Exited(failure), .. })] => failure,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_error_of_a_gpu_is_told_once_and_a_death_that_follows_names_it() {
    let mut session = training(2);

    let told = session.handle(at(5.0), gpu_failed(1, 79));
    assert_eq!(told, [warned(&Xid(79).describe("GPU 1"))]);
    assert_eq!(session.handle(at(5.1), gpu_failed(1, 79)), []);

    let actions = exit(&mut session, at(5.2), 1);
    let failure = told_death(&actions);
    assert_eq!(failure.class, Class::Device);
    assert!(failure.message.contains("GPU 1 has fallen off the bus (Xid 79)"), "{failure}");
    let actions = exit(&mut session, at(5.3), 0);
    assert_eq!(told_death(&actions), &killed(), "on another GPU");
}

#[test]
fn a_process_is_not_blamed_on_an_error_from_before_its_time() {
    let mut session = training(1);
    session.handle(at(5.0), gpu_failed(0, 94));
    exit(&mut session, at(5.2), 0);
    session.handle(at(6.0), launched(2, 1));

    let actions = exit(&mut session, at(7.0), 0);

    assert_eq!(told_death(&actions), &killed());
}

#[test]
fn a_rank_that_hangs_after_an_error_of_its_gpu_is_said_to_hang_for_that() {
    let mut session = minded();
    session.handle(at(4.0), gpu_failed(1, 119));
    let actions = pass(&mut session, at(24.0), |session, now| {
        say(session, now, 0, pulse(Activity::Exchanging, 1.0))
    });
    let told = actions.iter().find_map(|action| match action {
        Action::Send(Report::Rank { news: RankNews::Exited(failure), .. }) => Some(failure),
        _ => None,
    });
    let failure = told.expect("it is killed");
    assert!(failure.message.contains("(Xid 119)"), "{failure}");
    assert!(failure.message.contains("did not answer"), "{failure}");
}

#[test]
fn warnings_about_gpus_wait_for_a_coordinator() {
    let mut session = Session::new(NodeId("node0".to_owned()), 1, Policy::default());
    let warning = |text: &str| Event::GpuWarning { message: text.to_owned() };
    assert_eq!(session.handle(at(0.0), warning("hot")), [Action::Connect]);

    let told = [hello(1, None), warned("hot")];
    assert_eq!(session.handle(at(0.1), Event::Connected), told);
    assert_eq!(session.handle(at(0.2), warning("lost")), [warned("lost")]);
    session.handle(at(0.3), Event::Disconnected);
    assert_eq!(session.handle(at(1.0), Event::Connected), [hello(1, None)]);
}
