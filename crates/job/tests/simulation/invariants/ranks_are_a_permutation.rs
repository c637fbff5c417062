//! The ranks of a generation are 0..W, each on a place of its own, and no place runs two processes.

use std::collections::BTreeSet;

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct RanksAreAPermutation;

impl Invariant for RanksAreAPermutation {
    fn sentence(&self) -> &'static str {
        "ranks are a permutation: 0..W, each on a place of its own"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::EngineMoved => {
                let ranks = &cluster.coordinator.status.ranks;
                let in_order = ranks.iter().zip(0..).all(|(status, rank)| status.rank.0 == rank);
                let places: BTreeSet<_> =
                    ranks.iter().map(|status| (&status.node, status.local_rank)).collect();
                if in_order && places.len() == ranks.len() {
                    return Ok(());
                }
                Err(format!("{ranks:?}"))
            }
            Fact::Met(meeting) => {
                let places: BTreeSet<_> = meeting.places.iter().collect();
                if places.len() == meeting.places.len() {
                    return Ok(());
                }
                Err(format!("generation {} met on {:?}", meeting.generation, meeting.places))
            }
            Fact::Spawned { place, crowded: true } => {
                Err(format!("a second process was started in place {place:?}"))
            }
            _ => Ok(()),
        }
    }
}
