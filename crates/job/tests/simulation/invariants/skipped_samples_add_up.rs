//! The status counts at most as many skipped samples as were skipped, and at least as many as its present ranks
//! reported. A rank that is gone has no loader report.

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
        let reported: u64 =
            status.ranks.iter().filter_map(|rank| rank.loader.as_ref()).map(|l| l.skipped).sum();
        let skipped: u64 = cluster.processes.iter().map(|process| process.skipped).sum();
        // A report that arrives late looks like that of a new process, whose count starts at zero.
        let counted_twice = cluster.plan.network_faults.is_reliable() && counted > skipped;
        if counted < reported || counted_twice {
            return Err(format!(
                "{counted} are counted; {reported} were reported, {skipped} skipped"
            ));
        }
        Ok(())
    }
}
