//! Limits on time and money.

use super::*;
use crate::exit::LIMIT_REACHED;

const REASON: &str = "limits.max_hours = 2 is reached; raise it to resume";
const HOUR: f64 = 3_600.0;

fn two_hours() -> JobSpec {
    spec_with(&["limits.max_hours=2"])
}

/// One node, attached since second 0, trains.
fn training_with(spec: &JobSpec) -> Engine {
    let mut engine = Engine::new(spec, origin(), at(0.0));
    attach(&mut engine, at(0.0), 0, 1, None);
    all_ready(&mut engine, at(1.0), None);
    all_started(&mut engine, at(2.0));
    engine
}

fn spent(engine: &Engine, now: Time) -> f64 {
    engine.status().spending.meter.read(now).as_secs_f64()
}

fn limit() -> Outcome {
    Outcome::LimitReached { reason: REASON.to_owned() }
}

fn metered(actions: &[Action]) -> Vec<Duration> {
    let metered = |action: &Action| match action {
        Action::Persist(Record::Metered(spent)) => Some(*spent),
        _ => None,
    };
    actions.iter().filter_map(metered).collect()
}

// ---- the meter ----

#[test]
fn the_meter_runs_while_a_node_is_attached() {
    let mut engine = gathering(2);
    assert_eq!(spent(&engine, at(50.0)), 0.0);
    attach(&mut engine, at(100.0), 0, 1, None);
    assert_eq!(spent(&engine, at(130.0)), 30.0);
    attach(&mut engine, at(140.0), 1, 1, None);
    detach(&mut engine, at(150.0), 0);
    assert_eq!(spent(&engine, at(160.0)), 60.0, "the time of two nodes is not added");
    detach(&mut engine, at(170.0), 1);
    assert_eq!(spent(&engine, at(900.0)), 70.0);
    attach(&mut engine, at(1_000.0), 0, 1, None);
    assert_eq!(spent(&engine, at(1_001.0)), 71.0);
}

#[test]
fn the_meter_stops_when_the_job_is_over() {
    let mut engine = training(&[1]);
    engine.drive(at(10.0), Event::Stop);
    assert_eq!(spent(&engine, at(99.0)), 10.0);
}

#[test]
fn the_meter_is_persisted_with_generations_saves_and_ends_and_every_minute_of_steps() {
    let mut engine = training(&[1]);
    let generation = engine.lifecycle.generation;
    let mut seconds = |now, rank_report| {
        let event = rank_event(&engine, generation, 0, rank_report);
        metered(&engine.drive(at(now), event))
    };
    assert_eq!(seconds(10.0, RankReport::Saved(commit(1, 5))), [Duration::from_secs(10)]);
    assert_eq!(seconds(60.0, stepped(6)), []);
    assert_eq!(seconds(70.0, stepped(7)), [Duration::from_secs(70)]);
    assert_eq!(seconds(75.0, crashed()), [Duration::from_secs(75)]);
    assert_eq!(metered(&engine.drive(at(80.0), Event::Stop)), [Duration::from_secs(80)]);
}

#[test]
fn the_meter_continues_after_a_restart_of_the_coordinator() {
    let spent_before = Record::Metered(Duration::from_secs(100));
    let mut engine = replay(&[opened(1, vec![placement(0, 0, 0)]), spent_before]);
    assert_eq!(spent(&engine, at(50.0)), 100.0, "no node is attached yet");

    attach(&mut engine, at(60.0), 0, 1, running(1, &[(0, RankPhase::Training)]));

    assert_eq!(spent(&engine, at(65.0)), 105.0);
}

// ---- the end of the budget ----

#[test]
fn the_job_drains_when_the_budget_is_used_up() {
    let mut engine = training_with(&two_hours());
    assert_eq!(tick(&mut engine, at(2.0 * HOUR - 1.0)), []);
    assert_eq!(engine.deadline(), Some(at(2.0 * HOUR)));

    let actions = engine.drive(at(2.0 * HOUR), Event::Tick);

    assert_eq!(metered(&actions), [Duration::from_secs(7_200)]);
    let drain = Directive::Drain { generation: Generation(1), reason: REASON.to_owned() };
    assert_eq!(actions.last(), Some(&send(0, 1, drain)));
    assert_eq!(engine.status().phase, PhaseName::Draining);
}

