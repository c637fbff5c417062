//! No step is lost while a survivor holds it: a generation starts at the furthest step of its
//! ranks, and no agent ends a healthy rank that holds state and has a place in the new generation.

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

pub(super) struct NoStepIsLost;

impl Invariant for NoStepIsLost {
    fn sentence(&self) -> &'static str {
        "no step is lost while a survivor holds it"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Met(meeting) => match meeting.held.iter().max() {
                Some(&furthest) if furthest != meeting.start => Err(format!(
                    "generation {} starts at step {}, but a rank holds step {furthest}",
                    meeting.generation, meeting.start
                )),
                _ => Ok(()),
            },
            // Where messages get lost, a healthy rank may well be taken for a hanging one.
            Fact::Ended { pid, wanted: true, replaced } => {
                if *replaced && !cluster.plan.temper.is_honest() {
                    return Ok(());
                }
                let step = cluster.processes[*pid].step;
                let why = if *replaced { "taken for hanging" } else { "not kept" };
                Err(format!("process {pid} holds step {step:?} and has a place, but is {why}"))
            }
            _ => Ok(()),
        }
    }
}
