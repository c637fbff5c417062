//! Pause and resume.

use super::*;

fn pause(engine: &mut Engine, now: Time) -> Vec<Action> {
    engine.drive(now, Event::Pause { reason: "lunch".to_owned() })
}

fn pause_directive(node: u32, attachment: u64, number: u64, paused: bool) -> Action {
    send(node, attachment, Directive::Pause(PauseState { number, paused }))
}

fn kinds(actions: &[Action]) -> Vec<JobEventKind> {
    let kind = |action: &Action| match action {
        Action::Publish(published) => Some(published.kind),
        _ => None,
    };
    actions.iter().filter_map(kind).collect()
}

#[test]
fn pause_and_resume_are_persisted_and_then_sent_to_every_node() {
    let mut engine = training(&[1, 1]);
    let actions = pause(&mut engine, at(10.0));
    let record = Record::Paused { reason: "lunch".to_owned(), at: Duration::from_secs(10) };
    assert_eq!(actions[0], Action::Persist(record));
    assert_eq!(actions[2..], [pause_directive(0, 1, 1, true), pause_directive(1, 2, 1, true)]);
    assert_eq!(kinds(&actions), [JobEventKind::Paused]);
    let status = engine.status();
    assert_eq!((status.phase, status.since), (PhaseName::Paused, at(10.0)));
    assert!(status.reason.contains("lunch") && status.reason.contains("baton resume"));

    let actions = engine.drive(at(40.0), Event::Resume);
    assert_eq!(actions[0], Action::Persist(Record::Resumed { at: Duration::from_secs(40) }));
    assert_eq!(actions[2..], [pause_directive(0, 1, 2, false), pause_directive(1, 2, 2, false)]);
    assert_eq!(kinds(&actions), [JobEventKind::Resumed]);
    assert_eq!(engine.status().phase, PhaseName::Training);
    let paused = engine.status().spending.paused;
    assert_eq!(paused.read(Duration::from_secs(99)), Duration::from_secs(30));
}

#[test]
fn a_paused_job_cannot_be_paused_and_a_running_job_cannot_be_resumed() {
    let mut engine = training(&[1]);
    assert!(engine.can_resume().unwrap_err().contains("not paused"));
    assert_eq!(engine.drive(at(9.0), Event::Resume), []);
    engine.can_pause().unwrap();
    pause(&mut engine, at(10.0));
    assert!(engine.can_pause().unwrap_err().contains("lunch"));
    assert_eq!(pause(&mut engine, at(11.0)), []);
    engine.can_resume().unwrap();
    assert!(ended().can_pause().unwrap_err().contains("over"));
}

#[test]
fn ranks_of_a_new_generation_start_paused() {
    let mut engine = training(&[1, 1]);
    pause(&mut engine, at(10.0));
    let actions = report(&mut engine, at(11.0), 1, crashed());
    let launches = actions.iter().filter_map(|action| match action {
        Action::Send { directive: Directive::Launch(launch), .. } => Some(launch.pause),
        _ => None,
    });
    assert_eq!(launches.collect::<Vec<_>>(), [PauseState { number: 1, paused: true }; 2]);
}

#[test]
fn a_node_that_reconnects_gets_the_current_pause_state() {
    let mut engine = training(&[1, 1]);
    detach(&mut engine, at(10.0), 1);
    pause(&mut engine, at(11.0));
    let held = || running(1, &[(1, RankPhase::Training)]);
    let actions = attach(&mut engine, at(12.0), 1, 1, held());
    assert!(actions.contains(&pause_directive(1, 3, 1, true)), "{actions:?}");
    detach(&mut engine, at(13.0), 1);
    engine.drive(at(14.0), Event::Resume);
    let actions = attach(&mut engine, at(15.0), 1, 1, held());
    assert!(actions.contains(&pause_directive(1, 4, 2, false)), "{actions:?}");
}

#[test]
fn a_pause_survives_a_restart_of_the_coordinator() {
    let placements = training(&[1]).lifecycle.world().unwrap().placements().to_vec();
    let paused = Record::Paused { reason: "lunch".to_owned(), at: Duration::from_secs(10) };
    let mut engine =
        replay(&[opened(1, placements), paused, Record::Metered(Duration::from_secs(15))]);
    attach(&mut engine, at(100.0), 0, 1, running(1, &[(0, RankPhase::Training)]));
    assert_eq!(engine.status().phase, PhaseName::Paused);
    engine.drive(at(120.0), Event::Resume);
    let paused = engine.status().spending.paused;
    assert_eq!(
        paused.read(Duration::MAX),
        Duration::from_secs(25),
        "5 before the restart, 20 after"
    );
}

#[test]
fn a_drain_ends_a_pause_so_that_the_same_command_resumes_training() {
    let mut engine = training(&[1]);
    pause(&mut engine, at(10.0));
    let actions = engine.drive(at(11.0), Event::Drain { reason: "spot notice".to_owned() });
    assert!(actions.contains(&Action::Persist(Record::Resumed { at: Duration::from_secs(11) })));
    assert_eq!(engine.status().phase, PhaseName::Draining);
    assert!(engine.can_pause().unwrap_err().contains("spot notice"));
}

#[test]
fn a_pause_outlasts_a_notice_but_not_the_drain_of_a_user() {
    for (by_user, stays) in [(false, true), (true, false)] {
        let mut engine = training(&[1]);
        let mut actions = pause(&mut engine, at(10.0));
        actions.extend(match by_user {
            true => drain(&mut engine, at(11.0)),
            false => depart(&mut engine, at(11.0), 0, None),
        });
        assert_eq!(engine.status().phase, PhaseName::Draining);
        actions.extend(report(&mut engine, at(12.0), 0, done(drained(), "d")));
        assert!(engine.outcome().is_some());

        let records = actions.into_iter().filter_map(|action| match action {
            Action::Persist(record) => Some(record),
            _ => None,
        });
        let begun = opened(1, vec![placement(0, 0, 0)]);
        let next = replay(&[vec![begun], records.collect()].concat());
        assert_eq!(next.status().pause.is_some(), stays, "by a user: {by_user}");
    }
}