#[test]
fn a_job_drained_by_its_budget_has_reached_its_limit() {
    let mut engine = training_with(&two_hours());
    tick(&mut engine, at(2.0 * HOUR));
    let ended = Outcome::Drained { reason: REASON.to_owned() };

    let actions = report(&mut engine, at(2.0 * HOUR + 5.0), 0, done(ended, "d"));

    assert_eq!(actions[0], Action::Persist(Record::Ended(limit())));
    assert_eq!(actions[1], send(0, 1, Directive::Dismiss { outcome: limit() }));
    assert_eq!(limit().exit_code(), LIMIT_REACHED);
}

#[test]
fn a_job_that_completes_during_the_drain_is_complete() {
    let mut engine = training_with(&two_hours());
    tick(&mut engine, at(2.0 * HOUR));
    report(&mut engine, at(2.0 * HOUR + 5.0), 0, done(Outcome::Completed, "d"));
    assert_eq!(engine.outcome(), Some(&Outcome::Completed));
}

#[test]
fn ranks_that_do_not_stop_in_time_are_mentioned_in_the_outcome() {
    let mut engine = training_with(&two_hours());
    tick(&mut engine, at(2.0 * HOUR));
    tick(&mut engine, at(2.0 * HOUR + 100.0));
    let reason = format!(
        "{REASON}; ranks did not stop in time, and the state after step 0 was not saved, and this job has saved none before"
    );
    assert_eq!(engine.outcome(), Some(&Outcome::LimitReached { reason }));
}

#[test]
fn a_drain_that_was_requested_before_the_limit_stays_a_drain() {
    let mut engine = training_with(&two_hours());
    drain(&mut engine, at(HOUR));
    report(&mut engine, at(HOUR + 5.0), 0, done(drained(), "d"));
    assert_eq!(engine.outcome(), Some(&drained()));
}

fn replay_with(spec: &JobSpec, records: &[Record]) -> Engine {
    let mut journal = vec![Record::Created(origin())];
    journal.extend_from_slice(records);
    Engine::replay(spec, &journal, at(0.0)).unwrap()
}

fn ended_by_limit() -> [Record; 3] {
    let opened = opened(1, vec![placement(0, 0, 0)]);
    [opened, Record::Metered(Duration::from_secs(7_201)), Record::Ended(limit())]
}

#[test]
fn the_same_command_ends_again_at_once_with_the_same_reason() {
    let mut engine = replay_with(&two_hours(), &ended_by_limit());

    let actions = tick(&mut engine, at(0.0));

    assert_eq!(actions, [Action::Persist(Record::Ended(limit()))]);
}

#[test]
fn the_same_command_with_a_higher_limit_continues() {
    let spec = spec_with(&["limits.max_hours=3"]);
    let mut engine = replay_with(&spec, &ended_by_limit());
    assert_eq!(tick(&mut engine, at(0.0)), []);

    assert!(opens(&attach(&mut engine, at(1.0), 0, 1, None), 2));

    let next_alert = at(1.0 + 0.8 * 3.0 * HOUR - 7_201.0);
    assert_eq!(engine.accounting.wakes_at(), Some(next_alert), "the alert at 50 % is over");
}

#[test]
fn another_recipe_continues_with_the_budget_that_is_left() {
    let before = replay_with(&two_hours(), &ended_by_limit());
    let mut engine = Engine::continuing(&before, &two_hours(), origin(), at(0.0));
    let actions = engine.handle(at(0.0), Event::Tick);
    assert!(matches!(actions[0], Action::Persist(Record::Created(_))), "{actions:?}");
    assert_eq!(metered(&actions), [Duration::from_secs(7_201)]);
    assert_eq!(engine.outcome(), Some(&limit()));
    let higher = spec_with(&["limits.max_hours=3"]);
    let mut engine = Engine::continuing(&before, &higher, origin(), at(0.0));
    tick(&mut engine, at(0.0));
    assert!(opens(&attach(&mut engine, at(1.0), 0, 1, None), 1));
}

#[test]
fn ranks_that_were_drained_by_the_budget_without_the_coordinator_have_reached_the_limit() {
    let [opened, metered, _] = ended_by_limit();
    let mut engine = replay_with(&two_hours(), &[opened, metered]);
    let outcome = Outcome::Drained { reason: REASON.to_owned() };
    let phase = RankPhase::Done { outcome, digest: "d".to_owned() };

    attach(&mut engine, at(1.0), 0, 1, running(1, &[(0, phase)]));

    assert_eq!(engine.outcome(), Some(&limit()));
}

// ---- money ----

#[test]
fn the_limit_that_is_reached_first_applies() {
    let limits = ["limits.max_hours=9", "limits.max_dollars=10", "limits.dollars_per_hour=4"];
    let limit = |spec: &JobSpec| training_with(spec).status().spending.budget.limit().unwrap();
    assert_eq!(limit(&spec_with(&limits)), Duration::from_secs(9_000));

    let spec = spec_with(&[&["limits.max_hours=1"], &limits[1..]].concat());
    assert_eq!(limit(&spec), Duration::from_secs(3_600));
}

