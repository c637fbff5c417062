//! The checkpoint store refuses a generation.

use super::*;

fn full_disk() -> Event {
    Event::FenceFailed { failure: crash("the disk is full; free space") }
}

fn reported(actions: &[Action]) -> Vec<&str> {
    let text = |action| match action {
        &Action::Publish(JobEvent {
            kind: JobEventKind::StoreUnavailable, ref message, ..
        }) => Some(message.as_str()),
        _ => None,
    };
    actions.iter().filter_map(text).collect()
}

fn launches(actions: &[Action]) -> usize {
    let is_launch =
        |action: &&Action| matches!(action, Action::Send { directive: Directive::Launch(_), .. });
    actions.iter().filter(is_launch).count()
}

/// Rank 1 of two died, and the store refuses the next generation.
fn refused() -> (Engine, Vec<Action>) {
    let mut engine = training(&[1, 1]);
    let event = rank_event(&engine, Generation(1), 1, crashed());
    let actions = engine.handle(at(10.0), event);
    assert_eq!(actions.last(), Some(&Action::Fence(Generation(2))));
    assert_eq!(launches(&actions), 0, "nothing is sent before the fence");
    let actions = engine.handle(at(10.0), full_disk());
    (engine, actions)
}

#[test]
fn ranks_keep_their_state_until_the_store_accepts_the_next_generation() {
    let (mut engine, actions) = refused();

    assert_eq!(launches(&actions), 0);
    assert_eq!(
        reported(&actions),
        [
            "the next generation waits for the checkpoint store; ranks that run keep their state: the disk is full; free \
          space"
        ]
    );
    assert_eq!(engine.outcome(), None);
    assert_eq!((engine.status().phase, engine.deadline()), (PhaseName::Backoff, Some(at(11.0))));
    assert_eq!(
        engine.status().reason,
        "the next generation waits for the checkpoint store; ranks that run keep their state; the next try is in 1 s: \
         the disk is full; free space"
    );

    let again = engine.handle(at(11.0), Event::Tick);
    assert!(again.contains(&Action::Fence(Generation(2))), "{again:?}");
    let actions = engine.handle(at(11.0), full_disk());
    assert_eq!(reported(&actions), [""; 0], "an outage is reported once");
    assert_eq!(engine.deadline(), Some(at(13.0)));

    let again = engine.handle(at(13.0), Event::Tick);
    assert!(again.contains(&Action::Fence(Generation(2))), "{again:?}");
    let actions = engine.handle(at(13.0), Event::Fenced);
    assert_eq!(launches(&actions), 2);
    assert_eq!(engine.generation(), Generation(2));
    assert_eq!(engine.status().recoveries[0].launched_at, Some(at(13.0)));
}

#[test]
fn the_pause_before_another_try_stays_short() {
    let (mut engine, _) = refused();
    let mut now = at(10.0);
    let pauses: Vec<u64> = (0..6)
        .map(|_| {
            let next = engine.deadline().unwrap();
            let pause = next.since(now).as_secs();
            now = next;
            engine.handle(now, Event::Tick);
            engine.handle(now, full_disk());
            pause
        })
        .collect();
    assert_eq!(pauses, [1, 2, 4, 8, 8, 8]);
}

#[test]
fn a_job_without_ranks_ends_when_the_store_refuses_it() {
    let mut engine = gathering(1);
    let hello = Hello::new(node(0), 1, None);
    engine.handle(at(1.0), Event::Attached { attachment: Attachment(1), hello });

    engine.handle(at(1.0), full_disk());

    let Some(Outcome::Failed { failure }) = engine.outcome() else { panic!() };
    assert_eq!(failure.message, "the disk is full; free space");
}

#[test]
fn a_restarted_coordinator_waits_for_the_store_if_an_agent_has_ranks() {
    let mut engine = reattaching(&[1, 1]);
    for (number, ranks) in [(0, vec![(0, RankPhase::Waiting)]), (1, vec![])] {
        let hello = Hello::new(node(number), 1, running(1, &ranks));
        let attachment = Attachment(u64::from(number) + 1);
        engine.handle(at(1.0), Event::Attached { attachment, hello });
    }

    engine.handle(at(1.0), full_disk());

    assert_eq!((engine.outcome(), engine.status().phase), (None, PhaseName::Backoff));
}

