//! A fleet of spot machines over days of virtual time, up to a thousand of them.
//!
//! The machines of this crate run as they are: one engine, and a session for every machine. Around them are a model
//! of the machines, which are taken away and replaced ([`machine`]), of rank processes ([`process`]) and of what these
//! do together ([`group`]), simpler than the one that [the histories](../simulation/main.rs) are made of: messages are
//! late, but not lost, and agents live as long as their machines. Everything that is said goes through both machines,
//! but for signs of life, of which one second in an hour is looked at: with 8,192 ranks there are five billion in a
//! week, and that they change no deadline is checked with each. [`settings`] are what a run is about, [`report`] what
//! it has shown.
//!
//! ```text
//! make sim-scale                                                   1,024 machines of 8 ranks for a week
//! make sim-scale SCALE="nodes=128 interruptions=0.06 meet=5 seed=2"
//! ```
//!
//! Bugs were planted in the two machines. Caught were survivors started anew, a node that must go and is not done
//! without, recoveries counted from too early on, and signs of life that change a deadline.

#![allow(
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails loudly, and tells what it has seen"
)]

#[path = "../common/mod.rs"]
mod common;
mod coordinator;
mod fleet;
mod group;
mod ledger;
mod machine;
mod process;
mod report;
mod settings;

use std::time::{Duration, Instant};

use crate::{fleet::Fleet, report::Report, settings::Settings};

/// Sixteen machines for a day, each of which lives for some twenty hours.
const SMALL: &str = "nodes=16 days=1 meet=5 interruptions=0.05 unnoticed=0 crashes=0";

/// Runs a fleet with `settings` and what is added to them, and checks what is true of every run.
fn run(settings: &str, more: &str) -> Fleet {
    let settings = match Settings::parse(&format!("{settings} {more}")) {
        Ok(settings) => settings,
        Err(error) => panic!("BATON_SCALE: {error}"),
    };
    let (began, processor) = (Instant::now(), processor_time());
    let mut fleet = Fleet::new(settings);
    fleet.run();
    let took = (began.elapsed(), processor_time().saturating_sub(processor));
    let report = Report::new(&fleet, took);
    println!("{}", report.text());
    every_change_makes_one_generation_at_most(&fleet);
    the_coordinator_tells_what_failures_cost(&fleet, &report);
    fleet
}

/// How long this thread has had a processor, as Linux tells it: times on a busy machine are to be read with that.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split_whitespace().next().and_then(|nanos| nanos.parse().ok());
    Duration::from_nanos(nanos.unwrap_or_default())
}

/// Generations in which the first machines are taken in.
const FIRST: u64 = 4;

fn every_change_makes_one_generation_at_most(fleet: &Fleet) {
    let Fleet { ledger, coordinator, booted, settings, .. } = fleet;
    let gone = ledger.noticed + ledger.unnoticed + ledger.crashes;
    // The first machines do not come all at once, but are taken in by few.
    let came = u64::from(*booted).saturating_sub(settings.machines() as u64) + FIRST;
    let changes = gone + came + coordinator.ends.len() as u64;
    assert!(coordinator.generations <= changes, "{} of {changes}", coordinator.generations);
}

fn the_coordinator_tells_what_failures_cost(fleet: &Fleet, report: &Report<'_>) {
    if !fleet.coordinator.ends.is_empty() {
        // It counts no time between two starts of the job.
        return;
    }
    let recoveries = &fleet.coordinator.recoveries;
    let lost: u64 = recoveries.iter().map(|recovery| recovery.lost_steps).sum();
    // Of each failure, what was done since rank 0 last told and is gone with it.
    let step_ms = fleet.settings.step_ms(fleet.settings.world_size());
    let untold = recoveries.len() as u64 * (1 + 100 / step_ms);
    let seen = fleet.ledger.lost_steps;
    assert!(lost <= seen && seen <= lost + untold, "{lost} of {seen} lost updates told");
    let (told, seen) = (report.stood_still(), report.stood_still_as_seen());
    let unknown = Duration::from_secs(15) * fleet.ledger.unnoticed as u32;
    let slack = seen / 50 + Duration::from_secs(5);
    assert!(told <= seen + slack && seen <= told + unknown + slack, "{told:?} of {seen:?}");
}

fn goodput(fleet: &Fleet) -> f64 {
    fleet.ledger.useful as f64 / fleet.now.0 as f64
}

