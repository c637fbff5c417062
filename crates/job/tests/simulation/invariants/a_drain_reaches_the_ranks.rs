//! If all ranks train and all nodes are connected, a drain does not run out of time.

use baton_job::{
    engine::{PhaseName, Record},
    exit::Outcome,
};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact, process::ProcessPhase};

/// Time without problems, in milliseconds: longer than a drain takes once it is sent, and shorter than any drain
/// timeout.
const HEALTHY_MS: u64 = 3_000;

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
        let timed_out = reason.contains("did not stop in time");
        if timed_out && cluster.plan.network_faults.is_reliable() && all_is_well(cluster) {
            return Err(format!("the drain timed out without a problem: {reason}"));
        }
        Ok(())
    }
}

/// Whether there was no problem for [`HEALTHY_MS`].
fn all_is_well(cluster: &Cluster) -> bool {
    let status = &cluster.coordinator.status_before;
    let now = cluster.now;
    let long = now.0.saturating_sub(status.since.0) >= HEALTHY_MS;
    let is_connected = |node: &_| {
        let agent = cluster.agents.iter().find(|agent| agent.node == *node);
        agent.is_some_and(|agent| {
            cluster
                .connected_since(agent)
                .is_some_and(|since| since.0 + HEALTHY_MS <= cluster.now.0)
        })
    };
    let trains = |rank: &u32| {
        cluster.processes.iter().any(|process| {
            let assignment = process.assignment.as_ref();
            let here = assignment.is_some_and(|assignment| {
                (assignment.generation, assignment.rank.0) == (status.generation, *rank)
            });
            here && process.is_healthy() && process.phase == ProcessPhase::Training
        })
    };
    // Ranks whose save is refused by the fence of the next generation wait until the store answers.
    status.phase == PhaseName::Draining
        && !cluster.coordinator.waits_for_store
        && long
        && status.ranks.iter().all(|rank| is_connected(&rank.node) && trains(&rank.rank.0))
}
