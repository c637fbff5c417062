//! One history: chaos, then calm, then the end; invariants are checked after every event.

use std::{fmt, time::Duration};

use crate::{
    cluster::{Cluster, Telling},
    invariants::{self, Invariant},
    tally::Tally,
};

/// Longest virtual time from calm to the end.
const PATIENCE: Duration = Duration::from_secs(1_800);

/// Events of one history; one that needs more spins.
const MOST_EVENTS: u64 = 500_000;

/// An invariant that did not hold.
pub(crate) struct Violation {
    seed: u64,
    invariant: &'static str,
    what: String,
    tail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, invariant, what, tail } = self;
        writeln!(f, "{tail}\nviolated: {invariant}\n{what}")?;
        write!(
            f,
            "rerun this history: BATON_SIM_SEED={seed} cargo test -p baton-job --test simulation"
        )
    }
}

/// Runs the history of `seed`; one that violates an invariant runs again to be told.
pub(crate) fn run(seed: u64) -> Result<Tally, Violation> {
    attempt(seed, Telling::Silent).or_else(|_| attempt(seed, Telling::Tail))
}

fn attempt(seed: u64, telling: Telling) -> Result<Tally, Violation> {
    let mut cluster = Cluster::new(seed, telling);
    let mut invariants = invariants::all();
    let mut tally = Tally::default();
    let mut events = 0;
    let failed = |cluster: &Cluster, invariant, what| {
        Err(Violation { seed, invariant, what, tail: cluster.tail() })
    };
    while !cluster.is_over() {
        let goes_on = cluster.advance();
        events += 1;
        if let Err((invariant, what)) = check(&mut invariants, &mut cluster, &mut tally) {
            return failed(&cluster, invariant, what);
        }
        let late = cluster.calm_since.is_some_and(|calm| cluster.now > calm.after(PATIENCE));
        if !goes_on || late || events > MOST_EVENTS {
            let what =
                format!("no end at {} after {events} events: {}", cluster.now, stuck(&cluster));
            return failed(&cluster, "after the last fault every job comes to an end", what);
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
            invariant.check(cluster, fact).map_err(|what| (invariant.sentence(), what))?;
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
