//! A hundred thousand histories of a whole cluster on virtual time.
//!
//! The two machines of this crate run as they are; everything around them is a model: rank processes
//! ([`process`], [`training`]), the checkpoint store ([`common::store`]), connections ([`network`]) and the
//! shells that perform actions ([`coordinator`], [`agent`]). One seed decides a history: its cluster
//! ([`plan`]) and every delay, loss and fault ([`chaos`]). After a time of faults comes calm, and
//! then the job must end. The [`invariants`] are checked after every event.
//!
//! ```text
//! BATON_SIM_SEED=17            cargo test -p baton-job --test simulation    that history alone
//! BATON_SIM_HISTORIES=1000000  cargo test -p baton-job --test simulation    more of them
//! ```
//!
//! The harness was proved by planting bugs. Caught were, among others: launch before persist, no
//! fence, a store that ignores it, survivors started anew, exits and words of older processes,
//! launches of older generations and news over older connections let in, the restore rule lost,
//! hanging ranks forgotten in a pause, a generation opened before all nodes were heard or while one
//! was away, a drain told to nobody, an end before it is persisted, an exit with ranks running,
//! rollbacks left out of a launch, forgotten with the coordinator or of another generation than the
//! next, attached time forgotten with the coordinator.

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

/// Histories of an ordinary test run.
const HISTORIES: u64 = 100_000;

/// What must happen at least so often in as many histories, so that the simulation cannot become
/// idle without anybody noticing.
const EXPECTED: &[(u64, &str)] = &[
    (60_000, "ended completed"),
    (2_000, "ended drained"),
    (400, "ended stopped"),
    (400, "ended by bad input"),
    (20, "ended worn out"),
    (2_000, "ended diverged"),
    (800, "ended by a limit"),
    (8_000, "rollbacks"),
    (1_200, "rollbacks to before the state that was begun with"),
    (120_000, "generations"),
    (40_000, "coordinator restarts"),
    (2_000, "coordinator restarts that ranks did not notice"),
    (40_000, "agent deaths"),
    (4_000, "drains told"),
    (2_000, "hanging ranks replaced"),
    (12_000, "meetings from a commit"),
    (12_000, "meetings of survivors with newcomers"),
    (1_200, "meetings of survivors at different steps"),
    (1_200_000, "steps"),
    (400_000, "commits"),
    (2_000, "commits refused by the fence"),
    (20_000, "stale messages"),
    (40_000, "words of skipped samples"),
    (40_000, "recoveries"),
    (20_000, "recoveries of ranks that all told that they met"),
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

/// Runs the histories of `seeds`, shared out among all cores.
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
