//! The newest checkpoint that readers are told of is never an older one than before, even after the
//! coordinator's death.

use baton_job::Generation;
use baton_recipe::Step;

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

#[derive(Default)]
pub(super) struct ReadersSeeNoStepBack {
    newest: Option<(Generation, Step)>,
}

impl Invariant for ReadersSeeNoStepBack {
    fn sentence(&self) -> &'static str {
        "the newest checkpoint told to readers is never an older one than before"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        // A machine that dies between two actions was not read.
        if !matches!(fact, Fact::EngineMoved) || cluster.coordinator.engine.is_none() {
            return Ok(());
        }
        let told = cluster.coordinator.status.commit.as_ref();
        let told = told.map(|commit| (commit.generation, commit.step));
        let before = std::mem::replace(&mut self.newest, told);
        if told >= before { Ok(()) } else { Err(format!("{told:?} is told after {before:?}")) }
    }
}
