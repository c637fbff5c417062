//! Cases at the edge of a rule, where it applies no more or not yet.

use super::*;

// ---- drains ----

#[test]
fn only_the_checkpoint_of_the_step_at_which_ranks_stop_completes_a_drain() {
    let mut engine = training(&[1]);
    drain(&mut engine, at(10.0));
    report(&mut engine, at(11.0), 0, RankReport::Stopping { step: Step(7) });

    report(&mut engine, at(12.0), 0, RankReport::Saved(commit(1, 5)));
    assert_eq!(engine.status().drain.unwrap().durable_at, None, "an earlier checkpoint");

    report(&mut engine, at(13.0), 0, RankReport::Saved(commit(1, 7)));
    assert_eq!(engine.status().drain.unwrap().durable_at, Some(at(13.0)));
}

#[test]
fn a_second_drain_is_published_only_if_its_deadline_is_earlier() {
    let mut engine = training(&[1]);
    drain(&mut engine, at(10.0));
    let mut texts = |seconds_left| {
        let actions = depart(&mut engine, at(20.0), 0, Some(seconds_left));
        actions
            .into_iter()
            .filter_map(|action| match action {
                Action::Publish(published) => Some(published.message),
                _ => None,
            })
            .collect::<Vec<_>>()
    };

    assert_eq!(texts(90.0), [""; 0], "the same deadline");
    assert_eq!(texts(89.0), ["node node0: spot notice; 89 s are left to save and stop"]);
    assert_eq!(texts(89.0), [""; 0]);
}

#[test]
fn a_rank_that_dies_again_during_a_drain_is_restarted_without_a_backoff() {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(10.0), 1, crashed());
    drain(&mut engine, at(10.5));

    assert!(opens(&report(&mut engine, at(11.0), 1, crashed()), 3));
}

// ---- nodes ----

#[test]
fn a_node_without_ranks_is_removed_when_it_disconnects() {
    let mut waiting = gathering(2);
    attach(&mut waiting, at(1.0), 0, 1, None);
    detach(&mut waiting, at(2.0), 0);
    assert_eq!(waiting.status().nodes, []);

    let mut over = training(&[1]);
    over.drive(at(9.0), Event::Stop);
    detach(&mut over, at(10.0), 0);
    assert_eq!(over.status().nodes, []);
    assert_eq!(over.deadline(), None);
}

#[test]
fn a_node_that_leaves_before_it_is_ready_does_not_take_part() {
    let mut engine = training(&[1]);
    attach(&mut engine, at(3.0), 1, 1, None);
    depart(&mut engine, at(4.0), 1, None);

    assert_eq!(without_events(warm(&mut engine, at(5.0), 1, 0)), []);

    assert_eq!(placed(&engine), ["node0"]);
}

/// Rank 2, on the node with two ranks, has died twice.
fn failing_node_with_a_rank_that_lives(others_live: bool) -> Engine {
    let mut engine = training(&[1, 2]);
    engine.policy.min_ranks = 1;
    report(&mut engine, at(10.0), 2, crashed());
    all_ready(&mut engine, at(11.0), Some(0));
    all_started(&mut engine, at(12.0));
    if !others_live {
        // Its generation ends only once node 1 is back.
        detach(&mut engine, at(12.5), 1);
        report(&mut engine, at(12.6), 0, crashed());
        let held = running(2, &[(1, RankPhase::Training)]);
        attach(&mut engine, at(13.0), 1, 2, held);
    } else {
        report(&mut engine, at(13.0), 2, crashed());
    }
    if engine.status().phase == PhaseName::Backoff {
        let until = engine.deadline().unwrap();
        tick(&mut engine, until);
    }
    engine
}

#[test]
fn a_failing_node_with_a_rank_that_lives_is_quarantined_if_others_hold_the_state() {
    assert_eq!(placed(&failing_node_with_a_rank_that_lives(true)), ["node0"]);
}

