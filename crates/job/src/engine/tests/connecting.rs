//! Generations whose ranks do not connect.

use super::*;

/// Node 1 joined with one rank, which does not start; rank 0 on node 0 is ready with state. Since second 5.
fn waiting_for_a_newcomer() -> Engine {
    let mut engine = training(&[1]);
    attach(&mut engine, at(3.0), 1, 1, None);
    warm(&mut engine, at(5.0), 1, 0);
    assert_eq!(placed(&engine), ["node0", "node1"]);
    report(&mut engine, at(5.1), 0, ready(0, Some(70)));
    assert_eq!(engine.status().phase, PhaseName::Forming);
    engine
}

/// The same, and the new rank listens, but no rank reaches it.
fn meeting_a_newcomer() -> Engine {
    let mut engine = waiting_for_a_newcomer();
    report(&mut engine, at(5.2), 1, ready(1, None));
    assert_eq!(engine.status().phase, PhaseName::Meeting);
    engine
}

fn dismissed(actions: &[Action]) -> Vec<String> {
    let message = |action: &Action| match action {
        Action::Send {
            node,
            directive: Directive::Dismiss { outcome: Outcome::Failed { failure } },
            ..
        } => Some(format!("{node}: {failure}")),
        _ => None,
    };
    actions.iter().filter_map(message).collect()
}

/// The texts of quarantines.
fn quarantines(actions: &[Action]) -> Vec<String> {
    let message = |action: &Action| match action {
        Action::Publish(event) if event.kind == JobEventKind::NodeQuarantined => {
            Some(event.message.clone())
        }
        _ => None,
    };
    actions.iter().filter_map(message).collect()
}

#[test]
fn a_newcomer_that_does_not_start_in_time_is_left_out_for_a_minute_and_then_sent_away() {
    let mut engine = waiting_for_a_newcomer();
    let waits = "waiting for rank 1 on node node1 to start; 1 ready";
    assert_eq!(engine.status().reason, waits);

    let actions = engine.drive(at(25.0), Event::Tick);
    let problem = "its ranks did not connect to the others: rank 1 on node node1 did not connect to the others in 20 s; \
                   give with --host an address of this machine that the other nodes reach";
    assert_eq!(quarantines(&actions), [format!("node node1 is quarantined for 60 s: {problem}")]);
    assert_eq!((placed(&engine), dismissed(&actions)), (vec!["node0".to_owned()], vec![]));

    report(&mut engine, at(25.1), 0, ready(0, Some(70)));
    report(&mut engine, at(25.2), 0, started());
    tick(&mut engine, at(85.0));
    warm(&mut engine, at(86.0), 1, 0);
    assert_eq!(placed(&engine), ["node0", "node1"]);
    report(&mut engine, at(86.1), 0, ready(0, Some(80)));
    let actions = tick(&mut engine, at(106.0));
    assert_eq!(dismissed(&actions), [format!("node1: {problem}")]);
    let class = actions.iter().find_map(|action| match action {
        Action::Send {
            directive: Directive::Dismiss { outcome: Outcome::Failed { failure } },
            ..
        } => Some(failure.class),
        _ => None,
    });
    assert_eq!(class, Some(Class::BadInput), "its service must not start it again");
    assert_eq!(placed(&engine), ["node0"]);
}

#[test]
fn a_newcomer_that_nobody_reaches_is_left_out_unless_a_rank_with_state_is_silent() {
    let mut engine = meeting_a_newcomer();
    report(&mut engine, at(21.0), 0, lost());
    report(&mut engine, at(21.1), 1, lost());
    assert_eq!(placed(&engine), ["node0"]);

    let mut engine = meeting_a_newcomer();
    report(&mut engine, at(21.0), 1, lost());
    tick(&mut engine, at(21.6));
    assert_eq!(placed(&engine), ["node0", "node1"], "rank 0 may be the one that hangs");
}

