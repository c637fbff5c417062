//! The parts of a recovery follow each other and add up to the whole: none is told before the one before it, and
//! no time is told twice or left out. Only that all ranks have met may have gone unheard.

use std::time::Duration;

use baton_job::engine::{Parts, Recovery};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct RecoveriesAddUp;

impl Invariant for RecoveriesAddUp {
    fn sentence(&self) -> &'static str {
        "the parts of a recovery follow each other and add up to the whole"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        if !matches!(fact, Fact::EngineMoved) {
            return Ok(());
        }
        let status = &cluster.coordinator.status;
        if status.recoveries.len() as u64 > status.recoveries_total {
            return Err(format!("{} recoveries are too few", status.recoveries_total));
        }
        // Those before it change no more.
        match status.recoveries.back() {
            Some(last) if !is_sound(last) => Err(format!("{last:?}")),
            _ => Ok(()),
        }
    }
}

fn is_sound(recovery: &Recovery) -> bool {
    let Parts { settle, tear_down, respawn, rendezvous, restore, first_step } = recovery.parts();
    let certain = [settle, tear_down, respawn, restore, first_step];
    let follow = certain.is_sorted_by_key(Option::is_none);
    let met_first = rendezvous.is_none() || respawn.is_some();
    let sum: Duration = certain.into_iter().chain([rendezvous]).flatten().sum();
    follow && met_first && recovery.total().is_none_or(|total| total == sum)
}