#[test]
fn the_limit_on_money_ends_the_job_with_its_reason() {
    let limits = ["limits.max_dollars=10", "limits.dollars_per_hour=4"];
    let mut engine = training_with(&spec_with(&limits));
    tick(&mut engine, at(2.5 * HOUR));
    let reason = "limits.max_dollars = 10 is reached, at 4 dollars per hour; raise it to resume";
    assert_eq!(engine.status().reason, format!("draining: {reason}; 100 s to save and stop"));
}

#[test]
fn the_projected_cost_of_the_job_is_shown_while_it_trains() {
    let mut engine = training_with(&spec_with(&["limits.dollars_per_hour=4"]));
    assert_eq!(engine.status().projected_dollars(at(HOUR)), None);
    // Two epochs of 100 batches of 36 samples, half an epoch done, 1.5 samples a second.
    let rank_report = StepReport {
        step: Step(50),
        step_of_epoch: 50,
        steps_per_epoch: 100,
        global_batch: 36,
        samples_per_second: 1.5,
        ..StepReport::default()
    };
    report(&mut engine, at(HOUR), 0, RankReport::Stepped(rank_report));

    let status = engine.status();

    assert_eq!(status.eta_seconds(), Some(HOUR));
    assert_eq!(status.spending.budget.dollars_for(Duration::from_secs(3_600)), Some(4.0));
    assert_eq!(status.projected_dollars(at(HOUR)), Some(8.0));
    let unpriced = training(&[1]).status().spending.budget;
    assert_eq!(unpriced.dollars_for(Duration::from_secs(3_600)), None);
}

// ---- another price ----

fn of_100_dollars(price: f64) -> JobSpec {
    spec_with(&["limits.max_dollars=100", &format!("limits.dollars_per_hour={price}")])
}

fn persisted(actions: Vec<Action>) -> Vec<Record> {
    let record = |action: Action| match action {
        Action::Persist(record) => Some(record),
        _ => None,
    };
    actions.into_iter().filter_map(record).collect()
}

fn dollars(engine: &Engine, now: Time) -> Option<f64> {
    let spending = engine.status().spending;
    spending.budget.dollars_at(spending.meter.read(now))
}

const PAID_90_DOLLARS: Record = Record::Paid { time: Duration::from_secs(40_500), dollars: 90.0 };

/// The records of a job that was drained after 11.25 hours at 8 dollars.
fn drained_after_90_dollars() -> Vec<Record> {
    let mut engine = training_with(&of_100_dollars(8.0));
    drain(&mut engine, at(11.25 * HOUR));
    let generation = engine.lifecycle.generation;
    let last = rank_event(&engine, generation, 0, done(drained(), "d"));
    let mut records = vec![opened(1, vec![placement(0, 0, 0)])];
    records.extend(persisted(engine.drive(at(11.25 * HOUR), last)));
    records
}

/// The job goes on at another price, with a node from second 0 on.
fn continued_at(price: f64) -> Engine {
    let mut engine = replay_with(&of_100_dollars(price), &drained_after_90_dollars());
    assert_eq!(tick(&mut engine, at(0.0)), []);
    attach(&mut engine, at(0.0), 0, 1, None);
    engine
}

#[test]
fn the_journal_has_the_cost_of_the_hours() {
    let expected = [PAID_90_DOLLARS, Record::Ended(drained())];
    assert_eq!(&drained_after_90_dollars()[1..], &expected);
    let text = r#"{"paid":{"time":{"secs":40500,"nanos":0},"dollars":90.0}}"#;
    assert_eq!(serde_json::to_string(&PAID_90_DOLLARS).unwrap(), text);
    assert_eq!(serde_json::from_str::<Record>(text).unwrap(), PAID_90_DOLLARS);
}

