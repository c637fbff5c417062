//! The newest checkpoint in the status is never older than before, even after the coordinator was restarted, unless its
//! record was lost with the coordinator's machine.

use baton_job::{Generation, engine::Record};
use baton_recipe::Step;

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

#[derive(Default)]
pub(super) struct NewestCheckpointNeverGoesBack {
    newest: Option<(Generation, Step)>,
}

impl Invariant for NewestCheckpointNeverGoesBack {
    fn sentence(&self) -> &'static str {
        "the newest checkpoint in the status is never older than before"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        if matches!(fact, Fact::Forgotten(Record::Saved(_))) {
            self.newest = None;
        }
        // The status of a coordinator that crashed between two actions was not read.
        if !matches!(fact, Fact::EngineMoved) || cluster.coordinator.engine.is_none() {
            return Ok(());
        }
        let newest = cluster.coordinator.status.commit.as_ref();
        let newest = newest.map(|commit| (commit.generation, commit.step));
        let before = std::mem::replace(&mut self.newest, newest);
        if newest >= before {
            Ok(())
        } else {
            Err(format!("{newest:?} is reported after {before:?}"))
        }
    }
}
