//! If no rank has state, a generation starts from the newest commit that the job's restore rule and its rollbacks
//! allow, and from step 0 only if there is none.

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct ResumeFromACommit;

impl Invariant for ResumeFromACommit {
    fn sentence(&self) -> &'static str {
        "without survivors, training resumes from the newest valid commit"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        let Fact::Met(meeting) = fact else { return Ok(()) };
        let restore = cluster.coordinator.restore(&cluster.plan, meeting.generation);
        let newest = cluster.store.newest(&restore).map(|(commit, _)| commit);
        let step = newest.map_or(0, |commit| commit.step.0);
        if !meeting.steps.is_empty() || meeting.start == step {
            return Ok(());
        }
        let generation = meeting.generation;
        Err(format!("generation {generation} starts at step {}, not at {newest:?}", meeting.start))
    }
}