#[test]
fn a_newcomer_that_is_ready_stays_if_another_one_is_late() {
    let mut engine = training(&[1]);
    for number in [1, 2] {
        attach(&mut engine, at(3.0), number, 1, None);
    }
    warm(&mut engine, at(4.0), 1, 0);
    assert_eq!(placed(&engine), ["node0", "node1", "node2"]);
    report(&mut engine, at(5.0), 0, ready(0, Some(70)));
    report(&mut engine, at(5.0), 1, ready(1, None));
    let actions = engine.drive(at(24.0), Event::Tick);
    assert_eq!(quarantines(&actions).len(), 1, "{actions:?}");
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

#[test]
fn a_node_whose_rank_held_state_is_no_newcomer() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;
    report(&mut engine, at(10.0), 1, crashed());
    report(&mut engine, at(10.1), 0, ready(0, Some(70)));
    let actions = engine.drive(at(30.0), Event::Tick);
    assert_eq!(quarantines(&actions), Vec::<String>::new());
    assert_eq!(engine.status().generation, Generation(3));
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

#[test]
fn a_newcomer_is_not_left_out_because_the_coordinator_restarted() {
    let mut engine = waiting_for_a_newcomer();
    engine.lifecycle.is_reattached = true;
    tick(&mut engine, at(25.0));
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

#[test]
fn a_newcomer_stays_if_a_process_has_died_or_the_others_are_not_enough() {
    let mut engine = meeting_a_newcomer();
    report(&mut engine, at(6.0), 1, lost());
    report(&mut engine, at(6.0), 0, crashed());
    assert_eq!(placed(&engine), ["node0", "node1"]);

    let mut engine = waiting_for_a_newcomer();
    engine.policy.min_ranks = 2;
    tick(&mut engine, at(25.0));
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

#[test]
fn ranks_that_do_not_connect_at_the_start_are_named_with_their_nodes() {
    let mut engine = forming(&[1, 1]);
    engine.policy.restart_limit = 0;
    report(&mut engine, at(1.0), 0, ready(0, None));
    tick(&mut engine, at(20.0));
    let message = failure_of(&engine).message;
    assert!(
        message.ends_with("rank 1 on node node1 did not connect to the others in 20 s"),
        "{message}"
    );
}

#[test]
fn a_drain_waits_five_seconds_for_ranks_to_connect_and_then_saves_with_those_that_hold_the_state() {
    for mut engine in [waiting_for_a_newcomer(), meeting_a_newcomer()] {
        let since = engine.lifecycle.since;
        drain(&mut engine, at(6.0));
        let due = since.after(Duration::from_secs(5));
        assert_eq!(engine.deadline(), Some(due));

        tick(&mut engine, due);

        assert_eq!(placed(&engine), ["node0"]);
        report(&mut engine, at(11.0), 0, ready(0, Some(70)));
        report(&mut engine, at(11.1), 0, started());
        assert_eq!(engine.status().phase, PhaseName::Draining);
    }
}

#[test]
fn a_drain_that_comes_after_those_seconds_breaks_off_at_once() {
    let mut engine = waiting_for_a_newcomer();
    drain(&mut engine, at(20.0));
    assert_eq!(placed(&engine), ["node0"]);
}

#[test]
fn a_leaving_node_that_cannot_hand_its_state_over_saves_it_after_half_of_its_time() {
    let mut engine = waiting_for_a_newcomer();
    depart(&mut engine, at(6.0), 0, Some(12.0));
    assert_eq!((engine.status().drain, engine.deadline()), (None, Some(at(12.0))));

    tick(&mut engine, at(12.0));

    assert_eq!(placed(&engine), ["node0"]);
    assert_eq!(engine.status().drain.map(|drain| drain.until), Some(at(18.0)));
}

#[test]
fn a_leaving_node_without_state_is_released_while_the_others_connect() {
    let mut engine = meeting_a_newcomer();
    let actions = depart(&mut engine, at(6.0), 1, None);
    assert_eq!(placed(&engine), ["node0"]);
    let released = send(1, 2, Directive::Release { reason: "spot notice".to_owned() });
    assert_eq!(actions.last(), Some(&released));
}

#[test]
fn nothing_is_broken_off_while_a_node_with_state_is_away() {
    let mut engine = waiting_for_a_newcomer();
    drain(&mut engine, at(6.0));
    detach(&mut engine, at(9.0), 0);
    tick(&mut engine, at(12.0));
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

#[test]
fn failures_before_the_last_save_do_not_end_it() {
    let mut engine = training(&[1, 1]);
    engine.policy.restart_limit = 1;
    engine.lifecycle.failures = 1;
    let refused = Failure { class: Class::BadInput, message: "bad file".to_owned() };
    report(&mut engine, at(10.0), 1, RankReport::Exited(refused));
    assert_eq!((engine.outcome(), placed(&engine)), (None, vec!["node0".to_owned()]));
}

#[test]
fn a_leaving_node_hands_its_state_over_if_the_rank_that_has_it_too_hangs() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;
    depart(&mut engine, at(10.0), 0, Some(40.0));
    assert_eq!(placed(&engine), ["node1"], "its rank does not answer");
    let half = Some(at(30.0));
    assert_eq!((engine.status().generation, engine.deadline()), (Generation(2), half));

    let actions = tick(&mut engine, at(30.0));

    assert_eq!(placed(&engine), ["node0", "node1"]);
    let replaced: Vec<_> =
        launches(&actions).into_iter().flat_map(|launch| launch.replace).collect();
    assert_eq!(replaced, [LocalRank(0)], "of node 1");
    report(&mut engine, at(30.1), 0, ready(0, Some(70)));
    assert_eq!(engine.deadline(), Some(at(40.0)), "its process may take its time");
    report(&mut engine, at(38.0), 1, ready(1, None));
    all_started(&mut engine, at(38.1));
    all_ready(&mut engine, at(38.2), Some(70));
    let released = send(0, 1, Directive::Release { reason: "spot notice".to_owned() });
    assert_eq!(report(&mut engine, at(38.3), 0, started()), [released]);
}

#[test]
fn a_leaving_node_saves_alone_if_the_process_that_replaces_a_hung_one_does_not_start() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;
    depart(&mut engine, at(10.0), 0, Some(40.0));
    tick(&mut engine, at(30.0));
    report(&mut engine, at(30.1), 0, ready(0, Some(70)));

    tick(&mut engine, at(40.0));

    assert_eq!(placed(&engine), ["node0"]);
    assert_eq!(engine.status().drain.map(|drain| drain.until), Some(at(50.0)));
}

#[test]
fn a_drain_leaves_out_a_rank_with_state_that_does_not_answer_in_half_of_its_time() {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(10.0), 0, lost());
    report(&mut engine, at(10.0), 1, lost());
    tick(&mut engine, at(10.6));
    report(&mut engine, at(10.7), 0, ready(0, Some(70)));
    engine.policy.drain = Duration::from_secs(8);
    drain(&mut engine, at(11.0));
    assert_eq!(engine.deadline(), Some(at(15.0)));

    tick(&mut engine, at(15.0));

    report(&mut engine, at(15.1), 0, ready(0, Some(70)));
    report(&mut engine, at(15.2), 0, started());
    assert_eq!(
        (placed(&engine), engine.status().phase),
        (vec!["node0".to_owned()], PhaseName::Draining)
    );
}

#[test]
fn a_newcomer_that_is_slow_is_not_broken_off_because_another_node_leaves() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;
    attach(&mut engine, at(3.0), 2, 1, None);
    warm(&mut engine, at(5.0), 2, 0);
    assert_eq!(placed(&engine), ["node0", "node1", "node2"]);
    report(&mut engine, at(5.1), 0, ready(0, Some(70)));
    report(&mut engine, at(5.1), 1, ready(1, Some(70)));
    depart(&mut engine, at(6.0), 0, Some(8.0));
    tick(&mut engine, at(13.0));
    assert_eq!(placed(&engine), ["node0", "node1", "node2"]);
}

