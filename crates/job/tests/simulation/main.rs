//! Simulates a hundred thousand histories of a whole cluster on virtual time.
//!
//! The real engine and sessions run; everything else is a model: rank processes ([`process`], [`training`]), the
//! checkpoint store ([`common::store`]), connections ([`network`]), and the programs that perform actions
//! ([`coordinator`], [`agent`]). One seed determines a history: its cluster ([`plan`]) and every delay, loss and fault
//! ([`chaos`]). After some time the faults stop, and then the job must end. The [`invariants`] are checked after every
//! event.
//!
//! ```text
//! BATON_SIM_SEED=17            cargo test -p baton-job --test simulation    only that history
//! BATON_SIM_HISTORIES=1000000  cargo test -p baton-job --test simulation    more histories
//! ```
//!
//! The simulation was tested with planted bugs. It found, among others: a launch before its record is persisted; no
//! fence, or a store that ignores it; running processes that are restarted; exits and reports of old processes,
//! launches of old generations, or reports over old connections that are not ignored; a lost restore rule; hanging
//! ranks that are forgotten during a pause; a generation that is opened before all nodes have reported, or while one is
//! away; a drain that is not sent; an end before it is persisted; an exit with running ranks; rollbacks that are left
//! out of a launch, forgotten when the coordinator restarts, or of another generation than the next; attached time that
//! is forgotten when the coordinator restarts. With a store that answers late: a generation that opens as planned although
//! nodes have left or the job ends, or without waiting for a node that got disconnected; a failure that is counted again
//! while a generation opens; a job that ends and opens one afterwards; processes of which only the number is known, and
//! the wrong one is kept.

#![allow(clippy::panic, reason = "a test fails loudly")]

mod agent;
mod chaos;
mod cluster;
#[path = "../common/mod.rs"]
mod common;
mod coordinator;
mod fact;
mod history;
mod invariants;
mod network;
mod plan;
mod process;
mod tally;
mod training;

use std::{num::NonZero, ops::Range, thread};

use crate::{history::Violation, tally::Tally};

/// Number of histories in an ordinary test run.
const HISTORIES: u64 = 100_000;

/// Minimum count of each kind of event in [`HISTORIES`] histories, so that the simulation cannot silently stop testing
/// something.
const EXPECTED: &[(u64, &str)] = &[
    (60_000, "ended completed"),
    (2_000, "ended drained"),
    (400, "ended stopped"),
    (400, "ended by bad input"),
    (40, "nodes sent away"),
    (20, "ended after too many failures"),
    (2_000, "ended diverged"),
    (800, "ended by a limit"),
    (8_000, "rollbacks"),
    (1_200, "rollbacks to before the starting state"),
    (120_000, "generations"),
    (40_000, "coordinator restarts"),
    (2_000, "coordinator restarts that ranks did not notice"),
    (40_000, "agent crashes"),
    (4_000, "drains sent"),
    (2_000, "hanging ranks replaced"),
    (12_000, "meetings from a commit"),
    (12_000, "meetings of survivors with newcomers"),
    (1_200, "meetings of survivors at different steps"),
    (1_200_000, "steps"),
    (400_000, "commits"),
    (2_000, "commits refused by the fence"),
    (4_000, "fences refused by the store"),
    (100, "ends of training found"),
    (20_000, "stale messages"),
    (40_000, "reports of skipped samples"),
    (40_000, "recoveries"),
    (20_000, "recoveries in which all ranks reported that they met"),
    (400, "recoveries of planned changes"),
    (4_000, "recoveries that lost steps"),
];

#[test]
fn every_history_keeps_the_invariants_and_ends() {
    if let Some(seed) = from_environment("BATON_SIM_SEED") {
        run_all(seed..seed + 1);
        return;
    }
    let histories = from_environment("BATON_SIM_HISTORIES").unwrap_or(HISTORIES);
    let tally = run_all(0..histories);
    println!("{}", tally.report());
    if histories >= HISTORIES {
        assert_eq!(tally.too_rare(EXPECTED), [""; 0], "happened too rarely");
    }
}

/// Runs the histories of `seeds`, distributed over all cores.
fn run_all(seeds: Range<u64>) -> Tally {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let run_share = |first: usize| {
        let mut tally = Tally::default();
        for seed in seeds.clone().skip(first).step_by(threads) {
            tally += history::run(seed)?;
        }
        Ok::<_, Violation>(tally)
    };
    let run_share = &run_share;
    thread::scope(|scope| {
        let shares: Vec<_> =
            (0..threads).map(|first| scope.spawn(move || run_share(first))).collect();
        let mut sum = Tally::default();
        for share in shares {
            match share.join() {
                Ok(Ok(tally)) => sum += tally,
                Ok(Err(violation)) => panic!("{violation}"),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        sum
    })
}

fn from_environment(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    match text.parse() {
        Ok(number) => Some(number),
        Err(error) => panic!("{name}={text}: {error}"),
    }
}