#[test]
fn ranks_that_live_on_a_quarantined_node_end_once_others_hold_the_state_and_it_joins_again() {
    let mut engine = failing_node_with_a_rank_that_lives(true);
    all_ready(&mut engine, at(16.0), Some(0));
    all_started(&mut engine, at(17.0));
    let end = engine.deadline().unwrap();
    let actions = tick(&mut engine, end);
    let local_ranks = vec![LocalRank(0), LocalRank(1)];
    let ends = Launch { replace: local_ranks.clone(), ..launch(3, 1, &[]) };
    let expected = [Directive::Launch(ends), Directive::Warm { local_ranks }];
    assert_eq!(actions, expected.map(|directive| send(1, 2, directive)));

    warm(&mut engine, end, 1, 0);
    warm(&mut engine, end, 1, 1);
    assert_eq!(placed(&engine), ["node0", "node1", "node1"]);
}

#[test]
fn a_failing_node_that_holds_the_only_state_is_not_quarantined() {
    let engine = failing_node_with_a_rank_that_lives(false);
    assert_eq!(placed(&engine), ["node0", "node1", "node1"]);
}

// ---- losses ----

#[test]
fn of_two_deaths_the_first_is_the_cause() {
    let mut engine = training(&[1, 1, 1]);
    detach(&mut engine, at(9.0), 2);
    report(&mut engine, at(10.0), 0, crashed());
    report(&mut engine, at(10.5), 1, crashed());

    attach(&mut engine, at(11.0), 2, 1, running(1, &[(2, RankPhase::Waiting)]));

    assert_eq!(causes(&engine), ["rank 0: killed"]);
}

#[test]
fn a_rank_that_started_over_while_its_node_was_disconnected_counts_as_dead() {
    let mut engine = training(&[1, 1]);
    detach(&mut engine, at(10.0), 1);

    attach(&mut engine, at(11.0), 1, 1, running(1, &[(1, RankPhase::Joining)]));

    assert_eq!(causes(&engine), ["rank 1: rank 1 ended while node node1 was disconnected"]);
}

#[test]
fn a_second_hello_over_one_connection_only_counts_as_stale() {
    let mut engine = training(&[1]);
    let hello = Hello::new(node(0), 1, None);
    agent_report(&mut engine, at(10.0), 0, AgentReport::Hello(hello));
    assert_eq!(engine.status().stale_messages, 1);
    assert_eq!(engine.status().phase, PhaseName::Training);
}

#[test]
fn a_node_that_reattaches_without_ranks_while_they_start_starts_them_again() {
    let mut engine = forming(&[1, 1]);
    report(&mut engine, at(1.0), 1, ready(1, None));
    detach(&mut engine, at(2.0), 1);
    attach(&mut engine, at(3.0), 1, 1, None);

    // Its earlier process is gone, so rank 0 alone does not complete the generation.
    assert_eq!(report(&mut engine, at(4.0), 0, ready(0, None)), []);
    assert_eq!(engine.status().phase, PhaseName::Forming);
    report(&mut engine, at(5.0), 1, ready(1, None));
    assert_eq!(engine.status().phase, PhaseName::Meeting);
}

#[test]
fn progress_forgives_failures_although_all_nodes_had_some() {
    let mut engine = training(&[1]);
    for failure in 0..8 {
        let now = 10.0 * f64::from(failure + 1);
        report(&mut engine, at(now), 0, crashed());
        if engine.status().phase == PhaseName::Backoff {
            let until = engine.deadline().unwrap();
            tick(&mut engine, until);
        }
        all_ready(&mut engine, at(now + 2.0), None);
        all_started(&mut engine, at(now + 3.0));
        report(&mut engine, at(now + 4.0), 0, stepped(u64::try_from(failure).unwrap() + 1));
        assert_eq!(engine.nodes[&node(0)].failures, 0);
    }
    assert_eq!(engine.outcome(), None);
}
