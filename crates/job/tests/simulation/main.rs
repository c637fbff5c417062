//! Thousands of histories of a whole cluster on virtual time.
//!
//! The two machines of this crate run as they are; everything around them is a model: rank processes
//! ([`process`], [`training`]), the checkpoint store ([`store`]), connections ([`network`]) and the
//! shells that perform actions ([`coordinator`], [`agent`]). One seed decides a history: its cluster
//! ([`plan`]) and every delay, loss and fault ([`chaos`]). After a time of faults comes calm, and
//! then the job must end. [`invariants`] are checked after every event.
//!
//! ```text
//! BATON_SIM_SEED=17          runs that history alone
//! BATON_SIM_HISTORIES=1000000  runs more of them
//! ```

mod agent;
mod chaos;
mod cluster;
mod coordinator;
mod fact;
mod history;
mod invariants;
mod network;
mod plan;
mod process;
mod store;
mod tally;
mod training;

use std::{num::NonZero, str::FromStr, thread};

use crate::tally::Tally;

/// Histories of an ordinary test run.
const HISTORIES: u64 = 20_000;

fn from_environment<T: FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    match text.parse() {
        Ok(value) => Some(value),
        Err(_) => panic!("{name}={text}: expected a number"),
    }
}

/// Runs the histories of `seeds`, shared out among all cores.
fn run_all(seeds: std::ops::Range<u64>) -> Tally {
    let threads = thread::available_parallelism().map_or(1, NonZero::get) as u64;
    thread::scope(|scope| {
        let run_share = |first| {
            let mine = (seeds.start + first..seeds.end).step_by(threads as usize);
            let mut tally = Tally::default();
            for seed in mine {
                match history::run(seed) {
                    Ok(one) => tally += one,
                    Err(violation) => panic!("{violation}"),
                }
            }
            tally
        };
        let shares: Vec<_> =
            (0..threads).map(|first| scope.spawn(move || run_share(first))).collect();
        let mut sum = Tally::default();
        for share in shares {
            match share.join() {
                Ok(tally) => sum += tally,
                Err(violation) => std::panic::resume_unwind(violation),
            }
        }
        sum
    })
}

#[test]
fn every_history_keeps_the_invariants_and_ends() {
    if let Some(seed) = from_environment("BATON_SIM_SEED") {
        run_all(seed..seed + 1);
        return;
    }
    let histories = from_environment("BATON_SIM_HISTORIES").unwrap_or(HISTORIES);
    let tally = run_all(0..histories);
    println!("{}", tally.report());
}
