//! Heartbeats, which every process sends once a second.

use super::*;
use crate::message::{HostStats, MachineStats};

fn heartbeat(
    engine: &mut Engine,
    now: Time,
    number: u64,
    stats: Option<MachineStats>,
) -> Vec<Action> {
    let (attachment, round_trip) = (attachment(engine, 0), Some(Duration::from_millis(3)));
    let report = AgentReport::Heartbeat(AgentHeartbeat { number, round_trip, stats });
    engine.handle(now, Event::Reported { node: node(0), attachment, report })
}

#[test]
fn a_heartbeat_is_acknowledged_and_updates_the_machine_statistics() {
    let mut engine = training(&[1]);
    let stats =
        MachineStats { host: HostStats { cpus: 96, ..HostStats::default() }, gpus: Vec::new() };
    let actions = heartbeat(&mut engine, at(10.0), 7, Some(stats.clone()));
    assert_eq!(actions, [send(0, 1, Directive::HeartbeatAck { number: 7 })]);
    heartbeat(&mut engine, at(11.0), 8, None);
    let status = engine.status().nodes.remove(0);
    assert_eq!(status.stats.as_deref(), Some(&stats), "the last reported statistics");
    assert_eq!(
        (status.heartbeat_at, status.round_trip),
        (Some(at(11.0)), Some(Duration::from_millis(3)))
    );
}

#[test]
fn heartbeats_persist_the_meter_while_no_other_report_arrives() {
    let mut engine = training(&[1]);
    let persisted = |actions: Vec<Action>| {
        actions.contains(&Action::Persist(Record::Metered(Duration::from_secs(70))))
    };
    assert!(!persisted(heartbeat(&mut engine, at(30.0), 1, None)));
    assert!(persisted(heartbeat(&mut engine, at(70.0), 2, None)));
}

#[test]
fn a_heartbeat_triggers_timeouts_that_have_passed() {
    let mut engine = training(&[1, 1]);
    detach(&mut engine, at(10.0), 1);
    assert_eq!(engine.deadline(), Some(at(15.0)), "node_grace_seconds later");
    heartbeat(&mut engine, at(14.9), 1, None);
    assert_eq!(engine.status().phase, PhaseName::Training);
    heartbeat(&mut engine, at(15.0), 2, None);
    assert_ne!(engine.status().phase, PhaseName::Training);
}

#[test]
fn metric_points_are_added_once_from_the_reports_of_rank_0() {
    let mut engine = meeting(&[1, 1]);
    let points = |actions: Vec<Action>| {
        let point = |action| match action {
            Action::AddPoint(point) => Some(point),
            _ => None,
        };
        actions.into_iter().filter_map(point).collect::<Vec<_>>()
    };
    let progress = Progress { step: Step(7), ..Progress::default() };
    let started = RankReport::Started { source: StateSource::Fresh, progress };
    let mut points_of = |rank, rank_report: RankReport| {
        let event = rank_event(&engine, Generation(1), rank, rank_report);
        points(engine.handle(at(5.0), event))
    };
    assert_eq!(points_of(0, started.clone()), [MetricPoint::BeganAt(Step(7))]);
    assert_eq!(points_of(1, started), []);
    let rank_report = StepReport { step: Step(8), ..StepReport::default() };
    assert_eq!(
        points_of(0, RankReport::Stepped(rank_report.clone())),
        [MetricPoint::Step(rank_report)]
    );
}
