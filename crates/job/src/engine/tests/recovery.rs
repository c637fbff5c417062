//! How long each part of a recovery takes.

use super::*;

// ---- events ----

/// A rank starts with the state after this many updates.
fn started_at(step: u64) -> RankReport {
    let progress = Progress { step: Step(step), ..Progress::default() };
    RankReport::Started { source: StateSource::Survivor { rank: Rank(0) }, progress }
}

fn all_report(engine: &mut Engine, now: Time, rank_report: &RankReport) {
    for rank in 0..engine.status().ranks.len() as u32 {
        report(engine, now, rank, rank_report.clone());
    }
}

/// Brings the current generation to its first step; each part takes a tenth of a second.
fn recover(engine: &mut Engine, seconds: f64, from: u64) {
    all_ready(engine, at(seconds + 0.1), Some(from));
    all_report(engine, at(seconds + 0.2), &RankReport::Met);
    all_report(engine, at(seconds + 0.3), &started_at(from));
    report(engine, at(seconds + 0.4), 0, stepped(from + 1));
}

/// Two ranks on two nodes have made 40 updates.
fn after_40_steps() -> Engine {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;
    report(&mut engine, at(9.0), 0, stepped(40));
    engine
}

// ---- results ----

/// Parts of the newest recovery, in milliseconds.
fn parts(engine: &Engine) -> [Option<u128>; 6] {
    let newest = engine.status().recoveries.back().unwrap().parts();
    newest.named().map(|(_, took)| took.map(|took| took.as_millis()))
}

fn total_ms(engine: &Engine) -> Option<u128> {
    engine.status().recoveries.back().unwrap().total().map(|took| took.as_millis())
}

fn lost_steps(engine: &Engine) -> Vec<u64> {
    engine.status().recoveries.iter().map(|recovery| recovery.lost_steps).collect()
}

/// Texts about recoveries that are published after this report of rank 0.
fn recovered(engine: &mut Engine, now: Time, rank_report: RankReport) -> Vec<String> {
    let event = rank_event(engine, engine.lifecycle.generation, 0, rank_report);
    let messages = engine.drive(now, event).into_iter().filter_map(|action| match action {
        Action::Publish(published) if published.kind == JobEventKind::Recovered => {
            Some(published.message)
        }
        _ => None,
    });
    messages.collect()
}

#[test]
fn each_part_begins_at_the_end_of_the_previous_part() {
    let mut engine = after_40_steps();
    report(&mut engine, at(10.0), 0, lost());
    report(&mut engine, at(10.1), 1, crashed());
    report(&mut engine, at(10.3), 0, ready(0, Some(40)));
    report(&mut engine, at(11.5), 1, ready(1, None));
    report(&mut engine, at(11.51), 0, RankReport::Met);
    report(&mut engine, at(11.55), 1, RankReport::Met);
    report(&mut engine, at(11.6), 0, started_at(40));
    report(&mut engine, at(11.7), 1, started_at(40));

    let messages = recovered(&mut engine, at(11.8), stepped(41));

    assert_eq!(
        engine.status().recoveries.iter().collect::<Vec<_>>(),
        [&Recovery {
            generation: Generation(2),
            cause: "rank 1: killed".to_owned(),
            planned: false,
            lost_at: at(10.0),
            launched_at: Some(at(10.1)),
            torn_down_at: Some(at(10.3)),
            ready_at: Some(at(11.5)),
            met_at: Some(at(11.55)),
            started_at: Some(at(11.7)),
            stepped_at: Some(at(11.8)),
            step_before: Step(40),
            lost_steps: 0,
            metered_from: Duration::from_secs(10),
            metered: Some(Duration::from_millis(1_800)),
            redo: Duration::ZERO,
        }]
    );
    assert_eq!(parts(&engine), [100, 200, 1_200, 50, 150, 100].map(Some));
    assert_eq!(
        messages,
        [
            "recovered in 1.80 s (detect 0.10, tear down 0.20, respawn 1.20, rendezvous 0.05, restore 0.15, \
          first step 0.10), 0 steps lost: rank 1: killed"
        ]
    );
    assert_eq!(recovered(&mut engine, at(12.0), stepped(42)), [""; 0], "published once");
}