#[test]
fn newcomers_whose_ranks_fail_do_not_end_the_job_of_the_others() {
    let mut engine = training(&[1]);
    engine.policy.restart_limit = 1;
    for number in 1..4 {
        attach(&mut engine, at(3.0), number, 1, None);
        warm(&mut engine, at(4.0), number, 0);
    }
    let mut now = 5.0;
    while placed(&engine) != ["node0"] {
        let failing = placed(&engine).iter().position(|node| node != "node0").unwrap() as u32;
        report(&mut engine, at(now), failing, crashed());
        now += 0.1;
        assert!(now < 20.0 && engine.outcome().is_none(), "{:?}", engine.status().reason);
        tick(&mut engine, at(now));
    }
    assert_eq!(engine.lifecycle.failures, 0);
}

#[test]
fn a_node_whose_processes_never_get_ready_is_quarantined_like_one_whose_ranks_die() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 1;
    report(&mut engine, at(9.0), 0, stepped(70));
    report(&mut engine, at(10.0), 1, crashed());
    report(&mut engine, at(10.1), 0, ready(0, Some(70)));
    // Its new process hangs.
    let actions = engine.drive(at(30.0), Event::Tick);
    assert_eq!(quarantines(&actions).len(), 1, "{actions:?}");
    let until = engine.deadline().unwrap();
    tick(&mut engine, until);
    assert_eq!(placed(&engine), ["node0"]);
}