/// The process of node 1 is ready to take part.
fn is_warm(engine: &mut Engine) {
    let report = AgentReport::Warm { local_rank: LocalRank(0) };
    let attachment = attachment(engine, 1);
    engine.handle(at(6.0), Event::Reported { node: node(1), attachment, report });
}

#[test]
fn training_goes_on_while_a_change_of_nodes_waits_for_the_store() {
    let mut engine = training(&[1]);
    attach(&mut engine, at(3.0), 1, 1, None);
    is_warm(&mut engine);

    let actions = engine.handle(at(6.0), full_disk());

    assert_eq!(
        reported(&actions),
        [
            "training continues with the same nodes until the checkpoint store can be written: the disk is full; free space"
        ]
    );
    let status = engine.status();
    assert_eq!((status.phase, status.generation), (PhaseName::Training, Generation(1)));
    assert_eq!((status.recoveries.len(), engine.deadline()), (0, Some(at(7.0))));

    // The fence may have been raised before the store failed: a save that is refused by it is no takeover.
    report(&mut engine, at(6.5), 0, save_refused_by(2));
    assert_eq!(engine.outcome(), None);

    let again = engine.handle(at(7.0), Event::Tick);
    assert!(again.contains(&Action::Fence(Generation(2))), "{again:?}");
    engine.handle(at(7.0), Event::Fenced);
    assert_eq!(placed(&engine), ["node0", "node1"]);
    assert_eq!(
        engine.status().recoveries[0].cause,
        "node node1 takes part with 1 rank from here on"
    );
}

#[test]
fn a_change_of_nodes_that_is_no_longer_wanted_is_not_tried_again() {
    let mut engine = training(&[1]);
    attach(&mut engine, at(3.0), 1, 1, None);
    is_warm(&mut engine);
    engine.handle(at(6.0), full_disk());
    detach(&mut engine, at(6.5), 1);

    let actions = engine.handle(at(7.0), Event::Tick);

    assert!(!actions.iter().any(|action| matches!(action, Action::Fence(_))), "{actions:?}");
    assert_eq!(engine.deadline(), None);
}

fn save_refused_by(fence: u64) -> RankReport {
    let fence = Some(Generation(fence));
    RankReport::SaveFailed(SaveProblem { message: "fenced".to_owned(), fence, exists: false })
}

#[test]
fn ranks_whose_saves_are_refused_by_a_fence_of_their_own_job_get_a_newer_generation() {
    let mut engine = training(&[1]);
    attach(&mut engine, at(3.0), 1, 1, None);
    is_warm(&mut engine);
    engine.handle(at(6.0), full_disk());
    detach(&mut engine, at(6.5), 1);
    engine.handle(at(7.0), Event::Tick);

    report(&mut engine, at(8.0), 0, save_refused_by(2));

    assert_eq!((engine.generation(), placed(&engine)), (Generation(2), vec!["node0".to_owned()]));
    assert_eq!(causes(&engine), ["the checkpoint store expects generation 2"]);
}

// ---- a store that answers late ----

/// A node is about to join two others that train, and the store has not answered yet.
fn joining() -> Engine {
    let mut engine = training(&[1, 1]);
    attach(&mut engine, at(3.0), 2, 1, None);
    let report = AgentReport::Warm { local_rank: LocalRank(0) };
    let attachment = attachment(&engine, 2);
    let actions = engine.handle(at(6.0), Event::Reported { node: node(2), attachment, report });
    assert_eq!(actions.last(), Some(&Action::Fence(Generation(2))));
    engine
}

/// The texts of events of this kind.
fn published(actions: &[Action], kind: JobEventKind) -> Vec<String> {
    let text = |action: &Action| match action {
        Action::Publish(event) if event.kind == kind => Some(event.message.clone()),
        _ => None,
    };
    actions.iter().filter_map(text).collect()
}

#[test]
fn a_save_that_the_next_generation_cuts_short_is_no_problem_of_the_store() {
    let mut engine = joining();

    let event = rank_event(&engine, Generation(1), 0, save_refused_by(2));
    let actions = engine.handle(at(7.0), event);

    let [text] = &published(&actions, JobEventKind::SaveFailed)[..] else { panic!("{actions:?}") };
    assert!(text.contains("given up because generation 2 begins"), "{text}");
    assert_eq!(engine.status().save_problem, None);
}