#[test]
fn a_part_is_absent_until_it_has_ended() {
    let mut engine = after_40_steps();
    report(&mut engine, at(10.0), 1, crashed());
    let none = [None; 5];
    assert_eq!(parts(&engine)[..1], [Some(0)]);
    assert_eq!(parts(&engine)[1..], none);

    report(&mut engine, at(10.1), 0, ready(0, Some(40)));
    assert_eq!(parts(&engine)[1..], none, "another rank may still report that it holds state");

    report(&mut engine, at(11.0), 1, ready(1, None));
    report(&mut engine, at(11.1), 1, RankReport::Met);
    assert_eq!(parts(&engine), [Some(0), Some(100), Some(900), None, None, None]);
    assert_eq!(total_ms(&engine), None);
}

#[test]
fn without_a_survivor_nothing_is_torn_down_and_steps_are_lost() {
    let mut engine = after_40_steps();
    report(&mut engine, at(10.0), 0, crashed());
    all_ready(&mut engine, at(11.0), None);
    all_report(&mut engine, at(11.5), &RankReport::Met);
    all_report(&mut engine, at(12.0), &started_at(39));

    let messages = recovered(&mut engine, at(12.5), stepped(40));

    assert_eq!(parts(&engine), [0, 0, 1_000, 500, 500, 500].map(Some));
    assert!(messages[0].ends_with("first step 0.50), 1 step lost: rank 0: killed"), "{messages:?}");
}

#[test]
fn respawn_takes_no_time_if_all_ranks_hold_state() {
    let mut engine = after_40_steps();
    report(&mut engine, at(10.0), 0, lost());
    report(&mut engine, at(10.0), 1, lost());
    report(&mut engine, at(10.2), 0, ready(0, Some(40)));
    report(&mut engine, at(10.6), 1, ready(1, Some(40)));

    assert_eq!(parts(&engine)[..3], [0, 600, 0].map(Some));
}

#[test]
fn a_repeated_ready_report_does_not_change_when_the_rank_became_ready() {
    let mut engine = after_40_steps();
    report(&mut engine, at(10.0), 1, crashed());
    report(&mut engine, at(10.1), 0, ready(0, Some(40)));
    detach(&mut engine, at(10.2), 0);
    let phase = RankPhase::Ready { address: address(0), step: Some(Step(40)) };
    attach(&mut engine, at(10.9), 0, 1, running(2, &[(0, phase)]));

    report(&mut engine, at(11.0), 1, ready(1, None));

    assert_eq!(parts(&engine)[..3], [0, 100, 900].map(Some));
}

#[test]
fn rendezvous_is_included_in_the_next_part_if_a_rank_did_not_report_it() {
    let mut engine = after_40_steps();
    report(&mut engine, at(10.0), 1, crashed());
    all_ready(&mut engine, at(11.0), Some(40));
    report(&mut engine, at(11.1), 0, RankReport::Met);
    detach(&mut engine, at(11.2), 1);
    attach(&mut engine, at(11.3), 1, 1, running(2, &[(1, RankPhase::Meeting)]));
    all_report(&mut engine, at(11.5), &started_at(40));
    report(&mut engine, at(11.6), 1, RankReport::Met);

    let messages = recovered(&mut engine, at(11.7), stepped(41));

    assert_eq!(parts(&engine), [Some(0), Some(1_000), Some(0), None, Some(500), Some(200)]);
    assert!(messages[0].contains("(detect 0.00, tear down 1.00, respawn 0.00, restore 0.50, "));
}

