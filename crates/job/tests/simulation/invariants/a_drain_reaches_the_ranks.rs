//! Where all ranks train and all nodes are in touch, a drain does not run out of time.

use baton_job::{
    engine::{PhaseName, Record},
    exit::Outcome,
};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact, process::Doing};

/// Longer than a drain takes once it is told, and shorter than any drain's patience.
const LONG_MS: u64 = 3_000;

pub(super) struct ADrainReachesTheRanks;

impl Invariant for ADrainReachesTheRanks {
    fn sentence(&self) -> &'static str {
        "a drain reaches ranks that train"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        let Fact::Persisted(Record::Ended(
            Outcome::Drained { reason } | Outcome::LimitReached { reason },
        )) = fact
        else {
            return Ok(());
        };
        let late = reason.contains("did not stop in time");
        if late && cluster.plan.temper.is_honest() && all_is_well(cluster) {
            return Err(format!("nothing was in the way: {reason}"));
        }
        Ok(())
    }
}

/// Whether nothing has been wrong for long.
fn all_is_well(cluster: &Cluster) -> bool {
    let status = &cluster.coordinator.status_before;
    let now = cluster.now;
    let long = now.0.saturating_sub(status.since.0) >= LONG_MS;
    let in_touch = |node: &_| {
        let agent = cluster.agents.iter().find(|agent| agent.node == *node);
        agent.is_some_and(|agent| {
            cluster.in_touch_since(agent).is_some_and(|since| since.0 + LONG_MS <= cluster.now.0)
        })
    };
    let trains = |rank: &u32| {
        cluster.processes.iter().any(|process| {
            let place = process.place.as_ref();
            let here = place.is_some_and(|place| {
                (place.generation, place.rank.0) == (status.generation, *rank)
            });
            here && process.is_healthy() && process.doing == Doing::Training
        })
    };
    status.phase == PhaseName::Draining
        && long
        && status.ranks.iter().all(|rank| in_touch(&rank.node) && trains(&rank.rank.0))
}