#[test]
fn requests_are_carried_out_while_the_store_is_slow() {
    let mut engine = joining();

    let actions = engine.handle(at(30.0), Event::Drain { reason: "a user asked".to_owned() });

    let drains = |action: &&Action| {
        matches!(action, Action::Send { directive: Directive::Drain { .. }, .. })
    };
    assert_eq!(actions.iter().filter(drains).count(), 2, "{actions:?}");
    report(&mut engine, at(31.0), 0, done(drained(), "same"));
    report(&mut engine, at(31.0), 1, done(drained(), "same"));
    assert_eq!(engine.outcome(), Some(&drained()));
    assert_eq!(engine.handle(at(40.0), Event::Fenced), [], "the job is over");
}

#[test]
fn ranks_that_save_and_stop_need_no_generation_that_opens_late() {
    let mut engine = joining();
    engine.handle(at(30.0), Event::Drain { reason: "a user asked".to_owned() });
    report(&mut engine, at(31.0), 0, done(drained(), "same"));

    let actions = engine.handle(at(31.5), Event::Fenced);

    assert_eq!((launches(&actions), engine.generation()), (0, Generation(1)));
    report(&mut engine, at(32.0), 1, done(drained(), "same"));
    assert_eq!(engine.outcome(), Some(&drained()));
}

#[test]
fn a_store_that_does_not_answer_is_reported_once() {
    let mut engine = joining();
    assert_eq!(engine.deadline(), Some(at(11.0)));

    let actions = engine.handle(at(11.0), Event::Tick);

    let text = "generation 2 waits for the checkpoint store, which has not answered for 5 s; training continues with the same \
                nodes";
    assert_eq!(published(&actions, JobEventKind::StoreUnavailable), [text]);
    assert_eq!(engine.deadline(), None);
    let actions = engine.handle(at(60.0), Event::Fenced);
    assert_eq!(launches(&actions), 3);
}

#[test]
fn a_new_job_says_that_it_waits_for_the_store() {
    let mut engine = gathering(1);
    let hello = Hello::new(node(0), 1, None);
    engine.handle(at(1.0), Event::Attached { attachment: Attachment(1), hello });

    engine.handle(at(6.0), Event::Tick);

    assert_eq!(
        engine.status().reason,
        "generation 1 waits for the checkpoint store, which has not answered for 5 s; ranks that run keep their state"
    );
}