#[test]
fn a_lower_price_buys_more_hours_with_what_is_left_only() {
    let mut engine = continued_at(2.5);
    let budget = engine.status().spending.budget;
    assert_eq!(dollars(&engine, at(0.0)), Some(90.0));
    assert_eq!(dollars(&engine, at(HOUR)), Some(92.5));
    assert_eq!(budget.used(Duration::from_secs(40_500)), Some(0.9));
    assert_eq!(budget.limit(), Some(Duration::from_secs(54_900)), "four hours more");
    let [part, spent] = [5_490, 54_900].map(Duration::from_secs);
    let lost = budget.dollars_of_part(part, spent).unwrap();
    assert!((lost - 10.0).abs() < 1e-9, "a tenth of the hours is a tenth of the cost: {lost}");

    assert_eq!(engine.accounting.wakes_at(), Some(at(2.0 * HOUR)), "80 % were used before");
    let alert = "95 % of the budget is used up: 13.25 of 15.25 hours (95.00 of 100.00 dollars)";
    assert_eq!(engine.accounting.alert(at(2.0 * HOUR)).as_deref(), Some(alert));
    assert_eq!(engine.accounting.wakes_at(), Some(at(4.0 * HOUR)));
    assert_eq!(engine.accounting.used_up(at(4.0 * HOUR - 1.0)), None);
    let reason = "limits.max_dollars = 100 is reached, at 2.5 dollars per hour; raise it to resume";
    assert_eq!(engine.accounting.used_up(at(4.0 * HOUR)).as_deref(), Some(reason));
}

#[test]
fn a_higher_price_does_not_apply_to_the_hours_before() {
    let engine = continued_at(10.0);
    assert_eq!(dollars(&engine, at(0.0)), Some(90.0));
    assert_eq!(dollars(&engine, at(HOUR)), Some(100.0));
    let budget = engine.status().spending.budget;
    assert_eq!(budget.limit(), Some(Duration::from_secs(44_100)), "one hour more");
    assert_eq!(engine.accounting.wakes_at(), Some(at(0.5 * HOUR)), "95 dollars");
}

#[test]
fn the_projected_cost_is_what_is_spent_and_the_rest_at_the_new_price() {
    // An hour is left: two epochs of 100 batches of 36 samples, half an epoch done, 1.5 samples a second.
    let latest = StepReport {
        step_of_epoch: 50,
        steps_per_epoch: 100,
        global_batch: 36,
        samples_per_second: 1.5,
        ..StepReport::default()
    };
    let status = Status {
        phase: PhaseName::Training,
        epochs: 2,
        latest: Some(latest),
        ..continued_at(2.5).status()
    };
    assert_eq!(status.projected_dollars(at(HOUR)), Some(95.0));
}

#[test]
fn a_limit_below_the_cost_so_far_ends_the_job_at_once() {
    let spec = spec_with(&["limits.max_dollars=50", "limits.dollars_per_hour=2.5"]);
    let mut engine = replay_with(&spec, &drained_after_90_dollars());

    tick(&mut engine, at(0.0));

    let reason = "limits.max_dollars = 50 is reached, at 2.5 dollars per hour; raise it to resume";
    assert_eq!(engine.outcome(), Some(&Outcome::LimitReached { reason: reason.to_owned() }));
    assert_eq!(engine.status().spending.budget.used(Duration::from_secs(40_500)), Some(1.8));
}

#[test]
fn hours_that_an_older_version_recorded_without_cost_count_at_the_current_price() {
    let text = r#"{"metered":{"secs":40500,"nanos":0}}"#;
    let old: Record = serde_json::from_str(text).unwrap();
    assert_eq!(old, Record::Metered(Duration::from_secs(40_500)));
    let mut engine = replay_with(&of_100_dollars(2.5), std::slice::from_ref(&old));
    attach(&mut engine, at(0.0), 0, 1, None);
    assert_eq!(dollars(&engine, at(0.0)), Some(28.125));

    let ended = persisted(engine.drive(at(HOUR), Event::Stop));

    let paid = Record::Paid { time: Duration::from_secs(44_100), dollars: 30.625 };
    assert!(ended.contains(&paid), "{ended:?}");
    let engine = replay_with(&of_100_dollars(8.0), &[old, paid]);
    assert_eq!(dollars(&engine, at(0.0)), Some(30.625), "from then on it is known");
}

#[test]
fn another_recipe_continues_with_what_was_paid() {
    let before = replay_with(&of_100_dollars(2.5), &drained_after_90_dollars());
    let mut engine = Engine::continuing(&before, &of_100_dollars(2.5), origin(), at(0.0));
    assert_eq!(dollars(&engine, at(0.0)), Some(90.0));
    let records = persisted(engine.handle(at(0.0), Event::Tick));
    let replayed = Engine::replay(&of_100_dollars(10.0), &records, at(0.0)).unwrap();
    assert_eq!(dollars(&replayed, at(0.0)), Some(90.0));
}

