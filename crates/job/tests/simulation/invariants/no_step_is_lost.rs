//! No step is lost while a rank has it: a generation starts at the newest step of its ranks, and no agent ends a
//! healthy rank with state that is assigned in the new generation.

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct NoStepIsLost;

impl Invariant for NoStepIsLost {
    fn sentence(&self) -> &'static str {
        "no step is lost while a rank has it"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Met(meeting) => match meeting.steps.iter().max() {
                Some(&newest) if newest != meeting.start => Err(format!(
                    "generation {} starts at step {}, but a rank has step {newest}",
                    meeting.generation, meeting.start
                )),
                _ => Ok(()),
            },
            // If messages are lost, a healthy rank may seem to hang.
            Fact::Ended { pid, useful: true, replaced } => {
                if *replaced && !cluster.plan.network_faults.is_reliable() {
                    return Ok(());
                }
                let step = cluster.processes[*pid].step;
                let problem = if *replaced { "was replaced as hanging" } else { "was not kept" };
                Err(format!("process {pid} has step {step:?} and an assignment, but {problem}"))
            }
            _ => Ok(()),
        }
    }
}