#[test]
fn a_node_that_leaves_before_the_store_answers_gets_no_ranks() {
    let mut engine = joining();
    detach(&mut engine, at(7.0), 2);

    let actions = engine.handle(at(8.0), Event::Fenced);

    assert!(opens(&actions, 2), "{actions:?}");
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

#[test]
fn a_failure_before_the_store_answers_is_the_cause_of_the_recovery() {
    let mut engine = joining();
    let event = rank_event(&engine, Generation(1), 1, crashed());
    engine.handle(at(7.0), event);
    let event = rank_event(&engine, Generation(1), 0, lost());
    engine.handle(at(7.1), event);

    engine.handle(at(8.0), Event::Fenced);

    assert_eq!(placed(&engine), ["node0", "node1", "node2"]);
    assert_eq!(causes(&engine), ["rank 1: killed"]);
    assert_eq!(engine.status().recoveries[0].lost_at, at(7.0));
}

#[test]
fn a_node_that_disconnects_before_the_store_answers_is_waited_for() {
    let mut engine = joining();
    detach(&mut engine, at(7.0), 2);
    detach(&mut engine, at(7.0), 1);

    assert_eq!(launches(&engine.handle(at(8.0), Event::Fenced)), 0, "it may hold the newest state");
    let actions = attach(&mut engine, at(9.0), 1, 1, running(1, &[(1, RankPhase::Training)]));

    assert_eq!(launches(&actions), 2);
    assert_eq!(
        (engine.generation(), placed(&engine)),
        (Generation(2), vec!["node0".to_owned(), "node1".to_owned()])
    );
}

#[test]
fn ranks_that_connect_too_late_do_not_train_while_the_next_generation_opens() {
    let mut engine = meeting(&[1, 1]);
    report(&mut engine, at(5.0), 0, started());
    engine.handle(at(21.0), Event::Tick);

    let event = rank_event(&engine, Generation(1), 1, started());
    engine.handle(at(22.0), event);

    assert_eq!(engine.status().phase, PhaseName::Meeting);
    let actions = engine.handle(at(23.0), Event::Fenced);
    let replaced = |action: &Action| match action {
        Action::Send { directive: Directive::Launch(launch), .. } => Some(launch.replace.len()),
        _ => None,
    };
    let replaced: Vec<usize> = actions.iter().filter_map(replaced).collect();
    assert_eq!(replaced, [0, 0], "both hold the state");
}

#[test]
fn a_node_whose_ranks_got_the_state_before_the_store_answers_is_not_left_out() {
    // With room for two of three ranks, names decide as long as none holds state.
    let mut engine =
        Engine::new(&spec_with(&["cluster.min_ranks=2", "cluster.max_ranks=2"]), origin(), at(0.0));
    engine.drive(at(0.0), Event::Tick);
    for number in [1, 2] {
        attach(&mut engine, at(0.0), number, 1, None);
    }
    attach(&mut engine, at(0.5), 0, 1, None);
    all_ready(&mut engine, at(1.0), None);
    let event = rank_event(&engine, Generation(1), 0, crashed());
    engine.handle(at(2.0), event);
    let started = started();
    let event = rank_event(&engine, Generation(1), 1, started);
    engine.handle(at(2.1), event);

    engine.handle(at(3.0), Event::Fenced);

    assert_eq!(placed(&engine), ["node0", "node2"]);
}

#[test]
fn ranks_that_are_ready_too_late_wait_for_the_next_generation() {
    let mut engine = forming(&[1, 1]);
    report(&mut engine, at(1.0), 0, ready(0, Some(5)));
    engine.handle(at(21.0), Event::Tick);

    let event = rank_event(&engine, Generation(1), 1, ready(1, Some(5)));
    let actions = engine.handle(at(22.0), event);

    let begins =
        |action: &Action| matches!(action, Action::Send { directive: Directive::Begin { .. }, .. });
    assert!(!actions.iter().any(begins), "{actions:?}");
    let launches = super::launches(&engine.handle(at(23.0), Event::Fenced));
    assert!(launches.iter().all(|launch| launch.replace.is_empty()), "{launches:?}");
}

#[test]
fn a_leaving_node_takes_part_if_the_one_in_its_place_is_gone() {
    let mut engine = joining();
    engine.policy.min_ranks = 2;
    let report = AgentReport::NodeDeparting { reason: "spot".to_owned(), seconds_left: None };
    let attachment = attachment(&engine, 0);
    engine.handle(at(6.5), Event::Reported { node: node(0), attachment, report });
    detach(&mut engine, at(7.0), 2);

    engine.handle(at(8.0), Event::Fenced);

    assert_eq!(placed(&engine), ["node0", "node1"], "it saves first");
}

/// The store is slow, and there is no rank that runs: of two nodes, one alone holds the state.
fn gathering_with_state() -> Engine {
    let mut engine = gathering(2);
    attach(&mut engine, at(1.0), 0, 1, running(1, &[(0, RankPhase::Waiting)]));
    let hello = Hello::new(node(1), 1, None);
    engine.handle(at(2.0), Event::Attached { attachment: Attachment(9), hello });
    assert_eq!(engine.status().phase, PhaseName::Gathering);
    engine
}

#[test]
fn a_drain_before_the_store_answers_is_a_save_of_the_ranks_that_hold_state() {
    let mut engine = gathering_with_state();

    engine.handle(at(3.0), Event::Drain { reason: "a user asked".to_owned() });

    assert_eq!(engine.outcome(), None);
    engine.handle(at(4.0), Event::Fenced);
    assert_eq!(placed(&engine), ["node0"]);
}

#[test]
fn an_agent_that_comes_back_before_the_store_answers_learns_of_the_generation() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;
    detach(&mut engine, at(3.0), 1);
    let grace = engine.policy.node_grace;
    engine.handle(at(3.0).after(grace), Event::Tick);
    let hello = Hello::new(node(1), 1, running(1, &[(1, RankPhase::Waiting)]));
    engine.handle(at(20.0), Event::Attached { attachment: Attachment(9), hello });

    let actions = engine.handle(at(21.0), Event::Fenced);

    assert_eq!(super::launches(&actions).len(), 2, "{actions:?}");
    assert_eq!(placed(&engine), ["node0", "node1"], "both hold the state");
}

