//! Runs one history: faults, then calm, then the end; invariants are checked after every event.

use std::{fmt, time::Duration};

use crate::{
    cluster::{Cluster, Logging},
    invariants::{self, Invariant},
    tally::Tally,
};

/// Longest virtual time from the last fault to the end of the job.
const END_TIMEOUT: Duration = Duration::from_secs(1_800);

/// Most events in one history; more mean an endless loop.
const MAX_EVENTS: u64 = 500_000;

/// An invariant that did not hold.
pub(crate) struct Violation {
    seed: u64,
    invariant: &'static str,
    problem: String,
    tail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, invariant, problem, tail } = self;
        writeln!(f, "{tail}\nviolated: {invariant}\n{problem}")?;
        write!(
            f,
            "rerun this history: BATON_SIM_SEED={seed} cargo test -p baton-job --test simulation"
        )
    }
}

/// Runs the history of `seed`; if it violates an invariant, it is run again with a log.
pub(crate) fn run(seed: u64) -> Result<Tally, Violation> {
    attempt(seed, Logging::Off).or_else(|_| attempt(seed, Logging::Tail))
}

fn attempt(seed: u64, logging: Logging) -> Result<Tally, Violation> {
    let mut cluster = Cluster::new(seed, logging);
    let mut invariants = invariants::all();
    let mut tally = Tally::default();
    let mut events = 0;
    let failed = |cluster: &Cluster, invariant, problem| {
        Err(Violation { seed, invariant, problem, tail: cluster.tail() })
    };
    while !cluster.is_over() {
        let has_next = cluster.advance();
        events += 1;
        if let Err((invariant, problem)) = check(&mut invariants, &mut cluster, &mut tally) {
            return failed(&cluster, invariant, problem);
        }
        let late = cluster.calm_since.is_some_and(|calm| cluster.now > calm.after(END_TIMEOUT));
        if !has_next || late || events > MAX_EVENTS {
            let problem =
                format!("no end at {} after {events} events: {}", cluster.now, stuck(&cluster));
            return failed(&cluster, "after the last fault every job ends", problem);
        }
    }
    tally.count("histories");
    Ok(tally)
}

fn check(
    invariants: &mut [Box<dyn Invariant>],
    cluster: &mut Cluster,
    tally: &mut Tally,
) -> Result<(), (&'static str, String)> {
    let facts = std::mem::take(&mut cluster.facts);
    for fact in &facts {
        tally.observe(cluster, fact);
        for invariant in &mut *invariants {
            invariant.check(cluster, fact).map_err(|problem| (invariant.sentence(), problem))?;
        }
    }
    Ok(())
}

fn stuck(cluster: &Cluster) -> String {
    let status = &cluster.coordinator.status;
    let agents: Vec<String> = cluster
        .agents
        .iter()
        .map(|agent| agent.session.as_ref().map_or("down".to_owned(), |session| session.reason()))
        .collect();
    format!("{:?} ({}); agents: {}", status.phase, status.reason, agents.join("; "))
}
