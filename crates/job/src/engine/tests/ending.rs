//! How a job ends whose failure another try would repeat, and which node is sent away instead.

use super::*;
use crate::engine::ending::LOOK_INTERVAL;
use baton_recipe::{Epoch, progress::Extent};

fn bad_input() -> RankReport {
    RankReport::Exited(Failure { class: Class::BadInput, message: "no such file".to_owned() })
}

fn failed(class: Class, message: &str) -> Outcome {
    Outcome::Failed { failure: Failure { class, message: message.to_owned() } }
}

/// Two nodes train with one rank each; one more takes part from generation 2 on, and has not started yet.
fn joining(min_ranks: u32) -> Engine {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = min_ranks;
    report(&mut engine, at(3.0), 0, stepped(5));
    attach(&mut engine, at(4.0), 2, 1, None);
    warm(&mut engine, at(5.0), 2, 0);
    assert_eq!(placed(&engine), ["node0", "node1", "node2"]);
    report(&mut engine, at(6.0), 0, ready(0, Some(5)));
    report(&mut engine, at(6.0), 1, ready(1, Some(5)));
    engine
}

/// One of two ranks has found bad input, and the other saves what it holds.
fn saving() -> Engine {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(9.0), 0, stepped(5));
    report(&mut engine, at(10.0), 1, bad_input());
    engine
}

fn events(engine: &mut Engine, now: Time, rank: u32, rank_report: RankReport) -> Vec<String> {
    let event = rank_event(engine, engine.lifecycle.generation, rank, rank_report);
    let text = |action| match action {
        Action::Publish(event) => Some(event.message),
        _ => None,
    };
    engine.drive(now, event).into_iter().filter_map(text).collect()
}

#[test]
fn bad_input_before_training_ends_the_job_at_once() {
    let mut engine = forming(&[1, 1]);

    let actions = report(&mut engine, at(10.0), 1, bad_input());

    let outcome = failed(Class::BadInput, "rank 1: no such file");
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
fn bad_input_in_training_ends_the_job_once_the_other_ranks_have_saved() {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(9.0), 0, stepped(5));

    let actions = report(&mut engine, at(10.0), 1, bad_input());
    assert_eq!(launches(&actions)[0], launch(2, 1, &[(0, 0)]), "no other rank is waited for");
    assert_eq!(engine.status().drain.unwrap().reason, "rank 1: no such file");

    report(&mut engine, at(11.0), 0, ready(0, Some(5)));
    report(&mut engine, at(12.0), 0, RankReport::Met);
    let drains = report(&mut engine, at(13.0), 0, started());
    let is_drain =
        |action: &Action| matches!(action, Action::Send { directive: Directive::Drain { .. }, .. });
    assert!(drains.iter().any(is_drain), "{drains:?}");
    report(&mut engine, at(14.0), 0, RankReport::Saved(commit(2, 5)));
    report(&mut engine, at(15.0), 0, done(drained(), ""));

    let text = "rank 1: no such file; the state after step 5 is saved";
    assert_eq!(engine.outcome(), Some(&failed(Class::BadInput, text)));
}

#[test]
fn a_last_save_that_takes_too_long_is_given_up_and_says_what_is_lost() {
    let mut engine = saving();

    let until = engine.status().drain.unwrap().until;
    tick(&mut engine, until);

    let text = "rank 1: no such file; ranks did not stop in time, and the state after step 5 was not saved, and this \
                job has saved none before";
    assert_eq!(engine.outcome(), Some(&failed(Class::BadInput, text)));
}

#[test]
fn a_last_save_ends_when_no_rank_holds_the_state_any_more() {
    let mut engine = saving();

    report(&mut engine, at(11.0), 0, crashed());

    let Failure { class, message } = failure_of(&engine);
    assert_eq!(class, Class::BadInput);
    assert!(
        message.starts_with("rank 1: no such file; the state after step 5 was not saved"),
        "{message}"
    );
}

#[test]
fn a_last_save_that_fails_too_often_ends_with_the_failure_that_began_it() {
    let mut engine = saving();
    engine.policy.restart_limit = 0;

    report(&mut engine, at(11.0), 0, ready(0, Some(5)));
    report(
        &mut engine,
        at(12.0),
        0,
        RankReport::Exited(Failure { class: Class::BadInput, message: "other".to_owned() }),
    );

    let message = failure_of(&engine).message;
    assert!(
        message.starts_with("rank 1: no such file; saving failed: 2 generations ended without a"),
        "{message}"
    );
}

#[test]
fn the_restart_limit_ends_the_job_once_the_ranks_that_hold_state_have_saved() {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(9.0), 0, stepped(5));
    let mut now = at(10.0);
    while engine.status().drain.is_none() {
        report(&mut engine, now, 1, crashed());
        if let Some(until) =
            engine.deadline().filter(|_| engine.status().phase == PhaseName::Backoff)
        {
            now = until;
            tick(&mut engine, now);
        }
        if engine.status().drain.is_none() {
            report(&mut engine, now, 0, ready(0, Some(5)));
        }
    }
    assert_eq!(placed(&engine), ["node0"]);
    report(&mut engine, now, 0, ready(0, Some(5)));
    report(&mut engine, now, 0, RankReport::Met);
    report(&mut engine, now, 0, started());
    report(&mut engine, now, 0, done(drained(), ""));
    let Failure { class, message } = failure_of(&engine);
    assert_eq!(class, Class::Crash);
    assert!(
        message.starts_with(
            "4 generations ended without a new step, the last because rank 1: killed; "
        ),
        "{message}"
    );
}

