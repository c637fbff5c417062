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
    let hello = Hello { node: node(0), slots: 1, running: None };
    engine.handle(at(1.0), Event::Attached { attachment: Attachment(1), hello });

    engine.handle(at(1.0), full_disk());

    let Some(Outcome::Failed { failure }) = engine.outcome() else { panic!() };
    assert_eq!(failure.message, "the disk is full; free space");
}

#[test]
fn a_restarted_coordinator_waits_for_the_store_if_an_agent_has_ranks() {
    let mut engine = reattaching(&[1, 1]);
    for (number, ranks) in [(0, vec![(0, RankPhase::Waiting)]), (1, vec![])] {
        let hello = Hello { node: node(number), slots: 1, running: running(1, &ranks) };
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
            "training goes on with the same nodes until the checkpoint store can be written: the disk is full; free space"
        ]
    );
    let status = engine.status();
    assert_eq!((status.phase, status.generation), (PhaseName::Training, Generation(1)));
    assert_eq!((status.recoveries.len(), engine.deadline()), (0, Some(at(7.0))));

    // The fence may have been raised before the store failed: a save that is refused by it is no takeover.
    let problem = SaveProblem { message: "fenced".to_owned(), fence: Some(Generation(2)) };
    report(&mut engine, at(6.5), 0, RankReport::SaveFailed(problem));
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
