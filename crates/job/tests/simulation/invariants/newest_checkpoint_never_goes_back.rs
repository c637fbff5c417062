//! The newest checkpoint in the status is valid, and never older than before, even after the coordinator was restarted,
//! unless a rollback has invalidated the one before or made it a last resort, or its record was lost with the coordinator's
//! machine.

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
        "the newest checkpoint in the status is valid, and never older than before"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        if matches!(fact, Fact::Forgotten(Record::Saved(_))) {
            self.newest = None;
        }
        // The status of a coordinator that crashed between two actions was not read.
        if !matches!(fact, Fact::EngineMoved) || cluster.coordinator.engine.is_none() {
            return Ok(());
        }
        let status = &cluster.coordinator.status;
        let newest = status.commit.as_ref();
        let newest = newest.map(|commit| (commit.generation, commit.step));
        let is_invalid = |(generation, step): (Generation, Step)| {
            status.invalidated.iter().any(|rollback| rollback.invalidates(generation, step))
        };
        if let Some(invalid) = newest.filter(|newest| is_invalid(*newest)) {
            return Err(format!("{invalid:?} is reported although a rollback has invalidated it"));
        }
        let is_suspect = |(generation, step): (Generation, Step)| {
            status.invalidated.iter().any(|rollback| rollback.suspects(generation, step))
        };
        let before = std::mem::replace(&mut self.newest, newest);
        let has_gone = before.is_some_and(|before| is_invalid(before) || is_suspect(before));
        if newest >= before || has_gone {
            Ok(())
        } else {
            Err(format!("{newest:?} is reported after {before:?}"))
        }
    }
}