#[test]
fn waiting_for_a_disconnected_node_counts_from_the_first_report() {
    let mut engine = training(&[1, 1]);
    detach(&mut engine, at(9.0), 1);
    report(&mut engine, at(10.0), 0, crashed());

    attach(&mut engine, at(11.0), 1, 1, running(1, &[(1, RankPhase::Waiting)]));

    assert_eq!(parts(&engine)[0], Some(1_000));
}

#[test]
fn after_a_restart_detection_counts_from_the_first_report_of_a_loss() {
    let mut engine = reattaching(&[1, 1]);
    attach(&mut engine, at(1.0), 0, 1, running(1, &[(0, RankPhase::Waiting)]));

    attach(&mut engine, at(3.0), 1, 1, running(1, &[(1, RankPhase::Waiting)]));

    assert_eq!(
        causes(&engine),
        ["the coordinator restarted, and some ranks are no longer running"]
    );
    assert_eq!(parts(&engine)[0], Some(2_000));
}

#[test]
fn a_generation_that_fails_before_its_first_step_leaves_its_recovery_incomplete() {
    let mut engine = after_40_steps();
    report(&mut engine, at(10.0), 0, crashed());
    all_ready(&mut engine, at(11.0), None);
    all_report(&mut engine, at(11.5), &RankReport::Met);
    all_report(&mut engine, at(12.0), &started_at(30));
    report(&mut engine, at(13.0), 1, crashed());
    let failed = engine.status().recoveries[0].clone();

    tick(&mut engine, at(14.0));
    recover(&mut engine, 14.0, 30);

    let status = engine.status();
    assert_eq!(status.recoveries[0], failed);
    assert_eq!((failed.generation, failed.total()), (Generation(2), None));
    assert_eq!(status.recoveries[1].generation, Generation(3));
    assert_eq!(parts(&engine), [1_000, 100, 0, 100, 100, 100].map(Some), "the backoff is included");
    assert_eq!(lost_steps(&engine), [10, 0], "steps that were lost before are not counted again");
}

#[test]
fn steps_that_are_lost_while_they_are_made_again_are_counted_once_more() {
    let mut engine = after_40_steps();
    for (seconds, from, reached) in [(10.0, 30, 35), (20.0, 30, 33)] {
        report(&mut engine, at(seconds), 0, crashed());
        tick(&mut engine, at(seconds + 2.0));
        recover(&mut engine, seconds + 2.0, from);
        report(&mut engine, at(seconds + 3.0), 0, stepped(reached));
    }

    assert_eq!(lost_steps(&engine), [10, 5]);
}

#[test]
fn a_planned_change_is_a_recovery_but_not_a_failure() {
    let mut engine = after_40_steps();
    depart(&mut engine, at(10.0), 0, Some(120.0));
    report(&mut engine, at(10.1), 0, ready(0, Some(40)));
    report(&mut engine, at(10.15), 0, RankReport::Met);
    report(&mut engine, at(10.2), 0, started_at(40));

    let messages = recovered(&mut engine, at(10.3), stepped(41));

    let status = engine.status();
    assert!(status.recoveries[0].planned);
    assert_eq!(parts(&engine), [0, 100, 0, 50, 50, 100].map(Some));
    assert_eq!(messages, ["training continued after 0.30 s: node node0: spot notice"]);
    assert_eq!(engine.lifecycle.failures, 0);
}

#[test]
fn a_failure_during_a_planned_change_is_a_separate_recovery() {
    let mut engine = after_40_steps();
    attach(&mut engine, at(9.5), 2, 1, None);
    warm(&mut engine, at(10.0), 2, 0);
    report(&mut engine, at(10.5), 0, crashed());

    let status = engine.status();
    let recoveries: Vec<_> =
        status.recoveries.iter().map(|recovery| (recovery.planned, recovery.total())).collect();
    assert_eq!(recoveries, [(true, None), (false, None)]);
    assert_eq!(causes(&engine)[1], "rank 0: killed");
}

