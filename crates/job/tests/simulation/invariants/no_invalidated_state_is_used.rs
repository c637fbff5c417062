//! After a rollback no generation starts from a state that it invalidated, neither from a checkpoint nor from a rank.

use baton_recipe::Step;

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct NoInvalidatedStateIsUsed;

impl Invariant for NoInvalidatedStateIsUsed {
    fn sentence(&self) -> &'static str {
        "no generation starts from a state that a rollback invalidated"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        let Fact::Met(meeting) = fact else { return Ok(()) };
        let Some(state_of) = meeting.state_of else { return Ok(()) };
        let restore = cluster.coordinator.restore(&cluster.plan, meeting.generation);
        match restore.invalidated_by(state_of, Step(meeting.start)) {
            Some(rollback) => Err(format!(
                "generation {} starts with the state of generation {state_of} at step {}, which was \
                 invalidated by {rollback:?}",
                meeting.generation, meeting.start
            )),
            None => Ok(()),
        }
    }
}
