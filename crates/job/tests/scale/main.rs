//! A fleet of spot machines over days of virtual time, up to a thousand of them.
//!
//! The real engine runs, and a real session for every machine. The rest are models: machines, which are taken away and
//! replaced ([`machine`]), rank processes ([`process`]), and what these do together ([`group`]). The models are simpler
//! than those of [the simulation](../simulation/main.rs): messages are delayed but not lost, and agents live as long as
//! their machines. Every message goes through engine and sessions, except heartbeats, of which only one second in every
//! hour is simulated: with 8,192 ranks there are five billion in a week. Each simulated heartbeat is checked not to
//! change a deadline. [`settings`] has the settings of a run, [`report`] its results.
//!
//! ```text
//! make sim-scale                                                   1,024 machines of 8 ranks for a week
//! make sim-scale SCALE="nodes=128 interruptions=0.06 meet=5 seed=2"
//! ```
//!
//! Planted bugs that these tests found: running processes that are restarted, a departing node that is not left out,
//! recoveries that are counted from too early, and heartbeats that change a deadline.

#![allow(
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails loudly, and prints its results"
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

use crate::{fleet::Fleet, report::RunReport, settings::Settings};

/// Sixteen machines for a day; each lives for about twenty hours.
const SMALL: &str = "nodes=16 days=1 meet=5 interruptions=0.05 unnoticed=0 crashes=0";

/// Runs a fleet with `settings` and `more`, and checks what must hold for every run.
fn run(settings: &str, more: &str) -> Fleet {
    let settings = match Settings::parse(&format!("{settings} {more}")) {
        Ok(settings) => settings,
        Err(error) => panic!("BATON_SCALE: {error}"),
    };
    let (began, processor) = (Instant::now(), processor_time());
    let mut fleet = Fleet::new(settings);
    fleet.run();
    let took = (began.elapsed(), processor_time().saturating_sub(processor));
    let report = RunReport::new(&fleet, took);
    println!("{}", report.text());
    check_number_of_generations(&fleet);
    check_reported_costs(&fleet, &report);
    fleet
}

/// Processor time of this thread, from Linux. On a busy machine the wall time alone means little.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split_whitespace().next().and_then(|nanos| nanos.parse().ok());
    Duration::from_nanos(nanos.unwrap_or_default())
}

/// Number of generations in which the first machines join.
const MAX_FIRST_GENERATIONS: u64 = 4;

fn check_number_of_generations(fleet: &Fleet) {
    let Fleet { ledger, coordinator, booted, settings, .. } = fleet;
    let gone = ledger.with_notice + ledger.without_notice + ledger.crashes;
    // The first machines do not start at the same time, but join in few generations.
    let came =
        u64::from(*booted).saturating_sub(settings.machines() as u64) + MAX_FIRST_GENERATIONS;
    let changes = gone + came + coordinator.ends.len() as u64;
    assert!(coordinator.generations <= changes, "{} of {changes}", coordinator.generations);
}

fn check_reported_costs(fleet: &Fleet, report: &RunReport<'_>) {
    if !fleet.coordinator.ends.is_empty() {
        // The coordinator does not count the time between two starts of the job.
        return;
    }
    let recoveries = &fleet.coordinator.recoveries;
    let lost: u64 = recoveries.iter().map(|recovery| recovery.lost_steps).sum();
    // At each failure, updates since the last report of rank 0 are lost without being counted.
    let step_ms = fleet.settings.step_ms(fleet.settings.world_size());
    let unreported = recoveries.len() as u64 * (1 + 100 / step_ms);
    let seen = fleet.ledger.lost_steps;
    assert!(lost <= seen && seen <= lost + unreported, "{lost} of {seen} lost updates reported");
    let (reported, seen) = (report.downtime(), report.observed_downtime());
    let unknown = Duration::from_secs(15) * fleet.ledger.without_notice as u32;
    let slack = seen / 50 + Duration::from_secs(5);
    assert!(
        reported <= seen + slack && seen <= reported + unknown + slack,
        "{reported:?} of {seen:?}"
    );
}

fn goodput(fleet: &Fleet) -> f64 {
    fleet.ledger.useful as f64 / fleet.now.0 as f64
}

