//! The engine keeps its deadline from event to event, and recomputes it only after events that may change it.

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct KeptDeadlineIsCorrect;

impl Invariant for KeptDeadlineIsCorrect {
    fn sentence(&self) -> &'static str {
        "the kept deadline is equal to a recomputed one"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        let (Fact::EngineMoved, Some(engine)) = (fact, &cluster.coordinator.engine) else {
            return Ok(());
        };
        let (kept, found) = (engine.deadline(), engine.deadline_by_recount());
        if kept == found { Ok(()) } else { Err(format!("{kept:?} is kept, {found:?} is correct")) }
    }
}
