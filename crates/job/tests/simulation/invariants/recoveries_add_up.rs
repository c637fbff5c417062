//! The parts of a recovery are in order and add up to its total time: no part is known before the previous one, and no
//! time is counted twice or left out. Only the report that all ranks have met may be missing.

use std::time::Duration;

use baton_job::engine::{Recovery, RecoveryParts};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct RecoveriesAddUp;

impl Invariant for RecoveriesAddUp {
    fn sentence(&self) -> &'static str {
        "the parts of a recovery are in order and add up to the total"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        if !matches!(fact, Fact::EngineMoved) {
            return Ok(());
        }
        let status = &cluster.coordinator.status;
        if status.recoveries.len() as u64 > status.recoveries_total {
            return Err(format!("{} recoveries are too few", status.recoveries_total));
        }
        // Earlier recoveries do not change any more.
        match status.recoveries.back() {
            Some(last) if !is_sound(last) => Err(format!("{last:?}")),
            _ => Ok(()),
        }
    }
}

fn is_sound(recovery: &Recovery) -> bool {
    let RecoveryParts { detect, tear_down, respawn, rendezvous, restore, first_step } =
        recovery.parts();
    let certain = [detect, tear_down, respawn, restore, first_step];
    let follow = certain.is_sorted_by_key(Option::is_none);
    let met_first = rendezvous.is_none() || respawn.is_some();
    let sum: Duration = certain.into_iter().chain([rendezvous]).flatten().sum();
    follow && met_first && recovery.total().is_none_or(|total| total == sum)
}
