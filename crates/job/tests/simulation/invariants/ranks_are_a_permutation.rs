//! The ranks of a generation are 0..W, each in a different slot, and no slot runs two processes.

use std::collections::BTreeSet;

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct RanksAreAPermutation;

impl Invariant for RanksAreAPermutation {
    fn sentence(&self) -> &'static str {
        "ranks are a permutation: 0..W, each in a different slot"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::EngineMoved => {
                let ranks = &cluster.coordinator.status.ranks;
                let in_order = ranks.iter().zip(0..).all(|(status, rank)| status.rank.0 == rank);
                let slots: BTreeSet<_> =
                    ranks.iter().map(|status| (&status.node, status.local_rank)).collect();
                if in_order && slots.len() == ranks.len() {
                    return Ok(());
                }
                Err(format!("{ranks:?}"))
            }
            Fact::Met(meeting) => {
                let slots: BTreeSet<_> = meeting.slots.iter().collect();
                if slots.len() == meeting.slots.len() {
                    return Ok(());
                }
                Err(format!("generation {} met on {:?}", meeting.generation, meeting.slots))
            }
            Fact::Spawned { slot, occupied: true } => {
                Err(format!("a second process was started in slot {slot:?}"))
            }
            _ => Ok(()),
        }
    }
}
