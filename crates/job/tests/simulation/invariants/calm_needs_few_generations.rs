//! After the last fault a few generations are enough to come to the end: what went wrong is found
//! and put right, not tried again and again.

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
        self.opened += u32::from(cluster.is_calm());
        if self.opened <= MOST {
            return Ok(());
        }
        Err(format!("generation {generation} is number {} since then", self.opened))
    }
}