#[test]
fn ranks_that_have_connected_may_restore_their_state_for_a_long_time() {
    let mut engine = meeting(&[1, 1]);
    for rank in [0, 1] {
        report(&mut engine, at(2.0), rank, RankReport::Met);
    }
    let later = engine.deadline().unwrap();
    assert!(later >= at(900.0), "{later:?}");
    engine.drive(at(2.0 + 900.0), Event::Tick);
    let cause = &causes(&engine)[0];
    assert!(cause.contains("have not restored their state in 900 s"), "{cause}");
}

#[test]
fn nodes_whose_ranks_restore_for_too_long_are_not_asked_for_another_address() {
    let mut engine = meeting_a_newcomer();
    engine.policy.min_ranks = 1;
    for rank in [0, 1] {
        report(&mut engine, at(5.3), rank, RankReport::Met);
    }
    let actions = engine.drive(at(5.3 + 900.0), Event::Tick);
    assert_eq!((quarantines(&actions), dismissed(&actions)), (vec![], vec![]));
    let cause = causes(&engine).pop().unwrap();
    assert!(cause.ends_with("have not restored their state in 900 s"), "{cause}");
    assert_eq!(engine.nodes.get(&node(1)).unwrap().failures, 1, "it brings no state");

    let mut engine = meeting_a_newcomer();
    for rank in [0, 1] {
        report(&mut engine, at(5.3), rank, RankReport::Met);
    }
    report(&mut engine, at(21.0), 0, lost());
    let last = rank_event(&engine, Generation(2), 1, lost());
    let actions = engine.drive(at(21.1), last);
    let problem =
        "node node1 is quarantined for 60 s: its ranks did not get the state of the others: ";
    assert!(quarantines(&actions)[0].starts_with(problem), "{actions:?}");
    assert_eq!(placed(&engine), ["node0"]);

    // Nobody has the state: one rank hangs, and the others wait for it.
    let mut engine = meeting(&[1, 1]);
    engine.policy.min_ranks = 1;
    for rank in [0, 1] {
        report(&mut engine, at(2.0), rank, RankReport::Met);
    }
    let actions = engine.drive(at(2.0 + 900.0), Event::Tick);
    assert_eq!((quarantines(&actions), dismissed(&actions)), (vec![], vec![]));
    assert!([0, 1].iter().all(|&number| engine.nodes.get(&node(number)).unwrap().failures == 0));
}

/// Reports that a rank could not connect to others; returns all actions.
fn unreached(engine: &mut Engine, now: Time, rank: u32, others: &[u32]) -> Vec<Action> {
    let unreached = others.iter().copied().map(Rank).collect();
    let lost = RankReport::Lost { detail: "connect: timed out".to_owned(), unreached };
    let event = rank_event(engine, engine.lifecycle.generation, rank, lost);
    engine.drive(now, event)
}

/// Nodes with one rank each that hold the state, lost their connections while they trained, and now try to meet.
fn meeting_again(nodes: usize) -> Engine {
    let mut engine = training(&vec![1; nodes]);
    engine.policy.min_ranks = 1;
    for rank in 0..nodes as u32 {
        report(&mut engine, at(10.0), rank, lost());
    }
    for rank in 0..nodes as u32 {
        report(&mut engine, at(10.5), rank, ready(rank, Some(70)));
    }
    assert_eq!(engine.status().phase, PhaseName::Meeting);
    engine
}

/// A network that is cut between nodes which all reach the coordinator.
#[test]
fn a_node_that_the_others_do_not_reach_is_left_out_although_it_holds_the_state() {
    // All reports, and those of a host whose network is unreachable at once, before the others know.
    let cut: [&[(u32, &[u32])]; 3] =
        [&[(0, &[1]), (1, &[0, 2]), (2, &[1])], &[(2, &[1]), (1, &[0])], &[(1, &[0, 2])]];
    for reports in cut {
        let mut engine = meeting_again(3);
        let mut actions = Vec::new();
        for (rank, others) in reports {
            actions.extend(unreached(&mut engine, at(20.0), *rank, others));
        }
        actions.extend(engine.drive(at(22.0), Event::Tick));
        let [text] = &quarantines(&actions)[..] else { panic!("{actions:?}") };
        assert!(text.starts_with("node node1 is quarantined for 60 s: its ranks and those of "));
        assert!(text.contains("do not reach each other; check the network between them"), "{text}");
        assert_eq!(placed(&engine), ["node0", "node2"], "{reports:?}");
        for (rank, node) in [(0, 0), (1, 2)] {
            report(&mut engine, at(22.5), rank, ready(node, Some(70)));
        }
        for rank in [0, 1] {
            report(&mut engine, at(23.0), rank, started());
        }
        assert_eq!(engine.status().phase, PhaseName::Training);
    }
}

