//! Tests of agents that attach under the name of a node that is attached already.

use super::*;

fn heartbeat(engine: &mut Engine, now: Time, number: u32) {
    let attachment = attachment(engine, number);
    let report = AgentReport::Heartbeat(AgentHeartbeat::default());
    engine.drive(now, Event::Reported { node: node(number), attachment, report });
}

fn refused(attachment: u64, retry: AgentRetry) -> Action {
    let reason = "node node0 is already attached; give this agent another name with --node-id";
    let attachment = Attachment(attachment);
    Action::Refuse { node: node(0), attachment, reason: reason.to_owned(), retry }
}

/// Whether the connection `attachment` of node 0 is closed because a newer one replaces it.
fn replaces(actions: &[Action], attachment: u64) -> bool {
    actions.iter().any(|action| {
        matches!(action, Action::Refuse { attachment: closed, reason, retry: AgentRetry::Never, .. }
            if *closed == Attachment(attachment) && reason.contains("attached again"))
    })
}

#[test]
fn a_second_agent_of_the_same_name_is_refused_while_the_first_is_alive() {
    let mut engine = training(&[1, 1]);
    heartbeat(&mut engine, at(59.0), 0);

    let actions = attach(&mut engine, at(60.0), 0, 1, None);

    assert_eq!(actions, [refused(3, AgentRetry::Restart)]);
    let late = Event::Detached { node: node(0), attachment: Attachment(3) };
    engine.drive(at(61.0), late);
    let status = engine.status();
    assert_eq!(status.phase, PhaseName::Training);
    assert!(status.nodes.iter().all(|node| node.attached));
    assert_eq!(attachment(&engine, 0), Attachment(1));
}

#[test]
fn an_agent_that_runs_ranks_of_another_node_is_refused() {
    let mut engine = training(&[1, 1]);
    heartbeat(&mut engine, at(59.0), 0);

    let actions = attach(&mut engine, at(60.0), 0, 1, running(1, &[(1, RankPhase::Training)]));

    assert_eq!(actions, [refused(3, AgentRetry::Reconnect)]);
}

#[test]
fn an_agent_replaces_its_own_broken_connection_at_once() {
    let mut engine = training(&[1, 1]);
    heartbeat(&mut engine, at(59.0), 0);

    let actions = attach(&mut engine, at(60.0), 0, 1, running(1, &[(0, RankPhase::Training)]));

    assert!(replaces(&actions, 1), "{actions:?}");
    assert_eq!(attachment(&engine, 0), Attachment(3));
    assert_eq!(engine.status().phase, PhaseName::Training);
}

#[test]
fn an_agent_that_missed_a_launch_replaces_its_broken_connection_once_that_is_silent() {
    let mut engine = training(&[1, 1]);
    heartbeat(&mut engine, at(59.0), 0);
    report(&mut engine, at(59.5), 1, crashed());
    assert_eq!(engine.lifecycle.generation, Generation(2));
    let missed = || running(1, &[(0, RankPhase::Training)]);

    assert_eq!(attach(&mut engine, at(60.0), 0, 1, missed()), [refused(3, AgentRetry::Reconnect)]);
    let actions = attach(&mut engine, at(64.0), 0, 1, missed());

    assert!(replaces(&actions, 1), "{actions:?}");
    let received: Vec<Rank> =
        launches(&actions).iter().flat_map(|launch| &launch.ranks).map(|(rank, _)| *rank).collect();
    assert_eq!(received, [Rank(0)]);
}

#[test]
fn a_restarted_agent_replaces_one_that_is_silent() {
    let mut engine = gathering(2);
    attach(&mut engine, at(1.0), 0, 1, None);

    assert_eq!(attach(&mut engine, at(2.0), 0, 1, None), [refused(2, AgentRetry::Restart)]);
    let actions = attach(&mut engine, at(6.0), 0, 1, None);

    assert!(replaces(&actions, 1), "{actions:?}");
    let late = Event::Detached { node: node(0), attachment: Attachment(1) };
    engine.drive(at(7.0), late);
    assert!(engine.status().nodes[0].attached);
}