#[test]
fn a_store_that_refuses_does_not_end_a_job_whose_agents_are_away() {
    let mut engine = training(&[1, 1]);
    let event = rank_event(&engine, Generation(1), 1, crashed());
    engine.handle(at(3.0), event);
    for number in [0, 1] {
        detach(&mut engine, at(4.0), number);
    }
    engine.handle(at(30.0), Event::Tick);

    engine.handle(at(35.0), full_disk());

    assert_eq!((engine.outcome(), engine.status().phase), (None, PhaseName::Backoff));
}

#[test]
fn a_job_whose_only_rank_died_waits_ten_minutes_for_the_store() {
    let mut engine = training(&[1]);
    let event = rank_event(&engine, Generation(1), 0, crashed());
    engine.handle(at(3.0), event);
    let mut now = at(3.0);
    let (mut tries, mut waits) = (0, String::new());
    while engine.outcome().is_none() {
        engine.handle(now, full_disk());
        tries += 1;
        if engine.outcome().is_none() {
            waits = engine.status().reason;
        }
        if let Some(next) = engine.deadline() {
            now = next;
            engine.handle(now, Event::Tick);
        }
    }
    let text = "the next generation, which resumes from the newest checkpoint, waits for the checkpoint store";
    assert!(waits.starts_with(text), "no rank keeps a state: {waits}");
    assert!(tries > 50 && (at(600.0)..at(620.0)).contains(&now), "{tries} at {now}");
    assert_eq!(failure_of(&engine).message, "the disk is full; free space");
}

#[test]
fn losses_during_a_change_are_waited_for_whether_the_store_accepts_it_or_not() {
    for answer in [Event::Fenced, full_disk()] {
        let mut engine = joining();
        let event = rank_event(&engine, Generation(1), 0, lost());
        engine.handle(at(7.0), event);
        assert_eq!(engine.status().phase, PhaseName::Detecting);
        let known_at = engine.deadline().unwrap();

        let actions = engine.handle(at(7.1), answer.clone());
        assert_eq!((launches(&actions), engine.deadline()), (0, Some(known_at)), "{answer:?}");

        engine.drive(known_at, Event::Tick);
        assert_eq!(engine.generation(), Generation(2), "{answer:?}");
        let causes = causes(&engine);
        assert!(causes[0].starts_with("rank 0 lost its connection"), "{answer:?}: {causes:?}");
    }
}

#[test]
fn a_process_that_is_ready_and_dies_while_the_store_is_slow_gets_its_time_again() {
    let mut engine = joining();
    let failure = crash("killed".to_owned());
    let report = AgentReport::WarmFailed { local_rank: LocalRank(0), failure };
    let attachment = attachment(&engine, 2);
    engine.handle(at(40.0), Event::Reported { node: node(2), attachment, report });

    assert_eq!(engine.deadline(), Some(at(60.0)));
}

#[test]
fn nodes_learn_of_a_generation_from_the_journal_only_if_its_fence_was_raised() {
    let mut engine = reattaching(&[1, 1]);
    let newcomer = attach(&mut engine, at(1.0), 2, 1, None);
    assert_eq!(launches(&newcomer), 0, "another coordinator may open one of this number");
    let known = running(1, &[(0, RankPhase::Training)]);
    let actions = attach(&mut engine, at(2.0), 0, 1, known);
    assert_eq!(
        launches(&actions),
        1,
        "an agent knows of it: the newcomer must end older processes"
    );
}

