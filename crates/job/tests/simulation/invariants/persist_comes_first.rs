//! Everything that a peer sees was persisted before: the opening and the fence of a generation before its launch, the
//! end of the job before a dismissal.

use baton_job::{Generation, engine::Record, message::Directive};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

#[derive(Default)]
pub(super) struct PersistComesFirst {
    opened: Generation,
    /// A generation is opened again, with other ranks, only as long as no node has learned of it.
    launched: Generation,
    fenced: Generation,
    ended: bool,
}

impl Invariant for PersistComesFirst {
    fn sentence(&self) -> &'static str {
        "everything that a peer sees was persisted before"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Persisted(Record::Opened { generation, .. }) => {
                if *generation < self.opened || *generation <= self.launched {
                    return Err(format!("generation {generation} opened after {}", self.opened));
                }
                self.opened = *generation;
                self.ended = false;
            }
            Fact::Forgotten(Record::Opened { .. }) => {
                let opened =
                    cluster.coordinator.journal.iter().rev().find_map(|record| match record {
                        Record::Opened { generation, .. } => Some(*generation),
                        _ => None,
                    });
                self.opened = opened.unwrap_or_default();
            }
            Fact::Persisted(Record::Ended(_)) => self.ended = true,
            Fact::FenceRaised(generation) => self.fenced = *generation,
            Fact::DirectiveSent(_, Directive::Launch(launch)) => {
                let generation = launch.generation;
                self.launched = self.launched.max(generation);
                if generation > self.opened {
                    return Err(format!(
                        "launch of generation {generation} before it was persisted"
                    ));
                }
                if generation > self.fenced && !launch.ranks.is_empty() {
                    return Err(format!("launch of generation {generation} before its fence"));
                }
            }
            Fact::DirectiveSent(node, Directive::Dismiss { outcome }) if !self.ended => {
                // Unless only this node is sent away.
                let status = &cluster.coordinator.status;
                let is_known = status.nodes.iter().any(|known| known.node == *node);
                if is_known || status.outcome.is_some() {
                    return Err(format!("dismissal ({outcome}) before the end was persisted"));
                }
            }
            _ => {}
        }
        Ok(())
    }
}