/// Large packets to and from a node vanish, and small ones arrive.
#[test]
fn a_node_that_others_wait_for_in_vain_is_left_out_unless_a_step_was_made_with_it() {
    let wait_in_vain = |engine: &mut Engine, now: f64| {
        let mut actions = unreached(engine, at(now), 0, &[1]);
        actions.extend(unreached(engine, at(now), 1, &[0, 2]));
        actions.extend(engine.drive(at(now + 9.0), Event::Tick));
        quarantines(&actions)
    };
    for has_stepped in [false, true] {
        let mut engine = meeting_again(3);
        all_started(&mut engine, at(11.0));
        // One step may be slow.
        assert_eq!((wait_in_vain(&mut engine, 20.0), placed(&engine).len()), (vec![], 3));
        for rank in 0..3 {
            report(&mut engine, at(29.0), rank, ready(rank, Some(70)));
        }
        all_started(&mut engine, at(29.5));
        if has_stepped {
            report(&mut engine, at(30.0), 0, stepped(71));
        }
        let left_out = wait_in_vain(&mut engine, 39.0);
        if has_stepped {
            assert_eq!((left_out, placed(&engine).len()), (vec![], 3));
        } else {
            assert!(left_out[0].contains("large packets (MTU)"), "{left_out:?}");
            tick(&mut engine, at(80.0));
            assert_eq!(placed(&engine), ["node0", "node2"]);
        }
    }
}

/// In a ring, a rank may wait for one that itself waits for the new node, and its report may be the first or the only one.
#[test]
fn of_nodes_that_wait_for_each_other_one_that_joined_since_the_last_step_is_left_out() {
    // The ranks that report, and for which they wait; the ranks that the job needs; who is left out. Nodes 2 and 3 are new.
    for (reports, min_ranks, expected) in [
        (&[(1, 0), (0, 2)][..], 1, &["node2"][..]),
        (&[(1, 0), (0, 3), (3, 2)], 1, &["node3"]),
        (&[(1, 0), (0, 3), (3, 2)], 3, &["node3"]),
        (&[(3, 0), (3, 1), (1, 0)], 3, &["node3"]),
        // Nobody names a new one.
        (&[(1, 0)], 1, &["node3", "node2"]),
        (&[(1, 0)], 3, &["node3"]),
        // All wait for an old one.
        (&[(2, 0), (3, 0), (1, 0)], 1, &["node0"]),
    ] {
        let mut engine = training(&[1, 1]);
        engine.policy.min_ranks = min_ranks;
        report(&mut engine, at(2.5), 0, stepped(71));
        for new in [2, 3] {
            attach(&mut engine, at(3.0), new, 1, None);
        }
        for new in [2, 3] {
            warm(&mut engine, at(5.0), new, 0);
        }
        assert_eq!(placed(&engine), ["node0", "node1", "node2", "node3"]);
        let mut actions = Vec::new();
        for (attempt, now) in [6.0, 30.0].into_iter().enumerate() {
            for rank in 0..4 {
                let step = (rank < 2 || attempt > 0).then_some(71);
                report(&mut engine, at(now), rank, ready(rank, step));
            }
            all_started(&mut engine, at(now + 1.0));
            for (rank, other) in reports {
                actions.extend(unreached(&mut engine, at(now + 5.0), *rank, &[*other]));
            }
            actions.extend(engine.drive(at(now + 14.0), Event::Tick));
            assert_eq!(quarantines(&actions).is_empty(), attempt == 0, "{actions:?}");
        }
        let texts = quarantines(&actions);
        let start = |node: &&str| format!("node {node} is quarantined for 60 s: its ranks and ");
        let are_those = texts.len() == expected.len()
            && texts.iter().zip(expected).all(|(text, node)| text.starts_with(&start(node)));
        assert!(are_those, "{reports:?} {min_ranks}: {texts:?}");
    }
}

