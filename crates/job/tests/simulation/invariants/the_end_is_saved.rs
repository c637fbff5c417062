//! A job that completed has its last step in the store; one that was drained in time, by a wish or by
//! its budget, has every good step that its ranks hold.

use baton_job::{
    engine::{PhaseName, Record},
    exit::Outcome,
};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

#[derive(Default)]
pub(super) struct TheEndIsSaved {
    newest: u64,
}

impl Invariant for TheEndIsSaved {
    fn sentence(&self) -> &'static str {
        "the end is saved"
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
                let held = held(cluster);
                if in_time && held > self.newest {
                    return Err(format!(
                        "drained at step {}, but step {held} was held",
                        self.newest
                    ));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The furthest step of a healthy rank that the coordinator could have asked to save it.
fn held(cluster: &Cluster) -> u64 {
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
