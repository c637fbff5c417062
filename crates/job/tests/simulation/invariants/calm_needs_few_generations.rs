//! After the last fault a few generations are enough to come to the end, besides those that go back
//! because training went wrong: what failed is found and put right, not tried again and again.

use baton_job::engine::Record;

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

/// One for what the faults have left, one for each kind of thing that shows only then.
const MOST: u32 = 5;

#[derive(Default)]
pub(super) struct CalmNeedsFewGenerations {
    opened: u32,
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
        self.opened += u32::from(cluster.is_calm() && !goes_back);
        if self.opened <= MOST {
            return Ok(());
        }
        Err(format!("generation {generation} is number {} since then", self.opened))
    }
}