#[test]
fn a_node_that_is_still_not_reached_after_its_quarantine_gets_a_longer_one() {
    let mut engine = meeting_again(3);
    for (rank, others) in [(0, &[1][..]), (1, &[0, 2]), (2, &[1])] {
        unreached(&mut engine, at(20.0), rank, others);
    }
    for (rank, node) in [(0, 0), (1, 2)] {
        report(&mut engine, at(20.5), rank, ready(node, Some(70)));
    }
    all_started(&mut engine, at(21.0));
    tick(&mut engine, at(80.5));
    warm(&mut engine, at(81.0), 1, 0);
    assert_eq!(placed(&engine).len(), 3);
    let rank_of = |engine: &Engine, node: &str| {
        placed(engine).iter().position(|placed| placed == node).unwrap() as u32
    };
    let (cut, held) = (rank_of(&engine, "node1"), ["node0", "node2"]);
    for node in held {
        let rank = rank_of(&engine, node);
        report(&mut engine, at(82.0), rank, ready(rank, Some(90)));
    }
    report(&mut engine, at(82.0), cut, ready(cut, None));
    let mut actions = unreached(&mut engine, at(90.0), cut, &[0, 1, 2]);
    for node in held {
        let rank = rank_of(&engine, node);
        actions.extend(unreached(&mut engine, at(90.0), rank, &[cut]));
    }
    let [text] = &quarantines(&actions)[..] else { panic!("{actions:?}") };
    assert!(text.starts_with("node node1 is quarantined for 120 s: "), "{text}");
    assert_eq!(placed(&engine), held);
}

#[test]
fn all_nodes_that_reach_nobody_are_left_out_in_one_generation() {
    const NODES: u32 = 8;
    let mut engine = meeting_again(NODES as usize);
    let mut actions = Vec::new();
    for rank in 0..NODES {
        // Each third node reaches nobody.
        let others: Vec<u32> =
            (0..NODES).filter(|other| (rank % 3 == 0) || other % 3 == 0).collect();
        actions.extend(unreached(&mut engine, at(20.0), rank, &others));
    }
    assert_eq!(quarantines(&actions).len(), 3, "{actions:?}");
    assert_eq!(placed(&engine), ["node1", "node2", "node4", "node5", "node7"]);
}

#[test]
fn of_two_halves_that_do_not_reach_each_other_one_trains_on() {
    let mut engine = meeting_again(4);
    let mut actions = Vec::new();
    for (rank, others) in [(0, [2, 3]), (1, [2, 3]), (2, [0, 1]), (3, [0, 1])] {
        actions.extend(unreached(&mut engine, at(20.0), rank, &others));
    }
    assert_eq!(quarantines(&actions).len(), 2, "{actions:?}");
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

#[test]
fn no_node_is_left_out_whose_ranks_the_job_needs_or_after_a_death() {
    let mut engine = meeting_again(2);
    engine.policy.min_ranks = 2;
    unreached(&mut engine, at(20.0), 0, &[1]);
    let actions = unreached(&mut engine, at(20.0), 1, &[0]);
    assert_eq!(quarantines(&actions), Vec::<String>::new());

    let mut engine = meeting_again(2);
    unreached(&mut engine, at(20.0), 0, &[1]);
    let died = rank_event(&engine, engine.lifecycle.generation, 1, crashed());
    let actions = engine.drive(at(20.1), died);
    assert_eq!(quarantines(&actions), Vec::<String>::new(), "rank 1 was dead");
    assert_eq!(placed(&engine), ["node0", "node1"]);
}

#[test]
fn a_drain_saves_on_one_of_the_nodes_that_do_not_reach_each_other() {
    let drained = |engine: &mut Engine| {
        drain(engine, at(11.0));
        engine.status().drain.unwrap().until
    };
    // Also if the job needs both to train.
    let mut engine = meeting_again(2);
    engine.policy.min_ranks = 2;
    drained(&mut engine);
    unreached(&mut engine, at(12.0), 0, &[1]);
    unreached(&mut engine, at(12.0), 1, &[0]);
    assert_eq!(placed(&engine), ["node0"]);

    // Nobody reports, and half of the time is over; rank 1 is a step ahead.
    let mut engine = training(&[1, 1]);
    engine.policy.rendezvous = Duration::from_secs(300);
    for rank in [0, 1] {
        report(&mut engine, at(10.0), rank, lost());
    }
    report(&mut engine, at(10.5), 0, ready(0, Some(70)));
    report(&mut engine, at(10.5), 1, ready(1, Some(71)));
    let until = drained(&mut engine);
    let half = Time::since(until, at(11.0)) / 2;
    tick(&mut engine, at(10.9).after(half));
    assert_eq!(placed(&engine).len(), 2);
    tick(&mut engine, at(11.1).after(half));
    assert_eq!(placed(&engine), ["node1"]);
}