/// Uses the settings in `BATON_SCALE` if it is set; an empty value means the defaults, with a thousand machines.
#[test]
fn fleet_trains_whatever_machines_are_taken_away() {
    let fleet = match std::env::var("BATON_SCALE") {
        Ok(settings) => run(&settings, ""),
        Err(_) => run(SMALL, "unnoticed=0.2 crashes=0.001"),
    };
    assert!(fleet.ledger.high_water > 0, "nothing was trained");
}

#[test]
fn machines_taken_away_with_a_notice_cost_no_update() {
    for seed in 1..=4 {
        let fleet = run(SMALL, &format!("seed={seed}"));

        assert!(fleet.ledger.with_notice >= 8, "too few interruptions happened");
        assert_eq!((fleet.ledger.lost_steps, fleet.ledger.redone), (0, 0));
        assert_eq!(fleet.coordinator.ends, [""; 0]);
        assert!(fleet.coordinator.recoveries.iter().all(|recovery| recovery.planned));
        // Two generations for each interruption: without the machine, and with its replacement; each takes about nine
        // seconds. Meanwhile fifteen machines do the work of sixteen, which takes a quarter longer, because virtual
        // ranks are not divided.
        let changes = 2.0 * fleet.ledger.with_notice as f64;
        let missing = fleet.ledger.with_notice as f64 * 700.0 * 0.25;
        let least = 1.0 - (changes * 9.0 + missing + 120.0) / 86_400.0;
        assert!(goodput(&fleet) >= least, "goodput {} of {least}", goodput(&fleet));
    }
}

#[test]
fn vanishing_machines_and_crashing_ranks_cost_no_reported_update() {
    let fleet = run(SMALL, "unnoticed=1 crashes=0.005");

    assert!(
        fleet.ledger.without_notice >= 8 && fleet.ledger.crashes >= 8,
        "too few interruptions happened"
    );
    assert_eq!((fleet.ledger.lost_steps, fleet.ledger.redone), (0, 0));
    let failed = fleet.coordinator.recoveries.iter().filter(|recovery| !recovery.planned).count();
    assert!(failed as u64 >= fleet.ledger.without_notice, "{failed} failures");
}

#[test]
fn fleet_that_is_taken_away_at_once_has_saved_and_continues() {
    let fleet = run(SMALL, "together=16 interruptions=0.2");

    assert!(fleet.ledger.with_notice >= 16, "too few interruptions happened");
    assert!(!fleet.coordinator.ends.is_empty(), "the job did not stop");
    assert!(fleet.coordinator.ends.iter().all(|end| end.contains("drained")));
    assert_eq!((fleet.ledger.lost_steps, fleet.ledger.redone), (0, 0));
}

#[test]
fn fleet_that_vanishes_at_once_loses_updates_after_the_last_checkpoint() {
    let fleet = run(SMALL, "together=16 interruptions=0.2 unnoticed=1");

    let times = fleet.ledger.without_notice / 16;
    assert!(times >= 2, "too few interruptions happened");
    let between =
        fleet.settings.save_every_steps() as f64 + fleet.settings.save() / fleet.settings.step();
    let most = times as f64 * between;
    let lost = fleet.ledger.lost_steps;
    assert!(lost > 0 && lost as f64 <= most, "{lost} of {most} updates lost");
}

#[test]
fn spare_machines_replace_those_that_are_taken_away() {
    let without = run(SMALL, "parts=1 together=1");
    let with_spares = run(SMALL, "parts=1 together=1 spares=2");

    // One virtual rank for each rank: if a rank is missing, another one has twice the work.
    let (without, with_spares) = (without.ledger.slower, with_spares.ledger.slower);
    assert!(with_spares * 4 < without, "{with_spares} ms longer with spares, {without} ms without");
}

#[test]
fn unknown_settings_are_refused_with_a_list_of_valid_ones() {
    let error = Settings::parse("node=4").unwrap_err();
    assert!(error.contains("node: no such setting") && error.contains("nodes=1024"), "{error}");
    assert!(Settings::parse("nodes=-1").is_err());
    assert!(Settings::parse("nodes=0").is_err());
    assert!(Settings::parse("step=0").is_err());
    assert_eq!(Settings::parse("nodes=128").unwrap().world_size(), 1_024);
}
