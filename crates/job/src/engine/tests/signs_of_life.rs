//! What comes once a second from everybody.

use super::*;
use crate::message::{Host, Vitals};

fn beat(engine: &mut Engine, now: Time, number: u64, vitals: Option<Vitals>) -> Vec<Action> {
    let (attachment, round_trip) = (attachment(engine, 0), Some(Duration::from_millis(3)));
    let report = Report::Beat(Beat { number, round_trip, vitals });
    engine.handle(now, Event::Reported { node: node(0), attachment, report })
}

#[test]
fn a_beat_is_answered_and_shows_how_the_machine_does() {
    let mut engine = training(&[1]);
    let vitals = Vitals { host: Host { cpus: 96, ..Host::default() }, gpus: Vec::new() };
    let told = beat(&mut engine, at(10.0), 7, Some(vitals.clone()));
    assert_eq!(told, [send(0, 1, Directive::Heard { number: 7 })]);
    beat(&mut engine, at(11.0), 8, None);
    let status = engine.status().nodes.remove(0);
    assert_eq!(status.vitals.as_deref(), Some(&vitals), "the last that was told");
    assert_eq!(
        (status.heard_at, status.round_trip),
        (Some(at(11.0)), Some(Duration::from_millis(3)))
    );
}

#[test]
fn beats_keep_the_meter_in_the_journal_while_nothing_else_is_told() {
    let mut engine = training(&[1]);
    let persisted = |actions: Vec<Action>| {
        actions.contains(&Action::Persist(Record::Metered(Duration::from_secs(70))))
    };
    assert!(!persisted(beat(&mut engine, at(30.0), 1, None)));
    assert!(persisted(beat(&mut engine, at(70.0), 2, None)));
}

#[test]
fn signs_of_life_bring_about_what_time_has_brought() {
    let mut engine = training(&[1, 1]);
    detach(&mut engine, at(10.0), 1);
    assert_eq!(engine.deadline(), Some(at(15.0)), "node_grace_seconds later");
    beat(&mut engine, at(14.9), 1, None);
    assert_eq!(engine.status().phase, PhaseName::Training);
    beat(&mut engine, at(15.0), 2, None);
    assert_ne!(engine.status().phase, PhaseName::Training);
}

#[test]
fn what_curves_are_drawn_of_is_told_once_by_rank_0() {
    let mut engine = meeting(&[1, 1]);
    let measured = |actions: Vec<Action>| {
        let of = |action| match action {
            Action::Measured(measured) => Some(measured),
            _ => None,
        };
        actions.into_iter().filter_map(of).collect::<Vec<_>>()
    };
    let progress = Progress { step: Step(7), ..Progress::default() };
    let started = RankNews::Started { source: StateSource::Fresh, progress };
    let mut heard = |rank, news: RankNews| {
        let event = report(&engine, Generation(1), rank, news);
        measured(engine.handle(at(5.0), event))
    };
    assert_eq!(heard(0, started.clone()), [Measured::BeganAt(Step(7))]);
    assert_eq!(heard(1, started), []);
    let news = StepNews { step: Step(8), ..StepNews::default() };
    assert_eq!(heard(0, RankNews::Stepped(news.clone())), [Measured::Step(news)]);
}