/// With what `BATON_SCALE` says, if anything: that may be the defaults, with a thousand machines.
#[test]
fn a_fleet_trains_on_whatever_is_taken_away() {
    let fleet = match std::env::var("BATON_SCALE") {
        Ok(settings) => run(&settings, ""),
        Err(_) => run(SMALL, "unnoticed=0.2 crashes=0.001"),
    };
    assert!(fleet.ledger.high_water > 0, "nothing was trained");
}

#[test]
fn machines_that_are_taken_away_with_a_notice_cost_no_update() {
    for seed in 1..=4 {
        let fleet = run(SMALL, &format!("seed={seed}"));

        assert!(fleet.ledger.noticed >= 8, "hardly anything happened");
        assert_eq!((fleet.ledger.lost_steps, fleet.ledger.redone), (0, 0));
        assert_eq!(fleet.coordinator.ends, [""; 0]);
        assert!(fleet.coordinator.recoveries.iter().all(|recovery| recovery.planned));
        // One without the machine that goes, one with the machine that comes; each takes some nine seconds. Meanwhile
        // sixteen machines' work is done by fifteen, which takes a quarter longer, as virtual ranks are not divided.
        let changes = 2.0 * fleet.ledger.noticed as f64;
        let missing = fleet.ledger.noticed as f64 * 700.0 * 0.25;
        let least = 1.0 - (changes * 9.0 + missing + 120.0) / 86_400.0;
        assert!(goodput(&fleet) >= least, "goodput {} of {least}", goodput(&fleet));
    }
}

#[test]
fn machines_that_vanish_and_ranks_that_crash_cost_no_update_that_was_told() {
    let fleet = run(SMALL, "unnoticed=1 crashes=0.005");

    assert!(fleet.ledger.unnoticed >= 8 && fleet.ledger.crashes >= 8, "hardly anything happened");
    assert_eq!((fleet.ledger.lost_steps, fleet.ledger.redone), (0, 0));
    let failed = fleet.coordinator.recoveries.iter().filter(|recovery| !recovery.planned).count();
    assert!(failed as u64 >= fleet.ledger.unnoticed, "{failed} failures");
}

#[test]
fn a_fleet_that_is_taken_away_at_once_has_saved_and_goes_on_from_there() {
    let fleet = run(SMALL, "together=16 interruptions=0.2");

    assert!(fleet.ledger.noticed >= 16, "hardly anything happened");
    assert!(!fleet.coordinator.ends.is_empty(), "the job did not stop");
    assert!(fleet.coordinator.ends.iter().all(|end| end.contains("drained")));
    assert_eq!((fleet.ledger.lost_steps, fleet.ledger.redone), (0, 0));
}

#[test]
fn a_fleet_that_vanishes_at_once_loses_what_came_after_the_last_checkpoint() {
    let fleet = run(SMALL, "together=16 interruptions=0.2 unnoticed=1");

    let times = fleet.ledger.unnoticed / 16;
    assert!(times >= 2, "hardly anything happened");
    let between =
        fleet.settings.save_every_steps() as f64 + fleet.settings.save() / fleet.settings.step();
    let most = times as f64 * between;
    let lost = fleet.ledger.lost_steps;
    assert!(lost > 0 && lost as f64 <= most, "{lost} of {most} updates lost");
}

#[test]
fn spare_machines_take_the_place_of_those_that_are_taken_away() {
    let alone = run(SMALL, "parts=1 together=1");
    let with_spares = run(SMALL, "parts=1 together=1 spares=2");

    // One virtual rank for each rank: whoever is missing, another has twice the work.
    let (alone, with_spares) = (alone.ledger.slower, with_spares.ledger.slower);
    assert!(with_spares * 4 < alone, "{with_spares} ms longer with spares, {alone} ms without");
}

#[test]
fn settings_that_do_not_exist_are_refused_with_those_that_do() {
    let error = Settings::parse("node=4").unwrap_err();
    assert!(error.contains("node: no such setting") && error.contains("nodes=1024"), "{error}");
    assert!(Settings::parse("nodes=-1").is_err());
    assert!(Settings::parse("nodes=0").is_err());
    assert!(Settings::parse("step=0").is_err());
    assert_eq!(Settings::parse("nodes=128").unwrap().world_size(), 1_024);
}
