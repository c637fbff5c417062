//! Which nodes run the ranks of the next generation if there are more than the job may use: those that hold state.

use super::*;

/// A node that comes later in the order of names trains with two ranks, as many as the job may have; two others wait.
fn with_spares(max_ranks: u32) -> Engine {
    let mut engine = Engine::new(&spec_with(&["cluster.min_ranks=1"]), origin(), at(0.0));
    engine.policy.max_ranks = max_ranks;
    engine.drive(at(0.0), Event::Tick);
    attach(&mut engine, at(0.0), 7, max_ranks, None);
    all_ready(&mut engine, at(1.0), None);
    all_started(&mut engine, at(2.0));
    report(&mut engine, at(3.0), 0, stepped(5));
    attach(&mut engine, at(4.0), 1, 2, None);
    attach(&mut engine, at(4.0), 2, 2, None);
    assert_eq!(engine.status().phase, PhaseName::Training);
    engine
}

#[test]
fn a_spare_node_does_not_take_the_place_of_one_that_holds_the_state() {
    let mut engine = with_spares(2);

    report(&mut engine, at(10.0), 1, crashed());

    assert_eq!(placed(&engine), ["node7", "node7"]);
}

#[test]
fn a_leaving_node_that_alone_holds_the_state_runs_a_rank_until_others_have_it() {
    let mut engine = with_spares(2);

    depart(&mut engine, at(10.0), 7, Some(120.0));
    assert_eq!(placed(&engine), ["node1", "node7"]);

    report(&mut engine, at(11.0), 0, ready(0, None));
    report(&mut engine, at(11.0), 1, ready(1, Some(5)));
    all_started(&mut engine, at(12.0));
    assert_eq!(placed(&engine), ["node1", "node1"]);
    assert_eq!(engine.status().drain, None);
}

#[test]
fn a_job_of_one_rank_cannot_hand_its_state_over_and_saves_when_its_node_leaves() {
    let mut engine = with_spares(1);

    depart(&mut engine, at(10.0), 7, Some(120.0));

    assert_eq!(engine.status().drain.unwrap().reason, "node node7: spot notice");
}