#[test]
fn a_coordinator_can_be_replaced_once_there_are_several_nodes_or_it_has_replaced_another_one() {
    let mut engine = training(&[1, 1]);
    assert!(engine.can_be_replaced());
    detach(&mut engine, at(10.0), 1);
    assert!(!engine.can_be_replaced(), "nobody is left who could");
    let mut moved = reattaching(&[1]);
    assert!(!moved.can_be_replaced());
    moved.handle(at(0.0), Event::CoordinatorMoved { text: String::new() });
    assert!(moved.can_be_replaced());
    assert!(moved.deadline() >= Some(at(5.0)), "its agents need time to find it");
    let mut spec = recipe(&[], &[]);
    spec.cluster.standby = false;
    let mut alone = Engine::new(&spec, engine.origin().clone(), at(0.0));
    alone.handle(at(0.0), Event::CoordinatorMoved { text: String::new() });
    assert!(!alone.can_be_replaced(), "the recipe says so");
}

#[test]
fn a_pause_that_only_agents_know_of_is_adopted() {
    let mut engine = reattaching(&[1]);
    let pause = PauseState { number: 3, paused: true };
    let running = running(1, &[(0, RankPhase::Training)]);
    let hello = Hello { pause, ..Hello::new(node(0), 1, running) };
    let attached = |job| Event::Attached {
        attachment: Attachment(7),
        hello: Hello { job: Some(job), ..hello.clone() },
    };
    let mut of_another_job = engine.clone();
    of_another_job.handle(at(1.0), attached(JobId(uuid::Uuid::from_u128(9))));
    assert_eq!(of_another_job.status().pause, None);
    let job = engine.origin().job;
    engine.handle(at(1.0), attached(job));
    let pause = engine.status().pause.unwrap();
    assert_eq!(pause.reason, "requested before the coordinator was lost");
    let actions = engine.handle(at(2.0), Event::Resume);
    let resumed = Directive::Pause(PauseState { number: 4, paused: false });
    let is_sent =
        |action: &Action| matches!(action, Action::Send { directive, .. } if *directive == resumed);
    assert!(actions.iter().any(is_sent), "newer than what the agent knows: {actions:?}");
}

/// An agent attaches, whose rank trains and which knows of this pause.
fn attach_with_pause(engine: &mut Engine, number: u64) -> Vec<Action> {
    let pause = PauseState { number, paused: true };
    let running = running(1, &[(0, RankPhase::Training)]);
    let job = Some(engine.origin().job);
    let hello = Hello { pause, job, ..Hello::new(node(0), 1, running) };
    engine.handle(at(3.0), Event::Attached { attachment: Attachment(7), hello })
}

fn resumes(number: u64) -> Action {
    send(0, 7, Directive::Pause(PauseState { number, paused: false }))
}

#[test]
fn a_request_to_this_coordinator_is_newer_than_the_pause_that_agents_know_of() {
    let mut engine = reattaching(&[1]);
    engine.handle(at(1.0), Event::Pause { reason: "a look".to_owned() });
    engine.handle(at(2.0), Event::Resume);

    let actions = attach_with_pause(&mut engine, 5);

    assert_eq!(engine.status().pause, None);
    assert!(actions.contains(&resumes(6)), "{actions:?}");
}

#[test]
fn a_drain_by_a_user_ends_a_pause_that_only_agents_know_of() {
    let mut engine = reattaching(&[1]);
    engine.handle(at(1.0), Event::Drain { reason: "noon".to_owned() });

    let actions = attach_with_pause(&mut engine, 1);

    // Otherwise ranks that join later would stay paused, and nobody could resume them.
    assert_eq!(engine.status().pause, None);
    assert!(actions.contains(&resumes(2)), "{actions:?}");
}

#[test]
fn a_rollback_before_the_store_answers_is_carried_out_by_the_next_generation() {
    let mut engine = joining();
    let generation = Generation(1);
    let diagnosis = divergence::diagnosis(12);
    let event = rank_event(&engine, generation, 0, RankReport::Diverged(diagnosis));
    let actions = engine.handle(at(7.0), event);
    assert!(actions.iter().any(|action| matches!(action, Action::Persist(Record::Diverged(_)))));

    let actions = engine.handle(at(8.0), Event::Fenced);

    assert!(opens(&actions, 2), "the journal has the rollback before it: {actions:?}");
    assert_eq!(engine.restore().rollbacks.len(), 1);
    assert_eq!(causes(&engine).len(), 0, "it is no failure");
}
