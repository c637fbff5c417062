//! After the last fault a few generations are enough to end the job, not counting rollbacks after divergence, nor a
//! generation that a rollback replaced while it was being opened. The cause of a failure is found and removed, instead of
//! trying again and again.

use baton_job::{Generation, engine::Record};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

/// Most generations after the last fault: one for the last faults, and one for each kind of problem that is detected
/// only then.
const MAX_GENERATIONS: u32 = 5;

#[derive(Default)]
pub(super) struct CalmNeedsFewGenerations {
    opened: u32,
    /// The newest that was counted.
    counted: Option<Generation>,
}

impl Invariant for CalmNeedsFewGenerations {
    fn sentence(&self) -> &'static str {
        "after the last fault a few generations are enough"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        let Fact::Persisted(Record::Opened { generation, .. }) = fact else { return Ok(()) };
        let restore = cluster.coordinator.restore(&cluster.plan, *generation);
        let last = restore.rollbacks.last();
        let goes_back = last.is_some_and(|rollback| rollback.generation == *generation);
        if goes_back {
            self.opened -= u32::from(self.counted.take_if(|it| it == generation).is_some());
        } else if cluster.is_calm() {
            self.opened += 1;
            self.counted = Some(*generation);
        }
        if self.opened <= MAX_GENERATIONS {
            return Ok(());
        }
        Err(format!("generation {generation} is number {} since the last fault", self.opened))
    }
}
