//! Heartbeats, which every process sends once a second.

use super::*;
use crate::engine::rank_heartbeats::RankHeartbeats;
use crate::message::{HostStats, MachineStats};

fn heartbeat(
    engine: &mut Engine,
    now: Time,
    number: u64,
    stats: Option<MachineStats>,
) -> Vec<Action> {
    let (attachment, round_trip) = (attachment(engine, 0), Some(Duration::from_millis(3)));
    let report = AgentReport::Heartbeat(AgentHeartbeat { number, round_trip, stats });
    engine.drive(now, Event::Reported { node: node(0), attachment, report })
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
    let started = RankReport::Started { source: StateSource::fresh(), progress };
    let mut points_of = |rank, rank_report: RankReport| {
        let event = rank_event(&engine, Generation(1), rank, rank_report);
        points(engine.drive(at(5.0), event))
    };
    assert_eq!(points_of(0, started.clone()), [MetricPoint::BeganAt(Step(7))]);
    assert_eq!(points_of(1, started), []);
    let rank_report = StepReport { step: Step(8), ..StepReport::default() };
    assert_eq!(
        points_of(0, RankReport::Stepped(rank_report.clone())),
        [MetricPoint::Step(rank_report)]
    );
}

#[test]
fn with_log_every_only_steps_that_are_multiples_of_it_become_points() {
    let mut engine = training(&[1]);
    engine.spec = Arc::new(spec_with(&["train.log_every=25"]));
    let points: Vec<u64> = (1..=60)
        .filter(|step| {
            let event = rank_event(&engine, Generation(1), 0, stepped(*step));
            let actions = engine.drive(at(5.0), event);
            assert_eq!(engine.status().latest.map(|latest| latest.step), Some(Step(*step)));
            actions.iter().any(|action| matches!(action, Action::AddPoint(_)))
        })
        .collect();
    assert_eq!(points, [25, 50]);
}

// ---- slow ranks ----

fn own_time(own_step_seconds: f64) -> RankHeartbeat {
    RankHeartbeat { own_step_seconds, ..RankHeartbeat::default() }
}

#[test]
fn the_median_is_reused_for_half_a_second() {
    let mut ranks = RankHeartbeats::new(2);
    ranks.record(at(0.0), Rank(0), own_time(1.0));
    // The first heartbeat alone gave no median.
    for _ in 0..10 {
        assert_eq!(ranks.record(at(0.4), Rank(1), own_time(5.0)), None);
    }
    for _ in 0..9 {
        assert_eq!(ranks.record(at(0.5), Rank(1), own_time(5.0)), None);
    }
    assert_eq!(ranks.record(at(0.5), Rank(1), own_time(5.0)), Some(5.0));
    assert_eq!(ranks.record(at(0.5), Rank(1), own_time(5.0)), None, "published once");
}

#[test]
fn the_speed_of_a_dead_rank_is_forgotten() {
    let mut ranks = RankHeartbeats::new(2);
    ranks.record(at(0.0), Rank(0), own_time(1.0));
    ranks.record(at(0.0), Rank(1), own_time(5.0));
    ranks.remove(Rank(1));
    assert!(ranks.latest(Rank(0)).is_some() && ranks.latest(Rank(1)).is_none());
    assert_eq!(ranks.median(), None, "a single rank is not compared");
}

#[test]
fn ranks_without_a_step_count_neither_for_the_median_nor_as_slow() {
    let mut ranks = RankHeartbeats::new(4);
    for (rank, seconds) in [(0, 0.0), (1, 0.0), (2, 2.0), (3, 3.0)] {
        ranks.record(at(1.0), Rank(rank), own_time(seconds));
    }
    let median = ranks.median();
    assert_eq!(median, Some(2.0));
    let slowdown = |rank| ranks.latest(Rank(rank)).unwrap().slowdown(median);
    assert_eq!((slowdown(0), slowdown(3)), (None, Some(1.5)));
}

#[test]
fn a_rank_that_was_fast_once_is_counted_as_slow_from_the_start() {
    let mut ranks = RankHeartbeats::new(2);
    let mut published = Vec::new();
    for second in 0..30u32 {
        let now = at(f64::from(second));
        ranks.record(now, Rank(0), own_time(1.0));
        let own = if second == 9 { 1.0 } else { 1.5 };
        published.extend(ranks.record(now, Rank(1), own_time(own)).map(|_| second));
    }
    assert_eq!(published, [19], "the tenth in a row");
}
