//! A completed job has its last step in the store. A job that was drained in time, by a request or its budget, or that
//! another try cannot help, has every valid step of its ranks in the store.

use baton_job::{
    engine::{RankState, RankStatus, Record},
    exit::{Class, Failure, Outcome},
};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact, process::Process};

#[derive(Default)]
pub(super) struct FinalStateIsSaved {
    newest: u64,
}

impl Invariant for FinalStateIsSaved {
    fn sentence(&self) -> &'static str {
        "the final state is saved"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Committed { step, .. } => self.newest = *step,
            Fact::Persisted(Record::Ended(Outcome::Completed))
                if self.newest != cluster.plan.total_steps =>
            {
                return Err(format!("completed, but step {} is the last saved", self.newest));
            }
            Fact::Persisted(Record::Ended(
                Outcome::Drained { reason }
                | Outcome::LimitReached { reason }
                | Outcome::Failed { failure: Failure { class: Class::BadInput, message: reason } },
            )) => {
                let status = &cluster.coordinator.status_before;
                let mut rollbacks =
                    status.incidents.iter().filter_map(|incident| incident.rollback.as_ref());
                // The state has diverged.
                if rollbacks.any(|rollback| rollback.generation > status.generation) {
                    return Ok(());
                }
                let in_time =
                    !reason.contains("did not stop in time") && !reason.contains("saving failed: ");
                let steps = steps(cluster).max().unwrap_or_default();
                if in_time && steps > self.newest {
                    return Err(format!(
                        "ended with step {}, but a rank had step {steps}",
                        self.newest
                    ));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The step of each healthy rank that the coordinator could reach and has seen to hold state.
fn steps(cluster: &Cluster) -> impl Iterator<Item = u64> {
    let status = &cluster.coordinator.status_before;
    let attached = |node| status.nodes.iter().any(|known| known.attached && known.node == node);
    let in_flight = |process: &Process| {
        let is_it = |rank: &&RankStatus| {
            let node = &cluster.agents[process.agent].node;
            rank.node == *node && rank.local_rank == process.local_rank
        };
        let state = status.ranks.iter().find(is_it).map(|rank| rank.state);
        process.state_of == status.generation && state == Some(RankState::Meeting)
    };
    cluster
        .processes
        .iter()
        .filter(|process| process.is_healthy() && !process.ending)
        .filter(move |process| attached(cluster.agents[process.agent].node.clone()))
        .filter(move |process| !in_flight(process))
        .filter_map(|process| cluster.good_step(process))
}
