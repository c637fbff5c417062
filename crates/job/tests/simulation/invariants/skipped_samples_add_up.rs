//! Of the samples that ranks skipped, the status tells no more than were skipped and no less than its
//! own ranks told of; a rank that is gone tells nothing.

use baton_job::engine::RankState;

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct SkippedSamplesAddUp;

impl Invariant for SkippedSamplesAddUp {
    fn sentence(&self) -> &'static str {
        "skipped samples are neither lost nor counted twice, and gone ranks have no loader"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        if !matches!(fact, Fact::EngineMoved) {
            return Ok(());
        }
        let status = &cluster.coordinator.status;
        if let Some(gone) =
            status.ranks.iter().find(|r| r.state == RankState::Gone && r.loader.is_some())
        {
            return Err(format!("{gone:?}"));
        }
        let counted = status.skipped_samples;
        let told: u64 =
            status.ranks.iter().filter_map(|rank| rank.loader.as_ref()).map(|l| l.skipped).sum();
        let skipped: u64 = cluster.processes.iter().map(|process| process.skipped).sum();
        // A word that another has overtaken looks like one of a process that counts anew.
        let counted_twice = cluster.plan.temper.is_honest() && counted > skipped;
        if counted < told || counted_twice {
            return Err(format!("{counted} are counted; {told} were told, {skipped} skipped"));
        }
        Ok(())
    }
}