#[test]
fn the_newest_thousand_are_kept_and_all_are_counted() {
    let mut engine = training(&[1]);
    for number in 1..=1_003u64 {
        let seconds = 10.0 * number as f64;
        let failure = crash(format!("failure {number}"));
        report(&mut engine, at(seconds), 0, RankReport::Exited(failure));
        recover(&mut engine, seconds, number);
    }

    let status = engine.status();
    assert_eq!((status.recoveries.len(), status.recoveries_total), (1_000, 1_003));
    assert_eq!(causes(&engine)[0], "rank 0: failure 4");
    assert_eq!(status.recoveries[999].cause, "rank 0: failure 1003");
}

#[test]
fn a_very_long_cause_is_cut() {
    let mut engine = training(&[1]);
    report(&mut engine, at(10.0), 0, RankReport::Exited(crash("é".repeat(5_000))));

    let cause = causes(&engine).remove(0);
    assert_eq!(cause.chars().count(), 501);
    assert!(cause.starts_with("rank 0: é") && cause.ends_with("é…"), "{cause}");
}

#[test]
fn recoveries_survive_the_coordinator_including_incomplete_ones() {
    let mut records = vec![Record::Created(origin())];
    let mut engine = after_40_steps();
    let mut handle = |engine: &mut Engine, now, rank, rank_report| {
        let event = rank_event(engine, engine.lifecycle.generation, rank, rank_report);
        let persisted = engine.drive(now, event).into_iter().filter_map(|action| match action {
            Action::Persist(record) => Some(record),
            _ => None,
        });
        records.extend(persisted);
    };
    handle(&mut engine, at(10.0), 1, crashed());
    handle(&mut engine, at(10.0), 0, lost());
    // A rank dies again before the first step.
    handle(&mut engine, at(11.0), 1, crashed());
    handle(&mut engine, at(11.0), 0, lost());
    engine.drive(at(15.0), Event::Tick);
    all_ready(&mut engine, at(15.1), Some(40));
    all_report(&mut engine, at(15.3), &started_at(40));
    handle(&mut engine, at(15.4), 0, stepped(41));

    let replayed = Engine::replay(&spec(1), &records, at(20.0)).unwrap().status();

    let status = engine.status();
    assert_eq!((status.recoveries_total, replayed.recoveries_total), (2, 2));
    assert_eq!(replayed.recoveries, status.recoveries);
    assert_eq!(replayed.recoveries.back().unwrap().stepped_at, Some(at(15.4)));
}

#[test]
fn steps_are_lost_too_if_coordinator_and_ranks_are_lost_together() {
    let records = [opened(1, vec![placement(0, 0, 0)]), Record::Saved(commit(1, 30))];
    let lost = |reached| {
        let mut engine = replay(&records).after_step(Step(reached));
        attach(&mut engine, at(1.0), 0, 1, None);
        all_ready(&mut engine, at(1.1), None);
        all_report(&mut engine, at(1.2), &RankReport::Met);
        all_report(&mut engine, at(1.3), &started_at(30));
        lost_steps(&engine)
    };
    assert_eq!(lost(40), [10]);
    assert_eq!(lost(20), [0], "the journal knows a later step");
}

#[test]
fn a_pause_is_no_part_of_a_recovery() {
    let mut engine = after_40_steps();
    engine.drive(at(9.5), Event::Pause { reason: "lunch".to_owned() });
    report(&mut engine, at(10.0), 0, crashed());
    tick(&mut engine, at(11.0));
    all_ready(&mut engine, at(11.1), None);
    all_report(&mut engine, at(11.5), &RankReport::Met);
    all_report(&mut engine, at(12.0), &started_at(30));
    assert_eq!(total_ms(&engine), Some(2_000));

    engine.drive(at(60.0), Event::Resume);
    report(&mut engine, at(60.1), 0, stepped(31));

    assert_eq!((total_ms(&engine), lost_steps(&engine)), (Some(2_000), vec![10]));
}
