//! The meter shows for how long nodes were attached. Computed here independently; after a restart of the coordinator it
//! continues from the value in the journal.

use std::time::Duration;

use baton_job::{Time, engine::Record};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

#[derive(Default)]
pub(super) struct AttachedTimeAddsUp {
    /// Attached time of earlier coordinators, from the journal, and of this one.
    sum: Duration,
    /// Time since which a node is attached.
    since: Option<Time>,
    persisted: Duration,
}

impl Invariant for AttachedTimeAddsUp {
    fn sentence(&self) -> &'static str {
        "attached time adds up, over restarts of the coordinator"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Persisted(Record::Metered(spent) | Record::Paid { time: spent, .. }) => {
                if *spent < self.persisted {
                    return Err(format!("{spent:?} after {:?}", self.persisted));
                }
                self.persisted = *spent;
            }
            Fact::CoordinatorReplayed => {
                // A copy of the journal may lack the newest entry.
                let metered =
                    cluster.coordinator.journal.iter().rev().find_map(|record| match record {
                        Record::Metered(spent) | Record::Paid { time: spent, .. } => Some(*spent),
                        _ => None,
                    });
                self.persisted = metered.unwrap_or_default();
                self.sum = self.persisted;
                self.since = None;
            }
            Fact::EngineMoved if cluster.coordinator.engine.is_some() => {
                return self.moved(cluster);
            }
            _ => {}
        }
        Ok(())
    }
}

impl AttachedTimeAddsUp {
    fn moved(&mut self, cluster: &Cluster) -> Result<(), String> {
        let status = &cluster.coordinator.status;
        let now = cluster.now;
        if let Some(since) = self.since {
            self.sum += now.since(since);
        }
        let runs = status.outcome.is_none() && status.nodes.iter().any(|node| node.attached);
        self.since = runs.then_some(now);
        let shown = status.spending.meter.read(now);
        if shown == self.sum {
            return Ok(());
        }
        Err(format!("the meter shows {shown:?} instead of {:?}", self.sum))
    }
}
