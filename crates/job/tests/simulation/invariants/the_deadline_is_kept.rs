//! The engine keeps its deadline from event to event, and looks for it anew only after events that may change it.

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct TheDeadlineIsKept;

impl Invariant for TheDeadlineIsKept {
    fn sentence(&self) -> &'static str {
        "the deadline that is kept is the one that a look at everything finds"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        let (Fact::EngineMoved, Some(engine)) = (fact, &cluster.coordinator.engine) else {
            return Ok(());
        };
        let (kept, found) = (engine.deadline(), engine.deadline_by_recount());
        if kept == found { Ok(()) } else { Err(format!("{kept:?} is kept, {found:?} is found")) }
    }
}