#[test]
fn a_newcomer_with_bad_input_is_sent_away_and_training_continues() {
    let mut engine = joining(1);

    let published = events(&mut engine, at(7.0), 2, bad_input());

    let sent_away =
        "node node2 is sent away, and training continues without it: rank 2: no such file";
    assert!(published.iter().any(|text| text == sent_away), "{published:?}");
    assert_eq!(engine.outcome(), None);
    assert!(!engine.nodes.contains_key(&node(2)));
    assert_eq!(placed(&engine), ["node0", "node1"]);
    assert_eq!(engine.status().drain, None);
}

#[test]
fn a_newcomer_that_the_job_needs_ends_it_once_the_others_have_saved() {
    let mut engine = joining(3);

    report(&mut engine, at(7.0), 2, bad_input());

    assert_eq!(placed(&engine), ["node0", "node1"]);
    assert_eq!(engine.status().drain.unwrap().reason, "rank 2: no such file");
}

#[test]
fn a_rank_that_trained_is_not_taken_for_a_newcomer() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;

    // A sample that cannot be read: on the next node too, so sending one after the other away would help nobody.
    report(&mut engine, at(10.0), 1, bad_input());

    assert_eq!(engine.status().drain.unwrap().reason, "rank 1: no such file");
}

#[test]
fn a_user_who_drains_a_job_that_fails_keeps_the_failure_as_its_outcome() {
    let mut engine = training(&[1, 1]);
    drain(&mut engine, at(9.0));

    report(&mut engine, at(10.0), 1, bad_input());
    report(&mut engine, at(11.0), 0, ready(0, Some(5)));
    report(&mut engine, at(12.0), 0, RankReport::Met);
    report(&mut engine, at(13.0), 0, started());
    report(&mut engine, at(14.0), 0, done(drained(), ""));

    assert_eq!(failure_of(&engine).class, Class::BadInput);
}

/// The coordinator was away while the job of two ranks went on, and its agents are gone. Its actions, and when it waits for
/// the answer of the store.
fn without_agents() -> (Engine, Vec<Action>, Time) {
    let mut engine = reattaching(&[1, 1]);
    let (mut actions, mut now) = (Vec::new(), at(0.0));
    while engine.status().phase != PhaseName::Gathering {
        now = engine.deadline().unwrap();
        actions.extend(engine.drive(now, Event::Tick));
    }
    (engine, actions, now)
}

fn looks(actions: &[Action]) -> usize {
    actions.iter().filter(|action| matches!(action, Action::FindCheckpoint(_))).count()
}

fn saved_by(generation: u64, step: u64, epoch: u32, is_evaluated: bool) -> Event {
    let mut progress = Progress { step: Step(step), epoch: Epoch(epoch), ..Progress::default() };
    if is_evaluated {
        let accuracy = Accuracy::new(360, [("top1", 0.97)]);
        progress.record_evaluation(accuracy, None, Extent::Full);
    }
    Event::CheckpointFound(Some(Box::new((commit(generation, step), progress))))
}

#[test]
fn a_job_that_was_completed_without_the_coordinator_ends_without_its_agents() {
    let (mut engine, actions, now) = without_agents();
    assert_eq!(looks(&actions), 1);
    assert_eq!(engine.deadline(), None, "one look at a time");

    let actions = engine.drive(now, saved_by(1, 99, spec(1).train.epochs, true));

    assert_eq!(engine.outcome(), Some(&Outcome::Completed));
    let status = engine.status();
    assert_eq!(status.commit.map(|commit| commit.step), Some(Step(99)));
    assert_eq!(status.evaluation.map(|evaluation| evaluation.step), Some(Step(99)));
    let text = |action: &Action| match action {
        Action::Publish(event) => Some(event.message.clone()),
        _ => None,
    };
    let texts: Vec<String> = actions.iter().filter_map(text).collect();
    assert!(texts[0].starts_with("training was completed while no agent"), "{texts:?}");
    assert_eq!(texts.last().unwrap(), "job completed");
}

#[test]
fn the_end_of_training_is_looked_for_until_it_is_there() {
    let (mut engine, _, now) = without_agents();
    let last = spec(1).train.epochs;
    for (number, found) in [
        Event::CheckpointFound(None),
        saved_by(1, 99, last - 1, true),
        saved_by(1, 99, last, false),
        // That of another coordinator.
        saved_by(2, 99, last, true),
    ]
    .into_iter()
    .enumerate()
    {
        let now = now.after(Duration::from_secs(10) * number.try_into().unwrap());
        engine.drive(now, found);
        assert_eq!((engine.outcome(), engine.deadline()), (None, Some(now.after(LOOK_INTERVAL))));
        assert_eq!(looks(&engine.drive(now.after(LOOK_INTERVAL), Event::Tick)), 1);
    }
    let mut placed = engine.clone();
    engine.drive(at(99.0), saved_by(1, 99, last, true));
    assert_eq!(engine.outcome(), Some(&Outcome::Completed));

    for number in 0..2 {
        attach(&mut placed, at(99.0), number, 1, None);
    }
    placed.drive(at(99.0), saved_by(1, 99, last, true));
    assert_eq!((placed.outcome(), placed.status().phase), (None, PhaseName::Forming));
}

#[test]
fn before_the_first_generation_no_end_of_training_is_looked_for() {
    let mut engine = gathering(1);
    assert_eq!((looks(&engine.drive(at(60.0), Event::Tick)), engine.deadline()), (0, None));
}
