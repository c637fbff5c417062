//! After a rollback nothing of what it made worthless is ever gone on with: no generation takes its
//! state from such a checkpoint or survivor.

use baton_recipe::Step;

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct NothingCondemnedGoesOn;

impl Invariant for NothingCondemnedGoesOn {
    fn sentence(&self) -> &'static str {
        "no generation starts from a state that a rollback condemned"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        let Fact::Met(meeting) = fact else { return Ok(()) };
        let Some(state_of) = meeting.state_of else { return Ok(()) };
        let restore = cluster.coordinator.restore(&cluster.plan, meeting.generation);
        match restore.condemned_by(state_of, Step(meeting.start)) {
            Some(rollback) => Err(format!(
                "generation {} starts with the state of generation {state_of} at step {}, in spite of \
                 {rollback:?}",
                meeting.generation, meeting.start
            )),
            None => Ok(()),
        }
    }
}
