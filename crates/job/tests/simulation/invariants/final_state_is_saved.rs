//! A completed job has its last step in the store. A job that was drained in time, by a request or its budget, has
//! every valid step of its ranks in the store.

use baton_job::{
    engine::{PhaseName, Record},
    exit::Outcome,
};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

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
                Outcome::Drained { reason } | Outcome::LimitReached { reason },
            )) => {
                let in_time = !reason.contains("did not stop in time");
                let steps = steps(cluster);
                if in_time && steps > self.newest {
                    return Err(format!(
                        "drained at step {}, but a rank had step {steps}",
                        self.newest
                    ));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The newest step of a healthy rank that the coordinator could reach.
fn steps(cluster: &Cluster) -> u64 {
    let status = &cluster.coordinator.status_before;
    if status.phase == PhaseName::Gathering {
        // Too few ranks.
        return 0;
    }
    let attached = |node| status.nodes.iter().any(|known| known.attached && known.node == node);
    cluster
        .processes
        .iter()
        .filter(|process| process.is_healthy() && !process.ending)
        .filter(|process| attached(cluster.agents[process.agent].node.clone()))
        .filter_map(|process| cluster.good_step(process))
        .max()
        .unwrap_or_default()
}