#[test]
fn hours_without_a_price_count_at_the_next_one() {
    let unpriced = Record::Metered(Duration::from_secs(44_100));
    let records = [drained_after_90_dollars(), vec![unpriced]].concat();
    let before = replay_with(&two_hours(), &records);
    assert_eq!(dollars(&before, at(0.0)), None);
    let priced = replay_with(&of_100_dollars(4.0), &records);
    assert_eq!(dollars(&priced, at(0.0)), Some(94.0));

    let mut engine = Engine::continuing(&before, &two_hours(), origin(), at(0.0));
    let records = persisted(engine.handle(at(0.0), Event::Tick));
    let priced = Engine::replay(&of_100_dollars(4.0), &records, at(0.0)).unwrap();
    assert_eq!(dollars(&priced, at(0.0)), Some(94.0));
}

// ---- alerts ----

#[test]
fn use_of_the_budget_is_published_once_each_at_50_80_and_95_percent() {
    let mut engine =
        training_with(&spec_with(&["limits.max_hours=2", "limits.dollars_per_hour=4"]));
    let mut messages = Vec::new();
    while let Some(deadline) = engine.deadline().filter(|at| *at < super::at(2.0 * HOUR)) {
        let alerts =
            engine.drive(deadline, Event::Tick).into_iter().filter_map(|action| match action {
                Action::Publish(published) if published.kind == JobEventKind::Budget => {
                    Some(published.message)
                }
                _ => None,
            });
        messages.extend(alerts.map(|message| (deadline, message)));
    }
    assert_eq!(
        messages,
        [
            (
                at(HOUR),
                "50 % of the budget is used up: 1.00 of 2.00 hours (4.00 of 8.00 dollars)"
                    .to_owned()
            ),
            (
                at(1.6 * HOUR),
                "80 % of the budget is used up: 1.60 of 2.00 hours (6.40 of 8.00 dollars)"
                    .to_owned()
            ),
            (
                at(1.9 * HOUR),
                "95 % of the budget is used up: 1.90 of 2.00 hours (7.60 of 8.00 dollars)"
                    .to_owned()
            ),
        ]
    );
}

#[test]
fn a_restarted_coordinator_does_not_publish_the_same_alert_again() {
    let records = [Record::Created(origin()), Record::Metered(Duration::from_secs(5_000))];
    let mut engine = Engine::replay(&two_hours(), &records, at(0.0)).unwrap();
    engine.drive(at(0.0), Event::Tick);
    attach(&mut engine, at(0.0), 0, 1, None);
    assert_eq!(engine.accounting.wakes_at(), Some(at(0.8 * 2.0 * HOUR - 5_000.0)));
}

#[test]
fn interruptions_cost_the_metered_time_until_the_first_step_and_the_steps_made_again() {
    let mut engine = training_with(&spec(1));
    let pace = |step| {
        RankReport::Stepped(StepReport {
            step: Step(step),
            global_batch: 64,
            samples_per_second: 32.0,
            ..StepReport::default()
        })
    };
    report(&mut engine, at(100.0), 0, pace(50));
    let interrupted = |engine: &Engine, now| {
        engine.status().spending.interrupted.read(engine.accounting.spent(now)).as_secs_f64()
    };
    assert_eq!(interrupted(&engine, at(110.0)), 0.0);
    report(&mut engine, at(110.0), 0, crashed());
    assert_eq!(interrupted(&engine, at(113.0)), 3.0, "the recovery is in progress");
    all_ready(&mut engine, at(114.0), None);
    let progress = Progress { step: Step(45), ..Progress::default() };
    report(
        &mut engine,
        at(115.0),
        0,
        RankReport::Started { source: StateSource::fresh(), progress },
    );
    report(&mut engine, at(116.0), 0, pace(46));
    assert_eq!(interrupted(&engine, at(900.0)), 6.0 + 5.0 * 2.0, "five steps of two seconds");

    let kept = engine.status().recoveries.back().unwrap().clone();
    let records = [Record::Created(origin()), Record::Recovery(kept)];
    let replayed = Engine::replay(&spec(1), &records, at(0.0)).unwrap();
    assert_eq!(interrupted(&replayed, at(0.0)), 16.0);
}

#[test]
fn an_epoch_costs_its_steps_at_the_current_rate() {
    let mut engine = training_with(&spec_with(&["limits.dollars_per_hour=3.6"]));
    let rank_report = StepReport {
        step: Step(1),
        steps_per_epoch: 100,
        global_batch: 64,
        samples_per_second: 32.0,
        ..StepReport::default()
    };
    report(&mut engine, at(10.0), 0, RankReport::Stepped(rank_report));
    let dollars = engine.status().dollars_per_epoch().unwrap();
    assert!((dollars - 0.2).abs() < 1e-9, "200 s at a tenth of a cent: {dollars}");
}
